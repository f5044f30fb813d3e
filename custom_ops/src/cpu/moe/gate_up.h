// h = act(gate, up) of every pair. A task is (expert, token block, panel range), and packs its tiles itself.
#pragma once
#include "cpu/moe/prepare.h"

namespace quantmoe {

class GateUp {
 public:
  ExpertMatrix w13;

  GateUp(const LayerCall& layer, const qm_moe& moe, const MoECall& call);
  // Of a divided layer.
  void plan();
  int64_t most_tasks() const { return max_tasks_; }
  bool prepares_rows() const { return w13.is_expert_dependent() || w13.node.perm; }
  void lay_out(Arena& arena);
  int run(const ActivationRows& rows, const RowScratch& scratch, const Hidden& to, uint8_t* bad_tokens, char* err);

 private:
  struct Task {
    int32_t expert;
    int64_t first, rows;         // positions
    int64_t panel, panel_count;  // of w13, counted over both halves
  };
  struct LayerInputs {  // of one run
    const ActivationRows& rows;
    const RowScratch& scratch;
    const Hidden& to;
    uint8_t* bad_tokens;
  };
  using Tiles = TokenTile[kBlockRows];

  int64_t step_panels() const { return kColumnsPerStep / w13.panel.nr * halves(moe_); }
  int64_t side_bytes() const { return layer_.block_rows * w13.tile_bytes; }
  int plan_tasks();
  int prepare_sides(const Task& task, Preparation (&how)[2]);
  void pack(int lane, const Task& task, const Preparation& how, const LayerInputs& of, uint8_t* data,
            Tiles& tiles) const;
  ActivationRow prepare(int lane, int i, int64_t position, const Preparation& how, const LayerInputs& of) const;
  void multiply(const Task& task, int64_t panel, int64_t panels, int sides, const Tiles (&tiles)[2], float* gate,
                float* up) const;
  void run_task(int lane, const Task& task, const LayerInputs& of);

  const LayerCall& layer_;
  const qm_moe& moe_;
  int64_t panel_splits_ = 1, max_tasks_ = 0;
  Task* tasks_{};          // [max_tasks_]
  uint8_t* lane_tiles_{};  // [lanes, sides, block_rows, tile_bytes]
};

}  // namespace quantmoe
