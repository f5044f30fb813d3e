"""Layout ``marlin`` (FORMAT.md section 3): bytes the CUDA kernels read as tensor-core fragments.

Geometry, the packing of codes and what is refused are the library's (src/layouts/marlin.h).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from quantmoe.custom_ops import native
from quantmoe.custom_ops.expert import Expert
from quantmoe.custom_ops.matrix import SCALE_DTYPES, QuantizedMatrix, perm_or_none, reordered, same_order
from quantmoe.custom_ops.op import MoESpec, Projection
from quantmoe.custom_ops.schemes import SCHEMES

NAME, VERSION = "marlin", 2
_FLOATS = ("bf16", "f16")
_UNIT = 64  # columns
#: of a row, in order
_PARTS = ("codes", "scales", "zero_points", "global_scale", "bias", "perm", "input_scale", "pre_scale")
#: activation formats with a stored scale; with scales of groups of features
_INPUT_SCALE = ("fp8_tensor", "nvfp4")
GROUPED = ("fp8_group128", "nvfp4", "mxfp8", "mxfp4")


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
        native.marlin_row(projection, *first.shape, len(matrices))
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error
    return projection


def _orders(matrices: list[QuantizedMatrix]) -> int:
    """How many act-orders are stored: none, one, or gate's and up's."""
    same = same_order(matrices[0].perm, matrices[-1].perm)
    return 2 if not same else int(matrices[0].perm is not None)


def describe(
    expert: Expert, activation_format: str = "none", down_activation_format: str | None = None
) -> tuple[Projection, Projection]:
    """How this layout stores ``expert``: the ``w13_*`` and ``w2_*`` attributes.

    Raises:
        ValueError: naming the matrix and what it has that the layout does not carry.
    """
    if expert.gate is None:
        w13 = _project([expert.up], ["up"], activation_format)
    else:
        w13 = _project([expert.gate, expert.up], ["gate", "up"], activation_format)
    if expert.down.perm is not None and expert.up.block_n != 1:
        raise ValueError(f"down has an act-order permutation, which block_n {expert.up.block_n} of up cannot follow")
    w2 = describe_down(expert.down, down_activation_format or activation_format)
    if expert.down.perm is not None and w2.activation_format in GROUPED:
        raise ValueError(
            f"down has an act-order permutation, which the CUDA kernels do not apply and {w2.activation_format} "
            "activations, whose groups are of the features before it, need: export with --activations float"
        )
    return w13, w2


def describe_down(m: QuantizedMatrix, activation_format: str) -> Projection:
    """The attributes under which this layout stores the one matrix of a QuantLinear."""
    return _project([m], ["down"], activation_format)


class _Parts:
    """Sizes of one projection's row; N and K of the stored matrix, ``halves`` of which (gate, up) share a panel."""

    def __init__(self, spec: MoESpec, projection: str) -> None:
        self.attributes = a = spec.w13 if projection == "w13" else spec.w2
        H, I = spec.hidden_size, spec.intermediate_size  # noqa: E741
        self.N, self.K = (I, H) if projection == "w13" else (H, I)
        self.halves = 2 if projection == "w13" and spec.gated else 1
        try:
            row = native.marlin_row(a, self.N, self.K, self.halves)
        except ValueError as error:
            raise ValueError(f"{projection}: {error}") from error
        self.bits, self.panels, self.units, self.half = row.bits, row.panels, row.units, row.half
        self.blocks, self.per_block = row.blocks, row.per_block
        self.panel_rows = 16 // self.halves
        self.slices = {name: slice(at, at + size) for name, at, size in zip(_PARTS, row.at, row.sizes, strict=True)}
        self.row_bytes = row.row_bytes

    def to_panels(self, halves: list[np.ndarray]) -> np.ndarray:
        """[N, ...] of gate and up, or of one matrix, as [P, 2, 8, ...]: the rows g and g + 8 of each panel."""
        shape = (len(halves), self.panels * self.panel_rows, *halves[0].shape[1:])
        rows = np.zeros(shape, halves[0].dtype)  # zero bits; the number 0 is none of e8m0's
        for part, half in zip(rows, halves, strict=True):
            part[: self.N] = half
        if self.halves == 2:
            return rows.reshape(2, self.panels, 8, *rows.shape[2:]).swapaxes(0, 1)
        return rows.reshape(self.panels, 2, 8, *rows.shape[2:])

    def from_panels(self, panels: np.ndarray) -> list[np.ndarray]:
        """Inverse of :meth:`to_panels`."""
        if self.halves == 2:
            return [panels[:, h].reshape(-1, *panels.shape[3:])[: self.N] for h in (0, 1)]
        return [panels.reshape(-1, *panels.shape[3:])[: self.N]]

    def group_panels(self, halves: list[np.ndarray]) -> np.ndarray:
        """Per-group arrays [N, groups] in stored order [P, blocks, g 8, j, 2]."""
        full = np.zeros((len(halves), self.N, self.blocks * self.per_block), halves[0].dtype)
        for part, half in zip(full, halves, strict=True):
            part[:, : half.shape[1]] = half
        x = self.to_panels(list(full)).reshape(self.panels, 2, 8, self.blocks, self.per_block)
        return x.transpose(0, 3, 2, 4, 1)

    def ungroup_panels(self, stored: np.ndarray) -> list[np.ndarray]:
        """Inverse of :meth:`group_panels`, [N, groups of K] each."""
        x = stored.reshape(self.panels, self.blocks, 8, self.per_block, 2).transpose(0, 4, 2, 1, 3)
        parts = self.from_panels(x.reshape(self.panels, 2, 8, -1))
        return [part[:, self.groups(h)] for h, part in enumerate(parts)]

    def columns(self, h: int) -> slice:
        """Those of half ``h`` among the stored ones."""
        at = h * self.half if self.attributes.perm == 2 else 0
        return slice(at, at + self.K)

    def groups(self, h: int) -> slice:
        """The groups of :meth:`columns`."""
        g, columns = self.attributes.group_size, self.columns(h)
        return slice(0, 1) if g == -1 else slice(columns.start // g, -(-columns.stop // g))

    def beside(self, m: QuantizedMatrix, h: int) -> QuantizedMatrix:
        """Half ``h`` with as many columns as are stored, the other half's of value zero."""
        g, groups = self.attributes.group_size, self.groups(h)
        size = 1 if g == -1 else 2 * self.half // g

        def wide(x: np.ndarray) -> np.ndarray:
            out = np.zeros((len(x), size), x.dtype)
            out[:, groups] = x
            return out

        zero_points = None if m.zero_points is None else wide(m.zero_points)
        codes = np.full((self.N, 2 * self.half), SCHEMES[m.kind].zero, np.uint8)
        found = replace(m, codes=codes, scales=wide(m.scales), zero_points=zero_points, perm=None, pre_scale=None)
        if zero_points is not None:
            codes[:] = found.expand(zero_points)
        codes[:, self.columns(h)] = m.codes
        return found


def row_bytes(spec: MoESpec, projection: str) -> int:
    """Bytes of one packed expert row of ``projection`` ("w13" or "w2"), a multiple of 64."""
    return _Parts(spec, projection).row_bytes


# Axes of the codes as the matrix has them and as they are stored; a column is (unit, half, t, step, i high, i low). Of
# 8 bits, t and half are stored where their exclusive or with g / 2 and with t says.
_MATRIX_AXES = tuple("Prguhtsab")
_STORED_AXES = {4: tuple("Pugthsbra"), 8: tuple("Purgthsba")}


def _unpack_codes(stored: np.ndarray, parts: _Parts) -> np.ndarray:
    if parts.bits == 16:
        x = stored.view(np.uint16).reshape(parts.panels, parts.units, 16, _UNIT).swapaxes(1, 2)
        return x.reshape(parts.panels, 2, 8, -1)
    size = dict(zip(_MATRIX_AXES, (parts.panels, 2, 8, parts.units, 2, 4, 2, 2, 2), strict=True))
    axes = _STORED_AXES[parts.bits]
    if parts.bits == 4:
        stored = np.stack([stored & 15, stored >> 4], axis=-1)
    x = stored.reshape([size[a] for a in axes])
    if parts.bits == 8:
        g, t, h = np.ogrid[:8, :4, :2]
        x = x[:, :, :, g, t ^ g // 2, h ^ t % 2]
    x = x.transpose([axes.index(a) for a in _MATRIX_AXES])
    return x.reshape(parts.panels, 2, 8, -1)


def _pack_projection(matrices: list[QuantizedMatrix], parts: _Parts, row: np.ndarray) -> None:
    if row.shape != (parts.row_bytes,) or row.dtype != np.uint8:
        raise ValueError(f"packed row is {row.dtype} {list(row.shape)}, expected uint8 [{parts.row_bytes}]")
    for m in matrices:
        if m.shape != (parts.N, parts.K):
            raise ValueError(f"matrix is {list(m.shape)}, expected {[parts.N, parts.K]}")
    a = parts.attributes
    row[:] = 0
    orders = [np.arange(parts.K) if m.perm is None else m.perm for m in matrices]
    pre = matrices[0].pre_scale
    if a.zero_points:
        middle = np.uint8(SCHEMES[a.format].zero)
        matrices = [
            replace(m, zero_points=np.full(m.scales.shape, middle)) if m.zero_points is None else m for m in matrices
        ]
    if a.perm == 2:
        matrices = [parts.beside(m, h) for h, m in enumerate(matrices)]

    def put(name: str, values: np.ndarray) -> None:
        row[parts.slices[name]] = np.ascontiguousarray(values).reshape(-1).view(np.uint8)

    zero = 0 if a.zero_points else SCHEMES[a.format].zero
    if parts.bits == 16:
        padding = ((0, 0), (0, parts.units * _UNIT - parts.K))
        codes = parts.to_panels([np.pad(m.codes, padding) for m in matrices])
        put("codes", codes.reshape(parts.panels, 16, parts.units, _UNIT).swapaxes(1, 2))
    else:
        native.pack_marlin([m.codes for m in matrices], parts.bits, zero, row[parts.slices["codes"]])
    rows = np.arange(parts.N) // a.block_n
    put("scales", parts.group_panels([m.scales[rows] for m in matrices]))
    if a.zero_points:
        put("zero_points", parts.group_panels([m.zero_points[rows] for m in matrices]))  # type: ignore[index]
    if a.format == "nvfp4":
        if any((m.scales.view(np.uint8) & 0x80).any() for m in matrices):
            raise ValueError("nvfp4 scales are negative, expected e4m3 codes without a sign")
        both = [m.global_scale for m in matrices] * (3 - len(matrices))
        put("global_scale", np.array(both, np.float32))
    if a.bias:
        none = np.zeros(parts.N, np.float32)
        put("bias", parts.to_panels([none if m.bias is None else m.bias.astype(np.float32) for m in matrices]))
    if a.perm:
        stored = np.zeros((a.perm, (parts.slices["perm"].stop - parts.slices["perm"].start) // 4 // a.perm), np.int32)
        stored[:, : parts.K] = orders[: a.perm]
        put("perm", stored)
    if a.activation_format in _INPUT_SCALE:
        put("input_scale", np.array([matrices[0].input_scale], np.float32))
    if a.pre_scale:
        put("pre_scale", np.ones(parts.K, np.float32) if pre is None else pre.astype(np.float32))


def _unpack_projection(parts: _Parts, row: np.ndarray) -> list[QuantizedMatrix]:
    a = parts.attributes

    def get(name: str, dtype: np.dtype | type = np.uint8) -> np.ndarray:
        return np.ascontiguousarray(row[parts.slices[name]]).view(dtype)

    codes = parts.from_panels(_unpack_codes(get("codes"), parts))
    scales = parts.ungroup_panels(get("scales", SCALE_DTYPES[a.scale_type]))
    zeros: list[Any] = parts.ungroup_panels(get("zero_points")) if a.zero_points else [None] * parts.halves
    biases = parts.from_panels(get("bias", np.float32).reshape(-1, 2, 8)) if a.bias else [None] * parts.halves
    global_scales = get("global_scale", np.float32).tolist() if a.format == "nvfp4" else [None] * 2
    stored = get("perm", np.int32).reshape(max(a.perm, 1), -1)[:, : parts.K]
    perms = [perm_or_none(p) for p in stored] if a.perm else [None]
    return [
        QuantizedMatrix(
            kind=a.format,
            codes=np.ascontiguousarray(codes[h][:, parts.columns(h)]),
            scales=scales[h][:: a.block_n],
            group_size=a.group_size,
            block_n=a.block_n,
            zero_points=None if zeros[h] is None else zeros[h][:: a.block_n],
            global_scale=global_scales[h],
            bias=biases[h],
            perm=perms[min(h, len(perms) - 1)],
            input_scale=get("input_scale", np.float32).item() if a.activation_format in _INPUT_SCALE else None,
            pre_scale=get("pre_scale", np.float32) if a.pre_scale else None,
        )
        for h in range(parts.halves)
    ]


def pack(expert: Expert, spec: MoESpec, w13_row: np.ndarray, w2_row: np.ndarray) -> None:
    """Writes ``expert`` into two rows (uint8 [row_bytes]).

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
    w13 = [expert.up] if expert.gate is None else [expert.gate, expert.up]
    down = expert.down
    if down.perm is not None:
        w13 = [reordered(m, down.perm) for m in w13]
        down = replace(down, pre_scale=None if down.pre_scale is None else down.pre_scale[down.perm])
    _pack_projection(w13, _Parts(spec, "w13"), w13_row)
    _pack_projection([down], _Parts(spec, "w2"), w2_row)


def pack_down(m: QuantizedMatrix, spec: MoESpec, w2_row: np.ndarray) -> None:
    """Writes the matrix of a QuantLinear, ``spec`` being LinearSpec.moe, into uint8 [row_bytes]; errors as pack."""
    m.check_finite("down")
    _check("down", describe_down(m, spec.w2.activation_format), spec.w2)
    _pack_projection([m], _Parts(spec, "w2"), w2_row)


def unpack_down(spec: MoESpec, w2_row: np.ndarray) -> QuantizedMatrix:
    """The matrix that ``pack_down`` wrote."""
    return _unpack_projection(_Parts(spec, "w2"), w2_row)[0]


def _check(name: str, have: Projection, want: Projection) -> None:
    # One node holds many experts: one without a bias, an act-order, pre-scales or zero points fits a node with them.
    optional = ("bias", "perm", "pre_scale", "zero_points")
    wide = {name: max(getattr(have, name), getattr(want, name)) for name in optional}
    if replace(have, **wide) != want:
        raise ValueError(f"{name}: the expert has {have}, the node says {want}")


def unpack(spec: MoESpec, w13_row: np.ndarray, w2_row: np.ndarray) -> Expert:
    """The expert whose packing gave these rows."""
    w13, down = _unpack_projection(_Parts(spec, "w13"), w13_row), unpack_down(spec, w2_row)
    if down.perm is not None:
        order = np.argsort(down.perm)
        w13 = [reordered(m, order) for m in w13]
        down = replace(down, pre_scale=None if down.pre_scale is None else down.pre_scale[order])
    return Expert(w13[0] if len(w13) == 2 else None, w13[-1], down)
