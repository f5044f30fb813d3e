"""What an exported model holds, read from its files alone (no torch, no engine)."""

from __future__ import annotations

import ctypes
import json
import mmap
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from quantmoe.custom_ops.layouts import LAYOUTS
from quantmoe.custom_ops.op import DOMAIN, MoESpec
from quantmoe.exporter.passes.external_data import HASH, new_hash

_CHUNK = 1 << 24


class ModelError(ValueError):
    """An exported model that is not what it says it is; the message names file, tensor, found and expected."""


def model_path(path: str | Path) -> Path:
    """The .onnx file of a folder or file argument."""
    path = Path(path)
    path = path / "model.onnx" if path.is_dir() else path
    if not path.is_file():
        raise ModelError(f"{path}: missing; expected an exported model or its folder")
    return path


def inspect(path: str | Path, verify: bool = False) -> dict[str, Any]:
    """Describes every QuantMoE node and the other weights.

    Args:
        path: the model or its folder.
        verify: read all weights and compare their hashes.

    Returns:
        ``layers`` (one dict a node: name, module, format, attributes, sizes, bytes, bits_per_weight), ``dense`` (large
        tensors outside the experts), ``files`` (of weights: bytes, and how many of them are in memory), ``metadata``
        and, with ``verify``, ``verified``: how many hashes were right.

    Raises:
        ModelError: a file is missing or too short, a tensor's size is not what its node's attributes say, a wrong hash.
    """
    path = model_path(path)
    try:
        model = ir.load(path)
    except Exception as error:  # protobuf's own, by backend
        raise ModelError(f"{path}: not an ONNX model: {error}") from None
    initializers = model.graph.initializers
    tensors = {name: value.const_value for name, value in initializers.items()}
    external = {name: tensor for name, tensor in tensors.items() if isinstance(tensor, ir.ExternalTensor)}
    for name, tensor in external.items():
        location = str(tensor.location)
        if location in ("", ".", "..") or "/" in location or "\\" in location or "\0" in location:
            raise ModelError(f"{path}: {name} is in {location!r}, expected the name of a file beside the model")
        file = path.parent / location
        begin, length = tensor.offset or 0, tensor.length or tensor.nbytes  # a length may be left out
        end = begin + length
        if begin < 0 or length != tensor.nbytes:
            raise ModelError(f"{path}: {name} has {length} bytes at {begin}, its shape and type take {tensor.nbytes}")
        if not file.is_file():
            raise ModelError(f"{file}: missing; {path.name} keeps {name} there")
        if file.stat().st_size < end:
            raise ModelError(f"{file}: {file.stat().st_size} bytes; {name} ends at byte {end} (truncated?)")

    layers, packed = [], set()
    for node in model.graph:
        if node.domain == DOMAIN and node.op_type == "QuantMoE":
            try:
                layers.append(_layer(path, node))
            except ModelError:
                raise
            except (
                ValueError,
                TypeError,
                KeyError,
                AttributeError,
                ArithmeticError,
            ) as error:  # a field of another type
                raise ModelError(f"{path}: node {node.name} cannot be read: {error!r}") from None
            packed |= {value.name for value in node.inputs[3:5] if value is not None}
    dense = [
        {
            "name": name,
            "dtype": str(tensor.dtype),
            "shape": list(tensor.shape.numpy()),
            "bytes": int(tensor.nbytes),
            "dequantized_from": tensor.metadata_props.get("dequantized_from"),
        }
        for name, tensor in external.items()
        if name not in packed
    ]
    found: dict[str, Any] = {
        "model": str(path),
        "metadata": dict(model.metadata_props),
        "layers": layers,
        "dense": dense,
    }
    found["files"] = [
        {"name": name, "bytes": (path.parent / name).stat().st_size, "resident": resident(path.parent / name)}
        for name in sorted({str(tensor.location) for tensor in external.values()})
    ]
    if verify:
        found["verified"] = sum(_verify(path, name, tensor) for name, tensor in external.items())
    return found


