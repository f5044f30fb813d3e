#include "cuda/attention/attention_kernels.h"
#include "cuda/attention/attention_latent.cuh"

namespace quantmoe {

AttentionKernel latent_kernel(int32_t type, int stages) {
  if (stages == kLatentStages) QM_ATTENTION_INSTANCE(attend_latent, kLatentStages);
  QM_ATTENTION_INSTANCE(attend_latent, kFewLatentStages);
}
AttentionKernel latent_wide_kernel(int32_t type) {
  return type == QM_BF16 ? attend_latent_wide<__nv_bfloat16> : attend_latent_wide<__half>;
}
AttentionKernel latent_append_kernel(int32_t type) {
  return type == QM_BF16 ? latent_append<__nv_bfloat16> : latent_append<__half>;
}

}  // namespace quantmoe
