#include "cuda/attention/attention_kernels.h"
#include "cuda/attention/attention_wgmma.cuh"

namespace quantmoe {

AttentionKernel wide_codes_kernel(int32_t type, int keys, int values, int rows) {
#define QM_TILE(DK, DV) \
  if (keys == DK && values == DV && rows == 128) QM_ATTENTION_INSTANCE(attend_wide, DK, DV, 128, true, false);
#define QM_SMALL_TILE(DK, DV) \
  if (keys == DK && values == DV && rows == 64) QM_ATTENTION_INSTANCE(attend_wide, DK, DV, 64, true, false);
  QM_TILE(64, 64)
  QM_ATTENTION_LARGE_SIZES(QM_TILE)
  QM_ATTENTION_LARGE_SIZES(QM_SMALL_TILE)
  return nullptr;
}

}  // namespace quantmoe
