// StateSpace.
//
// A state's columns are independent, as in GatedDelta (linear_attention.cuh), but nothing is recalled. A token is
// `S = d S + B u` with `u = dt x`, and `output = C S + D x`. A block has 32 columns of a head's state in registers for
// all tokens of the call, a warp eight. Sixteen lanes share four columns. A lane has four rows of each 64, so an
// operand read from shared memory is used for four columns:
//
//                            columns 0 .. 3        columns 4 .. 7
//   rows 0 .. 3, 64 .. 67    lane 0                lane 16
//   rows 4 .. 7, 68 .. 71    lane 1                lane 17
//   ..                       ..                    ..
//
// The lanes of a column add up their parts of C S for four tokens at once. Each lane then has one output of the
// sixteen. space_gate gates and norms them, because a norm is of several heads.
#pragma once
#include "core/attributes.h"
#include "cuda/common/activation.cuh"
#include "cuda/state/linear_attention.h"
#include "cuda/state/states.cuh"
#include "quantmoe/quant_moe_cuda.h"

namespace quantmoe {

// Of a window of states and `apart`: ConvParams.
struct SpaceParams {
  qm_space space;
  int tokens;
  const void *xbc, *dt, *z;
  int64_t dt_size, z_size;  // of the rows that these are in
  const float *a_log, *dt_bias, *d, *norm, *past_state;
  const int* rows;
  void* y;
  float* present_state;
  float* outputs;  // [batch, tokens, H, P] before the gate
  int64_t slot;
  bool apart;
  int tail;  // DeltaParams
};

// Tokens' operands as the lanes read them.
template <int N>
struct SpaceChunk {
  static constexpr int kTokens = N == 256 ? 8 : 16;  // two chunks are less than 48 KB
  float bc[kTokens][2 * N];                          // B, then C
  float u[kTokens][kSpaceColumns], x[kTokens][kSpaceColumns], decay[kTokens];
};

// The sums, over sixteen lanes, of n values of each. A lane gets the sum of value `part` / (16 / n).
template <int n>
__device__ __forceinline__ float sum_of_parts(float (&values)[n], int part) {
  int left = n;
#pragma unroll
  for (int by = 8; by > 0; by /= 2) {
    if (left == 1) {
      values[0] += __shfl_xor_sync(~0u, values[0], by);
      continue;
    }
    left /= 2;
    const bool upper = part & by;
#pragma unroll
    for (int i = 0; i < left; ++i) {
      const float low = values[i], high = values[i + left];
      values[i] = (upper ? high : low) + __shfl_xor_sync(~0u, upper ? low : high, by);
    }
  }
  return values[0];
}

// Tokens of a chunk from t on, by a warp. column: the first of the lane's, in the block; outputs: of token t, and of
// the block's columns.
template <int kTokens, int N>
__device__ __forceinline__ void take_tokens(const SpaceChunk<N>& chunk, int t, float (&state)[N / 64][4][4], int column,
                                            float d, float* outputs, int64_t stride) {
  constexpr int kLanes = 4 / kTokens;  // that have the same output
  const int part = threadIdx.x % 16;
  float o[4 * kTokens] = {};
#pragma unroll
  for (int j = 0; j < kTokens; ++j) {
    const float decay = chunk.decay[t + j];
    const float4 u4 = *reinterpret_cast<const float4*>(chunk.u[t + j] + column);
    const float u[4] = {u4.x, u4.y, u4.z, u4.w};
    const float4* operands = reinterpret_cast<const float4*>(chunk.bc[t + j]);
#pragma unroll
    for (int k = 0; k < N / 64; ++k) {
      const float4 b4 = operands[16 * k + part], c4 = operands[N / 4 + 16 * k + part];
      const float b[4] = {b4.x, b4.y, b4.z, b4.w}, c[4] = {c4.x, c4.y, c4.z, c4.w};
#pragma unroll
      for (int row = 0; row < 4; ++row)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          float& s = state[k][row][i];
          s = fmaf(b[row], u[i], decay * s);
          o[4 * j + i] = fmaf(c[row], s, o[4 * j + i]);
        }
    }
  }
  const float sum = sum_of_parts(o, part);
  const int token = part / kLanes / 4, own = column + part / kLanes % 4;
  if (part % kLanes == 0) outputs[token * stride + own] = fmaf(d, chunk.x[t + token][own], sum);
}

