// GatedDelta of many tokens: its launches.
#include <algorithm>

#include "cuda/launcher.h"
#include "cuda/linear_attention_chunked.cuh"

namespace quantmoe {
namespace {

template <typename T, int K>
void launch(const DeltaParams& p, Launcher& launcher) {
  static_assert(K != 128 || 2 * sizeof(DeltaScanStage<K>) == kDeltaScanShared, "what the plan looks for");
  const int heads = p.delta.num_v_heads, all = (p.tokens + kDeltaTokens - 1) / kDeltaTokens;
  DeltaChunkParams params{p, 0, 0, p.outputs + static_cast<int64_t>(p.batch) * p.tokens * heads * p.delta.v_head_size};
  for (; params.first < all; params.first += kMostDeltaChunks) {
    params.chunks = std::min(kMostDeltaChunks, all - params.first);
    const auto grid = [&](int x) { return dim3(x, heads, static_cast<unsigned>(p.batch)); };
    launcher.run(delta_chunks<T, K>, params, grid(params.chunks), kDeltaChunkThreads, sizeof(DeltaChunkShared<K>),
                 params.first > 0);
    launcher.run(delta_scan<T, K>, params, grid(p.delta.v_head_size / kDeltaScanColumns), kDeltaChunkThreads,
                 2 * sizeof(DeltaScanStage<K>), true);
  }
}

}  // namespace

void launch_delta_chunks(const DeltaParams& p, int32_t type, Launcher& launcher) {
  const bool wide = p.delta.k_head_size == 128;
  if (type == QM_BF16)
    wide ? launch<__nv_bfloat16, 128>(p, launcher) : launch<__nv_bfloat16, 64>(p, launcher);
  else
    wide ? launch<__half, 128>(p, launcher) : launch<__half, 64>(p, launcher);
}

}  // namespace quantmoe
