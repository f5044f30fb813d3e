#include "cuda/attention/attention_kernels.h"
#include "cuda/attention/attention_many.cuh"

namespace quantmoe {

AttentionKernel many_kernel(int32_t type, int keys, int values) {
#define QM_INSTANCE(DK, DV) \
  if (keys == DK && values == DV) QM_ATTENTION_INSTANCE(attend, DK, DV, false, false);
  QM_ATTENTION_SIZES(QM_INSTANCE)
  return nullptr;
}

}  // namespace quantmoe
