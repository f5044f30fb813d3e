"""Codes and scales of rows in layout marlin (int4, bf16 scales), padded, for peers that have layouts of their own."""

from __future__ import annotations

import torch

from quantmoe.custom_ops.layouts import marlin
from quantmoe.custom_ops.op import MoESpec

GROUP = 128
# Of a column (unit, half, t, step, i high, i low) in the matrix and as 4 bits are stored, FORMAT.md 3.2.
_MATRIX_AXES, _STORED_AXES = "Prguhtsab", "Pugthsbra"


def ceil(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def matrices(spec: MoESpec, projection: str, rows: torch.Tensor, n: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return codes uint8 [E, n, k], value = code - 8, and scales [E, n, k / 128]; w13 [E, 2 n, ..], gate above up.

    Args:
        rows: uint8 [E, row bytes].
        n, k: sizes of gate, up or down, padded with zeros.
    """
    at, (_, stored_n, stored_k, halves) = marlin.row(spec, projection), spec.matrices(projection)
    panels, units = -(-stored_n // (16 // halves)), -(-stored_k // 64)
    size = dict(zip(_MATRIX_AXES, (panels, 2, 8, units, 2, 4, 2, 2, 2), strict=True))
    codes = rows[:, at.part("codes")]
    codes = torch.stack([codes & 15, codes >> 4], -1).view(-1, *(size[a] for a in _STORED_AXES))
    codes = codes.permute(0, *(1 + _STORED_AXES.index(a) for a in _MATRIX_AXES)).flatten(4)
    scales = rows[:, at.part("scales")].contiguous().view(torch.bfloat16)
    scales = scales.view(-1, panels, -(-stored_k // GROUP), 8, 2).permute(0, 1, 4, 3, 2)

    def order(x: torch.Tensor, columns: int, fill: int) -> torch.Tensor:  # from [E, P, 2, 8, columns]
        parts = [x[:, :, h].flatten(1, 2) for h in (0, 1)] if halves == 2 else [x.flatten(1, 3)]
        pad = (0, columns - x.shape[-1], 0, n - stored_n)
        return torch.cat([torch.nn.functional.pad(half[:, :stored_n], pad, value=fill) for half in parts], 1)

    return order(codes[..., :stored_k], k, 8), order(scales, k // GROUP, 1)
