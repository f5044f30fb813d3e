// MoERouting, MoERouter, AddRMSNorm, AddRMSNormRouter and TokenRows: plan to kernel launches.
#include <algorithm>
#include <iterator>

#include "cuda/common/launcher.h"
#include "cuda/common/operators.h"
#include "cuda/router/norm.cuh"
#include "cuda/router/router.cuh"
#include "cuda/router/token_rows.cuh"

namespace quantmoe {
namespace {

cudaStream_t stream_of(const qm_cuda_call& call) { return static_cast<cudaStream_t>(call.stream); }

void select(Launcher& launcher, int32_t type, const SelectParams& params, int64_t tokens) {
  launcher.run(type == QM_F32    ? moe_select<float>
               : type == QM_BF16 ? moe_select<__nv_bfloat16>
                                 : moe_select<__half>,
               params, dim3(static_cast<unsigned>(tokens)), 32, 4 * select_words(params.routing), true);
}

// The router of params.x, in launches of `plan`.
template <typename T>
void route(Launcher& launcher, const RouterParams& params, const qm_cuda_node_plan& plan) {
  const auto tokens = static_cast<unsigned>(params.tokens);
  const int path = plan.chosen[kRouterPath], blocks = plan.chosen[kRouterBlocks];
  if (path == kRouterCluster) {
    constexpr void (*kernels[])(RouterParams) = {router_cluster<T, 1, 8>, router_cluster<T, 2, 5>,
                                                 router_cluster<T, 3, 4>, router_cluster<T, 4, 3>,
                                                 router_cluster<T, 5, 2>};
    static_assert(std::size(kernels) == kRouterMostTiles);
    const int tiles = router_tiles_of(params.routing, blocks);
    const bool few = params.columns <= 32 * kRouterWarps * kRouterFewPieces;
    launcher.run(tiles == 1 && few ? router_cluster<T, 1, kRouterFewPieces> : kernels[tiles - 1], params,
                 dim3(blocks, blocks_for(tokens, kRouterTokens)), kRouterThreads, router_shared(params.routing, blocks),
                 true, blocks);
    return;
  }
  if (path == kRouterTiles)
    launcher.run(router_tiles<T>, params,
                 dim3(blocks_for(tokens, kRouterTileTokens), blocks_for(logits_of(params.routing), kRouterTileExperts)),
                 kRouterTileThreads, kRouterTileBytes, true);
  else
    launcher.run(params.columns % 8 ? router_rows<T, false> : router_rows<T, true>, params,
                 dim3(tokens, blocks_for(logits_of(params.routing), kRouterRowsThreads / 32)), kRouterRowsThreads, 0,
                 true);
  select(launcher, QM_F32, {params.logits, params.correction, params.topk_ids, params.topk_weights, params.routing},
         params.tokens);
}

template <typename T>
void norm(Launcher& launcher, const NormParams& params, int64_t rows) {
  const int each = params.columns % 8 ? 1 : 8;
  const int threads = std::min(kMostNormThreads, (params.columns / each + 31) / 32 * 32);
  launcher.run(each == 1 ? add_norm<T, 1> : add_norm<T, 8>, params, dim3(static_cast<unsigned>(rows)), threads, 0,
               true);
}

template <typename T>
void norm_and_route(Launcher& launcher, const NormRouterParams& params, const qm_cuda_node_plan& plan) {
  const int blocks = plan.chosen[kRouterBlocks], tokens = params.router.tokens;
  if (plan.chosen[kRouterPath] != kRouterCluster) {
    norm<T>(launcher, params.norm, tokens);
    return route<T>(launcher, params.router, plan);
  }
  constexpr void (*kernels[])(NormRouterParams) = {norm_router_cluster<T, 1, 4>, norm_router_cluster<T, 2, 3>,
                                                   norm_router_cluster<T, 3, 2>, norm_router_cluster<T, 4, 1>,
                                                   norm_router_cluster<T, 5, 1>};
  static_assert(std::size(kernels) == kRouterMostTiles);
  launcher.run(kernels[router_tiles_of(params.router.routing, blocks) - 1], params,
               dim3(blocks, blocks_for(static_cast<unsigned>(tokens), kRouterTokens)), kRouterThreads,
               router_shared(params.router.routing, blocks), true, blocks);
}

}  // namespace

int launch_routing(const void* node, const qm_cuda_node_plan&, const qm_cuda_call& call, char* err) {
  const TensorsOf<qm_routing> tensors{call.inputs, call.outputs};
  const qm_tensor& logits = call.inputs[MoERouting_logits];
  const int64_t tokens = rows_of(logits.shape);
  if (tokens == 0) return QM_OK;
  Launcher launcher{stream_of(call)};
  select(launcher, logits.type,
         {tensors.logits, tensors.correction_bias, tensors.topk_ids, tensors.topk_weights,
          *static_cast<const qm_routing*>(node)},
         tokens);
  return report(launcher.error, err);
}

int launch_router(const void* node, const qm_cuda_node_plan& plan, const qm_cuda_call& call, char* err) {
  const qm_router& router = *static_cast<const qm_router*>(node);
  const TensorsOf<qm_router> tensors{call.inputs, call.outputs};
  const qm_tensor& hidden = call.inputs[MoERouter_hidden_states];
  const int64_t tokens = rows_of(hidden.shape);
  if (tokens == 0) return QM_OK;
  const RouterParams params{tensors.hidden_states,
                            tensors.weight,
                            tensors.bias,
                            tensors.correction_bias,
                            tensors.topk_ids,
                            tensors.topk_weights,
                            static_cast<float*>(call.workspace),
                            static_cast<int>(tokens),
                            router.hidden_size,
                            routing_of(router)};
  Launcher launcher{stream_of(call)};
  hidden.type == QM_BF16 ? route<__nv_bfloat16>(launcher, params, plan) : route<__half>(launcher, params, plan);
  return report(launcher.error, err);
}

int launch_norm(const void* node, const qm_cuda_node_plan&, const qm_cuda_call& call, char* err) {
  const NormParams params = norm_params(*static_cast<const qm_norm*>(node), call);
  const qm_tensor& x = call.inputs[AddRMSNorm_x];
  const int64_t rows = rows_of(x.shape);
  if (rows == 0) return QM_OK;
  Launcher launcher{stream_of(call)};
  x.type == QM_BF16 ? norm<__nv_bfloat16>(launcher, params, rows) : norm<__half>(launcher, params, rows);
  return report(launcher.error, err);
}

int launch_norm_router(const void* node, const qm_cuda_node_plan& plan, const qm_cuda_call& call, char* err) {
  const qm_norm_router& router = *static_cast<const qm_norm_router*>(node);
  const TensorsOf<qm_norm_router> tensors{call.inputs, call.outputs};
  const qm_tensor& x = call.inputs[AddRMSNormRouter_x];
  const int64_t tokens = rows_of(x.shape);
  if (tokens == 0) return QM_OK;
  const NormRouterParams params{
      {tensors.y, tensors.weight, tensors.bias, tensors.correction_bias, tensors.topk_ids, tensors.topk_weights,
       static_cast<float*>(call.workspace), static_cast<int>(tokens), router.hidden_size, routing_of(router)},
      {tensors.x, tensors.residual, tensors.norm_weight, tensors.y, tensors.sum, router.hidden_size,
       router.norm_epsilon}};
  Launcher launcher{stream_of(call)};
  x.type == QM_BF16 ? norm_and_route<__nv_bfloat16>(launcher, params, plan)
                    : norm_and_route<__half>(launcher, params, plan);
  return report(launcher.error, err);
}

int launch_rows(const void*, const qm_cuda_node_plan&, const qm_cuda_call& call, char* err) {
  const TensorsOf<qm_rows> tensors{call.inputs, call.outputs};
  const auto size = [&](int32_t input, int d) { return static_cast<int>(call.inputs[input].shape.sizes[d]); };
  const RowsParams params{tensors.attention_mask,
                          tensors.rows,
                          tensors.last,
                          size(TokenRows_attention_mask, 0),
                          size(TokenRows_input_ids, 1),
                          size(TokenRows_past_key, 2),
                          size(TokenRows_attention_mask, 1)};
  if (params.batch == 0) return QM_OK;
  Launcher launcher{stream_of(call)};
  launcher.run(token_rows, params, dim3(static_cast<unsigned>(params.batch)), kRowsThreads, 0, true);
  return report(launcher.error, err);
}

}  // namespace quantmoe
