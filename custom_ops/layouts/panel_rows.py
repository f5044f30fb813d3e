"""The places of one row's bytes in a matrix of layout ``cpu_panel`` (FORMAT.md 2.1 to 2.4, 2.7 and 2.10)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from quantmoe.custom_ops.layouts import cpu_panel
from quantmoe.custom_ops.matrix import PLANE_INTEGERS, SCALE_DTYPES
from quantmoe.custom_ops.op import LinearSpec, Projection
from quantmoe.custom_ops.schemes import SCHEMES


@dataclass(frozen=True)
class Pieces:
    """Parts of a row: part i of row r begins at byte ``at[i] + r * step`` of the row's panel.

    Attributes:
        dtype: NumPy's, of an element. width: elements of a part.
    """

    at: np.ndarray
    step: int
    dtype: np.dtype
    width: int = 1


@dataclass(frozen=True, kw_only=True)
class PanelRows:
    """A reader of one row of a matrix of 2 to 8 bits.

    Attributes:
        rows: of a panel. stride: bytes of a panel. group: columns that share a scale.
        codes: all 8 bits, or the low 4 bits of 32 columns. Byte i has column i in its low half, and column 16 + i in
            its high half. None for codes of 2 bits. flip: what their bytes are XORed with.
        high: bits 4 and above of 32 columns, or codes of 2 bits. Each plane of 4 bytes has ``8 / high_bits`` columns of
            each byte in turn.
        zero: the code of value 0.
        factors: a block's scale, and where there are minima the factor of those.
        levels: of two levels, a group's scale and minimum; or both, the scale in the low 4 bits of a byte.
    """

    rows: int
    stride: int
    group: int
    codes: Pieces | None
    zero: int
    factors: tuple[Pieces, ...]
    levels: tuple[Pieces, ...] = ()
    flip: int = 0
    high: Pieces | None = None
    high_bits: int = 0


def _is_read(w: Projection, of_planes: bool) -> bool:
    """Return whether rows of a packed matrix are codes and scales that :class:`PanelRows` describes."""
    if (w.format not in ("int4", "int8") and not of_planes) or w.scale_type == "e4m3":
        return False
    others = w.zero_points or w.perm or w.bias or w.pre_scale
    return not (w.format in ("q8_min", "int3") or others or w.block_n != 1 or w.group_size < 1)


# over 60 lines: the bytes of a block, counted once for all formats
def panel_rows(spec: LinearSpec) -> PanelRows | None:
    """Return how to read a row of a packed matrix; None where only a kernel does."""
    w, columns = spec.w, spec.in_features
    scales = SCALE_DTYPES[w.scale_type]
    names = scales.names
    of_planes = names is not None or w.format in PLANE_INTEGERS
    if not _is_read(w, of_planes):
        return None
    bits, block = SCHEMES[w.format].bits, max(32, w.group_size)
    if columns % block:
        return None
    rows = 16 if of_planes else 8 if bits == 4 else 4
    codes = rows * block * bits // 8
    factors = [name for name in names or () if name.startswith("d")]
    levels = [name for name in names or () if name not in factors]
    group = block // scales[levels[0]].shape[0] if levels else w.group_size
    size = codes + rows * (1 if of_planes else block // group) * scales.itemsize
    blocks = np.arange(columns // block, dtype=np.int64) * size
    stride = len(blocks) * size + 8 * rows

    def pieces(first: int, count: int, apart: int, *, step: int, dtype: np.dtype | type, width: int = 1) -> Pieces:
        """Return ``count`` parts of every block, ``apart`` bytes from each other; the first is at byte ``first``."""
        at = blocks[:, None] + first + apart * np.arange(count, dtype=np.int64)
        return Pieces(at.reshape(-1), step, np.dtype(dtype), width)

    def planes(first: int, count: int) -> Pieces | None:
        """Return planes of codes of each 32 columns, from plane ``first`` on."""
        at = blocks[:, None, None] + 64 * bits * np.arange(block // 32)[:, None] + 64 * (first + np.arange(count))
        return Pieces(at.reshape(-1), 4, np.dtype(np.uint8), 4) if count else None

    if of_planes:
        low = 4 if bits >= 4 else 0  # bits of a code in its nibble
        number = scales["d"] if names else scales
        wide = number.itemsize
        ends = codes + rows * (wide * len(factors) + block // group * np.arange(len(levels)))
        found = PanelRows(
            rows=rows, stride=stride, group=group, codes=planes(0, low), zero=SCHEMES[w.format].zero,
            factors=tuple(pieces(codes + wide * rows * i, 1, 0, step=wide, dtype=number)
                          for i in range(max(1, len(factors)))),
            levels=tuple(pieces(end, block // group, rows, step=1, dtype=scales[name].base)
                  for name, end in zip(levels, ends.tolist(), strict=True)),
            high=planes(low, bits - low), high_bits=bits - low,
        )  # fmt: skip
    else:
        own = pieces(codes, block // group, rows * scales.itemsize, step=scales.itemsize, dtype=scales)
        two_s = bits == 8  # two's complement
        parts, step, dtype = (block // 8, 32, np.int8) if two_s else (block // 16, 64, np.uint8)
        found = PanelRows(
            rows=rows,
            stride=stride,
            group=group,
            codes=pieces(0, parts, step, step=8, dtype=dtype, width=8),
            zero=0 if two_s else 8,
            factors=(own,),
            flip=0 if two_s else 0x88,
        )
    size = -(-spec.out_features // rows) * stride
    assert -(-size // 64) * 64 == cpu_panel.row_bytes(spec.moe, "w2"), (size, spec)
    return found
