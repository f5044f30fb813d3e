"""Layout ``cpu_panel`` (FORMAT.md section 2): KleidiAI's p8x8 geometry for 4-bit codes, p4x8 for 8-bit integers, 16
rows column by column for floats, 16 rows four columns at a time for ggml's K-quants.

Geometry, the bytes of panels and what is refused are the library's (src/layouts/cpu_panel.h). tests/panels.py states
the panels once more, in NumPy.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from quantmoe.custom_ops import native
from quantmoe.custom_ops.expert import Expert
from quantmoe.custom_ops.matrix import SCALE_DTYPES, QuantizedMatrix, perm_or_none, same_order
from quantmoe.custom_ops.op import MoESpec, Projection
from quantmoe.custom_ops.schemes import SCHEMES

NAME, VERSION = "cpu_panel", 1
_NVFP4_UNIT = np.float32(128)  # the multiplier of a global scale of 1, FORMAT.md 2.8


def describe(
    expert: Expert, activation_format: str, down_activation_format: str | None = None
) -> tuple[Projection, Projection]:
    """The (w13, w2) attributes under which this layout stores ``expert``; see layouts/__init__.py.

    ``down_activation_format``: of w2, where it differs.
    """
    halves = [m for m in (expert.gate, expert.up) if m is not None]
    w13 = [_describe(m, activation_format, what) for m, what in zip(halves[::-1], ("up", "gate"), strict=False)]
    w2 = describe_down(expert.down, down_activation_format or activation_format)
    perm = 0
    if any(p.perm for p in w13):
        same = len(halves) == 1 or same_order(halves[0].perm, halves[1].perm)
        perm = 1 if same else 2
    # A side that has none may be the odd one of its layer: readers drop zero points that are all the midpoint.
    any_zeros = any(m.zero_points is not None for m in (*halves, expert.down))
    optional: dict[str, Any] = {
        "perm": perm,
        "bias": max(p.bias for p in w13),
        "pre_scale": len(halves) * max(p.pre_scale for p in w13),
        "zero_points": int(any_zeros and SCHEMES[w13[0].format].integer),
    }
    w2 = dataclasses.replace(w2, zero_points=int(any_zeros and SCHEMES[w2.format].integer))
    merged = dataclasses.replace(w13[0], **optional)
    for other in w13[1:]:
        if dataclasses.replace(other, **optional) != merged:
            raise ValueError(f"gate and up are stored differently: {other} against {merged}")
    return merged, w2


def describe_down(m: QuantizedMatrix, activation_format: str) -> Projection:
    """The attributes under which this layout stores a w2, or the one matrix of a QuantLinear."""
    return _describe(m, activation_format, "down")


def row_bytes(spec: MoESpec, projection: str) -> int:
    """Bytes of one expert's row of ``projection`` ("w13" or "w2"), a multiple of 64."""
    return _row(spec, projection).row_bytes


def pack(expert: Expert, spec: MoESpec, w13_row: np.ndarray, w2_row: np.ndarray) -> None:
    """Writes one expert into ``w13_row`` and ``w2_row``: uint8 [row_bytes], C-contiguous.

    Raises:
        ValueError: ``expert`` does not fit ``spec`` (shapes, format, scales, or an act-order ``spec`` has no room for).
    """
    order = expert.down.perm
    pack_down(expert.down, spec, w2_row)
    w13_row[:] = 0
    halves = [m for m in (expert.gate, expert.up) if m is not None]
    for i, m in enumerate(halves):
        _check(m, spec, "w13", "gate" if m is expert.gate else "up")
        m = _with_zero_points(m, spec.w13)
        native.pack_panels(m, w13_row[i * _row(spec, "w13").panel_bytes :], order, len(halves))
    _pack_activation_scales(spec, "w13", halves, w13_row)
    k = spec.hidden_size
    if spec.w13.perm:
        perms = [np.arange(k, dtype=np.int32) if m.perm is None else m.perm for m in halves]
        if spec.w13.perm == 1 and any(not np.array_equal(perms[0], p) for p in perms):
            raise ValueError(
                "gate and up have different act-orders, those of the other experts of the layer do not (w13_perm is 1)"
            )
        for i in range(spec.w13.perm):
            _perm_view(spec, "w13", w13_row, i)[:] = perms[i]
    elif any(m.perm is not None for m in halves):
        raise ValueError("gate or up is in act-order and the other experts of the layer are not (w13_perm is 0)")


