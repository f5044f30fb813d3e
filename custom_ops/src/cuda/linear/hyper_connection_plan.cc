// HyperConnection: what the kernel takes. Pure; runs without a GPU.
#include "core/attributes.h"
#include "core/numbers.h"
#include "cuda/common/operators.h"
#include "cuda/linear/hyper_connection.h"

namespace quantmoe {

int plan_hyper_connection(const void* of, const qm_cuda_call& call, const qm_cuda_device&, qm_cuda_node_plan&,
                          char* err) {
  const qm_hyper_connection& node = *static_cast<const qm_hyper_connection*>(of);
  QM_TRY(check_hyper_connection(node, err));
  const qm_tensor& streams = call.inputs[HyperConnection_streams];
  if (streams.type != QM_F16 && streams.type != QM_BF16)
    return fail(err, QM_UNSUPPORTED, "streams are of type %d, the CUDA kernel takes float16 (1) and bfloat16 (2)",
                streams.type);
  if (node.num_streams > kMostStreams)
    return fail(err, QM_UNSUPPORTED, "num_streams is %d, the CUDA kernel takes up to %d", node.num_streams,
                kMostStreams);
  if (node.hidden_size % 8)
    return fail(err, QM_UNSUPPORTED, "hidden_size is %d, the CUDA kernel takes multiples of 8", node.hidden_size);
  const int64_t tokens = rows_of(call.inputs[HyperConnection_mixes].shape);
  if (tokens < INT32_MAX) return QM_OK;
  return fail(err, QM_UNSUPPORTED, "mixes has %lld tokens, the CUDA kernel takes up to 2^31",
              static_cast<long long>(tokens));
}

}  // namespace quantmoe
