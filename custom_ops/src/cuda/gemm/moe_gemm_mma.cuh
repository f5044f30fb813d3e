// One grouped GEMM of the layer on mma.sync (sm_80 and later): weights are the M operand, tokens N.
//
// Work is a list of units, a unit is (tile, panels): one expert's <= 8 NT tokens times warps_n * MT panels of 16 rows.
// A block takes a contiguous range of units; its warps split K (warps_k) and panels (warps_n). With warps_k = 4:
//
//              K, in units of 64 columns                8 NT tokens
//          +--------+--------+--------+--------+        +---+
//     MT   | warp 0 | warp 1 | warp 2 | warp 3 |        |   |
//   panels |        |        |        |        |   x    |   | K   =  warps_n MT panels x 8 NT sums,
//          +--------+--------+--------+--------+        |   |        added up over warps_k in shared memory
//     MT   | warp 4 | warp 5 | warp 6 | warp 7 |        |   |
//   panels +--------+--------+--------+--------+        +---+
//
// A warp's ring has kStages stages, each of kUnits units of its panels' codes, scales and zero points, and of the
// tokens.
#pragma once
#include <type_traits>

#include "cuda/common/activation.cuh"
#include "cuda/gemm/decode_tiles.cuh"
#include "cuda/gemm/instances.h"
#include "cuda/gemm/weight_stream.cuh"

namespace quantmoe {

// What sums of rows g and of rows g + 8 are multiplied by.
template <typename T, typename F>
__device__ inline float2 sum_factors(const Weights& weights, const uint8_t* expert) {
  const float factor = kSumFactor<T, F> * input_scale<F>(weights, expert);
  if constexpr (F::kGlobalBytes > 0) {
    const float2 global = *reinterpret_cast<const float2*>(expert + weights.globals_at);
    return make_float2(factor * global.x, factor * global.y);
  }
  return make_float2(factor, factor);
}

// Stores what a block's warps have for one accumulator (rows g and g + 8, token columns 2t and 2t + 1).
template <typename T, bool down>
__device__ inline void store_unit(const GemmParams& params, const uint8_t* expert, int panel, int g, float4 c,
                                  const int (&pair)[2], const float (&weight)[2]) {
  float bias[2] = {0.f, 0.f};
  if (params.weights.bias_at) {
    const float* b = reinterpret_cast<const float*>(expert + params.weights.bias_at) + panel * 16 + g;
    bias[0] = b[0];
    bias[1] = b[8];
  }
  const float low[2] = {c.x, c.y}, high[2] = {c.z, c.w};
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    if (pair[i] < 0) continue;
    if constexpr (down) {
      const int64_t row = static_cast<int64_t>(pair[i]) * params.out_columns;
      const float w = params.weight_here ? weight[i] : 1.f;
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int n = panel * 16 + g + 8 * r;
        const float y = w * ((r ? high[i] : low[i]) + bias[r]);
        if (n >= params.out_columns) continue;
        if (params.out_float) {
          static_cast<float*>(params.out)[row + n] = y;
        } else {
          static_cast<T*>(params.out)[row + n] = Half<T>::from(y);
        }
      }
    } else {
      T* out = static_cast<T*>(params.out) + static_cast<int64_t>(pair[i]) * params.out_columns;
      const float w = params.weight_here ? weight[i] : 1.f;
      const float a = fmaf(w, low[i], bias[0]), b = fmaf(w, high[i], bias[1]);
      if (params.activation.gated) {
        out[panel * 8 + g] = Half<T>::from(activate(params.activation, a, b));
      } else {
        out[panel * 16 + g] = Half<T>::from(activate(params.activation, a, a));
        out[panel * 16 + g + 8] = Half<T>::from(activate(params.activation, b, b));
      }
    }
  }
}

// Asks for codes that the call's ids are sure to need, a part for each block. DRAM would idle while moe_route makes its
// lists and while the last blocks of gate_up end.
template <uint32_t kBytes>
__device__ inline void prefetch_codes(const GemmParams& params) {
  if (threadIdx.x != 0) return;
  const int64_t pairs = static_cast<int64_t>(params.routing.tokens) * params.routing.top_k;
  const int expert = local_expert(params.routing, blockIdx.x * pairs / gridDim.x);
  if (expert < 0) return;
  const uint32_t codes = params.weights.scales_at, parts = max(codes / kBytes, 1u);
  prefetch(params.weights.rows[expert] + blockIdx.x % parts * kBytes, min(codes, kBytes));
}

