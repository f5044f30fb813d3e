"""Packed layouts: everything that knows bytes. One module a layout, one line here.

A layout module provides (Expert and the dataclasses are in custom_ops):

- ``describe(expert, activation_format) -> tuple[Projection, Projection]``: how it would store this expert (w13, w2);
  raises ValueError naming what it cannot carry and what it can.
- ``row_bytes(spec, "w13" | "w2") -> int``: bytes of one packed expert row, a multiple of 64.
- ``pack(expert, spec, w13_row, w2_row)``: writes the rows (uint8 arrays of exactly row_bytes) in place.
- ``unpack(spec, w13_row, w2_row) -> Expert``: the inverse of pack.
"""

from quantmoe.custom_ops.layouts import cpu_panel

LAYOUTS = {"cpu_panel": cpu_panel}
