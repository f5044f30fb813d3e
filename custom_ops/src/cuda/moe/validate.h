// What the kernels of QuantMoE and QuantLinear take: QM_OK, or the status and the sentence of qm_cuda_plan_node's
// errors.
#pragma once
#include "cuda/moe/layer_plan.h"

namespace quantmoe {

int validate_moe(const MoEProblem&, const qm_cuda_device&, char* err);
int validate_linear(const LinearProblem&, const qm_cuda_device&, char* err);

}  // namespace quantmoe
