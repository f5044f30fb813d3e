"""Weight schemes: one module each, one line here, under the name that op.def's enum ``format`` has for it.

``code_bits`` in ``src/core/numbers.h`` does not compile before it has the width of a new code. Layouts and kernels
refuse a scheme by name until they carry it. ``cpu_panel`` carries it with

- its width and kind in ``src/core/numbers.h``, its line in ``cannot_carry`` and its multiplier in ``multiplier_unit``
  (``src/layouts/cpu_panel.cc``);
- what a code is to a product: in ``panel_portable.cc``, ``panel_avx2.cc``, ``avx512_rows.h`` and ``neon_scaled.h``, or
  in each ``*_lanes.h`` for floats and K-quants;
- its line in the tile tables of ``row_tile.h`` and ``neon.h``, or in ``KKind`` of ``k_tile.h``;
- its bytes in ``tests/support/operators/panels.py``.
"""

from quantmoe.custom_ops.schemes import (
    bf16,
    bitsandbytes,
    f16,
    fp8_e4m3,
    int4,
    int8,
    k_quants,
    mxfp4,
    nvfp4,
    plane_integers,
)

SCHEMES = {
    "int4": int4.SCHEME,
    "int8": int8.SCHEME,
    "mxfp4": mxfp4.SCHEME,
    "nvfp4": nvfp4.SCHEME,
    "fp8_e4m3": fp8_e4m3.SCHEME,
    "bf16": bf16.SCHEME,
    "f16": f16.SCHEME,
    "q4_k": k_quants.Q4_K,
    "q5_k": k_quants.Q5_K,
    "q6_k": k_quants.Q6_K,
    "q2_k": k_quants.Q2_K,
    "q4_1": k_quants.Q4_1,
    "q5_1": k_quants.Q5_1,
    "nf4": bitsandbytes.NF4,
    "bnb_fp4": bitsandbytes.FP4,
    "q8_min": k_quants.Q8_MIN,
    "int2": plane_integers.INT2,
    "int3": plane_integers.INT3,
    "int5": plane_integers.INT5,
    "int6": plane_integers.INT6,
}