// kUnits: of K a stage; kSplit: warps split K (warps_k > 1), otherwise each stores its own sums and never waits.
// One long function: a turn's copies, products and stores change the same sums and places, which are registers.
//
//   begin       the ring; decode waits for ids, else codes are prefetched before the wait
//   copy        kStages - 1 stages ahead: the next (tile, panels), its tokens' rows, its codes
//   each turn   copies into one stage, multiplies the oldest
//   unit's end  kSplit: warps put sums into shared memory, threads add up warps_k of them and store. Else: a warp
//               stores its own
template <typename T, typename F, int MT, int NT, bool down, bool decode, int kUnits = 1, bool kSplit = true>
__global__ void __launch_bounds__(kThreads, register_blocks(F::kBits, MT, NT))
    moe_gemm_mma(const __grid_constant__ GemmParams params) {
  static_assert(!(down && decode), "moe_down_decode");
  static_assert(kSplit || down, "gate_up has long rows");
  using S = Stream<T, F, MT, NT, kUnits>;
  constexpr int kStages = S::kStages;
  extern __shared__ __align__(128) uint8_t shared[];
  __shared__ std::conditional_t<decode, DecodeRouting, int> routing_storage;
  [[maybe_unused]] auto* routing = &routing_storage;
  // All that does not depend on the kernel before this one.
  S stream(shared, params.weights);
  const int warp = threadIdx.x / 32, lane = stream.lane, g = stream.g;
  const int warps_k = kSplit ? params.warps_k : 1, warps_n = kWarps / warps_k, wn = warp / warps_k, wk = warp % warps_k;
  const int groups = (params.weights.panels + MT * warps_n - 1) / (MT * warps_n);
  const int k_units = (params.weights.units + kUnits - 1) / kUnits;
  const int k_begin = wk * k_units / warps_k * kUnits, k_end = (wk + 1) * k_units / warps_k * kUnits;
  int n_tiles;
  if constexpr (decode) {
    wait_for_previous();  // for x and ids
    launch_dependents();
    routing->make(params.routing);
    n_tiles = routing->tiles;
  } else {
    const bool linear = !params.tiles;  // then this is the first kernel of its call: launcher.h
    if (!linear) launch_dependents();
    prefetch_codes<down ? 1 << 16 : 1 << 17>(params);
    wait_for_previous();
    if (linear) launch_dependents();
    n_tiles = linear ? params.max_tiles : params.tiles[params.max_tiles].count;
  }
  // Sums of the warps, where they are added: after the rings, or, in 2 units of K a stage, the stage read last.
  auto sums_of = [&](int warp, int stage) {
    const int at = kUnits == 1 ? kWarps * kStages * S::kStageBytes + warp * MT * NT * 512
                               : (warp * kStages + stage) * S::kStageBytes;
    return reinterpret_cast<float4*>(shared + at);
  };
  __shared__ int last_stage[kWarps];

  using Wide = std::conditional_t<decode, uint32_t, uint64_t>;  // a division of 64 bits takes as long as a load
  const int units = n_tiles * groups, begin = static_cast<int>(Wide{blockIdx.x} * units / gridDim.x);
  int left = static_cast<int>((Wide{blockIdx.x} + 1) * units / gridDim.x) - begin;

  // The copying side runs kStages - 1 stages ahead of the multiplying side, across (tile, panels) units.
  int tile = begin / groups, group = begin - tile * groups;
  int copy_left = left, copy_tile = tile, copy_group = group, copy_n = 0;
  const uint8_t* copy_expert = nullptr;  // where a tile begins
  const T* rows[NT];
  stream.k = k_end;
  auto copy = [&](int stage) {
    if (copy_left > 0 && k_begin < k_end) {
      if (stream.k == k_end) {
        if (!copy_expert) {
          int expert;
          if constexpr (decode) {
            expert = routing->expert[copy_tile];
            const int pair = routing->pair_of(copy_tile, g);
            rows[0] =
                pair < 0 ? nullptr : static_cast<const T*>(params.x) + (pair / params.x_divisor) * params.x_columns;
            copy_n = 1;
          } else {
            const Tile found = tile_at(params, copy_tile);
            expert = found.expert;
            copy_n = (found.count + 7) / 8;
#pragma unroll
            for (int n = 0; n < NT; ++n) {
              const int c = 8 * n + g;
              rows[n] = nullptr;
              if (c < found.count) {
                const int pair = pair_at(params, found.first + c).pair;
                rows[n] =
                    static_cast<const T*>(params.x) + static_cast<int64_t>(pair / params.x_divisor) * params.x_columns;
              }
            }
          }
          copy_expert = params.weights.rows[expert];
        }
        const int panel = (copy_group * warps_n + wn) * MT;
        stream.seek_weights(params.weights, copy_expert, panel, k_begin);
        // A unit of work ends with a read of its biases, which nothing else overlaps.
        if (params.weights.bias_at && wk == 0 && lane == 0 && panel < params.weights.panels)
          prefetch(copy_expert + params.weights.bias_at + panel * 64, min(MT, params.weights.panels - panel) * 64);
#pragma unroll
        for (int n = 0; n < NT; ++n) stream.seek_tokens(n, rows[n], params.x_columns);
      }
      stream.copy_weights(stage, params.weights);
      stream.copy_tokens(stage, copy_n);
      if (stream.k == k_end) {
        --copy_left;
        if (++copy_group == groups) copy_group = 0, ++copy_tile, copy_expert = nullptr;
      }
    }
    copy_async_commit();
  };

  float acc[MT][NT][4] = {};
  Tile now{};
  int n_active = 1;
  // One loop for filling the ring and for the steady state: copies into a stage, multiplies the one after it, the
  // oldest.
  int k = k_begin;
#pragma unroll 1
  for (int turn = 0; left > 0; ++turn) {
    if (turn >= kStages - 1) {
      if (k == k_begin) {
        if constexpr (!decode) now = tile_at(params, tile);
        n_active = (now.count + 7) / 8;
      }
      copy_async_wait<kStages - 2>();
    }
    copy(turn % kStages);  // stages counted instead are slower: fp8, 8 tokens, 3 %
    if (turn < kStages - 1) continue;
    const int stage = (turn + 1) % kStages;
    if (k < k_end) {
      if (NT == 1 || n_active == 1) {
        stream.template consume<1, false, decode && kUnits == 1>(stage, acc, params.weights);
      } else if (NT == 2 || n_active == 2) {
        stream.template consume<(NT < 2 ? NT : 2)>(stage, acc, params.weights);
      } else {
        stream.template consume<NT>(stage, acc, params.weights);
      }
      if ((k += kUnits) < k_end) continue;
    }
    k = k_begin;

    const int this_tile = tile, this_group = group;
    --left;
    if (++group == groups) group = 0, ++tile;
    int expert = now.expert;
    if constexpr (decode) expert = routing->expert[this_tile];
    const uint8_t* expert_row = params.weights.rows[expert];
    // Of token columns `column` and the next; -1: none.
    auto find = [&](int column, int(&pair)[2], float(&weight)[2]) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        weight[i] = 1.f;
        if constexpr (decode) {
          pair[i] = routing->pair_of(this_tile, column + i);
          if (pair[i] >= 0) weight[i] = routing->weight[pair[i]];
        } else {
          pair[i] = -1;
          if (column + i < now.count) {
            const SortedPair found = pair_at(params, now.first + column + i);
            pair[i] = found.pair;
            if (params.weight_here) weight[i] = found.weight;
          }
        }
      }
    };
    auto store = [&](int panel, int g, float4 sum, const int(&pair)[2], const float(&weight)[2]) {
      const float2 factor = sum_factors<T, F>(params.weights, expert_row);
      sum.x *= factor.x, sum.y *= factor.x, sum.z *= factor.y, sum.w *= factor.y;
      store_unit<T, down>(params, expert_row, panel, g, sum, pair, weight);
    };
    if constexpr (!kSplit) {
      const int first = (this_group * warps_n + wn) * MT, row = first * 16 + g, left = params.out_columns - row;
      const float2 factor = sum_factors<T, F>(params.weights, expert_row);
      float bias[MT][2] = {};
      if (params.weights.bias_at) {
        const float* from = reinterpret_cast<const float*>(expert_row + params.weights.bias_at) + row;
#pragma unroll
        for (int m = 0; m < MT; ++m)
          if (first + m < params.weights.panels) bias[m][0] = from[16 * m], bias[m][1] = from[16 * m + 8];
      }
#pragma unroll
      for (int n = 0; n < NT; ++n) {
        int pair[2];
        float weight[2];
        find(8 * n + 2 * stream.t, pair, weight);
        auto put = [&](auto* out, auto convert) {
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            if (pair[i] < 0) continue;
            auto* to = out + static_cast<int64_t>(pair[i]) * params.out_columns + row;
#pragma unroll
            for (int m = 0; m < MT; ++m)
#pragma unroll
              for (int r = 0; r < 2; ++r)
                if (16 * m + 8 * r < left)
                  to[16 * m + 8 * r] =
                      convert(weight[i] * fmaf(r ? factor.y : factor.x, acc[m][n][2 * r + i], bias[m][r]));
          }
        };
        if (params.out_float) {
          put(static_cast<float*>(params.out), [](float y) { return y; });
        } else {
          put(static_cast<T*>(params.out), [](float y) { return Half<T>::from(y); });
        }
        // Also of tiles past the last, which are multiplied with what is there.
#pragma unroll
        for (int m = 0; m < MT; ++m) acc[m][n][0] = acc[m][n][1] = acc[m][n][2] = acc[m][n][3] = 0.f;
      }
      continue;
    }
    if (kUnits == 1) __syncthreads();  // the last unit's sums have been read
    float4* mine = sums_of(warp, stage);
    if (kUnits > 1 && lane == 0) last_stage[warp] = stage;
    __syncwarp();
