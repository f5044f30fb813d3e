// KleidiAI's kernels, if their right-hand sides are our panels (FORMAT.md 2.5): GEMM for token rows in fours, GEMV for
// a single row. panel_neon_i8mm takes everything else, also two or three rows that are left over. All give the same
// bytes.
//
// A tile here is its rows in fours and then the rest. Each part is a tile of neon.h, which has KleidiAI's bytes for
// four rows and for one.
#include "cpu/elementwise.h"

extern "C" {
#include "kai/ukernels/matmul/matmul_clamp_f32_qai8dxp_qsi4c32p/kai_matmul_clamp_f32_qai8dxp1x8_qsi4c32p8x8_1x8x32_neon_dotprod.h"
#include "kai/ukernels/matmul/matmul_clamp_f32_qai8dxp_qsi4c32p/kai_matmul_clamp_f32_qai8dxp4x8_qsi4c32p8x8_4x8x32_neon_i8mm.h"
#include "kai/ukernels/matmul/matmul_clamp_f32_qai8dxp_qsi4cxp/kai_matmul_clamp_f32_qai8dxp1x8_qsi4cxp8x8_1x8x32_neon_dotprod.h"
#include "kai/ukernels/matmul/matmul_clamp_f32_qai8dxp_qsi4cxp/kai_matmul_clamp_f32_qai8dxp4x8_qsi4cxp8x8_8x8x32_neon_i8mm.h"
#include "kai/ukernels/matmul/matmul_clamp_f32_qai8dxp_qsi8cxp/kai_matmul_clamp_f32_qai8dxp1x8_qsi8cxp4x8_1x4_neon_dotprod.h"
#include "kai/ukernels/matmul/matmul_clamp_f32_qai8dxp_qsi8cxp/kai_matmul_clamp_f32_qai8dxp4x8_qsi8cxp4x8_16x4_neon_i8mm.h"
}

