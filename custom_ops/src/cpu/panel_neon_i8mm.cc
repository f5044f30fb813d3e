// NEON with the int8 matrix multiply (Armv8.6; Neoverse V1, N2 and later, Graviton3, Apple M2).
#include "cpu/neon.h"

namespace quantmoe {

const CpuKernel panel_neon_i8mm = {
    "panel_neon_i8mm", [] { return cpu_has(AT_HWCAP2, 13); }, 16, QM_ELEMENTWISE(pack_rows), multiply, int8_peak};

}  // namespace quantmoe
