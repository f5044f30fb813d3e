// StateSpace of many tokens: its launches.
#include "cuda/state/chunk_scan.cuh"
#include "cuda/state/state_space_chunked.cuh"

namespace quantmoe {
namespace {

template <typename T, int N>
void launch(const SpaceParams& space, int batch, bool wgmma, Launcher& launcher) {
  const int64_t outputs = int64_t{batch} * space.tokens * width_of(space.space);
  launch_chunks<T, N>(space, batch, space.outputs + outputs, space_chunks<T, N>, sizeof(SpaceChunkShared<N>), wgmma,
                      launcher);
}
template <typename T>
void launch(const SpaceParams& space, int batch, bool wgmma, Launcher& launcher) {
  space.space.state_size == 128 ? launch<T, 128>(space, batch, wgmma, launcher)
                                : launch<T, 64>(space, batch, wgmma, launcher);
}

}  // namespace

void launch_space_chunks(const SpaceParams& params, int batch, int32_t type, bool wgmma, Launcher& launcher) {
  type == QM_BF16 ? launch<__nv_bfloat16>(params, batch, wgmma, launcher)
                  : launch<__half>(params, batch, wgmma, launcher);
}

}  // namespace quantmoe