// Blocks: columns of a head, heads, rows.
//
// One long function, as gated_delta is: the state is registers from the first line to the last. What a later part needs
// is asked for in an earlier part, before what the earlier part waits for.
template <typename T, int N>
__global__ void __launch_bounds__(kSpaceThreads) state_space(const __grid_constant__ SpaceParams params) {
  using Chunk = SpaceChunk<N>;
  constexpr int kChunk = Chunk::kTokens, kEights = N / 4;  // of B and C of a token
  constexpr int kOfThread = kChunk * kEights / kSpaceThreads;
  static_assert(kChunk * kSpaceColumns / 4 <= kSpaceThreads, "a thread has at most four of a chunk's x");
  __shared__ __align__(16) Chunk chunks[2];
  launch_dependents();
  const qm_space& node = params.space;
  const int head = blockIdx.y, batch_row = blockIdx.z, first_column = blockIdx.x * kSpaceColumns;
  const int64_t p = node.head_size, width = node.num_heads * p, groups = node.num_groups;
  const int64_t head_at = (static_cast<int64_t>(batch_row) * node.num_heads + head) * N * p + first_column;
  // L2 is asked for the block's part of the state, which may still change, before that is read.
  for (int i = threadIdx.x; i < N; i += kSpaceThreads) prefetch(params.past_state + head_at + i * p, kSpaceColumns * 4);
  const int warp = threadIdx.x / 32, part = threadIdx.x % 16, column = 8 * warp + threadIdx.x % 32 / 16 * 4;
  const float rate = expf(params.a_log[head]), dt_bias = params.dt_bias[head], d = params.d[head];
  wait_for_previous();

  // What `rows` does not decide is asked for before it is there.
  const int64_t state_at = head_at + 4 * part * p + column;
  alignas(16) float state[N / 64][4][4];
#pragma unroll
  for (int k = 0; k < N / 64; ++k)
#pragma unroll
    for (int i = 0; i < 4; ++i)
      *reinterpret_cast<float4*>(state[k][i]) =
          *reinterpret_cast<const float4*>(params.past_state + state_at + (64 * k + i) * p);
  const int64_t first_token = static_cast<int64_t>(batch_row) * params.tokens;
  TokenRow row{0, params.tokens, true, true};  // most likely
  const int of_token = threadIdx.x / (kSpaceColumns / 4), four = threadIdx.x % (kSpaceColumns / 4) * 4;
  uint4 bc[kOfThread] = {};
  uint2 x{};
  T dt{};
  // Asks for what a chunk has.
  const auto read = [&](int first) {
    const int64_t stride = width + 2 * groups * N;
    const T* xbc = static_cast<const T*>(params.xbc);
    const int group = head / (node.num_heads / node.num_groups);
    const int n = row.count - first;
    const auto token = [&](int t) { return first_token + row.begin + first + t; };
#pragma unroll
    for (int i = 0; i < kOfThread; ++i) {
      const int at = i * kSpaceThreads + threadIdx.x, t = at / kEights, eight = at % kEights;
      const int64_t operand = (eight / (N / 8) * groups + group) * N + eight % (N / 8) * 8;
      if (t < n) bc[i] = *reinterpret_cast<const uint4*>(xbc + token(t) * stride + width + operand);
    }
    if (of_token < min(n, kChunk)) {
      x = *reinterpret_cast<const uint2*>(xbc + token(of_token) * stride + head * p + first_column + four);
      dt = static_cast<const T*>(params.dt)[token(of_token) * params.dt_size + head];
    }
  };
  const auto prepare = [&](Chunk& chunk, int n) {
#pragma unroll
    for (int i = 0; i < kOfThread; ++i) {
      const int at = i * kSpaceThreads + threadIdx.x, t = at / kEights;
      if (t >= n) break;
      float4* to = reinterpret_cast<float4*>(chunk.bc[t] + at % kEights * 8);
      const uint4 v = bc[i];
      to[0] = make_float4(Half<T>::low(v.x), Half<T>::high(v.x), Half<T>::low(v.y), Half<T>::high(v.y));
      to[1] = make_float4(Half<T>::low(v.z), Half<T>::high(v.z), Half<T>::low(v.w), Half<T>::high(v.w));
    }
    if (of_token >= n) return;
    const float step = softplus(static_cast<float>(dt) + dt_bias);
    const float4 v = make_float4(Half<T>::low(x.x), Half<T>::high(x.x), Half<T>::low(x.y), Half<T>::high(x.y));
    *reinterpret_cast<float4*>(chunk.x[of_token] + four) = v;
    *reinterpret_cast<float4*>(chunk.u[of_token] + four) = make_float4(v.x * step, v.y * step, v.z * step, v.w * step);
    if (four == 0) chunk.decay[of_token] = expf(-rate * step);
  };
  const auto store = [&](int back, bool zero) {
#pragma unroll
    for (int k = 0; k < N / 64; ++k)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        *reinterpret_cast<float4*>(params.present_state + state_at - back * params.slot + (64 * k + i) * p) =
            zero ? float4{} : *reinterpret_cast<const float4*>(state[k][i]);
  };
  read(0);
  row = read_token_row(params.rows, batch_row, params.tokens);
  if (!row.valid) return;
  if (params.tail) row = tail_of(row, params.tail);
  if (!row.from_past && row.count)
#pragma unroll
    for (int k = 0; k < N / 64; ++k)
#pragma unroll
      for (int i = 0; i < 16; ++i) state[k][i / 4][i % 4] = 0;

  if (row.begin) read(0);
  for (int first = 0; first < row.count; first += kChunk) {
    Chunk& chunk = chunks[first / kChunk % 2];
    const int n = min(kChunk, row.count - first);
    prepare(chunk, n);
    __syncthreads();  // the chunk is there for all warps, and all have taken the one before the last
    if (first + kChunk < row.count) read(first + kChunk);
    float* outputs = params.outputs + (first_token + row.begin + first) * width + head * p + first_column;
    for (int t = 0; t < n;) {
      // The tokens that end in a slot of a window one by one.
      if (t + 4 <= min(n, row.count - first - node.state_window + 1)) {
        take_tokens<4>(chunk, t, state, column, d, outputs + t * width, width);
        t += 4;
      } else {
        take_tokens<1>(chunk, t, state, column, d, outputs + t * width, width);
        t += 1;
      }
      if (const int back = row.count - first - t; back > 0 && back < node.state_window) store(back, false);
    }
  }
  store(0, false);
  if (params.apart)
    for (int back = max(row.count, 1); back < node.state_window; ++back) store(back, true);
}

