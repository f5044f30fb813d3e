"""Finding and loading an exported model."""

from __future__ import annotations

import mmap
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quantmoe.exporter.errors import ModelError, need_path
from quantmoe.exporter.folder.files import LFS_POINTER, MODEL, hub_name, is_plain, ranks_in
from quantmoe.exporter.folder.metadata import PRODUCER, RANK, TARGET, WORLD
from quantmoe.exporter.folder.protobuf import fields
from quantmoe.exporter.memory import doing
from quantmoe.exporter.targets import CPU, TARGETS

if TYPE_CHECKING:
    import onnx_ir as ir

    from quantmoe.custom_ops.op import MoESpec

#: number of ModelProto.metadata_props
METADATA = 14


def model_path(path: str | Path) -> Path:
    """Return the .onnx file of a folder or file argument.

    Raises:
        ModelError: there is none; a folder of slices is named as that.
        OptionError: it is no path.
    """
    given = need_path("path", path)
    path = given / MODEL if given.is_dir() else given
    expected = "expected an exported model or its folder"
    if path.is_file() and path.suffix not in (".onnx", ".ort"):
        advice = {
            ".gguf": "; this is a checkpoint: quantmoe export it first",
            ".safetensors": "; quantmoe export its folder",
        }
        other = "; unpack the archive first" if path.suffix in (".zip", ".tar", ".gz", ".xz", ".zst", ".7z") else ""
        raise ModelError(f"{path}: no .onnx file; {expected}{advice.get(path.suffix, other)}")
    if not path.is_file():
        if not given.exists() and (model := hub_name(given)):
            fetch = f"hf download {model} --local-dir CHECKPOINT, then quantmoe export CHECKPOINT OUTDIR"
            raise ModelError(f"{given}: no such folder; {expected}. Of a model on the Hugging Face hub: {fetch}")
        if there := ranks_in(given):
            first = next(iter(there.values()))
            how = _together(given, len(there), load(first / MODEL).metadata_props)
            raise ModelError(
                f"{given}: has slices of {len(there)} ranks, expected one model, as {first} is. All together: {how}"
            )
        own = "; this is a checkpoint: quantmoe export it first" if any(given.glob("*.safetensors")) else ""
        raise ModelError(f"{path}: missing; {expected}{own}")
    return path


def check_alone(path: Path, metadata: Mapping[str, str]) -> None:
    """Refuse a rank of a sliced model, which does not run by itself.

    Raises:
        ModelError: saying how the ranks run.
    """
    if world := metadata.get(WORLD):
        how = _together(path.absolute().parent.parent, world, metadata)
        raise ModelError(f"{path}: is rank {metadata.get(RANK)} of {world}, which run together: {how}")


def _together(folder: Path, world: int | str, metadata: Mapping[str, str]) -> str:
    """Return the command or program that runs the ranks of a folder."""
    if not TARGETS.get(metadata.get(TARGET, ""), CPU).on_gpu:
        return "a Python program with a Generator and a thread for each rank (docs/guides/several-gpus.md, On the CPU)"
    command = f"torchrun --nproc-per-node {world} --no-python quantmoe generate {folder} --device cuda"
    return f"{command} (docs/guides/several-gpus.md)"


def load(path: Path) -> ir.Model:
    """Return the graph of a .onnx file, after checking that its data files hold its tensors.

    Raises:
        ModelError: it is no model; a tensor is not in a file beside it, or not all of it.
    """
    import onnx_ir as ir  # it imports sympy, half a second

    if (size := path.stat().st_size) >= 1 << 31:
        raise ModelError(f"{path}: {size} bytes, expected less than protobuf's 2 GiB")
    try:
        with doing(str(path)):
            model = ir.load(path)
    except MemoryError:
        raise
    except Exception as error:  # protobuf's own, by backend
        raise ModelError(f"{path}: not an ONNX model: {_pointer(path) or error}") from None
    if not model.ir_version:  # an empty file is a message without fields
        raise ModelError(f"{path}: not an ONNX model: it has no ir_version")
    _find_external(path, model)
    for name, value in model.graph.initializers.items():
        tensor = value.const_value
        if not isinstance(tensor, ir.ExternalTensor):
            continue
        location = str(tensor.location)
        if not is_plain(location):
            raise ModelError(f"{path}: {name} is in {location!r}, expected the name of a file beside the model")
        file = path.parent / location
        try:
            needed = int(tensor.nbytes)
        except (TypeError, ValueError) as error:  # of a type without a size
            raise ModelError(f"{path}: {name}: {error}") from None
        begin, length = tensor.offset or 0, tensor.length or needed  # a length may be left out
        end = begin + length
        if begin < 0 or length != needed:
            raise ModelError(f"{path}: {name} has {length} bytes at {begin}, its shape and type take {needed}")
        if not file.is_file():
            raise ModelError(f"{file}: missing; {path.name} keeps {name} there")
        if file.resolve().parent not in (path.parent.resolve(), path.resolve().parent):
            raise ModelError(
                f"{file}: a link to {file.resolve()}, expected a file beside the model: ONNX Runtime follows no other"
            )
        if file.stat().st_size < end:
            reason = _pointer(file) or "truncated?"
            raise ModelError(f"{file}: {file.stat().st_size} bytes; {name} ends at byte {end} ({reason})")
    return model


