"""Inkling 2's experts as they are published, MXFP8 or NVFP4 in tensors of all experts, whatever config.json says.

E experts, hidden size H, intermediate size I. Rows of w13 alternate between gate and up:

- w13_weight [E, 2 I, H], w2_weight [E, H, I]: F8_E4M3, or U8 with two e2m1 numbers a byte, low nibble first;
- w13_weight_scale, w2_weight_scale: of MXFP8 e8m0 for 32 weights, of NVFP4 F8_E4M3 for 16;
- of NVFP4 also w13_weight_amax, w2_weight_amax [E], and w13_weight_outer_scale_denominator,
  w2_weight_outer_scale_denominator [E] or []. The scales of an expert are multiplied by their quotient.

The checkpoint has them under transformers' names (families.py). Everything else is unquantized.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from quantmoe.custom_ops.expert import Expert
from quantmoe.custom_ops.matrix import SCALE_DTYPES, QuantizedMatrix
from quantmoe.exporter.reading.checkpoint import CheckpointError
from quantmoe.exporter.reading.weights.base import FLOATS, Format, ModuleScheme, MoELayer, Reads, Tensor
from quantmoe.exporter.reading.weights.bits import unpack_nibbles

#: dtype of the weights -> how they are quantized; nothing in the files says that activations are
SCHEMES = {
    "F8_E4M3": ModuleScheme("fp8_e4m3", 32, "none", "MXFP8"),
    "U8": ModuleScheme("nvfp4", 16, "none", "NVFP4"),
}


class Inkling2(Format):
    name = "Inkling 2"
    reads = (Reads("MXFP8 and NVFP4 experts", ("test_experts_of_inkling2",), tool="Inkling 2"),)
    marks = ("down_proj_scale",)
    fused = (".experts.gate_proj", ".experts.up_proj", ".experts.down_proj")

    @staticmethod
    def claims(quantization: dict[str, Any]) -> bool:
        return quantization.get("quant_method") == "inkling2"

    def scheme(self, module: str) -> ModuleScheme:
        name = f"{module}.down_proj"
        found = SCHEMES.get(self.ckpt.dtype(name))
        if found is None:
            raise CheckpointError(
                f"{self.ckpt.where(name)} is {self.ckpt.dtype(name)} with scales, expected {' or '.join(SCHEMES)}"
            )
        return found

    def matrix(self, module: str) -> QuantizedMatrix:
        raise CheckpointError(f"{self.ckpt.folder}: {module}: {self.name} quantizes experts only")

    def fused_expert(self, layer: MoELayer, e: int) -> Expert:
        num, h, i = layer.num_experts, layer.hidden_size, layer.intermediate_size
        return Expert(
            gate=self._projection(layer, e, "gate_proj", (num, i, h)),
            up=self._projection(layer, e, "up_proj", (num, i, h)),
            down=self._projection(layer, e, "down_proj", (num, h, i)),
        )

    def _projection(self, layer: MoELayer, e: int, name: str, shape: tuple[int, int, int]) -> QuantizedMatrix:
        num, n, k = shape
        if layer.scheme.format == "fp8_e4m3":
            scale = Tensor(f"{name}_scale", ("U8", "F8_E8M0"), (num, n, -(-k // 32)))
            tensors = self.take(layer.name, [Tensor(name, ("F8_E4M3",), shape), scale], at=e)
            return QuantizedMatrix(
                kind="fp8_e4m3",
                codes=np.ascontiguousarray(tensors[name]).view(np.uint8),
                scales=np.ascontiguousarray(tensors[f"{name}_scale"]).view(SCALE_DTYPES["e8m0"]),
                group_size=32,
            )
        joined = "down_proj" if name == "down_proj" else "gate_up_proj"
        amax, denominator = f"{joined}_amax", f"{joined}_outer_scale_denominator"
        each = self.ckpt.shape(f"{layer.name}.{denominator}") if f"{layer.name}.{denominator}" in self.ckpt else (num,)
        declared = [
            Tensor(name, ("U8",), (num, n, k // 2)),
            Tensor(f"{name}_scale", ("F8_E4M3",), (num, n, -(-k // 16))),
            Tensor(amax, FLOATS, (num,)),
            Tensor(denominator, FLOATS, () if each in ((), (1,)) else (num,)),
        ]
        tensors = self.take(layer.name, declared, at=e)
        largest, over = (np.float32(tensors[part].item()) for part in (amax, denominator))
        return QuantizedMatrix(
            kind="nvfp4",
            codes=unpack_nibbles(tensors[name]),
            scales=tensors[f"{name}_scale"],
            group_size=16,
            global_scale=float(largest / over),
        )
