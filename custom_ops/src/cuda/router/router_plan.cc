// MoERouting, MoERouter, AddRMSNorm and TokenRows: what the kernels take, and the router's plan. Pure; runs without a
// GPU.
#include <algorithm>
#include <string>

#include "core/attributes.h"
#include "cuda/common/operators.h"
#include "cuda/router/router.h"

namespace quantmoe {
namespace {

int validate_type(const char* input, int32_t type, char* err) {
  if (type == QM_F16 || type == QM_BF16) return QM_OK;
  return fail(err, QM_UNSUPPORTED, "%s is of type %d, the CUDA kernels take float16 (1) and bfloat16 (2)", input, type);
}
int validate_size(const char* name, int64_t size, int64_t least, int64_t most, char* err) {
  if (size >= least && size <= most) return QM_OK;
  return fail(err, QM_INVALID, "%s is %lld, the CUDA kernels take %lld to %lld", name, static_cast<long long>(size),
              static_cast<long long>(least), static_cast<long long>(most));
}
constexpr int64_t kMostColumns = 1 << 24, kMostRows = INT32_MAX / 2;

int validate_routing(const qm_routing& routing, char* err) {
  constexpr int kMostExperts = 2048;  // moe_select keeps four words of each in shared memory
  return check_routing(routing, {kMostExperts, false, "the CUDA kernel takes"}, err);
}

// The plan of a MoERouter or AddRMSNormRouter, whose first input is x.
template <class Router>
int plan_of(const Router& router, const char* name, const qm_tensor& x, const qm_cuda_device& device,
            qm_cuda_node_plan& plan, char* err) {
  QM_TRY(validate_size("hidden_size", router.hidden_size, 1, kMostColumns, err));
  const qm_routing routing = routing_of(router);
  QM_TRY(validate_routing(routing, err));
  const int64_t tokens = rows_of(x.shape);
  QM_TRY(validate_type(name, x.type, err));
  QM_TRY(validate_size((std::string("rows of ") + name).c_str(), tokens, 0, kMostRows, err));
  const bool words = router.hidden_size % 8 == 0, few = tokens <= kRouterFew;
  const int32_t blocks = router_cluster_of(routing, device);
  const bool cluster = device.sm >= 90 && router_tiles_of(routing, blocks) <= kRouterMostTiles;
  plan.chosen[kRouterPath] = words && few && cluster ? kRouterCluster : words && !few ? kRouterTiles : kRouterRows;
  plan.chosen[kRouterBlocks] = blocks;
  if (plan.chosen[kRouterPath] != kRouterCluster)
    plan.workspace_bytes = static_cast<uint64_t>(tokens) * static_cast<uint64_t>(logits_of(routing)) * 4;
  return QM_OK;
}

}  // namespace

int plan_routing(const void* node, const qm_cuda_call& call, const qm_cuda_device&, qm_cuda_node_plan&, char* err) {
  QM_TRY(validate_routing(*static_cast<const qm_routing*>(node), err));
  const qm_tensor& logits = call.inputs[MoERouting_logits];
  if (logits.type < QM_F32 || logits.type > QM_BF16)
    return fail(err, QM_INVALID, "type is %d, the CUDA kernel takes %d to %d", logits.type, QM_F32, QM_BF16);
  return validate_size("rows of logits", rows_of(logits.shape), 0, INT32_MAX, err);
}

int plan_router(const void* node, const qm_cuda_call& call, const qm_cuda_device& device, qm_cuda_node_plan& plan,
                char* err) {
  const qm_router& router = *static_cast<const qm_router*>(node);
  QM_TRY(check_node("MoERouter", &router, err));
  return plan_of(router, "hidden_states", call.inputs[MoERouter_hidden_states], device, plan, err);
}

int plan_norm_router(const void* node, const qm_cuda_call& call, const qm_cuda_device& device, qm_cuda_node_plan& plan,
                     char* err) {
  const qm_norm_router& router = *static_cast<const qm_norm_router*>(node);
  QM_TRY(check_node("AddRMSNormRouter", &router, err));
  QM_TRY(check_not_negative("norm_epsilon", router.norm_epsilon, err));
  return plan_of(router, "x", call.inputs[AddRMSNormRouter_x], device, plan, err);
}

int plan_norm(const void* node, const qm_cuda_call& call, const qm_cuda_device&, qm_cuda_node_plan&, char* err) {
  QM_TRY(check_node("AddRMSNorm", node, err));
  QM_TRY(check_not_negative("norm_epsilon", static_cast<const qm_norm*>(node)->norm_epsilon, err));
  QM_TRY(validate_type("x", call.inputs[AddRMSNorm_x].type, err));
  QM_TRY(validate_size("columns of x", call.inputs[AddRMSNorm_weight].shape.sizes[0], 1, kMostColumns, err));
  return validate_size("rows of x", rows_of(call.inputs[AddRMSNorm_x].shape), 0, kMostRows, err);
}

int plan_rows(const void* node, const qm_cuda_call& call, const qm_cuda_device&, qm_cuda_node_plan&, char* err) {
  QM_TRY(check_node("TokenRows", node, err));
  const qm_shape &ids = call.inputs[TokenRows_input_ids].shape, &mask = call.inputs[TokenRows_attention_mask].shape;
  QM_TRY(validate_size("the batch", ids.sizes[0], 0, kMostRows, err));
  QM_TRY(validate_size("new tokens", ids.sizes[1], 0, kMostRows, err));
  QM_TRY(validate_size("slots of past_key", call.inputs[TokenRows_past_key].shape.sizes[2], 0, kMostRows, err));
  return validate_size("columns of attention_mask", mask.sizes[1], 0, kMostRows, err);
}

}  // namespace quantmoe
