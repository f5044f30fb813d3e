// Activation rows as products read them: scaled, quantized or rounded, gathered (quant_moe.def, Activations).
#pragma once
#include "cpu/moe/layer.h"
#include "cpu/moe/route.h"

namespace quantmoe {

// Where a prepared row goes.
struct RowBuffers {
  float* x;       // [kp]
  int8_t* q;      // [kp]
  int32_t* sums;  // [spans()], or null: not wanted
  float* steps;   // [steps()]
  float* staged;  // [k] between two passes
};

// Buffers of the rows of a tile, for each lane that prepares some.
struct RowScratch {
  int64_t rows, kp = 0, spans = 0, groups = 0;
  float *x{}, *staged{}, *steps{};
  int8_t* q{};
  int32_t* sums{};

  void fit(const PanelMatrix& panel) {
    kp = std::max(kp, panel.kp);
    spans = std::max(spans, panel.spans());
    groups = std::max(groups, panel.steps());
  }
  void lay_out(Arena& arena, int64_t lanes) {
    q = arena.take<int8_t>(lanes * rows * kp);
    x = arena.take<float>(lanes * rows * kp);
    staged = arena.take<float>(lanes * kp);
    sums = arena.take<int32_t>(lanes * rows * spans);
    steps = arena.take<float>(lanes * rows * groups);
  }
  RowBuffers at(int lane, int i) const {
    const int64_t row = lane * rows + i;
    return {x + row * kp, q + row * kp, sums + row * spans, steps + row * groups, staged + lane * kp};
  }
};

// The slice's activations, once a token, or once a pair where router weights apply to them.
struct ActivationRows {
  int64_t each;           // rows of a token
  ActivationRow* rows{};  // [tokens * each]
  uint8_t* bad{};
  float* x{};       // [tokens * each, kp]
  int8_t* q{};      // [tokens * each, kp] where the matrix is quantized, and so sums
  int32_t* sums{};  // [tokens * each, spans()]
  float* steps{};   // [tokens * each, steps()]

  int64_t index(Pair p) const { return p.token * each + (each > 1 ? p.slot : 0); }
  void lay_out(Arena& arena, int64_t tokens, const ExpertMatrix& w13);
  void load(const ExpertIds& ids, const ExpertMatrix& w13, uint8_t* bad_tokens);

 private:
  void load_row(int64_t r, const ExpertIds& ids, const ExpertMatrix& w13, uint8_t* bad_tokens);
};

// Prepares one row x [k] for a side of an expert; false when it is not finite.
bool prepare_row(const CpuKernel& kernel, const ExpertMatrix& weights, const Preparation& how, const float* x,
                 const RowBuffers& buffers, ActivationRow* row);
// The same where nothing depends on the expert. x may be buffers.x.
bool prepare_plain_row(const CpuKernel& kernel, const ExpertMatrix& weights, const float* x, const RowBuffers& buffers,
                       ActivationRow* row);
// A row of prepare_plain_row in the order that an expert's columns have.
void gather_row(const CpuKernel& kernel, const ExpertMatrix& weights, const int32_t* perm, const RowBuffers& buffers,
                ActivationRow* row);

// Whether some expert's scale is found from all its rows.
bool finds_scales(const LayerCall& layer, const ExpertMatrix& weights);
void clear_largest(const LayerCall& layer, ExpertMatrix& weights);
uint32_t largest_bits(const float* x, const float* pre_scale, int64_t k);

// Extends the largest magnitudes of the round's experts without a stored scale by the slice's finite rows.
// row(position): the activations, or null for those whose product may be any number.
template <class RowAt>
void find_largest(const LayerCall& layer, const ExpertMatrix& weights, const RowAt& row_at) {
  if (weights.node.activation_format != k_activation_format_fp8_tensor) return;
  constexpr uint32_t kInfinityBits = 0x7f800000u;
  const int64_t* const begin = layer.routes.begin;
  const int64_t from = begin[layer.first_expert];
  layer.for_rows(begin[layer.end_expert] - from, [&](int, int64_t first, int64_t count) {
    int64_t expert = layer.first_expert;
    first += from;
    for (int64_t position = first; position < first + count; ++position) {
      while (position >= begin[expert + 1]) ++expert;
      const float* row = row_at(position);
      for (int side = 0; row && side < weights.sides; ++side) {
        const Preparation how = weights.preparation(expert, side, false);
        if (how.stored != 0.0f) continue;
        const uint32_t found = largest_bits(row, how.pre_scale, weights.panel.k);
        if (found >= kInfinityBits) continue;
        uint32_t* largest = weights.largest + expert * weights.sides + side;
        uint32_t seen = __atomic_load_n(largest, __ATOMIC_RELAXED);
        while (seen < found &&
               !__atomic_compare_exchange_n(largest, &seen, found, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
        }
      }
    }
  });
}

}  // namespace quantmoe
