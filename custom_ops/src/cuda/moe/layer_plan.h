// The plan of QuantMoE and QuantLinear: which kernels a launch runs, and where in the workspace they read and write.
#pragma once
#include <cstdint>

#include "core/tensors.h"
#include "quantmoe/quant_moe_cuda.h"

namespace quantmoe {

// Which kernels a launch runs.
enum PlanPath {
  kPathDecode = 0,  // gate_up reads topk_ids itself; down owns output tiles and sums the experts in registers
  kPathStream = 1,  // route, gate_up, down, combine on mma.sync
  kPathWgmma = 2,   // route, gate_up, down, combine on wgmma (sm_90a)
  // e4m3 times e4m3 (sm_90a): route, quantize, gate_up, which quantizes h or is followed by a quantize, down, combine
  kPathFp8 = 3,
  kPathDense = 4,  // a linear of more than a few rows on wgmma (sm_90a): one kernel
};

// What a step does. x: the call's activations, or what the step before made of them.
enum StepKind {
  kStepRound = 0,           // x in the values of an activation format, or as codes
  kStepGather = 1,          // x in act-order, a row a pair
  kStepRoute = 2,           // the lists of tiles and of sorted pairs; x in the order in which wgmma reads it
  kStepQuantize = 3,        // x as e4m3 codes, in the order of sorted pairs
  kStepGateUp = 4,          // a product
  kStepRoundHidden = 5,     // as kStepRound, between the products
  kStepQuantizeHidden = 6,  // as kStepQuantize, between the products
  kStepDown = 7,            // a product
  kStepCombine = 8,         // the sum of a token's experts
  kStepLinear = 9,          // a linear's product
  kStepResolve = 10,        // which experts are in a slot, which are to be copied, and where to
  kStepFill = 11,           // the copies
  kStepAddHost = 12,        // adds what the host has multiplied, for which it waits
};
constexpr int kMostSteps = 10;
constexpr uint64_t kCallers = UINT64_MAX;  // in place of an offset: the caller's activations, or output

// One kernel.
struct PlanStep {
  int32_t kind;  // StepKind
  int32_t grid, grid_y, block, block_y, shared_bytes;
  int32_t cluster;    // blocks of a cluster; in a product they share one output tile, each with a part of K
  int32_t dependent;  // may start while the kernel before it in the stream still runs
  // A product's row of src/cuda/gemm/instances.inc. panels: 16-row panels that a warp holds at once (wgmma and
  // dense: a block). n_tiles: 8-token tiles that a warp holds at once (dense: a tile). stages: of a warp's ring of
  // weights; 2 stages have two units of K each.
  int32_t panels, n_tiles, stages;
  // Warps that split K; the others take other panels. 0: a block's warps share all its units of K. wgmma: the parts of
  // K that blocks share, also in the step that adds them up.
  int32_t warps_k;
  int32_t packed;    // mma.sync: tokens are codes and scales, e4m3 (sm_89 and later) or nvfp4 (sm_120a). In a step that
                     // rounds: it makes them
  int32_t weighted;  // multiplies by the router's weight
  int32_t ordered;   // kStepRoute: every run has one order of tiles
  // Rows of tokens or pairs, and their columns of 16 bits.
  int32_t in_rows, in_columns, out_rows, out_columns;
  uint64_t in, out;  // byte offsets into the workspace, or kCallers
};

struct LayerPlan {
  int32_t path, step_count;
  PlanStep steps[kMostSteps];
  int32_t max_tiles, down_max_tiles;  // capacities of the lists of tiles
  // Byte offsets into the workspace. down_tiles equals tiles if both products read one list. A cache has `where`, the
  // address of each expert's row of w13, then of w2, and `copies`, the number of copies, then the copies. A host has
  // `kept`: the number of qm_cuda_host::asked, and 16 bytes later int32 ids [tokens, top_k] of the device's pairs.
  uint64_t tiles, down_tiles, sorted_pairs, positions, where, copies, kept, workspace_bytes;
};

// A call's sizes.
struct MoEProblem {
  const qm_moe& moe;
  int32_t type;      // qm_type of hidden_states and output
  int32_t id_bytes;  // of topk_ids; 0: of another type
  int64_t tokens, top_k, local_experts;
  int32_t slots = 0, staging = 0, host_share = 0, host_layer = 0;  // as qm_cuda_experts'

  MoEProblem(const qm_moe& node, const qm_cuda_call& call) : moe(node) {
    const qm_tensor& ids = call.inputs[QuantMoE_topk_ids];
    type = call.inputs[QuantMoE_hidden_states].type;
    id_bytes = ids.type == QM_INT64 ? 8 : ids.type == QM_INT32 ? 4 : 0;
    tokens = rows_of(ids.shape);
    top_k = last_of(ids.shape);
    local_experts = call.inputs[QuantMoE_w13].shape.sizes[0];
    if (!call.experts) return;
    slots = call.experts->slots;
    staging = call.experts->staging;
    host_share = call.experts->host_share;
    host_layer = call.experts->host_layer;
  }
};
struct LinearProblem {
  const qm_linear& linear;
  int32_t type;  // qm_type of x and y
  int64_t rows;

  LinearProblem(const qm_linear& node, const qm_tensor* inputs)
      : linear(node), type(inputs[QuantLinear_x].type), rows(rows_of(inputs[QuantLinear_x].shape)) {}
};

}  // namespace quantmoe
