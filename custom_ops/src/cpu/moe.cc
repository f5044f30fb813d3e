// One QuantMoE layer on the CPU: route, quantize, gate and up with the activation, quantize, down with the combine.
//
// Pairs (token, slot) are sorted by expert; a pair's place in that order is its position. Four sections, each a
// parallel loop:
//   1. activation rows to f32 and int8, once a token
//   2. (expert, token block, panel range): w13 product, activation function -> h[position]
//   3. h rows to int8 tiles, ready for every panel range of section 4
//   4. output column ranges: w2 product over all experts in ascending id, summed in place (no atomics, one order)
// Sections 1 and 3 are serial for a few rows, so that decode costs two dispatches.
//
// Long calls do this for one slice of the tokens after another, so that the workspace does not grow with them. A
// token's output depends on its own row alone, but for fp8_tensor without a stored scale, which is found from all rows
// of an expert: then passes over all slices find the largest x, then the largest h, before the one that computes the
// output.
#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstring>

#include "core/parallel.h"
#include "cpu/kernel.h"

// With 256 MiB the experts of a large layer have a block of rows and more in each slice, so that slices hardly stream
// the weights more often than blocks do.
int64_t qm_slice_bytes = int64_t{256} << 20;

namespace quantmoe {
namespace {

constexpr int64_t kBlockRows = 96;       // token rows of a task: their tiles stay in L2 while panels stream
constexpr int64_t kColumnsPerStep = 64;  // output columns between product and activation or combine; both stay in L1
constexpr int64_t kSerialRows = 16;
constexpr int64_t kRowsPerTask = 8;  // of the sections that take rows one by one

// Whether activations are prepared once for each expert: they depend on something that the expert's row holds.
bool is_expert_dependent(const qm_projection& p) { return p.pre_scale || has_input_scales(p); }

// Activation formats with a step for a group of features: of features before act-order, FORMAT.md 4.1.
bool is_groupwise(int32_t activation_format) {
  return activation_format == k_activation_format_fp8_group128 || activation_format == k_activation_format_nvfp4 ||
         activation_format == k_activation_format_mxfp8 || activation_format == k_activation_format_mxfp4;
}

// What one side (gate, up or down) of an expert does to its activations before the product.
struct Preparation {
  const float* pre_scale;  // [k] or null
  float stored;            // the scale of activation_format, 0 when it is found here
  const int32_t* perm;     // [k] or null: gathered by once rounded
  bool packed;             // the row has the order of the packed columns already: it leaves it to be rounded
};
Preparation preparation(const qm_projection& w, const RowParts& parts, const uint8_t* row, int side, bool gather) {
  Preparation out{};
  const auto at = [&](int64_t offset, int count) {
    return row + offset + (side < count ? side : count - 1) * parts.vector;
  };
  if (w.pre_scale) out.pre_scale = reinterpret_cast<const float*>(at(parts.pre_scales, w.pre_scale));
  if (has_input_scales(w)) out.stored = reinterpret_cast<const float*>(row + parts.input_scales)[side];
  if (w.perm && gather) out.perm = reinterpret_cast<const int32_t*>(at(parts.perms, w.perm));
  return out;
}

// The largest |x|, or |x * pre_scale|, as bits, which are ordered like magnitudes with infinity and NaN on top.
constexpr uint32_t kInfinityBits = 0x7f800000u;
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
struct Task {
  int32_t expert;
  int64_t first, rows;         // positions
  int64_t panel, panel_count;  // of w13, counted over both halves
};

// Everything one call needs, laid out in the workspace.
struct Layer {
  const qm_moe& moe;
  const qm_moe_call& call;
  const CpuKernel& kernel;
  PanelMatrix w13, w2;
  RowParts parts13, parts2;
  bool quantized13, quantized2;
  bool own_rows;  // section 2 prepares rows for each expert: by pre-scales, input scales or act-order
  int64_t tile13_bytes, tile2_bytes;
  int lanes, row_lanes, sides13;
  int64_t row_count;              // distinct activation rows of a token
  int64_t block_rows, tile_rows;  // most rows of a task and of a tile
  int64_t panel_splits, column_ranges, max_tasks;

  int64_t slices;
  int64_t first_token = 0;
  int64_t tokens, pairs, rows;  // of the slice; before take_slice the most that one has

  int64_t* expert_begin;  // [local experts + 1] positions
  uint32_t* largest13;    // [local experts, sides13] bits of the largest magnitude, for fp8_tensor
  uint32_t* largest2;     // [local experts]
  Pair* order;            // [pairs] by position
  uint8_t* bad;           // [tokens] where they are not finite
  uint8_t* bad_row;       // [rows] of x, which are more than tokens when router weights apply to them
  uint8_t* bad_h;         // [pairs] by position: h of such a row, or of one that scaling made so; for scales found here
  float* x;               // [rows, kp13]
  int8_t* q;              // [rows, kp13]
  int32_t* sums;          // [rows, blocks13]
  float* step;            // [rows]
  int32_t* zero_point;    // [rows]
  float* h;               // [pairs, I]
  uint8_t* tiles2;        // [pairs, tile2_bytes]
  float* y;               // [tokens, H]; the output itself when that is f32
  Task* tasks;            // [max_tasks]
  // a lane each
  uint8_t* lane_tiles;  // [block_rows, tile13_bytes] twice when gate and up gather differently
  float* lane_out;      // [block_rows, kColumnsPerStep] twice, gate and up
  // a lane each of row_lanes
  int8_t* lane_q;  // [tile_rows, lane_kp]
  float* lane_x;
  float* lane_row;  // [lane_kp]
  int32_t* lane_sums;
  float* lane_steps;

