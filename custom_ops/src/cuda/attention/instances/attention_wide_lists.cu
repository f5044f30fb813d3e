#include "cuda/attention/attention_kernels.h"
#include "cuda/attention/attention_wgmma.cuh"

namespace quantmoe {

AttentionKernel wide_lists_kernel(int32_t type, int size, bool codes) {
#define QM_INSTANCE(DK, DV)                                                                       \
  if (size == DK && codes) QM_ATTENTION_INSTANCE(attend_wide, DK, DV, kWideListRows, true, true); \
  if (size == DK) QM_ATTENTION_INSTANCE(attend_wide, DK, DV, kWideListRows, false, true);
  QM_ATTENTION_LIST_SIZES(QM_INSTANCE)
  return nullptr;
}

}  // namespace quantmoe
