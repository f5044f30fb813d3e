#include "cuda/attention_kernels.h"
#include "cuda/attention_wgmma.cuh"

namespace quantmoe {

AttentionKernel WideKernel(int32_t type, int keys, int values) {
#define QM_INSTANCE(DK, DV) QM_ATTENTION_INSTANCE(AttendWide, DK, DV)
  QM_ATTENTION_WGMMA_SIZES(QM_INSTANCE)
  return nullptr;
}

}  // namespace quantmoe
