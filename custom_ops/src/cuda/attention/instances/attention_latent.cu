#include "cuda/attention/attention_kernels.h"
#include "cuda/attention/attention_latent.cuh"

namespace quantmoe {

AttentionKernel latent_kernel(int32_t type, int stages, bool lists) {
  if (stages == kLatentStages) {
    if (lists) QM_ATTENTION_INSTANCE(attend_latent, kLatentStages, true);
    QM_ATTENTION_INSTANCE(attend_latent, kLatentStages, false);
  }
  if (lists) QM_ATTENTION_INSTANCE(attend_latent, kFewLatentStages, true);
  QM_ATTENTION_INSTANCE(attend_latent, kFewLatentStages, false);
}
AttentionKernel latent_wide_kernel(int32_t type, bool lists) {
  if (lists) QM_ATTENTION_INSTANCE(attend_latent_wide, true);
  QM_ATTENTION_INSTANCE(attend_latent_wide, false);
}
AttentionKernel latent_append_kernel(int32_t type) {
  return type == QM_BF16 ? latent_append<__nv_bfloat16> : latent_append<__half>;
}

}  // namespace quantmoe
