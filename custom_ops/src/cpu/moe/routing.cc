// MoERouting on the CPU: scores, groups, selection and weights of one token after another, all in f32.
#include <algorithm>
#include <cmath>
#include <limits>

#include "core/parallel.h"
#include "cpu/operators.h"
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wunused-function"
#include "cpu/elementwise.h"  // exp and the conversions, compiled for any machine
#pragma GCC diagnostic pop

namespace quantmoe {
namespace {

constexpr int64_t kTokensPerTask = 32;

// The k largest of values[0..n), best first, equal ones in ascending order, to ids; -infinity counts as a value.
void select(const float* values, int n, int k, int32_t* ids) {
  int taken = 0;
  for (int i = 0; i < n; ++i) {
    if (taken == k && !(values[i] > values[ids[k - 1]])) continue;
    int at = taken < k ? taken++ : k - 1;
    for (; at > 0 && values[i] > values[ids[at - 1]]; --at) ids[at] = ids[at - 1];
    ids[at] = i;
  }
}

void softmax(float* x, int n) {
  const float top = *std::max_element(x, x + n);
  float sum = 0.0f;
  for (int i = 0; i < n; ++i) sum += x[i] = exp_f32(x[i] - top);
  for (int i = 0; i < n; ++i) x[i] /= sum;
}

struct Scratch {  // of a lane
  float* scores;  // [E + shared_gate]
  float* choice;  // [E]
  float* groups;  // [n_group]
  int32_t* kept;  // [n_group]
};
int64_t scratch_floats(const qm_routing& routing) {
  return 2LL * routing.num_experts + routing.shared_gate + 2LL * routing.n_group;
}

void route(const qm_routing& routing, const float* bias, const Scratch& scratch, int32_t* ids, float* weights) {
  static_assert(count_values("routing_method") == 5, "the ifs below");
  const int experts = routing.num_experts, size = experts / routing.n_group;
  for (int j = 0; j < routing.shared_experts; ++j) {
    ids[routing.top_k + j] = experts + j;
    weights[routing.top_k + j] = routing.shared_gate ? sigmoid_f32(scratch.scores[experts]) : 1.0f;
  }
  for (int e = 0; e < experts; ++e)
    if (std::isnan(scratch.scores[e])) {  // comparisons would be meaningless; the token's output is NaN
      for (int j = 0; j < routing.top_k; ++j) ids[j] = j, weights[j] = NAN;
      return;
    }
  if (routing.method == k_routing_method_softmax_topk) softmax(scratch.scores, experts);
  if (routing.method == k_routing_method_sigmoid_topk)
    for (int e = 0; e < experts; ++e) scratch.scores[e] = sigmoid_f32(scratch.scores[e]);
  for (int e = 0; e < experts; ++e) scratch.choice[e] = scratch.scores[e] + bias[e];
  if (routing.topk_group < routing.n_group) {
    for (int g = 0; g < routing.n_group; ++g) {
      int32_t best[2];
      select(scratch.choice + g * size, size, std::min(2, size), best);
      scratch.groups[g] = scratch.choice[g * size + best[0]] + (size > 1 ? scratch.choice[g * size + best[1]] : 0.0f);
    }
    select(scratch.groups, routing.n_group, routing.n_group, scratch.kept);
    for (int j = routing.topk_group; j < routing.n_group; ++j)
      std::fill_n(scratch.choice + scratch.kept[j] * size, size, -std::numeric_limits<float>::infinity());
  }
  select(scratch.choice, experts, routing.top_k, ids);
  for (int j = 0; j < routing.top_k; ++j) weights[j] = scratch.scores[ids[j]];
  if (routing.method == k_routing_method_topk_softmax) softmax(weights, routing.top_k);
  if (routing.method == k_routing_method_topk_sigmoid)
    for (int j = 0; j < routing.top_k; ++j) weights[j] = sigmoid_f32(weights[j]);
  if (routing.renormalize) {
    float sum = 1e-20f;  // of DeepSeek-V3; nothing beside a sum of softmax probabilities
    for (int j = 0; j < routing.top_k; ++j) sum += weights[j];
    for (int j = 0; j < routing.top_k; ++j) weights[j] /= sum;
  }
  for (int j = 0; j < routing.top_k; ++j) weights[j] *= routing.routed_scaling_factor;
}

int64_t tokens_of(const qm_call& call) { return rows_of(call.inputs[MoERouting_logits].shape); }
int64_t tasks_of(const qm_call& call) { return ceil_div(tokens_of(call), kTokensPerTask); }
// No more than have something to do.
int lanes_of(const qm_call& call) {
  return call.lanes > 1 ? static_cast<int>(std::clamp<int64_t>(tasks_of(call), 1, call.lanes)) : 1;
}

int check(const qm_routing& routing, char* err) { return check_routing(routing, {kMaxExperts, true, "expected"}, err); }

size_t workspace(const qm_routing& routing, const qm_call& call) {
  return static_cast<size_t>(lanes_of(call) * scratch_floats(routing)) * sizeof(float);
}

int run(const qm_routing& routing, const qm_call& call, char*) {
  const TensorsOf<qm_routing> tensors{call.inputs, call.outputs};
  const auto type = static_cast<qm_type>(call.inputs[MoERouting_logits].type);
  const int64_t experts = routing.num_experts, logits = experts + routing.shared_gate,
                slots = routing.top_k + routing.shared_experts, tokens = tokens_of(call);
  const int64_t element = type == QM_F32 ? 4 : 2;
  parallel(lanes_of(call), call.parallel_for, call.parallel_context, tasks_of(call), [&](int lane, int64_t task) {
    float* base = static_cast<float*>(call.workspace) + lane * scratch_floats(routing);
    float* groups = base + logits + experts;
    const Scratch s{base, base + logits, groups, reinterpret_cast<int32_t*>(groups + routing.n_group)};
    for (int64_t t = task * kTokensPerTask; t < std::min(tokens, (task + 1) * kTokensPerTask); ++t) {
      to_float(type, static_cast<const uint8_t*>(tensors.logits) + t * logits * element, logits, s.scores);
      route(routing, tensors.correction_bias, s, tensors.topk_ids + t * slots, tensors.topk_weights + t * slots);
    }
  });
  return QM_OK;
}

}  // namespace

const CpuOperator cpu_routing = kCpuOperator<qm_routing, check, workspace, run>;

}  // namespace quantmoe
