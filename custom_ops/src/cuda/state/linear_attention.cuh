// CausalConv and GatedDelta.
//
// A state's columns meet only in the norm of the output. So a block has some columns of a head's state, a warp eight,
// for all tokens of the call. Four lanes share a column, with a quarter of its rows each in registers:
//
//             columns 0 .. 7
//   rows 0 .. K/4 - 1         lanes 0 .. 7      m, o: what each quarter of S gives with a key and a query; shuffles
//   rows K/4 .. K/2 - 1       lanes 8 .. 15     add up the four
//   ..                        ..
//
// S stands for the state after its decay. A token is then delta = beta (v - m), S += key delta, output = o + (query
// key) delta. So the state is read and written once, whatever the number of tokens. Warps wait for each other only
// where a chunk of tokens ends, because they prepare its operands together.
#pragma once
#include "core/attributes.h"
#include "cuda/common/activation.cuh"
#include "cuda/state/linear_attention.h"
#include "cuda/state/states.cuh"
#include "quantmoe/quant_moe_cuda.h"

namespace quantmoe {

// Of a window of states past and present are the last slots; what is `back` tokens before is `back` times `slot` values
// before it. apart: present is not past's memory, so what is of no token becomes zero.
struct ConvParams {
  qm_conv conv;
  int batch, tokens, x_words;  // x_words: of two features, of a row of x
  const void* x;
  const float *weight, *bias;
  const void* past;
  const int* rows;
  void *y, *present;
  int64_t slot;
  bool apart;
};

struct DeltaParams {
  qm_delta delta;
  int batch, tokens;
  const void *qkv, *a, *b, *z;
  int64_t a_size, b_size, z_size;  // of the rows that these are in
  const float *a_log, *dt_bias, *norm, *past_state;
  const int* rows;
  void* y;
  float* present_state;
  float* outputs;  // [batch, tokens, H, V] before the norm, where blocks have parts of heads
  int64_t slot;
  bool apart;
  int tail;  // so many tokens at the end of a row are a launch's own, whose past is what the launches before it made
};

// Of two channels that lie beside each other: their weights, and their states, the first channel's W - 1 inputs before
// the second one's.
template <int W>
struct alignas(W % 2 ? 8 : 16) ConvWeights {
  float x[2][W];
};
template <int W>
struct ConvState {
  uint32_t words[W - 1];
  // Both channels' input j, the first one's in the low half. No index that is known late: words are registers.
  __device__ uint32_t input(int j) const {
    uint32_t found = 0;
#pragma unroll
    for (int i = 0; i < W - 1; ++i)
      if (i == j) found = half_of(i) | half_of(W - 1 + i) << 16;
    return found;
  }
  __device__ void keep(int j, uint32_t both) { put_half(j, both & 0xffff), put_half(W - 1 + j, both >> 16); }

