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

bool finds_scales(const LayerCall& layer, const ExpertMatrix& weights) {
  if (weights.node.activation_format != k_activation_format_fp8_tensor) return false;
  if (weights.read) return true;  // perhaps: rows are read later
  for (int64_t expert = 0; expert < layer.local_experts; ++expert)
    for (int side = 0; side < weights.sides; ++side)
      if (weights.preparation(expert, side, false).stored == 0.0f) return true;
  return false;
}

void clear_largest(const LayerCall& layer, ExpertMatrix& weights) {
  std::fill(weights.largest, weights.largest + layer.local_experts * weights.sides, 0u);
}

namespace {

// x [k] to int8, in the order of the packed columns or of any where a row has one step.
bool quantize_row(const CpuKernel& kernel, const ExpertMatrix& weights, const float* x, const RowBuffers& buffers,
                  ActivationRow* row) {
  const PanelMatrix& panel = weights.panel;
  const bool finite = panel.stepped ? kernel.quantize_int8(x, panel.k, panel.kp, panel.span * panel.step_spans,
                                                           buffers.q, buffers.steps)
                                    : kernel.quantize(weights.node.activation_format, x, panel.k, panel.kp, buffers.q,
                                                      &row->step, &row->zero_point);
  if (buffers.sums) kernel.block_sums(buffers.q, panel.span, panel.spans(), buffers.sums);
  return finite;
}

}  // namespace

bool prepare_row(const CpuKernel& kernel, const ExpertMatrix& weights, const Preparation& how, const float* x,
                 const RowBuffers& buffers, ActivationRow* row) {
  const PanelMatrix& panel = weights.panel;
  const auto gather = [&](const float* from) {
    for (int64_t k = 0; k < panel.k; ++k) buffers.x[k] = from[how.perm ? how.perm[k] : k];
    std::fill(buffers.x + panel.k, buffers.x + panel.kp, 0.0f);
  };
  if (how.pre_scale) {
    for (int64_t k = 0; k < panel.k; ++k) buffers.staged[k] = x[k] * how.pre_scale[k];
    x = buffers.staged;
  }
  if (how.packed && how.perm) {
    std::fill(buffers.x, buffers.x + panel.k, 0.0f);  // what a perm that repeats a column leaves out
    for (int64_t k = 0; k < panel.k; ++k) buffers.x[how.perm[k]] = x[k];
    x = buffers.x;
  }
  *row = {};
  row->q = buffers.q;
  row->sums = buffers.sums;
  row->steps = buffers.steps;
  if (panel.stepped && !is_int8_activation(weights.node)) {
    const bool finite = kernel.quantize_nvfp4(how.stored, x, panel.k, panel.groups(), buffers.q, buffers.steps);
    kernel.block_sums(buffers.q, panel.span, panel.spans(), buffers.sums);
    return finite;
  }
  if (!weights.quantized) {
    const bool finite = kernel.round_row(weights.node.activation_format, how.stored, x, panel.k, buffers.staged);
    if (!finite)
      std::fill(buffers.staged, buffers.staged + panel.k, 0.0f);  // the token is NaN whatever its products are
    gather(buffers.staged);
    row->x = buffers.x;
    return finite;
  }
  gather(x);
  return quantize_row(kernel, weights, buffers.x, buffers, row);
}

bool prepare_plain_row(const CpuKernel& kernel, const ExpertMatrix& weights, const float* x, const RowBuffers& buffers,
                       ActivationRow* row) {
  const PanelMatrix& panel = weights.panel;
  *row = {buffers.x, buffers.q, buffers.sums, 0.0f, 0, buffers.steps};
  if (weights.quantized) return quantize_row(kernel, weights, x, buffers, row);
  const bool finite = kernel.round_row(weights.node.activation_format, 0.0f, x, panel.k, buffers.x);
  if (!finite) std::fill(buffers.x, buffers.x + panel.k, 0.0f);
  std::fill(buffers.x + panel.k, buffers.x + panel.kp, 0.0f);
  return finite;
}

void gather_row(const CpuKernel& kernel, const ExpertMatrix& weights, const int32_t* perm, const RowBuffers& buffers,
                ActivationRow* row) {
  const PanelMatrix& panel = weights.panel;
  if (!weights.quantized) {
    for (int64_t k = 0; k < panel.k; ++k) buffers.x[k] = row->x[perm[k]];
    std::fill(buffers.x + panel.k, buffers.x + panel.kp, 0.0f);
    row->x = buffers.x;
    return;
  }
  for (int64_t k = 0; k < panel.k; ++k) buffers.q[k] = row->q[perm[k]];
  std::fill(buffers.q + panel.k, buffers.q + panel.kp, int8_t{0});
  kernel.block_sums(buffers.q, panel.span, panel.spans(), buffers.sums);
  row->q = buffers.q;
  row->sums = buffers.sums;
}

void ActivationRows::lay_out(Arena& arena, int64_t tokens, const ExpertMatrix& w13) {
  const int64_t count = tokens * each, quantized = w13.quantized ? count : 0;
  rows = arena.take<ActivationRow>(count);
  bad = arena.take<uint8_t>(count);
  x = arena.take<float>(count * w13.panel.kp);
  q = arena.take<int8_t>(quantized * w13.panel.kp);
  sums = arena.take<int32_t>(quantized * w13.panel.spans());
  steps = arena.take<float>(count * w13.panel.steps());
}

void ActivationRows::load(const ExpertIds& ids, const ExpertMatrix& w13, uint8_t* bad_tokens) {
  ids.layer.for_rows(ids.layer.tokens * each, [&](int, int64_t first, int64_t count) {
    for (int64_t r = first; r < first + count; ++r) load_row(r, ids, w13, bad_tokens);
  });
}

void ActivationRows::load_row(int64_t index, const ExpertIds& ids, const ExpertMatrix& w13, uint8_t* bad_tokens) {
  const LayerCall& layer = ids.layer;
  const CpuKernel& kernel = layer.kernel;
  const int64_t hidden = w13.panel.k, kp = w13.panel.kp, token = index / each;
  float* const row = x + index * kp;
  const RowBuffers own{row, q + index * kp, w13.node.perm ? nullptr : sums + index * w13.panel.spans(),
                       steps + index * w13.panel.steps(), nullptr};
  const auto* const source =
      static_cast<const uint8_t*>(ids.call.hidden_states) + (layer.first_token + token) * hidden * layer.element();
  // A pair that no expert here has is not computed: its weight may be anything, only the token itself counts.
  const bool weighted = ids.moe.apply_router_weight_on_input, computed = !weighted || ids.local(index) >= 0;
  if (layer.type == QM_F32 && w13.quantized && !w13.is_expert_dependent() && !weighted) {  // quantized where it is
    bad[index] = !prepare_plain_row(kernel, w13, reinterpret_cast<const float*>(source), own, &rows[index]);
    if (bad[index]) mark(bad_tokens + token);
    return;
  }
  kernel.to_float(layer.type, source, hidden, row);
  if (weighted && computed) kernel.scale(ids.call.topk_weights[layer.first_token * layer.top_k + index], row, hidden);
  bool finite;
  if (w13.is_expert_dependent() || !computed) {
    finite = kernel.all_finite(row, hidden);
  } else {
    finite = prepare_plain_row(kernel, w13, row, own, &rows[index]);
  }
  bad[index] = !finite;
  if (!finite) mark(bad_tokens + token);
}

}  // namespace quantmoe
