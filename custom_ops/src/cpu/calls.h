// Calls of QuantMoE, QuantLinear and CachedAttention, read from a qm_call.
#pragma once
#include "core/tensors.h"

namespace quantmoe {

// What every call has of its threads and memory.
struct CallThreads {
  qm_type type;  // T
  void* workspace;
  int lanes;
  qm_parallel_for parallel_for;
  void* parallel_context;
  explicit CallThreads(const qm_call& call)
      : type(static_cast<qm_type>(call.inputs->type)),
        workspace(call.workspace),
        lanes(call.lanes),
        parallel_for(call.parallel_for),
        parallel_context(call.parallel_context) {}
};

struct MoECall : CallThreads, TensorsOf<qm_moe> {
  int id_bytes;
  int64_t tokens, top_k, local_experts;
  qm_read_experts read_experts;
  void* experts_context;
  MoECall(const qm_moe&, const qm_call& call)
      : CallThreads(call),
        TensorsOf<qm_moe>{call.inputs, call.outputs},
        id_bytes(call.inputs[QuantMoE_topk_ids].type == QM_INT64 ? 8 : 4),
        tokens(rows_of(call.inputs[QuantMoE_topk_ids].shape)),
        top_k(last_of(call.inputs[QuantMoE_topk_ids].shape)),
        local_experts(call.inputs[QuantMoE_w13].shape.sizes[0]),
        read_experts(call.read_experts),
        experts_context(call.experts_context) {}
};

struct LinearCall : CallThreads, TensorsOf<qm_linear> {
  int64_t rows;
  LinearCall(const qm_linear&, const qm_call& call)
      : CallThreads(call),
        TensorsOf<qm_linear>{call.inputs, call.outputs},
        rows(rows_of(call.inputs[QuantLinear_x].shape)) {}
};

// With a block_size a row is a request, and past_slots and slots count its blocks' slots.
struct AttentionCall : CallThreads, TensorsOf<qm_attention> {
  qm_type cache_type;                     // QM_F32 or QM_F16
  int64_t batch, tokens;                  // B, S; with a block_size R, S
  int64_t past_slots, slots;              // P, and present's slots, at least P; with a block_size M * block_size
  int64_t blocks, positions;              // with a block_size: N, K
  int64_t selected_lists, selected_size;  // with `selected`: G, E
  AttentionCall(const qm_attention& node, const qm_call& call)
      : CallThreads(call),
        TensorsOf<qm_attention>{call.inputs, call.outputs},
        cache_type(static_cast<qm_type>(call.inputs[CachedAttention_past_key].type)),
        batch(call.inputs[CachedAttention_rows].shape.sizes[0]),
        tokens(call.inputs[CachedAttention_qkv].shape.sizes[1]) {
    const AttentionSlots found(node, call.inputs);
    past_slots = found.past;
    slots = found.all;
    blocks = call.inputs[CachedAttention_past_key].shape.sizes[0];
    positions = call.inputs[CachedAttention_cos].shape.sizes[0];
    selected_lists = call.inputs[CachedAttention_selected].shape.sizes[2];
    selected_size = call.inputs[CachedAttention_selected].shape.sizes[3];
  }
};

}  // namespace quantmoe
