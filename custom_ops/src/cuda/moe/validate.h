// What the kernels of QuantMoE and QuantLinear take: QM_OK, or the status and the sentence of qm_cuda_plan_moe's
// errors.
#pragma once
#include "quantmoe/quant_moe_cuda.h"

namespace quantmoe {

int validate_moe(const qm_cuda_problem&, const qm_cuda_device&, char* err);
int validate_linear(const qm_cuda_linear_problem&, const qm_cuda_device&, char* err);

}  // namespace quantmoe
