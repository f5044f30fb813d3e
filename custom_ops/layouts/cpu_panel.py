"""Layout ``cpu_panel`` (FORMAT.md section 2): KleidiAI's p8x8 geometry for 4-bit codes, p4x8 for 8-bit integers, 16
rows column by column for floats.

``reference_panels`` is the obvious NumPy statement of the bytes; ``pack`` uses the native packer, which the tests hold
equal to it.
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
#: rows of a panel by format
ROWS = {"int4": 8, "int8": 4, "mxfp4": 8, "nvfp4": 8, "fp8_e4m3": 16, "bf16": 16, "f16": 16}
#: scale types by format
_WIDE = ("f32", "f16", "bf16")
SCALES = {"int4": _WIDE, "int8": _WIDE, "mxfp4": ("e8m0",), "nvfp4": ("e4m3",), "fp8_e4m3": (*_WIDE, "e8m0"),
          "bf16": ("f32",), "f16": ("f32",)}  # fmt: skip
#: formats that are multiplied column by column
COLUMNS = ("fp8_e4m3", "bf16", "f16")
#: activation formats whose scale the row holds
STORED_SCALE = ("fp8_tensor", "nvfp4")
INT8 = ("int8_token", "int8_token_asym")
INTEGERS = ("int4", "int8")
BITS = {name: SCHEMES[name].bits for name in ROWS}
ALIGNMENT = 64


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
        "zero_points": int(any_zeros and w13[0].format in INTEGERS),
    }
    w2 = dataclasses.replace(w2, zero_points=int(any_zeros and w2.format in INTEGERS))
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
    return _parts(spec, projection)[-1]


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
        native.pack_panels(m, w13_row[i * panel_stride(spec.w13, m.shape[1]) :], order, len(halves))
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
    if getattr(spec, projection).activation_format not in STORED_SCALE:
        return rows
    at = _parts(spec, projection)[0]
    return np.delete(rows, slice(at, at + ALIGNMENT), axis=1)


def panel_stride(p: Projection, k: int) -> int:
    """Bytes of one panel of a matrix with K input features."""
    nr, kp = ROWS[p.format], _padded(p.format, k, p.group_size)
    codes = nr * BITS[p.format] * kp // 8
    if _plain(p) and p.group_size == -1:
        return codes + 12 * nr
    per_scale = SCALE_DTYPES[p.scale_type].itemsize + p.zero_points
    tail = 8 if p.format in INTEGERS else 12
    return codes + nr * (kp // _group(p, kp) * per_scale + tail)


def reference_panels(m: QuantizedMatrix) -> np.ndarray:
    """Panels of one matrix: uint8 [panels, panel_stride]. The definition the native packer is tested against."""
    if not _plain(_describe(m, "none", "the matrix")):
        return _reference_scaled_panels(m)
    nr, (n, k) = ROWS[m.kind], m.shape
    kp = _padded(m.kind, k, m.group_size)
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


def _reference_scaled_panels(m: QuantizedMatrix) -> np.ndarray:
    """Panels with zero points, groups of 16 or codes that are floats: FORMAT.md 2.7 and 2.8."""
    p, nr, (n, k) = _describe(m, "none", "the matrix"), ROWS[m.kind], m.shape
    kp = _padded(m.kind, k, m.group_size)
    panels, parts, g = -(-n // nr), _parts_of_block(p), _group(p, kp)
    blocks, groups = kp // (g * parts), kp // g
    rows = np.minimum(np.arange(panels * nr), n - 1)
    middle = SCHEMES[m.kind].zero if m.kind in INTEGERS else 0
    codes = np.full((panels * nr, kp), middle, m.codes.dtype)
    codes[:, :k] = m.codes[rows]
    bias = np.zeros(panels * nr, np.float32) if m.bias is None else m.bias[rows].astype(np.float32)

    def by_group(a: np.ndarray, fill: int) -> np.ndarray:  # [rows, groups]
        out = np.full((panels * nr, groups), fill, a.dtype)
        out[:, : a.shape[1]] = a[rows // m.block_n]
        return out

    def in_blocks(a: np.ndarray) -> np.ndarray:  # bytes [panels, blocks, parts * nr * item]
        return _bytes(a.reshape(panels, nr, blocks, parts).transpose(0, 2, 3, 1)).reshape(panels, blocks, -1)

    scales = by_group(m.scales.view(np.uint8) if m.scales.dtype.itemsize == 1 else m.scales, 0)
    zeros = None if m.zero_points is None else by_group(m.zero_points, middle)
    sums = np.zeros((panels, nr), np.float32)
    if m.kind in COLUMNS:
        packed = codes.reshape(panels, nr, blocks, -1).transpose(0, 2, 3, 1)
    else:
        if BITS[m.kind] == 4:  # k = 32 chunk + 16 high + 8 segment + i
            q = codes.reshape(panels, nr, blocks, -1, 2, 2, 8)
            packed = q[:, :, :, :, 0] | q[:, :, :, :, 1] << 4
            packed = (packed ^ (0x88 if m.kind == "int4" else 0)).transpose(0, 2, 3, 4, 1, 5)
        else:
            packed = (codes ^ 0x80).reshape(panels, nr, blocks, -1, 8).transpose(0, 2, 3, 1, 4)
        middles = middle if zeros is None else np.repeat(zeros.astype(np.int32), g, axis=1)
        values = codes.astype(np.int32) - middles if middle else (2 * SCHEMES[m.kind].table[codes]).astype(np.int32)
        values[:, k:] = 0
        real = -(-k // g)
        terms = values.reshape(-1, groups, g).sum(2)[:, :real].astype(np.float32) * _scale_values(m)[rows // m.block_n]
        sums = np.add.accumulate(terms, axis=1, dtype=np.float32)[:, -1].reshape(panels, nr)
    parts_of_block = [_bytes(packed.reshape(panels, -1)).reshape(panels, blocks, -1), in_blocks(scales)]
    body = np.concatenate(parts_of_block + ([] if zeros is None else [in_blocks(zeros)]), axis=2)
    tail = [_bytes(sums)]
    if m.kind not in INTEGERS:
        tail.append(_bytes(np.full((panels, nr), np.float32(m.global_scale or 1) * _unit(p), np.float32)))
    return np.concatenate([body.reshape(panels, -1), *tail, _bytes(bias.reshape(panels, nr))], axis=1)


def _scale_values(m: QuantizedMatrix) -> np.ndarray:
    """f32 scales as the kernels read them: those of e4m3 times 2^-8."""
    return m.scales.astype(np.float32) * np.float32(2.0**-8 if m.scale_type == "e4m3" else 1)


def _unit(p: Projection) -> np.float32:
    """The multiplier of a global scale of 1: the powers of two that codes and scales are read without."""
    unit = {"mxfp4": 0.5, "nvfp4": 0.5, "fp8_e4m3": 256.0}.get(p.format, 1.0)
    return np.float32(unit * (256.0 if p.scale_type == "e4m3" else 1.0))


def _unpack_matrix(spec: MoESpec, projection: str, row: np.ndarray, half: int) -> QuantizedMatrix:
    """Scales and zero points a row each, also where block_n rows share them; see _shared_blocks."""
    p, n, k, panels = _geometry(spec, projection)
    nr, kp = ROWS[p.format], _padded(p.format, k, p.group_size)
    halves = 1 + spec.gated if projection == "w13" else 1
    stride = panel_stride(p, k)
    data = row[: panels * stride].reshape(panels // halves, halves, stride)[:, half]
    count = len(data)
    scale_dtype = SCALE_DTYPES[p.scale_type]
    code_bytes = nr * kp * BITS[p.format] // 8
    bias = data[:, -4 * nr :].copy().view(np.float32).reshape(-1)[:n]
    zero_points = None
    if _plain(p) and p.group_size == -1:
        packed = data[:, :code_bytes]
        wide = data[:, code_bytes + 4 * nr : code_bytes + 8 * nr].copy().view(np.float32)
        if p.format == "int4":
            wide = wide * np.float32(16)
        scales = wide.reshape(-1, 1).astype(scale_dtype)
    else:
        parts = _parts_of_block(p)
        blocks = kp // (_group(p, kp) * parts)
        body = data[:, : -(8 if p.format in INTEGERS else 12) * nr].reshape(count, blocks, -1)
        split = code_bytes // blocks
        packed = body[:, :, :split].reshape(count, code_bytes)
        groups = 1 if p.group_size == -1 else -(-k // p.group_size)

        def by_row(block_bytes: np.ndarray, dtype: np.dtype) -> np.ndarray:
            values = block_bytes.copy().view(dtype).reshape(count, blocks, parts, nr).transpose(0, 3, 1, 2)
            return values.reshape(count * nr, -1)[:, :groups]

        end = split + parts * nr * scale_dtype.itemsize
        scales = by_row(body[:, :, split:end], scale_dtype)
        if p.zero_points:
            zero_points = np.ascontiguousarray(by_row(body[:, :, end:], np.dtype(np.uint8))[:n])
            if (zero_points == SCHEMES[p.format].zero).all():
                zero_points = None
    if p.format in COLUMNS:
        codes = np.ascontiguousarray(packed).view(np.uint8 if BITS[p.format] == 8 else np.uint16)
        codes = codes.reshape(count, kp, nr).transpose(0, 2, 1).reshape(count * nr, kp)
    elif BITS[p.format] == 4:
        q = (packed ^ (0x88 if p.format == "int4" else 0)).reshape(count, kp // 32, 2, nr, 8).transpose(0, 3, 1, 2, 4)
        codes = np.stack([q & 15, q >> 4], axis=3).reshape(count * nr, kp)
    else:
        codes = (packed ^ 0x80).reshape(count, kp // 8, nr, 8).transpose(0, 2, 1, 3).reshape(count * nr, kp)
    multiplier = data[0, -8 * nr :][:4].copy().view(np.float32)[0]
    return QuantizedMatrix(
        kind=p.format,
        codes=np.ascontiguousarray(codes[:n, :k]),
        scales=np.ascontiguousarray(scales[:n]),
        group_size=p.group_size,
        zero_points=zero_points,
        global_scale=float(multiplier / _unit(p)) if p.format == "nvfp4" else None,
        input_scale=_input_scale(spec, projection, row, half),
        pre_scale=_pre_scale(spec, projection, row, half),
        bias=bias if p.bias and bias.any() else None,
    )


def _by_row(m: QuantizedMatrix) -> dict[str, Any]:
    """The fields with a row for each output feature, when block_n is 1."""
    fields = {"codes": m.codes, "scales": m.scales, "zero_points": m.zero_points, "bias": m.bias}
    return {name: value for name, value in fields.items() if value is not None}


def _shared_blocks(m: QuantizedMatrix, block_n: int) -> QuantizedMatrix:
    return m if block_n == 1 else dataclasses.replace(m, scales=m.scales[::block_n].copy(), block_n=block_n)


def _describe(m: QuantizedMatrix, activation_format: str, what: str) -> Projection:
    if m.kind not in ROWS:
        raise ValueError(f"{what}: layout {NAME} does not carry {m.kind}; it carries {', '.join(ROWS)}")
    if m.group_size not in (-1, 16) and (m.group_size <= 0 or m.group_size % 32):
        raise ValueError(f"{what}: layout {NAME} needs group_size -1, 16 or a multiple of 32, found {m.group_size}")
    if m.scale_type not in SCALES[m.kind]:
        wanted = ", ".join(SCALES[m.kind])
        raise ValueError(f"{what}: layout {NAME} carries {m.kind} with scales of type {wanted}, found {m.scale_type}")
    if BITS[m.kind] == 16 and (m.group_size != -1 or (m.scales != 1).any()):
        raise ValueError(f"{what}: layout {NAME} carries {m.kind} without scales: one of 1 a row")
    if m.block_n != 1 and m.kind != "fp8_e4m3":
        raise ValueError(f"{what}: layout {NAME} carries blocks of rows for fp8_e4m3 only, found {m.kind}")
    if m.global_scale is not None and m.kind != "nvfp4":
        raise ValueError(f"{what}: layout {NAME} carries a global scale for nvfp4 only, found {m.kind}")
    if m.zero_points is not None and m.kind not in INTEGERS:
        raise ValueError(f"{what}: layout {NAME} carries zero points for int4 and int8 only, found {m.kind}")
    if m.zero_points is not None and (m.shape[1] if m.group_size == -1 else m.group_size) > 32768:
        raise ValueError(f"{what}: layout {NAME} carries zero points for groups of at most 32768 input features")
    if activation_format in INT8 and m.kind in COLUMNS:
        raise ValueError(f"{what}: {m.kind} weights do not multiply {activation_format} activations; use float ones")
    if activation_format == "nvfp4" and m.input_scale is None:
        raise ValueError(f"{what}: nvfp4 activations need a stored input scale")
    return Projection(
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


def _check(m: QuantizedMatrix, spec: MoESpec, projection: str, what: str) -> None:
    m.check_finite(what)
    p, n, k, _ = _geometry(spec, projection)
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


def _geometry(spec: MoESpec, projection: str) -> tuple[Projection, int, int, int]:
    """(attributes, rows of one matrix, K, panels of the row)."""
    if projection == "w13":
        p, n, k, halves = spec.w13, spec.intermediate_size, spec.hidden_size, 1 + spec.gated
    else:
        p, n, k, halves = spec.w2, spec.hidden_size, spec.intermediate_size, 1
    return p, n, k, halves * -(-n // ROWS[p.format])


def _parts(spec: MoESpec, projection: str) -> tuple[int, int, int, int]:
    """Offsets of the input scales, the pre-scales and the act-orders in a row, and its size."""
    p, _, k, panels = _geometry(spec, projection)
    inputs = _align(panels * panel_stride(p, k))
    pre = inputs + (ALIGNMENT if p.activation_format in STORED_SCALE else 0)
    perms = pre + p.pre_scale * _align(4 * k)
    return inputs, pre, perms, perms + p.perm * _align(4 * k)


def _vector(spec: MoESpec, projection: str, row: np.ndarray, part: int, index: int, dtype: type) -> np.ndarray:
    """A view of [K] four-byte values: pre-scale (part 1) or act-order (part 2) number ``index``."""
    k = _geometry(spec, projection)[2]
    start = _parts(spec, projection)[part] + index * _align(4 * k)
    return row[start : start + 4 * k].view(dtype)


def _perm_view(spec: MoESpec, projection: str, row: np.ndarray, index: int) -> np.ndarray:
    return _vector(spec, projection, row, 2, index, np.int32)


def _pack_activation_scales(spec: MoESpec, projection: str, halves: list[QuantizedMatrix], row: np.ndarray) -> None:
    p, _, k, _ = _geometry(spec, projection)
    if p.activation_format in STORED_SCALE:
        at = _parts(spec, projection)[0]
        # 0: found at run time; a side's own place, so that gate and up may differ
        row[at : at + 4 * len(halves)].view(np.float32)[:] = [m.input_scale or 0 for m in halves]
    for i in range(p.pre_scale):
        found = halves[i].pre_scale
        pre = np.ones(k, np.float32) if found is None else found
        order = halves[i].perm if projection == "w2" else None  # h has the order of the packed rows
        _vector(spec, projection, row, 1, i, np.float32)[:] = pre if order is None else pre[order]


def _input_scale(spec: MoESpec, projection: str, row: np.ndarray, half: int) -> float | None:
    p, *_ = _geometry(spec, projection)
    if p.activation_format not in STORED_SCALE:
        return None
    at = _parts(spec, projection)[0] + 4 * half
    return float(row[at : at + 4].view(np.float32)[0]) or None


def _pre_scale(spec: MoESpec, projection: str, row: np.ndarray, half: int) -> np.ndarray | None:
    p, *_ = _geometry(spec, projection)
    if not p.pre_scale:
        return None
    pre = _vector(spec, projection, row, 1, min(half, p.pre_scale - 1), np.float32).copy()
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


def _plain(p: Projection) -> bool:
    """Whether the panels are those that KleidiAI has too."""
    return p.format in INTEGERS and not p.zero_points and p.group_size != 16


def _parts_of_block(p: Projection) -> int:
    return 2 if p.group_size == 16 and p.format not in COLUMNS else 1


def _group(p: Projection, kp: int) -> int:
    return kp if p.group_size == -1 else p.group_size


def _padded(format: str, k: int, group_size: int) -> int:
    multiple = 32 if group_size == -1 or (group_size == 16 and format not in COLUMNS) else group_size
    return -(-k // multiple) * multiple


def _align(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _bytes(a: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(a).view(np.uint8).reshape(len(a), -1)
