"""Checkpoints for tests: written tensor by tensor in NumPy, or tiny real models as quantizers write them."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from support.models.tiny import add_quantization, make_checkpoint, make_float_checkpoint, rewrite_linears
from support.operators import native_kernels as native
from support.operators.bounds import check

from quantmoe.custom_ops.expert import Expert
from quantmoe.custom_ops.layouts import LAYOUTS, join
from quantmoe.custom_ops.matrix import SCALE_DTYPES, QuantizedMatrix
from quantmoe.exporter.choosing.choose import activation_format, choose_layer, layer_candidate, scaled
from quantmoe.exporter.reading.formats import MoELayer
from quantmoe.exporter.safetensors_file import write_safetensors
from quantmoe.exporter.targets import of_layout

__all__ = ["TINY", "check_headers", "check_layer", "make_checkpoint", "make_float_checkpoint", "make_gptq_checkpoint",
           "make_integer_checkpoint", "same_matrix", "write_checkpoint", "write_safetensors"]  # fmt: skip

#: sizes for make_checkpoint that keep a test under a second
TINY: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
}


def write_checkpoint(
    folder: Path, tensors: Mapping[str, np.ndarray], quantization: Mapping[str, Any], **config: Any
) -> Path:
    """One shard and a config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    write_safetensors(folder / "model.safetensors", tensors)
    (folder / "config.json").write_text(
        json.dumps(config | {"quantization_config": dict(quantization)}), encoding="utf-8"
    )
    return folder


def make_gptq_checkpoint(
    folder: Path,
    architecture: str = "qwen3_moe",
    bits: int = 4,
    group_size: int = 32,
    sym: bool = True,
    desc_act: bool = False,
    v2: bool = False,
    seed: int = 0,
    **sizes: Any,
) -> Path:
    """A tiny real model quantized round to nearest and stored as GPTQModel does, act-order groups at random."""
    from support.models.encoders import gptq

    config = {
        "quant_method": "gptq",
        "bits": bits,
        "group_size": group_size,
        "sym": sym,
        "desc_act": desc_act,
        "checkpoint_format": "gptq_v2" if v2 else "gptq",
        "lm_head": False,
    }
    encode = functools.partial(gptq, v2=v2)
    return make_integer_checkpoint(
        folder, encode, config, architecture, bits, group_size, sym, desc_act, seed=seed, **sizes
    )


