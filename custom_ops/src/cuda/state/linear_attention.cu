// CausalConv and GatedDelta: plan to kernel launches.
#include <algorithm>

#include "cuda/common/launcher.h"
#include "cuda/state/linear_attention.cuh"

namespace quantmoe {
namespace {

using ConvKernel = void (*)(ConvParams);
using DeltaKernel = void (*)(DeltaParams);

template <typename T>
int launch_conv(const qm_cuda_conv_problem& problem, const qm_cuda_conv_tensors& tensors, cudaStream_t stream,
                char* err) {
  constexpr ConvKernel kernels[] = {causal_conv<T, 2>, causal_conv<T, 3>, causal_conv<T, 4>};
  const int64_t slot = problem.batch * problem.conv.channels * (problem.conv.width - 1),
                live = (problem.conv.state_window - 1) * slot;
  const ConvParams params{problem.conv,
                          static_cast<int>(problem.tokens),
                          static_cast<int>(x_of(problem.conv).size / 2),
                          static_cast<const T*>(tensors.x) + x_of(problem.conv).offset,
                          tensors.weight,
                          tensors.bias,
                          static_cast<const T*>(tensors.past_conv) + live,
                          tensors.rows,
                          tensors.y,
                          static_cast<T*>(tensors.present_conv) + live,
                          slot,
                          tensors.present_conv != tensors.past_conv};
  const int pairs = problem.conv.channels / 2;
  Launcher launcher{stream};
  launcher.run(kernels[problem.conv.width - kLeastConvWidth], params,
               dim3(blocks_for(pairs, kConvThreads), std::max(1u, blocks_for(problem.tokens, kConvTokens)),
                    static_cast<unsigned>(problem.batch)),
               kConvThreads, 0, true);
  return report(launcher.error, err);
}

template <typename T, int K, bool kPerKey>
DeltaKernel kernel_of(const qm_cuda_delta_plan& plan) {
  return plan.cluster > 1                   ? gated_delta<T, K, kFewDeltaColumns, DeltaNorm::kCluster, kPerKey>
         : plan.columns == kFewDeltaColumns ? gated_delta<T, K, kFewDeltaColumns, DeltaNorm::kLater, kPerKey>
         : plan.columns == 64               ? gated_delta<T, K, 64, DeltaNorm::kWhole, kPerKey>
                                            : gated_delta<T, K, 128, DeltaNorm::kWhole, kPerKey>;
}
template <typename T>
DeltaKernel kernel_of(const qm_delta& node, const qm_cuda_delta_plan& plan) {
  if (node.decay_per_key) return node.k_head_size == 64 ? kernel_of<T, 64, true>(plan) : kernel_of<T, 128, true>(plan);
  return node.k_head_size == 64 ? kernel_of<T, 64, false>(plan) : kernel_of<T, 128, false>(plan);
}

template <typename T>
DeltaKernel later_of(const qm_delta& node) {
  return node.k_head_size == 64 ? gated_delta<T, 64, kFewDeltaColumns, DeltaNorm::kLater, false>
                                : gated_delta<T, 128, kFewDeltaColumns, DeltaNorm::kLater, false>;
}

template <typename T>
int launch_delta(const qm_cuda_delta_problem& problem, const qm_cuda_delta_plan& plan,
                 const qm_cuda_delta_tensors& tensors, cudaStream_t stream, char* err) {
  const qm_delta& node = problem.delta;
  const int64_t slot = problem.batch * node.num_v_heads * node.k_head_size * node.v_head_size,
                live = (node.state_window - 1) * slot;
  DeltaParams params{node,
                     static_cast<int>(problem.batch),
                     static_cast<int>(problem.tokens),
                     tensors.qkv,
                     static_cast<const T*>(tensors.a) + a_of(node).offset,
                     static_cast<const T*>(tensors.b) + b_of(node).offset,
                     static_cast<const T*>(tensors.z) + z_of(node).offset,
                     a_of(node).size,
                     b_of(node).size,
                     z_of(node).size,
                     tensors.a_log,
                     tensors.dt_bias,
                     tensors.norm,
                     tensors.past_state + live,
                     tensors.rows,
                     tensors.y,
                     tensors.present_state + live,
                     static_cast<float*>(tensors.workspace),
                     slot,
                     tensors.present_state != tensors.past_state,
                     0};
  const auto grid = [&](int columns) { return dim3(node.v_head_size / columns, node.num_v_heads, params.batch); };
  Launcher launcher{stream};
  if (plan.chunked) {
    // A window's tokens one by one: chunks have no state after each.
    params.tail = node.state_window > 1 ? node.state_window : 0;
    launch_delta_chunks(params, problem.type, plan.chunked == kChunksOnWgmma, launcher);
    params.past_state = params.present_state;
    if (params.tail)
      launcher.run(later_of<T>(node), params, grid(kFewDeltaColumns), kDeltaParts * kFewDeltaColumns, 0, true);
  } else {
    launcher.run(kernel_of<T>(node, plan), params, grid(plan.columns), kDeltaParts * plan.columns, 0, true,
                 plan.cluster);
  }
  if (plan.workspace_bytes) {
    constexpr int kHeads = kGateThreads / 32;
    launcher.run(delta_gate<T>, params, dim3(params.tokens, (node.num_v_heads + kHeads - 1) / kHeads, params.batch),
                 kGateThreads, 0, true);
  }
  return report(launcher.error, err);
}

}  // namespace
}  // namespace quantmoe

using namespace quantmoe;

extern "C" int qm_cuda_launch_conv(const qm_cuda_conv_problem* problem, const qm_cuda_conv_tensors* tensors,
                                   void* stream, char* err) {
  if (int status = qm_cuda_validate_conv(problem, err)) return status;
  if (problem->batch == 0) return QM_OK;
  cudaStream_t s = static_cast<cudaStream_t>(stream);
  return problem->type == QM_BF16 ? launch_conv<__nv_bfloat16>(*problem, *tensors, s, err)
                                  : launch_conv<__half>(*problem, *tensors, s, err);
}

extern "C" int qm_cuda_launch_delta(const qm_cuda_delta_problem* problem, const qm_cuda_delta_plan* plan,
                                    const qm_cuda_delta_tensors* tensors, void* stream, char* err) {
  if (problem->batch == 0) return QM_OK;
  cudaStream_t s = static_cast<cudaStream_t>(stream);
  return problem->type == QM_BF16 ? launch_delta<__nv_bfloat16>(*problem, *plan, *tensors, s, err)
                                  : launch_delta<__half>(*problem, *plan, *tensors, s, err);
}
