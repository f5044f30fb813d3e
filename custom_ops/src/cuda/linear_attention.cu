// CausalConv and GatedDelta: plan to kernel launches.
#include <algorithm>

#include "cuda/launcher.h"
#include "cuda/linear_attention.cuh"

namespace quantmoe {
namespace {

using ConvKernel = void (*)(ConvParams);
using DeltaKernel = void (*)(DeltaParams);

template <typename T>
int LaunchConv(const qm_cuda_conv_problem& p, const qm_cuda_conv_tensors& t, cudaStream_t stream, char* err) {
  constexpr ConvKernel kernels[] = {CausalConv<T, 2>, CausalConv<T, 3>, CausalConv<T, 4>};
  const ConvParams params{p.conv,        static_cast<int>(p.tokens), t.x, t.weight, t.bias, t.past_conv, t.rows, t.y,
                          t.present_conv};
  const int pairs = p.conv.channels / 2;
  const auto blocks = [](int64_t all, int each) { return static_cast<unsigned>((all + each - 1) / each); };
  Launcher launcher{stream};
  launcher.Run(
      kernels[p.conv.width - kLeastConvWidth], params,
      dim3(blocks(pairs, kConvThreads), std::max(1u, blocks(p.tokens, kConvTokens)), static_cast<unsigned>(p.batch)),
      kConvThreads, 0, false);
  return Report(launcher.error, err);
}

template <typename T, int K, bool kPerKey>
DeltaKernel KernelOf(const qm_cuda_delta_plan& plan) {
  return plan.cluster > 1                   ? GatedDelta<T, K, kFewDeltaColumns, DeltaNorm::kCluster, kPerKey>
         : plan.columns == kFewDeltaColumns ? GatedDelta<T, K, kFewDeltaColumns, DeltaNorm::kLater, kPerKey>
         : plan.columns == 64               ? GatedDelta<T, K, 64, DeltaNorm::kWhole, kPerKey>
                                            : GatedDelta<T, K, 128, DeltaNorm::kWhole, kPerKey>;
}
template <typename T>
DeltaKernel KernelOf(const qm_delta& d, const qm_cuda_delta_plan& plan) {
  if (d.decay_per_key) return d.k_head_size == 64 ? KernelOf<T, 64, true>(plan) : KernelOf<T, 128, true>(plan);
  return d.k_head_size == 64 ? KernelOf<T, 64, false>(plan) : KernelOf<T, 128, false>(plan);
}

template <typename T>
int LaunchDelta(const qm_cuda_delta_problem& p, const qm_cuda_delta_plan& plan, const qm_cuda_delta_tensors& t,
                cudaStream_t stream, char* err) {
  const qm_delta& d = p.delta;
  const DeltaParams params{d,
                           static_cast<int>(p.batch),
                           static_cast<int>(p.tokens),
                           t.qkv,
                           t.a,
                           t.b,
                           t.z,
                           t.a_log,
                           t.dt_bias,
                           t.norm,
                           t.past_state,
                           t.rows,
                           t.y,
                           t.present_state,
                           static_cast<float*>(t.workspace)};
  Launcher launcher{stream};
  if (plan.chunked)
    LaunchDeltaChunks(params, p.type, launcher);
  else
    launcher.Run(KernelOf<T>(d, plan), params,
                 dim3(d.v_head_size / plan.columns, d.num_v_heads, static_cast<unsigned>(p.batch)),
                 kDeltaParts * plan.columns, 0, false, plan.cluster);
  const int64_t warps = kGateThreads / 32, items = p.batch * p.tokens * d.num_v_heads;
  if (plan.workspace_bytes)
    launcher.Run(DeltaGate<T>, params, dim3(static_cast<unsigned>((items + warps - 1) / warps)), kGateThreads, 0, true);
  return Report(launcher.error, err);
}

}  // namespace
}  // namespace quantmoe

using namespace quantmoe;

extern "C" int qm_cuda_launch_conv(const qm_cuda_conv_problem* problem, const qm_cuda_conv_tensors* tensors,
                                   void* stream, char* err) {
  if (int status = qm_cuda_validate_conv(problem, err)) return status;
  if (problem->batch == 0) return QM_OK;
  cudaStream_t s = static_cast<cudaStream_t>(stream);
  return problem->type == QM_BF16 ? LaunchConv<__nv_bfloat16>(*problem, *tensors, s, err)
                                  : LaunchConv<__half>(*problem, *tensors, s, err);
}

extern "C" int qm_cuda_launch_delta(const qm_cuda_delta_problem* problem, const qm_cuda_delta_plan* plan,
                                    const qm_cuda_delta_tensors* tensors, void* stream, char* err) {
  if (problem->batch == 0) return QM_OK;
  cudaStream_t s = static_cast<cudaStream_t>(stream);
  return problem->type == QM_BF16 ? LaunchDelta<__nv_bfloat16>(*problem, *plan, *tensors, s, err)
                                  : LaunchDelta<__half>(*problem, *plan, *tensors, s, err);
}
