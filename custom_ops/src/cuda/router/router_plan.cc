// MoERouter, AddRMSNorm and TokenRows: what the kernels take, and the router's plan. Pure; runs without a GPU.
#include <algorithm>

#include "core/attributes.h"
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

}  // namespace
}  // namespace quantmoe

using namespace quantmoe;

extern "C" int qm_cuda_plan_router(const qm_cuda_router_problem* problem, const qm_cuda_device* device,
                                   qm_cuda_router_plan* plan, char* err) {
  const qm_router& router = problem->router;
  QM_TRY(check_node("MoERouter", &router, err));
  QM_TRY(validate_size("hidden_size", router.hidden_size, 1, kMostColumns, err));
  const qm_cuda_routing_problem routing{routing_of(router), QM_F32, 0};
  QM_TRY(qm_cuda_validate_routing(&routing, err));
  QM_TRY(validate_type("hidden_states", problem->type, err));
  QM_TRY(validate_size("rows of hidden_states", problem->tokens, 0, kMostRows, err));
  const bool words = router.hidden_size % 8 == 0, few = problem->tokens <= kRouterFew;
  *plan = qm_cuda_router_plan{};
  plan->cluster = router_cluster_of(routing.routing, *device);
  const bool cluster = device->sm >= 90 && router_tiles_of(routing.routing, plan->cluster) <= kRouterMostTiles;
  plan->path = words && few && cluster ? kRouterCluster : words && !few ? kRouterTiles : kRouterRows;
  if (plan->path != kRouterCluster)
    plan->workspace_bytes =
        static_cast<uint64_t>(problem->tokens) * static_cast<uint64_t>(logits_of(routing.routing)) * 4;
  return QM_OK;
}

extern "C" int qm_cuda_validate_norm(const qm_cuda_norm_problem* problem, char* err) {
  QM_TRY(check_node("AddRMSNorm", &problem->norm, err));
  QM_TRY(check_not_negative("norm_epsilon", problem->norm.norm_epsilon, err));
  QM_TRY(validate_type("x", problem->type, err));
  QM_TRY(validate_size("columns of x", problem->columns, 1, kMostColumns, err));
  return validate_size("rows of x", problem->rows, 0, kMostRows, err);
}

extern "C" int qm_cuda_validate_rows(const qm_cuda_rows_problem* problem, char* err) {
  QM_TRY(check_node("TokenRows", &problem->node, err));
  QM_TRY(validate_size("the batch", problem->batch, 0, kMostRows, err));
  QM_TRY(validate_size("new tokens", problem->tokens, 0, kMostRows, err));
  QM_TRY(validate_size("slots of past_key", problem->past_slots, 0, kMostRows, err));
  return validate_size("columns of attention_mask", problem->length, 0, kMostRows, err);
}
