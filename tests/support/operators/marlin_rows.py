"""The rows of layout marlin in NumPy, as FORMAT.md section 3 says them: the native packer's oracle."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from quantmoe.custom_ops.expert import Expert
from quantmoe.custom_ops.matrix import QuantizedMatrix, reordered
from quantmoe.custom_ops.op import MoESpec, Projection
from quantmoe.custom_ops.schemes import SCHEMES

#: activation formats with scales of groups of features
GROUPED = ("fp8_group128", "nvfp4", "mxfp8", "mxfp4")
UNIT = 64  # columns
# Axes of the codes: of the matrix, where a column is (unit, half, t, step, i high, i low), and as they are stored
_MATRIX, _STORED = "Prguhtsab", {4: "Pugthsbra", 8: "Purgthsba"}


def reference_rows(expert: Expert, spec: MoESpec) -> tuple[np.ndarray, np.ndarray]:
    """Rows of w13 and w2: uint8 [row bytes]. Gate's and up's rows, and w2's pre-scales, are in down's order (2.6)."""
    w13 = [m for m in (expert.gate, expert.up) if m is not None]
    down, order = expert.down, expert.down.perm
    if order is not None:
        w13 = [reordered(m, order) for m in w13]
        down = replace(down, pre_scale=None if down.pre_scale is None else down.pre_scale[order])
    return reference_row(w13, spec.w13), reference_row([down], spec.w2)


def reference_row(matrices: Sequence[QuantizedMatrix], p: Projection) -> np.ndarray:
    """The row of gate and up, or of one matrix, of a layer whose attributes say ``p``."""
    n, k = matrices[0].shape
    scheme, orders = SCHEMES[p.format], [np.arange(k) if m.perm is None else m.perm for m in matrices]
    middle = np.uint8(scheme.zero if scheme.integer else 0)
    pre = matrices[0].pre_scale
    zeros = [np.full(m.scales.shape, middle) if m.zero_points is None else m.zero_points for m in matrices]
    scales = [np.repeat(m.scales, m.block_n, axis=0)[:n] for m in matrices]
    zeros = [np.repeat(z, m.block_n, axis=0)[:n] for z, m in zip(zeros, matrices, strict=True)]
    codes = [m.codes for m in matrices]
    if p.perm == 2:
        codes, scales, zeros = _beside(codes, scales, zeros, p, middle)
    columns = codes[0].shape[1]
    units = -(-columns // UNIT)
    block = units * UNIT if p.group_size == -1 else max(p.group_size, UNIT)
    blocks, per_block = -(-units * UNIT // block), max(1, UNIT // p.group_size) if p.group_size > 0 else 1
    fill = 0 if p.zero_points else middle
    padded = [np.pad(c, ((0, 0), (0, units * UNIT - columns)), constant_values=fill) for c in codes]

    def by_group(values: Sequence[np.ndarray]) -> np.ndarray:
        """[P][blocks][g 8][j][row g, row g + 8]"""
        wide = []
        for v in values:
            wide.append(np.zeros((n, blocks * per_block), v.dtype))
            wide[-1][:, : v.shape[1]] = v
        return _panels(wide, 0).reshape(-1, 2, 8, blocks, per_block).transpose(0, 3, 2, 4, 1)

    none: list[np.ndarray] = []
    both = [m.global_scale for m in matrices] * (3 - len(matrices))
    biases = [np.zeros(n, np.float32) if m.bias is None else m.bias.astype(np.float32) for m in matrices]
    parts = [
        [_codes(_panels(padded, fill), units, scheme.bits)],
        [_levels(_panels(scales, 0))] if "d" in (scales[0].dtype.names or ()) else [by_group(scales)],
        [by_group(zeros)] if p.zero_points else none,
        [np.array(both, np.float32)] if p.format == "nvfp4" else none,
        [_panels(biases, 0)] if p.bias else none,
        [order.astype(np.int32) for order in orders[: p.perm]],
        [np.array([matrices[0].input_scale], np.float32)] if p.activation_format in ("fp8_tensor", "nvfp4") else none,
        [np.ones(k, np.float32) if pre is None else pre.astype(np.float32)] if p.pre_scale else none,
    ]
    flat = [np.ascontiguousarray(a).reshape(-1).view(np.uint8) for part in parts for a in part]
    return np.concatenate([np.pad(a, (0, -len(a) % 64)) for a in flat])


def _beside(
    codes: list[np.ndarray], scales: list[np.ndarray], zeros: list[np.ndarray], p: Projection, middle: np.uint8
) -> tuple[list[np.ndarray], list[np.ndarray], list[np.ndarray]]:
    """Gate and up with columns for both, the other's of value zero (3.4)."""
    (n, k), g = codes[0].shape, p.group_size
    half = -(-k // max(g, UNIT)) * max(g, UNIT)
    wide_codes, wide_scales, wide_zeros = [], [], []
    for h in (0, 1):
        groups = slice(0, 1) if g == -1 else slice(h * half // g, h * half // g + scales[h].shape[1])
        for wide, own in ((wide_scales, scales[h]), (wide_zeros, zeros[h])):
            wide.append(np.zeros((n, 1 if g == -1 else 2 * half // g), own.dtype))
            wide[-1][:, groups] = own
        values = wide_zeros[h] if p.zero_points else np.full_like(wide_zeros[h], middle)
        wide_codes.append(np.repeat(values, 2 * half if g == -1 else g, axis=1).astype(codes[h].dtype))
        wide_codes[-1][:, h * half : h * half + k] = codes[h]
    return wide_codes, wide_scales, wide_zeros


def _panels(halves: Sequence[np.ndarray], fill: int) -> np.ndarray:
    """[N, ...] of gate and up, or of one matrix, as [P, 2, 8, ...]: the rows g and g + 8 of each panel (3.1)."""
    count, rest = -(-len(halves[0]) // (16 // len(halves))) * (16 // len(halves)), halves[0].shape[1:]
    rows = np.zeros((len(halves), count, *rest), halves[0].dtype)  # zero bits; the number 0 is none of e8m0's
    if fill:
        rows[:] = fill
    rows[:, : len(halves[0])] = halves
    return rows.reshape(2, -1, 8, *rest).swapaxes(0, 1) if len(halves) == 2 else rows.reshape(-1, 2, 8, *rest)


def _levels(panels: np.ndarray) -> np.ndarray:
    """Scales of two levels [P, 2, 8, blocks]: a block's factors, then its units' levels (3.3)."""
    blocks = panels.transpose(0, 3, 2, 1)
    factors, levels = (("d", "d_min"), ("scales", "minima")) if "d_min" in panels.dtype.names else (("d",), ("scales",))
    first = np.stack([blocks[name] for name in factors], -1)
    of_units = np.concatenate([blocks[name].reshape(*blocks.shape, 4, -1) for name in levels], -1)
    parts = first, of_units.transpose(0, 1, 4, 2, 3, 5)
    flat = [np.ascontiguousarray(a).reshape(*blocks.shape[:2], -1).view(np.uint8) for a in parts]
    return np.concatenate(flat, -1)


def _codes(panels: np.ndarray, units: int, bits: int) -> np.ndarray:
    """[P, 2, 8, columns] as they are stored (3.2)."""
    if bits in (5, 6):
        low = _codes(panels & 15, units, 4).reshape(len(panels), units, -1)
        x = (panels >> 4).reshape(len(panels), 2, 8, units, 2, 4, 2, 2, 2).astype(np.uint32)
        x = x.transpose([_MATRIX.index(axis) for axis in "Pugthsrab"]).reshape(len(panels), units, 32, 16, 2)
        # A lane's words: 16 places of low halves, the same of high ones.
        high, per_word = bits - 4, 16 // (bits - 4)
        x = x.reshape(len(panels), units, 32, high, per_word, 2)
        shifts = (np.arange(per_word) * high)[:, None] + np.array([0, 16])
        words = np.bitwise_or.reduce(x << shifts.astype(np.uint32), axis=(-2, -1))
        return np.concatenate([low, words.reshape(len(panels), units, -1).view(np.uint8)], -1)
    if bits == 16:
        return panels.reshape(len(panels), 16, units, UNIT).swapaxes(1, 2)
    x = panels.reshape(len(panels), 2, 8, units, 2, 4, 2, 2, 2)
    x = x.transpose([_MATRIX.index(axis) for axis in _STORED[bits]])
    if bits == 4:
        return x[..., 0] | x[..., 1] << 4
    stored = np.empty_like(x)
    g, t, h = np.ogrid[:8, :4, :2]
    stored[:, :, :, g, t ^ g // 2, h ^ t % 2] = x
    return stored
