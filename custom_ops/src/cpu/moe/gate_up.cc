#include "cpu/moe/gate_up.h"

#include <cstring>

namespace quantmoe {

GateUp::GateUp(const LayerCall& layer, const qm_moe& moe, const MoECall& call)
    : w13(moe.w13, w13_matrix(moe), w13_parts(moe), call.w13,
          moe.w13.perm == 2 || moe.w13.pre_scale == 2 || (has_input_scales(moe.w13) && moe.gated) ? 2 : 1),
      layer_(layer),
      moe_(moe) {}

void GateUp::plan() {
  const int64_t pairs = layer_.pairs(), experts = layer_.local_experts;
  const int64_t blocks = std::min(pairs, experts + pairs / kBlockRows);
  const int64_t steps = ceil_div(w13.panel.panels * w13.panel.nr, layer_.columns_of_task());
  // Enough tasks to balance lanes at the end, few enough that packing a block's tiles again for each is noise.
  const int64_t wanted = layer_.most_lanes > 1 ? 16 * layer_.most_lanes : 1;
  panel_splits_ = std::clamp<int64_t>(blocks > 0 ? ceil_div(wanted, blocks) : 1, 1, steps);
  max_tasks_ = std::min(pairs, experts + pairs / layer_.block_rows) * panel_splits_;
}

void GateUp::lay_out(Arena& arena) {
  w13.largest = arena.take<uint32_t>(layer_.local_experts * w13.sides);
  tasks_ = arena.take<Task>(max_tasks_);
  lane_tiles_ = arena.take<uint8_t>(layer_.lanes * w13.sides * side_bytes());
}

int GateUp::run(const ActivationRows& rows, const RowScratch& scratch, const Hidden& to, uint8_t* bad_tokens,
                char* err) {
  const LayerInputs inputs{rows, scratch, to, bad_tokens};
  layer_.for_each(plan_tasks(), [&](int lane, int64_t i) { run_task(lane, tasks_[i], inputs); });
  return w13.check_perms("w13", moe_.expert_offset, err);
}

int GateUp::plan_tasks() {
  const int64_t panels = w13.panel.panels * halves(moe_);
  const int64_t least = layer_.columns_of_task() / w13.panel.nr * halves(moe_);
  const int64_t split = ceil_div(ceil_div(panels, least), panel_splits_) * least;
  const int64_t* const begin = layer_.routes.begin;
  int count = 0;
  for (int64_t expert = layer_.first_expert; expert < layer_.end_expert; ++expert)
    for (int64_t first = begin[expert]; first < begin[expert + 1];) {
      // Even blocks: a last block of a few rows would stream the weights for little.
      const int64_t left = begin[expert + 1] - first;
      const int64_t block = ceil_div(left, ceil_div(left, layer_.block_rows));
      for (int64_t panel = 0; panel < panels; panel += split)
        tasks_[count++] = {static_cast<int32_t>(expert), first, block, panel, std::min(split, panels - panel)};
      first += block;
    }
  return count;
}

// How many sides (gate, up) of the expert read tiles of their own; 0: its act-order is none.
int GateUp::prepare_sides(const Task& task, Preparation (&how)[2]) {
  for (int side = 0; side < w13.sides; ++side) {
    how[side] = w13.known_preparation(task.expert, side, true);
    if (how[side].perm && !w13.check_perm(how[side].perm, task.expert)) return 0;
  }
  if (w13.sides == 1) return 1;
  const auto same = [&](const void* a, const void* b) {
    return a == b || (a && b && std::memcmp(a, b, static_cast<size_t>(4 * w13.panel.k)) == 0);
  };
  const bool alike =
      same(how[0].pre_scale, how[1].pre_scale) && same(how[0].perm, how[1].perm) && how[0].stored == how[1].stored;
  return alike ? 1 : 2;
}

ActivationRow GateUp::prepare(int lane, int i, int64_t position, const Preparation& how,
                              const LayerInputs& inputs) const {
  const Pair pair = layer_.routes.order[position];
  const int64_t index = inputs.rows.index(pair);
  if (inputs.rows.bad[index]) mark(inputs.to.bad + position);
  ActivationRow row;
  if (w13.is_expert_dependent()) {
    if (!prepare_row(layer_.kernel, w13, how, inputs.rows.x + index * w13.panel.kp, inputs.scratch.at(lane, i), &row)) {
      mark(inputs.bad_tokens + pair.token);
      mark(inputs.to.bad + position);
    }
    return row;
  }
  row = inputs.rows.rows[index];
  if (how.perm) gather_row(layer_.kernel, w13, how.perm, inputs.scratch.at(lane, i), &row);
  return row;
}

// The task's rows as one side reads them.
void GateUp::pack(int lane, const Task& task, const Preparation& how, const LayerInputs& inputs, uint8_t* data,
                  Tiles& tiles) const {
  int64_t position = task.first;
  const int64_t count = layer_.tile_count(task.rows);
  for (int64_t tile_index = 0; tile_index < count; ++tile_index) {
    const int tokens = LayerCall::rows_of_tile(task.rows, count, tile_index);
    ActivationRow list[kMaxTileRows];
    for (int i = 0; i < tokens; ++i, ++position) list[i] = prepare(lane, i, position, how, inputs);
    layer_.kernel.pack_tile(w13.panel, w13.quantized, list, tokens, data);
    tiles[tile_index] = {data, tokens};
    data += tokens * w13.tile_bytes;
  }
}

// Panels of both halves, which alternate: at once where they read the same tiles, every other panel each otherwise.
void GateUp::multiply(const Task& task, int64_t panel, int64_t panels, int sides, const Tiles (&tiles)[2], float* gate,
                      float* up) const {
  const PanelMatrix& matrix = w13.panel;
  const int64_t count = layer_.tile_count(task.rows);
  const uint8_t* weights = w13.row(task.expert) + panel * matrix.stride;
  if (sides == 1)
    return layer_.kernel.multiply(
        {&matrix, w13.quantized, weights, panels, tiles[0], count, gate, kColumnsPerStep, up - gate, halves(moe_)});
  for (int64_t i = 0; i < panels; ++i)
    layer_.kernel.multiply({&matrix, w13.quantized, weights + i * matrix.stride, 1, tiles[i % 2], count,
                            (i % 2 ? up : gate) + i / 2 * matrix.nr, kColumnsPerStep, 0, 1});
}

void GateUp::run_task(int lane, const Task& task, const LayerInputs& inputs) {
  Preparation how[2];
  const int sides = prepare_sides(task, how);
  if (!sides) return;
  Tiles tiles[2];
  uint8_t* const data = lane_tiles_ + lane * w13.sides * side_bytes();
  for (int side = 0; side < sides; ++side) pack(lane, task, how[side], inputs, data + side * side_bytes(), tiles[side]);

  float* const gate = layer_.out(lane);
  float* const up = moe_.gated ? gate + layer_.block_rows * kColumnsPerStep : gate;
  for (int64_t panel = task.panel; panel < task.panel + task.panel_count; panel += step_panels()) {
    const int64_t panels = std::min(step_panels(), task.panel + task.panel_count - panel);
    multiply(task, panel, panels, sides, tiles, gate, up);
    const int64_t width = moe_.intermediate_size, column = panel / halves(moe_) * w13.panel.nr;
    const int64_t columns = std::min(panels / halves(moe_) * w13.panel.nr, width - column);
    for (int64_t i = 0; i < task.rows; ++i)
      layer_.kernel.activate(moe_, moe_.gated ? gate + i * kColumnsPerStep : nullptr, up + i * kColumnsPerStep, columns,
                             inputs.to.h + (task.first + i) * width + column);
  }
}

}  // namespace quantmoe
