"""ggml's blocks of quantized weights, as GGUF files hold them: block_q4_0 and so on of ggml-common.h.

A block is a scale, or two levels of scales, and its weights' codes. Values are carried exactly. Q4_1, Q5_1, Q2_K, Q4_K,
Q5_K and Q6_K keep their scales and minima. Scales of Q3_K and of codebooks (IQ) are products in f32, because f16 times
8 bits needs 19 bits. Codebooks take 8 bits a weight. The types of REFUSED are refused.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from quantmoe.custom_ops.matrix import SCALE_DTYPES, QuantizedMatrix
from quantmoe.custom_ops.schemes import SCHEMES
from quantmoe.exporter.reading.checkpoint import CheckpointError, is_outline, outline
from quantmoe.exporter.reading.gguf import GGUF
from quantmoe.exporter.reading.gguf.blocks import CARRIED, Block
from quantmoe.exporter.reading.gguf.header import BLOCKS, TYPES
from quantmoe.exporter.reading.weights.base import Format, ModuleScheme, Reads, Tensor

#: ggml type that is not carried -> why
REFUSED = {
    "Q8_1": "is for activations",
    "Q8_K": "is for activations",
}
_BLOCK_OF = {name: (weights, size) for name, weights, size in TYPES.values()}


class GGML(Format):
    name = "GGUF"
    reads = (Reads("[GGUF](#gguf), by type", ("test_blocks",), tool="llama.cpp"),)
    marks = BLOCKS
    ckpt: GGUF

    @staticmethod
    def claims(quantization: dict[str, Any]) -> bool:
        return quantization.get("quant_method") == "gguf"

    def scheme(self, module: str) -> ModuleScheme:
        name, block = self._block(module)
        weights, size = _BLOCK_OF[name]
        said, kind = f"GGUF {name}", self._kind(block)
        bits = SCHEMES[kind].bits + SCALE_DTYPES[block.scales].itemsize * 8 / block.group_size
        if bits > 8 * size / weights:
            said += f", carried as {kind}: {bits:.4g} bits a weight, the file has {8 * size / weights:.4g}"
        return ModuleScheme(kind, block.group_size, "none", said)

    def _kind(self, block: Block) -> str:
        return block.own if block.own and self.own_widths else block.kind

    def _block(self, module: str) -> tuple[str, Block]:
        """Return a module's type, and how it is carried."""
        kind = next(mark for mark in self.marks if f"{module}.{mark}" in self.ckpt)
        if kind not in CARRIED:
            where = self.ckpt.where(f"{module}.{kind}")
            raise CheckpointError(f"{where} is {kind}, which {REFUSED[kind]}; supported: {', '.join(CARRIED)}")
        return kind, CARRIED[kind]

    def matrix(self, module: str) -> QuantizedMatrix:
        name, block = self._block(module)
        weights, size = _BLOCK_OF[name]
        n, octets = self.shape2d(f"{module}.{name}")
        stored = self.take(module, [Tensor(name, ("U8",), (n, octets))])[name]
        groups = octets // size * weights // block.group_size
        if is_outline(stored):
            codes = outline((n, octets // size * weights), np.uint8)
            scales = outline((n, groups), SCALE_DTYPES[block.scales])
        else:
            parts = block.decode(stored.reshape(n, octets // size, size))
            codes, scales = (part.reshape(n, -1) for part in parts)
            if less := SCHEMES[block.kind].zero - SCHEMES[self._kind(block)].zero:
                codes = codes - np.uint8(less)
        where, outlined = self.ckpt.where(f"{module}.{name}"), is_outline(codes)
        if (rows := self.ckpt.rows.get(module)) is not None:
            if len(rows) != n:
                raise CheckpointError(f"{where} has {n} rows, expected {len(rows)}")
            codes, scales = (codes, scales) if outlined else (codes[rows], scales[rows])
        perm = None
        if (columns := self.ckpt.columns.get(module)) is not None:
            first = columns[:: block.group_size]
            whole = (first[:, None] + np.arange(block.group_size)).reshape(-1)
            divided = not np.array_equal(whole, columns) or (first % block.group_size).any()
            if len(columns) != codes.shape[1] or (divided and SCALE_DTYPES[block.scales].names is None):
                raise CheckpointError(f"{where}: the heads' {len(columns)} columns are not whole groups of the matrix")
            if divided:  # blocks of two levels stay as they are, in act-order
                perm = np.argsort(columns).astype(np.int32)
            elif not outlined:
                codes, scales = codes[:, columns], scales[:, first // block.group_size]
        return QuantizedMatrix(
            kind=self._kind(block), codes=codes, scales=scales, group_size=block.group_size,
            bias=self.bias(module, n), perm=perm, global_scale=self._global_scale(module, block),
        )  # fmt: skip

    def _global_scale(self, module: str, block: Block) -> float | None:
        """Return the factor of an NVFP4 matrix: beside it, or 1. Others have none.

        Raises:
            CheckpointError: it is not a positive number, or the matrix is of another type than NVFP4.
        """
        found = self.take(module, [Tensor("scale", ("F32",), (), required=False)])
        if not found:
            return 1.0 if block.kind == "nvfp4" else None
        if block.kind != "nvfp4" or not 0 < (scale := found["scale"].item()) < np.inf:
            where = self.ckpt.where(f"{module}.scale")
            raise CheckpointError(f"{where}: expected a positive number beside a matrix of NVFP4")
        return float(scale)
