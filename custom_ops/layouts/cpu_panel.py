"""Layout ``cpu_panel`` (FORMAT.md section 2): KleidiAI's p8x8 geometry for 4-bit codes, p4x8 for 8-bit codes.

``reference_panels`` is the obvious NumPy statement of the bytes; ``pack`` uses the native packer, which the tests hold
equal to it.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from quantmoe.custom_ops import native
from quantmoe.custom_ops.expert import Expert
from quantmoe.custom_ops.matrix import SCALE_DTYPES, QuantizedMatrix, same_order
from quantmoe.custom_ops.op import MoESpec, Projection
from quantmoe.custom_ops.schemes import SCHEMES

NAME, VERSION = "cpu_panel", 1
#: rows of a panel by format
ROWS = {"int4": 8, "int8": 4}
ALIGNMENT = 64


def describe(expert: Expert, activation_format: str) -> tuple[Projection, Projection]:
    """The (w13, w2) attributes under which this layout stores ``expert``; see layouts/__init__.py."""
    halves = [m for m in (expert.gate, expert.up) if m is not None]
    w13 = [_describe(m, activation_format, what) for m, what in zip(halves[::-1], ("up", "gate"), strict=False)]
    w2 = describe_down(expert.down, activation_format)
    perm = 0
    if any(p.perm for p in w13):
        same = len(halves) == 1 or same_order(halves[0].perm, halves[1].perm)
        perm = 1 if same else 2
    merged = dataclasses.replace(w13[0], perm=perm, bias=max(p.bias for p in w13))
    for other in w13[1:]:
        if dataclasses.replace(other, perm=perm, bias=merged.bias) != merged:
            raise ValueError(f"gate and up are stored differently: {other} against {merged}")
    return merged, w2


def describe_down(m: QuantizedMatrix, activation_format: str) -> Projection:
    """The attributes under which this layout stores a w2, or the one matrix of a QuantLinear."""
    return _describe(m, activation_format, "down")


def row_bytes(spec: MoESpec, projection: str) -> int:
    """Bytes of one expert's row of ``projection`` ("w13" or "w2"), a multiple of 64."""
    p, _, k, panels = _geometry(spec, projection)
    size = _align(panels * panel_stride(p.format, k, p.group_size, p.scale_type))
    return size + p.perm * _align(4 * k)


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
        stride = panel_stride(m.kind, m.shape[1], m.group_size, m.scale_type)
        native.pack_panels(m, w13_row[i * stride :], row_order=order, panel_step=len(halves))
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
    native.pack_panels(m, w2_row)
    if spec.w2.perm:
        _perm_view(spec, "w2", w2_row, 0)[:] = np.arange(spec.intermediate_size) if m.perm is None else m.perm


def unpack(spec: MoESpec, w13_row: np.ndarray, w2_row: np.ndarray) -> Expert:
    """The expert that ``pack`` wrote, bit for bit; identity act-orders and zero biases come back as None."""
    down = unpack_down(spec, w2_row)
    order = down.perm
    halves = [_unpack_matrix(spec, "w13", w13_row, i) for i in range(1 + spec.gated)]
    for i, m in enumerate(halves):
        if spec.w13.perm:
            m = dataclasses.replace(
                m, perm=_perm_or_none(_perm_view(spec, "w13", w13_row, min(i, spec.w13.perm - 1)).copy())
            )
        if order is not None:
            original = np.argsort(order)
            m = dataclasses.replace(
                m, codes=m.codes[original], scales=m.scales[original], bias=None if m.bias is None else m.bias[original]
            )
        halves[i] = m
    return Expert(halves[0] if spec.gated else None, halves[-1], down)


def unpack_down(spec: MoESpec, w2_row: np.ndarray) -> QuantizedMatrix:
    """The matrix that ``pack_down`` wrote, bit for bit."""
    m = _unpack_matrix(spec, "w2", w2_row, 0)
    return dataclasses.replace(m, perm=_perm_or_none(_perm_view(spec, "w2", w2_row, 0).copy())) if spec.w2.perm else m


