#include "cpu/moe/prepare.h"

#include <cstring>

namespace quantmoe {

// The largest |x|, or |x * pre_scale|, as bits, which are ordered like magnitudes with infinity and NaN on top.
uint32_t largest_bits(const float* x, const float* pre_scale, int64_t k) {
  uint32_t largest = 0;
  for (int64_t i = 0; i < k; ++i) {
    const float value = pre_scale ? x[i] * pre_scale[i] : x[i];
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    largest = std::max(largest, bits & 0x7fffffffu);
  }
  return largest;
}

bool finds_scales(const LayerCall& layer, const ExpertMatrix& m) {
  if (m.node.activation_format != k_activation_format_fp8_tensor) return false;
  if (m.read) return true;  // perhaps: rows are read later
  for (int64_t e = 0; e < layer.local_experts; ++e)
    for (int side = 0; side < m.sides; ++side)
      if (m.preparation(e, side, false).stored == 0.0f) return true;
  return false;
}

void clear_largest(const LayerCall& layer, ExpertMatrix& m) {
  std::fill(m.largest, m.largest + layer.local_experts * m.sides, 0u);
}

bool prepare_row(const CpuKernel& kernel, const ExpertMatrix& m, const Preparation& how, const float* x,
                 const RowBuffers& to, ActivationRow* row) {
  const PanelMatrix& p = m.panel;
  const auto gather = [&](const float* from) {
    for (int64_t k = 0; k < p.k; ++k) to.x[k] = from[how.perm ? how.perm[k] : k];
    std::fill(to.x + p.k, to.x + p.kp, 0.0f);
  };
  if (how.pre_scale) {
    for (int64_t k = 0; k < p.k; ++k) to.staged[k] = x[k] * how.pre_scale[k];
    x = to.staged;
  }
  if (how.packed && how.perm) {
    std::fill(to.x, to.x + p.k, 0.0f);  // what a perm that repeats a column leaves out
    for (int64_t k = 0; k < p.k; ++k) to.x[how.perm[k]] = x[k];
    x = to.x;
  }
  *row = {};
  row->q = to.q;
  row->sums = to.sums;
  if (p.stepped) {
    const bool finite = kernel.quantize_nvfp4(how.stored, x, p.k, p.groups(), to.q, to.steps);
    kernel.block_sums(to.q, p.group(), p.groups(), to.sums);
    row->steps = to.steps;
    return finite;
  }
  if (!m.quantized) {
    const bool finite = kernel.round_row(m.node.activation_format, how.stored, x, p.k, to.staged);
    if (!finite) std::fill(to.staged, to.staged + p.k, 0.0f);  // the token is NaN whatever its products are
    gather(to.staged);
    row->x = to.x;
    return finite;
  }
  gather(x);
  const bool finite = kernel.quantize(m.node.activation_format, to.x, p.k, p.kp, to.q, &row->step, &row->zero_point);
  kernel.block_sums(to.q, p.group(), p.groups(), to.sums);
  return finite;
}

bool prepare_plain_row(const CpuKernel& kernel, const ExpertMatrix& m, const float* x, const RowBuffers& to,
                       ActivationRow* row) {
  const PanelMatrix& p = m.panel;
  *row = {to.x, to.q, to.sums, 0.0f, 0, nullptr};
  if (m.quantized) {
    const bool finite = kernel.quantize(m.node.activation_format, x, p.k, p.kp, to.q, &row->step, &row->zero_point);
    if (to.sums) kernel.block_sums(to.q, p.group(), p.groups(), to.sums);
    return finite;
  }
  const bool finite = kernel.round_row(m.node.activation_format, 0.0f, x, p.k, to.x);
  if (!finite) std::fill(to.x, to.x + p.k, 0.0f);
  std::fill(to.x + p.k, to.x + p.kp, 0.0f);
  return finite;
}

void gather_row(const CpuKernel& kernel, const ExpertMatrix& m, const int32_t* perm, const RowBuffers& to,
                ActivationRow* row) {
  const PanelMatrix& p = m.panel;
  if (!m.quantized) {
    for (int64_t k = 0; k < p.k; ++k) to.x[k] = row->x[perm[k]];
    std::fill(to.x + p.k, to.x + p.kp, 0.0f);
    row->x = to.x;
    return;
  }
  for (int64_t k = 0; k < p.k; ++k) to.q[k] = row->q[perm[k]];
  std::fill(to.q + p.k, to.q + p.kp, int8_t{0});
  kernel.block_sums(to.q, p.group(), p.groups(), to.sums);
  row->q = to.q;
  row->sums = to.sums;
}

void ActivationRows::lay_out(Arena& a, int64_t tokens, const ExpertMatrix& w13) {
  const int64_t count = tokens * each, quantized = w13.quantized ? count : 0;
  rows = a.take<ActivationRow>(count);
  bad = a.take<uint8_t>(count);
  x = a.take<float>(count * w13.panel.kp);
  q = a.take<int8_t>(quantized * w13.panel.kp);
  sums = a.take<int32_t>(quantized * w13.panel.groups());
}

void ActivationRows::load(const ExpertIds& ids, const ExpertMatrix& w13, uint8_t* bad_tokens) {
  ids.layer.for_rows(ids.layer.tokens * each, [&](int, int64_t first, int64_t count) {
    for (int64_t r = first; r < first + count; ++r) load_row(r, ids, w13, bad_tokens);
  });
}

void ActivationRows::load_row(int64_t r, const ExpertIds& ids, const ExpertMatrix& w13, uint8_t* bad_tokens) {
  const LayerCall& layer = ids.layer;
  const CpuKernel& kernel = layer.kernel;
  const int64_t hidden = w13.panel.k, kp = w13.panel.kp, token = r / each;
  float* const row = x + r * kp;
  const RowBuffers own{row, q + r * kp, w13.node.perm ? nullptr : sums + r * w13.panel.groups(), nullptr, nullptr};
  kernel.to_float(
      layer.type,
      static_cast<const uint8_t*>(ids.call.hidden_states) + (layer.first_token + token) * hidden * layer.element(),
      hidden, row);
  // A pair that no expert here has is not computed: its weight may be anything, only the token itself counts.
  const bool weighted = ids.moe.apply_router_weight_on_input, computed = !weighted || ids.local(r) >= 0;
  if (weighted && computed) kernel.scale(ids.call.topk_weights[layer.first_token * layer.top_k + r], row, hidden);
  bool finite;
  if (w13.is_expert_dependent() || !computed) {
    finite = kernel.all_finite(row, hidden);
  } else {
    finite = prepare_plain_row(kernel, w13, row, own, &rows[r]);
  }
  bad[r] = !finite;
  if (!finite) mark(bad_tokens + token);
}

}  // namespace quantmoe
