// A call of the core on the threads of the session and in its memory.
#pragma once
#include <memory>

#include "common/ort_api.h"
#include "core/parallel.h"
#include "quantmoe/quant_moe.h"

namespace quantmoe {

// The session's own threads. A batch count of 0 hands out single indices dynamically; the calling thread takes part.
struct Pool {
  const OrtApi* api;
  const OrtKernelContext* context;
  OrtStatus* status = nullptr;

  static void parallel_for(void* self, qm_task task, void* arg, size_t count) {
    auto& pool = *static_cast<Pool*>(self);
    if (!pool.status) pool.status = pool.api->KernelContext_ParallelFor(pool.context, task, count, 0, arg);
  }
};

// Completes a call with the session's threads and a workspace, and makes it. Before it, prepare() runs with the threads
// in the call. std::invalid_argument: what the core or the memory refuses.
template <class Prepare>
void run_with_pool(const OrtApi* api, OrtKernelContext* context, const OrtMemoryInfo* memory, const char* op,
                   const void* node, qm_call& call, const Prepare& prepare) {
  // The API does not tell how many threads the session has. A lane that gets none of its own finds no work left.
  static const int lanes = cpus();
  Pool pool{api, context};
  call.lanes = lanes;
  call.parallel_for = Pool::parallel_for;
  call.parallel_context = &pool;

  OrtAllocator* allocator;
  check(api, api->KernelContext_GetAllocator(context, memory, &allocator));
  const std::unique_ptr<OrtAllocator, void (*)(OrtAllocator*)> owned(allocator, api->ReleaseAllocator);
  size_t size = qm_workspace(op, node, &call) + 63;
  const std::string failed = "no memory for a workspace of " + std::to_string(size) + " bytes";
  void* allocated;  // by the call that returns a status: OrtAllocator::Alloc would throw through this library
  if (OrtStatus* status = api->AllocatorAlloc(allocator, size, &allocated)) {
    const std::string message = failed + ": " + api->GetErrorMessage(status);
    api->ReleaseStatus(status);
    throw std::invalid_argument(message);
  }
  const auto release = [&](void* p) {
    if (OrtStatus* status = api->AllocatorFree(allocator, p)) api->ReleaseStatus(status);
  };
  const std::unique_ptr<void, decltype(release)> scratch(allocated, release);
  if (!std::align(64, size - 63, allocated, size)) throw std::invalid_argument(failed);
  call.workspace = allocated;
  char error[QM_ERROR_SIZE];
  prepare();
  const int status = qm_run(op, node, &call, error);
  check(api, pool.status);
  if (status) throw std::invalid_argument(error);
}

inline void run_with_pool(const OrtApi* api, OrtKernelContext* context, const OrtMemoryInfo* memory, const char* op,
                          const void* node, qm_call& call) {
  run_with_pool(api, context, memory, op, node, call, [] {});
}

}  // namespace quantmoe