  // has_w13: false for a linear, which is sections 3 and 4.
  Layer(const qm_moe& m, const qm_moe_call& c, const CpuKernel& k, bool has_w13 = true)
      : moe(m), call(c), kernel(k), w2(w2_matrix(m)), parts2(w2_parts(m)) {
    w13 = has_w13 ? w13_matrix(m) : w2;
    parts13 = has_w13 ? w13_parts(m) : parts2;
    quantized13 = is_int8_activation(m.w13) || w13.stepped;
    quantized2 = is_int8_activation(m.w2) || w2.stepped;
    // Gate and up read different tiles.
    sides13 = m.w13.perm == 2 || m.w13.pre_scale == 2 || (has_input_scales(m.w13) && m.gated) ? 2 : 1;
    row_count = !has_w13 ? 0 : m.apply_router_weight_on_input ? c.top_k : 1;
    tile13_bytes = has_w13 ? tile_row_bytes(w13, quantized13) : 0;
    tile2_bytes = tile_row_bytes(w2, quantized2);

    set_tokens(c.tokens);
    Arena all{nullptr};
    lay_out_tokens(all);
    const int64_t most = std::max<int64_t>(tokens, 1), token_bytes = ceil_div(static_cast<int64_t>(all.used), most);
    slices = ceil_div(most, std::max<int64_t>(qm_slice_bytes / std::max<int64_t>(token_bytes, 1), 1));
    set_tokens(ceil_div(c.tokens, slices));
    plan_lanes(has_w13);
  }
  void set_tokens(int64_t n) {
    tokens = n;
    pairs = n * call.top_k;
    rows = n * row_count;
  }

  // The tasks of each section and the scratch that they need at one time. Lanes beyond the tasks of the widest section
  // would have nothing to do. A task has no more rows than there are tokens: an expert has more only where a token asks
  // for it twice, and is then several blocks.
  void plan_lanes(bool has_w13) {
    const int64_t most = call.parallel_for && call.lanes > 1 ? call.lanes : 1;
    const int64_t blocks = std::min(pairs, call.local_experts + pairs / kBlockRows);
    const int64_t steps = ceil_div(w13.panels * w13.nr, kColumnsPerStep);
    // Enough tasks to balance lanes at the end of the section, few enough that packing a block's tiles again for each
    // is noise.
    panel_splits = std::clamp<int64_t>(blocks > 0 ? ceil_div(most > 1 ? 16 * most : 1, blocks) : 1, 1, steps);
    column_ranges = std::clamp<int64_t>(most > 1 ? (tokens < kSerialRows ? 8 : 4) * most : 1, 1,
                                        ceil_div(moe.hidden_size, kColumnsPerStep));
    block_rows = std::clamp<int64_t>(tokens, 1, kBlockRows);
    tile_rows = std::min<int64_t>(block_rows, kernel.tile_rows);
    max_tasks = has_w13 ? std::min(pairs, call.local_experts + pairs / block_rows) * panel_splits : 0;
    const int64_t row_tasks = ceil_div(rows, kRowsPerTask);
    // Section 3, whose lanes prepare rows; those of section 2 do where experts have rows of their own.
    const int64_t h_tasks = tokens < kSerialRows ? 1
                            : has_w13            ? call.local_experts
                                                 : std::max(ceil_div(tokens, kRowsPerTask), tile_count(tokens));
    own_rows = has_w13 && (is_expert_dependent(moe.w13) || moe.w13.perm);
    lanes = static_cast<int>(std::min(most, std::max({row_tasks, max_tasks, h_tasks, column_ranges})));
    row_lanes = own_rows ? lanes : static_cast<int>(std::min<int64_t>(lanes, h_tasks));
  }

