// TokenRows: a block a row of the batch.
#pragma once
#include "cuda/common/ptx.cuh"
#include "cuda/router/router.h"

namespace quantmoe {

struct RowsParams {
  const int64_t* mask;  // [batch, length]
  int* rows;            // [batch, 3]
  int64_t* last;        // [batch, logits]
  int batch, new_tokens, past, length, logits;
};

// The sum over a block; all threads get it. `parts` is free again after the next barrier.
__device__ inline int block_sum(int value, int* parts) {
  value = __reduce_add_sync(~0u, value);
  __syncthreads();
  if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = value;
  __syncthreads();
  return __reduce_add_sync(~0u, parts[threadIdx.x % 32]);
}

__global__ void __launch_bounds__(kRowsThreads) token_rows(const __grid_constant__ RowsParams params) {
  static_assert(kRowsThreads == 1024, "a warp adds up the warps");
  __shared__ int parts[32], most;
  launch_dependents();
  wait_for_previous();
  const int thread = threadIdx.x, length = params.length, count = params.new_tokens;
  // The new tokens' columns end here: with the mask's where the cache grows, else with the last that any row has set.
  int end = length > params.past ? max(length, count) : count;
  if (length <= params.past) {
    if (thread == 0) most = 0;
    __syncthreads();
    for (int to = length; to > count && most == 0; to -= kRowsThreads) {
      __syncthreads();  // all have read most
      const int column = to - 1 - thread;
      bool any = false;
      for (int b = 0; b < params.batch && column >= 0 && !any; ++b)
        any = params.mask[int64_t{b} * length + column] != 0;
      if (any) atomicMax(&most, column + 1);
      __syncthreads();
    }
    end = max(end, most);
  }
  const int64_t* own = params.mask + static_cast<int64_t>(blockIdx.x) * length;
  int seen = 0, begin = count, before = 0;
  for (int i = thread; i < count && length > 0; i += kRowsThreads)
    if (own[min(end - count + i, length - 1)] != 0) ++seen, begin = min(begin, i);
  for (int i = thread; i < min(end - count, length); i += kRowsThreads) before += own[i] != 0;
  seen = block_sum(seen, parts);
  before = block_sum(before, parts);
  begin = __reduce_min_sync(~0u, begin);
  __syncthreads();
  if (thread % 32 == 0) parts[thread / 32] = begin;
  __syncthreads();
  begin = __reduce_min_sync(~0u, parts[thread % 32]);
  if (thread == 0) {
    int* row = params.rows + 3 * blockIdx.x;
    row[0] = min(begin, count - seen), row[1] = seen, row[2] = before;
  }
  const int end_of_row = min(begin, count - seen) + seen;
  for (int i = thread; i < params.logits; i += kRowsThreads)
    params.last[static_cast<int64_t>(blockIdx.x) * params.logits + i] = max(end_of_row - params.logits + i, 0);
}

}  // namespace quantmoe
