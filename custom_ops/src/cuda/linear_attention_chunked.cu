// GatedDelta of many tokens: its launches.
#include <algorithm>

#include "cuda/launcher.h"
#include "cuda/linear_attention_chunked.cuh"

namespace quantmoe {
namespace {

template <typename T, int K>
void launch(const DeltaParams& delta, Launcher& launcher) {
  static_assert(K != 128 || 2 * sizeof(DeltaScanStage<K>) == kDeltaScanShared, "what the plan looks for");
  const int heads = delta.delta.num_v_heads, all = (delta.tokens + kDeltaTokens - 1) / kDeltaTokens;
  DeltaChunkParams params{
      delta, 0, 0, delta.outputs + static_cast<int64_t>(delta.batch) * delta.tokens * heads * delta.delta.v_head_size};
  for (; params.first < all; params.first += kMostDeltaChunks) {
    params.chunks = std::min(kMostDeltaChunks, all - params.first);
    const auto grid = [&](int x) { return dim3(x, heads, static_cast<unsigned>(delta.batch)); };
    launcher.run(delta_chunks<T, K>, params, grid(params.chunks), kDeltaChunkThreads, sizeof(DeltaChunkShared<K>),
                 params.first > 0);
    launcher.run(delta_scan<T, K>, params, grid(delta.delta.v_head_size / kDeltaScanColumns), kDeltaChunkThreads,
                 2 * sizeof(DeltaScanStage<K>), true);
  }
}

}  // namespace

void launch_delta_chunks(const DeltaParams& params, int32_t type, Launcher& launcher) {
  const bool wide = params.delta.k_head_size == 128;
  if (type == QM_BF16)
    wide ? launch<__nv_bfloat16, 128>(params, launcher) : launch<__nv_bfloat16, 64>(params, launcher);
  else
    wide ? launch<__half, 128>(params, launcher) : launch<__half, 64>(params, launcher);
}

}  // namespace quantmoe