  void lay_out_tokens(Arena& a) {
    order = a.take<Pair>(pairs);
    bad = a.take<uint8_t>(tokens);
    bad_row = a.take<uint8_t>(rows);
    bad_h = a.take<uint8_t>(pairs);
    x = a.take<float>(rows * w13.kp);
    q = a.take<int8_t>(quantized13 ? rows * w13.kp : 0);
    sums = a.take<int32_t>(quantized13 ? rows * w13.groups() : 0);
    step = a.take<float>(rows);
    zero_point = a.take<int32_t>(rows);
    h = a.take<float>(pairs * moe.intermediate_size);
    tiles2 = a.take<uint8_t>(pairs * tile2_bytes);
    y = a.take<float>(call.type == QM_F32 ? 0 : tokens * moe.hidden_size);
  }
  size_t lay_out(void* workspace) {
    Arena a{static_cast<uint8_t*>(workspace)};
    lay_out_tokens(a);
    expert_begin = a.take<int64_t>(call.local_experts + 1);
    largest13 = a.take<uint32_t>(call.local_experts * sides13);
    largest2 = a.take<uint32_t>(call.local_experts);
    tasks = a.take<Task>(max_tasks);
    lane_tiles = a.take<uint8_t>(lanes * lane_tiles_bytes());
    lane_out = a.take<float>(lanes * 2 * block_rows * kColumnsPerStep);
    const int64_t slots = row_lanes * tile_rows;
    lane_q = a.take<int8_t>(slots * lane_kp());
    lane_x = a.take<float>(slots * lane_kp());
    lane_row = a.take<float>(row_lanes * lane_kp());
    lane_sums = a.take<int32_t>(slots * lane_groups());
    lane_steps = a.take<float>(w13.stepped || w2.stepped ? slots * lane_groups() : 0);
    return a.used;
  }
  int64_t lane_tiles_bytes() const { return sides13 * block_rows * tile13_bytes; }
  int64_t lane_kp() const { return own_rows ? std::max(w13.kp, w2.kp) : w2.kp; }
  int64_t lane_groups() const { return own_rows ? std::max(w13.groups(), w2.groups()) : w2.groups(); }

  void take_slice(int64_t slice) {
    first_token = slice * call.tokens / slices;
    set_tokens((slice + 1) * call.tokens / slices - first_token);
    std::fill(bad, bad + tokens, uint8_t{0});
    std::fill(bad_h, bad_h + pairs, uint8_t{0});
    if (call.type == QM_F32) y = static_cast<float*>(call.output) + first_token * moe.hidden_size;
  }

  template <typename Body>
  void for_each(int64_t count, const Body& body) const {
    parallel(lanes, call.parallel_for, call.parallel_context, count, body);
  }
  // body(lane, first, count) over rows 0..n-1, serial for a few.
  template <typename Body>
  void for_rows(int64_t n, const Body& body) const {
    if (n < kSerialRows) return body(0, 0, n);
    for_each(ceil_div(n, kRowsPerTask),
             [&](int lane, int64_t i) { body(lane, i * kRowsPerTask, std::min(kRowsPerTask, n - i * kRowsPerTask)); });
  }

  int64_t id(int64_t pair) const {
    pair += first_token * call.top_k;
    return call.id_bytes == 8 ? static_cast<const int64_t*>(call.topk_ids)[pair]
                              : static_cast<const int32_t*>(call.topk_ids)[pair];
  }
  const uint8_t* weights13(int64_t expert) const {
    return static_cast<const uint8_t*>(call.w13) + expert * parts13.size;
  }
  const uint8_t* weights2(int64_t expert) const { return static_cast<const uint8_t*>(call.w2) + expert * parts2.size; }
  Preparation preparation_of(bool down, int64_t expert, int side, bool gather) const {
    return down ? preparation(moe.w2, parts2, weights2(expert), side, gather)
                : preparation(moe.w13, parts13, weights13(expert), side, gather);
  }
  bool is_local(int64_t pair) const {
    const int64_t local = id(pair) - moe.expert_offset;
    return id(pair) >= 0 && local >= 0 && local < call.local_experts;
  }
  float weight(int64_t pair) const { return call.topk_weights[first_token * call.top_k + pair]; }
  static void mark(uint8_t* flag) { __atomic_store_n(flag, uint8_t{1}, __ATOMIC_RELAXED); }  // from any lane
  int64_t row_of(Pair p) const { return moe.apply_router_weight_on_input ? p.token * call.top_k + p.slot : p.token; }

  // Tiles of `rows` rows, evenly filled: ceil(rows / tile_rows) of them, the first ones a row longer.
  int64_t tile_count(int64_t n) const { return ceil_div(n, tile_rows); }

