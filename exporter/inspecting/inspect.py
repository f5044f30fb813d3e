"""Contents of an exported model, read from its files alone (no torch, no engine)."""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from quantmoe.custom_ops import native
from quantmoe.custom_ops.layouts import LAYOUTS, cpu_panel, qmoe
from quantmoe.custom_ops.op import (
    DOMAIN,
    AttentionSpec,
    ConvSpec,
    DeltaSpec,
    IndexerSpec,
    LinearSpec,
    MoESpec,
    RouterSpec,
    RoutingSpec,
    SpaceSpec,
    Spec,
    inputs,
)
from quantmoe.exporter.errors import ModelError
from quantmoe.exporter.folder import tensor_metadata as keys
from quantmoe.exporter.folder.files import EMBEDDINGS_MODEL, MODEL, MTP_MODEL, VISION_MODEL
from quantmoe.exporter.folder.metadata import FILES, PLAIN_ATTENTION
from quantmoe.exporter.folder.model_file import attribute_value, load, model_path
from quantmoe.exporter.folder.record import HASH, check_recorded, is_recorded, new_hash
from quantmoe.exporter.memory import doing

if TYPE_CHECKING:
    import onnx_ir as ir

#: operators with a recurrent state behind a CausalConv
_RECURRENT: dict[str, type[DeltaSpec] | type[SpaceSpec]] = {"GatedDelta": DeltaSpec, "StateSpace": SpaceSpec}
_CHUNK = 1 << 24
SpecType = TypeVar("SpecType", bound=Spec)
#: operators of ONNX Runtime's own whose weights an export packs
OTHERS = {("com.microsoft", "QMoE"), ("com.microsoft", "MatMulNBits")}