def pack_down(m: QuantizedMatrix, spec: MoESpec, w2_row: np.ndarray) -> None:
    """Writes one expert's w2 alone: uint8 [row_bytes], C-contiguous; errors as :func:`pack`."""
    if m.perm is not None and not spec.w2.perm:
        raise ValueError("down is in act-order and the other experts of the layer are not (w2_perm is 0)")
    w2_row[:] = 0
    _check(m, spec, "w2", "down")
    native.pack_panels(_with_zero_points(m, spec.w2), w2_row)
    _pack_activation_scales(spec, "w2", [m], w2_row)
    if spec.w2.perm:
        _perm_view(spec, "w2", w2_row, 0)[:] = np.arange(spec.intermediate_size) if m.perm is None else m.perm


def unpack(spec: MoESpec, w13_row: np.ndarray, w2_row: np.ndarray) -> Expert:
    """The expert that ``pack`` wrote, bit for bit; identity act-orders, zero biases and zero points that are all
    the midpoint come back as None."""
    down = unpack_down(spec, w2_row)
    order = down.perm
    halves = [_unpack_matrix(spec, "w13", w13_row, i) for i in range(1 + spec.gated)]
    for i, m in enumerate(halves):
        if spec.w13.perm:
            m = dataclasses.replace(
                m, perm=perm_or_none(_perm_view(spec, "w13", w13_row, min(i, spec.w13.perm - 1)).copy())
            )
        if order is not None:
            original = np.argsort(order)
            m = dataclasses.replace(m, **{name: value[original] for name, value in _by_row(m).items()})
        halves[i] = _shared_blocks(m, spec.w13.block_n)
    return Expert(halves[0] if spec.gated else None, halves[-1], down)


def unpack_down(spec: MoESpec, w2_row: np.ndarray) -> QuantizedMatrix:
    """The matrix that ``pack_down`` wrote, bit for bit."""
    m = _shared_blocks(_unpack_matrix(spec, "w2", w2_row, 0), spec.w2.block_n)
    return dataclasses.replace(m, perm=perm_or_none(_perm_view(spec, "w2", w2_row, 0).copy())) if spec.w2.perm else m


def without_input_scales(spec: MoESpec, projection: str, rows: np.ndarray) -> np.ndarray:
    """Packed rows [experts, row_bytes] as they are with float activations; the same array where they hold no scales."""
    row = _row(spec, projection)
    return np.delete(rows, slice(row.input_scales, row.pre_scales), axis=1) if _holds_scales(row) else rows


