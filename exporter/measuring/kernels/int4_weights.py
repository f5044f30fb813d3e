"""Codes and scales of rows in layout marlin (int4, bf16 scales), padded, for peers that have layouts of their own."""

from __future__ import annotations

import torch

from quantmoe.custom_ops.layouts import marlin
from quantmoe.custom_ops.op import MoESpec

GROUP = 128


def ceil(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def matrices(spec: MoESpec, projection: str, rows: torch.Tensor, n: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes uint8 [E, n, k], value = code - 8, and scales [E, n, k / 128]; w13 [E, 2 n, ..], gate above up.

    Args:
        rows: uint8 [E, row bytes].
        n, k: sizes of gate, up or down, padded with zeros.
    """
    parts = marlin._Parts(spec, projection)
    size = dict(zip(marlin._MATRIX_AXES, (parts.panels, 2, 8, parts.units, 2, 4, 2, 2, 2), strict=True))
    axes = marlin._STORED_AXES[4]
    codes = rows[:, parts.slices["codes"]]
    codes = torch.stack([codes & 15, codes >> 4], -1).view(-1, *(size[a] for a in axes))
    codes = codes.permute(0, *(1 + axes.index(a) for a in marlin._MATRIX_AXES)).flatten(4)
    scales = rows[:, parts.slices["scales"]].contiguous().view(torch.bfloat16)
    scales = scales.view(-1, parts.panels, parts.blocks, 8, 2).permute(0, 1, 4, 3, 2)

    def order(x: torch.Tensor, columns: int, fill: int) -> torch.Tensor:  # from [E, P, 2, 8, columns]
        halves = [x[:, :, h].flatten(1, 2) for h in (0, 1)] if parts.halves == 2 else [x.flatten(1, 3)]
        pad = (0, columns - x.shape[-1], 0, n - parts.N)
        return torch.cat([torch.nn.functional.pad(half[:, : parts.N], pad, value=fill) for half in halves], 1)

    return order(codes[..., : parts.K], k, 8), order(scales, k // GROUP, 1)
