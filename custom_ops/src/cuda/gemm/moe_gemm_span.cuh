// The grouped GEMM of moe_gemm_mma.cuh for codes that take many instructions, e2m1, and at most 8 tokens a tile. What
// is not a code or a product is done once a stage for all its panels, and warps meet once.
//
// A block takes a contiguous range of (tile, MT panels). Each of its warps has an equal, contiguous part of all their
// units of K. A warp that has all units of some panels stores their sums from registers. Of other panels, the warp with
// the last unit adds up the parts when all warps are done. It adds in the order of K, so every call gives equal bytes.
//
//   (tile, MT panels)  |      first      |      second     |      third      |
//   units of K         |0             U-1|0             U-1|0             U-1|
//   warps              [ 0  ][ 1  ][ 2  ][  3 ][ 4  ][ 5  ][ 6  ][ 7  ]      an equal part each, wherever panels change
#pragma once
#include "cuda/gemm/moe_gemm_mma.cuh"

namespace quantmoe {

// A warp's ring of stages: a unit of the codes and scales of MT panels and of 8 tokens.
template <typename T, typename F, int MT>
struct SpanStream {
  using Sizes = SpanSizes<MT, F::scale_bytes(F::kGroups)>;
  static constexpr int kWords = F::scale_bytes(F::kGroups) / 4;
  // Scales of a lane's rows as f32, made once, where they multiply sums.
  static constexpr bool kWidens = !F::template kScaledWeights<T>;
  static_assert(MT == 4 && (!kWidens || kWords == 1));  // a lane copies the scales of a panel's two rows

  int lane, g, t;
  uint32_t ring, wide;  // this lane's first bytes of codes; the widened scales
  uint64_t once;
  const uint8_t *codes, *scales;
  const T* tokens;        // null: zero
  int columns_left;       // from the lane's first to the end of the row
  uint32_t panel_at[MT];  // from the first panel's codes to panel m's

  static constexpr int kStages = kSpanStages, kRingBytes = Sizes::kRingBytes;

  explicit __device__ SpanStream(uint8_t* rings) {
    const uint32_t shared = shared_address(rings) + threadIdx.x / 32 * kRingBytes;
    lane = threadIdx.x % 32;
    g = lane / 4;
    t = lane % 4;
    ring = shared + 16 * lane;
    wide = shared + Sizes::kWideAt;
    once = evict_first_policy();
    // Opaque from here on, or the compiler derives them from threadIdx again in every turn.
    asm volatile("" : "+r"(ring), "+r"(wide), "+r"(lane), "+r"(g), "+r"(t));
  }
  // Points at unit k of panels [panel, panel + MT) of an expert; panels past the end repeat the last.
  __device__ void seek_weights(const Weights& weights, const uint8_t* expert, int panel, int k) {
    const int left = weights.panels - 1 - panel;
#pragma unroll
    for (int m = 1; m < MT; ++m) panel_at[m] = min(m, left) * weights.units * 512;
    codes = expert + (static_cast<int64_t>(panel) * weights.units + k) * 512 + 16 * lane;
    scales = expert + weights.scales_at +
             ((static_cast<int64_t>(panel) + min(lane / 8, left)) * weights.blocks + k) * 32 * kWords +
             lane % 8 * 4 * kWords;
  }
  __device__ void seek_tokens(const T* row, int x_columns, int k) {
    tokens = row == nullptr ? nullptr : row + k * kUnit + t * 8;
    columns_left = row == nullptr ? 0 : x_columns - k * kUnit - t * 8;
  }
  __device__ void copy(int stage) {
    const uint32_t to = ring + stage * Sizes::kStageBytes;
#pragma unroll
    for (int m = 0; m < MT; ++m) copy_async16_once(to + m * 512, m ? codes + panel_at[m] : codes, once);
    copy_async_small<4 * kWords>(to + Sizes::kScalesAt - (16 - 4 * kWords) * lane, scales);
#pragma unroll
    for (int i = 0; i < 2; ++i) copy_async16(to + Sizes::kTokensAt + i * 512, tokens + i * 32, columns_left > i * 32);
    codes += 512;
    scales += 32 * kWords;
    tokens += kUnit;
    columns_left -= kUnit;
  }