def _find_external(path: Path, model: ir.Model) -> None:
    """Give nodes with external rows (quant_moe.def) the tensors that they name."""
    import onnx_ir as ir

    from quantmoe.custom_ops.layouts import LAYOUTS
    from quantmoe.custom_ops.op import DOMAIN

    for node in model.graph:
        if (node.domain, node.op_type) != (DOMAIN, "QuantMoE"):
            continue
        for name, value in zip(("w13", "w2"), node.inputs[3:5], strict=False):
            attribute = node.attributes.get(f"{name}_external")
            if attribute is None or value is None or (tensor := value.const_value) is None:
                continue
            where, text = f"{path}: node {node.name}: {name}_external", str(attribute_value(attribute))
            found = re.fullmatch(r"(\d{1,18}) (\d{1,18}) (.+)", text)
            if found is None:
                raise ModelError(f"{where} is {text[:80]!r}, expected first byte, bytes, and the name of a file")
            if list(tensor.shape) != [0]:
                raise ModelError(f"{where}: {name} has shape {list(tensor.shape)}, expected [0]")
            spec, begin, length = _moe_spec(path, node), int(found[1]), int(found[2])
            try:
                row = LAYOUTS[getattr(spec, name).layout].row_bytes(spec, name)
            except (KeyError, ValueError, ZeroDivisionError):
                continue  # what else reads the node says what is wrong with it
            if length % row:
                raise ModelError(f"{where} has {length} bytes, expected a multiple of the {row} of an expert")
            value.shape = ir.Shape((length // row, row // 4))
            value.const_value = ir.ExternalTensor(
                found[3],
                begin,
                length,
                ir.DataType.INT32,
                shape=value.shape,
                name=value.name or "",
                metadata_props=dict(tensor.metadata_props),
                base_dir=path.parent,
            )


def _pointer(path: Path) -> str:
    """Return what to do about a Git LFS pointer; "" for other files."""
    with open(path, "rb") as start:
        pointer = start.read(len(LFS_POINTER)) == LFS_POINTER
    return f"a Git LFS pointer; to fetch the file: git -C {path.parent} lfs pull" if pointer else ""


def _moe_spec(path: Path, node: ir.Node) -> MoESpec:
    from quantmoe.custom_ops.op import MoESpec

    try:
        return MoESpec.from_attributes({name: attribute_value(a) for name, a in node.attributes.items()})
    except ValueError as error:
        raise ModelError(f"{path}: node {node.name}: {error}") from None


def attribute_value(attribute: ir.Attr) -> Any:
    """Return an attribute's value, text as str."""
    return attribute.as_string() if attribute.type.name == "STRING" else attribute.value


def metadata_of(path: Path) -> dict[str, str]:
    """Return a model's metadata, in milliseconds: :func:`load` imports onnx_ir, which takes most of a second.

    A file that is no model has none. ``load`` says what is wrong with it.
    """
    found = {}
    try:
        with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            for number, begin, end in fields(data, 0, len(data)):
                if number == METADATA:
                    texts = {part: data[at:to].decode() for part, at, to in fields(data, begin, end)}
                    found[texts.get(1, "")] = texts.get(2, "")
    except (OSError, ValueError):
        return {}
    return found


def load_own(model: Path) -> ir.Model | None:
    """Return what an export wrote; None: another model, or none."""
    if not model.is_file():
        return None
    import onnx_ir as ir  # it imports sympy, half a second

    try:
        found = ir.load(model)
    except MemoryError:
        raise
    except Exception:  # protobuf's own, by backend
        return None
    return found if found.producer_name == PRODUCER else None


def ranks_stated(model: Path) -> int:
    """Return the number of ranks that an export divided a model among; 1: it is whole; 0: no export wrote it."""
    if (found := load_own(model)) is None:
        return 0
    world = found.metadata_props.get(WORLD, "1")
    return int(world) if world.isdecimal() else 0
