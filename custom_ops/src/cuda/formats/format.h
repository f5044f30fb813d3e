// A format of weights, for the kernels: formats/*.cuh. Each file has a struct <Name>Facts, which plans know, too. For
// device code it has the trait <Name>, the kernels' template argument. formats.inc is the list.
#pragma once
#include <cstdint>

#include "core/attributes.h"

namespace quantmoe {

// Bytes of a scale.
constexpr int scale_type_bytes(int32_t scale_type) {
  return scale_type == k_scale_type_f32 ? 4 : scale_type == k_scale_type_f16 || scale_type == k_scale_type_bf16 ? 2 : 1;
}
constexpr bool is_float_scale(int32_t scale_type) { return scale_type_bytes(scale_type) > 1; }

// Facts that most formats share. The others: kBits of a code; is, if weights are of the format; takes_scales, the types
// it takes.
struct FormatFacts {
  // With groups of 32 a unit, 64 columns of a row, has two groups: per_block. Then comes the shared memory of a lane,
  // for a unit's scales of rows g and g + 8 and for their zero points. Scales have the bytes of the widest type.
  static constexpr int scale_bytes([[maybe_unused]] int per_block) { return 8; }
  static constexpr int kZeroBytes = 0;
  // Groups of columns that a unit has scales of, at most.
  static constexpr int kUnitGroups = 2;
  // The one group size that there is with scales of a type; 0: -1, 32 or a power of two from 64.
  static constexpr int group_size(int32_t scale_type) { return scale_type == k_scale_type_e8m0 ? 32 : 0; }
  static constexpr int kGlobalBytes = 0;  // of a row: factors of the whole matrix
  // Of 64 columns of a token, codes and scales, where a product takes codes of both sides; 0: none does.
  static constexpr int kPackedUnitBytes = 0;
  // Whether the kernels that round activations leave the stored input scale in the values: those for the format have no
  // registers for it.
  static constexpr bool kRoundsScaled = false;
  // Scales are of two levels (FORMAT.md 3.3).
  static constexpr bool kTwoLevels = false;
  // Panels of moe_gemm_span.cuh; 0: a plan never says it.
  static constexpr int kSpanPanels = 0;
  // Two units that share their scales are one stage of a warp's ring, where a unit has one group.
  static constexpr bool kPairsUnits = false;
};

// On wgmma, of rows g and g + 8 in a unit with scales of two levels: the factors, 8 bytes later the levels.
constexpr int kTwoLevelBytes = 16;

}  // namespace quantmoe