def resident(path: Path) -> int | None:
    """Bytes of a file that the system holds in memory, whoever read them; None where it does not say."""
    size = path.stat().st_size
    if not size or not sys.platform.startswith("linux"):
        return None
    libc, page = ctypes.CDLL(None), mmap.PAGESIZE
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        whole = np.frombuffer(mapped, np.uint8)
        pages = np.zeros(-(-size // page), np.uint8)
        status = libc.mincore(
            ctypes.c_void_p(whole.ctypes.data), ctypes.c_size_t(size), ctypes.c_void_p(pages.ctypes.data)
        )
        del whole
    return min(size, int((pages & 1).sum()) * page) if status == 0 else None


def _layer(path: Path, node: ir.Node) -> dict[str, Any]:
    where = f"{path}: node {node.name}"
    try:
        spec = MoESpec.from_attributes({name: _attribute(attribute) for name, attribute in node.attributes.items()})
    except ValueError as error:
        raise ModelError(f"{where}: {error}") from None
    layout = LAYOUTS.get(spec.w13.layout)
    if layout is None:
        raise ModelError(f"{where}: layout {spec.w13.layout!r}; this release knows {', '.join(LAYOUTS)}")
    sizes: dict[str, Any] = {}
    for name, value in zip(("w13", "w2"), node.inputs[3:5], strict=True):
        tensor = value.const_value if value is not None else None
        if value is None or tensor is None:
            raise ModelError(f"{where}: {name} is not an initializer")
        try:
            shape, words = list(tensor.shape.numpy()), layout.row_bytes(spec, name) // 4
        except (KeyError, ZeroDivisionError):
            projection = getattr(spec, name)
            raise ModelError(
                f"{where}: layout {projection.layout} does not carry {projection.format} "
                f"with group_size {projection.group_size} and {projection.scale_type} scales ({name})"
            ) from None
        most = spec.num_experts - spec.expert_offset
        if len(shape) != 2 or shape[1] != words or not 1 <= shape[0] <= most:
            raise ModelError(f"{where}: {name} has shape {shape}, its attributes say [1 to {most}, {words}]")
        recorded = tensor.metadata_props.get("spec")
        packed_as = spec.attributes() if recorded is None else json.loads(recorded)
        for key, found in spec.attributes().items():
            packed = packed_as.get(key)
            # ONNX keeps floats in 32 bits
            same = np.float32(packed) == np.float32(found) if isinstance(found, float) else packed == found
            if not same:
                raise ModelError(f"{where}: {key} is {found!r}, {value.name} was packed with {packed!r}")
        sizes[name] = {"tensor": value.name, "shape": shape, "bytes": int(tensor.nbytes)}
        metadata = tensor.metadata_props
    experts = sizes["w13"]["shape"][0]
    weights = experts * spec.hidden_size * spec.intermediate_size * (2 + spec.gated)
    size = sizes["w13"]["bytes"] + sizes["w2"]["bytes"]
    return {
        "node": node.name,
        "module": metadata.get("module"),
        "format": metadata.get("format"),
        "attributes": spec.attributes(),
        **sizes,
        "bytes": size,
        "bits_per_weight": 8 * size / weights,
    }


def _attribute(attribute: ir.Attr) -> Any:
    return attribute.as_string() if attribute.type == ir.AttributeType.STRING else attribute.value


def _verify(path: Path, name: str, tensor: ir.ExternalTensor) -> bool:
    recorded = tensor.metadata_props.get("hash")
    if recorded is None:
        return False
    digest, left = new_hash(), tensor.length or tensor.nbytes
    with open(path.parent / tensor.location, "rb") as file:
        file.seek(tensor.offset or 0)
        while left and (chunk := file.read(min(left, _CHUNK))):
            digest.update(chunk)
            left -= len(chunk)
    if recorded != f"{HASH}:{digest.hexdigest()}":
        raise ModelError(
            f"{path.parent / tensor.location}: {name} has hash {HASH}:{digest.hexdigest()}, {path.name} says {recorded}"
        )
    return True
