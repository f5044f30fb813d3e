#include "cpu/moe/route.h"

namespace quantmoe {

int check_ids(const ExpertIds& ids, char* err) {
  const int64_t top_k = ids.call.top_k, experts = ids.moe.num_experts;
  for (int64_t i = 0; i < ids.call.tokens * top_k; ++i)
    if (const int64_t id = ids.at(i); id < -1 || id >= experts)
      return fail(err, QM_INVALID, "topk_ids of token %lld, slot %lld is %lld, expected -1 to %lld",
                  (long long)(i / top_k), (long long)(i % top_k), (long long)id, (long long)(experts - 1));
  return QM_OK;
}

void route(const ExpertIds& ids, Routes& routes) {
  const int64_t experts = ids.layer.local_experts, pairs = ids.layer.pairs(), top_k = ids.layer.top_k;
  int64_t* const begin = routes.begin;
  std::fill(begin, begin + experts + 1, 0);
  for (int64_t i = 0; i < pairs; ++i)
    if (const int64_t e = ids.local(i); e >= 0) ++begin[e + 1];
  for (int64_t e = 0; e < experts; ++e) begin[e + 1] += begin[e];
  for (int64_t i = 0; i < pairs; ++i)
    if (const int64_t e = ids.local(i); e >= 0)
      routes.order[begin[e]++] = {static_cast<int32_t>(i / top_k), static_cast<int32_t>(i % top_k)};
  // That moved each begin to its end; shift them back.
  std::copy_backward(begin, begin + experts, begin + experts + 1);
  begin[0] = 0;
}

}  // namespace quantmoe
