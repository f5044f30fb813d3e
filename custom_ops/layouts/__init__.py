"""Packed layouts: everything that knows bytes. One module a layout, one line here.

FORMAT.md states the bytes first, as MUST and MAY. In ``src/layouts`` one function refuses attributes
(``check_cpu_panel``), and a ``RowLayout`` packs and unpacks a row.

A layout module provides (Expert and the dataclasses are in custom_ops):

- ``NAME``, ``VERSION``: the attributes of nodes whose bytes it knows.
- ``describe(expert, activation_format, down_activation_format=None) -> tuple[Projection, Projection]``: how it would
  store this expert (w13, w2; None: w2's activations are w13's);
  raises ValueError naming what it cannot carry and what it can.
- ``row_bytes(spec, "w13" | "w2") -> int``: bytes of one packed expert row, a multiple of 64.
- ``pack(expert, spec, w13_row, w2_row)``: writes the rows (uint8 arrays of exactly row_bytes) in place.
- ``unpack(spec, w13_row, w2_row) -> Expert``: the inverse of pack.
- ``describe_down(matrix, activation_format) -> Projection``, ``pack_down(matrix, spec, w2_row)`` and
  ``unpack_down(spec, w2_row) -> QuantizedMatrix``: the same for a w2 alone, which is also a QuantLinear's matrix
  (``spec`` is LinearSpec.moe).
"""

from dataclasses import replace

from quantmoe.custom_ops.layouts import cpu_panel, marlin, qmoe
from quantmoe.custom_ops.op import Projection

#: attributes of things that one expert may have and another lack
OPTIONAL = ("perm", "bias", "zero_points", "pre_scale")
LAYOUTS = {"cpu_panel": cpu_panel, "marlin": marlin, "qmoe": qmoe}


def join(a: tuple[Projection, Projection], b: tuple[Projection, Projection]) -> tuple[Projection, Projection]:
    """Return the (w13, w2) that two experts of a layer share: what some have and others lack widens, all else must be
    equal.

    Raises:
        ValueError: naming the projection and both descriptions.
    """

    def widen(name: str, x: Projection, y: Projection) -> Projection:
        wide = {field: max(getattr(x, field), getattr(y, field)) for field in OPTIONAL}
        if replace(x, **wide) != replace(y, **wide):
            raise ValueError(f"{name} differs between experts of one layer: {x} against {y}")
        return replace(x, **wide)

    return widen("w13", a[0], b[0]), widen("w2", a[1], b[1])
