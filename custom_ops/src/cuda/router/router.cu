// MoERouter, AddRMSNorm and TokenRows: problem to kernel launches.
#include <algorithm>
#include <iterator>

#include "cuda/common/launcher.h"
#include "cuda/router/norm.cuh"
#include "cuda/router/router.cuh"
#include "cuda/router/token_rows.cuh"

namespace quantmoe {
namespace {

template <typename T>
int launch_router(const qm_cuda_router_problem& problem, const qm_cuda_router_plan& plan,
                  const qm_cuda_router_tensors& tensors, cudaStream_t stream, char* err) {
  const qm_router& router = problem.router;
  const unsigned tokens = static_cast<unsigned>(problem.tokens);
  RouterParams params{tensors.hidden_states,
                      tensors.weight,
                      tensors.bias,
                      tensors.correction_bias,
                      tensors.topk_ids,
                      tensors.topk_weights,
                      static_cast<float*>(tensors.workspace),
                      static_cast<int>(problem.tokens),
                      router.hidden_size,
                      routing_of(router)};
  Launcher launcher{stream};
  if (plan.path == kRouterCluster) {
    constexpr void (*kernels[])(RouterParams) = {router_cluster<T, 1, 8>, router_cluster<T, 2, 5>,
                                                 router_cluster<T, 3, 4>, router_cluster<T, 4, 3>,
                                                 router_cluster<T, 5, 2>};
    static_assert(std::size(kernels) == kRouterMostTiles);
    const int tiles = router_tiles_of(params.routing, plan.cluster);
    const bool few = router.hidden_size <= 32 * kRouterWarps * kRouterFewPieces;
    launcher.run(tiles == 1 && few ? router_cluster<T, 1, kRouterFewPieces> : kernels[tiles - 1], params,
                 dim3(plan.cluster, blocks_for(tokens, kRouterTokens)), kRouterThreads,
                 router_shared(params.routing, plan.cluster), true, plan.cluster);
    return report(launcher.error, err);
  }
  if (plan.path == kRouterTiles)
    launcher.run(
        router_tiles<T>, params,
        dim3(blocks_for(problem.tokens, kRouterTileTokens), blocks_for(logits_of(params.routing), kRouterTileExperts)),
        kRouterTileThreads, kRouterTileBytes, true);
  else
    launcher.run(router.hidden_size % 8 ? router_rows<T, false> : router_rows<T, true>, params,
                 dim3(tokens, blocks_for(logits_of(params.routing), kRouterRowsThreads / 32)), kRouterRowsThreads, 0,
                 true);
  const SelectParams select{params.logits, tensors.correction_bias, tensors.topk_ids, tensors.topk_weights,
                            params.routing};
  launcher.run(moe_select<float>, select, dim3(tokens), 32, 4 * select_words(params.routing), true);
  return report(launcher.error, err);
}

template <typename T>
int launch_norm(const qm_cuda_norm_problem& problem, const qm_cuda_norm_tensors& tensors, cudaStream_t stream,
                char* err) {
  const NormParams params = norm_params(problem, tensors);
  const int each = problem.columns % 8 ? 1 : 8;
  const int threads = std::min(kMostNormThreads, static_cast<int>((problem.columns / each + 31) / 32 * 32));
  Launcher launcher{stream};
  launcher.run(each == 1 ? add_norm<T, 1> : add_norm<T, 8>, params, dim3(static_cast<unsigned>(problem.rows)), threads,
               0, true);
  return report(launcher.error, err);
}

}  // namespace
}  // namespace quantmoe

using namespace quantmoe;

extern "C" int qm_cuda_launch_router(const qm_cuda_router_problem* problem, const qm_cuda_router_plan* plan,
                                     const qm_cuda_router_tensors* tensors, void* stream, char* err) {
  if (problem->tokens == 0) return QM_OK;
  cudaStream_t s = static_cast<cudaStream_t>(stream);
  return problem->type == QM_BF16 ? launch_router<__nv_bfloat16>(*problem, *plan, *tensors, s, err)
                                  : launch_router<__half>(*problem, *plan, *tensors, s, err);
}

extern "C" int qm_cuda_launch_norm(const qm_cuda_norm_problem* problem, const qm_cuda_norm_tensors* tensors,
                                   void* stream, char* err) {
  if (int status = qm_cuda_validate_norm(problem, err)) return status;
  if (problem->rows == 0) return QM_OK;
  cudaStream_t s = static_cast<cudaStream_t>(stream);
  return problem->type == QM_BF16 ? launch_norm<__nv_bfloat16>(*problem, *tensors, s, err)
                                  : launch_norm<__half>(*problem, *tensors, s, err);
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
  launcher.run(token_rows, params, dim3(static_cast<unsigned>(problem->batch)), kRowsThreads, 0, true);
  return report(launcher.error, err);
}
