// The launches of operators that run by their names.
#include <string_view>

#include "core/attributes.h"
#include "cuda/common/operators.h"

using namespace quantmoe;

extern "C" int qm_cuda_launch_node(const char* op, const void* node, const qm_cuda_node_plan* plan,
                                   const qm_cuda_call* call, char* err) {
  const std::string_view wanted = op;
#define QM_CUDA(op, name) \
  if (wanted == #op) return launch_##name(node, *plan, *call, err);
#include "op.def"
  return fail(err, QM_UNSUPPORTED, "%.64s has no CUDA kernel that runs by its name", op);
}
