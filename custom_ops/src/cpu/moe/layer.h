// What the steps of a QuantMoE layer, and of a QuantLinear, share: sizes, threads, expert matrices and the workspace.
//
// Pairs (token, slot) are sorted by expert. A pair's place in that order is its position. A step is a parallel loop and
// a file, and hands on one of the structs here or in its header:
//   route.cc    ids -> Routes
//   prepare.cc  activation rows -> ActivationRows: f32 or int8, once a token
//   gate_up.cc  (expert, token block, panel range): w13 product, activation function -> Hidden, h[position]
//   down.cc     h rows -> tiles, ready for every range of output columns; then those: w2 product over all experts in
//               ascending id, summed in place (no atomics, one order)
// moe.cc is all of them, linear.cc the last. Steps that take rows one by one are serial for a few rows, so that decode
// costs two dispatches.
//
// Long calls do this for one slice of the tokens after another, so that the workspace does not grow with them. A
// token's output depends only on its own row. The exception is fp8_tensor without a stored scale, which is found from
// all rows of an expert. Then passes over all slices find the largest x, then the largest h, before the pass that
// computes the output.
//
// If the experts' rows are not all in memory at one time, experts are taken in rounds within a slice, in ascending
// order. A round does every step for its experts, except loading rows. Sums have one order, so the bytes do not change.
#pragma once
#include <algorithm>
#include <cstdint>

#include "core/parallel.h"
#include "cpu/kernel.h"

namespace quantmoe {

constexpr int64_t kBlockRows = 96;       // token rows of a task: their tiles stay in L2 while panels stream
constexpr int64_t kColumnsPerStep = 64;  // output columns between product and activation or combine; both stay in L1
constexpr int64_t kSerialRows = 16;
constexpr int64_t kRowsPerTask = 8;  // of the loops that take rows one by one

struct Arena {  // carves 64-byte aligned pieces; with base null it only measures
  uint8_t* base;
  size_t used = 0;
  template <typename T>
  T* take(int64_t count) {
    T* piece = base ? reinterpret_cast<T*>(base + used) : nullptr;
    used += static_cast<size_t>(align_up(count * static_cast<int64_t>(sizeof(T)), 64));
    return piece;
  }
};

struct Pair {
  int32_t token, slot;
};
struct Routes {
  int64_t* begin;  // [local experts + 1] positions
  Pair* order;     // [pairs] by position

  int64_t rows(int64_t expert) const { return begin[expert + 1] - begin[expert]; }
};

// The rows of w2's products, by position.
struct Hidden {
  float* h;      // [pairs, I]
  uint8_t* bad;  // [pairs]: h of a row that is not finite, or that scaling made so; for scales found here

  void lay_out(Arena& arena, int64_t pairs, int64_t width) {
    bad = arena.take<uint8_t>(pairs);
    h = arena.take<float>(pairs * width);
  }
};

inline void mark(uint8_t* flag) { __atomic_store_n(flag, uint8_t{1}, __ATOMIC_RELAXED); }  // from any lane

// What one side (gate, up or down) of an expert does to its activations before the product.
struct Preparation {
  const float* pre_scale;  // [k] or null
  float stored;            // the scale of activation_format, 0 when it is found here
  const int32_t* perm;     // [k] or null: gathered by once rounded
  bool packed;             // the row has the order of the packed columns already: it leaves it to be rounded
};

// The packed w13 or w2 of the experts here, a row each.
struct ExpertMatrix {
  const qm_projection& node;
  PanelMatrix panel;
  RowParts parts;
  const uint8_t* rows;    // [local experts, parts.size]
  int sides;              // that prepare activations differently: 2 where gate and up read different tiles
  bool quantized;         // activations are integers
  int64_t tile_bytes;     // of a row in a tile
  const void** read{};    // [local experts] where qm_read_experts has put them, or null
  uint32_t* largest{};    // [local experts, sides] bits of the largest magnitude, for fp8_tensor
  int64_t bad_perm = -1;  // an expert whose act-order is no column order
  bool rotated = false;   // its activations come times the pre-scales, and rotated

  ExpertMatrix(const qm_projection& node, const PanelMatrix& panel, const RowParts& parts, const void* rows, int sides)
      : node(node),
        panel(panel),
        parts(parts),
        rows(static_cast<const uint8_t*>(rows)),
        sides(sides),
        quantized(is_int8_activation(node) || panel.stepped),
        tile_bytes(tile_row_bytes(panel, quantized)) {}