 private:
  __device__ uint32_t half_of(int i) const { return words[i / 2] >> i % 2 * 16 & 0xffff; }
  __device__ void put_half(int i, uint32_t half) {
    words[i / 2] = i % 2 ? words[i / 2] & 0xffff | half << 16 : words[i / 2] & 0xffff0000 | half;
  }
};

// Two channels a thread, kConvTokens tokens of a row a block, counted from the first that counts. Only the first block
// reads the state, and it writes it: so present may be past's memory. One long function: weights, the last inputs and
// the state to be written are the same registers.
template <typename T, int W>
__global__ void __launch_bounds__(kConvThreads, 8) causal_conv(const __grid_constant__ ConvParams params) {
  launch_dependents();
  const int channels = params.conv.channels, channel = (blockIdx.x * kConvThreads + threadIdx.x) * 2,
            batch_row = blockIdx.z;
  ConvWeights<W> weight{};
  float2 bias{};
  if (channel < channels) {
    weight = reinterpret_cast<const ConvWeights<W>*>(params.weight)[channel / 2];
    if (params.bias) bias = make_float2(params.bias[channel], params.bias[channel + 1]);
  }
  wait_for_previous();
  if (channel >= channels) return;
  const int first = blockIdx.y * kConvTokens;
  const int64_t state = (static_cast<int64_t>(batch_row) * channels + channel) * (W - 1) / 2;
  ConvState<W> before{};  // the inputs before the first token
  if (first == 0)
#pragma unroll
    for (int j = 0; j < W - 1; ++j) before.words[j] = static_cast<const uint32_t*>(params.past)[state + j];
  if (params.tokens <= kFewConvTokens)  // what most likely is read, asked for before `rows` says so
    for (int t = 0; t < params.tokens; ++t)
      touch(static_cast<const uint32_t*>(params.x) +
            (static_cast<int64_t>(batch_row) * params.tokens + t) * params.x_words + channel / 2);
  const TokenRow row = read_token_row(params.rows, batch_row, params.tokens);
  const auto word = [&](int token) {
    return (static_cast<int64_t>(batch_row) * params.tokens + token) * channels / 2 + channel / 2;
  };
  const uint32_t* x = static_cast<const uint32_t*>(params.x);
  uint32_t* y = static_cast<uint32_t*>(params.y);
  const uint32_t none = row.valid ? 0 : Half<T>::pack(not_a_number(), not_a_number());
  for (int t = first; t < min(first + kConvTokens, params.tokens); ++t)
    if (!row.has(t)) y[word(t)] = none;
  if (!row.valid) return;
  if (!row.from_past && row.count) before = {};

  uint32_t* present = static_cast<uint32_t*>(params.present) + state;
  // Of both channels the input of a token, counted from the first that counts; before it is the state.
  const auto input = [&](int token) -> uint32_t {
    if (token < 0) return before.input(token + W - 1);
    return x[(static_cast<int64_t>(batch_row) * params.tokens + row.begin + token) * params.x_words + channel / 2];
  };
  const auto store = [&](int back, const ConvState<W>& kept) {
#pragma unroll
    for (int j = 0; j < W - 1; ++j) present[j - back * params.slot / 2] = kept.words[j];
  };
  // The state after the first `count` tokens.
  const auto state_after = [&](int count) {
    ConvState<W> kept{};
#pragma unroll
    for (int j = 0; j < W - 1; ++j) kept.keep(j, input(count - (W - 1) + j));
    return kept;
  };
  ConvState<W> kept{};
  if (blockIdx.y == 0) {
    for (int back = 1; back < params.conv.state_window; ++back) {
      if (back >= row.count && !params.apart) break;
      store(back, back < row.count ? state_after(row.count - back) : ConvState<W>{});
    }
    kept = state_after(row.count);
  }
  if (first < row.count) {
    float2 window[W];
#pragma unroll
    for (int j = 0; j < W - 1; ++j) {
      const uint32_t v = input(first - (W - 1) + j);
      window[j] = make_float2(Half<T>::low(v), Half<T>::high(v));
    }
    const int end = min(first + kConvTokens, row.count);
    for (int from = first; from < end; from += kConvAhead) {
      uint32_t inputs[kConvAhead];  // all asked for before the first is used: y might be x, for what the compiler knows
#pragma unroll
      for (int i = 0; i < kConvAhead; ++i) inputs[i] = input(min(from + i, end - 1));
#pragma unroll
      for (int i = 0; i < kConvAhead; ++i) {
        if (from + i >= end) break;
        window[W - 1] = make_float2(Half<T>::low(inputs[i]), Half<T>::high(inputs[i]));
        float2 sum = bias;
#pragma unroll
        for (int j = 0; j < W; ++j)
          sum = make_float2(fmaf(weight.x[0][j], window[j].x, sum.x), fmaf(weight.x[1][j], window[j].y, sum.y));
        if (params.conv.activation == k_conv_activation_silu) sum = make_float2(silu(sum.x), silu(sum.y));
        y[word(row.begin + from + i)] = Half<T>::pack(sum.x, sum.y);
#pragma unroll
        for (int j = 0; j < W - 1; ++j) window[j] = window[j + 1];
      }
    }
  }
  if (blockIdx.y == 0) store(0, kept);
}

// One token of kConvRows rows: two channels a thread. All is asked for before the first is used.
template <typename T, int W>
__global__ void __launch_bounds__(kConvThreads) causal_conv_step(const __grid_constant__ ConvParams params) {
  launch_dependents();
  const int pairs = params.conv.channels / 2, pair = blockIdx.x * kConvThreads + threadIdx.x,
            first_row = blockIdx.y * kConvRows, rows = min(kConvRows, params.batch - first_row);
  ConvWeights<W> weight{};
  float2 bias{};
  if (pair < pairs) {
    weight = reinterpret_cast<const ConvWeights<W>*>(params.weight)[pair];
    if (params.bias) bias = make_float2(params.bias[2 * pair], params.bias[2 * pair + 1]);
  }
  wait_for_previous();
  if (pair >= pairs) return;
  const auto state_at = [&](int i) { return ((first_row + i) * static_cast<int64_t>(pairs) + pair) * (W - 1); };
  ConvState<W> state[kConvRows];
  uint32_t x[kConvRows];
  TokenRow row[kConvRows];
#pragma unroll
  for (int i = 0; i < kConvRows; ++i) {
    if (i >= rows) break;
#pragma unroll
    for (int j = 0; j < W - 1; ++j) state[i].words[j] = static_cast<const uint32_t*>(params.past)[state_at(i) + j];
    x[i] = static_cast<const uint32_t*>(params.x)[static_cast<int64_t>(first_row + i) * params.x_words + pair];
    row[i] = read_token_row(params.rows, first_row + i, 1);
  }
#pragma unroll
  for (int i = 0; i < kConvRows; ++i) {
    if (i >= rows) break;
    uint32_t& y = static_cast<uint32_t*>(params.y)[(first_row + i) * static_cast<int64_t>(pairs) + pair];
    if (!row[i].count) y = row[i].valid ? 0 : Half<T>::pack(not_a_number(), not_a_number());
    if (!row[i].valid) continue;
    if (row[i].count) {
      const ConvState<W> before = row[i].from_past ? state[i] : ConvState<W>{};
      float2 sum = bias;
#pragma unroll
      for (int j = 0; j < W; ++j) {
        const uint32_t both = j < W - 1 ? before.input(j) : x[i];
        sum.x = fmaf(weight.x[0][j], Half<T>::low(both), sum.x);
        sum.y = fmaf(weight.x[1][j], Half<T>::high(both), sum.y);
        if (j) state[i].keep(j - 1, both);
      }
      if (params.conv.activation == k_conv_activation_silu) sum = make_float2(silu(sum.x), silu(sum.y));
      y = Half<T>::pack(sum.x, sum.y);
    }
    uint32_t* present = static_cast<uint32_t*>(params.present) + state_at(i);
#pragma unroll
    for (int j = 0; j < W - 1; ++j) present[j] = state[i].words[j];
    if (params.apart)
      for (int back = 1; back < params.conv.state_window; ++back)
#pragma unroll
        for (int j = 0; j < W - 1; ++j) present[j - back * params.slot / 2] = 0;
  }
}

// Wider convolutions, and all of float32: two channels a thread, of whose weights and state nothing stays in
// registers. The state is causal_conv_keep's, which comes after.
template <typename T>
struct WideConv {
  struct alignas(2 * sizeof(T)) Both {
    T x[2];
  };
  const ConvParams& params;
  const TokenRow& row;
  int batch_row, pair;

