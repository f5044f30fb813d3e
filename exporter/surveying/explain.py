"""Which layouts and kernels were considered for a checkpoint's modules or a model's nodes: inspect --explain."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from quantmoe.custom_ops.layouts.qmoe import from_attributes
from quantmoe.custom_ops.op import LinearSpec, MoESpec
from quantmoe.exporter.choosing.choose import candidate, candidates
from quantmoe.exporter.inspecting.inspect import inspect
from quantmoe.exporter.reading.companions import check_companions
from quantmoe.exporter.reading.formats import find_format, open_checkpoint
from quantmoe.exporter.surveying.survey import is_model
from quantmoe.exporter.targets import CPU


def explain(path: str | Path) -> list[dict[str, Any]]:
    """Return what was considered for each distinct scheme of a checkpoint's modules or a model's nodes.

    Returns:
        One dict a scheme and verdict: ``scheme`` (in the tool's words), ``modules`` (names), ``candidates`` (list of
        Candidate, of the first module). Last, ones without modules and with ``remark``: which
        layers have which attention, what is left out, a quantized KV cache.

    Raises:
        CheckpointError, ModelError: the folder or file cannot be read.
    """
    path = Path(path)
    if is_model(path):
        return _model(path)
    ckpt = open_checkpoint(path)
    check_companions(ckpt)
    format = find_format(ckpt).with_widths(CPU.own_widths)
    found: dict[Any, dict[str, Any]] = {}
    for kind, text, module, verdicts in candidates(format):
        key = (kind, text, *(verdict.reason.replace(module, "") for verdict in verdicts))
        found.setdefault(key, {"scheme": text, "modules": [], "candidates": verdicts})["modules"].append(module)
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
            spec = from_attributes(kind, node["attributes"])
            sized = {"out_features": 0, "in_features": 0}
            key = str({k: v for k, v in node["attributes"].items() if k not in sized})
            if key not in found:
                found[key] = {"scheme": node["format"], "modules": [], "candidates": [candidate(spec)]}
            found[key]["modules"].append(node["module"])
    return list(found.values())