# over 60 lines: a third say what its result has
def inspect(
    path: str | Path, verify: bool = False, progress: Callable[[int, int], None] = lambda done, total: None
) -> dict[str, Any]:
    """Describe the nodes with weights, the caches, the files and the metadata of an exported model.

    Args:
        path: the model or its folder.
        verify: read all weights and compare their hashes.
        progress: called with the bytes read for ``verify`` and with all bytes.

    Returns:
        A dict with these keys. Lists have one dict for each node, with its name and attributes.

        - ``layers``: QuantMoE nodes, or QMoE of ``--target ort``, with module, format, sizes, bytes and
          bits_per_weight. ``shared`` has the names of the last experts if they are a shared expert. If a map
          placed experts, or a layer has several nodes, ``experts`` has the ``ids`` of the node's experts and the number
          ``routed``; else None. ``external``: the experts are only named, not held. ``top_k`` is the router's, shared
          experts included; None without a router.
        - ``linears``: QuantLinear or MatMulNBits nodes, likewise. ``rows``: rows of each module, if there are several.
        - QMoE and MatMulNBits nodes have ``tensors`` by part instead of one tensor.
        - ``routers``: MoERouting and MoERouter nodes.
        - ``attention``: CachedAttention nodes, with the type of the cache and its bytes a token.
        - ``indexers``: SparseIndexer nodes, with the bytes a token of their keys.
        - ``linear_attention``: GatedDelta and StateSpace nodes, and CausalConv nodes without one. ``width`` is the
          convolution's, ``state_bytes`` the bytes of all states after one token. States that standard nodes read have
          the input's name, sizes and a width of 0.
        - ``plain_attention``: attention module that is standard nodes -> reason.
        - ``dense``: other large tensors. ``dequantized_because`` says why a tensor that the checkpoint quantizes is
          float. ``table``: only rows of the tensor are read.
        - ``files``: files of weights, their bytes, and how many bytes are in memory.
        - ``metadata``: the model's metadata.
        - ``verified``, with ``verify``: number of correct hashes.
        - ``mtp``, ``vision``, ``embeddings``: these dicts of mtp.onnx, vision.onnx and embeddings.onnx, if they exist.

    Raises:
        ModelError: a file is missing or too short, a hash is wrong, or a tensor's size differs from its node's
            attributes. With ``verify``: a file beside the model is missing or belongs to another export.
    """
    import onnx_ir as ir  # it imports sympy, half a second

    path = model_path(path)
    model = load(path)
    tensors = {name: value.const_value for name, value in model.graph.initializers.items()}
    external = {name: tensor for name, tensor in tensors.items() if isinstance(tensor, ir.ExternalTensor)}
    nodes, packed = _nodes(path, model)
    places = {name: (str(tensor.location), tensor.offset) for name, tensor in external.items()}
    taken = {place for name, place in places.items() if name in packed}
    nodes["linear_attention"] += _plain_states(model)
    for name, place in places.items():  # several tensors may be the same bytes, as different types
        if name not in packed and place in taken:
            packed.add(name)
        taken.add(place)
    dense = [
        {
            "name": name,
            "dtype": str(tensor.dtype),
            "shape": list(tensor.shape.numpy()),
            "bytes": int(tensor.nbytes),
            "dequantized_from": tensor.metadata_props.get(keys.DEQUANTIZED_FROM),
            "dequantized_because": tensor.metadata_props.get(keys.DEQUANTIZED_BECAUSE),
            "table": all(use.node.op_type == "Gather" for use in model.graph.initializers[name].uses()),
        }
        for name, tensor in tensors.items()
        if name not in packed
        and tensor is not None
        and (isinstance(tensor, ir.ExternalTensor) or keys.DEQUANTIZED_FROM in tensor.metadata_props)
    ]
    found: dict[str, Any] = {
        "model": str(path),
        "metadata": dict(model.metadata_props),
        **nodes,
        "plain_attention": _reasons(path, model.metadata_props.get(PLAIN_ATTENTION, "{}")),
        "dense": dense,
    }
    found["files"] = [
        {"name": name, "bytes": (path.parent / name).stat().st_size, "resident": resident(path.parent / name)}
        for name in sorted({str(tensor.location) for tensor in external.values()})
    ]
    if verify:
        sizes = [tensor.length or tensor.nbytes for tensor in external.values()]
        found["verified"] = 0
        for at, (name, tensor) in enumerate(external.items()):
            found["verified"] += _verify(path, name, tensor)
            progress(sum(sizes[: at + 1]), sum(sizes))
    for beside in (path.with_name(name) for name in (MTP_MODEL, VISION_MODEL, EMBEDDINGS_MODEL)):
        if path.name != MODEL:
            continue
        there, props = beside.is_file(), model.metadata_props
        if verify and (is_recorded(props, beside.name) or (there and FILES in props)):
            check_recorded(path, props, beside)
        if there:
            found[beside.stem] = inspect(beside, verify, progress)
    return found


def _nodes(path: Path, model: ir.Model) -> tuple[dict[str, list[Any]], set[str | None]]:
    """Return :func:`inspect`'s description of each kind of node, and the names of the packed weights."""
    kinds = ("layers", "linears", "routers", "attention", "indexers", "linear_attention")
    found: dict[str, list[Any]] = {kind: [] for kind in kinds}
    layers, linears, routers, attention, indexers, linear_attention = found.values()
    packed: set[str | None] = set()
    for node in model.graph:
        if node.domain != DOMAIN and (node.domain, node.op_type) not in OTHERS:
            continue
        try:
            if node.domain != DOMAIN:
                described = _packed(path, node)
                if described is not None:
                    (layers if node.op_type == "QMoE" else linears).append(described)
                    packed |= {t for p in ("w13", "w2", "w") for t in described.get(p, {}).get("tensors", {}).values()}
            elif node.op_type == "QuantMoE":
                layers.append(_layer(path, node))
                packed |= {value.name for value in node.inputs[3:5] if value is not None}
            elif node.op_type == "QuantLinear":
                linears.append(_linear(path, node))
                packed.add(node.inputs[1].name)  # type: ignore[union-attr]
            elif node.op_type == "MoERouting":
                routing = _spec(path, node, RoutingSpec)
                _check_runs(path, node, routing, {})
                routers.append({"node": node.name, "attributes": routing.attributes()})
            elif node.op_type == "MoERouter":
                router = _spec(path, node, RouterSpec)
                _check_runs(path, node, router.routing, {})
                routers.append({"node": node.name, "attributes": router.attributes()})
            elif node.op_type == "CachedAttention":
                attention.append(_attention(path, node))
            elif node.op_type == "SparseIndexer":
                indexers.append(_indexer(path, node))
            elif node.op_type in _RECURRENT:
                linear_attention.append(_linear_attention(path, node))
            elif node.op_type == "CausalConv" and not any(u.node.op_type in _RECURRENT for u in node.outputs[0].uses()):
                linear_attention.append(_short_convolution(path, node))
        except ModelError:
            raise
        except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError) as error:
            # a field of another type
            raise ModelError(f"{path}: node {node.name} cannot be read: {error!r}") from None
    return found, packed