  // Where the state begins that was `back` tokens before the last one's: the first channel's.
  __device__ int64_t state_at(int back) const {
    const int64_t pairs = params.conv.channels / 2;
    return (batch_row * pairs + pair) * 2 * (params.conv.width - 1) - back * params.slot;
  }
  // Both channels' input of a token, counted from the first that counts; before it is the state.
  __device__ Both input(int token) const {
    if (token >= 0) {
      const int64_t at = static_cast<int64_t>(batch_row) * params.tokens + row.begin + token;
      return static_cast<const Both*>(params.x)[at * params.x_words + pair];
    }
    if (row.count && !row.from_past) return both(0.f, 0.f);
    const int size = params.conv.width - 1;
    const T* past = static_cast<const T*>(params.past) + state_at(0) + token + size;
    return {{past[0], past[size]}};
  }
  __device__ static Both both(float first, float second) { return {{T(first), T(second)}}; }
};
template <typename T>
__global__ void __launch_bounds__(kConvThreads) causal_conv_wide(const __grid_constant__ ConvParams params) {
  launch_dependents();
  wait_for_previous();
  const int pairs = params.conv.channels / 2, pair = blockIdx.x * kConvThreads + threadIdx.x, batch_row = blockIdx.z,
            width = params.conv.width;
  if (pair >= pairs) return;
  const TokenRow row = read_token_row(params.rows, batch_row, params.tokens);
  const WideConv<T> conv{params, row, batch_row, pair};
  const int first = blockIdx.y * kConvTokens;
  for (int t = first; t < min(first + kConvTokens, params.tokens); ++t) {
    auto& y = static_cast<typename WideConv<T>::Both*>(
        params.y)[(static_cast<int64_t>(batch_row) * params.tokens + t) * pairs + pair];
    if (!row.has(t)) {
      const float none = row.valid ? 0.f : not_a_number();
      y = conv.both(none, none);
      continue;
    }
    float2 sum = params.bias ? make_float2(params.bias[2 * pair], params.bias[2 * pair + 1]) : float2{};
    for (int j = 0; j < width; ++j) {
      const auto both = conv.input(t - row.begin - (width - 1) + j);
      const float* weight = params.weight + 2 * pair * width + j;
      sum.x = fmaf(weight[0], static_cast<float>(both.x[0]), sum.x);
      sum.y = fmaf(weight[width], static_cast<float>(both.x[1]), sum.y);
    }
    if (params.conv.activation == k_conv_activation_silu) sum = make_float2(silu(sum.x), silu(sum.y));
    y = conv.both(sum.x, sum.y);
  }
}
// The states that a call leaves. In place a value moves to a place before its own, which is read by then.
template <typename T>
__global__ void __launch_bounds__(kConvThreads) causal_conv_keep(const __grid_constant__ ConvParams params) {
  launch_dependents();
  wait_for_previous();
  const int pair = blockIdx.x * kConvThreads + threadIdx.x, batch_row = blockIdx.z, size = params.conv.width - 1;
  const TokenRow row = read_token_row(params.rows, batch_row, params.tokens);
  if (pair >= params.conv.channels / 2 || !row.valid) return;
  const WideConv<T> conv{params, row, batch_row, pair};
  for (int back = params.conv.state_window - 1; back >= 0; --back) {
    if (back && back >= row.count && !params.apart) continue;
    T* to = static_cast<T*>(params.present) + conv.state_at(back);
    for (int j = 0; j < size; ++j) {
      const auto both = back && back >= row.count ? conv.both(0.f, 0.f) : conv.input(row.count - back - size + j);
      to[j] = both.x[0], to[size + j] = both.x[1];
    }
  }
}

// A token's operands as all columns read them.
template <int K, bool kPerKey>
struct alignas(16) DeltaOperands {
  // A part's rows; four more, so that the parts' are in other banks.
  static constexpr int kRows = K / kDeltaParts, kStride = kRows + 4;
  float key[kDeltaParts * kStride], query[kDeltaParts * kStride], decay[kPerKey ? kDeltaParts * kStride : 4];
  float beta, product;  // of key and query
};
// What a lane has of them before the norms, as it is read: nothing waits for it until it is used.
template <typename T, int K, bool kPerKey>
struct DeltaInput {
  static constexpr int kEach = K / 32;
  struct alignas(2 * kEach) Values {
    T x[kEach];
  };
  Values q, k, a;  // a: of each key; else the first
  T b;
};

template <typename T, int K, bool kPerKey>
__device__ inline DeltaInput<T, K, kPerKey> read_input(const DeltaParams& params, int64_t token, int head) {
  using Input = DeltaInput<T, K, kPerKey>;
  using Values = typename Input::Values;
  const qm_delta& node = params.delta;
  const int lane = threadIdx.x % 32, group = head / (node.num_v_heads / node.num_k_heads);
  const T* qkv =
      static_cast<const T*>(params.qkv) + token * (2 * node.num_k_heads * K + node.num_v_heads * node.v_head_size);
  Input input;
  input.q = reinterpret_cast<const Values*>(qkv + group * K)[lane];
  input.k = reinterpret_cast<const Values*>(qkv + (node.num_k_heads + group) * K)[lane];
  if (kPerKey)
    input.a = reinterpret_cast<const Values*>(static_cast<const T*>(params.a) + token * params.a_size + head * K)[lane];
  else
    input.a.x[0] = static_cast<const T*>(params.a)[token * params.a_size + head];
  input.b = static_cast<const T*>(params.b)[token * params.b_size + head];
  return input;
}
// By a warp. dt_bias: what the lane's decays take.
template <typename T, int K, bool kPerKey>
__device__ inline void prepare(const DeltaParams& params, float rate, const float* dt_bias,
                               const DeltaInput<T, K, kPerKey>& input, DeltaOperands<K, kPerKey>* operands) {
  constexpr int kEach = K / 32;
  const int lane = threadIdx.x % 32;
  float q[kEach], k[kEach], q_squares = 0, k_squares = 0, product = 0;
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    q[i] = static_cast<float>(input.q.x[i]), k[i] = static_cast<float>(input.k.x[i]);
    q_squares = fmaf(q[i], q[i], q_squares), k_squares = fmaf(k[i], k[i], k_squares);
    product = fmaf(q[i], k[i], product);
  }
  q_squares = warp_sum(q_squares), k_squares = warp_sum(k_squares), product = warp_sum(product);
  const float by_q = rsqrtf(q_squares + params.delta.l2_epsilon) * params.delta.scale;
  const float by_k = rsqrtf(k_squares + params.delta.l2_epsilon);
  const int at = lane * kEach / operands->kRows * operands->kStride + lane * kEach % operands->kRows;
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    operands->query[at + i] = q[i] * by_q, operands->key[at + i] = k[i] * by_k;
    if (kPerKey) operands->decay[at + i] = expf(-rate * softplus(static_cast<float>(input.a.x[i]) + dt_bias[i]));
  }
  if (lane == 0) {
    if (!kPerKey) operands->decay[0] = expf(-rate * softplus(static_cast<float>(input.a.x[0]) + dt_bias[0]));
    operands->beta = params.delta.beta_scale * sigmoid_of(static_cast<float>(input.b)),
    operands->product = product * by_q * by_k;
  }
}

