// Geometry of layout cpu_panel: FORMAT.md section 2 as numbers. Nothing else computes offsets.
#pragma once
#include <cstddef>
#include <cstdint>

#include "core/attributes.h"

namespace quantmoe {

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
constexpr int64_t align_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }
constexpr int64_t kRowAlignment = 64;

constexpr int scale_size(int32_t scale_type) { return scale_type == k_scale_type_f32 ? 4 : 2; }

struct PanelMatrix {
  int32_t format, scale_type;
  bool grouped;
  int nr, bits;
  int64_t n, k;         // of one matrix (a gated w13 is two)
  int64_t kp;           // columns stored
  int64_t block;        // columns of a block
  int64_t blocks;       // blocks of a row
  int64_t codes_bytes;  // of a block
  int64_t block_bytes;  // codes and scales
  int64_t stride;       // of a panel
  int64_t panels;       // of one matrix

  // Offset of the panel's tail: row sums, then (scales when channelwise), then biases.
  int64_t tail() const { return blocks * block_bytes; }
};

inline PanelMatrix panel_matrix(int32_t format, int32_t scale_type, int64_t group_size, int64_t n, int64_t k) {
  PanelMatrix p{};
  p.format = format;
  p.scale_type = scale_type;
  p.grouped = group_size != -1;
  p.bits = format == k_format_int4 ? 4 : 8;
  p.nr = format == k_format_int4 ? 8 : 4;
  p.n = n;
  p.k = k;
  p.kp = align_up(k, p.grouped ? group_size : 32);
  p.block = p.grouped ? group_size : p.kp;
  p.blocks = p.kp / p.block;
  p.codes_bytes = p.nr * p.block * p.bits / 8;
  p.block_bytes = p.codes_bytes + (p.grouped ? p.nr * scale_size(scale_type) : 0);
  p.stride = p.tail() + p.nr * (p.grouped ? 8 : 12);
  p.panels = ceil_div(n, p.nr);
  return p;
}

inline int halves(const qm_moe& moe) { return moe.gated ? 2 : 1; }

inline PanelMatrix w13_matrix(const qm_moe& m) {
  return panel_matrix(m.w13.format, m.w13.scale_type, m.w13.group_size, m.intermediate_size, m.hidden_size);
}
inline PanelMatrix w2_matrix(const qm_moe& m) {
  return panel_matrix(m.w2.format, m.w2.scale_type, m.w2.group_size, m.hidden_size, m.intermediate_size);
}

// Bytes of the panels of one expert's row, without the padding and the permutations that follow.
inline int64_t w13_panel_bytes(const qm_moe& m) {
  const PanelMatrix p = w13_matrix(m);
  return halves(m) * p.panels * p.stride;
}
inline int64_t w13_row_bytes(const qm_moe& m) {
  return align_up(w13_panel_bytes(m), kRowAlignment) + m.w13.perm * align_up(4LL * m.hidden_size, kRowAlignment);
}
inline int64_t w2_row_bytes(const qm_moe& m) {
  const PanelMatrix p = w2_matrix(m);
  return align_up(p.panels * p.stride, kRowAlignment) + m.w2.perm * align_up(4LL * m.intermediate_size, kRowAlignment);
}

// The layer whose w2 a linear's weights are.
inline qm_moe as_moe(const qm_linear& l) {
  qm_moe m{};
  m.num_experts = 1;
  m.hidden_size = l.out_features;
  m.intermediate_size = l.in_features;
  m.w13 = m.w2 = l.w;
  return m;
}

}  // namespace quantmoe
