"""Layout ``marlin`` (FORMAT.md section 3): bytes the CUDA kernels read as tensor-core fragments.

Geometry, bytes and what attributes cannot say together are the library's (src/layouts/marlin.h).
tests/support/operators/marlin_rows.py states the bytes once more, in NumPy.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from quantmoe.custom_ops import native
from quantmoe.custom_ops.expert import Expert
from quantmoe.custom_ops.matrix import QuantizedMatrix, same_order
from quantmoe.custom_ops.op import MoESpec, Projection

NAME, VERSION = "marlin", 2
_FLOATS = ("bf16", "f16")
#: activation formats with a stored scale
_INPUT_SCALE = ("fp8_tensor", "nvfp4")


def _project(matrices: list[QuantizedMatrix], names: list[str], activation_format: str) -> Projection:
    first = matrices[0]
    where = " and ".join(names)
    if first.kind in _FLOATS and any((m.scales != 1).any() for m in matrices):
        raise ValueError(f"{where}: format {first.kind} has one scale of 1 a row in layout marlin")
    for attribute in ("kind", "group_size", "scale_type", "block_n"):
        found = [getattr(m, attribute) for m in matrices]
        if len(set(found)) > 1:
            raise ValueError(f"{where} differ in {attribute}: {found}; layout marlin stores one")
    for m, name in zip(matrices, names, strict=True):
        if activation_format in _INPUT_SCALE and not m.input_scale:
            raise ValueError(
                f"{name}: activation_format {activation_format} without an input_scale, which layout marlin "
                "carries for it: export with --activations float"
            )
        if (m.global_scale is not None) != (m.kind == "nvfp4"):
            raise ValueError(f"{name}: global_scale goes with nvfp4 and only with it, the format is {m.kind}")
        if activation_format in _INPUT_SCALE and m.input_scale != first.input_scale:
            raise ValueError(
                f"{where} have different input scales, {first.input_scale} and {m.input_scale}; layout marlin "
                "stores one for both: export with --activations float"
            )
        if not same_order(m.pre_scale, first.pre_scale):
            raise ValueError(f"{where} have different pre-scales; layout marlin stores one for both")
    projection = Projection(
        format=first.kind,
        group_size=first.group_size,
        scale_type=first.scale_type,
        activation_format=activation_format,
        layout=NAME,
        layout_version=VERSION,
        block_n=first.block_n,
        zero_points=int(any(m.zero_points is not None for m in matrices)),
        bias=int(any(m.bias is not None for m in matrices)),
        perm=_orders(matrices),
        pre_scale=int(first.pre_scale is not None),
    )
    try:
        native.row_of(projection, *first.shape, len(matrices))
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error
    return projection


def _orders(matrices: list[QuantizedMatrix]) -> int:
    """Return how many act-orders are stored: none, one, or gate's and up's."""
    same = same_order(matrices[0].perm, matrices[-1].perm)
    return 2 if not same else int(matrices[0].perm is not None)


def describe(
    expert: Expert, activation_format: str = "none", down_activation_format: str | None = None
) -> tuple[Projection, Projection]:
    """Return how this layout stores ``expert``: the ``w13_*`` and ``w2_*`` attributes.

    Raises:
        ValueError: naming the matrix and what it has that the layout does not carry.
    """
    if expert.down.hadamard:
        raise ValueError("down: its input is rotated in each run, which the CUDA kernels do not do; use --target cpu")
    if expert.gate is None:
        w13 = _project([expert.up], ["up"], activation_format)
    else:
        w13 = _project([expert.gate, expert.up], ["gate", "up"], activation_format)
    w2 = describe_down(expert.down, down_activation_format or activation_format)
    try:
        native.check_marlin_layer(w13, w2)
    except ValueError as error:
        raise ValueError(f"down: {error}") from error
    return w13, w2


def describe_down(m: QuantizedMatrix, activation_format: str) -> Projection:
    """Return the attributes under which this layout stores the one matrix of a QuantLinear."""
    return _project([m], ["down"], activation_format)


def row(spec: MoESpec, projection: str) -> native.Row:
    """Return where the parts of one packed row of ``projection`` ("w13" or "w2") are.

    Raises:
        ValueError: the layout refuses the attributes, in the library's words.
    """
    try:
        return native.row_of(*spec.matrices(projection))
    except ValueError as error:
        raise ValueError(f"{projection}: {error}") from error


def row_bytes(spec: MoESpec, projection: str) -> int:
    """Return the bytes of one packed expert row of ``projection`` ("w13" or "w2"), a multiple of 64."""
    return row(spec, projection).bytes


def pack(expert: Expert, spec: MoESpec, w13_row: np.ndarray, w2_row: np.ndarray) -> None:
    """Write ``expert`` into two rows (uint8 [row_bytes]).

    Act-order of down is packed away: gate's and up's rows take down's order (exact, FORMAT.md 2.6).

    Raises:
        ValueError: when the matrices are not what ``spec`` says, naming both.
    """
    for name, m in (("gate", expert.gate), ("up", expert.up), ("down", expert.down)):
        if m is not None:
            m.check_finite(name)
    found = describe(expert, spec.w13.activation_format, spec.w2.activation_format)
    for name, have, want in zip(("w13", "w2"), found, (spec.w13, spec.w2), strict=True):
        _check(name, have, want)
    native.pack_expert(expert, spec, w13_row, w2_row)


def pack_down(m: QuantizedMatrix, spec: MoESpec, w2_row: np.ndarray) -> None:
    """Write the matrix of a QuantLinear, ``spec`` being LinearSpec.moe, into uint8 [row_bytes]; errors as pack."""
    m.check_finite("down")
    _check("down", describe_down(m, spec.w2.activation_format), spec.w2)
    native.pack_linear(m, spec, w2_row)


def unpack(spec: MoESpec, w13_row: np.ndarray, w2_row: np.ndarray) -> Expert:
    """Return the expert whose packing gave these rows, except what says nothing (native.unpack_expert)."""
    return native.unpack_expert(spec, w13_row, w2_row)


def unpack_down(spec: MoESpec, w2_row: np.ndarray) -> QuantizedMatrix:
    """Return the matrix that :func:`pack_down` wrote, except what says nothing."""
    return native.unpack_linear(spec, w2_row)


def _check(name: str, have: Projection, want: Projection) -> None:
    # One node holds many experts: one without a bias, an act-order, pre-scales or zero points fits a node with them.
    optional = ("bias", "perm", "pre_scale", "zero_points")
    wide = {name: max(getattr(have, name), getattr(want, name)) for name in optional}
    if replace(have, **wide) != want:
        raise ValueError(f"{name}: the expert has {have}, the node says {want}")
