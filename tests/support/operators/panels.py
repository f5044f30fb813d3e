"""Layout cpu_panel in NumPy, as FORMAT.md sections 1 and 2 say it: the native packer's oracle."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from quantmoe.custom_ops.expert import Expert
from quantmoe.custom_ops.matrix import QuantizedMatrix, reordered
from quantmoe.custom_ops.op import MoESpec, Projection
from quantmoe.custom_ops.schemes import SCHEMES

#: rows of a panel by format
ROWS = {
    "int4": 8,
    "int8": 4,
    "mxfp4": 8,
    "nvfp4": 8,
    "fp8_e4m3": 16,
    "bf16": 16,
    "f16": 16,
    "q4_k": 16,
    "q5_k": 16,
    "q6_k": 16,
    "q2_k": 16,
    "q4_1": 16,
    "q5_1": 16,
    "nf4": 16,
    "bnb_fp4": 16,
    "q8_min": 16,
    "int2": 16,
    "int3": 16,
    "int5": 16,
    "int6": 16,
}
#: formats that are multiplied column by column
COLUMNS = ("fp8_e4m3", "bf16", "f16")
INTEGERS = ("int4", "int8")
#: formats whose row sums are zeros
TABLES = ("nf4", "bnb_fp4")
#: formats of 2.10
PLANES = ("int2", "int3", "int5", "int6")
GGML = ("q4_k", "q5_k", "q6_k", "q2_k", "q4_1", "q5_1", "nf4", "bnb_fp4", "q8_min", *PLANES)


def reference_rows(expert: Expert, spec: MoESpec) -> tuple[np.ndarray, np.ndarray]:
    """Rows of w13 and w2: uint8 [row bytes]. Gate's and up's rows come in down's order (2.6)."""
    w13 = [m for m in (expert.gate, expert.up) if m is not None]
    if expert.down.perm is not None:
        w13 = [reordered(_own_scales(m), expert.down.perm) for m in w13]
    return reference_row(w13, spec.w13), reference_row([expert.down], spec.w2, packed_order=True)


def reference_row(matrices: Sequence[QuantizedMatrix], p: Projection, packed_order: bool = False) -> np.ndarray:
    """The row of gate and up, or of one matrix, of a layer whose attributes say ``p``.

    Args:
        packed_order: pre-scales are in that of the packed columns, as those of w2 and of a linear.
    """
    k, middle = matrices[0].shape[1], SCHEMES[p.format].zero
    panels = []
    for m in matrices:
        zeros = np.full(m.scales.shape, middle, np.uint8) if m.zero_points is None else m.zero_points
        panels.append(reference_panels(replace(m, zero_points=zeros if p.zero_points else None)))
    parts = [np.stack(panels, axis=1)]
    if p.activation_format in ("fp8_tensor", "nvfp4"):
        parts.append(np.array([m.input_scale or 0 for m in matrices], np.float32))
    for m in matrices[: p.pre_scale]:
        pre = np.ones(k, np.float32) if m.pre_scale is None else m.pre_scale
        parts.append(pre[m.perm] if packed_order and m.perm is not None else pre)
    parts += [np.arange(k, dtype=np.int32) if m.perm is None else m.perm for m in matrices[: p.perm]]
    flat = [part.reshape(-1).view(np.uint8) for part in parts]
    return np.concatenate([np.pad(part, (0, -len(part) % 64)) for part in flat])


def _own_scales(m: QuantizedMatrix) -> QuantizedMatrix:
    """With a scale for each row, which is how panels have them."""
    return replace(m, scales=np.repeat(m.scales, m.block_n, axis=0)[: len(m.codes)], block_n=1)


