// GatedDelta of many tokens: its launches.
#include <algorithm>

#include "cuda/launcher.h"
#include "cuda/linear_attention_scan.cuh"

namespace quantmoe {
namespace {

template <typename T, int K>
void launch(const DeltaParams& delta, bool wgmma, Launcher& launcher) {
  constexpr int kShared = sizeof(DeltaScanShared<K>) + 1024;
  static_assert(K != 128 || kShared == kDeltaScanShared, "what the plan looks for");
  const int heads = delta.delta.num_v_heads, all = (delta.tokens + kDeltaTokens - 1) / kDeltaTokens;
  DeltaChunkParams params{
      delta, 0, 0, delta.outputs + static_cast<int64_t>(delta.batch) * delta.tokens * heads * delta.delta.v_head_size};
  for (; params.first < all; params.first += kMostDeltaChunks) {
    params.chunks = std::min(kMostDeltaChunks, all - params.first);
    const auto grid = [&](int x) { return dim3(x, heads, static_cast<unsigned>(delta.batch)); };
    launcher.run(delta_chunks<T, K>, params, grid(params.chunks), kDeltaChunkThreads, sizeof(DeltaChunkShared<K>),
                 params.first > 0);
    launcher.run(wgmma ? delta_scan_wgmma<T, K> : delta_scan<T, K>, params,
                 grid(delta.delta.v_head_size / kDeltaScanColumns), kDeltaChunkThreads, kShared, true);
  }
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