#pragma unroll
    for (int m = 0; m < MT; ++m)
#pragma unroll
      for (int n = 0; n < NT; ++n) {
        mine[(m * NT + n) * 32 + lane] = make_float4(acc[m][n][0], acc[m][n][1], acc[m][n][2], acc[m][n][3]);
#pragma unroll
        for (int i = 0; i < 4; ++i) acc[m][n][i] = 0.f;
      }
    __syncthreads();
#pragma unroll 1
    for (int task = threadIdx.x; task < warps_n * MT * NT * 32; task += kThreads) {
      const int at = task / 32, n = at % NT, m = at / NT % MT, part = at / (NT * MT);
      const int panel = (this_group * warps_n + part) * MT + m;
      if ((NT > 1 && n >= n_active) || panel >= params.weights.panels) continue;
      int pair[2];
      float weight[2];
      find(8 * n + 2 * (task % 4), pair, weight);
      float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll 2
      for (int w = 0; w < warps_k; ++w) {
        const int from = part * warps_k + w;
        const float4 v = sums_of(from, kUnits == 1 ? 0 : last_stage[from])[(m * NT + n) * 32 + task % 32];
        sum.x += v.x, sum.y += v.y, sum.z += v.z, sum.w += v.w;
      }
      store(panel, task % 32 / 4, sum, pair, weight);
    }
    if (kUnits > 1) __syncthreads();  // nothing is copied over sums that are to be read
  }
}

