#include "cuda/attention_kernels.h"
#include "cuda/attention_latent.cuh"

namespace quantmoe {

AttentionKernel LatentKernel(int32_t type, int stages) {
  if (stages == kLatentStages) QM_ATTENTION_INSTANCE(AttendLatent, kLatentStages);
  QM_ATTENTION_INSTANCE(AttendLatent, kFewLatentStages);
}
AttentionKernel LatentWideKernel(int32_t type) {
  return type == QM_BF16 ? AttendLatentWide<__nv_bfloat16> : AttendLatentWide<__half>;
}
AttentionKernel LatentAppendKernel(int32_t type) {
  return type == QM_BF16 ? LatentAppend<__nv_bfloat16> : LatentAppend<__half>;
}

}  // namespace quantmoe