// Gates and norms what state_space left in outputs. Blocks: tokens, norms of a token, rows; a thread has up to four
// features of each four times the block's threads.
template <typename T>
__global__ void __launch_bounds__(kSpaceGateThreads) space_gate(const __grid_constant__ SpaceParams params) {
  constexpr int kFours = kSpaceGateEach / 4;
  __shared__ float sums[kSpaceGateThreads / 32];
  launch_dependents();
  const qm_space& node = params.space;
  const int size = node.norm_size, warps = blockDim.x / 32;
  const int64_t token = static_cast<int64_t>(blockIdx.z) * params.tokens + blockIdx.x,
                first = blockIdx.y * int64_t{size};
  const auto feature = [&](int i) { return static_cast<int>(i * blockDim.x + threadIdx.x) * 4; };
  alignas(16) float weights[kFours][4], o[kFours][4];
#pragma unroll
  for (int i = 0; i < kFours; ++i)
#pragma unroll
    for (int j = 0; j < 4; ++j) weights[i][j] = feature(i) < size ? params.norm[first + feature(i) + j] : 0.f;
  wait_for_previous();
  const int64_t at = token * node.num_heads * node.head_size + first;
  alignas(8) T z[kFours][4];
#pragma unroll
  for (int i = 0; i < kFours; ++i)
    if (feature(i) < size) {
      *reinterpret_cast<float4*>(o[i]) = *reinterpret_cast<const float4*>(params.outputs + at + feature(i));
      read_four(z[i], static_cast<const T*>(params.z) + token * params.z_size + first + feature(i));
    }
  const TokenRow row = read_token_row(params.rows, blockIdx.z, params.tokens);
  const bool counts = row.has(blockIdx.x);
  float by = 0;
  if (counts) {
    float squares = 0;
#pragma unroll
    for (int i = 0; i < kFours; ++i)
      if (feature(i) < size)
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          o[i][j] *= silu(static_cast<float>(z[i][j]));
          squares = fmaf(o[i][j], o[i][j], squares);
        }
    squares = warp_sum(squares);
    if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = squares;
    __syncthreads();
    float sum = 0;
    for (int warp = 0; warp < warps; ++warp) sum += sums[warp];
    by = rsqrtf(sum / size + node.norm_epsilon);
  }
  const float none = row.valid ? 0.f : not_a_number();
  T* y = static_cast<T*>(params.y) + at;
#pragma unroll
  for (int i = 0; i < kFours; ++i) {
    if (feature(i) >= size) continue;
    float out[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) out[j] = counts ? o[i][j] * by * weights[i][j] : none;
    *reinterpret_cast<uint2*>(y + feature(i)) =
        make_uint2(Half<T>::pack(out[0], out[1]), Half<T>::pack(out[2], out[3]));
  }
}

struct Launcher;
// All tokens of a call by the chunked kernels (state_space_chunked.cuh), without gate and norm. workspace: the plan's;
// params.outputs is its beginning.
void launch_space_chunks(const SpaceParams& params, int batch, int32_t type, bool wgmma, Launcher& launcher);

}  // namespace quantmoe
