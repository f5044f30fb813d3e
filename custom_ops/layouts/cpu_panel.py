"""Layout ``cpu_panel`` (FORMAT.md section 2).

4-bit codes have KleidiAI's p8x8 geometry, 8-bit integers p4x8. Floats are 16 rows column by column, ggml's K-quants 16
rows four columns at a time.

Geometry, bytes and what attributes cannot say together are the library's (src/layouts/cpu_panel.h).
tests/support/operators/panels.py states the bytes once more, in NumPy.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import numpy as np

from quantmoe.custom_ops import native
from quantmoe.custom_ops.expert import Expert
from quantmoe.custom_ops.matrix import QuantizedMatrix, same_order
from quantmoe.custom_ops.op import MoESpec, Projection
from quantmoe.custom_ops.schemes import SCHEMES

NAME, VERSION = "cpu_panel", 1
_SCALES_BYTES = 64  # that input scales take, FORMAT.md 2.9


def describe(
    expert: Expert, activation_format: str, down_activation_format: str | None = None
) -> tuple[Projection, Projection]:
    """Return the (w13, w2) attributes under which this layout stores ``expert``; see layouts/__init__.py.

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
    """Return the attributes under which this layout stores a w2, or the one matrix of a QuantLinear."""
    return _describe(m, activation_format, "down")


def row_bytes(spec: MoESpec, projection: str) -> int:
    """Return the bytes of one expert's row of ``projection`` ("w13" or "w2"), a multiple of 64."""
    return native.row_of(*spec.matrices(projection)).bytes


def pack(expert: Expert, spec: MoESpec, w13_row: np.ndarray, w2_row: np.ndarray) -> None:
    """Write one expert into ``w13_row`` and ``w2_row``: uint8 [row_bytes], C-contiguous.

    Raises:
        ValueError: ``expert`` does not fit ``spec`` (shapes, format, scales, or an act-order ``spec`` has no room for).
    """
    _check_down(expert.down, spec)
    halves = [(m, what) for m, what in ((expert.gate, "gate"), (expert.up, "up")) if m is not None]
    for m, what in halves:
        _check(m, spec, "w13", what)
    orders = [m.perm for m, _ in halves]
    if spec.w13.perm == 0 and any(order is not None for order in orders):
        raise ValueError("gate or up is in act-order and the other experts of the layer are not (w13_perm is 0)")
    if spec.w13.perm == 1 and not same_order(orders[0], orders[-1]):
        raise ValueError(
            "gate and up have different act-orders, the other experts of the layer have one for both (w13_perm is 1)"
        )
    native.pack_expert(expert, spec, w13_row, w2_row)


def pack_down(m: QuantizedMatrix, spec: MoESpec, w2_row: np.ndarray) -> None:
    """Write a linear's matrix, ``spec`` being LinearSpec.moe, into uint8 [row_bytes]; errors as :func:`pack`."""
    _check_down(m, spec)
    native.pack_linear(m, spec, w2_row)


def unpack(spec: MoESpec, w13_row: np.ndarray, w2_row: np.ndarray) -> Expert:
    """Return the expert that :func:`pack` wrote, bit for bit, except what says nothing (native.unpack_expert)."""
    return native.unpack_expert(spec, w13_row, w2_row)


def unpack_down(spec: MoESpec, w2_row: np.ndarray) -> QuantizedMatrix:
    """Return the matrix that :func:`pack_down` wrote, bit for bit, except what says nothing."""
    return native.unpack_linear(spec, w2_row)


def without_input_scales(spec: MoESpec, projection: str, rows: np.ndarray) -> np.ndarray:
    """Packed rows [experts, row_bytes] as they are with float activations; the same array where they hold no scales."""
    part = native.row_of(*spec.matrices(projection)).part("input_scale")
    return rows if part.start == part.stop else np.delete(rows, slice(part.start, part.start + _SCALES_BYTES), axis=1)


def _describe(m: QuantizedMatrix, activation_format: str, what: str) -> Projection:
    """Refuse what attributes cannot say; the library refuses attributes."""
    if m.kind in ("bf16", "f16") and (m.scales != 1).any():
        raise ValueError(f"{what}: the CPU's kernels take {m.kind} weights without scales, found some other than 1")
    if m.global_scale is not None and m.kind != "nvfp4":
        raise ValueError(f"{what}: the CPU's kernels take a global scale for nvfp4 only, found {m.kind}")
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
        native.row_of(found, *m.shape, 1)
    except ValueError as error:
        groups = "one scale a row" if m.group_size == -1 else f"groups of {m.group_size}"
        why = re.sub('^format is "[a-z0-9_]+", group_size .*?: ', "", str(error))  # said once, in people's words
        raise ValueError(
            f"{what}: the CPU's kernels do not take {m.kind} weights with {groups} and {m.scale_type} scales: {why}"
        ) from error
    return found


def _check_down(m: QuantizedMatrix, spec: MoESpec) -> None:
    if m.perm is not None and not spec.w2.perm:
        raise ValueError("down is in act-order and the other experts of the layer are not (w2_perm is 0)")
    _check(m, spec, "w2", "down")


def _check(m: QuantizedMatrix, spec: MoESpec, projection: str, what: str) -> None:
    m.check_finite(what)
    p, n, k, _ = spec.matrices(projection)
    if m.shape != (n, k):
        raise ValueError(f"{what} has shape {list(m.shape)}, expected {[n, k]}")
    if m.hadamard != (rotated := spec.w2_hadamard if projection == "w2" else 0):
        raise ValueError(f"{what}'s input is rotated in blocks of {m.hadamard}, the layer's node says {rotated}")
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
