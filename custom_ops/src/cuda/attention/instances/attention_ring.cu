#include "cuda/attention/attention_kernels.h"
#include "cuda/attention/attention_ring.cuh"

namespace quantmoe {

RingKernel ring_kernel(int32_t type, int keys, int values) {
#define QM_TILE(DK, DV) \
  if (keys == DK && values == DV) QM_ATTENTION_INSTANCE(attend_ring, DK, DV, ring_rows(DK));
  QM_TILE(64, 64)
  QM_ATTENTION_LARGE_SIZES(QM_TILE)
  return nullptr;
}

}  // namespace quantmoe
