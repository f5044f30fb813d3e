// GatedDelta for few tokens of many rows, which memory bounds: a block has a head's state, a warp whole rows of it, in
// registers. So reads and writes are of whole lines.
//
//                columns 0 .. V - 1, V / 32 side by side a lane
//   warp 0       rows 0 .. K/W - 1           m, o: what a warp's rows give with a key and a query; in shared memory
//   warp 1       rows K/W .. 2K/W - 1        all warps add up the m of all
//   ..           ..
//
// A token is then as in gated_delta. The warp of a token's number norms and gates its output.
#pragma once
#include "cuda/state/linear_attention.cuh"

namespace quantmoe {

template <int N>
struct alignas(4 * N) FloatsOfLane {
  float x[N];
};

// Blocks: heads, rows.
template <typename T, int K, int V, bool kPerKey>
__global__ void __launch_bounds__(32 * kBatchDeltaWarps, 2)
    gated_delta_batch(const __grid_constant__ DeltaParams params) {
  constexpr int kWarps = kBatchDeltaWarps, kRows = K / kWarps, kEach = V / 32;
  static_assert(kWarps >= kFewDeltaTokens && kRows * kDeltaParts <= K);
  using Floats = FloatsOfLane<kEach>;
  __shared__ DeltaOperands<K, kPerKey> operands[kFewDeltaTokens];
  __shared__ Floats values[kFewDeltaTokens][32], sums[2][2][kWarps][32];  // sums: of m and o, of every second token
  launch_dependents();
  const qm_delta& node = params.delta;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, head = blockIdx.x, batch_row = blockIdx.y;
  constexpr int kBiases = kPerKey ? K / 32 : 1;
  float dt_bias[kBiases];
#pragma unroll
  for (int i = 0; i < kBiases; ++i) dt_bias[i] = params.dt_bias[kPerKey ? head * K + lane * kBiases + i : head];
  const float rate = expf(params.a_log[head]);
  wait_for_previous();

  const int64_t state_at =
      ((static_cast<int64_t>(batch_row) * node.num_v_heads + head) * K + warp * kRows) * V + lane * kEach;
  Floats state[kRows];
#pragma unroll
  for (int i = 0; i < kRows; ++i) state[i] = *reinterpret_cast<const Floats*>(params.past_state + state_at + i * V);
  const TokenRow row = read_token_row(params.rows, batch_row, params.tokens);
  const int64_t first_token = static_cast<int64_t>(batch_row) * params.tokens;
  for (int t = warp; t < params.tokens; t += kWarps)
    if (!row.has(t)) gate_none<T>(params, row, first_token + t, head);
  if (!row.valid) return;
  const int64_t own_token = first_token + row.begin + warp;  // the warp's
  T z[kEach];
  if (warp < row.count) {
    const auto input = read_input<T, K, kPerKey>(params, own_token, head);
    const int width = 2 * node.num_k_heads * K + node.num_v_heads * V;
    const T* value =
        static_cast<const T*>(params.qkv) + own_token * width + 2 * node.num_k_heads * K + head * V + lane * kEach;
    const T* gates = static_cast<const T*>(params.z) + own_token * params.z_size + head * V + lane * kEach;
#pragma unroll
    for (int i = 0; i < kEach; ++i) values[warp][lane].x[i] = static_cast<float>(value[i]), z[i] = gates[i];
    prepare<T, K, kPerKey>(params, rate, dt_bias, input, operands + warp);
  }
  if (!row.from_past && row.count)
#pragma unroll
    for (int i = 0; i < kRows; ++i) state[i] = {};
  const auto store = [&](int back, bool zero) {
#pragma unroll
    for (int i = 0; i < kRows; ++i)
      *reinterpret_cast<Floats*>(params.present_state + state_at - back * params.slot + i * V) =
          zero ? Floats{} : state[i];
  };
  __syncthreads();
  for (int t = 0; t < row.count; ++t) {
    const DeltaOperands<K, kPerKey>& token = operands[t];
    const int at = warp * kRows / token.kRows * token.kStride + warp * kRows % token.kRows;
    Floats m{}, o{};
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const float decay = token.decay[kPerKey ? at + i : 0], key = token.key[at + i], query = token.query[at + i];
#pragma unroll
      for (int j = 0; j < kEach; ++j) {
        state[i].x[j] *= decay;
        m.x[j] = fmaf(key, state[i].x[j], m.x[j]), o.x[j] = fmaf(query, state[i].x[j], o.x[j]);
      }
    }
    sums[t % 2][0][warp][lane] = m, sums[t % 2][1][warp][lane] = o;
    __syncthreads();
    Floats delta = values[t][lane], recalled{};
#pragma unroll 4
    for (int w = 0; w < kWarps; ++w)
#pragma unroll
      for (int j = 0; j < kEach; ++j) recalled.x[j] += sums[t % 2][0][w][lane].x[j];
#pragma unroll
    for (int j = 0; j < kEach; ++j) delta.x[j] = token.beta * (delta.x[j] - recalled.x[j]);
#pragma unroll
    for (int i = 0; i < kRows; ++i)
#pragma unroll
      for (int j = 0; j < kEach; ++j) state[i].x[j] = fmaf(token.key[at + i], delta.x[j], state[i].x[j]);
    if (const int back = row.count - 1 - t; back > 0 && back < node.state_window) store(back, false);
    if (warp == t) {
      Floats output{};
      float squares = 0;
#pragma unroll 4
      for (int w = 0; w < kWarps; ++w)
#pragma unroll
        for (int j = 0; j < kEach; ++j) output.x[j] += sums[t % 2][1][w][lane].x[j];
#pragma unroll
      for (int j = 0; j < kEach; ++j) {
        output.x[j] = fmaf(token.product, delta.x[j], output.x[j]);
        squares = fmaf(output.x[j], output.x[j], squares);
      }
      const float by = head_norm(params, warp_sum(squares));
      T* y = static_cast<T*>(params.y) + (own_token * node.num_v_heads + head) * V + lane * kEach;
#pragma unroll
      for (int j = 0; j < kEach; ++j)
        y[j] = Half<T>::from(
            gate_value(params, output.x[j] * by * params.norm[lane * kEach + j], static_cast<float>(z[j])));
    }
  }
  store(0, false);
  if (params.apart)
    for (int back = max(row.count, 1); back < node.state_window; ++back) store(back, true);
}

}  // namespace quantmoe