  int check_ids(char* err) const;
  void route();
  void clear_largest() {
    std::fill(largest13, largest13 + call.local_experts * sides13, 0u);
    std::fill(largest2, largest2 + call.local_experts, 0u);
  }
  // Of w2 (down) or w13, where the activation_format is fp8_tensor.
  bool finds_scales(bool down) const;
  void find_largest(bool down);
  void set_tensor_step(bool down, int64_t expert, int side, Preparation* how) const;
  bool prepare(int lane, int slot, const qm_projection& w, const PanelMatrix& p, const Preparation& how, const float* x,
               Row* row);
  bool check_perm(const int32_t* perm, int64_t columns, int64_t expert);
  int check_perms(const char* matrix, int64_t columns, char* err) const;
  void load_rows(int64_t first, int64_t count);
  void load_rows() {
    for_rows(rows, [&](int, int64_t first, int64_t count) { load_rows(first, count); });
  }
  void plan_tasks();
  void gate_up(int lane, const Task& task);
  int gate_up(char* err) {
    plan_tasks();
    for_each(task_count, [&](int lane, int64_t i) { gate_up(lane, tasks[i]); });
    return check_perms("w13", w13.k, err);
  }
  void pack_h(int lane, int64_t expert, int64_t first_tile, int64_t last_tile);
  int pack_h(char* err) {
    const auto pack = [&](int lane, int64_t e) {
      pack_h(lane, e, 0, tile_count(expert_begin[e + 1] - expert_begin[e]));
    };
    if (tokens < kSerialRows)
      for (int64_t e = 0; e < call.local_experts; ++e) pack(0, e);
    else
      for_each(call.local_experts, pack);
    return check_perms("w2", w2.k, err);
  }
  void down(int lane, int64_t begin, int64_t end);
  void down() {
    const int64_t hidden = moe.hidden_size, range = align_up(ceil_div(hidden, column_ranges), kColumnsPerStep);
    for_each(ceil_div(hidden, range),
             [&](int lane, int64_t i) { down(lane, i * range, std::min(hidden, (i + 1) * range)); });
  }
  int64_t task_count = 0;
  int64_t bad_perm = -1;  // an expert whose act-order is no column order
};

int Layer::check_ids(char* err) const {
  for (int64_t i = 0; i < call.tokens * call.top_k; ++i)
    if (const int64_t e = id(i); e < -1 || e >= moe.num_experts)
      return fail(err, QM_INVALID, "topk_ids of token %lld, slot %lld is %lld, expected -1 to %d",
                  (long long)(i / call.top_k), (long long)(i % call.top_k), (long long)e, moe.num_experts - 1);
  return QM_OK;
}

void Layer::route() {
  std::fill(expert_begin, expert_begin + call.local_experts + 1, 0);
  for (int64_t i = 0; i < pairs; ++i)
    if (is_local(i)) ++expert_begin[id(i) - moe.expert_offset + 1];
  for (int64_t e = 0; e < call.local_experts; ++e) expert_begin[e + 1] += expert_begin[e];
  for (int64_t i = 0; i < pairs; ++i)
    if (is_local(i))
      order[expert_begin[id(i) - moe.expert_offset]++] = {static_cast<int32_t>(i / call.top_k),
                                                          static_cast<int32_t>(i % call.top_k)};
  // The fill moved each begin to its end; shift them back.
  std::copy_backward(expert_begin, expert_begin + call.local_experts, expert_begin + call.local_experts + 1);
  expert_begin[0] = 0;
}

// Whether some expert's scale is found from all its rows.
bool Layer::finds_scales(bool down) const {
  if ((down ? moe.w2 : moe.w13).activation_format != k_activation_format_fp8_tensor) return false;
  for (int64_t e = 0; e < call.local_experts; ++e)
    for (int side = 0; side < (down ? 1 : sides13); ++side)
      if (preparation_of(down, e, side, false).stored == 0.0f) return true;
  return false;
}

// Extends the largest magnitudes of experts without a stored scale by the slice's finite rows, of x or (w2) of h.
void Layer::find_largest(bool down) {
  if ((down ? moe.w2 : moe.w13).activation_format != k_activation_format_fp8_tensor) return;
  const int sides = down ? 1 : sides13;
  const int64_t k = down ? w2.k : w13.k;
  for_rows(expert_begin[call.local_experts], [&](int, int64_t first, int64_t count) {
    int64_t e = 0;
    for (int64_t position = first; position < first + count; ++position) {
      while (position >= expert_begin[e + 1]) ++e;
      if (down && bad_h[position]) continue;  // the product of a row that is not finite may be any number
      const float* row = down ? h + position * k : x + row_of(order[position]) * w13.kp;
      for (int side = 0; side < sides; ++side) {
        const Preparation how = preparation_of(down, e, side, false);
        if (how.stored != 0.0f) continue;
        const uint32_t found = largest_bits(row, how.pre_scale, k);
        if (found >= kInfinityBits) continue;
        uint32_t* largest = down ? largest2 + e : largest13 + e * sides13 + side;
        uint32_t seen = __atomic_load_n(largest, __ATOMIC_RELAXED);
        while (seen < found &&
               !__atomic_compare_exchange_n(largest, &seen, found, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
        }
      }
    }
  });
}

// The scale of fp8_tensor that is not stored.
void Layer::set_tensor_step(bool down, int64_t expert, int side, Preparation* how) const {
  const qm_projection& w = down ? moe.w2 : moe.w13;
  if (w.activation_format != k_activation_format_fp8_tensor || how->stored != 0.0f) return;
  const uint32_t bits = down ? largest2[expert] : largest13[expert * sides13 + side];
  float largest;
  std::memcpy(&largest, &bits, 4);
  const float step = largest / 448.0f;
  how->stored = step > 0.0f ? step : 1.0f;
}

// Scales, quantizes or rounds and gathers one row x [k] into the lane's scratch; false when it is not finite.
bool Layer::prepare(int lane, int slot, const qm_projection& w, const PanelMatrix& p, const Preparation& how,
                    const float* x, Row* row) {
  float* staged = lane_row + lane * lane_kp();
  float* own = lane_x + (lane * tile_rows + slot) * lane_kp();
  const auto gather = [&](const float* from) {
    for (int64_t k = 0; k < p.k; ++k) own[k] = from[how.perm ? how.perm[k] : k];
    std::fill(own + p.k, own + p.kp, 0.0f);
  };
  if (how.pre_scale) {
    for (int64_t k = 0; k < p.k; ++k) staged[k] = x[k] * how.pre_scale[k];
    x = staged;
  }
  if (how.packed && how.perm) {
    std::fill(own, own + p.k, 0.0f);  // what a perm that repeats a column leaves out
    for (int64_t k = 0; k < p.k; ++k) own[how.perm[k]] = x[k];
    x = own;
  }
  *row = {};
  int8_t* quantized = lane_q + (lane * tile_rows + slot) * lane_kp();
  int32_t* group_sums = lane_sums + (lane * tile_rows + slot) * lane_groups();
  row->q = quantized;
  row->sums = group_sums;
  if (p.stepped) {
    float* steps = lane_steps + (lane * tile_rows + slot) * lane_groups();
    const bool finite = kernel.quantize_nvfp4(how.stored, x, p.k, p.groups(), quantized, steps);
    kernel.block_sums(quantized, p.group(), p.groups(), group_sums);
    row->steps = steps;
    return finite;
  }
  if (!is_int8_activation(w)) {
    const bool finite = kernel.round_row(w.activation_format, how.stored, x, p.k, staged);
    if (!finite) std::fill(staged, staged + p.k, 0.0f);  // the token is NaN whatever its products are
    gather(staged);
    row->x = own;
    return finite;
  }
  gather(x);
  const bool finite = kernel.quantize(w.activation_format, own, p.k, p.kp, quantized, &row->step, &row->zero_point);
  kernel.block_sums(quantized, p.group(), p.groups(), group_sums);
  return finite;
}

void Layer::load_rows(int64_t first, int64_t count) {
  const int64_t hidden = moe.hidden_size, element = call.type == QM_F32 ? 4 : 2;
  for (int64_t r = first; r < first + count; ++r) {
    const int64_t token = moe.apply_router_weight_on_input ? r / call.top_k : r;
    float* row = x + r * w13.kp;
    kernel.to_float(call.type,
                    static_cast<const uint8_t*>(call.hidden_states) + (first_token + token) * hidden * element, hidden,
                    row);
    std::fill(row + hidden, row + w13.kp, 0.0f);
    // A pair that no expert here has is not computed: its weight may be anything, only the token itself counts.
    const bool computed = !moe.apply_router_weight_on_input || is_local(r);
    if (moe.apply_router_weight_on_input && computed) kernel.scale(weight(r), row, hidden);
    bool finite;
    if (is_expert_dependent(moe.w13) || !computed) {
      finite = kernel.all_finite(row, hidden);
    } else if (quantized13) {
      finite =
          kernel.quantize(moe.w13.activation_format, row, hidden, w13.kp, q + r * w13.kp, step + r, zero_point + r);
      if (!moe.w13.perm) kernel.block_sums(q + r * w13.kp, w13.group(), w13.groups(), sums + r * w13.groups());
    } else {
      finite = kernel.round_row(moe.w13.activation_format, 0.0f, row, hidden, row);
    }
    bad_row[r] = !finite;
    if (!finite) mark(bad + token);
  }
}

void Layer::plan_tasks() {
  const int64_t panels = w13.panels * halves(moe);
  const int64_t step_panels = kColumnsPerStep / w13.nr * halves(moe);
  const int64_t split = ceil_div(ceil_div(panels, step_panels), panel_splits) * step_panels;
  task_count = 0;
  for (int64_t e = 0; e < call.local_experts; ++e)
    for (int64_t first = expert_begin[e]; first < expert_begin[e + 1];) {
      // Even blocks: a last block of a few rows would stream the weights for little.
      const int64_t left = expert_begin[e + 1] - first;
      const int64_t block = ceil_div(left, ceil_div(left, block_rows));
      for (int64_t p = 0; p < panels; p += split)
        tasks[task_count++] = {static_cast<int32_t>(e), first, block, p, std::min(split, panels - p)};
      first += block;
    }
}

// Whether all columns are there to gather. Checked where it is read: at load it would touch a page of every expert.
bool Layer::check_perm(const int32_t* perm, int64_t columns, int64_t expert) {
  uint32_t largest = 0;
  for (int64_t k = 0; k < columns; ++k) largest = std::max(largest, static_cast<uint32_t>(perm[k]));
  if (largest < static_cast<uint64_t>(columns)) return true;
  __atomic_store_n(&bad_perm, expert, __ATOMIC_RELAXED);
  return false;
}

int Layer::check_perms(const char* matrix, int64_t columns, char* err) const {
  if (bad_perm < 0) return QM_OK;
  return fail(err, QM_INVALID,
              "%s's act-order of expert %lld has columns outside 0 to %lld: not the bytes of a packed tensor", matrix,
              (long long)(bad_perm + moe.expert_offset), (long long)(columns - 1));
}

void Layer::gate_up(int lane, const Task& task) {
  const uint8_t* weights = weights13(task.expert);
  int gathers = sides13;
  Preparation how[2];
  for (int g = 0; g < gathers; ++g) {
    how[g] = preparation_of(false, task.expert, g, true);
    if (how[g].perm && !check_perm(how[g].perm, w13.k, task.expert)) return;
    set_tensor_step(false, task.expert, g, &how[g]);
  }
  const auto same = [&](const void* a, const void* b) {
    return a == b || (a && b && std::memcmp(a, b, static_cast<size_t>(4 * w13.k)) == 0);
  };
  if (gathers == 2 && same(how[0].pre_scale, how[1].pre_scale) && same(how[0].perm, how[1].perm) &&
      how[0].stored == how[1].stored)
    gathers = 1;
  const int64_t count = tile_count(task.rows);
  Tile tiles[2][kBlockRows];
  for (int g = 0; g < gathers; ++g) {
    const int32_t* perm = how[g].perm;
    uint8_t* data = lane_tiles + lane * lane_tiles_bytes() + g * block_rows * tile13_bytes;
    int64_t position = task.first;
    for (int64_t t = 0; t < count; ++t) {
      const int m = static_cast<int>(task.rows / count + (t < task.rows % count));
      Row list[kMaxTileRows];
      for (int i = 0; i < m; ++i, ++position) {
        const int64_t r = row_of(order[position]);
        if (bad_row[r]) mark(bad_h + position);
        Row row{x + r * w13.kp, q + r * w13.kp, sums + r * w13.groups(), step[r], zero_point[r], nullptr};
        if (is_expert_dependent(moe.w13)) {
          if (!prepare(lane, i, moe.w13, w13, how[g], x + r * w13.kp, &row)) {
            mark(bad + order[position].token);
            mark(bad_h + position);
          }
        } else if (perm) {
          const int64_t slot = lane * tile_rows + i;
          if (quantized13) {
            int8_t* gathered = lane_q + slot * lane_kp();
            for (int64_t k = 0; k < w13.k; ++k) gathered[k] = row.q[perm[k]];
            std::fill(gathered + w13.k, gathered + w13.kp, int8_t{0});
            int32_t* gathered_sums = lane_sums + slot * lane_groups();
            kernel.block_sums(gathered, w13.group(), w13.groups(), gathered_sums);
            row.q = gathered;
            row.sums = gathered_sums;
          } else {
            float* gathered = lane_x + slot * lane_kp();
            for (int64_t k = 0; k < w13.k; ++k) gathered[k] = row.x[perm[k]];
            std::fill(gathered + w13.k, gathered + w13.kp, 0.0f);
            row.x = gathered;
          }
        }
        list[i] = row;
      }
      kernel.pack_tile(w13, quantized13, list, m, data);
      tiles[g][t] = {data, m};
      data += m * tile13_bytes;
    }
  }

  const int sides = halves(moe);
  float* gate = lane_out + lane * 2 * block_rows * kColumnsPerStep;
  float* up = sides == 2 ? gate + block_rows * kColumnsPerStep : gate;
  const int64_t step_panels = kColumnsPerStep / w13.nr * sides;
  for (int64_t p = task.panel; p < task.panel + task.panel_count; p += step_panels) {
    const int64_t panels = std::min(step_panels, task.panel + task.panel_count - p);
    Product product{&w13,  quantized13, weights + p * w13.stride, panels,    tiles[0],
                    count, gate,        kColumnsPerStep,          up - gate, sides};
    if (gathers == 1) {
      kernel.multiply(product);
    } else {  // gate and up read different tiles: every other panel each
      PanelMatrix half = w13;
      for (int64_t i = 0; i < panels; ++i) {
        Product one{&half,
                    quantized13,
                    weights + (p + i) * w13.stride,
                    1,
                    tiles[i % 2],
                    count,
                    (i % 2 ? up : gate) + i / 2 * w13.nr,
                    kColumnsPerStep,
                    0,
                    1};
        kernel.multiply(one);
      }
    }
    const int64_t column = p / sides * w13.nr;
    const int64_t columns = std::min(panels / sides * w13.nr, moe.intermediate_size - column);
    for (int64_t i = 0; i < task.rows; ++i)
      kernel.activate(moe, sides == 2 ? gate + i * kColumnsPerStep : nullptr, up + i * kColumnsPerStep, columns,
                      h + (task.first + i) * moe.intermediate_size + column);
  }
}

// Quantizes the h rows of some of one expert's tiles and lays them out.
void Layer::pack_h(int lane, int64_t expert, int64_t first_tile, int64_t last_tile) {
  const int64_t begin = expert_begin[expert], n = expert_begin[expert + 1] - begin, count = tile_count(n);
  if (n == 0) return;
  // h has the order of the packed columns, as packing reordered the rows of gate and up.
  const bool regrouped = moe.w2.perm && is_groupwise(moe.w2.activation_format);
  const bool own = is_expert_dependent(moe.w2) || regrouped;
  Preparation how{};
  if (own) {
    how = preparation_of(true, expert, 0, regrouped);
    how.packed = true;
    if (regrouped && !check_perm(how.perm, w2.k, expert)) return;
    set_tensor_step(true, expert, 0, &how);
  }
  int64_t position = begin + first_tile * (n / count) + std::min(first_tile, n % count);
  uint8_t* data = tiles2 + position * tile2_bytes;
  for (int64_t t = first_tile; t < last_tile; ++t) {
    const int m = static_cast<int>(n / count + (t < n % count));
    Row list[kMaxTileRows];
    for (int i = 0; i < m; ++i, ++position) {
      const float* row = h + position * moe.intermediate_size;
      const int64_t slot = lane * tile_rows + i;
      list[i] = {};
      bool finite;
      if (own) {
        finite = prepare(lane, i, moe.w2, w2, how, row, &list[i]);
      } else if (quantized2) {
        int8_t* quantized = lane_q + slot * lane_kp();
        int32_t* block_sums = lane_sums + slot * lane_groups();
        finite =
            kernel.quantize(moe.w2.activation_format, row, w2.k, w2.kp, quantized, &list[i].step, &list[i].zero_point);
        kernel.block_sums(quantized, w2.group(), w2.groups(), block_sums);
        list[i].q = quantized;
        list[i].sums = block_sums;
      } else {
        float* padded = lane_x + slot * lane_kp();
        finite = kernel.round_row(moe.w2.activation_format, 0.0f, row, w2.k, padded);
        if (!finite) std::copy(row, row + w2.k, padded);
        std::fill(padded + w2.k, padded + w2.kp, 0.0f);
        list[i].x = padded;
      }
      if (!finite) mark(bad + order[position].token);
    }
    kernel.pack_tile(w2, quantized2, list, m, data);
    data += m * tile2_bytes;
  }
}

void Layer::down(int lane, int64_t begin, int64_t end) {
  const int64_t hidden = moe.hidden_size;
  float* out = lane_out + lane * 2 * block_rows * kColumnsPerStep;
  for (int64_t t = 0; t < tokens; ++t) std::fill(y + t * hidden + begin, y + t * hidden + end, 0.0f);
  for (int64_t e = 0; e < call.local_experts; ++e) {
    const int64_t n = expert_begin[e + 1] - expert_begin[e], count = tile_count(n);
    if (n == 0) continue;
    int64_t tile = 0, position = expert_begin[e];
    while (tile < count) {
      // As many tiles as fit a block of rows.
      Tile tiles[kBlockRows];
      int64_t taken = 0, block = 0;
      const int64_t first = position;
      for (; tile < count; ++tile) {
        const int m = static_cast<int>(n / count + (tile < n % count));
        if (block + m > block_rows) break;
        tiles[taken++] = {tiles2 + position * tile2_bytes, m};
        position += m;
        block += m;
      }
      for (int64_t column = begin; column < end; column += kColumnsPerStep) {
        const int64_t columns = std::min(kColumnsPerStep, end - column);
        Product product{&w2,
                        quantized2,
                        weights2(e) + column / w2.nr * w2.stride,
                        ceil_div(columns, w2.nr),
                        tiles,
                        taken,
                        out,
                        kColumnsPerStep,
                        0,
                        1};
        kernel.multiply(product);
        for (int64_t i = 0; i < block; ++i) {
          // Rows of y are scattered: ask for the one that comes some rows later.
          const float* later = y + order[first + std::min(i + 4, block - 1)].token * hidden + column;
          for (int64_t line = 0; line < columns; line += 16) __builtin_prefetch(later + line, 1);
          const Pair pair = order[first + i];
          const float factor = moe.apply_router_weight_on_input ? 1.0f : weight(pair.token * call.top_k + pair.slot);
          kernel.accumulate(factor, out + i * kColumnsPerStep, columns, y + pair.token * hidden + column);
        }
      }
    }
  }
  const int64_t element = call.type == QM_F32 ? 4 : 2;
  for (int64_t t = 0; t < tokens; ++t) {
    float* row = y + t * hidden + begin;
    if (bad[t]) std::fill(row, row + (end - begin), NAN);
    uint8_t* output = static_cast<uint8_t*>(call.output) + ((first_token + t) * hidden + begin) * element;
    kernel.from_float(call.type, row, end - begin, output);
  }
}

// A linear is sections 3 and 4 of the layer whose w2 it is, h being the rows of x, every weight 1.
struct Adapted {
  qm_moe moe;
  qm_moe_call call{};
  Adapted(const qm_linear& l, const qm_linear_call& c) : moe(as_moe(l)) {
    moe.apply_router_weight_on_input = 1;
    call.type = c.type;
    call.tokens = c.rows;
    call.top_k = call.local_experts = 1;
    call.w2 = c.w;
    call.output = c.y;
    call.lanes = c.lanes;
    call.parallel_for = c.parallel_for;
    call.parallel_context = c.parallel_context;
  }
};
struct Linear : Adapted, Layer {
  const void* source;
  Linear(const qm_linear& l, const qm_linear_call& c, const CpuKernel& k)
      : Adapted(l, c), Layer(Adapted::moe, Adapted::call, k, /*has_w13=*/false), source(c.x) {}
  const int32_t* column_order() const {
    if (!Layer::moe.w2.perm) return nullptr;
    return reinterpret_cast<const int32_t*>(static_cast<const uint8_t*>(Layer::call.w2) + parts2.perms);
  }
  // Rows of the slice to f32, in the order of the packed columns, as gate_up leaves h.
  void load(int lane, int64_t first, int64_t count) {
    const qm_moe_call& call = Layer::call;
    const int64_t k = w2.k, element = call.type == QM_F32 ? 4 : 2;
    const int32_t* perm = column_order();
    float* stored = lane_x + lane * tile_rows * lane_kp();
    for (int64_t r = first; r < first + count; ++r) {
      float* row = h + r * k;
      order[r] = {static_cast<int32_t>(r), 0};
      kernel.to_float(call.type, static_cast<const uint8_t*>(source) + (first_token + r) * k * element, k,
                      perm ? stored : row);
      if (perm)
        for (int64_t i = 0; i < k; ++i) row[i] = stored[perm[i]];
    }
  }
  void load_slice(int64_t slice) {
    take_slice(slice);
    expert_begin[0] = 0;
    expert_begin[1] = tokens;
    for_rows(tokens, [&](int lane, int64_t first, int64_t count) { load(lane, first, count); });
  }
  void pack() {
    const int64_t tiles = tile_count(tokens);
    if (tokens < kSerialRows)
      pack_h(0, 0, 0, tiles);
    else
      for_each(tiles, [&](int lane, int64_t t) { pack_h(lane, 0, t, t + 1); });
  }
};

}  // namespace
}  // namespace quantmoe

using namespace quantmoe;

size_t qm_moe_workspace(const qm_moe* moe, const qm_moe_call* call) {
  char err[QM_ERROR_SIZE];
  const CpuKernel* kernel = select_kernel(err);
  return kernel ? Layer(*moe, *call, *kernel).lay_out(nullptr) : 0;
}

int qm_moe_run(const qm_moe* moe, const qm_moe_call* call, char* err) {
  if (call->tokens == 0) return QM_OK;
  if (call->tokens < 0 || call->top_k < 1 || call->tokens > INT32_MAX / call->top_k)
    return fail(err, QM_INVALID, "%lld tokens of %lld experts each, expected fewer than 2^31 pairs",
                (long long)call->tokens, (long long)call->top_k);
  const CpuKernel* kernel = select_kernel(err);
  if (!kernel) return QM_UNSUPPORTED;
  Layer layer(*moe, *call, *kernel);
  layer.lay_out(call->workspace);
  if (int status = layer.check_ids(err)) return status;
  layer.clear_largest();
  const auto load = [&](int64_t slice) {
    layer.take_slice(slice);
    layer.route();
    layer.load_rows();
  };
  const bool sliced = layer.slices > 1;
  if (sliced && layer.finds_scales(false))
    for (int64_t slice = 0; slice < layer.slices; ++slice) {
      load(slice);
      layer.find_largest(false);
    }
  if (sliced && layer.finds_scales(true))
    for (int64_t slice = 0; slice < layer.slices; ++slice) {
      load(slice);
      if (int status = layer.gate_up(err)) return status;
      layer.find_largest(true);
    }
  for (int64_t slice = 0; slice < layer.slices; ++slice) {
    load(slice);
    if (!sliced) layer.find_largest(false);
    if (int status = layer.gate_up(err)) return status;
    if (!sliced) layer.find_largest(true);
    if (int status = layer.pack_h(err)) return status;
    layer.down();
  }
  return QM_OK;
}

size_t qm_linear_workspace(const qm_linear* linear, const qm_linear_call* call) {
  char err[QM_ERROR_SIZE];
  const CpuKernel* kernel = select_kernel(err);
  return kernel ? Linear(*linear, *call, *kernel).lay_out(nullptr) : 0;
}

int qm_linear_run(const qm_linear* linear, const qm_linear_call* call, char* err) {
  if (call->rows == 0) return QM_OK;
  const CpuKernel* kernel = select_kernel(err);
  if (!kernel) return QM_UNSUPPORTED;
  Linear layer(*linear, *call, *kernel);
  layer.lay_out(call->workspace);
  layer.clear_largest();
  if (const int32_t* perm = layer.column_order(); perm && !layer.check_perm(perm, linear->in_features, 0))
    return fail(err, QM_INVALID, "w's act-order has a column outside 0 to %d", linear->in_features - 1);
  const bool sliced = layer.slices > 1;
  if (sliced && layer.finds_scales(true))
    for (int64_t slice = 0; slice < layer.slices; ++slice) {
      layer.load_slice(slice);
      layer.find_largest(true);
    }
  for (int64_t slice = 0; slice < layer.slices; ++slice) {
    layer.load_slice(slice);
    if (!sliced) layer.find_largest(true);
    layer.pack();
    layer.down();
  }
  return QM_OK;
}
