// The pairs of a slice, sorted by expert.
#pragma once
#include "cpu/moe/layer.h"

namespace quantmoe {

// Experts of a call's pairs, counted from the slice's first.
struct ExpertIds {
  const qm_moe& moe;
  const MoECall& call;
  const LayerCall& layer;

  int64_t at(int64_t pair) const {
    pair += layer.first_token * call.top_k;
    return call.id_bytes == 8 ? static_cast<const int64_t*>(call.topk_ids)[pair]
                              : static_cast<const int32_t*>(call.topk_ids)[pair];
  }
  // The row of w13 and w2, -1 where another slice of the experts, or none, has the pair.
  int64_t local(int64_t pair) const {
    const int64_t id = at(pair), expert = id - moe.expert_offset;
    return id >= 0 && expert >= 0 && expert < call.local_experts ? expert : -1;
  }
};

// Of all slices, before the first is taken.
int check_ids(const ExpertIds& ids, char* err);
void route(const ExpertIds& ids, Routes& routes);

}  // namespace quantmoe
