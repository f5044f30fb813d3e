#include "cuda/attention/attention_equal.cuh"
#include "cuda/attention/attention_kernels.h"
#include "cuda/attention/attention_latent.cuh"

namespace quantmoe {

AttentionKernel equal_kernel(int32_t type, int stages) {
  if (stages == kLatentStages) QM_ATTENTION_INSTANCE(attend_latent, kLatentStages, EqualTile);
  QM_ATTENTION_INSTANCE(attend_latent, kFewLatentStages, EqualTile);
}
AttentionKernel equal_wide_kernel(int32_t type) { QM_ATTENTION_INSTANCE(attend_latent_wide, EqualTile); }
AttentionKernel equal_append_kernel(int32_t type) {
  return type == QM_BF16 ? equal_append<__nv_bfloat16> : equal_append<__half>;
}

}  // namespace quantmoe
