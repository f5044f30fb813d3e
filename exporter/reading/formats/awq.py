"""AWQ in the GEMM packing, as AutoAWQ and GPTQModel write it.

Tensors of a linear with N outputs and K inputs, groups of g: qweight I32 [K, N/8], qzeros I32 [K/g, N/8], scales
[K/g, N].
Output feature 8 i + j is nibble [0, 4, 1, 5, 2, 6, 3, 7][j] of word i. Codes are unsigned.
AutoRound also packs 5, 6 and 7 bits b: words [.., N b / 32] are a dense bit stream of codes in the same order.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from quantmoe.custom_ops.matrix import QuantizedMatrix
from quantmoe.custom_ops.schemes import SCHEMES
from quantmoe.exporter.reading.checkpoint import Checkpoint, CheckpointError, is_outline, outline
from quantmoe.exporter.reading.formats.gptq import AUTOROUND, autoround_packing, autoround_type, refuse_rotations
from quantmoe.exporter.reading.weights.base import (
    FLOATS,
    Format,
    ModuleScheme,
    Reads,
    Tensor,
    carried_wider,
    group_size_of,
    integer_kind,
)
from quantmoe.exporter.reading.weights.bits import unpack_words
from quantmoe.exporter.reading.weights.overrides import Overrides

_NIBBLE = (0, 4, 1, 5, 2, 6, 3, 7)


class AWQ(Format):
    name = "AWQ"
    reads = (
        Reads("4 bits; other group sizes of single modules (GPTQModel's `dynamic`)", ("autoawq-gemm", "gptqmodel-awq")),
        Reads("5, 6 and 7 bits", ("autoround-awq6",), cuda="wider: 8 bits", tool="AutoRound"),
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
        refuse_rotations(ckpt)
        self.widths = (4, 5, 6, 7) if raw.get("quant_method") in AUTOROUND else (4,)
        if self.bits not in self.widths or "gem" not in str(packing).lower() or "gemv" in str(packing).lower():
            raise CheckpointError(
                f"{ckpt.folder}: AWQ bits={self.bits}, packing {packing!r}; supported: {self._supported}, gemm"
            )

    @staticmethod
    def claims(quantization: dict[str, Any]) -> bool:
        integers = autoround_type(quantization) == "int" and "awq" in autoround_packing(quantization)
        return quantization.get("quant_method") == "awq" or integers

    @property
    def _supported(self) -> str:
        return f"{', '.join(map(str, self.widths))} bits"

    def _bits(self, module: str) -> int:
        bits = self.overrides.of(module).get("bits", self.bits)
        if bits not in self.widths:
            where = self.overrides.where(module)
            raise CheckpointError(f"{self.ckpt.folder}: {module}: AWQ bits={bits}{where}; supported: {self._supported}")
        return int(bits)

    def scheme(self, module: str) -> ModuleScheme:
        own, bits = self.overrides.of(module), self._bits(module)
        group_size = own.get("group_size", self.group_size)
        kind = integer_kind(bits, group_size, self.own_widths)
        symmetric = "" if own.get("sym", not self.zero_point) else " asymmetric"
        text = f"AWQ int{bits}{symmetric} group {group_size}{carried_wider(kind, bits)}"
        return ModuleScheme(kind, group_size, "none", text)

    def matrix(self, module: str) -> QuantizedMatrix:
        bits, scheme = self._bits(module), self.scheme(module)
        k, words = self.shape2d(f"{module}.qweight")
        n = words * 32 // bits
        groups = -(-k // scheme.group_size) if scheme.group_size > 0 else 1
        tensors = self.take(
            module,
            [
                Tensor("qweight", ("I32",), (k, n * bits // 32)),
                Tensor("qzeros", ("I32",), (groups, n * bits // 32), required=self.zero_point, decides=True),
                Tensor("scales", FLOATS, (groups, n)),
            ],
        )
        codes, middle = unpack_columns(tensors["qweight"], bits), 1 << (bits - 1)
        zeros = unpack_columns(tensors["qzeros"], bits) if "qzeros" in tensors else None
        plain = zeros is None or (not self.zero_point and bool((zeros == middle).all()))
        if plain and (more := SCHEMES[scheme.format].zero - middle) and not is_outline(codes):
            codes = codes + np.uint8(more)
        return QuantizedMatrix(
            kind=scheme.format,
            codes=codes,
            scales=np.ascontiguousarray(tensors["scales"].T),
            group_size=scheme.group_size,
            zero_points=None if plain else zeros,
            bias=self.bias(module, n),
        )


def unpack_columns(words: np.ndarray, bits: int = 4) -> np.ndarray:
    """I32 [R, N bits/32] -> uint8 [N, R]."""
    n = words.shape[1] * 32 // bits
    if is_outline(words):
        return outline((n, words.shape[0]), np.uint8)
    if bits != 4:
        octets = unpack_words(words, bits, n).T.reshape(-1, 8, len(words))
        return octets[:, _NIBBLE].reshape(n, -1)
    columns = np.ascontiguousarray(words.view(np.uint32).T)
    codes = np.empty((columns.shape[0], 8, columns.shape[1]), np.uint8)
    for j, nibble in enumerate(_NIBBLE):
        codes[:, j] = (columns >> np.uint32(4 * nibble)) & np.uint32(15)
    return codes.reshape(-1, columns.shape[1])
