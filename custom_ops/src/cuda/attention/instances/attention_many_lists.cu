#include "cuda/attention/attention_kernels.h"
#include "cuda/attention/attention_many.cuh"

namespace quantmoe {

AttentionKernel many_lists_kernel(int32_t type, int size, bool codes) {
#define QM_INSTANCE(DK, DV)                                                   \
  if (size == DK && codes) QM_ATTENTION_INSTANCE(attend, DK, DV, true, true); \
  if (size == DK) QM_ATTENTION_INSTANCE(attend, DK, DV, false, true);
  QM_ATTENTION_LIST_SIZES(QM_INSTANCE)
  return nullptr;
}

}  // namespace quantmoe
