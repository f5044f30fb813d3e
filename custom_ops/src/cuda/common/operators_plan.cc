// The plans, by operator.
#include <string_view>

#include "core/attributes.h"
#include "cuda/common/operators.h"

using namespace quantmoe;

extern "C" int qm_cuda_plan_node(const char* op, const void* node, const qm_cuda_call* call,
                                 const qm_cuda_device* device, qm_cuda_node_plan* plan, char* err) {
  const std::string_view wanted = op;
  *plan = qm_cuda_node_plan{};
  if (wanted == "QuantMoE")
    return plan_moe(*static_cast<const qm_moe*>(node), call->inputs, call->experts, *device, *plan, err);
#define QM_CUDA(op, name) \
  if (wanted == #op) return plan_##name(node, call->inputs, *device, *plan, err);
#include "op.def"
  return fail(err, QM_UNSUPPORTED, "%.64s has no CUDA kernel that has a plan", op);
}