def reference_panels(m: QuantizedMatrix) -> np.ndarray:
    """Panels of one matrix: uint8 [panels, bytes of a panel]. The definition the native packer is tested against."""
    if m.kind in GGML:
        return _reference_k_panels(m)
    if not _plain(m):
        return _reference_scaled_panels(m)
    nr, (n, k) = ROWS[m.kind], m.shape
    kp = _padded(m)
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
    nr, (n, k) = ROWS[m.kind], m.shape
    kp = _padded(m)
    panels, parts, g = -(-n // nr), _parts_of_block(m), _group(m, kp)
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
        if SCHEMES[m.kind].bits == 4:  # k = 32 chunk + 16 high + 8 segment + i
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
        tail.append(_bytes(np.full((panels, nr), np.float32(m.global_scale or 1) * _unit(m), np.float32)))
    return np.concatenate([body.reshape(panels, -1), *tail, _bytes(bias.reshape(panels, nr))], axis=1)


def _reference_k_panels(m: QuantizedMatrix) -> np.ndarray:
    """Panels with two levels of scales, minima, codes that are places in a table, or planes: FORMAT.md 2.10."""
    scales = m.scales if m.scales.dtype.names else np.ascontiguousarray(m.scales).view([("d", m.scales.dtype)])
    (n, k), blocks, bits = m.shape, scales.shape[1], SCHEMES[m.kind].bits
    panels, columns = -(-n // 16), -(-k // 32) * 32 if m.group_size == -1 else m.group_size
    rows = np.minimum(np.arange(panels * 16), n - 1)
    codes, real = np.zeros((2, panels * 16, blocks * columns), np.uint8)
    codes[:, :k], real[:, :k] = m.codes[rows], 1
    # [panels, blocks, chunks, fours, rows, columns]
    fours = codes.reshape(panels, 16, blocks, columns // 32, 8, 4).transpose(0, 2, 3, 4, 1, 5)
    planes, low = [], 0
    for width in (8, 4, 2, 1):  # bits of a code in a byte of its plane
        if not bits & width:
            continue
        for plane in range(width):
            # a nibble is beside that of 16 columns further
            of_plane = (plane, plane + 4) if width == 4 else range(8 // width * plane, 8 // width * (plane + 1))
            part = (fours[:, :, :, j] >> low & (1 << width) - 1 for j in of_plane)
            planes.append(sum(code << (i * width) for i, code in enumerate(part)))
        low += width
    body = [np.stack(planes, 3).reshape(panels, blocks, -1)]
    stored = scales[rows].reshape(panels, 16, blocks)
    body += [_bytes(stored[name].transpose(0, 2, 1)).reshape(panels, blocks, -1)
             for name in ("d", "d_min") if name in stored.dtype.names]  # fmt: skip
    body += [_bytes(stored[name].transpose(0, 2, 3, 1)).reshape(panels, blocks, -1)
             for name in ("scales", "minima", "levels") if name in stored.dtype.names]  # fmt: skip
    middle = np.full(scales.shape, SCHEMES[m.kind].zero, np.uint8)
    zeros = (middle if m.zero_points is None else m.zero_points)[rows]
    if m.zero_points is not None:
        body.append(_bytes(zeros.reshape(panels, 16, blocks).transpose(0, 2, 1)).reshape(panels, blocks, -1))
    sums = np.zeros(panels * 16, np.float32)
    wide = 16 if m.kind in ("q2_k", "q6_k") else 32
    groups, minima = columns // wide, "d_min" in scales.dtype.names or m.kind in PLANES
    values = (
        ((codes.astype(np.int32) - (32 if m.kind == "q6_k" else 0)) * real * (m.kind not in TABLES))
        .reshape(-1, blocks, groups, wide)
        .sum(3)
    )
    counts = real.reshape(-1, blocks, groups, wide).sum(3, dtype=np.int32)
    flat = scales[rows]
    one = np.ones((panels * 16, blocks, groups), np.float32)
    if m.kind == "q2_k":
        levels = (flat["levels"] & 15).astype(np.float32), (flat["levels"] >> 4).astype(np.float32)
    else:
        levels = tuple(flat[name].astype(np.float32) if name in flat.dtype.names else one
                       for name in ("scales", "minima"))  # fmt: skip
    for b in range(blocks):
        for g in range(groups):
            d = flat["d"][:, b].astype(np.float32) * levels[0][:, b, g]
            sums = sums + values[:, b, g].astype(np.float32) * d
            if minima:
                minimum = (
                    d * zeros[:, b].astype(np.float32)
                    if m.kind in PLANES
                    else flat["d_min"][:, b].astype(np.float32) * levels[1][:, b, g]
                )
                sums = sums - counts[:, b, g].astype(np.float32) * minimum
    bias = np.zeros(panels * 16, np.float32) if m.bias is None else m.bias[rows].astype(np.float32)
    tail = [_bytes(a.reshape(panels, 16)) for a in (sums, bias)]
    return np.concatenate([np.concatenate(body, axis=2).reshape(panels, -1), *tail], axis=1)


def _scale_values(m: QuantizedMatrix) -> np.ndarray:
    """f32 scales as the kernels read them: those of e4m3 times 2^-8."""
    return m.scales.astype(np.float32) * np.float32(2.0**-8 if m.scale_type == "e4m3" else 1)


def _unit(m: QuantizedMatrix) -> np.float32:
    """The multiplier of a global scale of 1: the powers of two that codes and scales are read without."""
    unit = {"mxfp4": 0.5, "nvfp4": 0.5, "fp8_e4m3": 256.0}.get(m.kind, 1.0)
    return np.float32(unit * (256.0 if m.scale_type == "e4m3" else 1.0))


def _plain(m: QuantizedMatrix) -> bool:
    """Whether the panels are those that KleidiAI has too."""
    return m.kind in INTEGERS and m.zero_points is None and m.group_size != 16


def _parts_of_block(m: QuantizedMatrix) -> int:
    return 2 if m.group_size == 16 and m.kind not in COLUMNS else 1


def _group(m: QuantizedMatrix, kp: int) -> int:
    return kp if m.group_size == -1 else m.group_size


def _padded(m: QuantizedMatrix) -> int:
    """Columns that are stored."""
    multiple = 32 if m.group_size == -1 or _parts_of_block(m) == 2 else m.group_size
    return -(-m.shape[1] // multiple) * multiple


def _bytes(a: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(a).view(np.uint8).reshape(len(a), -1)
