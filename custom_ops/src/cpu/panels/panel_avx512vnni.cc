// Panels times token tiles with AVX512-VNNI.
#include "cpu/elementwise.h"
#include "cpu/tiles/avx512_rows.h"
#include "cpu/x86.h"

namespace quantmoe {
namespace {

bool usable() {
  return x86_has(kSavesZmm, bit_AVX | bit_FMA | bit_F16C, bit_AVX512F | bit_AVX512BW | bit_AVX512VL | bit_AVX512DQ,
                 bit_AVX512VNNI);
}

}  // namespace

const CpuKernel panel_avx512vnni = {"panel_avx512vnni",          usable,
                                    Avx512Rows::kTileRows,       QM_ELEMENTWISE(pack_rows),
                                    multiply_panels<Avx512Rows>, int8_peak_avx512vnni,
                                    &attention_avx512vnni,       &linear_attention_avx512vnni};

}  // namespace quantmoe