// GEMM2 of a small batch: a cluster of blocks owns MT panels of the output for all tokens. The (tile, unit of K) list
// is cut into equal parts, one a warp. A warp adds weight * (product + bias) of each tile to its registers. At the end
// the warps' sums are added in a fixed order. Without atomics and a second pass, every call gives equal bytes. One long
// function: the list's places, the sums and what is copied next are registers of a turn.
template <typename T, typename F, int MT, int kUnits = 1, int kStages_ = stages_of(kUnits)>
__global__ void __launch_bounds__(kThreads, register_blocks(F::kBits, MT, 1))
    moe_down_decode(const __grid_constant__ GemmParams params) {
  using S = Stream<T, F, MT, 1, kUnits, kStages_>;
  constexpr int kStages = S::kStages;
  extern __shared__ __align__(128) uint8_t shared[];
  __shared__ DecodeRouting routing;
  routing.make(params.routing);
  const int columns = params.routing.tokens, cluster = params.cluster;
  S stream(shared, params.weights);
  constexpr bool kOver = kUnits > 1 || S::Size::kBits == 16;
  auto sums_of = [&](int warp) {  // after the rings, or, in 2 units of K a stage and of floats, over them
    const int at = kOver ? warp * kStages * S::kStageBytes : kWarps * kStages * S::kStageBytes + warp * MT * 512;
    return reinterpret_cast<float4*>(shared + at);
  };

  const int warp = threadIdx.x / 32, lane = stream.lane, g = stream.g, t = stream.t;
  const int panel = blockIdx.x / cluster * MT, rank = blockIdx.x % cluster;
  const int k_units = (params.weights.units + kUnits - 1) / kUnits, total = routing.tiles * k_units;
  const int parts = cluster * kWarps;
  const int part = rank * kWarps + warp;

  auto expert_row = [&](int tile) { return params.weights.rows[routing.expert[tile]]; };
  struct ListPlace {  // in the list
    int at, tile, k;
    __device__ bool advance(int k_units) {  // true when the tile changed
      ++at;
      if (++k < k_units) return false;
      k = 0, ++tile;
      return true;
    }
  };
  const int begin = part * total / parts, end = (part + 1) * total / parts;
  const ListPlace start{begin, begin / k_units, begin % k_units};
  ListPlace ahead = start;  // what is copied next
  auto seek_weights = [&](const ListPlace& at) {
    stream.seek_weights(params.weights, expert_row(at.tile), panel, at.k * kUnits);
  };
  auto seek_tokens = [&](const ListPlace& at) {
    stream.k = at.k * kUnits;
    const int pair = routing.pair_of(at.tile, g);
    stream.seek_tokens(0, pair < 0 ? nullptr : static_cast<const T*>(params.x) + pair * params.x_columns,
                       params.x_columns);
  };
  // Weights do not depend on the kernel before this one: fill the ring, then wait for it, then ask for its output.
  bool seek = true;
#pragma unroll 1
  for (int s = 0; s < kStages - 1 && ahead.at < end; ++s) {
    if (seek) seek_weights(ahead);
    stream.k = ahead.k * kUnits;
    stream.copy_weights(s, params.weights);
    seek = ahead.advance(k_units);
  }
  wait_for_previous();
  launch_dependents();
  ahead = start;
  bool seek_first = true;
#pragma unroll 1
  for (int s = 0; s < kStages - 1; ++s) {
    if (ahead.at < end) {
      if (seek_first) seek_tokens(ahead);
      stream.copy_tokens(s, 1);
      seek_first = ahead.advance(k_units);
    }
    copy_async_commit();
  }

  float acc[MT][1][4] = {}, weight[2] = {}, factor[2] = {};  // factor: weight, times what sums are multiplied by
  bool enter = true;
  ListPlace place = start;
#pragma unroll 1
  for (int turn = 0; place.at < end; ++turn) {
    if (enter) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {  // a token that has not this expert is a column of zeros
        const int pair = routing.pair_of(place.tile, 2 * t + i);
        weight[i] = pair < 0 ? 0.f : 1.f;
        if (pair >= 0 && params.weight_here) weight[i] = routing.weight[pair];
        factor[i] = weight[i] * sum_factors<T, F>(params.weights, expert_row(place.tile)).x;
      }
      if (params.weights.bias_at && place.k == 0) {  // whoever starts a tile adds its bias
        const float* bias = reinterpret_cast<const float*>(expert_row(place.tile) + params.weights.bias_at) + g;
#pragma unroll
        for (int m = 0; m < MT; ++m) {
          const int row = min(panel + m, params.weights.panels - 1) * 16;
#pragma unroll
          for (int i = 0; i < 4; ++i) acc[m][0][i] = fmaf(weight[i % 2], bias[row + (i < 2 ? 0 : 8)], acc[m][0][i]);
        }
      }
    }
    copy_async_wait<kStages - 2>();
    if (ahead.at < end) {
      if (seek) {
        seek_weights(ahead);
        seek_tokens(ahead);
      }
      stream.copy_weights((turn + kStages - 1) % kStages, params.weights);
      stream.copy_tokens((turn + kStages - 1) % kStages, 1);
      seek = ahead.advance(k_units);
    }
    copy_async_commit();
    stream.template consume<1, true, kUnits == 1>(turn % kStages, acc, params.weights, factor);
    enter = place.advance(k_units);
  }
  __syncwarp();
