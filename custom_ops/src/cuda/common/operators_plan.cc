// The plans, by operator.
#include <string_view>

#include "core/attributes.h"
#include "cuda/common/operators.h"

using namespace quantmoe;

extern "C" int qm_cuda_plan_node(const char* op, const void* node, const qm_cuda_call* call,
                                 const qm_cuda_device* device, qm_cuda_node_plan* plan, char* err) {
  const std::string_view wanted = op;
  *plan = qm_cuda_node_plan{};
#define QM_CUDA(op, name) \
  if (wanted == #op) return plan_##name(node, *call, *device, *plan, err);
#include "op.def"
  for (const char* of_ranks : {"AllReduce", "AllReduceAddRMSNorm", "AllGather"})
    if (wanted == of_ranks) return QM_OK;
  return fail(err, QM_UNSUPPORTED, "no CUDA kernel runs %.64s", op);
}