  // A lane's part of a stage that the warp's lanes all have waited for; scales: of one panel's rows.
  struct Fragments {
    uint4 q[MT], x[2];
    uint32_t scales;
  };
  __device__ void load(int stage, Fragments& f) const {
    const uint32_t base = ring + stage * Sizes::kStageBytes;
    if constexpr (kWidens) f.scales = load4(base + Sizes::kScalesAt - 12 * lane);
#pragma unroll
    for (int i = 0; i < 2; ++i) f.x[i] = load16(base + Sizes::kTokensAt + i * 512);
#pragma unroll
    for (int m = 0; m < MT; ++m) f.q[m] = load16(base + m * 512);
  }
  // acc += scales * (codes x tokens) of the stage; to be multiplied by kSumFactor.
  __device__ void consume(int stage, const Fragments& f, float (&acc)[MT][4]) const {
    [[maybe_unused]] const uint32_t scales_at = ring + stage * Sizes::kStageBytes - 16 * lane + Sizes::kScalesAt;
    const uint4(&q)[MT] = f.q, (&x)[2] = f.x;
    if constexpr (kWidens) {
      uint32_t s[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) s[i] = __float_as_uint(e8m0_normal(f.scales, i));
      store16(wide + 16 * lane, make_uint4(s[0], s[1], s[2], s[3]));
      __syncwarp();
    }
#pragma unroll
    for (int m = 0; m < MT; ++m) {
      uint32_t scale[4];
      if constexpr (kWidens) {
        const uint4 s = load16(wide + (8 * m + g) * 16);
        scale[0] = s.x, scale[1] = s.y, scale[2] = s.z, scale[3] = s.w;
      } else {
#pragma unroll
        for (int i = 0; i < kWords; ++i) scale[i] = load4(scales_at + (8 * m + g) * 4 * kWords + 4 * i);
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float part[4] = {};
        float(&to)[4] = kWidens ? part : acc[m];
        uint2 pair{};
        if constexpr (!kWidens) pair = F::template pair_of<T>(scale, 0, 0, half, t);
#pragma unroll
        for (int step = 0; step < 2; ++step) {
          uint32_t a[4];
          const uint32_t code = half ? (step ? q[m].w : q[m].z) : (step ? q[m].y : q[m].x);
          F::template dequant<T, false, false>(code, 0, pair.x, pair.y, a);
          Half<T>::mma(to, a, step ? x[half].z : x[half].x, step ? x[half].w : x[half].y);
        }
        if constexpr (kWidens) {
#pragma unroll
          for (int i = 0; i < 4; ++i) acc[m][i] = fmaf(__uint_as_float(scale[2 * half + i / 2]), part[i], acc[m][i]);
        }
      }
    }
  }
};

// One long function: a turn's copies, products and stores change the same sums and places, which are
// registers.
//
//   begin       as moe_gemm_mma
//   ranges      each warp has an equal part of the block's units of K, so it may begin and end inside an item
//   each turn   loads a unit, copies a later one, multiplies
//   item's end  stored; kept apart (head) if the warp began inside the item
//   end         the warp that ends an item begun by others adds up their sums and stores
template <typename T, typename F, int MT, bool down, bool decode>
__global__ void __launch_bounds__(kThreads, 2) moe_gemm_span(const __grid_constant__ GemmParams params) {
  using S = SpanStream<T, F, MT>;
  extern __shared__ __align__(128) uint8_t shared[];
  __shared__ std::conditional_t<decode, DecodeRouting, int> routing_storage;
  [[maybe_unused]] auto* routing = &routing_storage;
  const int warp = threadIdx.x / 32;
  S stream(shared);
  const int lane = stream.lane, g = stream.g, t = stream.t;
  int n_tiles;
  if constexpr (decode) {
    wait_for_previous();
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

  // What the block has, and the warp: turns, a unit of K each.
  const int units = params.weights.units, groups = (params.weights.panels + MT - 1) / MT;
  using Wide = std::conditional_t<decode, uint32_t, uint64_t>;  // a division of 64 bits takes as long as a load
  // Blocks that share a multiprocessor, usually the first half's and the second's, have neighbouring ranges, so that
  // multiprocessors differ by one item.
  const uint32_t half = gridDim.x / 2, place = gridDim.x % 2 ? blockIdx.x : blockIdx.x % half * 2 + blockIdx.x / half;
  const int items = n_tiles * groups, first = static_cast<int>(Wide{place} * items / gridDim.x);
  const int turns = (static_cast<int>((Wide{place} + 1) * items / gridDim.x) - first) * units;
  auto begin_of = [&](int warp) { return warp * turns / kWarps; };
  const int begin = begin_of(warp), end = begin_of(warp + 1);
  const int first_item = begin / units, first_k = begin - first_item * units;

  struct ItemPlace {
    int tile, group, k;
  };
  auto place_of = [&](int item, int k) {
    const int tile = (first + item) / groups;
    return ItemPlace{tile, first + item - tile * groups, k};
  };
  auto expert_of = [&](int tile) {
    if constexpr (decode) return routing->expert[tile];
    return tile_at(params, tile).expert;
  };

  // The copying side runs kStages - 1 turns ahead.
  ItemPlace copied = place_of(first_item, first_k);
  int left = end - begin;
  bool seek = true;
  const uint8_t* copy_expert = nullptr;  // where a tile begins
  const T* row = nullptr;
  auto copy = [&](int stage) {
    if (left > 0) {
      if (seek) {
        if (!copy_expert) {
          copy_expert = params.weights.rows[expert_of(copied.tile)];
          int pair = -1;
          if constexpr (decode) {
            pair = routing->pair_of(copied.tile, g);
          } else if (const Tile found = tile_at(params, copied.tile); g < found.count) {
            pair = pair_at(params, found.first + g).pair;
          }
          row = pair < 0 ? nullptr
                         : static_cast<const T*>(params.x) +
                               static_cast<int64_t>(pair / params.x_divisor) * params.x_columns;
        }
        const int panel = copied.group * MT;
        stream.seek_weights(params.weights, copy_expert, panel, copied.k);
        stream.seek_tokens(row, params.x_columns, copied.k);
        // Panels end with a read of their biases, which nothing else overlaps.
        if (params.weights.bias_at && lane == 0)
          prefetch(copy_expert + params.weights.bias_at + panel * 64, min(MT, params.weights.panels - panel) * 64);
        seek = false;
      }
      stream.copy(stage);
      --left;
      if (++copied.k == units) {
        copied.k = 0, seek = true;
        if (++copied.group == groups) copied.group = 0, ++copied.tile, copy_expert = nullptr;
      }
    }
    copy_async_commit();
  };

  float acc[MT][4] = {};
  auto store = [&](const ItemPlace& where) {
    int pair[2];
    float weight[2] = {1.f, 1.f};
    int expert;
    if constexpr (decode) {
      expert = routing->expert[where.tile];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        pair[i] = routing->pair_of(where.tile, 2 * t + i);
        if (pair[i] >= 0) weight[i] = routing->weight[pair[i]];
      }
    } else {
      const Tile now = tile_at(params, where.tile);
      expert = now.expert;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        pair[i] = -1;
        if (2 * t + i >= now.count) continue;
        const SortedPair found = pair_at(params, now.first + 2 * t + i);
        pair[i] = found.pair;
        if (params.weight_here) weight[i] = found.weight;
      }
    }
    const uint8_t* expert_row = params.weights.rows[expert];
    const float2 factor = sum_factors<T, F>(params.weights, expert_row);
#pragma unroll
    for (int m = 0; m < MT; ++m)
      if (where.group * MT + m < params.weights.panels)
        store_unit<T, down>(
            params, expert_row, where.group * MT + m, g,
            make_float4(acc[m][0] * factor.x, acc[m][1] * factor.x, acc[m][2] * factor.y, acc[m][3] * factor.y), pair,
            weight);
  };
  // Sums of panels that a warp began without their first unit; and, over its ring, of those it ended without their
  // last.
  auto sums_of = [&](int warp, bool head) {
    return reinterpret_cast<float4*>(shared +
                                     (head ? kWarps * S::kRingBytes + warp * MT * 512 : warp * S::kRingBytes)) +
           lane;
  };
  auto keep = [&](float4* to) {
#pragma unroll
    for (int m = 0; m < MT; ++m) to[32 * m] = make_float4(acc[m][0], acc[m][1], acc[m][2], acc[m][3]);
  };
  auto add = [&](const float4* from) {
#pragma unroll
    for (int m = 0; m < MT; ++m) {
      const float4 v = from[32 * m];
      acc[m][0] += v.x, acc[m][1] += v.y, acc[m][2] += v.z, acc[m][3] += v.w;
    }
  };
  auto clear = [&] {
#pragma unroll
    for (int m = 0; m < MT; ++m) acc[m][0] = acc[m][1] = acc[m][2] = acc[m][3] = 0.f;
  };

