"""Which layouts and kernels were considered for a checkpoint's modules or a model's nodes: inspect --explain."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from quantmoe.custom_ops.layouts import LAYOUTS
from quantmoe.custom_ops.op import LinearSpec, MoESpec
from quantmoe.exporter.choosing.choose import ACTIVATIONS, Candidate, groups, layer_candidate, linear_candidate, refusal
from quantmoe.exporter.inspecting.inspect import inspect
from quantmoe.exporter.reading.formats import find_format, open_checkpoint


def explain(path: str | Path) -> list[dict[str, Any]]:
    """What was considered for each distinct scheme of a checkpoint's modules or a model's nodes.

    Returns:
        One dict a scheme and verdict: ``scheme`` (in the tool's words), ``modules`` (names), ``candidates`` (list of
        Candidate, those of the first module). Last, ones without modules and with ``remark``: which
        layers have which attention, what is left out, a quantized KV cache.

    Raises:
        CheckpointError, ModelError: the folder or file cannot be read.
    """
    path = Path(path)
    if path.is_file() or (path / "model.onnx").exists():
        return _model(path)
    format = find_format(open_checkpoint(path))
    found: dict[Any, dict[str, Any]] = {}

    def add(kind: type, text: str, module: str, consider: Callable[[str, str | None], Candidate]) -> None:
        candidates = [consider(layout, ACTIVATIONS[layout]) for layout in LAYOUTS]
        key = (kind, text, *(c.reason.replace(module, "") for c in candidates))
        entry = found.setdefault(key, {"scheme": text, "modules": [], "candidates": candidates})
        entry["modules"].append(module)

    for layer in format.moe_layers():
        add(MoESpec, layer.scheme_text, layer.name, partial(layer_candidate, layer))
    names = (name.removesuffix(".weight") for name in format.parameters() if name.endswith(".weight"))
    quantized = {name: name for name in names if format.is_quantized(name)}
    of = {part: parts for parts in groups(format, quantized).values() for part in parts}
    for module in quantized:

        def consider(layout: str, activations: str | None, module: str = module) -> Candidate:
            return linear_candidate(format, of[module], layout, activations)

        add(LinearSpec, format.scheme_of(module).text, module, consider)
    remarks = {"attention": format.attention(), "left out": format.left_out(), "KV cache": format.kv_cache()}
    for scheme, remark in remarks.items():
        if remark:
            found[scheme] = {"scheme": scheme, "modules": [], "candidates": [], "remark": remark}
    return list(found.values())


def _model(path: Path) -> list[dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    described = inspect(path)
    for kind, nodes in ((MoESpec, described["layers"]), (LinearSpec, described["linears"])):
        for node in nodes:
            spec = kind.from_attributes(node["attributes"])
            projection = spec.w2 if isinstance(spec, MoESpec) else spec.w
            sized = {"out_features": 0, "in_features": 0}
            key = str({k: v for k, v in node["attributes"].items() if k not in sized})
            if key not in found:
                candidate = Candidate(projection.layout, spec, refusal(spec))
                found[key] = {"scheme": node["format"], "modules": [], "candidates": [candidate]}
            found[key]["modules"].append(node["module"])
    return list(found.values())