def make_integer_checkpoint(
    folder: Path,
    encode: Callable[[QuantizedMatrix], dict[str, np.ndarray]],
    quantization: Mapping[str, Any],
    architecture: str = "qwen3_moe",
    bits: int = 4,
    group_size: int = 32,
    sym: bool = True,
    desc_act: bool = False,
    scale: str = "f16",
    seed: int = 0,
    ignore: Sequence[str] = (),
    **sizes: Any,
) -> Path:
    """A tiny real model quantized round to nearest and stored as an encoder of encoders.py does.

    Args:
        quantization: the tool's configuration, for config.json.
        sym: whether there are no zero points.
        desc_act: whether groups are in act-order, at random.
        scale: a name of SCALE_DTYPES.
        ignore: parts of the names of linears that stay 16 bits wide.
    """
    rng = np.random.default_rng(seed)
    make_float_checkpoint(folder, architecture, seed, **TINY | sizes)

    def quantize(weight: torch.Tensor) -> dict[str, torch.Tensor]:
        n, k = weight.shape
        g = group_size if group_size > 0 else k
        perm = rng.permutation(k).astype(np.int32) if desc_act and g < k else None
        w = weight.double().numpy()
        parts = (w if perm is None else w[:, perm]).reshape(n, k // g, g)
        top = 2**bits - 1
        low, high = (np.minimum(parts.min(-1), 0), np.maximum(parts.max(-1), 0))
        if sym:
            high = np.maximum(-low, high)
            low = -high
        scales = ((high - low) / top).astype(SCALE_DTYPES[scale])
        wide = scales.astype(np.float64)
        zeros = np.full(wide.shape, 2 ** (bits - 1)) if sym else np.clip(np.rint(-low / wide), 0, top)
        codes = np.clip(np.rint(parts / wide[..., None]) + zeros[..., None], 0, top).astype(np.uint8)
        matrix = QuantizedMatrix(
            kind=f"int{bits}",
            codes=codes.reshape(n, k),
            scales=scales,
            group_size=group_size,
            zero_points=None if sym else zeros.astype(np.uint8),
            perm=perm,
        )
        return {name: as_torch(array) for name, array in encode(matrix).items()}

    rewrite_linears(folder, quantize, ignore)
    add_quantization(folder, dict(quantization))
    return folder


def as_torch(array: np.ndarray) -> torch.Tensor:
    if array.dtype == SCALE_DTYPES["bf16"]:  # which torch does not take from NumPy
        return torch.from_numpy(array.view(np.uint16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def same_matrix(found: QuantizedMatrix, want: QuantizedMatrix) -> None:
    """Every field equal, arrays bit for bit."""
    for field in ("kind", "group_size", "block_n", "global_scale", "input_scale"):
        assert getattr(found, field) == getattr(want, field), field
    for field in ("codes", "scales", "zero_points", "pre_scale", "bias", "perm"):
        a, b = getattr(found, field), getattr(want, field)
        assert (a is None) == (b is None), field
        if a is not None:
            assert a.dtype == b.dtype, (field, a.dtype, b.dtype)
            assert a.shape == b.shape, (field, a.shape, b.shape)
            assert a.tobytes() == b.tobytes(), field


def of_node(layer: MoELayer) -> list[Expert]:
    """Return the experts as a node has them, whose hidden states come rotated."""
    return [scaled(expert, "exact")[0] for expert in layer]


def check_headers(layer: MoELayer) -> None:
    """Holds what is chosen from headers to what the layouts say of the decoded experts."""
    for name, layout in LAYOUTS.items():
        wanted = of_layout(name).default_activations
        formats = [activation_format(scheme, wanted) for scheme in (layer.scheme, layer.down_scheme)]
        found = layer_candidate(layer, name, wanted)
        if found.spec is None:
            refusals = ((at, _refusal(layout, expert, formats)) for at, expert in enumerate(of_node(layer)))
            at, refusal = next(pair for pair in refusals if pair[1])
            assert found.reason == f"{layer.name}.{at}: {refusal}"
            continue
        want = functools.reduce(join, [layout.describe(expert, *formats) for expert in of_node(layer)])
        assert (found.spec.w13, found.spec.w2) == want


def _refusal(layout: Any, expert: Expert, formats: list[str]) -> str:
    try:
        layout.describe(expert, *formats)
    except ValueError as error:
        return str(error)
    return ""


def check_layer(layer: MoELayer, activations: str) -> None:
    """Packs a checkpoint's layer as its headers say, unpacks the same bits, and holds the kernel to the reference."""
    layout, spec = LAYOUTS["cpu_panel"], choose_layer(layer, "cpu_panel", activations)
    rows = [
        native.aligned(layer.num_experts * layout.row_bytes(spec, p)).reshape(layer.num_experts, -1)
        for p in ("w13", "w2")
    ]
    experts = of_node(layer)
    check_headers(layer)
    for expert, *row in zip(experts, *rows, strict=True):
        layout.pack(expert, spec, *row)
        back = layout.unpack(spec, *row)
        for name in ("gate", "up", "down"):
            want, found = getattr(expert, name), getattr(back, name)
            if getattr(spec, "w2" if name == "down" else "w13").activation_format not in ("fp8_tensor", "nvfp4"):
                want = dataclasses.replace(want, input_scale=None)
            if want.zero_points is not None and (want.zero_points == 1 << (int(want.kind[3:]) - 1)).all():
                want = dataclasses.replace(want, zero_points=None)
            same_matrix(found, want)
    rng = np.random.default_rng(0)
    ids = np.array([[0, 1], [2, 0], [1, 2], [1, 0], [2, 1]]) % layer.num_experts
    tokens = (
        rng.normal(0, 1, (5, layer.hidden_size)).astype(np.float32),
        ids,
        rng.uniform(0, 1, ids.shape).astype(np.float32),
    )
    check(SimpleNamespace(spec=spec, experts=experts), tokens, native.NativeMoE(spec, *rows)(*tokens))
