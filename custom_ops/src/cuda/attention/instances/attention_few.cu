#include "cuda/attention/attention_few.cuh"
#include "cuda/attention/attention_kernels.h"

namespace quantmoe {

AttentionKernel few_kernel(int32_t type, int keys, int values) {
#define QM_INSTANCE(DK, DV) \
  if (keys == DK && values == DV) QM_ATTENTION_INSTANCE(attend_few, DK, DV, false, false);
  QM_ATTENTION_SIZES(QM_INSTANCE)
  return nullptr;
}

}  // namespace quantmoe
