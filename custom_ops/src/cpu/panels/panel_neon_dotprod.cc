// NEON with the int8 dot product (optional in Armv8.2; Neoverse N1, Graviton2, Cortex-A75 and later, Apple M1).
#include "cpu/tiles/neon.h"

namespace quantmoe {

const CpuKernel panel_neon_dotprod = {"panel_neon_dotprod",
                                      cpu_has_dotprod,
                                      8,
                                      QM_ELEMENTWISE(pack_rows),
                                      multiply,
                                      int8_peak,
                                      &attention_neon_dotprod,
                                      &linear_attention_neon_dotprod};

}  // namespace quantmoe
