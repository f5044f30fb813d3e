// A call of CachedAttention, and its plan.
#pragma once
#include <cstdint>

#include "core/tensors.h"
#include "cuda/attention/attention.h"
#include "quantmoe/quant_moe_cuda.h"

namespace quantmoe {

struct AttentionProblem {
  const qm_attention& attention;
  int32_t type;  // qm_type of qkv, output and, if cache_format is none, the caches: QM_F16 or QM_BF16
  int64_t batch, tokens, past_slots, slots;  // B, S, P and max(P, L); with a block_size R, S and twice M * block_size
  int64_t blocks = 0, positions = 0;         // with a block_size: N, K

  AttentionProblem(const qm_attention& node, const qm_tensor* inputs)
      : attention(node),
        type(inputs[CachedAttention_qkv].type),
        batch(inputs[CachedAttention_rows].shape.sizes[0]),
        tokens(inputs[CachedAttention_qkv].shape.sizes[1]) {
    const AttentionSlots found(node, inputs);
    past_slots = found.past;
    slots = found.all;
    if (!node.block_size) return;
    blocks = inputs[CachedAttention_past_key].shape.sizes[0];
    positions = inputs[CachedAttention_cos].shape.sizes[0];
  }
};

// Whether keys are their values.
inline bool is_equal(const qm_attention& node) {
  return node.compress_rate || (node.key_split && node.head_size == node.v_head_size);
}

struct AttentionPlan {
  int32_t tile_rows;   // queries in a block: heads of tokens that share their keys
  int32_t splits;      // blocks that share a tile's slots
  int32_t cluster;     // splits, if they are a cluster that adds up its results. 1: another kernel adds them up, if any
  int32_t stages;      // tiles of few rows: stages of the ring in shared memory
  int32_t wgmma;       // 1: many rows on wgmma (sm_90a); 0: mma.sync
  int32_t few_tokens;  // with a block_size: requests of up to so many tokens are tiles of few rows
  int32_t many_rows;   // with a block_size: rows of a tile of the other requests; 0: there are none
  int32_t ring;        // on wgmma: blocks of attend_ring, one for each multiprocessor; 0: attend_wide
  uint64_t queries, sums, partial, entries;  // byte offsets into the workspace
};

struct AttentionTensors : TensorsOf<qm_attention> {
  void* workspace;
};

}  // namespace quantmoe
