"""An exported model's weights as the checkpoint had them: canonical codes and scales, bit for bit (no torch)."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from quantmoe.custom_ops.layouts import LAYOUTS, qmoe
from quantmoe.custom_ops.matrix import QuantizedMatrix, gates_first, parted, reordered
from quantmoe.custom_ops.op import LinearSpec, MoESpec
from quantmoe.exporter.durable_files import replace
from quantmoe.exporter.folder.model_file import load, model_path
from quantmoe.exporter.inspecting.inspect import ModelError, inspect
from quantmoe.exporter.memory import doing, naming
from quantmoe.exporter.safetensors_file import write_safetensors

#: fields of QuantizedMatrix that are stored, where a matrix has them
FIELDS = ("codes", "scales", "zero_points", "global_scale", "input_scale", "pre_scale", "bias", "perm")


def unpack(model: str | Path, layer: int, output: str | Path, *, force: bool = False) -> list[str]:
    """Write a decoder layer's weights and scales to a safetensors file, as the checkpoint had them.

    Tensors have the names ``<module>.<field>``. A module has its name in the checkpoint. An expert is
    ``<experts>.<number>.gate``, ``up`` or ``down``. A shared expert is ``<shared expert>.gate``, or
    ``<shared expert>.<number>.gate`` if there are several. Fields are the fields of QuantizedMatrix. Scales of two
    levels are ``<module>.scales.d``, ``scales.scales`` and so on (SCALE_DTYPES).

    ``unpack`` does not compare hashes; ``quantmoe inspect --verify`` does.

    Args:
        model: an exported model or its folder.
        layer: number of the decoder layer, from 0.
        output: the file to write.
        force: replace ``output`` if it exists.

    Returns:
        The modules written.

    Raises:
        ModelError: the model cannot be read, or has no packed weights in that layer.
        OSError: ``output`` is one of the model's files, exists without ``force``, or cannot be written.
    """
    path = model_path(model)
    found = inspect(path)
    nodes = [n for n in found["layers"] + found["linears"] if _layer(n["module"]) == layer]
    if not nodes:
        known = sorted({_layer(n["module"]) for n in found["layers"] + found["linears"]} - {-1})
        span = f"{known[0]} to {known[-1]}" if known else "none"
        raise ModelError(f"{path}: no packed weights in layer {layer}; layers with some: {span}")
    weights = [path.parent / file["name"] for file in found["files"]]
    if (written := Path(output).resolve()) in [file.resolve() for file in (path, *weights)]:
        raise FileExistsError(f"{written} is the model's own file; unpack to another")
    if written.is_dir() or not written.parent.is_dir():
        what = f"{written} is a folder" if written.is_dir() else f"{written.parent} is no folder"
        raise FileNotFoundError(f"{what}, expected a file to write to")
    partial = Path(f"{output}.partial")
    if not force and (there := next(filter(os.path.lexists, (Path(output), partial)), None)):
        raise FileExistsError(f"{there} exists; --force replaces it")
    initializers = load(path).graph.initializers
    modules: dict[str, None] = {}

    def tensors() -> Iterator[tuple[str, np.ndarray]]:
        for node in nodes:
            with doing(f"{path}: {node['module']}"):
                for module, matrix in _matrices(node, initializers):
                    modules[module] = None
                    for field in FIELDS:
                        if (value := getattr(matrix, field)) is not None:
                            yield from _arrays(f"{module}.{field}", value)

    try:
        with doing(str(partial)), naming(partial):
            write_safetensors(partial, tensors)
            replace(partial, Path(output))
    finally:
        partial.unlink(missing_ok=True)
    return list(modules)


def _arrays(name: str, value: np.ndarray | float) -> Iterator[tuple[str, np.ndarray]]:
    """Yield a field as tensors that a file can hold; scales of two levels are four or two tensors."""
    if not isinstance(value, np.ndarray):
        yield name, np.array([value], np.float32)
    elif value.dtype.names is None:
        yield name, np.atleast_1d(value)
    else:
        yield from ((f"{name}.{part}", value[part]) for part in value.dtype.names)


def _matrices(node: dict[str, Any], initializers: Any) -> Iterator[tuple[str, QuantizedMatrix]]:
    def array(name: str) -> np.ndarray:
        try:
            return np.asarray(initializers[name].const_value.numpy())
        except ValueError as error:  # onnx-ir's: it maps no file that has several names
            raise ModelError(f"{node['node']}: {error}") from None

    def rows(projection: str) -> Any:
        if "tensor" in node[projection]:
            return array(node[projection]["tensor"]).view(np.uint8)
        moe, p = (spec.moe, "w2") if isinstance(spec, LinearSpec) else (spec, projection)
        tensors = {part: array(name) for part, name in node[projection]["tensors"].items()}
        tensors = {part: tensor.reshape(moe.num_experts, -1) for part, tensor in tensors.items()}
        return _Rows(moe.num_experts, lambda e: qmoe.restored(moe, p, {part: t[e] for part, t in tensors.items()}))

    kind: type[LinearSpec | MoESpec] = LinearSpec if "w" in node else MoESpec
    spec = qmoe.from_attributes(kind, node["attributes"])
    if isinstance(spec, LinearSpec):
        linear = spec
        matrix = LAYOUTS[linear.w.layout].unpack_down(linear.moe, rows("w")[0])
        parts = node["rows"] or {node["module"]: linear.out_features}
        matrices = parted(matrix, [*parts.values()]) if len(parts) > 1 else [matrix]
        if "gated_heads" in node:
            order = gates_first(matrices[0].shape[0], node["gated_heads"])
            matrices[0] = reordered(matrices[0], np.argsort(order))
        yield from zip(parts, matrices, strict=True)
        return
    w13, w2 = rows("w13"), rows("w2")
    experts = node["experts"] or {"routed": spec.num_experts - len(node["shared"])}
    routed, ids = experts["routed"], experts.get("ids", range(spec.expert_offset, spec.num_experts))
    for e in range(len(w13)):
        expert = LAYOUTS[spec.w13.layout].unpack(spec, w13[e], w2[e])
        number = ids[e]
        name = f"{node['module']}.{number}" if number < routed else node["shared"][number - routed]
        for role in ("gate", "up", "down"):
            if (matrix := getattr(expert, role)) is not None:
                yield f"{name}.{role}", matrix


class _Rows(Sequence[np.ndarray]):
    """Rows that are made when they are asked for."""

    def __init__(self, count: int, make: Callable[[int], np.ndarray]):
        self._count, self._make = count, make

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, e: Any) -> Any:
        return self._make(e)


def _layer(module: str | None) -> int:
    number = re.search(r"\.layers\.(\d{1,6})\.", module or "")
    return int(number[1]) if number else -1
