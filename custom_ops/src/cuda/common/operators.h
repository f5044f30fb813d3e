// What qm_cuda_plan_node, qm_cuda_check_node and qm_cuda_launch_node call: functions for each QM_CUDA line of op.def.
#pragma once
#include <new>

#include "core/tensors.h"
#include "quantmoe/quant_moe_cuda.h"

namespace quantmoe {

using PlanNode = int(const void* node, const qm_cuda_call& call, const qm_cuda_device& device, qm_cuda_node_plan& plan,
                     char* err);
using LaunchNode = int(const void* node, const qm_cuda_node_plan& plan, const qm_cuda_call& call, char* err);
#define QM_CUDA(op, name) \
  PlanNode plan_##name;   \
  LaunchNode launch_##name;
#include "op.def"

// Of ranks, whose plan is empty.
LaunchNode launch_reduce, launch_reduce_norm, launch_gather;
// Of packed weights, as qm_cuda_check_node.
LaunchNode check_moe_call, check_linear_call;

// An operator's own plan in a qm_cuda_node_plan.
template <class Plan>
Plan& make_plan(qm_cuda_node_plan& plan) {
  static_assert(sizeof(Plan) <= sizeof(plan.chosen) && alignof(Plan) <= alignof(qm_cuda_node_plan));
  return *new (plan.chosen) Plan{};
}
template <class Plan>
const Plan& plan_in(const qm_cuda_node_plan& plan) {
  return *std::launder(reinterpret_cast<const Plan*>(plan.chosen));
}

}  // namespace quantmoe