  const uint8_t* row(int64_t expert) const {
    return read ? static_cast<const uint8_t*>(read[expert]) : rows + expert * parts.size;
  }
  // Whether activations are prepared once for each expert. They depend on something that the expert's row holds. With
  // steps this is the order of the columns, too.
  bool is_expert_dependent() const { return node.pre_scale || has_input_scales(node) || (panel.stepped && node.perm); }
  Preparation preparation(int64_t expert, int side, bool gather) const;
  const float* pre_scales(int64_t expert, int side) const;  // [k] or null
  // The same with the scale of fp8_tensor that is not stored, once `largest` is known.
  Preparation known_preparation(int64_t expert, int side, bool gather) const;
  // Whether all columns are there to gather. Checked where it is read: at load it would touch a page of every expert.
  bool check_perm(const int32_t* perm, int64_t expert);
  int check_perms(const char* name, int32_t expert_offset, char* err) const;

 private:
  const void* vector(int64_t expert, int64_t offset, int count, int side) const;
};

// A call's sizes and threads, and how far it is: in which slice of the tokens and which round of the experts.
struct LayerCall {
  const CpuKernel& kernel;
  qm_type type;
  int64_t all_tokens, top_k, local_experts;
  int64_t most_lanes;
  qm_parallel_for parallel_for;
  void* parallel_context;

  int lanes = 1;                         // those that have something to do
  int64_t slices = 1;                    // of the tokens
  int64_t first_token = 0, tokens;       // of the slice; before take_slice the most that one has
  int64_t first_expert = 0, end_expert;  // of the round: those whose rows can be read now
  int64_t block_rows, tile_rows;         // most rows of a task and of a tile
  Routes routes{};
  uint8_t* bad{};     // [tokens] where they are not finite
  float* lane_out{};  // [lanes, 2, block_rows, kColumnsPerStep]: gate's and up's, or down's

  template <class Call>
  LayerCall(const CpuKernel& kernel, const Call& call, int64_t tokens, int64_t top_k, int64_t local_experts)
      : kernel(kernel),
        type(call.type),
        all_tokens(tokens),
        top_k(top_k),
        local_experts(local_experts),
        most_lanes(call.lanes > 1 ? call.lanes : 1),
        parallel_for(call.parallel_for),
        parallel_context(call.parallel_context),
        tokens(tokens),
        end_expert(local_experts) {}

  int64_t pairs() const { return tokens * top_k; }
  int64_t element() const { return type == QM_F32 ? 4 : 2; }
  // As many slices as the tokens need, whose activations take so many bytes together.
  void divide(size_t bytes);
  void take_slice(int64_t slice) {
    first_token = slice * all_tokens / slices;
    tokens = (slice + 1) * all_tokens / slices - first_token;
    std::fill(bad, bad + tokens, uint8_t{0});
  }
  void lay_out_tokens(Arena& arena) {
    routes.order = arena.take<Pair>(pairs());
    bad = arena.take<uint8_t>(tokens);
  }
  void lay_out(Arena& arena) {
    routes.begin = arena.take<int64_t>(local_experts + 1);
    lane_out = arena.take<float>(lanes * 2 * block_rows * kColumnsPerStep);
  }

  template <typename Body>
  void for_each(int64_t count, const Body& body) const {
    parallel(lanes, parallel_for, parallel_context, count, body);
  }
  // body(lane, first, count) over rows 0..n-1, serial for a few.
  template <typename Body>
  void for_rows(int64_t n, const Body& body) const {
    if (n < kSerialRows) return body(0, 0, n);
    for_each(ceil_div(n, kRowsPerTask),
             [&](int lane, int64_t i) { body(lane, i * kRowsPerTask, std::min(kRowsPerTask, n - i * kRowsPerTask)); });
  }

  // A task has a multiple of these. With few tokens tasks are short, and lanes would wait for the last ones.
  int64_t columns_of_task() const { return all_tokens < kSerialRows ? kColumnsPerStep / 2 : kColumnsPerStep; }

  // Tiles of n rows, evenly filled: ceil(n / tile_rows) of them, the first ones a row longer.
  int64_t tile_count(int64_t n) const { return ceil_div(n, tile_rows); }
  static int rows_of_tile(int64_t n, int64_t count, int64_t tile) {
    return static_cast<int>(n / count + (tile < n % count));
  }
  float* out(int lane) const { return lane_out + lane * 2 * block_rows * kColumnsPerStep; }
};

}  // namespace quantmoe
