// KleidiAI's packers and kernels for the three families FORMAT.md 2.5 names, behind one signature. Used by the programs
// of this folder and by tests/golden; needs KleidiAI 1.8 or later and aarch64 (or qemu-user).
#pragma once
#include <cstdint>
#include <cstring>
#include <vector>

extern "C" {
#include "kai/ukernels/matmul/matmul_clamp_f32_qai8dxp_qsi4c32p/kai_matmul_clamp_f32_qai8dxp1x8_qsi4c32p8x8_1x8x32_neon_dotprod.h"
#include "kai/ukernels/matmul/matmul_clamp_f32_qai8dxp_qsi4c32p/kai_matmul_clamp_f32_qai8dxp4x8_qsi4c32p8x8_4x8x32_neon_i8mm.h"
#include "kai/ukernels/matmul/matmul_clamp_f32_qai8dxp_qsi4cxp/kai_matmul_clamp_f32_qai8dxp1x8_qsi4cxp8x8_1x8x32_neon_dotprod.h"
#include "kai/ukernels/matmul/matmul_clamp_f32_qai8dxp_qsi4cxp/kai_matmul_clamp_f32_qai8dxp4x8_qsi4cxp8x8_4x8x32_neon_i8mm.h"
#include "kai/ukernels/matmul/matmul_clamp_f32_qai8dxp_qsi8cxp/kai_matmul_clamp_f32_qai8dxp1x8_qsi8cxp4x8_1x4_neon_dotprod.h"
#include "kai/ukernels/matmul/matmul_clamp_f32_qai8dxp_qsi8cxp/kai_matmul_clamp_f32_qai8dxp4x8_qsi8cxp4x8_16x4_neon_i8mm.h"
#include "kai/ukernels/matmul/pack/kai_lhs_quant_pack_qai8dxp_f32.h"
#include "kai/ukernels/matmul/pack/kai_rhs_pack_nxk_qsi4c32p_qsu4c32s1s0.h"
#include "kai/ukernels/matmul/pack/kai_rhs_pack_nxk_qsi4cxp_qs4cxs1s0.h"
#include "kai/ukernels/matmul/pack/kai_rhs_pack_nxk_qsi8cxp_qsi8cx_neon.h"
}

namespace quantmoe::arm {

// A matrix [n, k] of unsigned codes, one byte a code; group > 0: int4 with bf16 scales [n, k / group]; group = -1: f32
// scales [n].
struct Rhs {
  int bits = 4;
  int64_t group = -1, n = 0, k = 0;
  std::vector<uint8_t> codes;
  std::vector<uint16_t> scales_bf16;
  std::vector<float> scales_f32, bias;
};

inline std::vector<uint8_t> kleidi_pack(const Rhs& rhs) {
  size_t n = rhs.n, k = rhs.k;
  std::vector<uint8_t> packed;
  if (rhs.bits == 8) {
    std::vector<int8_t> values(rhs.codes.size());
    for (size_t i = 0; i < values.size(); ++i) values[i] = static_cast<int8_t>(rhs.codes[i] ^ 0x80);
    kai_rhs_pack_qsi8cx_params params{1, 1.0f};
    packed.resize(kai_get_rhs_packed_size_rhs_pack_nxk_qsi8cxp_qsi8cx_neon(n, k, 4, 8, 1));
    kai_run_rhs_pack_nxk_qsi8cxp_qsi8cx_neon(1, n, k, 4, 8, 1, values.data(), rhs.bias.data(), rhs.scales_f32.data(),
                                             packed.data(), 0, &params);
    return packed;
  }
  size_t stride = (k + 1) / 2;
  std::vector<uint8_t> nibbles(n * stride);
  for (size_t r = 0; r < n; ++r)
    for (size_t c = 0; c < k; ++c) nibbles[r * stride + c / 2] |= rhs.codes[r * k + c] << (c % 2 * 4);
  if (rhs.group > 0) {
    kai_rhs_pack_nxk_qsi4c32p_qsu4c32s1s0_params params{1, 8, kai_dt_bf16};
    packed.resize(kai_get_rhs_packed_size_rhs_pack_nxk_qsi4c32p_qsu4c32s1s0(n, k, 8, 16, 2, rhs.group, kai_dt_bf16));
    kai_run_rhs_pack_nxk_qsi4c32p_qsu4c32s1s0(1, n, k, 8, 16, 2, rhs.group, nibbles.data(), stride, rhs.bias.data(),
                                              rhs.scales_bf16.data(), k / rhs.group * 2, packed.data(), 0, &params);
  } else {
    kai_rhs_pack_nxk_qsi4cxp_qs4cxs1s0_params params{1, 8};
    packed.resize(kai_get_rhs_packed_size_rhs_pack_nxk_qsi4cxp_qs4cxs1s0(n, k, 8, 16, 2));
    kai_run_rhs_pack_nxk_qsi4cxp_qs4cxs1s0(1, n, k, 8, 16, 2, nibbles.data(), rhs.bias.data(), rhs.scales_f32.data(),
                                           packed.data(), 0, &params);
  }
  return packed;
}

// mr = 1 or 4 rows interleaved, 8 columns a chunk.
inline std::vector<uint8_t> kleidi_quantize(const float* x, size_t m, size_t k, size_t mr) {
  std::vector<uint8_t> packed(kai_get_lhs_packed_size_lhs_quant_pack_qai8dxp_f32(m, k, mr, 8, 1));
  kai_run_lhs_quant_pack_qai8dxp_f32(m, k, mr, 8, 1, 0, x, k * sizeof(float), packed.data());
  return packed;
}

// y [m, n] by the GEMV (i8mm = false; lhs packed with mr = 1) or the GEMM (mr = 4).
inline void kleidi_matmul(const Rhs& rhs, bool i8mm, size_t m, const void* lhs, const void* packed, float* y) {
  size_t n = rhs.n, k = rhs.k, row = n * sizeof(float);
  const float inf = __builtin_inff();
  if (rhs.bits == 8) {
    auto run = i8mm ? kai_run_matmul_clamp_f32_qai8dxp4x8_qsi8cxp4x8_16x4_neon_i8mm
                    : kai_run_matmul_clamp_f32_qai8dxp1x8_qsi8cxp4x8_1x4_neon_dotprod;
    run(m, n, k, lhs, packed, y, row, sizeof(float), -inf, inf);
  } else if (rhs.group > 0) {
    auto run = i8mm ? kai_run_matmul_clamp_f32_qai8dxp4x8_qsi4c32p8x8_4x8x32_neon_i8mm
                    : kai_run_matmul_clamp_f32_qai8dxp1x8_qsi4c32p8x8_1x8x32_neon_dotprod;
    run(m, n, k, rhs.group, lhs, packed, y, row, sizeof(float), -inf, inf);
  } else {
    auto run = i8mm ? kai_run_matmul_clamp_f32_qai8dxp4x8_qsi4cxp8x8_4x8x32_neon_i8mm
                    : kai_run_matmul_clamp_f32_qai8dxp1x8_qsi4cxp8x8_1x8x32_neon_dotprod;
    run(m, n, k, lhs, packed, y, row, sizeof(float), -inf, inf);
  }
}

}  // namespace quantmoe::arm
