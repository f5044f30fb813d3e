// GatedDelta of many tokens: its launches.
#include "cuda/state/chunk_scan.cuh"
#include "cuda/state/linear_attention_chunked.cuh"

namespace quantmoe {
namespace {

template <typename T, int K>
void launch(const DeltaParams& delta, bool wgmma, Launcher& launcher) {
  const qm_delta& node = delta.delta;
  const int64_t outputs = static_cast<int64_t>(delta.batch) * delta.tokens * node.num_v_heads * node.v_head_size;
  launch_chunks<T, K>(delta, delta.batch, delta.outputs + outputs, delta_chunks<T, K>, sizeof(DeltaChunkShared<K>),
                      wgmma, launcher);
}
template <typename T>
void launch(const DeltaParams& delta, bool wgmma, Launcher& launcher) {
  delta.delta.k_head_size == 128 ? launch<T, 128>(delta, wgmma, launcher) : launch<T, 64>(delta, wgmma, launcher);
}

}  // namespace

void launch_delta_chunks(const DeltaParams& params, int32_t type, bool wgmma, Launcher& launcher) {
  type == QM_BF16 ? launch<__nv_bfloat16>(params, wgmma, launcher) : launch<__half>(params, wgmma, launcher);
}

}  // namespace quantmoe
