#include "cuda/attention/attention_kernels.h"
#include "cuda/attention/attention_wgmma.cuh"

namespace quantmoe {

AttentionKernel wide_kernel(int32_t type, int keys, int values, int rows) {
#define QM_SMALL_TILE(DK, DV) \
  if (keys == DK && values == DV && rows == 64) QM_ATTENTION_INSTANCE(attend_wide, DK, DV, 64, false, false);
  if (keys == 64 && values == 64 && rows == 128) QM_ATTENTION_INSTANCE(attend_wide, 64, 64, 128, false, false);
  QM_ATTENTION_LARGE_SIZES(QM_SMALL_TILE)
  return nullptr;
}

}  // namespace quantmoe
