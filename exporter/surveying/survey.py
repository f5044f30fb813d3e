"""The content of a folder or file that is no exported model, and why an export would refuse it: inspect CHECKPOINT.

From headers and config.json alone, like all that is decided before torch is imported.
"""

from __future__ import annotations

import re
from math import prod
from pathlib import Path
from typing import Any

from quantmoe.custom_ops.op import ConvSpec
from quantmoe.exporter.choosing.choose import check_floats, choose_experts
from quantmoe.exporter.errors import CheckpointError
from quantmoe.exporter.folder.files import MODEL, ranks_in
from quantmoe.exporter.reading.checkpoint import Checkpoint, is_gguf
from quantmoe.exporter.reading.companions import check_companions
from quantmoe.exporter.reading.formats import Format, find_format, moe_layers, open_checkpoint
from quantmoe.exporter.reading.gguf import GGUF
from quantmoe.exporter.reading.weights.unquantized import Unquantized
from quantmoe.exporter.safetensors_file import DTYPES
from quantmoe.exporter.surveying.gguf_types import types
from quantmoe.exporter.targets import CPU, TARGETS


def is_model(path: Path) -> bool:
    """Return whether a path is meant as an exported model, whole or in slices, not as a checkpoint."""
    if path.is_file():
        return path.suffix != ".safetensors" and not is_gguf(path)
    return (path / MODEL).exists() or (bool(ranks_in(path)) and not any(path.glob("*.safetensors")))


def survey(path: str | Path) -> dict[str, Any]:
    """Return what is there, as far as it can be read.

    Returns:
        checkpoint: the path.
        files: of a folder, by ending: count, bytes.
        refused: target -> why an export would be refused, as far as headers show it, else "".

        If the checkpoint can be read, also:

        model_type: of config.json.
        tensors: by dtype: count, bytes.
        format: None for floats.
        layers: a dict for each layer and format of experts: module, scheme, experts, hidden_size, intermediate_size,
            and shared_size, the shared expert's or 0.
        linears: scheme -> number of linears outside the experts.
        attention: number of layers of each type, if config.json says.
        kv_cache, left_out: see Report.
        types: of a GGUF file, see gguf_types.py.

    Raises:
        CheckpointError: there is nothing of that name.
    """
    path = Path(path)
    found: dict[str, Any] = {"checkpoint": str(path), "files": _files(path)}
    try:
        ckpt = open_checkpoint(path)
        check_companions(ckpt)
    except CheckpointError as error:
        if not path.exists():
            raise
        return found | {"refused": dict.fromkeys(TARGETS, str(error))}
    found |= {"model_type": ckpt.text_config.get("model_type"), "tensors": _tensors(ckpt)}
    try:
        format, reason = find_format(ckpt).with_widths(CPU.own_widths), ""
    except CheckpointError as error:
        if ckpt.quantization:
            return found | {"refused": dict.fromkeys(TARGETS, str(error))}
        format, reason = Unquantized(ckpt, "none"), str(error)
    found |= {"format": None if reason else format.name, "refused": dict.fromkeys(TARGETS, reason)}
    try:
        found |= _quantized(format)
    except CheckpointError as error:
        return found | {"refused": dict.fromkeys(TARGETS, reason or str(error))}
    if isinstance(ckpt, GGUF):
        found["types"] = types(format.outline())
    for name, target in TARGETS.items() if not reason else ():
        try:
            nodes = choose_experts(
                format.with_widths(target.own_widths), target.layout, target.default_activations, scales="exact"
            )
            if not target.library:
                check_floats(format, nodes)  # of the graph that it has by default
                if module := _short_convolution(format):
                    raise CheckpointError(f"{ckpt.folder}: {module}: {target.refusal(ConvSpec)}")
        except CheckpointError as error:
            found["refused"][name] = str(error)
    return found


def _short_convolution(format: Format) -> str:
    """Return the first module with one, as linear attention, state spaces and LFM2's layers have it; "" without any."""
    modules = (name.rpartition(".")[0] for name in format.parameters() if name.endswith(".weight"))
    found = (re.fullmatch(r"(.+)\.(\w+_)?conv(1d)?", module) for module in modules)
    return next((match[1] for match in found if match), "")


def _files(path: Path) -> dict[str, dict[str, int]]:
    found: dict[str, dict[str, int]] = {}
    for file in sorted(path.glob("*")):
        if file.is_file():
            kind = found.setdefault(file.suffix or file.name, {"count": 0, "bytes": 0})
            kind["count"] += 1
            kind["bytes"] += file.stat().st_size
    return found


def _tensors(ckpt: Checkpoint) -> dict[str, dict[str, int]]:
    found: dict[str, dict[str, int]] = {}
    for name in ckpt.names():
        kind = found.setdefault(ckpt.dtype(name), {"count": 0, "bytes": 0})
        kind["count"] += 1
        kind["bytes"] += prod(ckpt.shape(name)) * DTYPES[ckpt.dtype(name)].itemsize
    return found


def _shared_size(format: Format, experts: str) -> int:
    """Intermediate features of the shared expert beside routed ones; 0: there is none."""
    mixture = experts.rpartition(".")[0]
    for name in ("shared_expert", "shared_experts"):
        module = f"{mixture}.{name}.down_proj"
        if format.is_quantized(module):
            return format.outline().matrix(module).shape[1]
        if f"{module}.weight" in format.ckpt:
            return format.shape2d(f"{module}.weight")[1]
    return 0


def _quantized(format: Format) -> dict[str, Any]:
    layers = []
    for layer in moe_layers(format):
        shared_size = _shared_size(format, layer.name)
        for group in layer.groups():
            sizes = {name: getattr(group, name) for name in ("hidden_size", "intermediate_size")}
            described = {"module": group.name, "scheme": group.scheme_text, "experts": len(group.routed)}
            layers.append(described | sizes | {"shared_size": shared_size})
    linears: dict[str, int] = {}
    for name in format.parameters():
        module = name.removesuffix(".weight")
        if module != name and format.is_quantized(module):
            text = format.scheme_of(module).text
            linears[text] = linears.get(text, 0) + 1
    remarks = {"attention": format.attention(), "kv_cache": format.kv_cache(), "left_out": format.left_out()}
    return {"layers": layers, "linears": linears, **remarks}


def is_refused(found: dict[str, Any]) -> bool:
    """Return whether no export takes what :func:`survey` found; of floats ``--quantize`` may."""
    floats = "layers" in found and found["format"] is None
    return all(found["refused"].values()) and not floats
