"""HQQ (``quant_method: hqq``), as its HQQLinear.state_dict has it and transformers saves it.

Tensors of a linear with N outputs and K inputs, groups of g weights along K (axis 1) of the flattened weight:

- W_q has the codes of [N K / g, g], packed along the first dimension, the first part of the rows in the highest bits.
  packing says how. 4bit_u8, 2bit_u8 and 1bit_u8 fill bytes. 8bit_u8 has one code a byte, of 5, 6 or 8 bits.
  3bit_32 has ten codes in an I32, with rows padded to a multiple of ten.
- scale and zero [N K / g, 1], of the type that the model computes with. nbits, axis, group_size and shape are I32,
  packing is a text in U8.
- view_as_float: W_q has these bytes in a type of floats.

A weight is (code - zero) * scale, with a zero point that is no integer. It is carried as code * scale - zero * scale.
The minimum is exact in f32 if both are 16-bit numbers, and otherwise rounded to f32.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from quantmoe.custom_ops.matrix import QuantizedMatrix
from quantmoe.exporter.errors import CheckpointError
from quantmoe.exporter.reading.checkpoint import is_outline, outline
from quantmoe.exporter.reading.weights.affine import affine, carried_affine, carried_group, carrier
from quantmoe.exporter.reading.weights.base import FLOATS, Format, ModuleScheme, Reads, Tensor
from quantmoe.exporter.safetensors_file import DTYPES

#: packing -> bits of an element, bits of a code in it, codes of an element
PACKINGS = {
    "8bit_u8": (8, 8, 1),
    "4bit_u8": (8, 4, 2),
    "3bit_32": (32, 3, 10),
    "2bit_u8": (8, 2, 4),
    "1bit_u8": (8, 1, 8),
}


class _Meta(NamedTuple):
    """The numbers beside a module's codes."""

    n: int
    k: int
    group: int
    bits: int
    packing: str
    width: int
    """columns that are carried with one scale"""

    @property
    def rows(self) -> int:
        """Groups of the matrix."""
        return self.n * self.k // self.group


class HQQ(Format):
    name = "HQQ"
    reads = (
        Reads(
            "1 to 6 and 8 bits, `axis` 1",
            ("hqq-*",),
            exported="wider: 4, 5 or 8 bits, f32 scales and minima",
            cuda="no",
        ),
    )
    marks = ("W_q",)

    @staticmethod
    def claims(quantization: dict[str, Any]) -> bool:
        return quantization.get("quant_method") == "hqq"

    def scheme(self, module: str) -> ModuleScheme:
        meta = self._meta(module)
        element, _, codes = PACKINGS[meta.packing]
        more = self._grown(module, meta, element / codes)
        return ModuleScheme(carrier(meta.bits), meta.width, "none", f"HQQ int{meta.bits} group {meta.group}{more}")

    def _grown(self, module: str, meta: _Meta, bits: float) -> str:
        stored = sum(8 * DTYPES[self.ckpt.dtype(name)].itemsize
                     for name in (f"{module}.scale", f"{module}.zero") if name in self.ckpt)  # fmt: skip
        return carried_affine(meta.bits, meta.width, meta.group, stored, bits)

    def _meta(self, module: str) -> _Meta:
        """Return the numbers beside W_q.

        Raises:
            CheckpointError: it is missing, or describes what no node carries.
        """
        declared = [
            Tensor("nbits", ("I32", "F32"), ()),
            Tensor("axis", ("I32",), ()),
            Tensor("group_size", ("I32",), (), required=False),
            Tensor("shape", ("I32", "I64"), (2,)),
            Tensor("packing", ("U8",), (7,)),
        ]
        found = self.take(module, declared)
        bits, axis, where = found["nbits"].item(), found["axis"].item(), f"{self.ckpt.folder}: {module}"
        packing, shape = found["packing"].tobytes().decode("latin-1"), [int(size) for size in found["shape"]]
        if min(shape) < 1:
            raise CheckpointError(f"{where}.shape is {shape}, expected two sizes")
        if axis != 1:
            raise CheckpointError(
                f"{where}.axis is {axis}: groups have one input of many outputs; expected 1, groups of inputs"
            )
        limit = PACKINGS.get(packing, (0, 0, 0))[1]
        if not 1 <= bits <= limit:
            raise CheckpointError(
                f"{where}.packing is {packing!r} and nbits {bits:g}; expected one of {', '.join(PACKINGS)}"
            )
        n, k = shape
        group = int(found["group_size"].item()) if "group_size" in found else k
        if group < 1 or n * k % group:
            raise CheckpointError(f"{where}.group_size is {group}, expected a divisor of {n * k} weights")
        width = carried_group(k, group, f"{where}: HQQ")
        return _Meta(n=n, k=k, group=group, bits=min(limit, int(np.ceil(bits))), packing=packing, width=width)

    def matrix(self, module: str) -> QuantizedMatrix:
        meta = self._meta(module)
        element, bits, count = PACKINGS[meta.packing]
        packed = -(-meta.rows // count)
        size = packed * meta.group * element // 8
        dtype = self.ckpt.dtype(f"{module}.W_q")
        shape = (packed, size // packed // DTYPES[dtype].itemsize)
        tensors = self.take(
            module,
            [
                Tensor("W_q", (dtype,), shape),
                Tensor("scale", FLOATS, (meta.rows, 1)),
                Tensor("zero", FLOATS, (meta.rows, 1)),
            ],
        )
        stored, bias = tensors["W_q"], self.bias(module, meta.n)
        if is_outline(stored):
            codes = outline((meta.n, meta.k), np.uint8)
        else:
            words = stored.view("<u4" if element == 32 else np.uint8).reshape(packed, meta.group)
            parts = np.empty((count, *words.shape), np.uint8)
            for i in range(count):
                parts[i] = words >> (bits * (count - 1 - i)) & ((1 << bits) - 1)
            codes = parts.reshape(-1, meta.group)[: meta.rows].reshape(meta.n, meta.k)
            if codes.max() >> meta.bits:
                raise CheckpointError(
                    f"{self.ckpt.where(f'{module}.W_q')} has the code {codes.max()}, expected {meta.bits} bits (nbits)"
                )
        scales = tensors["scale"].astype(np.float64)
        minima = scales * tensors["zero"].astype(np.float64)
        return affine(carrier(meta.bits), codes, scales, minima=minima, width=meta.width, bias=bias)
