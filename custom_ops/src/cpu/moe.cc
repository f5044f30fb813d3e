// One QuantMoE layer on the CPU: route, quantize, gate and up with the activation, quantize, down with the combine.
//
// Pairs (token, slot) are sorted by expert; a pair's place in that order is its position. Four sections, each a
// parallel loop:
//   1. activation rows to f32 and int8, once a token
//   2. (expert, token block, panel range): w13 product, activation function -> h[position]
//   3. h rows to int8 tiles, ready for every panel range of section 4
//   4. output column ranges: w2 product over all experts in ascending id, summed in place (no atomics, one order)
// Sections 1 and 3 are serial for a few rows, so that decode costs two dispatches.
#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstring>

#include "core/parallel.h"
#include "cpu/kernel.h"

namespace quantmoe {
namespace {

constexpr int64_t kBlockRows = 96;       // token rows of a task: their tiles stay in L2 while panels stream
constexpr int64_t kColumnsPerStep = 64;  // output columns between product and activation or combine; both stay in L1
constexpr int64_t kSerialRows = 16;
// Sections that found a token's activations not finite.
constexpr uint8_t kBadInput = 1, kBadScaled = 2, kBadH = 4;

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
  int64_t pairs, rows;  // rows: distinct activation rows
  int64_t tile13_bytes, tile2_bytes;
  int lanes, sides13;
  int64_t panel_splits, column_ranges, max_tasks;

  int64_t* expert_begin;  // [local experts + 1] positions
  Pair* order;            // [pairs] by position
  uint8_t* bad;           // [tokens] where they are not finite
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
  uint8_t* lane_tiles;  // [kBlockRows, tile13_bytes] twice when gate and up gather differently
  float* lane_out;      // [kBlockRows, kColumnsPerStep] twice, gate and up
  int8_t* lane_q;       // [kMaxTileRows, max kp]
  float* lane_x;
  float* lane_row;  // [max kp]
  int32_t* lane_sums;
  float* lane_steps;

  Layer(const qm_moe& m, const qm_moe_call& c, const CpuKernel& k)
      : moe(m), call(c), kernel(k), w13(w13_matrix(m)), w2(w2_matrix(m)), parts13(w13_parts(m)), parts2(w2_parts(m)) {
    quantized13 = is_int8_activation(m.w13) || w13.stepped;
    quantized2 = is_int8_activation(m.w2) || w2.stepped;
    // Gate and up read different tiles.
    sides13 = m.w13.perm == 2 || m.w13.pre_scale == 2 || (has_input_scales(m.w13) && m.gated) ? 2 : 1;
    pairs = c.tokens * c.top_k;
    rows = m.apply_router_weight_on_input ? pairs : c.tokens;
    tile13_bytes = tile_row_bytes(w13, quantized13);
    tile2_bytes = tile_row_bytes(w2, quantized2);
    lanes = c.parallel_for && c.lanes > 1 ? c.lanes : 1;
    const int64_t blocks = std::min(pairs, c.local_experts + pairs / kBlockRows);
    const int64_t steps = ceil_div(w13.panels * w13.nr, kColumnsPerStep);
    // Enough tasks to balance lanes at the end of the section, few enough that packing a block's tiles again for each
    // is noise.
    panel_splits = std::clamp<int64_t>(blocks > 0 ? ceil_div(lanes > 1 ? 16 * lanes : 1, blocks) : 1, 1, steps);
    column_ranges = std::clamp<int64_t>(lanes > 1 ? (c.tokens < kSerialRows ? 8 : 4) * lanes : 1, 1,
                                        ceil_div(m.hidden_size, kColumnsPerStep));
    max_tasks = (std::min(pairs, c.local_experts) + pairs / kBlockRows) * panel_splits;
  }