namespace quantmoe {
namespace {

constexpr size_t kFloat = sizeof(float);

// Geometry and entry points of one family: [0] one row at a time, [1] four.
struct Family {
  size_t (*mr[2])();
  size_t (*nr[2])();
  size_t (*kr[2])();
  size_t (*sr[2])();
  void (*run[2])(const PanelMatrix& p, int64_t m, int64_t n, const uint8_t* x, const uint8_t* w, float* y,
                 int64_t stride);
};

#define QM_KAI_GROUPED(name)                                                                                     \
  [](const PanelMatrix& p, int64_t m, int64_t n, const uint8_t* x, const uint8_t* w, float* y, int64_t stride) { \
    kai_run_matmul_clamp_f32_##name(m, n, p.kp, p.block, x, w, y, stride* kFloat, kFloat, -INFINITY, INFINITY);  \
  }
#define QM_KAI_CHANNELWISE(name)                                                                                 \
  [](const PanelMatrix& p, int64_t m, int64_t n, const uint8_t* x, const uint8_t* w, float* y, int64_t stride) { \
    kai_run_matmul_clamp_f32_##name(m, n, p.kp, x, w, y, stride* kFloat, kFloat, -INFINITY, INFINITY);           \
  }
#define QM_KAI_FAMILY(kind, one, four)                                             \
  {                                                                                \
    {kai_get_mr_matmul_clamp_f32_##one, kai_get_mr_matmul_clamp_f32_##four},       \
        {kai_get_nr_matmul_clamp_f32_##one, kai_get_nr_matmul_clamp_f32_##four},   \
        {kai_get_kr_matmul_clamp_f32_##one, kai_get_kr_matmul_clamp_f32_##four},   \
        {kai_get_sr_matmul_clamp_f32_##one, kai_get_sr_matmul_clamp_f32_##four}, { \
      kind(one), kind(four)                                                        \
    }                                                                              \
  }

constexpr Family kInt4Groups =
    QM_KAI_FAMILY(QM_KAI_GROUPED, qai8dxp1x8_qsi4c32p8x8_1x8x32_neon_dotprod, qai8dxp4x8_qsi4c32p8x8_4x8x32_neon_i8mm);
constexpr Family kInt4Channelwise = QM_KAI_FAMILY(QM_KAI_CHANNELWISE, qai8dxp1x8_qsi4cxp8x8_1x8x32_neon_dotprod,
                                                  qai8dxp4x8_qsi4cxp8x8_8x8x32_neon_i8mm);
constexpr Family kInt8Channelwise =
    QM_KAI_FAMILY(QM_KAI_CHANNELWISE, qai8dxp1x8_qsi8cxp4x8_1x4_neon_dotprod, qai8dxp4x8_qsi8cxp4x8_16x4_neon_i8mm);

const Family* family(const PanelMatrix& matrix, bool quantized) {
  if (!quantized || matrix.stepped || !matrix.plain()) return nullptr;
  if (!matrix.grouped) return matrix.bits == 4 ? &kInt4Channelwise : &kInt8Channelwise;
  return matrix.bits == 4 && matrix.scale_type == k_scale_type_bf16 ? &kInt4Groups : nullptr;
}

// KleidiAI promises no stable layout: what is linked must have the geometry and the panel sizes this file was written
// against.
bool layout_is_ours() {
  const PanelMatrix grouped = panel_matrix(k_format_int4, k_scale_type_bf16, 64, 16, 192);
  const PanelMatrix int4 = panel_matrix(k_format_int4, k_scale_type_bf16, -1, 16, 96);
  const PanelMatrix int8 = panel_matrix(k_format_int8, k_scale_type_bf16, -1, 16, 96);
  const struct {
    const Family& family;
    const PanelMatrix& panel;
  } pairs[] = {{kInt4Groups, grouped}, {kInt4Channelwise, int4}, {kInt8Channelwise, int8}};
  for (const auto& [f, p] : pairs)
    for (int i = 0; i < 2; ++i)
      if (f.mr[i]() != (i ? 4 : 1) || f.nr[i]() != static_cast<size_t>(p.nr) || f.kr[i]() / f.sr[i]() != 8)
        return false;
  const auto equal = [](size_t offset, const PanelMatrix& matrix) {
    return offset == static_cast<size_t>(matrix.stride);
  };
  return equal(kai_get_rhs_packed_offset_matmul_clamp_f32_qai8dxp4x8_qsi4c32p8x8_4x8x32_neon_i8mm(8, 192, 64),
               grouped) &&
         equal(kai_get_rhs_packed_offset_matmul_clamp_f32_qai8dxp4x8_qsi4cxp8x8_8x8x32_neon_i8mm(8, 96), int4) &&
         equal(kai_get_rhs_packed_offset_matmul_clamp_f32_qai8dxp4x8_qsi8cxp4x8_16x4_neon_i8mm(4, 96), int8) &&
         kai_get_lhs_packed_offset_matmul_clamp_f32_qai8dxp4x8_qsi4cxp8x8_8x8x32_neon_i8mm(8, 96) == 8 * (96 + 8);
}

void pack_fours(const PanelMatrix& matrix, bool quantized, const ActivationRow* rows, int tokens, uint8_t* out) {
  if (!family(matrix, quantized)) return panel_neon_i8mm.pack_tile(matrix, quantized, rows, tokens, out);
  const int fours = tokens / 4 * 4;
  for (int i = 0; i < fours; i += 4) panel_neon_i8mm.pack_tile(matrix, true, rows + i, 4, out + i * (matrix.kp + 8));
  if (tokens > fours)
    panel_neon_i8mm.pack_tile(matrix, true, rows + fours, tokens - fours, out + fours * (matrix.kp + 8));
}

void multiply_fours(const PanelProduct& product) {
  const PanelMatrix& matrix = *product.matrix;
  const Family* ours = family(matrix, product.quantized);
  if (!ours) return panel_neon_i8mm.multiply(product);
  // Panels of one half are not adjacent when gate and up alternate: one call a panel then.
  const int64_t panels = product.halves == 1 ? product.panel_count : 1;
  for (int64_t panel = 0; panel < product.panel_count; panel += panels) {
    const uint8_t* weights = product.panels + panel * matrix.stride;
    float* y = product.out + panel % product.halves * product.half_stride + panel / product.halves * matrix.nr;
    for (int64_t tile_index = 0; tile_index < product.tile_count; ++tile_index) {
      const TokenTile& tile = product.tiles[tile_index];
      const int fours = tile.m / 4 * 4, rest = tile.m - fours;
      if (fours) ours->run[1](matrix, fours, panels * matrix.nr, tile.data, weights, y, product.row_stride);
      const TokenTile left{tile.data + fours * (matrix.kp + 8), rest};
      float* to = y + fours * product.row_stride;
      if (rest == 1) ours->run[0](matrix, 1, panels * matrix.nr, left.data, weights, to, product.row_stride);
      if (rest > 1) panel_neon_i8mm.multiply({&matrix, true, weights, panels, &left, 1, to, product.row_stride, 0, 1});
      y += tile.m * product.row_stride;
    }
  }
}

bool usable() {
  static const bool ours = layout_is_ours();
  return ours && panel_neon_dotprod.usable() && panel_neon_i8mm.usable();
}

}  // namespace

const CpuKernel panel_kleidiai = {"panel_kleidiai",
                                  usable,
                                  16,
                                  QM_ELEMENTWISE(pack_fours),
                                  multiply_fours,
                                  [](int64_t rounds) { return panel_neon_i8mm.int8_peak(rounds); },
                                  &attention_neon_dotprod,
                                  &linear_attention_neon_dotprod};

}  // namespace quantmoe
