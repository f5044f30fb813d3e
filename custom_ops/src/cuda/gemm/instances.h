// The rows of instances.inc, and what follows from one: what a block takes. Plans and kernels share them.
#pragma once
#include <array>
#include <cstddef>

#include "cuda/common/layout.h"
#include "cuda/moe/layer_plan.h"

namespace quantmoe {

enum class ProductKernel { kSpan, kMma, kMmaWhole, kDownDecode, kLinearDecode, kWgmma, kFp8, kDense };
// Of a layer's first product.
constexpr Product first_product(int path, bool gated) {
  return path == kPathWgmma && !gated ? Product::kUp : Product::kGateUp;
}

// What the rows depend on of a format whose units have per_block groups; codes: tokens' codes are multiplied.
struct FormatSizes {
  int bits, lane_bytes, zero_bytes;
  int wgmma_bytes;  // lane_bytes on wgmma
  int units;        // of K that may be a stage of four panels
  int span_panels;  // 0: Span is not for the format
  int span_bytes;
  bool codes, two_levels;
};
template <class Facts>
constexpr FormatSizes sizes_of(int per_block, bool codes) {
  return {Facts::kBits,
          Facts::scale_bytes(per_block) + Facts::kZeroBytes,
          Facts::kZeroBytes,
          Facts::kTwoLevels ? kTwoLevelBytes : Facts::scale_bytes(per_block) + Facts::kZeroBytes,
          Facts::kPairsUnits && per_block == 1 ? 2 : 1,
          codes ? 0 : Facts::kSpanPanels,
          span_shared_bytes<Facts::kSpanPanels, Facts::scale_bytes(2)>(),
          codes,
          Facts::kTwoLevels};
}
inline FormatSizes sizes_of(const qm_projection& w, bool codes) {
  return with_facts(kind_of(w), [&](auto f) { return sizes_of<decltype(f)>(groups_in_block(w), codes); });
}

struct Instance {
  ProductKernel kernel;
  int path;
  Product product;
  int panels, n_tiles, units, stages;
  bool there;
};
constexpr auto instances_of([[maybe_unused]] FormatSizes f) {
#define QM_INSTANCE(kernel, path, product, panels, n_tiles, units, stages, there) +1
  constexpr size_t kCount = 0
#include "cuda/gemm/instances.inc"
      ;
  return std::array<Instance, kCount>{{
#define QM_INSTANCE(kernel, path, product, panels, n_tiles, units, stages, there) \
  {ProductKernel::k##kernel, kPath##path, Product::k##product, panels, n_tiles, units, stages, there},
#include "cuda/gemm/instances.inc"
  }};
}

// Whether a plan means the row.
constexpr bool means(const PlanStep& step, const Instance& row) {
  if (row.kernel == ProductKernel::kDense) {
    const int tokens = 8 * row.n_tiles, width = 8 * step.n_tiles;
    return step.panels == row.panels && width % 16 == 0 && width >= linear_least(tokens) && width <= tokens;
  }
  if (row.kernel == ProductKernel::kSpan ? step.warps_k != 0 : step.warps_k == 0) return false;
  if (row.kernel == ProductKernel::kMmaWhole && step.warps_k != 1) return false;
  return step.panels == row.panels && step.n_tiles == row.n_tiles && (row.stages == 0 || step.stages == row.stages);
}
// The row that a plan means; there is false: none.
constexpr Instance instance_of(const FormatSizes& sizes, int path, Product product, const PlanStep& step) {
  for (const Instance& row : instances_of(sizes))
    if (row.there && row.path == path && row.product == product && means(step, row)) return row;
  return {};
}

constexpr int kWgmmaThreads = 384;
constexpr int threads_of(int path, int panels) {
  return path == kPathDense                       ? linear_threads(panels)
         : path == kPathWgmma || path == kPathFp8 ? kWgmmaThreads
                                                  : kThreads;
}
// Dynamic shared memory of a block.
constexpr int shared_bytes_of(const Instance& row, const FormatSizes& sizes) {
  const int tokens = 8 * row.n_tiles;
  switch (row.kernel) {
    case ProductKernel::kSpan:
      return sizes.span_bytes;
    case ProductKernel::kWgmma:
      return wgmma_sizes_of(tokens, sizes.bits, sizes.wgmma_bytes, row.product).shared_bytes;
    case ProductKernel::kFp8:
      return kFp8SharedBytes;
    case ProductKernel::kDense:
      return linear_sizes_of(tokens, sizes.bits, sizes.two_levels, sizes.zero_bytes).shared_bytes;
    case ProductKernel::kMma:
    case ProductKernel::kMmaWhole:
    case ProductKernel::kDownDecode:
    case ProductKernel::kLinearDecode:
      break;
  }
  // Rings and sums. The sums lie over the ring if a stage has two units of K, and for floats in moe_down_decode. They
  // do not in linear_decode, whose ring is filled for the next panels.
  const bool over = row.kernel != ProductKernel::kLinearDecode &&
                    (row.units == 2 || (row.kernel == ProductKernel::kDownDecode && sizes.bits == 16));
  const int ring = row.stages * stage_bytes(row.panels, row.n_tiles, sizes.bits, sizes.lane_bytes, row.units);
  return kWarps * (ring + (over ? 0 : row.panels * row.n_tiles * 512));
}
// Blocks of the mma.sync kernels that a multiprocessor's registers hold.
constexpr int register_blocks(int bits, int panels, int n_tiles) {
  return n_tiles > 2 ? 1 : n_tiles == 1 && ((panels == 2 && bits == 4) || (panels == 1 && bits == 16)) ? 3 : 2;
}
constexpr int linear_blocks(int bits, int panels) { return panels == 1 ? 3 : register_blocks(bits, panels, 1); }

}  // namespace quantmoe