#pragma unroll
  for (int m = 0; m < MT; ++m)
    sums_of(warp)[m * 32 + lane] = make_float4(acc[m][0][0], acc[m][0][1], acc[m][0][2], acc[m][0][3]);
  __syncthreads();
  float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
  if (threadIdx.x < MT * 32) {
    for (int w = 0; w < kWarps; ++w) {
      const float4 v = sums_of(w)[threadIdx.x];
      sum.x += v.x, sum.y += v.y, sum.z += v.z, sum.w += v.w;
    }
    sums_of(0)[threadIdx.x] = sum;  // each thread overwrites only what it alone has read
  }
#if __CUDA_ARCH__ >= 900
  if (cluster > 1) {
    cluster_barrier();
    if (rank == 0 && threadIdx.x < MT * 32) {
      for (int r = 1; r < cluster; ++r) {
        const float4 v = load_remote16(shared_address(sums_of(0) + threadIdx.x), r);
        sum.x += v.x, sum.y += v.y, sum.z += v.z, sum.w += v.w;
      }
    }
    cluster_barrier();
  }
#endif
  if (rank != 0 || threadIdx.x >= MT * 32) return;
  const int row = (panel + warp) * 16 + g;  // MT <= 8: warp m holds panel m
  const float low[2] = {sum.x, sum.y}, high[2] = {sum.z, sum.w};
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int token = 2 * t + i;
    if (token >= columns) continue;
    T* out = static_cast<T*>(params.out) + static_cast<int64_t>(token) * params.out_columns;
    if (row < params.out_columns) out[row] = Half<T>::from(low[i]);
    if (row + 8 < params.out_columns) out[row + 8] = Half<T>::from(high[i]);
  }
}

}  // namespace quantmoe
