// MoERouting's scores, groups, selection and weights, by a warp of a token.
#pragma once
#include "cuda/common/kernels.cuh"
#include "cuda/common/ptx.cuh"
#include "cuda/router/router.h"

namespace quantmoe {

struct SelectParams {
  const void* logits;  // [tokens, logits_of]
  const float* correction_bias;
  int* topk_ids;
  float* topk_weights;
  qm_routing routing;
};

// Floats as integers of the same order; +0 and -0 are equal.
__device__ inline unsigned ordered(float x) {
  const unsigned bits = __float_as_uint(x + 0.f);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

__device__ inline float warp_most(float x) {
  for (int d = 16; d > 0; d /= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, d));
  return x;
}

// The largest of key[0, count), the first of equal ones; all lanes get it. 0 is the key of what is out.
__device__ inline int warp_largest(const unsigned* key, int count) {
  unsigned best = 0;
  int at = count;
  for (int i = threadIdx.x; i < count; i += 32)
    if (key[i] > best) best = key[i], at = i;
  const unsigned largest = __reduce_max_sync(~0u, best);
  return static_cast<int>(__reduce_min_sync(~0u, best == largest ? static_cast<unsigned>(at) : ~0u));
}

// The top_k largest of key[0, experts), the best first, of equal keys the first. A warp has them in registers. Gives
// their ids, and their scores in weight. experts: at most 32 N.
template <int N>
__device__ inline void take_largest(const unsigned* key, const float* score, int experts, int top_k, int* ids,
                                    float* weight) {
  const int lane = threadIdx.x;
  unsigned own[N];
#pragma unroll
  for (int i = 0; i < N; ++i) own[i] = lane + 32 * i < experts ? key[lane + 32 * i] : 0;
  for (int j = 0; j < top_k; ++j) {
    unsigned best = own[0];
#pragma unroll
    for (int i = 1; i < N; ++i) best = max(best, own[i]);
    const unsigned largest = __reduce_max_sync(~0u, best), lanes = __ballot_sync(~0u, best == largest);
    int at = experts;
#pragma unroll
    for (int i = N - 1; i >= 0; --i) at = own[i] == largest ? lane + 32 * i : at;
    bool mine = best == largest;
    if (lanes & (lanes - 1)) mine = __reduce_min_sync(~0u, at) == at && mine;
    if (!mine) continue;
    ids[j] = at, weight[j] = score[at];
#pragma unroll
    for (int i = 0; i < N; ++i) own[i] = lane + 32 * i == at ? 0 : own[i];
  }
}

// Selects if all groups are kept, with at most 32 N experts, at most 32 of them selected, and no logit NaN. Registers
// have the scores, and lane j has the j-th selected expert.
template <int N>
__device__ inline void select_here(const qm_routing& routing, const float* logits, const float* correction_bias,
                                   int* ids, float* weights) {
  const int lane = threadIdx.x;
  float score[N], most = -INFINITY;
  unsigned key[N];
#pragma unroll
  for (int i = 0; i < N; ++i) {
    score[i] = lane + 32 * i < routing.num_experts ? logits[lane + 32 * i] : -INFINITY;
    most = fmaxf(most, score[i]);
  }
  if (routing.method == k_routing_method_softmax_topk) {
    most = warp_most(most);
    float sum = 0.f;
#pragma unroll
    for (int i = 0; i < N; ++i) sum += score[i] = expf(score[i] - most);
    sum = warp_sum(sum);
#pragma unroll
    for (int i = 0; i < N; ++i) score[i] /= sum;
  } else if (routing.method == k_routing_method_sigmoid_topk) {
#pragma unroll
    for (int i = 0; i < N; ++i) score[i] = 1.f / (1.f + expf(-score[i]));
  }
#pragma unroll
  for (int i = 0; i < N; ++i) {
    const int e = lane + 32 * i;
    key[i] = e < routing.num_experts ? max(ordered(score[i] + (correction_bias ? correction_bias[e] : 0.f)), 1u) : 0;
  }
  int id = 0;
  float weight = 0.f;
  for (int j = 0; j < routing.top_k; ++j) {
    unsigned best = key[0];
#pragma unroll
    for (int i = 1; i < N; ++i) best = max(best, key[i]);
    const unsigned largest = __reduce_max_sync(~0u, best), lanes = __ballot_sync(~0u, best == largest);
    int at = 32 * N;  // the lane's first
    float own = 0.f;
#pragma unroll
    for (int i = N - 1; i >= 0; --i)
      if (key[i] == largest) at = lane + 32 * i, own = score[i];
    const int first = lanes & (lanes - 1) ? __reduce_min_sync(~0u, at) : __shfl_sync(~0u, at, __ffs(lanes) - 1);
    own = __shfl_sync(~0u, own, first % 32);
    if (lane == j) id = first, weight = own;
#pragma unroll
    for (int i = 0; i < N; ++i)
      if (lane + 32 * i == first) key[i] = 0;
  }
  const bool mine = lane < routing.top_k;
  const auto divide = [&](float least) {  // by their sum
    weight /= warp_sum(mine ? weight : 0.f) + least;
  };
  if (routing.method == k_routing_method_topk_softmax) {
    weight = expf(weight - warp_most(mine ? weight : -INFINITY));
    divide(0.f);
  } else if (routing.method == k_routing_method_topk_sigmoid) {
    weight = 1.f / (1.f + expf(-weight));
  }
  if (routing.renormalize) divide(1e-20f);
  if (mine) ids[lane] = id, weights[lane] = weight * routing.routed_scaling_factor;
}

// Keeps the keys of the topk_group best groups, and makes the others 0. A group is as good as its two best keys.
__device__ __forceinline__ void keep_groups(const qm_routing& routing, int experts, const float* score,
                                            const float* correction_bias, unsigned* key, unsigned* group_key) {
  __syncwarp();
  const int lane = threadIdx.x, size = experts / routing.n_group;
  for (int i = lane; i < routing.n_group; i += 32) {
    float best = -INFINITY, second = -INFINITY;
    for (int e = i * size; e < (i + 1) * size; ++e) {
      const float x = score[e] + (correction_bias ? correction_bias[e] : 0.f);
      if (x > best) {
        second = best, best = x;
      } else {
        second = fmaxf(second, x);
      }
    }
    group_key[i] = max(ordered(size > 1 ? best + second : best), 1u);
  }
  __syncwarp();
  for (int j = 0; j < routing.topk_group; ++j) {
    const int i = warp_largest(group_key, routing.n_group);
    __syncwarp();
    if (lane == 0) group_key[i] = 0;
    __syncwarp();
  }
  for (int e = lane; e < experts; e += 32)
    if (group_key[e / size]) key[e] = 0;  // not kept
}

// A warp selects from the f32 logits, the first of select_words words in shared memory; all lanes see them. Methods are
// op.def's; correction_bias: null for none.
__device__ inline void select(const qm_routing& routing, unsigned* words, const float* correction_bias, int* ids,
                              float* weights) {
  const int experts = routing.num_experts, lane = threadIdx.x;
  float* score = reinterpret_cast<float*>(words);
  unsigned* key = words + logits_of(routing);
  unsigned* group_key = key + experts;
  float* weight = reinterpret_cast<float*>(group_key + routing.n_group);

  for (int s = lane; s < routing.shared_experts; s += 32) {
    ids[routing.top_k + s] = experts + s;
    weights[routing.top_k + s] = routing.shared_gate ? 1.f / (1.f + expf(-score[experts])) : 1.f;
  }
  float most = -INFINITY;
  bool nan = false;
#pragma unroll 8
  for (int e = lane; e < experts; e += 32) {
    const float x = score[e];
    nan |= x != x;
    most = fmaxf(most, x);
  }
  if (__any_sync(~0u, nan)) {
    for (int j = lane; j < routing.top_k; j += 32) ids[j] = j, weights[j] = NAN;
    return;
  }
  if (routing.topk_group == routing.n_group && experts <= 256 && routing.top_k <= 32)
    return experts <= 128 ? select_here<4>(routing, score, correction_bias, ids, weights)
                          : select_here<8>(routing, score, correction_bias, ids, weights);
  if (routing.method == k_routing_method_softmax_topk) {
    most = warp_most(most);
    float sum = 0.f;
    for (int e = lane; e < experts; e += 32) sum += score[e] = expf(score[e] - most);
    sum = warp_sum(sum);
    for (int e = lane; e < experts; e += 32) score[e] /= sum;
  } else if (routing.method == k_routing_method_sigmoid_topk) {
    for (int e = lane; e < experts; e += 32) score[e] = 1.f / (1.f + expf(-score[e]));
  }
  for (int e = lane; e < experts; e += 32)
    key[e] = max(ordered(score[e] + (correction_bias ? correction_bias[e] : 0.f)), 1u);
  if (routing.topk_group < routing.n_group) keep_groups(routing, experts, score, correction_bias, key, group_key);
  __syncwarp();
  if (experts <= 128) {
    take_largest<4>(key, score, experts, routing.top_k, ids, weight);
  } else if (experts <= 256) {
    take_largest<8>(key, score, experts, routing.top_k, ids, weight);
  } else {
    for (int j = 0; j < routing.top_k; ++j) {
      const int e = warp_largest(key, experts);
      __syncwarp();
      if (lane == 0) key[e] = 0, ids[j] = e, weight[j] = score[e];
      __syncwarp();
    }
  }
  __syncwarp();
  const auto divide = [&](float least) {  // by their sum
    float sum = 0.f;
    for (int j = lane; j < routing.top_k; j += 32) sum += weight[j];
    sum = warp_sum(sum) + least;
    for (int j = lane; j < routing.top_k; j += 32) weight[j] /= sum;
  };
  if (routing.method == k_routing_method_topk_softmax) {
    float largest = -INFINITY;
    for (int j = lane; j < routing.top_k; j += 32) largest = fmaxf(largest, weight[j]);
    largest = warp_most(largest);
    for (int j = lane; j < routing.top_k; j += 32) weight[j] = expf(weight[j] - largest);
    divide(0.f);
  } else if (routing.method == k_routing_method_topk_sigmoid) {
    for (int j = lane; j < routing.top_k; j += 32) weight[j] = 1.f / (1.f + expf(-weight[j]));
  }
  if (routing.renormalize) divide(1e-20f);
  for (int j = lane; j < routing.top_k; j += 32) weights[j] = weight[j] * routing.routed_scaling_factor;
}

// Dynamic shared memory: select_words.
template <typename Logit>
__global__ void __launch_bounds__(32) moe_select(const __grid_constant__ SelectParams params) {
  extern __shared__ unsigned words[];
  launch_dependents();
  wait_for_previous();
  const qm_routing& routing = params.routing;
  const int64_t token = blockIdx.x;
  const Logit* logits = static_cast<const Logit*>(params.logits) + token * logits_of(routing);
  for (int e = threadIdx.x; e < logits_of(routing); e += 32)
    reinterpret_cast<float*>(words)[e] = static_cast<float>(logits[e]);
  __syncwarp();
  select(routing, words, params.correction_bias, params.topk_ids + token * slots_of(routing),
         params.topk_weights + token * slots_of(routing));
}

}  // namespace quantmoe
