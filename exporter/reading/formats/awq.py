"""AWQ in the GEMM packing, as AutoAWQ and GPTQModel write it.

Tensors of a linear with N outputs and K inputs, groups of g: qweight I32 [K, N/8], qzeros I32 [K/g, N/8], scales
[K/g, N].
Output feature 8 i + j is nibble [0, 4, 1, 5, 2, 6, 3, 7][j] of word i. Codes are unsigned.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from quantmoe.custom_ops.matrix import QuantizedMatrix
from quantmoe.exporter.reading.checkpoint import Checkpoint, CheckpointError, is_outline, outline
from quantmoe.exporter.reading.formats.gptq import AUTOROUND, autoround_packing
from quantmoe.exporter.reading.weights.base import FLOATS, Format, ModuleScheme, Reads, Tensor, group_size_of
from quantmoe.exporter.reading.weights.overrides import Overrides

_NIBBLE = (0, 4, 1, 5, 2, 6, 3, 7)


class AWQ(Format):
    name = "AWQ"
    reads = (
        Reads("4 bits; other group sizes of single modules (GPTQModel's `dynamic`)", ("autoawq-gemm", "gptqmodel-awq")),
    )
    marks = ("qweight",)

    def __init__(self, ckpt: Checkpoint) -> None:
        super().__init__(ckpt)
        raw = ckpt.quantization
        self.bits = int(raw.get("bits", raw.get("w_bit", 4)))
        self.group_size = group_size_of(raw.get("group_size", raw.get("q_group_size", 128)))
        self.zero_point = bool(raw.get("zero_point", True))
        packing = raw.get("version") or raw.get("format") or raw.get("checkpoint_format") or "gemm"
        self.overrides = Overrides(ckpt)
        if self.bits != 4 or "gem" not in str(packing).lower() or "gemv" in str(packing).lower():
            raise CheckpointError(f"{ckpt.folder}: AWQ bits={self.bits}, packing {packing!r}; supported: 4 bits, gemm")

    @staticmethod
    def claims(quantization: dict[str, Any]) -> bool:
        method = quantization.get("quant_method")
        return method == "awq" or (method in AUTOROUND and "awq" in autoround_packing(quantization))

    def scheme(self, module: str) -> ModuleScheme:
        own = self.overrides.of(module)
        if (bits := own.get("bits", self.bits)) != 4:
            raise CheckpointError(
                f"{self.ckpt.folder}: {module}: AWQ bits={bits}{self.overrides.where(module)}; supported: 4 bits"
            )
        group_size = own.get("group_size", self.group_size)
        symmetric = "" if own.get("sym", not self.zero_point) else " asymmetric"
        return ModuleScheme("int4", group_size, "none", f"AWQ int4{symmetric} group {group_size}")

    def matrix(self, module: str) -> QuantizedMatrix:
        k, words = self.shape2d(f"{module}.qweight")
        n = words * 8
        group_size = self.scheme(module).group_size
        groups = -(-k // group_size) if group_size > 0 else 1
        tensors = self.take(
            module,
            [
                Tensor("qweight", ("I32",), (k, words)),
                Tensor("qzeros", ("I32",), (groups, words), required=self.zero_point, decides=True),
                Tensor("scales", FLOATS, (groups, n)),
            ],
        )
        zeros = unpack_columns(tensors["qzeros"]) if "qzeros" in tensors else None
        return QuantizedMatrix(
            kind="int4",
            codes=unpack_columns(tensors["qweight"]),
            scales=np.ascontiguousarray(tensors["scales"].T),
            group_size=group_size,
            zero_points=None if zeros is None or (not self.zero_point and (zeros == 8).all()) else zeros,
            bias=self.bias(module, n),
        )


def unpack_columns(words: np.ndarray) -> np.ndarray:
    """I32 [R, N/8] -> uint8 [N, R]."""
    if is_outline(words):
        return outline((words.shape[1] * 8, words.shape[0]), np.uint8)
    columns = np.ascontiguousarray(words.view(np.uint32).T)
    codes = np.empty((columns.shape[0], 8, columns.shape[1]), np.uint8)
    for j, nibble in enumerate(_NIBBLE):
        codes[:, j] = (columns >> np.uint32(4 * nibble)) & np.uint32(15)
    return codes.reshape(-1, columns.shape[1])
