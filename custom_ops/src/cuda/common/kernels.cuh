// What the kernels and the launcher share.
#pragma once
#include <cuda.h>
#include <cuda_runtime.h>

#include "cuda/common/layout.h"
#include "quantmoe/quant_moe_cuda.h"

namespace quantmoe {

constexpr int kUnit = 64;  // columns of a unit, FORMAT.md 3.2

// The packed rows of all experts: one after the other, or where a table says (expert_cache.cuh).
struct ExpertRows {
  const uint8_t* first;
  uint64_t bytes;               // of a row
  const uint8_t* const* where;  // [experts], or null
  __device__ const uint8_t* operator[](int expert) const { return where ? where[expert] : first + expert * bytes; }
};

// One projection of all experts, as a kernel reads it.
struct Weights {
  ExpertRows rows;
  uint32_t scales_at, zeros_at, globals_at, bias_at, input_at;  // 0: none
  int panels, units;                                            // 16-row panels, 64-column units
  int blocks, block_shift;                                      // scale block of unit u is u >> block_shift
  int scale_type, scale_bytes;                                  // qm scale type; bytes of rows g and g + 8 in a block
  int zero_bytes;                                               // of a panel's zero points in a block
  bool two_groups;                                              // in a unit (groups of 32)
};

// A (token, slot) in the order of experts, with its router's weight: one load instead of two that depend on each other.
struct alignas(8) SortedPair {
  int pair;
  float weight;
};

// A run of at most 8 * n_tiles pairs of one expert.
struct Tile {
  int expert, first, count;
  int group_first : 26, group_size : 6;  // tiles [group_first, + group_size) of the expert share the order of work
};
static_assert(sizeof(Tile) == kTileBytes);
constexpr int kTileGroup = 16;

struct RoutedPairs {
  const void* topk_ids;  // null: every pair has expert 0 and weight 1, a linear
  const float* topk_weights;
  int id_bytes, tokens, top_k, expert_offset, local_experts;
};

struct Activation {
  int kind, gated;  // qm activation code
  float alpha, limit;
};

struct GemmParams {
  Weights weights;
  RoutedPairs routing;
  Activation activation;
  const void* x;             // rows of x_columns values
  int x_columns, x_divisor;  // row of pair p is p / x_divisor
  void* out;       // gate_up: T [pairs, out_columns]; down: f32 or T [pairs, out_columns], or T [tokens, out_columns]
  bool out_float;  // down on mma.sync: f32
  int out_columns;
  bool weight_here;  // multiply by the router's weight
  // Device list; tiles[max_tiles] has its length as count, the end of sorted_pairs as first. Unused by decode. Null: a
  // linear's max_tiles tiles of tile_pairs rows.
  const Tile* tiles;
  int max_tiles, tile_pairs;
  const SortedPair* sorted_pairs;
  int warps_k, cluster;  // the plan's
  // fp8: x is codes, [groups of 128 columns, x_rows, 128]
  const float* x_scales;  // [groups, x_rows] if x_grouped, or [x_rows]
  int x_rows;
  bool x_grouped;
  // gate_up: not null if out is codes, the x of the next product. These are its scales, [groups, x_rows]. They are
  // [x_rows], a row's, if w2 has stored scales.
  float* h_scales;
  ExpertRows h_rows;    // of w2
  uint32_t h_input_at;  // 0: none
};

// QuantLinear on wgmma.
struct LinearParams {
  CUtensorMap tokens, codes, scales, zeros;
  Weights weights;
  void* out;  // T [rows, out_columns]
  int rows, out_columns;
  int width, parts;      // tokens of a tile; blocks of a cluster, which have a part of K each
  int row_tiles, tiles;  // of weights; of the result, side by side for one set of tokens. One a cluster if parts > 1
};

// x for wgmma: columns permuted within 32 (moe_gemm_wgmma.cuh) and padded with zeros to whole units.
struct PrepareParams {
  const uint16_t* x;
  uint16_t* out;  // null: nothing to prepare
  int rows, columns, out_columns;
};

struct RouteParams {
  RoutedPairs routing;
  PrepareParams prepare;  // by the blocks after the first cluster
  int cluster;            // blocks that sort
  struct List {
    Tile* tiles;
    int max_tiles, tile_pairs, multiple;  // pairs of a tile but the last
  } lists[2];                             // of gate_up, and of down where its tiles are others
  int list_count;
  bool by_size;  // the largest tiles first
  bool ordered;  // one block and one list: the same order in every run
  SortedPair* sorted_pairs;
  int align;       // pairs of an expert start at a multiple of this; pair -1 between experts
  int* positions;  // not null: of a pair in sorted_pairs, -1: nowhere
};

struct CombineParams {
  RoutedPairs routing;
  const void* partial;  // f32, or T: [pairs, parts, columns]
  void* out;
  int columns, parts;
};

// x or h in the values of an activation format, and times pre-scales (quant_moe.def, Activations).
struct RoundParams {
  RoutedPairs routing;
  int format;
  bool by_expert, weight_here;  // rows are of pairs whose expert matters; multiply by the router's weight first
  ExpertRows rows;              // of the weights
  uint32_t input_at, pre_at;    // in a row; 0: none
  bool with_input_scale;        // in the values
  int packed;                   // out: codes and scales, in as many bytes for 64 columns; 0: values
  const void* x;
  void* out;
  int x_divisor, x_columns;         // row of x of row r is r / x_divisor
  int out_rows, columns, features;  // of out; columns past the features are zero
  bool x_stored, out_stored;        // columns in the order of wgmma, stored_column; out_stored where x_stored
  // Not null: rows are in the order of sorted_pairs.
  const SortedPair* sorted_pairs;
  const Tile* tiles;
  int max_tiles;
};

// x[pair] = hidden_states[token][perm of the pair's expert], for act-order; by gate's, then by up's where they differ.
struct GatherParams {
  RoutedPairs routing;
  int x_divisor;
  ExpertRows rows;
  uint32_t perm_at;
  const uint16_t* x;
  uint16_t* out;
  int columns, out_columns;  // of x; of out, zero past the features of an order
  int half, order_words;     // columns of out, words of the row from one order to the next
};

// What rounded activations were left without, and sums are to be multiplied by.
template <class F>
__device__ inline float input_scale(const Weights& weights, const uint8_t* expert) {
  if constexpr (!F::kRoundsScaled)
    if (weights.input_at) return *reinterpret_cast<const float*>(expert + weights.input_at);
  return 1.f;
}
__device__ inline float router_weight(const RoutedPairs& routing, int64_t pair) {
  return routing.topk_ids ? routing.topk_weights[pair] : 1.f;
}
__device__ inline int local_expert(const RoutedPairs& routing, int64_t pair) {
  if (!routing.topk_ids) return 0;
  int64_t id = routing.id_bytes == 8 ? static_cast<const int64_t*>(routing.topk_ids)[pair]
                                     : static_cast<const int32_t*>(routing.topk_ids)[pair];
  id -= routing.expert_offset;
  return id >= 0 && id < routing.local_experts ? static_cast<int>(id) : -1;
}

__device__ inline Tile tile_at(const GemmParams& params, int i) {
  if (params.tiles) return params.tiles[i];
  const int first = i * params.tile_pairs;
  return Tile{0, first, min(params.tile_pairs, params.routing.tokens - first)};
}
__device__ inline SortedPair pair_at(const GemmParams& params, int i) {
  return params.tiles ? params.sorted_pairs[i] : SortedPair{i, 1.f};
}

}  // namespace quantmoe