  size_t lay_out(void* workspace) {
    Arena a{static_cast<uint8_t*>(workspace)};
    expert_begin = a.take<int64_t>(call.local_experts + 1);
    order = a.take<Pair>(pairs);
    bad = a.take<uint8_t>(call.tokens);
    x = a.take<float>(rows * w13.kp);
    q = a.take<int8_t>(quantized13 ? rows * w13.kp : 0);
    sums = a.take<int32_t>(quantized13 ? rows * w13.groups() : 0);
    step = a.take<float>(rows);
    zero_point = a.take<int32_t>(rows);
    h = a.take<float>(pairs * moe.intermediate_size);
    tiles2 = a.take<uint8_t>(pairs * tile2_bytes);
    y = a.take<float>(call.type == QM_F32 ? 0 : call.tokens * moe.hidden_size);
    tasks = a.take<Task>(max_tasks);
    lane_tiles = a.take<uint8_t>(lanes * lane_tiles_bytes());
    lane_out = a.take<float>(lanes * 2 * kBlockRows * kColumnsPerStep);
    lane_q = a.take<int8_t>(lanes * kMaxTileRows * lane_kp());
    lane_x = a.take<float>(lanes * kMaxTileRows * lane_kp());
    lane_row = a.take<float>(lanes * lane_kp());
    lane_sums = a.take<int32_t>(lanes * kMaxTileRows * lane_groups());
    lane_steps = a.take<float>(w13.stepped || w2.stepped ? lanes * kMaxTileRows * lane_groups() : 0);
    if (call.type == QM_F32) y = static_cast<float*>(call.output);
    return a.used;
  }
  int64_t lane_tiles_bytes() const { return sides13 * kBlockRows * tile13_bytes; }
  int64_t lane_kp() const { return std::max(w13.kp, w2.kp); }
  int64_t lane_groups() const { return std::max(w13.groups(), w2.groups()); }

  template <typename Body>
  void for_each(int64_t count, const Body& body) const {
    parallel(lanes, call.parallel_for, call.parallel_context, count, body);
  }

  int64_t id(int64_t pair) const {
    return call.id_bytes == 8 ? static_cast<const int64_t*>(call.topk_ids)[pair]
                              : static_cast<const int32_t*>(call.topk_ids)[pair];
  }
  bool is_local(int64_t pair) const {
    const int64_t local = id(pair) - moe.expert_offset;
    return id(pair) >= 0 && local >= 0 && local < call.local_experts;
  }
  int64_t row_of(Pair p) const { return moe.apply_router_weight_on_input ? p.token * call.top_k + p.slot : p.token; }

  // Tiles of `rows` rows, evenly filled: ceil(rows / tile_rows) of them, the first ones a row longer.
  int64_t tile_count(int64_t n) const { return ceil_div(n, kernel.tile_rows); }