def panel_stride(format: str, k: int, group_size: int, scale_type: str) -> int:
    """Bytes of one panel."""
    nr, bits = ROWS[format], SCHEMES[format].bits
    kp = _padded(k, group_size)
    if group_size == -1:
        return nr * (bits * kp // 8 + 12)
    return nr * (bits * kp // 8 + kp // group_size * SCALE_DTYPES[scale_type].itemsize + 8)


def reference_panels(m: QuantizedMatrix) -> np.ndarray:
    """Panels of one matrix: uint8 [panels, panel_stride]. The definition the native packer is tested against."""
    nr, (n, k) = ROWS[m.kind], m.shape
    kp = _padded(k, m.group_size)
    panels = -(-n // nr)
    rows = np.minimum(np.arange(panels * nr), n - 1)
    codes = np.full((panels * nr, kp), SCHEMES[m.kind].zero, np.uint8)
    codes[:, :k] = m.codes[rows]
    bias = np.zeros(panels * nr, np.float32) if m.bias is None else m.bias[rows].astype(np.float32)
    scales = m.scales[rows].reshape(panels, nr, -1)
    values = codes.astype(np.int32) - SCHEMES[m.kind].zero

    if m.kind == "int4":
        # k = 32 chunk + 16 high + 8 segment + i
        q = codes.reshape(panels, nr, kp // 32, 2, 2, 8)
        packed = ((q[:, :, :, 0] | q[:, :, :, 1] << 4) ^ 0x88).transpose(0, 2, 3, 1, 4)
        pieces = values.reshape(panels, nr, kp // 32, 2, 2, 8).sum((3, 5)).reshape(panels, nr, kp // 16)
    else:
        packed = (codes ^ 0x80).reshape(panels, nr, kp // 8, 8).transpose(0, 2, 1, 3)
        pieces = values.reshape(panels, nr, kp // 8, 8).sum(3)

    if m.group_size == -1:
        sums, wide = pieces.sum(2, dtype=np.int32), scales[:, :, 0].astype(np.float32)
        if m.kind == "int4":
            sums, wide = sums * 16, wide * np.float32(1 / 16)
        parts = [packed.reshape(panels, -1), _bytes(sums), _bytes(wide)]
    else:
        blocks = kp // m.group_size
        per_piece = np.repeat(scales.astype(np.float32), pieces.shape[2] // blocks, axis=2)
        terms = pieces.astype(np.float32) * per_piece
        sums = np.add.accumulate(terms, axis=2, dtype=np.float32)[:, :, -1]
        block_scales = _bytes(scales.transpose(0, 2, 1)).reshape(panels, blocks, -1)
        body = np.concatenate([packed.reshape(panels, blocks, -1), block_scales], axis=2)
        parts = [body.reshape(panels, -1), _bytes(sums)]
    return np.concatenate([*parts, _bytes(bias.reshape(panels, nr))], axis=1)


def _unpack_matrix(spec: MoESpec, projection: str, row: np.ndarray, half: int) -> QuantizedMatrix:
    p, n, k, panels = _geometry(spec, projection)
    nr, kp = ROWS[p.format], _padded(k, p.group_size)
    halves = 1 + spec.gated if projection == "w13" else 1
    stride = panel_stride(p.format, k, p.group_size, p.scale_type)
    data = row[: panels * stride].reshape(panels // halves, halves, stride)[:, half]
    count = len(data)
    scale_dtype = SCALE_DTYPES[p.scale_type]
    code_bytes = nr * kp * SCHEMES[p.format].bits // 8
    bias = data[:, -4 * nr :].copy().view(np.float32).reshape(-1)[:n]
    if p.group_size == -1:
        packed = data[:, :code_bytes]
        wide = data[:, code_bytes + 4 * nr : code_bytes + 8 * nr].copy().view(np.float32)
        if p.format == "int4":
            wide = wide * np.float32(16)
        scales = wide.reshape(-1, 1).astype(scale_dtype)
    else:
        blocks = kp // p.group_size
        body = data[:, : -8 * nr].reshape(count, blocks, -1)
        split = code_bytes // blocks
        packed = body[:, :, :split].reshape(count, code_bytes)
        scales = body[:, :, split:].copy().view(scale_dtype).reshape(count, blocks, nr).transpose(0, 2, 1)
        scales = scales.reshape(count * nr, blocks)
    if p.format == "int4":
        q = (packed ^ 0x88).reshape(count, kp // 32, 2, nr, 8).transpose(0, 3, 1, 2, 4)
        codes = np.stack([q & 15, q >> 4], axis=3).reshape(count * nr, kp)
    else:
        codes = (packed ^ 0x80).reshape(count, kp // 8, nr, 8).transpose(0, 2, 1, 3).reshape(count * nr, kp)
    return QuantizedMatrix(
        kind=p.format,
        codes=np.ascontiguousarray(codes[:n, :k]),
        scales=np.ascontiguousarray(scales[:n]),
        group_size=p.group_size,
        bias=bias if p.bias and bias.any() else None,
    )


def _describe(m: QuantizedMatrix, activation_format: str, what: str) -> Projection:
    if m.kind not in ROWS:
        raise ValueError(f"{what}: layout {NAME} does not carry {m.kind}; it carries {', '.join(ROWS)}")
    if m.group_size != -1 and (m.group_size <= 0 or m.group_size % 32):
        raise ValueError(f"{what}: layout {NAME} needs a group_size of -1 or a multiple of 32, found {m.group_size}")
    for name in ("zero_points", "global_scale", "pre_scale"):
        if getattr(m, name) is not None:
            raise ValueError(f"{what}: layout {NAME} does not carry {name}")
    if m.block_n != 1 or m.scale_type not in ("f32", "f16", "bf16"):
        raise ValueError(f"{what}: layout {NAME} carries one f32, f16 or bf16 scale a row and group")
    return Projection(
        format=m.kind,
        group_size=m.group_size,
        scale_type=m.scale_type,
        activation_format=activation_format,
        layout=NAME,
        layout_version=VERSION,
        bias=int(m.bias is not None),
        perm=int(m.perm is not None),
    )


def _check(m: QuantizedMatrix, spec: MoESpec, projection: str, what: str) -> None:
    p, n, k, _ = _geometry(spec, projection)
    if not np.isfinite(m.scales.astype(np.float32)).all():
        raise ValueError(f"{what} has scales that are NaN or infinite")
    if m.shape != (n, k):
        raise ValueError(f"{what} has shape {list(m.shape)}, expected {[n, k]}")
    found = _describe(m, p.activation_format, what)
    if dataclasses.replace(found, perm=p.perm, bias=p.bias) != p:
        raise ValueError(f"{what} is {found}, the layer's node says {p}")
    if found.bias and not p.bias:
        raise ValueError(f"{what} has a bias and the other experts of the layer have none ({projection}_bias is 0)")


def _geometry(spec: MoESpec, projection: str) -> tuple[Projection, int, int, int]:
    """(attributes, rows of one matrix, K, panels of the row)."""
    if projection == "w13":
        p, n, k, halves = spec.w13, spec.intermediate_size, spec.hidden_size, 1 + spec.gated
    else:
        p, n, k, halves = spec.w2, spec.hidden_size, spec.intermediate_size, 1
    return p, n, k, halves * -(-n // ROWS[p.format])


def _perm_view(spec: MoESpec, projection: str, row: np.ndarray, index: int) -> np.ndarray:
    p, _, k, _ = _geometry(spec, projection)
    step = _align(4 * k)
    start = len(row) - (p.perm - index) * step
    return row[start : start + 4 * k].view(np.int32)


def _perm_or_none(perm: np.ndarray) -> np.ndarray | None:
    return None if np.array_equal(perm, np.arange(len(perm))) else perm


def _padded(k: int, group_size: int) -> int:
    multiple = 32 if group_size == -1 else group_size
    return -(-k // multiple) * multiple


def _align(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _bytes(a: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(a).view(np.uint8).reshape(len(a), -1)
