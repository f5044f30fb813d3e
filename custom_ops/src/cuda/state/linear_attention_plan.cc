// CausalConv, GatedDelta and StateSpace: what the kernels take, and the plan. Pure; runs without a GPU.
#include <algorithm>

#include "core/attributes.h"
#include "cuda/common/operators.h"
#include "cuda/state/linear_attention.h"

namespace quantmoe {
namespace {

// The sizes of a call whose first input is [B, S, ..].
struct Size {
  int64_t batch, tokens;
};

int check_halves(const char* input, int32_t type, char* err) {
  if (type != QM_F16 && type != QM_BF16)
    return fail(err, QM_UNSUPPORTED, "%s is of type %d, the CUDA kernels take float16 (1) and bfloat16 (2)", input,
                type);
  return QM_OK;
}

// blocks: of the grid's last dimension but one.
int read_size(const qm_tensor& first, int64_t blocks, Size& size, char* err) {
  const int64_t batch = first.shape.sizes[0], tokens = first.shape.sizes[1];
  size = {batch, tokens};
  constexpr int64_t kMost = 65535;  // of the grid's last two dimensions
  if (batch < 0 || tokens < 0 || batch > kMost || blocks > kMost || tokens > INT32_MAX / 2)
    return fail(err, QM_UNSUPPORTED,
                "a batch of %lld with %lld tokens each, the CUDA kernels take a batch of up to %lld",
                static_cast<long long>(batch), static_cast<long long>(tokens), static_cast<long long>(kMost));
  return QM_OK;
}

// What multiplies a call's chunks, and the floats of their operands.
int32_t chunks_on(const qm_cuda_device& device, int64_t tokens) {
  if (tokens < kLeastChunkedTokens || device.shared_bytes <= kScanShared + 1024) return kNoChunks;
  return device.sm == 90 ? kChunksOnWgmma : kChunksOnMma;
}
int64_t floats_of_chunks(int64_t batch, int64_t tokens, int heads, int of_chunk) {
  return batch * std::min<int64_t>(kMostChunks, (tokens + kChunkTokens - 1) / kChunkTokens) * heads * of_chunk;
}

}  // namespace

int plan_conv(const void* node, const qm_cuda_call& call, const qm_cuda_device&, qm_cuda_node_plan&, char* err) {
  const qm_conv& conv = *static_cast<const qm_conv*>(node);
  QM_TRY(check_conv(conv, err));
  if (conv.channels % 2)
    return fail(err, QM_UNSUPPORTED, "channels is %d, the CUDA kernel takes even numbers", conv.channels);
  if (conv.x_size % 2 || conv.x_offset % 2)
    return fail(err, QM_UNSUPPORTED, "x_size is %d and x_offset %d, the CUDA kernel takes even numbers", conv.x_size,
                conv.x_offset);
  const qm_tensor& x = call.inputs[CausalConv_x];
  if (x.type != QM_F32 && x.type != QM_F16 && x.type != QM_BF16)
    return fail(err, QM_UNSUPPORTED, "x is of type %d, the CUDA kernels take float32 (0), float16 (1) and bfloat16 (2)",
                x.type);
  Size size;
  return read_size(x, x.shape.sizes[1] / kConvTokens, size, err);
}

int plan_delta(const void* node, const qm_cuda_call& call, const qm_cuda_device& device, qm_cuda_node_plan& plan,
               char* err) {
  const qm_delta& delta = *static_cast<const qm_delta*>(node);
  QM_TRY(check_delta(delta, err));
  for (const int size : {delta.k_head_size, delta.v_head_size})
    if (size != 64 && size != 128)
      return fail(err, QM_UNSUPPORTED, "k_head_size is %d and v_head_size %d, the CUDA kernels take 64 and 128",
                  delta.k_head_size, delta.v_head_size);
  if (delta.decay_per_key && (delta.a_size % 4 || delta.a_offset % 4))
    return fail(err, QM_UNSUPPORTED, "a_size is %d and a_offset %d, the CUDA kernels take multiples of 4", delta.a_size,
                delta.a_offset);
  Size size;
  QM_TRY(check_halves("qkv", call.inputs[GatedDelta_qkv].type, err));
  QM_TRY(read_size(call.inputs[GatedDelta_qkv], delta.num_v_heads, size, err));
  // A block for each state where these are enough for most multiprocessors.
  const bool few = size.tokens <= kFewDeltaTokens,
             batch = device.sm < 90 || 4 * size.batch * delta.num_v_heads >= 3 * device.multiprocessors;
  plan.chosen[kSteps] = !few ? kStepsThenGate : batch ? kStepsInBatch : kStepsInCluster;
  if (!delta.decay_per_key) plan.chosen[kChunked] = chunks_on(device, size.tokens);
  int64_t floats = few ? 0 : size.batch * size.tokens * delta.num_v_heads * delta.v_head_size;
  if (plan.chosen[kChunked]) floats += floats_of_chunks(size.batch, size.tokens, delta.num_v_heads, kChunkFloats<true>);
  plan.workspace_bytes = static_cast<uint64_t>(floats) * 4;
  return QM_OK;
}

int plan_space(const void* node, const qm_cuda_call& call, const qm_cuda_device& device, qm_cuda_node_plan& plan,
               char* err) {
  const qm_space& space = *static_cast<const qm_space*>(node);
  QM_TRY(check_space(space, err));
  if (const int32_t size = space.state_size; size != 64 && size != 128 && size != 256)
    return fail(err, QM_UNSUPPORTED, "state_size is %d, the CUDA kernels take 64, 128 and 256", size);
  if (space.head_size % kSpaceColumns)
    return fail(err, QM_UNSUPPORTED, "head_size is %d, the CUDA kernels take multiples of %d", space.head_size,
                kSpaceColumns);
  if (constexpr int kMost = kSpaceGateEach * kSpaceGateThreads; space.norm_size > kMost)
    return fail(err, QM_UNSUPPORTED, "norm_size is %d, the CUDA kernels take up to %d", space.norm_size, kMost);
  Size size;
  QM_TRY(check_halves("xbc", call.inputs[StateSpace_xbc].type, err));
  QM_TRY(read_size(call.inputs[StateSpace_xbc], space.num_heads, size, err));
  if (space.state_size <= 128 && space.head_size % kScanColumns == 0)
    plan.chosen[kChunked] = chunks_on(device, size.tokens);
  int64_t floats = size.batch * size.tokens * width_of(space);
  if (plan.chosen[kChunked]) floats += floats_of_chunks(size.batch, size.tokens, space.num_heads, kChunkFloats<false>);
  plan.workspace_bytes = static_cast<uint64_t>(floats) * 4;
  return QM_OK;
}

}  // namespace quantmoe
