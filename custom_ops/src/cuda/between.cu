// MoERouter, AddRMSNorm and TokenRows: problem to kernel launches.
#include <algorithm>
#include <iterator>

#include "cuda/launcher.h"
#include "cuda/norm.cuh"
#include "cuda/router.cuh"
#include "cuda/rows.cuh"

namespace quantmoe {
namespace {

constexpr unsigned Blocks(int64_t all, int64_t each) { return static_cast<unsigned>((all + each - 1) / each); }

template <typename T>
int LaunchRouter(const qm_cuda_router_problem& p, const qm_cuda_router_plan& plan, const qm_cuda_router_tensors& t,
                 cudaStream_t stream, char* err) {
  const qm_router& r = p.router;
  const unsigned tokens = static_cast<unsigned>(p.tokens);
  RouterParams params{t.hidden_states,
                      t.weight,
                      t.bias,
                      t.correction_bias,
                      t.topk_ids,
                      t.topk_weights,
                      static_cast<float*>(t.workspace),
                      static_cast<int>(p.tokens),
                      r.hidden_size,
                      RoutingOf(r)};
  Launcher launcher{stream};
  if (plan.path == kRouterCluster) {
    constexpr void (*kernels[])(RouterParams) = {RouterCluster<T, 1>, RouterCluster<T, 2>, RouterCluster<T, 3>,
                                                 RouterCluster<T, 4>, RouterCluster<T, 5>};
    static_assert(std::size(kernels) == kRouterMostTiles);
    launcher.Run(kernels[RouterTilesOf(params.routing) - 1], params, dim3(kRouterBlocks, Blocks(tokens, kRouterTokens)),
                 kRouterThreads, RouterShared(params.routing), true, kRouterBlocks);
    return Report(launcher.error, err);
  }
  if (plan.path == kRouterTiles)
    launcher.Run(RouterTiles<T>, params,
                 dim3(Blocks(p.tokens, kRouterTileTokens), Blocks(LogitsOf(params.routing), kRouterTileExperts)),
                 kRouterTileThreads, kRouterTileBytes, true);
  else
    launcher.Run(r.hidden_size % 8 ? RouterRows<T, false> : RouterRows<T, true>, params,
                 dim3(tokens, Blocks(LogitsOf(params.routing), kRouterRowsThreads / 32)), kRouterRowsThreads, 0, true);
  const SelectParams select{params.logits, t.correction_bias, t.topk_ids, t.topk_weights, params.routing};
  launcher.Run(MoeSelect<float>, select, dim3(tokens), 32, 4 * SelectWords(params.routing), true);
  return Report(launcher.error, err);
}

template <typename T>
int LaunchNorm(const qm_cuda_norm_problem& p, const qm_cuda_norm_tensors& t, cudaStream_t stream, char* err) {
  const NormParams params{t.x, t.residual, t.weight, t.y, t.sum, static_cast<int>(p.columns), p.norm.norm_epsilon};
  const int each = p.columns % 8 ? 1 : 8;
  const int threads = std::min(kMostNormThreads, static_cast<int>((p.columns / each + 31) / 32 * 32));
  Launcher launcher{stream};
  launcher.Run(each == 1 ? AddNorm<T, 1> : AddNorm<T, 8>, params, dim3(static_cast<unsigned>(p.rows)), threads, 0,
               true);
  return Report(launcher.error, err);
}

}  // namespace
}  // namespace quantmoe

using namespace quantmoe;

extern "C" int qm_cuda_launch_router(const qm_cuda_router_problem* problem, const qm_cuda_router_plan* plan,
                                     const qm_cuda_router_tensors* tensors, void* stream, char* err) {
  if (problem->tokens == 0) return QM_OK;
  cudaStream_t s = static_cast<cudaStream_t>(stream);
  return problem->type == QM_BF16 ? LaunchRouter<__nv_bfloat16>(*problem, *plan, *tensors, s, err)
                                  : LaunchRouter<__half>(*problem, *plan, *tensors, s, err);
}

extern "C" int qm_cuda_launch_norm(const qm_cuda_norm_problem* problem, const qm_cuda_norm_tensors* tensors,
                                   void* stream, char* err) {
  if (int status = qm_cuda_validate_norm(problem, err)) return status;
  if (problem->rows == 0) return QM_OK;
  cudaStream_t s = static_cast<cudaStream_t>(stream);
  return problem->type == QM_BF16 ? LaunchNorm<__nv_bfloat16>(*problem, *tensors, s, err)
                                  : LaunchNorm<__half>(*problem, *tensors, s, err);
}

extern "C" int qm_cuda_launch_rows(const qm_cuda_rows_problem* problem, const qm_cuda_rows_tensors* tensors,
                                   void* stream, char* err) {
  if (int status = qm_cuda_validate_rows(problem, err)) return status;
  if (problem->batch == 0) return QM_OK;
  const auto narrow = [](int64_t size) { return static_cast<int>(size); };
  const RowsParams params{tensors->attention_mask, tensors->rows,           tensors->last,
                          narrow(problem->batch),  narrow(problem->tokens), narrow(problem->past_slots),
                          narrow(problem->length)};
  Launcher launcher{static_cast<cudaStream_t>(stream)};
  launcher.Run(TokenRows, params, dim3(static_cast<unsigned>(problem->batch)), kRowsThreads, 0, true);
  return Report(launcher.error, err);
}