// A value of the output times its head's norm and weight. It is rounded to 16 bits: the sigmoid need not be exact.
__device__ inline float gate_value(const DeltaParams& params, float normed, float z) {
  return normed * (params.delta.gate == k_output_gate_silu ? silu(z) : sigmoid(z));
}
__device__ inline float head_norm(const DeltaParams& params, float squares) {
  return rsqrtf(squares / params.delta.v_head_size + params.delta.norm_epsilon);
}
// A head of a token, by a warp: o [V], 16-byte aligned, to y, four columns a lane.
template <typename T>
__device__ inline void gate_output(const DeltaParams& params, const float* o, int64_t token, int head) {
  const int v = params.delta.v_head_size, column = threadIdx.x % 32 * 4;
  alignas(16) float x[4] = {};
  float sum = 0;
  if (column < v) *reinterpret_cast<float4*>(x) = *reinterpret_cast<const float4*>(o + column);
#pragma unroll
  for (int i = 0; i < 4; ++i) sum = fmaf(x[i], x[i], sum);
  sum = warp_sum(sum);
  if (column >= v) return;
  alignas(8) T gates[4];
  read_four(gates, static_cast<const T*>(params.z) + token * params.z_size + head * v + column);
  const float by = head_norm(params, sum);
#pragma unroll
  for (int i = 0; i < 4; ++i)
    x[i] = gate_value(params, x[i] * by * params.norm[column + i], static_cast<float>(gates[i]));
  T* y = static_cast<T*>(params.y) + (token * params.delta.num_v_heads + head) * v + column;
  *reinterpret_cast<uint2*>(y) = make_uint2(Half<T>::pack(x[0], x[1]), Half<T>::pack(x[2], x[3]));
}
template <typename T>
__device__ inline void gate_none(const DeltaParams& params, const TokenRow& row, int64_t token, int head) {
  const int v = params.delta.v_head_size;
  T* y = static_cast<T*>(params.y) + (token * params.delta.num_v_heads + head) * v;
  for (int c = threadIdx.x % 32; c < v; c += 32) y[c] = Half<T>::from(row.valid ? 0.f : not_a_number());
}

