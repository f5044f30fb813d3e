"""FBGEMM's FP8 by rows (``quant_method: fbgemm_fp8``), as transformers writes it.

Tensors of a linear with N outputs and K inputs: weight F8_E4M3 [N, K], weight_scale F32 [N, 1].

Llama-4's experts stay fused:

- gate_up_proj F8_E4M3 [E, K, 2 I], gate_up_proj_scale F32 [E, 1, 2 I];
- down_proj F8_E4M3 [E, I, N], down_proj_scale F32 [E, N, 1] or [E, 1, N].

Activations are e4m3 with a scale for each token. FBGEMM clips them at ``activation_scale_ub`` (1200 if not said), the
kernels here do not.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from quantmoe.custom_ops.expert import Expert
from quantmoe.custom_ops.matrix import QuantizedMatrix
from quantmoe.exporter.reading.formats.fp8 import row_scales
from quantmoe.exporter.reading.weights.base import (
    FLOAT_KINDS,
    FLOATS,
    Format,
    ModuleScheme,
    MoELayer,
    Reads,
    Tensor,
    float_scheme,
    unrounded,
)


class FBGEMM(Format):
    name = "FBGEMM FP8"
    reads = (
        Reads(
            "scales of rows; fused experts of Llama-4. Activations are not clipped at `activation_scale_ub`",
            ("fbgemm-fp8", "test_fused_experts_of_fbgemm"),
        ),
    )
    marks = ("weight_scale",)
    fused = (".experts.gate_up_proj", ".experts.down_proj")

    @staticmethod
    def claims(quantization: dict[str, Any]) -> bool:
        return quantization.get("quant_method") == "fbgemm_fp8"

    def scheme(self, module: str) -> ModuleScheme:
        fused = f"{module}.gate_up_proj"
        if fused in self.ckpt and self.ckpt.dtype(fused) in FLOAT_KINDS:
            return float_scheme(self.ckpt.dtype(fused))
        limit = self.ckpt.quantization.get("activation_scale_ub", 1200.0)
        return ModuleScheme(
            "fp8_e4m3", -1, "fp8_token", f"FBGEMM FP8, dynamic activations per token, not clipped at {limit}"
        )

    def matrix(self, module: str) -> QuantizedMatrix:
        n, k = self.shape2d(f"{module}.weight")
        weight = self.take(module, [Tensor("weight", ("F8_E4M3",), (n, k))])["weight"]
        scales = row_scales(self, f"{module}.weight_scale", n)
        return QuantizedMatrix(
            kind="fp8_e4m3", codes=weight.view(np.uint8), scales=scales, group_size=-1, bias=self.bias(module, n)
        )

    def fused_expert(self, layer: MoELayer, e: int) -> Expert:
        num, h, i = layer.num_experts, layer.hidden_size, layer.intermediate_size
        gate, up = layer.halves

        def matrix(name: str, n: int, k: int, rows: slice) -> QuantizedMatrix:
            if layer.scheme.format != "fp8_e4m3":
                weight = self.take(layer.name, [Tensor(name, tuple(FLOAT_KINDS), (num, k, n))], at=e)[name]
                return unrounded(weight.T[rows], None)
            scale, shape = f"{name}_scale", (num, 1, n)
            if f"{layer.name}.{scale}" in self.ckpt and self.ckpt.shape(f"{layer.name}.{scale}") == (num, n, 1):
                shape = num, n, 1
            declared = [Tensor(name, ("F8_E4M3",), (num, k, n)), Tensor(scale, FLOATS, shape)]
            tensors = self.take(layer.name, declared, at=e)
            codes = np.ascontiguousarray(tensors[name].T[rows]).view(np.uint8)
            return QuantizedMatrix(
                kind="fp8_e4m3", codes=codes, scales=tensors[scale].reshape(n, 1)[rows], group_size=-1
            )

        return Expert(
            gate=matrix("gate_up_proj", 2 * i, h, gate),
            up=matrix("gate_up_proj", 2 * i, h, up),
            down=matrix("down_proj", h, i, slice(None)),
        )
