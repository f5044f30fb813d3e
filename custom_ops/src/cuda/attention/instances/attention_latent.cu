#include "cuda/attention/attention_kernels.h"
#include "cuda/attention/attention_latent.cuh"

namespace quantmoe {

AttentionKernel latent_kernel(int32_t type, int stages, bool lists) {
  if (stages == kLatentStages) {
    if (lists) QM_ATTENTION_INSTANCE(attend_latent, kLatentStages, LatentTile<true>);
    QM_ATTENTION_INSTANCE(attend_latent, kLatentStages, LatentTile<false>);
  }
  if (lists) QM_ATTENTION_INSTANCE(attend_latent, kFewLatentStages, LatentTile<true>);
  QM_ATTENTION_INSTANCE(attend_latent, kFewLatentStages, LatentTile<false>);
}
AttentionKernel latent_wide_kernel(int32_t type, bool lists) {
  if (lists) QM_ATTENTION_INSTANCE(attend_latent_wide, LatentTile<true>);
  QM_ATTENTION_INSTANCE(attend_latent_wide, LatentTile<false>);
}
AttentionKernel latent_append_kernel(int32_t type) {
  return type == QM_BF16 ? latent_append<__nv_bfloat16> : latent_append<__half>;
}

}  // namespace quantmoe
