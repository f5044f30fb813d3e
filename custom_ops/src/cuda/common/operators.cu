// The launches, by operator.
#include <string_view>

#include "core/attributes.h"
#include "cuda/common/operators.h"

using namespace quantmoe;

extern "C" int qm_cuda_check_node(const char* op, const void* node, const qm_cuda_node_plan* plan,
                                  const qm_cuda_call* call, char* err) {
  const std::string_view wanted = op;
  if (wanted == "QuantMoE") return check_moe_call(node, *plan, *call, err);
  if (wanted == "QuantLinear") return check_linear_call(node, *plan, *call, err);
  return QM_OK;
}

extern "C" int qm_cuda_launch_node(const char* op, const void* node, const qm_cuda_node_plan* plan,
                                   const qm_cuda_call* call, char* err) {
  const std::string_view wanted = op;
#define QM_CUDA(op, name) \
  if (wanted == #op) return launch_##name(node, *plan, *call, err);
#include "op.def"
  if (wanted == "AllReduce") return launch_reduce(node, *plan, *call, err);
  if (wanted == "AllReduceAddRMSNorm") return launch_reduce_norm(node, *plan, *call, err);
  if (wanted == "AllGather") return launch_gather(node, *plan, *call, err);
  return fail(err, QM_UNSUPPORTED, "no CUDA kernel runs %.64s", op);
}