def _unpack_matrix(spec: MoESpec, projection: str, row: np.ndarray, half: int) -> QuantizedMatrix:
    """Scales and zero points a row each, also where block_n rows share them; see _shared_blocks."""
    p, n, k, halves = _sizes(spec, projection)
    g, scheme, scale_dtype = _row(spec, projection), SCHEMES[p.format], SCALE_DTYPES[p.scale_type]
    data = row[: g.panels * g.panel_bytes].reshape(-1, halves, g.panel_bytes)[:, half]
    body = data[:, : g.sums].reshape(-1, g.blocks, g.block_bytes)
    packed = np.ascontiguousarray(body[:, :, : g.codes_bytes]).reshape(len(data), -1)
    groups = 1 if p.group_size == -1 else -(-k // p.group_size)

    def tail(at: int) -> np.ndarray:  # f32 [rows with padding]
        return np.ascontiguousarray(data[:, at : at + 4 * g.rows]).view(np.float32).reshape(-1)

    def by_row(at: int, end: int, dtype: np.dtype) -> np.ndarray:
        values = np.ascontiguousarray(body[:, :, at:end]).view(dtype).reshape(-1, g.blocks, g.parts, g.rows)
        return values.transpose(0, 3, 1, 2).reshape(len(data) * g.rows, -1)[:n, :groups]

    zero_points = None
    if scale_dtype.names is not None:
        scales = _unpack_levels(body[:, :, g.codes_bytes :], scale_dtype)
    elif g.codes_bytes == g.block_bytes:  # scales of rows
        scales = (tail(g.factors) * np.float32(16 if scheme.bits == 4 else 1)).reshape(-1, 1).astype(scale_dtype)
    else:
        scales = by_row(g.codes_bytes, g.zeros, scale_dtype)
    if p.zero_points:
        zero_points = np.ascontiguousarray(by_row(g.zeros, g.block_bytes, np.dtype(np.uint8)))
        if (zero_points == scheme.zero).all():
            zero_points = None
    codes: np.ndarray
    if g.by_columns:
        numbers = packed.view(np.uint8 if scheme.bits == 8 else np.uint16)
        codes = numbers.reshape(-1, g.columns, g.rows).transpose(0, 2, 1)
    elif scale_dtype.names is not None:
        codes = _unpack_k_codes(packed.reshape(len(data), g.blocks * 8, -1, g.rows, 4), scheme.bits - 4)
    elif scheme.bits == 4:
        q = (
            (packed ^ (0x88 if scheme.integer else 0))
            .reshape(-1, g.columns // 32, 2, g.rows, 8)
            .transpose(0, 3, 1, 2, 4)
        )
        codes = np.stack([q & 15, q >> 4], axis=3)
    else:
        codes = (packed ^ 0x80).reshape(-1, g.columns // 8, g.rows, 8).transpose(0, 2, 1, 3)
    bias = tail(g.biases)[:n]
    return QuantizedMatrix(
        kind=p.format,
        codes=np.ascontiguousarray(codes.reshape(-1, g.columns)[:n, :k]),
        scales=np.ascontiguousarray(scales[:n]),
        group_size=p.group_size,
        zero_points=zero_points,
        global_scale=float(tail(g.factors)[0] / _NVFP4_UNIT) if p.format == "nvfp4" else None,
        input_scale=_input_scale(spec, projection, row, half),
        pre_scale=_pre_scale(spec, projection, row, half),
        bias=bias if p.bias and bias.any() else None,
    )


def _unpack_levels(parts: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Scales of two levels, uint8 [panels, blocks, bytes], a row each: [rows, blocks] of ``dtype``."""
    panels, blocks, size = parts.shape
    rows = size // dtype.itemsize
    out, at = np.empty((panels, rows, blocks), dtype), 0
    for name in dtype.names or ():
        count = int(np.prod(dtype[name].shape))
        end = at + rows * dtype[name].itemsize
        values = np.ascontiguousarray(parts[:, :, at:end]).view(dtype[name].base).reshape(panels, blocks, count, rows)
        out[name] = values.transpose(0, 3, 1, 2).reshape(out[name].shape)
        at = end
    return out.reshape(-1, blocks)


def _unpack_k_codes(chunks: np.ndarray, high: int) -> np.ndarray:
    """Codes of FORMAT.md 2.10: [panels, chunks, 4 + high, rows, 4] -> [panels, rows, chunks, fours of columns, 4]."""
    nibbles = np.concatenate([chunks[:, :, :4] & 15, chunks[:, :, :4] >> 4], axis=2)
    if high:
        shifts = np.arange(0, 8, high, dtype=np.uint8)[:, None, None]
        bits = chunks[:, :, 4:, None] >> shifts & (1 << high) - 1
        nibbles |= bits.reshape(nibbles.shape) << 4
    return nibbles.transpose(0, 3, 1, 2, 4)


def _by_row(m: QuantizedMatrix) -> dict[str, Any]:
    """The fields with a row for each output feature, when block_n is 1."""
    fields = {"codes": m.codes, "scales": m.scales, "zero_points": m.zero_points, "bias": m.bias}
    return {name: value for name, value in fields.items() if value is not None}


def _shared_blocks(m: QuantizedMatrix, block_n: int) -> QuantizedMatrix:
    return m if block_n == 1 else dataclasses.replace(m, scales=m.scales[::block_n].copy(), block_n=block_n)


def _describe(m: QuantizedMatrix, activation_format: str, what: str) -> Projection:
    """What attributes cannot say is refused here, the attributes by the library."""
    if m.kind in ("bf16", "f16") and (m.scales != 1).any():
        raise ValueError(f"{what}: layout {NAME} carries {m.kind} without scales: one of 1 a row")
    if m.global_scale is not None and m.kind != "nvfp4":
        raise ValueError(f"{what}: layout {NAME} carries a global scale for nvfp4 only, found {m.kind}")
    if activation_format == "nvfp4" and m.input_scale is None:
        raise ValueError(f"{what}: nvfp4 activations need a stored input scale")
    found = Projection(
        format=m.kind,
        group_size=m.group_size,
        block_n=m.block_n,
        scale_type=m.scale_type,
        zero_points=int(m.zero_points is not None),
        activation_format=activation_format,
        layout=NAME,
        layout_version=VERSION,
        bias=int(m.bias is not None),
        perm=int(m.perm is not None),
        pre_scale=int(m.pre_scale is not None),
    )
    try:
        native.panel_row(found, *m.shape, 1)
    except ValueError as error:
        raise ValueError(f"{what}: layout {NAME}: {error}") from error
    return found


def _check(m: QuantizedMatrix, spec: MoESpec, projection: str, what: str) -> None:
    m.check_finite(what)
    p, n, k, _ = _sizes(spec, projection)
    if m.shape != (n, k):
        raise ValueError(f"{what} has shape {list(m.shape)}, expected {[n, k]}")
    found = _describe(m, p.activation_format, what)
    if found.zero_points > p.zero_points:
        raise ValueError(f"{what} has zero points and the layer's node says {projection}_zero_points is 0")
    if found.pre_scale and not p.pre_scale:
        raise ValueError(f"{what} has a pre_scale and the layer's node says {projection}_pre_scale is 0")
    optional: dict[str, Any] = {"perm": p.perm, "bias": p.bias, "zero_points": p.zero_points, "pre_scale": p.pre_scale}
    if dataclasses.replace(found, **optional) != p:
        raise ValueError(f"{what} is {found}, the layer's node says {p}")
    if found.bias and not p.bias:
        raise ValueError(f"{what} has a bias and the other experts of the layer have none ({projection}_bias is 0)")


def _sizes(spec: MoESpec, projection: str) -> tuple[Projection, int, int, int]:
    """(attributes, rows of one matrix, K, matrices)."""
    if projection == "w13":
        return spec.w13, spec.intermediate_size, spec.hidden_size, 1 + spec.gated
    return spec.w2, spec.hidden_size, spec.intermediate_size, 1


def _row(spec: MoESpec, projection: str) -> native.PanelRow:
    return native.panel_row(*_sizes(spec, projection))


def _holds_scales(row: native.PanelRow) -> bool:
    """Whether the scales that activations are quantized with are in the row."""
    return row.pre_scales > row.input_scales


def _vector(spec: MoESpec, projection: str, row: np.ndarray, part: str, index: int, dtype: type) -> np.ndarray:
    """A view of [K] four-byte values: of part "pre_scales" or "perms" number ``index``."""
    g = _row(spec, projection)
    start = getattr(g, part) + index * g.vector_bytes
    return row[start : start + 4 * _sizes(spec, projection)[2]].view(dtype)


def _perm_view(spec: MoESpec, projection: str, row: np.ndarray, index: int) -> np.ndarray:
    return _vector(spec, projection, row, "perms", index, np.int32)


def _pack_activation_scales(spec: MoESpec, projection: str, halves: list[QuantizedMatrix], row: np.ndarray) -> None:
    p, _, k, _ = _sizes(spec, projection)
    g = _row(spec, projection)
    if _holds_scales(g):
        at = g.input_scales
        # 0: found at run time; a side's own place, so that gate and up may differ
        row[at : at + 4 * len(halves)].view(np.float32)[:] = [m.input_scale or 0 for m in halves]
    for i in range(p.pre_scale):
        found = halves[i].pre_scale
        pre = np.ones(k, np.float32) if found is None else found
        order = halves[i].perm if projection == "w2" else None  # h has the order of the packed rows
        _vector(spec, projection, row, "pre_scales", i, np.float32)[:] = pre if order is None else pre[order]


def _input_scale(spec: MoESpec, projection: str, row: np.ndarray, half: int) -> float | None:
    g = _row(spec, projection)
    if not _holds_scales(g):
        return None
    at = g.input_scales + 4 * half
    return float(row[at : at + 4].view(np.float32)[0]) or None


def _pre_scale(spec: MoESpec, projection: str, row: np.ndarray, half: int) -> np.ndarray | None:
    p, *_ = _sizes(spec, projection)
    if not p.pre_scale:
        return None
    pre = _vector(spec, projection, row, "pre_scales", min(half, p.pre_scale - 1), np.float32).copy()
    if projection == "w2" and p.perm:
        by_feature = np.empty_like(pre)
        by_feature[_perm_view(spec, projection, row, 0)] = pre
        pre = by_feature
    return None if (pre == 1).all() else pre


def _with_zero_points(m: QuantizedMatrix, p: Projection) -> QuantizedMatrix:
    """With the midpoint as zero points where other matrices of the layer have some."""
    if not p.zero_points or m.zero_points is not None:
        return m
    return dataclasses.replace(m, zero_points=np.full(m.scales.shape, SCHEMES[m.kind].zero, np.uint8))
