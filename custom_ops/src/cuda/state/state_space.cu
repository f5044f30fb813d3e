// StateSpace: plan to kernel launches.
#include "cuda/common/launcher.h"
#include "cuda/common/operators.h"
#include "cuda/state/state_space.cuh"

namespace quantmoe {
namespace {

template <typename T>
int enqueue(const qm_space& node, const SequenceCall<qm_space>& call, const qm_cuda_node_plan& plan,
            const qm_cuda_call& made, char* err) {
  const int64_t slot = call.batch * node.num_heads * node.state_size * node.head_size,
                live = (node.state_window - 1) * slot;
  SpaceParams params{node,
                     static_cast<int>(call.tokens),
                     call.xbc,
                     static_cast<const T*>(call.dt) + dt_of(node).offset,
                     static_cast<const T*>(call.z) + z_of(node).offset,
                     dt_of(node).size,
                     z_of(node).size,
                     call.a_log,
                     call.dt_bias,
                     call.d,
                     call.norm,
                     call.past_state + live,
                     call.rows,
                     call.y,
                     call.present_state + live,
                     static_cast<float*>(made.workspace),
                     slot,
                     call.present_state != call.past_state,
                     0};
  const unsigned batch = static_cast<unsigned>(call.batch);
  Launcher launcher{static_cast<cudaStream_t>(made.stream)};
  if (plan.chosen[kChunked]) {
    // A window's tokens one by one: chunks have no state after each.
    params.tail = node.state_window > 1 ? node.state_window : 0;
    launch_space_chunks(params, static_cast<int>(batch), call.type, plan.chosen[kChunked] == kChunksOnWgmma, launcher);
    params.past_state = params.present_state;
  }
  if (!plan.chosen[kChunked] || params.tail)
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

int launch_space(const void* node, const qm_cuda_node_plan& plan, const qm_cuda_call& made, char* err) {
  const qm_space& space = *static_cast<const qm_space*>(node);
  const SequenceCall<qm_space> call{made.inputs, made.outputs};
  if (call.batch == 0) return QM_OK;
  return call.type == QM_BF16 ? enqueue<__nv_bfloat16>(space, call, plan, made, err)
                              : enqueue<__half>(space, call, plan, made, err);
}

}  // namespace quantmoe
