// StateSpace: plan to kernel launches.
#include "cuda/common/launcher.h"
#include "cuda/state/state_space.cuh"

namespace quantmoe {
namespace {

template <typename T>
int launch_space(const qm_cuda_space_problem& problem, const qm_cuda_space_plan& plan,
                 const qm_cuda_space_tensors& tensors, cudaStream_t stream, char* err) {
  const qm_space& node = problem.space;
  const int64_t slot = problem.batch * node.num_heads * node.state_size * node.head_size,
                live = (node.state_window - 1) * slot;
  SpaceParams params{node,
                     static_cast<int>(problem.tokens),
                     tensors.xbc,
                     static_cast<const T*>(tensors.dt) + dt_of(node).offset,
                     static_cast<const T*>(tensors.z) + z_of(node).offset,
                     dt_of(node).size,
                     z_of(node).size,
                     tensors.a_log,
                     tensors.dt_bias,
                     tensors.d,
                     tensors.norm,
                     tensors.past_state + live,
                     tensors.rows,
                     tensors.y,
                     tensors.present_state + live,
                     static_cast<float*>(tensors.workspace),
                     slot,
                     tensors.present_state != tensors.past_state,
                     0};
  const unsigned batch = static_cast<unsigned>(problem.batch);
  Launcher launcher{stream};
  if (plan.chunked) {
    // A window's tokens one by one: chunks have no state after each.
    params.tail = node.state_window > 1 ? node.state_window : 0;
    launch_space_chunks(params, static_cast<int>(batch), problem.type, plan.chunked == kChunksOnWgmma, launcher);
    params.past_state = params.present_state;
  }
  if (!plan.chunked || params.tail)
    launcher.run(node.state_size == 64    ? state_space<T, 64>
                 : node.state_size == 128 ? state_space<T, 128>
                                          : state_space<T, 256>,
                 params, dim3(node.head_size / kSpaceColumns, node.num_heads, batch), kSpaceThreads, 0, true);
  if (params.tokens) {
    const int threads = (node.norm_size / kSpaceGateEach + 31) / 32 * 32;
    launcher.run(space_gate<T>, params,
                 dim3(params.tokens, static_cast<unsigned>(width_of(node) / node.norm_size), batch), threads, 0, true);
  }
  return report(launcher.error, err);
}

}  // namespace
}  // namespace quantmoe

using namespace quantmoe;

extern "C" int qm_cuda_launch_space(const qm_cuda_space_problem* problem, const qm_cuda_space_plan* plan,
                                    const qm_cuda_space_tensors* tensors, void* stream, char* err) {
  if (problem->batch == 0) return QM_OK;
  cudaStream_t s = static_cast<cudaStream_t>(stream);
  return problem->type == QM_BF16 ? launch_space<__nv_bfloat16>(*problem, *plan, *tensors, s, err)
                                  : launch_space<__half>(*problem, *plan, *tensors, s, err);
}
