// A call of SparseIndexer, and its plan. Kernels: indexer.cuh.
#pragma once
#include <algorithm>
#include <cstdint>

#include "core/numbers.h"
#include "core/tensors.h"
#include "quantmoe/quant_moe_cuda.h"

namespace quantmoe {

constexpr int kIndexThreads = 256, kIndexKeys = 256;  // of a block: a warp has 32 keys
constexpr int kIndexTokens = 32;                      // that a block gives scores, at most
constexpr int kIndexColumns = 16;                     // heads that are multiplied at once; a group has a multiple
constexpr int kMostIndexHeads = 128;                  // of all groups, with those that fill them up
constexpr int kIndexUnit = 32;                        // slots that a warp gives one score, the best, where blocks allow
constexpr int kSelectThreads = 512, kMostSelectCluster = 8;
constexpr int64_t kMostIndexScores = int64_t{1} << 24;  // of the tokens that have scores at a time

struct IndexerProblem {
  const qm_indexer& node;
  int32_t type;  // of queries and keys: QM_F16 or QM_BF16
  int64_t batch, tokens, past_slots, slots;

  IndexerProblem(const qm_indexer& node, const qm_tensor* inputs)
      : node(node),
        type(inputs[SparseIndexer_query].type),
        batch(inputs[SparseIndexer_query].shape.sizes[0]),
        tokens(inputs[SparseIndexer_query].shape.sizes[1]),
        past_slots(inputs[SparseIndexer_past_keys].shape.sizes[2]),
        slots(std::max(past_slots, inputs[SparseIndexer_attention_mask].shape.sizes[1])) {}

  // Every step() slots the last one has a score.
  int step() const { return node.best_slot ? 1 : node.block_size; }
  int list_size() const { return node.top_k + step() - 1; }  // a token that sees no more slots selects all
  // Slots that have one score: of blocks that have their best slot's score, a part.
  int unit() const { return node.best_slot && node.block_size % kIndexUnit == 0 ? kIndexUnit : step(); }
  // Heads that are multiplied: a group's with those that fill it up, or a column for each group that has one head.
  bool one_head() const { return node.num_heads == node.num_groups; }
  int group_columns() const {
    return one_head() ? 1 : static_cast<int>(align_up(node.num_heads / node.num_groups, kIndexColumns));
  }
  int columns() const { return static_cast<int>(align_up(node.num_groups * group_columns(), 8)); }
  // Tokens of a row that a block gives scores; such runs of a row, and of all.
  int run() const { return static_cast<int>(std::clamp<int64_t>(tokens, 1, kIndexTokens)); }
  int64_t runs_of_row() const { return ceil_div(tokens, int64_t{run()}); }
  int64_t runs() const { return batch * runs_of_row(); }
  // Whether any token may see more slots than its list has.
  bool scores_any() const { return slots > list_size(); }
  int64_t stride() const { return align_up(ceil_div(slots, int64_t{unit()}), int64_t{4}); }  // of a token's scores
  int64_t scores_of_run() const { return run() * node.num_groups * stride(); }
};

struct IndexerPlan {
  int32_t runs;     // that have scores at a time
  int32_t cluster;  // blocks that select a list
};

}  // namespace quantmoe