def resident(path: Path) -> int | None:
    """Return how many bytes of a file are in memory, whoever read them; None if the system does not say.

    Linux tells only the file's owner or who may write it; others are told that all of it is (mincore(2)).
    """
    size = path.stat().st_size
    if not size or not sys.platform.startswith("linux") or not os.access(path, os.W_OK):
        return None
    libc, page = ctypes.CDLL(None), mmap.PAGESIZE
    with doing(str(path)), open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        whole = np.frombuffer(mapped, np.uint8)
        pages = np.zeros(-(-size // page), np.uint8)
        status = libc.mincore(
            ctypes.c_void_p(whole.ctypes.data), ctypes.c_size_t(size), ctypes.c_void_p(pages.ctypes.data)
        )
        del whole
    return min(size, int((pages & 1).sum()) * page) if status == 0 else None


def _layer(path: Path, node: ir.Node) -> dict[str, Any]:
    spec = _spec(path, node, MoESpec)
    names = dict(zip(("w13", "w2"), node.inputs[3:5], strict=True))
    most = spec.num_experts - spec.expert_offset
    sizes, metadata = _sizes(path, node, spec, moe=spec, inputs=names, most=most)
    per_expert = spec.hidden_size * spec.intermediate_size * (2 + spec.gated)
    shared = json.loads(metadata.get(keys.SHARED, "[]"))
    if not isinstance(shared, list) or len(shared) > spec.num_experts:
        raise ModelError(f"{path}: node {node.name}: shared is {shared}, expected the names of its last experts")
    experts = json.loads(metadata.get(keys.EXPERTS, "null"))
    held = sizes["w13"]["shape"][0]
    if experts is not None and not (isinstance(experts, dict) and len(experts.get("ids", ())) == held):
        raise ModelError(f"{path}: node {node.name}: experts are {experts}, expected the ids of {held}")
    return _description(node, spec, sizes, metadata, held * per_expert) | {
        "shared": shared,
        "experts": experts,
        "external": "w13_external" in node.attributes,
        "top_k": _top_k(node),
    }


def _packed(path: Path, node: ir.Node) -> dict[str, Any] | None:
    """Return a QMoE or MatMulNBits with tensors of layout ``qmoe``; None if no export marked them."""
    values = {i: v for i, v in enumerate(node.inputs) if v is not None and v.const_value is not None}
    codes = values.get(1 if node.op_type == "MatMulNBits" else qmoe.INPUTS["w13", "codes"])
    metadata = _metadata(codes)
    if metadata.get(keys.LAYOUT) != qmoe.NAME:
        return None
    if (version := metadata.get(keys.LAYOUT_VERSION)) != str(qmoe.VERSION):
        raise ModelError(
            f"{path}: node {node.name}: layout_version is {version}, this release knows {qmoe.VERSION}; export again"
        )
    try:
        return (_matmul_nbits if node.op_type == "MatMulNBits" else _qmoe)(path, node, values, metadata)
    except ModelError:
        raise
    except ValueError as error:
        raise ModelError(f"{path}: node {node.name}: {error}") from None


def _qmoe(path: Path, node: ir.Node, values: Mapping[int, ir.Value], metadata: dict[str, str]) -> dict[str, Any]:
    own = {name: attribute_value(attribute) for name, attribute in node.attributes.items()}
    types = {p: _metadata(values[qmoe.INPUTS[p, "scales"]])[keys.SCALE_TYPE] for p in ("w13", "w2")}
    spec = qmoe.moe_spec(own, {i: _shape(v) for i, v in values.items()}, types)
    parts: dict[str, dict[str, ir.Value]] = {"w13": {}, "w2": {}}
    for (projection, part), index in qmoe.INPUTS.items():
        if index in values:
            parts[projection][part] = values[index]
    sizes = {projection: _tensors(spec, projection, found) for projection, found in parts.items()}
    weights = 3 * spec.num_experts * spec.hidden_size * spec.intermediate_size
    return _description(node, spec, sizes, metadata, weights) | {
        "shared": [],
        "experts": None,
        "external": False,
        "top_k": own["k"],
    }


def _matmul_nbits(
    path: Path, node: ir.Node, values: Mapping[int, ir.Value], metadata: dict[str, str]
) -> dict[str, Any]:
    parts = {part: values[i] for part, i in (("codes", 1), ("scales", 2), ("zero_points", 3)) if i in values}
    bias = f"{str(values[1].name).removesuffix('.b')}.bias"  # it is added by a node of its own
    added = [value for use in node.outputs[0].uses() if use.node.op_type == "Add" for value in use.node.inputs]
    if (found := next((value for value in added if value is not None and value.name == bias), None)) is not None:
        parts["bias"] = found
    own = {name: attribute_value(attribute) for name, attribute in node.attributes.items()}
    spec = qmoe.linear_spec(own, metadata[keys.SCALE_TYPE], "zero_points" in parts, "bias" in parts)
    sizes = {"w": _tensors(spec.moe, "w2", parts)}
    description = _description(node, spec, sizes, metadata, spec.in_features * spec.out_features)
    return description | _rows(path, node, spec, metadata)


def _metadata(value: ir.Value | None) -> dict[str, str]:
    tensor = value.const_value if value is not None else None
    return {} if tensor is None else dict(tensor.metadata_props)


def _shape(value: ir.Value) -> list[int]:
    assert value.const_value is not None
    return list(value.const_value.shape.numpy())


def _tensors(spec: MoESpec, projection: str, values: Mapping[str, ir.Value]) -> dict[str, Any]:
    """Return a projection's tensors by part, and their bytes together."""
    for name, part in qmoe.parts(spec, projection).items():
        size, found = spec.num_experts * prod(part.shape), prod(_shape(values[name])) if name in values else 0
        if found != size:
            raise ValueError(f"{name} of {projection} has {found} elements, its attributes say {size}")
    tensors = [value.const_value for value in values.values()]
    return {
        "tensors": {name: str(value.name) for name, value in values.items()},
        "bytes": sum(int(tensor.nbytes) for tensor in tensors if tensor is not None),
    }


def _top_k(node: ir.Node) -> int | None:
    router = node.inputs[1].producer() if node.inputs[1] is not None else None
    while router is not None and router.op_type in ("Gather", "Add"):  # passes/placement.py
        ids = router.inputs[int(router.op_type == "Gather")]
        router = ids.producer() if ids is not None else None
    if router is None or router.domain != DOMAIN:
        return None
    found = (router.attributes.get(name) for name in ("top_k", "shared_experts"))
    return sum(attribute.as_int() for attribute in found if attribute is not None)


def _linear(path: Path, node: ir.Node) -> dict[str, Any]:
    spec = _spec(path, node, LinearSpec)
    sizes, metadata = _sizes(path, node, spec, moe=spec.moe, inputs={"w": node.inputs[1]}, most=1)
    more = _rows(path, node, spec, metadata)
    return _description(node, spec, sizes, metadata, spec.in_features * spec.out_features) | more


def _rows(path: Path, node: ir.Node, spec: LinearSpec, metadata: Mapping[str, str]) -> dict[str, Any]:
    """Return the modules whose rows a linear has, in their order."""
    rows = json.loads(metadata.get(keys.ROWS, "{}"))
    if not isinstance(rows, dict) or (rows and sum(rows.values()) != spec.out_features):
        raise ModelError(f"{path}: node {node.name}: rows are {rows}, expected {spec.out_features} in all")
    heads, first = int(metadata.get(keys.GATED_HEADS, "0")), next(iter(rows.values()), spec.out_features)
    if heads < 0 or (heads and first % (2 * heads * spec.w.block_n)):
        raise ModelError(f"{path}: node {node.name}: gated_heads is {heads}, expected a part of {first} rows")
    return {"rows": rows} | ({"gated_heads": heads} if heads else {})


def _attention(path: Path, node: ir.Node) -> dict[str, Any]:
    spec = _spec(path, node, AttentionSpec)
    _check_runs(path, node, spec, {})
    held = _type(path, node, 1)
    width = spec.kv_num_heads * sum(spec.cache_widths)
    return {
        "node": node.name,
        "attributes": spec.attributes(),
        "cache": (held.name.lower() if spec.cache_format == "none" else spec.cache_format)
        + (" in blocks" if spec.block_size else ""),
        "bytes_per_token": int(width * held.itemsize),
    }


def _indexer(path: Path, node: ir.Node) -> dict[str, Any]:
    spec = _spec(path, node, IndexerSpec)
    _check_runs(path, node, spec, {})
    held = spec.head_size * _type(path, node, 3).itemsize
    return {"node": node.name, "attributes": spec.attributes(), "bytes_per_token": int(held)}


def _linear_attention(path: Path, node: ir.Node) -> dict[str, Any]:
    spec = _spec(path, node, _RECURRENT[node.op_type])
    _check_runs(path, node, spec, {})
    before = node.inputs[0].producer() if node.inputs[0] is not None else None
    if before is None or before.op_type != "CausalConv":
        raise ModelError(f"{path}: node {node.name}: {inputs(node.op_type)[0][0]} is not of a CausalConv")
    found = _short_convolution(path, before)
    if isinstance(spec, DeltaSpec):
        state = 4 * spec.num_v_heads * spec.k_head_size * spec.v_head_size
    else:
        state = 4 * spec.num_heads * spec.state_size * spec.head_size
    return found | {
        "node": node.name,
        "attributes": spec.attributes(),
        "state_bytes": state + found["state_bytes"],
    }


def _short_convolution(path: Path, node: ir.Node) -> dict[str, Any]:
    conv = _spec(path, node, ConvSpec)
    _check_runs(path, node, conv, {})
    return {
        "node": node.name,
        "attributes": conv.attributes(),
        "width": conv.width,
        "state_bytes": int(conv.channels * (conv.width - 1) * _type(path, node, 3).itemsize),
    }


def _plain_states(model: ir.Model) -> Iterator[dict[str, Any]]:
    """Yield the recurrent states that standard nodes read, in lightning attention."""
    for value in model.graph.inputs:
        nodes = {use.node.op_type for use in value.uses()}
        sizes = [size for size in value.shape or () if isinstance(size, int)]  # all but the batch
        if str(value.name).endswith(".recurrent_state") and not nodes & _RECURRENT.keys() and len(sizes) in (3, 4):
            heads, key, width = sizes[-3:]
            named = {"num_k_heads": heads, "num_v_heads": heads, "k_head_size": key, "v_head_size": width}
            yield {
                "node": value.name,
                "attributes": named | {"state_window": sizes[0] if len(sizes) == 4 else 1},
                "width": 0,
                "state_bytes": 4 * heads * key * width,
            }


def _type(path: Path, node: ir.Node, index: int) -> ir.DataType:
    """Return the type of an input that is no weight."""
    value = node.inputs[index]
    if value is None or value.dtype is None:
        raise ModelError(f"{path}: node {node.name}: {inputs(node.op_type)[index][0]} has no type")
    return value.dtype


def _reasons(path: Path, text: str) -> dict[str, str]:
    """Return the modules and reasons that an export wrote."""
    try:
        found = json.loads(text)
        if isinstance(found, dict) and all(isinstance(value, str) for value in found.values()):
            return found
    except (ValueError, RecursionError):
        pass
    raise ModelError(f"{path}: plain_attention is {text[:80]!r}, expected reasons by module")


def _spec(path: Path, node: ir.Node, kind: type[SpecType]) -> SpecType:
    try:
        return kind.from_attributes({name: attribute_value(attribute) for name, attribute in node.attributes.items()})
    except ValueError as error:
        raise ModelError(f"{path}: node {node.name}: {error}") from None


def _check_runs(path: Path, node: ir.Node, spec: Spec, words: Mapping[str, int]) -> None:
    if reason := native.refusal(spec, words):
        raise ModelError(f"{path}: node {node.name}: {reason}")


def _sizes(
    path: Path, node: ir.Node, spec: Spec, *, moe: MoESpec, inputs: dict[str, ir.Value | None], most: int
) -> tuple[dict[str, Any], dict[str, str]]:
    """Check the packed inputs (by projection; a linear's "w" is w2 of ``moe``); return their sizes and metadata."""
    where = f"{path}: node {node.name}"
    sizes: dict[str, Any] = {}
    metadata: dict[str, str] = {}
    for name, value in inputs.items():
        projection = getattr(spec, name)
        layout = LAYOUTS.get(projection.layout)
        if layout is None:
            raise ModelError(f"{where}: layout {projection.layout!r}; this release knows {', '.join(LAYOUTS)}")
        if projection.layout_version != layout.VERSION:
            later = projection.layout_version > layout.VERSION
            raise ModelError(
                f"{where}: {name}_layout_version is {projection.layout_version}, this release knows {layout.VERSION}; "
                + ("a later one of quantmoe wrote it" if later else "export the model again")
            )
        tensor = value.const_value if value is not None else None
        if value is None or tensor is None:
            raise ModelError(f"{where}: {name} is not an initializer")
        try:
            shape = list(tensor.shape.numpy())
            words = layout.row_bytes(moe, "w2" if name == "w" else name) // 4
        except (KeyError, ZeroDivisionError):
            raise ModelError(
                f"{where}: layout {projection.layout} does not carry {projection.format} "
                f"with group_size {projection.group_size} and {projection.scale_type} scales ({name})"
            ) from None
        except ValueError as error:  # what the library says
            raise ModelError(f"{where}: {name}: {error}") from None
        if len(shape) != 2 or shape[1] != words or not 1 <= shape[0] <= most:
            raise ModelError(f"{where}: {name} has shape {shape}, its attributes say [1 to {most}, {words}]")
        recorded = tensor.metadata_props.get(keys.SPEC)
        packed_as = spec.attributes() if recorded is None else json.loads(recorded)
        for key, found in spec.attributes().items():
            packed = packed_as.get(key)
            # ONNX keeps floats in 32 bits
            same = np.float32(packed) == np.float32(found) if isinstance(found, float) else packed == found
            if not same:
                raise ModelError(f"{where}: {key} is {found!r}, {value.name} was packed with {packed!r}")
        sizes[name] = {"tensor": value.name, "shape": shape, "bytes": int(tensor.nbytes)}
        metadata = dict(tensor.metadata_props)
    if moe.w2.layout == cpu_panel.NAME:
        _check_runs(path, node, spec, {name: size["shape"][1] for name, size in sizes.items()})
    return sizes, metadata


def _description(
    node: ir.Node, spec: Spec, sizes: dict[str, Any], metadata: dict[str, str], weights: int
) -> dict[str, Any]:
    size = sum(part["bytes"] for part in sizes.values())
    return {
        "node": node.name,
        "module": metadata.get(keys.MODULE),
        "format": metadata.get(keys.FORMAT),
        "attributes": spec.attributes(),
        **sizes,
        "bytes": size,
        "bits_per_weight": 8 * size / weights,
    }


def _verify(path: Path, name: str, tensor: ir.ExternalTensor) -> bool:
    recorded = tensor.metadata_props.get(keys.HASH)
    if recorded is None:
        return False
    if not isinstance(recorded, str) or not recorded.startswith(f"{HASH}:"):  # bytes where they are no text
        raise ModelError(f"{path}: {name} has a hash {recorded[:80]!r}, this release compares {HASH}")
    digest, left = new_hash(), tensor.length or tensor.nbytes
    data = path.parent / tensor.location
    with doing(f"{data}: {name}"), open(data, "rb") as file:
        file.seek(tensor.offset or 0)
        while left and (chunk := file.read(min(left, _CHUNK))):
            digest.update(chunk)
            left -= len(chunk)
    if recorded != f"{HASH}:{digest.hexdigest()}":
        raise ModelError(f"{data}: {name} has hash {HASH}:{digest.hexdigest()}, {path.name} says {recorded}")
    return True
