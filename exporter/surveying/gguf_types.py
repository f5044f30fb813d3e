"""The types of a GGUF file's tensors: bits a weight, and which kernel runs them here."""

from __future__ import annotations

import re
from math import prod
from typing import Any

from quantmoe.exporter.choosing.choose import candidates
from quantmoe.exporter.reading.formats import Format
from quantmoe.exporter.reading.gguf.header import TYPES
from quantmoe.exporter.safetensors_file import DTYPES
from quantmoe.exporter.targets import CPU

_BLOCKS = {title: (weights, size) for title, weights, size in TYPES.values() if weights > 1}
#: what a tensor is for -> a pattern of its name; the first that is found counts
_PARTS = {
    "experts, gate and up": r"\.experts\.\d+\.(gate_proj|up_proj|w1|w3)\.",
    "experts, down": r"\.experts\.\d+\.",
    "embedding": r"embed|\.wte\.",
    "LM head": r"^lm_head\.",
    "shared experts": r"shared",
    "routers": r"\.(gate|router)\.|router",
    "dense MLPs": r"\.(mlp|feed_forward|ffn)\.|mixer\.(up|down)_proj",
    "attention and states": r"",
}


def types(format: Format) -> list[dict[str, Any]]:
    """Return a dict for each part of the model and each type that it has.

    Returns:
        ``part``, ``type`` (ggml's name), ``tensors``, ``weights``, ``bits`` of a weight in the file, ``scheme`` that
        export makes, and ``kernel`` that the CPU here runs. The last two are "" without blocks.
    """
    ckpt, kernels = format.ckpt, dict(_kernels(format))
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for name in ckpt.names():
        module, _, leaf = name.rpartition(".")
        title, octets = leaf if leaf in _BLOCKS else ckpt.dtype(name), prod(ckpt.shape(name))
        vector = len(ckpt.shape(name)) < 2
        part = "norms and biases" if vector else next(part for part, own in _PARTS.items() if re.search(own, name))
        weights, size = _BLOCKS.get(title, (1, DTYPES[ckpt.dtype(name)].itemsize))
        count = octets // size * weights if title in _BLOCKS else octets
        owner = re.sub(r"(\.experts)\.\d+\..*", r"\1", module)
        row = found.setdefault((part, title), {"part": part, "type": title, "tensors": 0, "weights": 0})
        row["tensors"] += 1
        row["weights"] += count
        row["bits"] = 8 * size / weights
        row["scheme"] = format.scheme_of(module).text if title in _BLOCKS else ""
        row["kernel"] = kernels.get(owner, "") if title in _BLOCKS else ""
    order = [*_PARTS, "norms and biases"]
    return sorted(found.values(), key=lambda row: (order.index(row["part"]), -row["weights"]))


def _kernels(format: Format) -> list[tuple[str, str]]:
    """Return modules, and the CPU kernel that each of them runs with on this machine."""
    return [
        (module, next((name for name, absent in one.kernels if not absent), ""))
        for _, _, module, verdicts in candidates(format)
        for one in verdicts
        if one.layout == CPU.layout
    ]
