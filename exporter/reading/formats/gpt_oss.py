"""gpt-oss as OpenAI published it (``quant_method: mxfp4``): experts fused in 3-D tensors.

E experts, hidden size H, intermediate size I:

- gate_up_proj_blocks U8 [E, 2 I, H/32, 16] (e2m1, low nibble first). Even rows are gate, odd rows up;
- gate_up_proj_scales U8 [E, 2 I, H/32] (e8m0), gate_up_proj_bias [E, 2 I];
- down_proj_blocks U8 [E, H, I/32, 16], down_proj_scales, down_proj_bias.

Everything else is unquantized.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from quantmoe.custom_ops.expert import Expert
from quantmoe.custom_ops.matrix import SCALE_DTYPES, QuantizedMatrix
from quantmoe.exporter.reading.checkpoint import CheckpointError
from quantmoe.exporter.reading.weights.base import FLOATS, Format, ModuleScheme, MoELayer, Reads, Tensor
from quantmoe.exporter.reading.weights.bits import unpack_nibbles


class GptOss(Format):
    name = "gpt-oss MXFP4"
    reads = (Reads("MXFP4", ("test_gpt_oss",), tool="gpt-oss"),)
    marks = ("gate_up_proj_blocks", "down_proj_blocks")
    fused = (".experts.gate_up_proj_blocks", ".experts.down_proj_blocks")

    @staticmethod
    def claims(quantization: dict[str, Any]) -> bool:
        return quantization.get("quant_method") == "mxfp4"

    def scheme(self, module: str) -> ModuleScheme:
        return ModuleScheme("mxfp4", 32, "none", "MXFP4")

    def matrix(self, module: str) -> QuantizedMatrix:
        raise CheckpointError(f"{self.ckpt.folder}: {module}: gpt-oss MXFP4 quantizes experts only")

    def fused_expert(self, layer: MoELayer, e: int) -> Expert:
        num, h, i = layer.num_experts, layer.hidden_size, layer.intermediate_size
        tensors = self.take(
            layer.name,
            [
                Tensor("gate_up_proj_blocks", ("U8",), (num, 2 * i, -(-h // 32), 16)),
                Tensor("gate_up_proj_scales", ("U8",), (num, 2 * i, -(-h // 32))),
                Tensor("gate_up_proj_bias", FLOATS, (num, 2 * i), required=False),
                Tensor("down_proj_blocks", ("U8",), (num, h, -(-i // 32), 16)),
                Tensor("down_proj_scales", ("U8",), (num, h, -(-i // 32))),
                Tensor("down_proj_bias", FLOATS, (num, h), required=False),
            ],
            at=e,
        )

        def matrix(name: str, k: int, rows: slice) -> QuantizedMatrix:
            blocks, scales = tensors[f"{name}_blocks"][rows], tensors[f"{name}_scales"][rows]
            bias = tensors.get(f"{name}_bias")
            codes = unpack_nibbles(blocks.reshape(len(blocks), -1))
            return QuantizedMatrix(
                kind="mxfp4",
                codes=codes[:, :k],
                scales=np.ascontiguousarray(scales).view(SCALE_DTYPES["e8m0"]),
                group_size=32,
                bias=None if bias is None else bias[rows].astype(np.float32),
            )

        return Expert(
            gate=matrix("gate_up_proj", h, slice(0, None, 2)),
            up=matrix("gate_up_proj", h, slice(1, None, 2)),
            down=matrix("down_proj", i, slice(None)),
        )
