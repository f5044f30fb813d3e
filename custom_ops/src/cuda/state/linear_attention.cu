// CausalConv and GatedDelta: plan to kernel launches.
#include <algorithm>

#include "cuda/common/launcher.h"
#include "cuda/common/operators.h"
#include "cuda/state/linear_attention_batch.cuh"

namespace quantmoe {
namespace {

using ConvKernel = void (*)(ConvParams);
using DeltaKernel = void (*)(DeltaParams);

template <typename T>
int enqueue(const qm_conv& conv, const SequenceCall<qm_conv>& call, cudaStream_t stream, char* err) {
  const int64_t slot = call.batch * conv.channels * (conv.width - 1), live = (conv.state_window - 1) * slot;
  const ConvParams params{conv,
                          static_cast<int>(call.batch),
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
  const unsigned pairs = blocks_for(conv.channels / 2, kConvThreads), batch = static_cast<unsigned>(call.batch);
  const dim3 grid(pairs, std::max(1u, blocks_for(call.tokens, kConvTokens)), batch);
  Launcher launcher{stream};
  if constexpr (sizeof(T) == 2)
    if (conv.width <= kMostKeptConvWidth) {
      constexpr ConvKernel kernels[] = {causal_conv<T, 2>, causal_conv<T, 3>, causal_conv<T, 4>};
      constexpr ConvKernel steps[] = {causal_conv_step<T, 2>, causal_conv_step<T, 3>, causal_conv_step<T, 4>};
      const int of_width = conv.width - kLeastConvWidth;
      if (call.tokens == 1)
        launcher.run(steps[of_width], params, dim3(pairs, blocks_for(batch, kConvRows)), kConvThreads, 0, true);
      else
        launcher.run(kernels[of_width], params, grid, kConvThreads, 0, true);
      return report(launcher.error, err);
    }
  launcher.run(causal_conv_wide<T>, params, grid, kConvThreads, 0, true);
  launcher.run(causal_conv_keep<T>, params, dim3(pairs, 1, batch), kConvThreads, 0, true);
  return report(launcher.error, err);
}

template <typename T, int K, bool kPerKey>
DeltaKernel kernel_of(DeltaSteps steps, bool wide) {
  return steps == kStepsThenGate    ? gated_delta<T, K, DeltaNorm::kLater, kPerKey>
         : steps == kStepsInCluster ? gated_delta<T, K, DeltaNorm::kCluster, kPerKey>
         : wide                     ? gated_delta_batch<T, K, 128, kPerKey>
                                    : gated_delta_batch<T, K, 64, kPerKey>;
}
template <typename T>
DeltaKernel kernel_of(const qm_delta& node, DeltaSteps steps) {
  const bool wide = node.v_head_size == 128;
  if (node.decay_per_key)
    return node.k_head_size == 64 ? kernel_of<T, 64, true>(steps, wide) : kernel_of<T, 128, true>(steps, wide);
  return node.k_head_size == 64 ? kernel_of<T, 64, false>(steps, wide) : kernel_of<T, 128, false>(steps, wide);
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
  Launcher launcher{static_cast<cudaStream_t>(made.stream)};
  const auto run_steps = [&](DeltaSteps steps) {
    const unsigned heads = node.num_v_heads, batch = params.batch, blocks = node.v_head_size / kDeltaColumns;
    if (steps == kStepsInBatch)
      launcher.run(kernel_of<T>(node, steps), params, dim3(heads, batch), 32 * kBatchDeltaWarps, 0, true);
    else
      launcher.run(kernel_of<T>(node, steps), params, dim3(blocks, heads, batch), kDeltaParts * kDeltaColumns, 0, true,
                   steps == kStepsInCluster ? blocks : 1);
  };
  if (plan.chosen[kChunked]) {
    // A window's tokens one by one: chunks have no state after each.
    params.tail = node.state_window > 1 ? node.state_window : 0;
    launch_delta_chunks(params, call.type, plan.chosen[kChunked] == kChunksOnWgmma, launcher);
    params.past_state = params.present_state;
    if (params.tail) run_steps(kStepsThenGate);
  } else {
    run_steps(static_cast<DeltaSteps>(plan.chosen[kSteps]));
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
  return call.type == QM_F32    ? enqueue<float>(conv, call, stream, err)
         : call.type == QM_BF16 ? enqueue<__nv_bfloat16>(conv, call, stream, err)
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
