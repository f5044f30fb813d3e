"""``quant_method: fp8``: DeepSeek's and transformers' block-scaled checkpoints, GPTQModel's, and per-tensor ones.

Tensors of a linear with N outputs and K inputs:

- weight F8_E4M3 [N, K];
- by blocks: weight_scale_inv [ceil(N / bn), ceil(K / bk)], with ``weight_block_size`` bn x bk. The last block of a row
  or column may be short. With DeepSeek's ``scale_fmt`` ue8m0 it is F8_E8M0;
- else weight_scale of one element or one a row, with input_scale when activations are static.

With ``expert_dtype`` fp4 (DeepSeek-V4) an expert's weight is I8 [N, K/2], two e2m1 numbers a byte, low nibble first.
Its weight_scale_inv is F8_E8M0 [N, K/32]. The field is in the quantizer's configuration or outside.

AutoRound's fp8 (``fp``, ``fp8_static``, by blocks) has these tensors too.

DeepSeek multiplies by weight_scale_inv. GPTQModel divides, and says so with ``weight_scale_semantics: inverse``. It has
weight_scale_inv also by tensor and by row, and quantizes no activations.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from quantmoe.custom_ops.matrix import SCALE_DTYPES, QuantizedMatrix
from quantmoe.exporter.reading.checkpoint import Checkpoint, CheckpointError
from quantmoe.exporter.reading.formats.gptq import autoround_type, refuse_rotations
from quantmoe.exporter.reading.weights.base import FLOATS, Format, ModuleScheme, Reads, Tensor
from quantmoe.exporter.reading.weights.bits import unpack_nibbles


class FP8(Format):
    name = "FP8"
    reads = (
        Reads("scales of blocks (also UE8M0), rows or tensors", ("gptqmodel-fp8-*", "fp8-128x128")),
        Reads("fp8 weights, without activations or with static ones; by blocks", ("autoround-fp*",), tool="AutoRound"),
        Reads("`expert_dtype` fp4: MXFP4 experts", ("test_experts_of_deepseek_v4_in_fp4",), tool="DeepSeek"),
    )
    marks = ("weight_scale_inv", "weight_scale")

    def __init__(self, ckpt: Checkpoint) -> None:
        super().__init__(ckpt)
        raw = ckpt.quantization
        block = raw.get("weight_block_size")
        if block is not None and not (len(block) == 2 and all(type(b) is int and b > 0 for b in block)):
            raise CheckpointError(f"{ckpt.folder}: weight_block_size {block!r}, expected two positive integers")
        self.block: tuple[int, int] | None = tuple(block) if block else None
        self.divides = raw.get("weight_scale_semantics") == "inverse"
        self.weights_only = self.divides and "activation_scheme" not in raw
        self.dynamic = self.weights_only or raw.get("activation_scheme", "dynamic") == "dynamic"
        if autoround_type(raw):
            self._check_autoround()
            self.weights_only = (raw.get("act_bits") or 16) >= 16
        fmt = str(raw.get("fmt") or raw.get("format") or "e4m3").lower()
        if "e5m2" in fmt:
            raise CheckpointError(f"{ckpt.folder}: fp8 format {fmt}; supported: e4m3")
        expert_dtype = raw.get("expert_dtype") or ckpt.text_config.get("expert_dtype") or "fp8"
        if expert_dtype not in ("fp8", "fp4"):
            raise CheckpointError(f"{ckpt.folder / 'config.json'}: expert_dtype {expert_dtype!r}; supported: fp8, fp4")
        self.fp4_experts = expert_dtype == "fp4"

    @staticmethod
    def claims(quantization: dict[str, Any]) -> bool:
        return quantization.get("quant_method") == "fp8" or autoround_type(quantization) == "fp"

    def _check_autoround(self) -> None:
        """Refuse what the fields of FP8 do not say: other activations, and modules with fields of their own."""
        raw = self.ckpt.quantization
        refuse_rotations(self.ckpt)
        expected = [(8, True, 128)] if self.block else [(8, False, 0), (8, True, -1)]
        found = (raw.get("act_bits") or 16, raw.get("act_dynamic"), raw.get("act_group_size"))
        if raw.get("bits") != 8 or (found[0] < 16 and found not in expected):
            raise CheckpointError(
                f"{self.ckpt.folder}: AutoRound fp bits {raw.get('bits')}, (act_bits, act_dynamic, act_group_size) "
                f"{found}; supported: bits 8, {' or '.join(map(str, expected))}, or act_bits 16"
            )
        for key, own in (raw.get("extra_config") or {}).items():
            names = ("bits", "group_size", "act_bits", "act_dynamic", "act_group_size")
            other = [name for name in names if own.get(name, raw.get(name)) != raw.get(name)]
            if other and own.get("bits", 8) < 16:
                raise CheckpointError(
                    f"{self.ckpt.folder}: extra_config {key!r} has {', '.join(other)} of its own; expected bits 16, or "
                    "the fields of the other modules"
                )

    def _is_fp4(self, module: str) -> bool:
        return self.fp4_experts and ".experts." in module

    def scheme(self, module: str) -> ModuleScheme:
        if self._is_fp4(module):
            return ModuleScheme("mxfp4", 32, "fp8_group128", "MXFP4, activations per 128")
        if self.weights_only:
            bn, bk = self.block or (1, -1)
            by = f"blocks {bn}x{bk}" if self.block else "rows"
            return ModuleScheme("fp8_e4m3", bk, "none", f"FP8 {by}")
        if self.block:
            bn, bk = self.block
            if self.dynamic and bk == 128:
                return ModuleScheme("fp8_e4m3", bk, "fp8_group128", f"FP8 blocks {bn}x{bk}, activations per 128")
            raise CheckpointError(
                f"{self.ckpt.folder}: {module}: fp8 blocks {bn}x{bk}, "
                f"{'dynamic' if self.dynamic else 'static'} activations; supported: dynamic, 128 columns"
            )
        if not self.dynamic:
            return ModuleScheme("fp8_e4m3", -1, "fp8_tensor", "FP8, static activations per tensor")
        return ModuleScheme("fp8_e4m3", -1, "fp8_token", "FP8, dynamic activations per token")

    def matrix(self, module: str) -> QuantizedMatrix:
        n, k = self.shape2d(f"{module}.weight")
        self.no_zero_points(module)
        if self._is_fp4(module):
            return self._fp4(module, n, 2 * k)
        weight = Tensor("weight", ("F8_E4M3",), (n, k))
        static = Tensor("input_scale", FLOATS, (), required=not (self.block or self.dynamic))
        if self.block and f"{module}.weight_scale_inv" in self.ckpt:
            bn, bk = self.block
            tensors = self.take(module, [weight])
            scales = block_scales(self, f"{module}.weight_scale_inv", n, k=k, bn=bn, bk=bk)
        else:
            bn, bk = 1, -1
            tensors = self.take(module, [weight, static])
            scales = row_scales(self, f"{module}.weight_scale{'_inv' if self.divides else ''}", n)
        if self.divides:
            scales = np.float32(1) / scales.astype(np.float32)
        return QuantizedMatrix(
            kind="fp8_e4m3",
            codes=tensors["weight"].view(np.uint8),
            scales=scales,
            group_size=bk,
            block_n=bn,
            input_scale=tensors["input_scale"].item() if "input_scale" in tensors else None,
            bias=self.bias(module, n),
        )

    def _fp4(self, module: str, n: int, k: int) -> QuantizedMatrix:
        scales = Tensor("weight_scale_inv", ("F8_E8M0", "U8"), (n, -(-k // 32)))
        tensors = self.take(module, [Tensor("weight", ("I8", "U8"), (n, k // 2)), scales])
        return QuantizedMatrix(
            kind="mxfp4",
            codes=unpack_nibbles(tensors["weight"].view(np.uint8)),
            scales=tensors["weight_scale_inv"].view(SCALE_DTYPES["e8m0"]),
            group_size=32,
            bias=self.bias(module, n),
        )


def block_scales(format: Format, name: str, n: int, *, k: int, bn: int, bk: int) -> np.ndarray:
    """Return the scales of blocks as [ceil(n / bn), ceil(k / bk)], dimensions of 1 left out or added; powers of two as
    f32."""
    want, shape, dtype = (-(-n // bn), -(-k // bk)), format.ckpt.shape(name), format.ckpt.dtype(name)
    if dtype not in (*FLOATS, "F8_E8M0") or [d for d in shape if d != 1] != [d for d in want if d != 1]:
        raise CheckpointError(
            f"{format.ckpt.where(name)} is {dtype} {list(shape)}, expected {'|'.join(FLOATS)}|F8_E8M0 {list(want)}, "
            f"dimensions of 1 left out or added ({format.name})"
        )
    scales = format.ckpt.tensor(name).reshape(want)
    return scales.astype(np.float32) if dtype == "F8_E8M0" else scales


def row_scales(format: Format, name: str, n: int) -> np.ndarray:
    """Return a scale of one element, [N] or [N, 1] as [N, 1]."""
    shape = format.ckpt.shape(name)
    if format.ckpt.dtype(name) not in FLOATS or shape not in ((), (1,), (1, 1), (n,), (n, 1)):
        raise CheckpointError(
            f"{format.ckpt.where(name)} is {format.ckpt.dtype(name)} {list(shape)}, "
            f"expected {'|'.join(FLOATS)} [], [1], [{n}] or [{n}, 1] ({format.name})"
        )
    return np.broadcast_to(format.ckpt.tensor(name).reshape(-1, 1), (n, 1))
