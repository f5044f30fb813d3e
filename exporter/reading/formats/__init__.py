"""Checkpoint formats: one module each, one line in FORMATS.

``open_checkpoint(folder)`` -> ``find_format(ckpt)`` -> ``moe_layers(format)`` -> ``layer.expert(e)``.

A format checks its declared tensors by ``take``. The dry run calls its ``matrix`` over headers: matrices of ones. A
``Tensor`` whose numbers decide something has ``decides=True``. The rest is refused by a ``CheckpointError`` that says
folder, module, found and supported.
"""

from __future__ import annotations

from pathlib import Path

from quantmoe.exporter.reading.checkpoint import Checkpoint, CheckpointError, is_gguf
from quantmoe.exporter.reading.config_fields import reading
from quantmoe.exporter.reading.families import has_rows_for_experts
from quantmoe.exporter.reading.formats.autoround import AutoRound
from quantmoe.exporter.reading.formats.awq import AWQ
from quantmoe.exporter.reading.formats.bitsandbytes import BitsAndBytes
from quantmoe.exporter.reading.formats.compressed_tensors import CompressedTensors
from quantmoe.exporter.reading.formats.fbgemm import FBGEMM
from quantmoe.exporter.reading.formats.fp8 import FP8
from quantmoe.exporter.reading.formats.gguf import GGML
from quantmoe.exporter.reading.formats.gpt_oss import GptOss
from quantmoe.exporter.reading.formats.gptq import GPTQ
from quantmoe.exporter.reading.formats.hqq import HQQ
from quantmoe.exporter.reading.formats.inkling2 import Inkling2
from quantmoe.exporter.reading.formats.mlx import MLX
from quantmoe.exporter.reading.formats.modelopt import ModelOpt
from quantmoe.exporter.reading.formats.quark import Quark
from quantmoe.exporter.reading.formats.torchao import TorchAO
from quantmoe.exporter.reading.gguf import GGUF
from quantmoe.exporter.reading.weights.base import Format, ModuleScheme, MoELayer
from quantmoe.exporter.reading.weights.experts import named_experts, refuse_dense
from quantmoe.exporter.reading.weights.layers import moe_layers
from quantmoe.exporter.reading.weights.unquantized import Unquantized

FORMATS: tuple[type[Format], ...] = (
    CompressedTensors,
    GPTQ,
    AutoRound,
    AWQ,
    FP8,
    FBGEMM,
    ModelOpt,
    Quark,
    GptOss,
    Inkling2,
    GGML,
    BitsAndBytes,
    HQQ,
    MLX,
    TorchAO,
)
#: quantization method that is not read -> why
REFUSED = {
    "exl3": "its weights are paths through a trellis of a computed codebook",
    "aqlm": "its weights are sums of vectors from learned codebooks",
    "fp_quant": "its linears rotate and round inputs by rules of their own",
    "vptq": "its weights are vectors from learned codebooks",
}

__all__ = [
    "FORMATS",
    "Checkpoint",
    "CheckpointError",
    "Format",
    "MoELayer",
    "ModuleScheme",
    "find_format",
    "moe_layers",
    "open_checkpoint",
]


def open_checkpoint(folder: str | Path) -> Checkpoint:
    """Open a checkpoint folder or a GGUF file."""
    path = Path(folder)
    return GGUF(path) if is_gguf(path) else Checkpoint(path)


def find_format(ckpt: Checkpoint) -> Format:
    """Return the format that wrote a checkpoint.

    Raises:
        CheckpointError: naming the quantization method found and the supported ones.
    """
    supported = ", ".join(format.name for format in FORMATS)
    if not ckpt.quantization:
        if not has_rows_for_experts(ckpt.text_config):
            named_experts(ckpt, Unquantized.fused)
        raise CheckpointError(
            f"{ckpt.folder}: no quantization configuration; supported formats: {supported}. A checkpoint in "
            "floating point is quantized with --quantize int4 or another format, or left as it is with none"
        )
    for format in FORMATS:
        if format.claims(ckpt.quantization):
            with reading(f"{ckpt.folder}: the quantization configuration cannot be read as {format.name}'s"):
                return format(ckpt)
    refuse_dense(ckpt)
    method = ckpt.quantization.get("quant_method")
    why = f", which is not read: {why}" if (why := REFUSED.get(str(method))) else ""
    raise CheckpointError(f"{ckpt.folder}: quantization method {method!r}{why}; supported formats: {supported}")
