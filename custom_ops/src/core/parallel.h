// Dynamic scheduling over a caller's parallel_for.
#pragma once
#include <atomic>
#include <cstdint>
#include <string>

#include "quantmoe/quant_moe.h"

namespace quantmoe {

// As qm_library's. For tests: `allowed` above 0 replaces the affinity, and `root` is the folder with proc and sys.
int cpus(int allowed = 0, const std::string& root = "");

// A qm_parallel_for for callers that have none.
void start_threads(void* context, qm_task task, void* arg, size_t count);

// Runs body(lane, index) for index 0..count-1. Work is pulled from one counter. So a pool with fewer threads than lanes
// still balances, and so does a pool that splits the range statically. Bodies that run at one time have different
// lanes, each below `lanes`. The counter also orders memory, whatever the caller's pool guarantees. The bodies see what
// was written before the call, and the caller sees what they write.
template <typename Body>
void parallel(int lanes, qm_parallel_for parallel_for, void* context, int64_t count, const Body& body) {
  if (lanes <= 1 || count <= 1) {
    for (int64_t i = 0; i < count; ++i) body(0, i);
    return;
  }
  struct Shared {
    std::atomic<int64_t> next{0};
    int64_t count;
    const Body& body;
  } shared{{}, count, body};
  shared.next.store(0, std::memory_order_release);
  (parallel_for ? parallel_for : start_threads)(
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
