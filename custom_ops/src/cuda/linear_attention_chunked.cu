// GatedDelta of many tokens: its launches.
#include <algorithm>

#include "cuda/launcher.h"
#include "cuda/linear_attention_chunked.cuh"

namespace quantmoe {
namespace {

template <typename T, int K>
void Launch(const DeltaParams& p, Launcher& launcher) {
  static_assert(K != 128 || 2 * sizeof(DeltaScanStage<K>) == kDeltaScanShared, "what the plan looks for");
  const int heads = p.delta.num_v_heads, all = (p.tokens + kDeltaTokens - 1) / kDeltaTokens;
  DeltaChunkParams params{p, 0, 0, p.outputs + static_cast<int64_t>(p.batch) * p.tokens * heads * p.delta.v_head_size};
  for (; params.first < all; params.first += kMostDeltaChunks) {
    params.chunks = std::min(kMostDeltaChunks, all - params.first);
    const auto grid = [&](int x) { return dim3(x, heads, static_cast<unsigned>(p.batch)); };
    launcher.Run(DeltaChunks<T, K>, params, grid(params.chunks), kDeltaChunkThreads, sizeof(DeltaChunkShared<K>),
                 params.first > 0);
    launcher.Run(DeltaScan<T, K>, params, grid(p.delta.v_head_size / kDeltaScanColumns), kDeltaChunkThreads,
                 2 * sizeof(DeltaScanStage<K>), true);
  }
}

}  // namespace

void LaunchDeltaChunks(const DeltaParams& p, int32_t type, Launcher& launcher) {
  const bool wide = p.delta.k_head_size == 128;
  if (type == QM_BF16)
    wide ? Launch<__nv_bfloat16, 128>(p, launcher) : Launch<__nv_bfloat16, 64>(p, launcher);
  else
    wide ? Launch<__half, 128>(p, launcher) : Launch<__half, 64>(p, launcher);
}

}  // namespace quantmoe
