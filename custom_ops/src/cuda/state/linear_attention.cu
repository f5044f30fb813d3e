// CausalConv and GatedDelta: plan to kernel launches.
#include <algorithm>

#include "cuda/common/launcher.h"
#include "cuda/common/operators.h"
#include "cuda/state/linear_attention.cuh"

namespace quantmoe {
namespace {

using ConvKernel = void (*)(ConvParams);
using DeltaKernel = void (*)(DeltaParams);

template <typename T>
int enqueue(const qm_conv& conv, const SequenceCall<qm_conv>& call, cudaStream_t stream, char* err) {
  constexpr ConvKernel kernels[] = {causal_conv<T, 2>, causal_conv<T, 3>, causal_conv<T, 4>};
  const int64_t slot = call.batch * conv.channels * (conv.width - 1), live = (conv.state_window - 1) * slot;
  const ConvParams params{conv,
                          static_cast<int>(call.tokens),
                          static_cast<int>(x_of(conv).size / 2),
                          static_cast<const T*>(call.x) + x_of(conv).offset,
                          call.weight,
                          call.bias,
                          static_cast<const T*>(call.past_conv) + live,
                          call.rows,
                          call.y,
                          static_cast<T*>(call.present_conv) + live,
                          slot,
                          call.present_conv != call.past_conv};
  const int pairs = conv.channels / 2;
  Launcher launcher{stream};
  launcher.run(kernels[conv.width - kLeastConvWidth], params,
               dim3(blocks_for(pairs, kConvThreads), std::max(1u, blocks_for(call.tokens, kConvTokens)),
                    static_cast<unsigned>(call.batch)),
               kConvThreads, 0, true);
  return report(launcher.error, err);
}

template <typename T, int K, bool kPerKey>
DeltaKernel kernel_of(const qm_cuda_node_plan& plan) {
  const int columns = plan.chosen[kColumns];
  return plan.chosen[kCluster] > 1     ? gated_delta<T, K, kFewDeltaColumns, DeltaNorm::kCluster, kPerKey>
         : columns == kFewDeltaColumns ? gated_delta<T, K, kFewDeltaColumns, DeltaNorm::kLater, kPerKey>
         : columns == 64               ? gated_delta<T, K, 64, DeltaNorm::kWhole, kPerKey>
                                       : gated_delta<T, K, 128, DeltaNorm::kWhole, kPerKey>;
}
template <typename T>
DeltaKernel kernel_of(const qm_delta& node, const qm_cuda_node_plan& plan) {
  if (node.decay_per_key) return node.k_head_size == 64 ? kernel_of<T, 64, true>(plan) : kernel_of<T, 128, true>(plan);
  return node.k_head_size == 64 ? kernel_of<T, 64, false>(plan) : kernel_of<T, 128, false>(plan);
}

template <typename T>
DeltaKernel later_of(const qm_delta& node) {
  return node.k_head_size == 64 ? gated_delta<T, 64, kFewDeltaColumns, DeltaNorm::kLater, false>
                                : gated_delta<T, 128, kFewDeltaColumns, DeltaNorm::kLater, false>;
}

template <typename T>
int enqueue(const qm_delta& node, const SequenceCall<qm_delta>& call, const qm_cuda_node_plan& plan,
            const qm_cuda_call& made, char* err) {
  const int64_t slot = call.batch * node.num_v_heads * node.k_head_size * node.v_head_size,
                live = (node.state_window - 1) * slot;
  DeltaParams params{node,
                     static_cast<int>(call.batch),
                     static_cast<int>(call.tokens),
                     call.qkv,
                     static_cast<const T*>(call.a) + a_of(node).offset,
                     static_cast<const T*>(call.b) + b_of(node).offset,
                     static_cast<const T*>(call.z) + z_of(node).offset,
                     a_of(node).size,
                     b_of(node).size,
                     z_of(node).size,
                     call.a_log,
                     call.dt_bias,
                     call.norm,
                     call.past_state + live,
                     call.rows,
                     call.y,
                     call.present_state + live,
                     static_cast<float*>(made.workspace),
                     slot,
                     call.present_state != call.past_state,
                     0};
  const auto grid = [&](int columns) { return dim3(node.v_head_size / columns, node.num_v_heads, params.batch); };
  Launcher launcher{static_cast<cudaStream_t>(made.stream)};
  if (plan.chosen[kChunked]) {
    // A window's tokens one by one: chunks have no state after each.
    params.tail = node.state_window > 1 ? node.state_window : 0;
    launch_delta_chunks(params, call.type, plan.chosen[kChunked] == kChunksOnWgmma, launcher);
    params.past_state = params.present_state;
    if (params.tail)
      launcher.run(later_of<T>(node), params, grid(kFewDeltaColumns), kDeltaParts * kFewDeltaColumns, 0, true);
  } else {
    launcher.run(kernel_of<T>(node, plan), params, grid(plan.chosen[kColumns]), kDeltaParts * plan.chosen[kColumns], 0,
                 true, plan.chosen[kCluster]);
  }
  if (plan.workspace_bytes) {
    constexpr int kHeads = kGateThreads / 32;
    launcher.run(delta_gate<T>, params, dim3(params.tokens, (node.num_v_heads + kHeads - 1) / kHeads, params.batch),
                 kGateThreads, 0, true);
  }
  return report(launcher.error, err);
}

}  // namespace

int launch_conv(const void* node, const qm_cuda_node_plan&, const qm_cuda_call& made, char* err) {
  const qm_conv& conv = *static_cast<const qm_conv*>(node);
  const SequenceCall<qm_conv> call{made.inputs, made.outputs};
  if (call.batch == 0) return QM_OK;
  const cudaStream_t stream = static_cast<cudaStream_t>(made.stream);
  return call.type == QM_BF16 ? enqueue<__nv_bfloat16>(conv, call, stream, err)
                              : enqueue<__half>(conv, call, stream, err);
}

int launch_delta(const void* node, const qm_cuda_node_plan& plan, const qm_cuda_call& made, char* err) {
  const qm_delta& delta = *static_cast<const qm_delta*>(node);
  const SequenceCall<qm_delta> call{made.inputs, made.outputs};
  if (call.batch == 0) return QM_OK;
  return call.type == QM_BF16 ? enqueue<__nv_bfloat16>(delta, call, plan, made, err)
                              : enqueue<__half>(delta, call, plan, made, err);
}

}  // namespace quantmoe
