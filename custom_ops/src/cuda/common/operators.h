// What qm_cuda_plan_node and qm_cuda_launch_node call: two functions for each QM_CUDA line of op.def.
#pragma once
#include "core/tensors.h"
#include "quantmoe/quant_moe_cuda.h"

namespace quantmoe {

using PlanNode = int(const void* node, const qm_tensor* inputs, const qm_cuda_device& device, qm_cuda_node_plan& plan,
                     char* err);
using LaunchNode = int(const void* node, const qm_cuda_node_plan& plan, const qm_cuda_call& call, char* err);
#define QM_CUDA(op, name) \
  PlanNode plan_##name;   \
  LaunchNode launch_##name;
#include "op.def"

}  // namespace quantmoe
