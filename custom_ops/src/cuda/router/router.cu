// MoERouting, MoERouter, AddRMSNorm and TokenRows: plan to kernel launches.
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

template <typename T>
int enqueue(const qm_router& router, const qm_cuda_node_plan& plan, const qm_cuda_call& call, unsigned tokens,
            char* err) {
  const TensorsOf<qm_router> tensors{call.inputs, call.outputs};
  const int path = plan.chosen[kRouterPath], blocks = plan.chosen[kRouterBlocks];
  RouterParams params{tensors.hidden_states,
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
  if (path == kRouterCluster) {
    constexpr void (*kernels[])(RouterParams) = {router_cluster<T, 1, 8>, router_cluster<T, 2, 5>,
                                                 router_cluster<T, 3, 4>, router_cluster<T, 4, 3>,
                                                 router_cluster<T, 5, 2>};
    static_assert(std::size(kernels) == kRouterMostTiles);
    const int tiles = router_tiles_of(params.routing, blocks);
    const bool few = router.hidden_size <= 32 * kRouterWarps * kRouterFewPieces;
    launcher.run(tiles == 1 && few ? router_cluster<T, 1, kRouterFewPieces> : kernels[tiles - 1], params,
                 dim3(blocks, blocks_for(tokens, kRouterTokens)), kRouterThreads, router_shared(params.routing, blocks),
                 true, blocks);
    return report(launcher.error, err);
  }
  if (path == kRouterTiles)
    launcher.run(router_tiles<T>, params,
                 dim3(blocks_for(tokens, kRouterTileTokens), blocks_for(logits_of(params.routing), kRouterTileExperts)),
                 kRouterTileThreads, kRouterTileBytes, true);
  else
    launcher.run(router.hidden_size % 8 ? router_rows<T, false> : router_rows<T, true>, params,
                 dim3(tokens, blocks_for(logits_of(params.routing), kRouterRowsThreads / 32)), kRouterRowsThreads, 0,
                 true);
  select(launcher, QM_F32,
         {params.logits, tensors.correction_bias, tensors.topk_ids, tensors.topk_weights, params.routing}, tokens);
  return report(launcher.error, err);
}

template <typename T>
int enqueue(const NormParams& params, int64_t rows, cudaStream_t stream, char* err) {
  const int each = params.columns % 8 ? 1 : 8;
  const int threads = std::min(kMostNormThreads, (params.columns / each + 31) / 32 * 32);
  Launcher launcher{stream};
  launcher.run(each == 1 ? add_norm<T, 1> : add_norm<T, 8>, params, dim3(static_cast<unsigned>(rows)), threads, 0,
               true);
  return report(launcher.error, err);
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
  const qm_tensor& hidden = call.inputs[MoERouter_hidden_states];
  const auto tokens = static_cast<unsigned>(rows_of(hidden.shape));
  if (tokens == 0) return QM_OK;
  return hidden.type == QM_BF16 ? enqueue<__nv_bfloat16>(router, plan, call, tokens, err)
                                : enqueue<__half>(router, plan, call, tokens, err);
}

int launch_norm(const void* node, const qm_cuda_node_plan&, const qm_cuda_call& call, char* err) {
  const NormParams params = norm_params(*static_cast<const qm_norm*>(node), call);
  const qm_tensor& x = call.inputs[AddRMSNorm_x];
  const int64_t rows = rows_of(x.shape);
  if (rows == 0) return QM_OK;
  return x.type == QM_BF16 ? enqueue<__nv_bfloat16>(params, rows, stream_of(call), err)
                           : enqueue<__half>(params, rows, stream_of(call), err);
}

int launch_rows(const void*, const qm_cuda_node_plan&, const qm_cuda_call& call, char* err) {
  const TensorsOf<qm_rows> tensors{call.inputs, call.outputs};
  const auto size = [&](int32_t input, int d) { return static_cast<int>(call.inputs[input].shape.sizes[d]); };
  const int64_t most = tensors.num_logits ? *tensors.num_logits : 1;
  const RowsParams params{tensors.attention_mask,
                          tensors.rows,
                          tensors.last,
                          size(TokenRows_attention_mask, 0),
                          size(TokenRows_input_ids, 1),
                          size(TokenRows_past_key, 2),
                          size(TokenRows_attention_mask, 1),
                          static_cast<int>(most == 1 ? 1 : std::min(most, int64_t{size(TokenRows_input_ids, 1)}))};
  if (params.batch == 0) return QM_OK;
  Launcher launcher{stream_of(call)};
  launcher.run(token_rows, params, dim3(static_cast<unsigned>(params.batch)), kRowsThreads, 0, true);
  return report(launcher.error, err);
}

}  // namespace quantmoe
