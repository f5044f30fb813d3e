// What the device and the host both read of experts outside the device's memory.
#pragma once
#include "quantmoe/quant_moe_cuda.h"

namespace quantmoe {

// Experts that calls needed, each once a call.
struct CacheCounts {
  uint64_t hits, misses;  // with a slot, without
  uint64_t staged;        // misses that were copied to staging
  uint64_t not_copied;    // misses that were read in host memory
  uint64_t computed;      // misses that the host multiplied
};
// The beginning of a cache_state; zeros are an empty one. Then int32 slot_of[experts] and expert_of[slots], plus one,
// and uint32 used[slots], the step of the last use.
struct CacheState {
  CacheCounts counts;
  uint32_t step, padding;
};
inline size_t cache_state_bytes(int64_t experts, int64_t slots) {
  return sizeof(CacheState) + 4 * static_cast<size_t>(experts + 2 * slots);
}

// A layer's places in a qm_cuda_host.
struct HostPlaces {
  qm_cuda_host* request;
  float *x, *weights;
  int32_t* ids;
  float* y;
};
inline HostPlaces host_places(qm_cuda_host* host, int64_t hidden_size) {
  float* const x = reinterpret_cast<float*>(host + 1);
  return {host, x, host->weights, host->ids, x + QM_CUDA_HOST_TOKENS * hidden_size};
}

}  // namespace quantmoe
