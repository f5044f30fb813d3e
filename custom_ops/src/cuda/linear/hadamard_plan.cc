// Hadamard: what the kernel takes. Pure; runs without a GPU.
#include "core/attributes.h"
#include "cuda/common/operators.h"
#include "cuda/linear/hadamard.h"

namespace quantmoe {

int plan_hadamard(const void* of, const qm_cuda_call& call, const qm_cuda_device&, qm_cuda_node_plan&, char* err) {
  const qm_hadamard& node = *static_cast<const qm_hadamard*>(of);
  QM_TRY(check_hadamard(node, err));
  const qm_tensor& x = call.inputs[Hadamard_x];
  if (x.type != QM_F16 && x.type != QM_BF16)
    return fail(err, QM_UNSUPPORTED, "x is of type %d, the CUDA kernel takes float16 (1) and bfloat16 (2)", x.type);
  if (node.size > kMostRotated)
    return fail(err, QM_UNSUPPORTED, "size is %d, the CUDA kernel takes up to %d", node.size, kMostRotated);
  const int64_t blocks = rows_of(x.shape) * node.features / rotated_by_block(node);
  if (blocks < INT32_MAX) return QM_OK;
  return fail(err, QM_UNSUPPORTED, "x has %lld rows of %d features, the CUDA kernel takes up to 2^31 blocks of %d",
              static_cast<long long>(rows_of(x.shape)), node.features, rotated_by_block(node));
}

}  // namespace quantmoe
