// Sizes of one packed expert, FORMAT.md section 3.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "core/attributes.h"
#include "cuda/formats/formats.h"
#include "layouts/marlin.h"
#include "quantmoe/quant_moe.h"

namespace quantmoe {

// Whether a kernel rounds the activations before the product, and whether experts differ in how.
inline bool rounds_input(const qm_projection& w) {
  return w.activation_format != k_activation_format_none || w.pre_scale;
}
inline bool rounds_by_expert(const qm_projection& w) { return has_input_scales(w) || w.pre_scale; }
// Rounded x has a row for each pair, not for each token.
inline bool rounds_pairs(const qm_moe& m) { return rounds_by_expert(m.w13) || m.apply_router_weight_on_input; }

constexpr bool is_value(std::string_view kind, int32_t code) {
  for (const EnumValue& value : kEnumValues)
    if (kind == value.kind && code == value.code) return true;
  return false;
}
// Whether the kernels have instances that read the format with such scales.
inline bool takes_scales(const qm_projection& w, int32_t scale_type) {
  return with_facts(kind_of(w), [=](auto f) { return f.takes_scales(scale_type); });
}
// The one group size that a format with such scales has; 0: -1, 32 or a power of two from 64.
inline int group_size_of(const qm_projection& w) {
  return with_facts(kind_of(w), [&](auto f) { return f.group_size(w.scale_type); });
}
// Weights whose codes are multiplied with e4m3 codes of activations.
inline bool takes_fp8(const qm_projection& w) {
  const int a = w.activation_format;
  return kind_of(w) == WeightKind::kFp8 && is_float_scale(w.scale_type) &&
         (w.group_size == -1 || w.group_size % 128 == 0) && !w.perm && !w.pre_scale &&
         (a == k_activation_format_fp8_token || a == k_activation_format_fp8_tensor ||
          a == k_activation_format_fp8_group128);
}
// Groups of columns in a block of scales.
inline int groups_in_block(const qm_projection& w) { return w.group_size == 16 ? 4 : w.group_size == 32 ? 2 : 1; }
// With nvfp4 codes of activations.
inline bool takes_nvfp4(const qm_projection& w) {
  return kind_of(w) == WeightKind::kNvfp4 && w.group_size == 16 && w.activation_format == k_activation_format_nvfp4 &&
         !w.perm;
}
// Whether a product of the mma.sync family takes both sides' codes: of e4m3, or block-scaled of e2m1. In that family
// only sm_120a and sm_121a have the second one.
inline bool packs(int sm, const qm_projection& w) {
  return (sm >= 89 && takes_fp8(w)) || ((sm == 120 || sm == 121) && takes_nvfp4(w));
}
// Of 64 columns of a token then, codes and scales: of nvfp4 pack_nvfp4 (rounded_activations.cuh), of e4m3 pack_e4m3.
constexpr int packed_unit_bytes(WeightKind kind) {
  return with_facts(kind, [](auto f) { return f.kPackedUnitBytes; });
}

constexpr int kDecodeTokens = 8;   // decode: a token is a column of one n8 tile
constexpr int kDecodePairs = 128;  // decode: (token, slot) pairs
constexpr int kThreads = 256;      // of the mma.sync kernels
constexpr int kWarps = kThreads / 32;
// Of the kernels between the products.
constexpr int kRouteThreads = 1024, kRoundThreads = 256, kQuantizeThreads = 256, kCombineThreads = 128,
              kFillThreads = 256, kAddThreads = 128;
constexpr int kTileBytes = 16;  // of a tile in the lists
constexpr int kCopyBytes = 16;  // of an expert to copy
constexpr int kKeptIds = 16;    // of the ids after what the host is asked

// Stages of a warp of the mma.sync kernels, and shared memory of one; `units` of K in it, lane_bytes being scales and
// zero points.
constexpr int stages_of(int units) { return units == 2 ? 2 : 3; }
// Of down of path decode where a multiprocessor has one block, whose 4-bit codes in flight are else too few.
constexpr int kDeepStages = 6;
constexpr int stage_bytes(int panels, int n_tiles, int bits, int lane_bytes, int units) {
  return panels * (units * 128 * bits + 32 * lane_bytes) + units * n_tiles * 1024;
}

// Shared memory of moe_gemm_span.cuh. A warp has a ring of stages. A stage is a unit of `panels` panels, with
// scale_bytes of a lane's rows, and of 8 tokens. A stage's scales are widened. A block also has a sum of the panels for
// each warp.
constexpr int kSpanStages = 3;
template <int panels, int scale_bytes>
struct SpanSizes {
  static constexpr int kScalesAt = panels * 512, kTokensAt = kScalesAt + panels * 8 * scale_bytes,
                       kStageBytes = kTokensAt + 1024;
  static constexpr int kWideAt = kSpanStages * kStageBytes, kRingBytes = kWideAt + panels * 128;
};
template <int panels, int scale_bytes>
constexpr int span_shared_bytes() {
  return kWarps * (SpanSizes<panels, scale_bytes>::kRingBytes + panels * 512);
}

// Up: the first product of a layer without a gate, where that has kernels of its own; Linear: QuantLinear's.
enum class Product { kGateUp, kUp, kDown, kLinear };
// What 16 rows give: rows of gate and up alternate by eight.
constexpr int features_of_panel(Product product) { return product == Product::kGateUp ? 8 : 16; }

// What blocks of moe_gemm_wgmma.cuh may take: small tiles two a multiprocessor, less 1024 a block.
constexpr bool small_tile(int tokens) { return tokens <= 48; }
constexpr int wgmma_shared_limit(int tokens) { return small_tile(tokens) ? 115712 : 232448; }
// Besides, static: barriers, works, the tokens' pairs and weights.
constexpr int wgmma_static_bytes(int tokens, int stages) { return 16 * stages + 64 + 16 * tokens; }
// Shared memory of moe_gemm_wgmma.cuh, for tiles of 24, 48, 64, 80, 96 or 144 tokens. It has panels of a warp, stages,
// staging of the results, and the total. A stage is 64 columns of the tokens and of the panels' codes, and their scales
// and zero points.
struct WgmmaSizes {
  int panels, stages, result_row_bytes, shared_bytes;
};
constexpr WgmmaSizes wgmma_sizes_of(int tokens, int bits, int lane_bytes, Product product) {
  WgmmaSizes sizes{};
  sizes.panels = tokens == 24 || tokens == 64 || tokens == 80 ? 4 : 2;
  // Of a token; padded against bank conflicts.
  sizes.result_row_bytes = 8 * features_of_panel(product) * sizes.panels + 16;
  const int stage = tokens * 128 + 8 * sizes.panels * (128 * bits + 8 * lane_bytes);
  const int rest = 1024 + 2 * tokens * sizes.result_row_bytes;  // 1024: to align the first stage
  const int static_stage = wgmma_static_bytes(tokens, 1) - wgmma_static_bytes(tokens, 0);
  sizes.stages =
      (wgmma_shared_limit(tokens) - rest - wgmma_static_bytes(tokens, 0)) / (stage + static_stage);  // all that fit
  sizes.shared_bytes = rest + sizes.stages * stage;
  return sizes;
}

// Shared memory of linear_wgmma.cuh, for tiles of up to 64, 128 or 256 tokens. It has panels of a block, blocks a
// multiprocessor, stages of 64 columns, and the total.
struct LinearSizes {
  int panels, blocks, stages, shared_bytes;
};
constexpr int kLinearZeroBytes = 32;  // of a panel, at most; the same of scales:
constexpr int linear_scale_bytes(int bits, bool two_levels) {
  return two_levels ? 8 * kTwoLevelBytes : bits == 16 ? 0 : 64;
}
constexpr int kLevelLine = 32;  // of scales of two levels; tensor copies take two lines a panel
// Tokens whose results are in shared memory at a time.
constexpr int linear_result_tokens(int tokens) { return tokens == 64 ? 64 : 128; }
constexpr LinearSizes linear_sizes_of(int tokens, int bits, bool two_levels, int zero_bytes) {
  LinearSizes sizes{};
  sizes.panels = tokens == 128 ? 16 : 8;
  sizes.blocks = tokens == 64 ? 2 : 1;
  const int panel = 128 * bits + linear_scale_bytes(bits, two_levels) + (zero_bytes > 0 ? kLinearZeroBytes : 0);
  const int stage = tokens * 128 + sizes.panels * panel;
  const int rest = 1024 + sizes.panels * 32 * linear_result_tokens(tokens);  // 1024: to align
  sizes.stages = ((sizes.blocks == 2 ? 115712 : 230400) - 1024 - rest) / stage;
  while (sizes.stages * stage % 1024) --sizes.stages;  // results are aligned, too
  sizes.shared_bytes = rest + sizes.stages * stage;
  return sizes;
}
// Tokens of a product are a multiple of 16, at least this.
constexpr int linear_least(int tokens) { return tokens == 64 ? 16 : tokens == 128 ? 80 : 144; }
template <int tokens>
constexpr int kLinearLeast = linear_least(tokens);
constexpr int linear_threads(int panels) { return 32 * panels + 128; }  // a panel a warp, and a warpgroup that copies

// Of moe_gemm_fp8.cuh: stages, units of work, magnitudes of h; what it takes.
constexpr int kFp8SharedBytes = 1024 + 4 * 51200 + 128 + 2 * 2 * 64 * 4;
// Rows of its activations: an expert's rows start at a multiple of 8.
inline int64_t fp8_rows(int64_t pairs, int64_t experts) {
  return (pairs + 7 * (pairs < experts ? pairs : experts) + 7) / 8 * 8;
}
inline int fp8_groups(int units) { return (units + 1) / 2; }  // of 128 columns

// Capacity of a list of tiles of at most 8 * n_tiles pairs of one expert.
inline int32_t most_tiles(int64_t pairs, int64_t experts, int n_tiles) {
  return static_cast<int32_t>(pairs / (8 * n_tiles) + (pairs < experts ? pairs : experts));
}

// The layer whose w2 a linear's weights are.
inline qm_moe moe_of(const qm_linear& linear) {
  qm_moe moe{};
  moe.op_version = linear.op_version;
  moe.num_experts = 1;
  moe.hidden_size = linear.out_features;
  moe.intermediate_size = linear.in_features;
  moe.w13 = moe.w2 = linear.w;
  return moe;
}

// A slot of the experts' cache: the row of w13, and the place of w2's row.
constexpr size_t kSlotAlignment = 256;
inline size_t second_at(const MarlinRow& w13) { return align_up(w13.bytes, kSlotAlignment); }
inline size_t slot_bytes(const MarlinRow& w13, const MarlinRow& w2) {
  return second_at(w13) + align_up(w2.bytes, kSlotAlignment);
}

// False when the attributes do not describe a row.
inline bool marlin_row_of(const qm_moe& moe, int projection, MarlinRow* row) {
  if (projection != 13 && projection != 2) return false;
  const qm_projection& weights = projection == 13 ? moe.w13 : moe.w2;
  if (!is_value("format", weights.format) || !is_value("scale_type", weights.scale_type) || moe.hidden_size <= 0 ||
      moe.intermediate_size <= 0 || !is_marlin_group(weights.group_size) ||
      ((weights.zero_points | weights.pre_scale) & ~1) || weights.perm < 0 ||
      weights.perm > (projection == 13 && moe.gated ? 2 : 1))
    return false;
  const bool first = projection == 13;
  *row = marlin_row(weights, first ? moe.intermediate_size : moe.hidden_size,
                    first ? moe.hidden_size : moe.intermediate_size, first && moe.gated ? 2 : 1);
  return true;
}

}  // namespace quantmoe