  ItemPlace where = copied;
#pragma unroll
  for (int s = 0; s < S::kStages - 1; ++s) copy(s);
  bool head = first_k > 0;
  int stage = 0;
#pragma unroll 1
  for (int turn = begin; turn < end; ++turn) {
    copy_async_wait<S::kStages - 2>();
    __syncwarp();  // scales come from other lanes, and the stage read last is copied to
    typename S::Fragments fragments;
    stream.load(stage, fragments);
    copy(stage == 0 ? S::kStages - 1 : stage - 1);
    stream.consume(stage, fragments, acc);
    if (++stage == S::kStages) stage = 0;
    if (++where.k < units) continue;
    if (head) {
      keep(sums_of(warp, true));
    } else {
      store(where);
    }
    clear();
    head = false;
    where.k = 0;
    if (++where.group == groups) where.group = 0, ++where.tile;
  }
  copy_async_wait_all();
  __syncwarp();
  keep(sums_of(warp, false));
  __syncthreads();
  if (first_k == 0 || end - begin < units - first_k) return;
  clear();
  int from = warp - 1;
  while (begin_of(from) > first_item * units) --from;
  for (; from < warp; ++from)
    if (begin_of(from) < begin_of(from + 1)) add(sums_of(from, false));
  add(sums_of(warp, true));
  store(place_of(first_item, 0));
}

}  // namespace quantmoe
