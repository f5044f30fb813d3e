"""A cache holds floats of 16 or 32 bits, or codes of one byte: int8 or e4m3.

A key or value is its code times a scale. Queries are not rounded. A layer has one scale for keys and one for values.

- Checkpoints with scales: compressed-tensors' ``kv_cache_scheme`` with strategy tensor, ModelOpt's
  ``kv_cache_quant_algo``, and FP8 checkpoints. On the CPU they get codes, unless ``--cache`` says otherwise. For CUDA
  they get codes with ``--cache fp8`` or ``--cache int8``.
- Checkpoints without scales: ``--cache fp8`` takes e4m3 with scale 1. ``--cache int8`` takes one scale for each token
  and head on the CPU, and is refused for CUDA.
- ModelOpt's ``kv_cache_quant_algo`` without scales means scale 1. Other strategies (attn_head, token, dynamic), NVFP4
  and Quark's scales leave the cache in floats, and ``export`` says so. ``--cache fp8`` and ``--cache int8`` then have
  scales of their own.
- A missing or damaged scale is refused by name. ``--cache f16`` needs no scales.
- ONNX Runtime runs caches of codes, TensorRT does not. On CUDA, e4m3 needs compute capability 9.0.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from quantmoe.exporter.errors import CheckpointError
from quantmoe.exporter.reading.checkpoint import Checkpoint

_FIELDS = ("kv_cache_scheme", "kv_cache_quant_algo", "kv_cache_quant_config")
#: ends of the names of scales: compressed-tensors', ModelOpt's and AutoFP8's; Quark's
_SCALES = (".k_scale", ".v_scale", ".kv_scale", ".k_proj.output_scale", ".v_proj.output_scale")
#: the same of scales of weights and activations
_OTHERS = (".weight_scale", ".input_scale")
_FLOATS = ("F32", "F16", "BF16")
#: where an attention module's scales may be, as vLLM's maybe_remap_kv_scale_name has it; kv_scale is of both
_PLACES = {
    kind: (
        *(f"{place}{kind}_scale" for place in ("", f"{kind}_proj.", "attn.", "qkv_proj.", "qkqkv_proj.")),
        "kv_scale",
    )
    for kind in ("k", "v")
}
#: custom_ops/ops/cached_attention.def
_LEAST, _MOST = 2.0**-64, 2.0**64


@dataclass(frozen=True)
class KVCache:
    """Quantization of the KV cache that a checkpoint wants.

    Attributes:
        said: in the tool's words.
        format: op.def's cache_format; "" where none is that.
        reason: why there is none.
        unscaled: without any scale they are 1: ModelOpt writes none where they would be.
        scales: names of tensors.
    """

    said: str
    format: str
    reason: str
    unscaled: bool
    scales: tuple[str, ...]

    def floats(self, reason: str) -> str:
        """Return the remark where the cache stays float."""
        more = f" and {len(self.scales) - 1} more" if len(self.scales) > 1 else ""
        unused = f"; not used: {self.scales[0]}{more}" if self.scales else ""
        return f"the KV cache stays float: {reason}; the checkpoint wants it quantized ({self.said}{unused})"

    @property
    def remark(self) -> str:
        """The remark of an export that is not asked for another cache."""
        return f"the KV cache is {self.format} ({self.said})" if self.format else self.floats(self.reason)


def find(ckpt: Checkpoint) -> KVCache | None:
    """Return what the checkpoint says; None where it says nothing."""
    raw = ckpt.quantization
    inner = raw.get("quantization")  # ModelOpt's hf_quant_config.json
    fields = raw | (inner if isinstance(inner, dict) else {})
    scales = tuple(name for name in ckpt.names() if name.endswith(_SCALES))
    field = next((name for name in _FIELDS if fields.get(name)), "")
    if not (field or scales):
        return None
    value, format, reason = fields.get(field), "", ""
    if field == "kv_cache_quant_config":
        reason = "its scales are of what k_proj and v_proj give, before the norm and the rotary embedding"
    elif field == "kv_cache_quant_algo" or (isinstance(value, str) and raw.get("quant_method") == "modelopt"):
        format = {"FP8": "fp8_e4m3", "INT8": "int8"}.get(str(value), "")
        reason = "" if format else f"{value} is none of FP8, INT8; --cache fp8 and --cache int8 have codes of one byte"
    elif isinstance(value, dict):
        format, reason = _scheme(value)
    elif value == "static" or (not field and raw.get("quant_method") == "fp8"):
        format = "fp8_e4m3"
    else:
        reason = "nothing says of which codes the scales are" if not field else f"{value!r} is no scheme"
    said = f"{field}: {_text(value)}" if field else "it has scales"
    unscaled = raw.get("quant_method") == "modelopt" and format == "fp8_e4m3"
    return KVCache(said, format, reason, unscaled, scales)


def _scheme(value: Mapping[str, Any]) -> tuple[str, str]:
    """op.def's cache_format of a kv_cache_scheme, and why there is none."""
    strategy = value.get("strategy") or "tensor"
    format = {"float8": "fp8_e4m3", "int8": "int8"}.get(f"{value.get('type', 'int')}{value.get('num_bits')}", "")
    for wrong, reason in (
        (not format, "neither float8 nor int8"),
        (strategy != "tensor", f"strategy {strategy}, supported: tensor"),
        (value.get("symmetric") is False, "zero points"),
        (bool(value.get("dynamic")), "scales of each run (dynamic)"),
    ):
        if wrong:
            return "", reason
    return format, ""


def scales(ckpt: Checkpoint, cache: KVCache, module: str) -> tuple[float, float]:
    """k_scale and v_scale of an attention module, by its name in the checkpoint.

    Raises:
        CheckpointError: one is missing, of another shape or type than one float, or not a number from 2^-64 to 2^64.
    """
    found = []
    for places in _PLACES.values():
        name = next((f"{module}.{place}" for place in places if f"{module}.{place}" in ckpt), None)
        if name is None:
            if cache.unscaled and not cache.scales:
                found.append(1.0)
                continue
            own = (name for name in ckpt.names() if name.startswith(f"{module}."))
            there = ", ".join(name for name in own if name.endswith("_scale") and not name.endswith(_OTHERS))
            raise CheckpointError(
                f"{ckpt.folder}: {module}.{places[0]} is missing ({cache.said}); found {there or 'no scale'}; "
                "--cache f16 (--target cuda: --cache auto) needs no scales"
            )
        if ckpt.dtype(name) not in _FLOATS or any(size != 1 for size in ckpt.shape(name)):
            raise CheckpointError(
                f"{ckpt.where(name)} is {ckpt.dtype(name)} {list(ckpt.shape(name))}, expected one number of "
                f"{', '.join(_FLOATS)}"
            )
        scale = float(ckpt.tensor(name).astype(np.float32).reshape(()))
        if not _LEAST <= scale <= _MOST:
            raise CheckpointError(f"{ckpt.where(name)} is {scale:g}, expected a number from 2^-64 to 2^64")
        found.append(scale)
    return found[0], found[1]


def _text(value: Any) -> str:
    """Return a scheme in few words: "float8 per tensor", "FP8", "*k_proj, *v_proj"."""
    if not isinstance(value, dict):
        return str(value)
    if "num_bits" in value:
        return f"{value.get('type', 'int')}{value['num_bits']} per {value.get('strategy', 'tensor')}"
    return ", ".join(value)
