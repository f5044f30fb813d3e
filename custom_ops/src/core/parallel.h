// Dynamic scheduling over a caller's parallel_for.
#pragma once
#include <atomic>
#include <cstdint>

#include "quantmoe/quant_moe.h"

namespace quantmoe {

// Runs body(lane, index) for index 0..count-1. Work is pulled from one counter. So a pool with fewer threads than lanes
// still balances, and so does a pool that splits the range statically. Bodies that run at one time have different
// lanes, each below `lanes`. The counter also orders memory, whatever the caller's pool guarantees. The bodies see what
// was written before the call, and the caller sees what they write.
template <typename Body>
void parallel(int lanes, qm_parallel_for parallel_for, void* context, int64_t count, const Body& body) {
  if (!parallel_for || lanes <= 1 || count <= 1) {
    for (int64_t i = 0; i < count; ++i) body(0, i);
    return;
  }
  struct Shared {
    std::atomic<int64_t> next{0};
    int64_t count;
    const Body& body;
  } shared{{}, count, body};
  shared.next.store(0, std::memory_order_release);
  parallel_for(
      context,
      [](void* arg, size_t lane) {
        auto& s = *static_cast<Shared*>(arg);
        for (int64_t i; (i = s.next.fetch_add(1, std::memory_order_acq_rel)) < s.count;)
          s.body(static_cast<int>(lane), i);
      },
      &shared, static_cast<size_t>(count < lanes ? count : lanes));
  (void)shared.next.load(std::memory_order_acquire);
}

}  // namespace quantmoe