  int route(char* err);
  float tensor_step(const Preparation& how, int64_t k, int64_t first, int64_t count, bool from_h) const;
  bool prepare(int lane, int slot, const qm_projection& w, const PanelMatrix& p, const Preparation& how, const float* x,
               Row* row);
  bool check_perm(const int32_t* perm, int64_t columns, int64_t expert);
  int check_perms(const char* matrix, int64_t columns, char* err) const;
  void load_rows(int64_t first, int64_t count);
  void plan_tasks();
  void gate_up(int lane, const Task& task);
  void pack_h(int lane, int64_t expert, int64_t first_tile, int64_t last_tile);
  void down(int lane, int64_t begin, int64_t end);
  void down() {
    const int64_t hidden = moe.hidden_size, range = align_up(ceil_div(hidden, column_ranges), kColumnsPerStep);
    for_each(ceil_div(hidden, range),
             [&](int lane, int64_t i) { down(lane, i * range, std::min(hidden, (i + 1) * range)); });
  }
  int64_t task_count = 0;
  int64_t bad_perm = -1;  // an expert whose act-order is no column order
};

int Layer::route(char* err) {
  std::fill(expert_begin, expert_begin + call.local_experts + 1, 0);
  for (int64_t i = 0; i < pairs; ++i) {
    const int64_t e = id(i);
    if (e < -1 || e >= moe.num_experts)
      return fail(err, QM_INVALID, "topk_ids of token %lld, slot %lld is %lld, expected -1 to %d",
                  (long long)(i / call.top_k), (long long)(i % call.top_k), (long long)e, moe.num_experts - 1);
    if (is_local(i)) ++expert_begin[e - moe.expert_offset + 1];
  }
  for (int64_t e = 0; e < call.local_experts; ++e) expert_begin[e + 1] += expert_begin[e];
  for (int64_t i = 0; i < pairs; ++i) {
    if (is_local(i))
      order[expert_begin[id(i) - moe.expert_offset]++] = {static_cast<int32_t>(i / call.top_k),
                                                          static_cast<int32_t>(i % call.top_k)};
  }
  // The fill moved each begin to its end; shift them back.
  std::copy_backward(expert_begin, expert_begin + call.local_experts, expert_begin + call.local_experts + 1);
  expert_begin[0] = 0;
  return QM_OK;
}

// The scale of a whole tensor of activations: of the finite rows at positions [first, first + count).
float Layer::tensor_step(const Preparation& how, int64_t k, int64_t first, int64_t count, bool from_h) const {
  const int skipped = from_h ? kBadInput | kBadScaled : kBadInput;  // what earlier sections found, in any order
  float largest = 0.0f;
  for (int64_t position = first; position < first + count; ++position) {
    if (__atomic_load_n(bad + order[position].token, __ATOMIC_RELAXED) & skipped) continue;
    const float* row = from_h ? h + position * k : x + row_of(order[position]) * w13.kp;
    float found = 0.0f;
    for (int64_t i = 0; i < k; ++i) {
      const float magnitude = std::fabs(how.pre_scale ? row[i] * how.pre_scale[i] : row[i]);
      found = magnitude > found || magnitude != magnitude ? magnitude : found;
    }
    if (found <= FLT_MAX) largest = std::max(largest, found);
  }
  const float step = largest / 448.0f;
  return step > 0.0f ? step : 1.0f;
}

// Scales, quantizes or rounds and gathers one row x [k] into the lane's scratch; false when it is not finite.
bool Layer::prepare(int lane, int slot, const qm_projection& w, const PanelMatrix& p, const Preparation& how,
                    const float* x, Row* row) {
  float* staged = lane_row + lane * lane_kp();
  float* own = lane_x + (lane * kMaxTileRows + slot) * lane_kp();
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
  int8_t* quantized = lane_q + (lane * kMaxTileRows + slot) * lane_kp();
  int32_t* group_sums = lane_sums + (lane * kMaxTileRows + slot) * lane_groups();
  row->q = quantized;
  row->sums = group_sums;
  if (p.stepped) {
    float* steps = lane_steps + (lane * kMaxTileRows + slot) * lane_groups();
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
    kernel.to_float(call.type, static_cast<const uint8_t*>(call.hidden_states) + token * hidden * element, hidden, row);
    std::fill(row + hidden, row + w13.kp, 0.0f);
    // A pair that no expert here has is not computed: its weight may be anything, only the token itself counts.
    const bool computed = !moe.apply_router_weight_on_input || is_local(r);
    if (moe.apply_router_weight_on_input && computed) kernel.scale(call.topk_weights[r], row, hidden);
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
    if (!finite) __atomic_fetch_or(bad + token, kBadInput, __ATOMIC_RELAXED);
  }
}

void Layer::plan_tasks() {
  const int64_t panels = w13.panels * halves(moe);
  const int64_t step_panels = kColumnsPerStep / w13.nr * halves(moe);
  const int64_t split = ceil_div(ceil_div(panels, step_panels), panel_splits) * step_panels;
  for (int64_t e = 0; e < call.local_experts; ++e)
    for (int64_t first = expert_begin[e]; first < expert_begin[e + 1];) {
      // Even blocks: a last block of a few rows would stream the weights for little.
      const int64_t left = expert_begin[e + 1] - first;
      const int64_t block = ceil_div(left, ceil_div(left, kBlockRows));
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
  const uint8_t* weights = static_cast<const uint8_t*>(call.w13) + task.expert * w13_row_bytes(moe);
  int gathers = sides13;
  Preparation how[2];
  for (int g = 0; g < gathers; ++g) {
    how[g] = preparation(moe.w13, parts13, weights, g, true);
    if (how[g].perm && !check_perm(how[g].perm, w13.k, task.expert)) return;
    if (moe.w13.activation_format == k_activation_format_fp8_tensor && how[g].stored == 0.0f)
      how[g].stored = tensor_step(how[g], w13.k, expert_begin[task.expert],
                                  expert_begin[task.expert + 1] - expert_begin[task.expert], false);
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
    uint8_t* data = lane_tiles + lane * lane_tiles_bytes() + g * kBlockRows * tile13_bytes;
    int64_t position = task.first;
    for (int64_t t = 0; t < count; ++t) {
      const int m = static_cast<int>(task.rows / count + (t < task.rows % count));
      Row list[kMaxTileRows];
      for (int i = 0; i < m; ++i, ++position) {
        const int64_t r = row_of(order[position]);
        Row row{x + r * w13.kp, q + r * w13.kp, sums + r * w13.groups(), step[r], zero_point[r], nullptr};
        if (is_expert_dependent(moe.w13)) {
          if (!prepare(lane, i, moe.w13, w13, how[g], x + r * w13.kp, &row))
            __atomic_fetch_or(bad + order[position].token, kBadScaled, __ATOMIC_RELAXED);
        } else if (perm) {
          const int64_t slot = lane * kMaxTileRows + i;
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
  float* gate = lane_out + lane * 2 * kBlockRows * kColumnsPerStep;
  float* up = sides == 2 ? gate + kBlockRows * kColumnsPerStep : gate;
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
    const uint8_t* weights = static_cast<const uint8_t*>(call.w2) + expert * w2_row_bytes(moe);
    how = preparation(moe.w2, parts2, weights, 0, regrouped);
    how.packed = true;
    if (regrouped && !check_perm(how.perm, w2.k, expert)) return;
    if (moe.w2.activation_format == k_activation_format_fp8_tensor && how.stored == 0.0f)
      how.stored = tensor_step(how, w2.k, begin, n, true);
  }
  int64_t position = begin + first_tile * (n / count) + std::min(first_tile, n % count);
  uint8_t* data = tiles2 + position * tile2_bytes;
  for (int64_t t = first_tile; t < last_tile; ++t) {
    const int m = static_cast<int>(n / count + (t < n % count));
    Row list[kMaxTileRows];
    for (int i = 0; i < m; ++i, ++position) {
      const float* row = h + position * moe.intermediate_size;
      const int64_t slot = lane * kMaxTileRows + i;
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
      if (!finite) __atomic_fetch_or(bad + order[position].token, kBadH, __ATOMIC_RELAXED);
    }
    kernel.pack_tile(w2, quantized2, list, m, data);
    data += m * tile2_bytes;
  }
}

void Layer::down(int lane, int64_t begin, int64_t end) {
  const int64_t hidden = moe.hidden_size;
  float* out = lane_out + lane * 2 * kBlockRows * kColumnsPerStep;
  for (int64_t t = 0; t < call.tokens; ++t) std::fill(y + t * hidden + begin, y + t * hidden + end, 0.0f);
  for (int64_t e = 0; e < call.local_experts; ++e) {
    const int64_t n = expert_begin[e + 1] - expert_begin[e], count = tile_count(n);
    if (n == 0) continue;
    const uint8_t* weights = static_cast<const uint8_t*>(call.w2) + e * w2_row_bytes(moe);
    int64_t tile = 0, position = expert_begin[e];
    while (tile < count) {
      // As many tiles as fit a block of rows.
      Tile tiles[kBlockRows];
      int64_t taken = 0, block = 0;
      const int64_t first = position;
      for (; tile < count; ++tile) {
        const int m = static_cast<int>(n / count + (tile < n % count));
        if (block + m > kBlockRows) break;
        tiles[taken++] = {tiles2 + position * tile2_bytes, m};
        position += m;
        block += m;
      }
      for (int64_t column = begin; column < end; column += kColumnsPerStep) {
        const int64_t columns = std::min(kColumnsPerStep, end - column);
        Product product{&w2,
                        quantized2,
                        weights + column / w2.nr * w2.stride,
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
          const float weight =
              moe.apply_router_weight_on_input ? 1.0f : call.topk_weights[pair.token * call.top_k + pair.slot];
          kernel.accumulate(weight, out + i * kColumnsPerStep, columns, y + pair.token * hidden + column);
        }
      }
    }
  }
  const int64_t element = call.type == QM_F32 ? 4 : 2;
  for (int64_t t = 0; t < call.tokens; ++t) {
    float* row = y + t * hidden + begin;
    if (bad[t]) std::fill(row, row + (end - begin), NAN);
    uint8_t* output = static_cast<uint8_t*>(call.output) + (t * hidden + begin) * element;
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
      : Adapted(l, c), Layer(Adapted::moe, Adapted::call, k), source(c.x) {
    w13 = w2;  // sections 1 and 2 need no memory
    parts13 = parts2;
    rows = tile13_bytes = max_tasks = 0;
  }
  const int32_t* column_order() const {
    if (!Layer::moe.w2.perm) return nullptr;
    return reinterpret_cast<const int32_t*>(static_cast<const uint8_t*>(Layer::call.w2) + parts2.perms);
  }
  // Rows of these tiles to f32, in the order of the packed columns, as gate_up leaves h.
  void load(int lane, int64_t first_tile, int64_t last_tile) {
    const qm_moe& m = Layer::moe;
    const int64_t k = m.intermediate_size, n = Layer::call.tokens, count = tile_count(n);
    const auto row_of_tile = [&](int64_t t) { return t * (n / count) + std::min(t, n % count); };
    const int64_t element = Layer::call.type == QM_F32 ? 4 : 2;
    const int32_t* perm = column_order();
    float* stored = lane_x + lane * kMaxTileRows * lane_kp();
    for (int64_t r = row_of_tile(first_tile); r < row_of_tile(last_tile); ++r) {
      float* row = h + r * k;
      order[r] = {static_cast<int32_t>(r), 0};
      kernel.to_float(Layer::call.type, static_cast<const uint8_t*>(source) + r * k * element, k, perm ? stored : row);
      if (perm)
        for (int64_t i = 0; i < k; ++i) row[i] = stored[perm[i]];
    }
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
  if (int status = layer.route(err)) return status;
  std::fill(layer.bad, layer.bad + call->tokens, uint8_t{0});

  constexpr int64_t kRowsPerTask = 8;
  if (layer.rows < kSerialRows)
    layer.load_rows(0, layer.rows);
  else
    layer.for_each(ceil_div(layer.rows, kRowsPerTask), [&](int, int64_t i) {
      layer.load_rows(i * kRowsPerTask, std::min(kRowsPerTask, layer.rows - i * kRowsPerTask));
    });

  layer.plan_tasks();
  layer.for_each(layer.task_count, [&](int lane, int64_t i) { layer.gate_up(lane, layer.tasks[i]); });
  if (int status = layer.check_perms("w13", moe->hidden_size, err)) return status;

  const auto pack_h = [&](int lane, int64_t e) {
    layer.pack_h(lane, e, 0, layer.tile_count(layer.expert_begin[e + 1] - layer.expert_begin[e]));
  };
  if (call->tokens < kSerialRows)
    for (int64_t e = 0; e < call->local_experts; ++e) pack_h(0, e);
  else
    layer.for_each(call->local_experts, pack_h);
  if (int status = layer.check_perms("w2", moe->intermediate_size, err)) return status;

  layer.down();
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
  layer.expert_begin[0] = 0;
  layer.expert_begin[1] = call->rows;
  std::fill(layer.bad, layer.bad + call->rows, uint8_t{0});
  // One scale for all rows means looking at all of them: once, not a tile.
  const bool whole = linear->w.activation_format == k_activation_format_fp8_tensor;
  const int64_t tiles = layer.tile_count(call->rows), step = whole || call->rows < kSerialRows ? tiles : 1;
  const auto each = [&](const auto& body) {
    layer.for_each(ceil_div(tiles, step),
                   [&](int lane, int64_t i) { body(lane, i * step, std::min(tiles, (i + 1) * step)); });
  };
  if (const int32_t* perm = layer.column_order(); perm && !layer.check_perm(perm, linear->in_features, 0))
    return fail(err, QM_INVALID, "w's act-order has a column outside 0 to %d", linear->in_features - 1);
  // All rows before any is quantized: some formats take one scale from all of them.
  each([&](int lane, int64_t first, int64_t last) { layer.load(lane, first, last); });
  each([&](int lane, int64_t first, int64_t last) { layer.pack_h(lane, 0, first, last); });
  layer.down();
  return QM_OK;
}