// Blocks: columns of a head, heads, rows. The blocks of a cluster norm and gate the output, and tell each other the
// sums of their squares (kCluster), or delta_gate does.
//
// One long function: the state is registers from the first line to the last. What a later part needs is asked for in an
// earlier part, before what the earlier part waits for. In order:
//
//   before the previous kernel ends    biases, rates, a prefetch of the state (kCluster)
//   after it                           the state, and with kCluster the first chunk, as if the row had all tokens; then
//                                      what `rows` says: zero the state, or read the chunk again
//   each chunk of kChunk tokens        warps prepare keys, queries and gates in shared memory and read the next chunk;
//                                      every token updates the state; older states go to their slots (state_window);
//                                      outputs are normed and gated
//   at the end                         the state is stored
template <typename T, int K, DeltaNorm kNorm, bool kPerKey>
__global__ void __launch_bounds__(kDeltaParts* kDeltaColumns) gated_delta(const __grid_constant__ DeltaParams params) {
  constexpr int C = kDeltaColumns, kRows = K / kDeltaParts, kChunk = kDeltaChunk<kNorm>, kWarps = kDeltaParts * C / 32;
  constexpr int kOfWarp = (kChunk + kWarps - 1) / kWarps;  // tokens of a chunk that a warp prepares
  constexpr int kValues = kChunk / kDeltaParts;            // of a chunk that a thread reads
  constexpr bool kCluster = kNorm == DeltaNorm::kCluster;
  constexpr int kMostBlocks = 128 / C;  // of a head
  __shared__ DeltaOperands<K, kPerKey> operands[kOfWarp * kWarps];
  __shared__ float values[kChunk][C];
  __shared__ float outputs[kCluster ? kChunk : 1][C];
  __shared__ float squares[kCluster ? kChunk : 1][kMostBlocks];
  if (kCluster) cluster_arrive();  // its wait tells that all blocks run
  launch_dependents();
  const qm_delta& node = params.delta;
  if (kCluster)  // L2 is asked for the block's part of the state, which may still change, before that is read
    for (int i = threadIdx.x; i < K; i += kDeltaParts * C)
      prefetch(params.past_state +
                   ((static_cast<int64_t>(blockIdx.z) * node.num_v_heads + blockIdx.y) * K + i) * node.v_head_size +
                   blockIdx.x * C,
               C * 4);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int column = warp * (32 / kDeltaParts) + lane % (32 / kDeltaParts), part = lane / (32 / kDeltaParts);
  const int first_column = blockIdx.x * C, own_column = first_column + column, v_head_size = node.v_head_size;
  const int head = blockIdx.y, batch_row = blockIdx.z;
  constexpr int kBiases = kPerKey ? K / 32 : 1;
  float dt_bias[kBiases];
#pragma unroll
  for (int i = 0; i < kBiases; ++i) dt_bias[i] = params.dt_bias[kPerKey ? head * K + lane * kBiases + i : head];
  const float rate = expf(params.a_log[head]), norm = kCluster ? params.norm[first_column + lane] : 0.f;
  wait_for_previous();

  // What `rows` does not decide is asked for before it is there.
  const int64_t state_at =
      ((static_cast<int64_t>(batch_row) * node.num_v_heads + head) * K + part * kRows) * v_head_size + own_column;
  float state[kRows];
#pragma unroll
  for (int i = 0; i < kRows; ++i) state[i] = params.past_state[state_at + static_cast<int64_t>(i) * v_head_size];
  const int64_t first_token = static_cast<int64_t>(batch_row) * params.tokens;
  TokenRow row{0, params.tokens, true, true};  // most likely
  DeltaInput<T, K, kPerKey> input[kOfWarp];
  T value[kValues], z[kCluster ? kOfWarp : 1];
  // Asks for what a chunk has; beyond the last token for the last one's again.
  const auto read = [&](int first) {
    const int width = 2 * node.num_k_heads * K + node.num_v_heads * v_head_size;
    const auto token = [&](int t) { return first_token + row.begin + min(first + t, row.count - 1); };
#pragma unroll
    for (int i = 0; i < kOfWarp; ++i) input[i] = read_input<T, K, kPerKey>(params, token(i * kWarps + warp), head);
#pragma unroll
    for (int i = 0; i < kValues; ++i)
      value[i] = static_cast<const T*>(
          params.qkv)[token(i * kDeltaParts + threadIdx.x / C) * width + 2 * node.num_k_heads * K + head * v_head_size +
                      first_column + threadIdx.x % C];
    if (kCluster)
#pragma unroll
      for (int i = 0; i < kOfWarp; ++i)
        z[i] = static_cast<const T*>(
            params.z)[token(i * kWarps + warp) * params.z_size + head * v_head_size + first_column + lane];
  };
  if (kCluster && params.tokens) read(0);
  row = read_token_row(params.rows, batch_row, params.tokens);
  const bool there = kCluster && row.begin == 0 && row.count == params.tokens;
  if (params.tail) row = tail_of(row, params.tail);
  const auto store = [&](int back, bool zero) {
#pragma unroll
    for (int i = 0; i < kRows; ++i)
      params.present_state[state_at - back * params.slot + static_cast<int64_t>(i) * v_head_size] =
          zero ? 0.f : state[i];
  };
  if (kCluster && blockIdx.x == 0)
    for (int t = warp; t < params.tokens; t += kWarps)
      if (!row.has(t)) gate_none<T>(params, row, first_token + t, head);
  if (kCluster) cluster_wait();
  if (!row.valid) return;
  if (!row.from_past && row.count)
#pragma unroll
    for (int i = 0; i < kRows; ++i) state[i] = 0;

  if (row.count && !there) read(0);
  for (int first = 0; first < row.count; first += kChunk) {
    const int n = min(kChunk, row.count - first);
#pragma unroll
    for (int i = 0; i < kOfWarp; ++i)
      prepare<T, K, kPerKey>(params, rate, dt_bias, input[i], operands + i * kWarps + warp);
#pragma unroll
    for (int i = 0; i < kValues; ++i)
      values[i * kDeltaParts + threadIdx.x / C][threadIdx.x % C] = static_cast<float>(value[i]);
    __syncthreads();
    if (first + kChunk < row.count) read(first + kChunk);
#pragma unroll 2
    for (int t = 0; t < n; ++t) {
      const DeltaOperands<K, kPerKey>& token = operands[t];
      const auto rows = [&](const float* of) { return reinterpret_cast<const float4*>(of + part * token.kStride); };
      float m[4] = {}, o[4] = {};
#pragma unroll
      for (int i = 0; i < kRows; i += 4) {
        const float4 k4 = rows(token.key)[i / 4], q4 = rows(token.query)[i / 4];
        const float4 d4 = kPerKey ? rows(token.decay)[i / 4] : float4{};
        const float k[4] = {k4.x, k4.y, k4.z, k4.w}, q[4] = {q4.x, q4.y, q4.z, q4.w};
        const float decay[4] = {d4.x, d4.y, d4.z, d4.w};
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          state[i + j] *= kPerKey ? decay[j] : token.decay[0];
          m[j] = fmaf(k[j], state[i + j], m[j]);
          o[j] = fmaf(q[j], state[i + j], o[j]);
        }
      }
      float all = (m[0] + m[1]) + (m[2] + m[3]), output = (o[0] + o[1]) + (o[2] + o[3]);
#pragma unroll
      for (int lanes = 32 / kDeltaParts; lanes < 32; lanes *= 2) {
        all += __shfl_xor_sync(~0u, all, lanes);
        output += __shfl_xor_sync(~0u, output, lanes);
      }
      const float delta = token.beta * (values[t][column] - all);
#pragma unroll
      for (int i = 0; i < kRows; i += 4) {
        const float4 k4 = rows(token.key)[i / 4];
        const float k[4] = {k4.x, k4.y, k4.z, k4.w};
#pragma unroll
        for (int j = 0; j < 4; ++j) state[i + j] = fmaf(k[j], delta, state[i + j]);
      }
      if (part == 0) {
        output = fmaf(token.product, delta, output);
        if (kCluster)
          outputs[t][column] = output;
        else
          params.outputs[((first_token + row.begin + first + t) * node.num_v_heads + head) * v_head_size + own_column] =
              output;
      }
      if (const int back = row.count - 1 - first - t; back > 0 && back < node.state_window) store(back, false);
    }
    __syncthreads();
    const int64_t token = first_token + row.begin + first;
    if (kCluster) {  // all tokens are of one chunk
      const int blocks = gridDim.x;
      for (int t = warp; t < n; t += kWarps) {
        const float sum = warp_sum(outputs[t][lane] * outputs[t][lane]);
        if (lane < blocks) cluster_store(&squares[t][blockIdx.x], lane, sum);
      }
      cluster_arrive();
      cluster_wait();
#pragma unroll
      for (int i = 0; i < kOfWarp; ++i) {
        const int t = i * kWarps + warp;
        if (t >= n) break;
        float sum = 0;
        for (int block = 0; block < blocks; ++block) sum += squares[t][block];
        const int from = first_column + lane;
        static_cast<T*>(params.y)[((token + t) * node.num_v_heads + head) * v_head_size + from] = Half<T>::from(
            gate_value(params, outputs[t][lane] * head_norm(params, sum) * norm, static_cast<float>(z[i])));
      }
    }
  }
  store(0, false);
  if (params.apart)
    for (int back = max(row.count, 1); back < node.state_window; ++back) store(back, true);
}

// What GatedDelta left in outputs: a warp a head of a token. Blocks: tokens, heads, rows.
template <typename T>
__global__ void __launch_bounds__(kGateThreads) delta_gate(const __grid_constant__ DeltaParams params) {
  launch_dependents();
  wait_for_previous();
  const int token = blockIdx.x, heads = params.delta.num_v_heads,
            head = blockIdx.y * (kGateThreads / 32) + threadIdx.x / 32;
  if (head >= heads) return;
  const TokenRow row = read_token_row(params.rows, blockIdx.z, params.tokens);
  const int64_t at = static_cast<int64_t>(blockIdx.z) * params.tokens + token;
  if (row.has(token))
    gate_output<T>(params, params.outputs + (at * heads + head) * params.delta.v_head_size, at, head);
  else
    gate_none<T>(params, row, at, head);
}

struct Launcher;
// All tokens of a call by the chunked kernels (linear_attention_chunked.cuh), without the norm. workspace: the plan's;
// params.outputs is its beginning.
void launch_delta_chunks(const DeltaParams& params, int32_t type, bool wgmma, Launcher& launcher);

}  // namespace quantmoe
