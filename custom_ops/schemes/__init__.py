"""Weight schemes: one module each, one line here, under the name that op.def's enum ``format`` has for it."""

from quantmoe.custom_ops.schemes import bf16, f16, fp8_e4m3, int4, int8, k_quants, mxfp4, nvfp4

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
}
