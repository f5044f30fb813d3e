// CausalConv, GatedDelta and StateSpace: what the kernels take, and the plan. Pure; runs without a GPU.
#include <algorithm>

#include "core/attributes.h"
#include "cuda/state/linear_attention.h"
#include "quantmoe/quant_moe_cuda.h"

namespace quantmoe {
namespace {

int validate_call(const char* input, int32_t type, int64_t batch, int64_t tokens, int64_t blocks, char* err) {
  if (type != QM_F16 && type != QM_BF16)
    return fail(err, QM_UNSUPPORTED, "%s is of type %d, the CUDA kernels take float16 (1) and bfloat16 (2)", input,
                type);
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
}  // namespace quantmoe

using namespace quantmoe;

extern "C" int qm_cuda_validate_conv(const qm_cuda_conv_problem* problem, char* err) {
  const qm_conv& conv = problem->conv;
  QM_TRY(check_conv(conv, err));
  if (conv.channels % 2)
    return fail(err, QM_UNSUPPORTED, "channels is %d, the CUDA kernel takes even numbers", conv.channels);
  if (conv.x_size % 2 || conv.x_offset % 2)
    return fail(err, QM_UNSUPPORTED, "x_size is %d and x_offset %d, the CUDA kernel takes even numbers", conv.x_size,
                conv.x_offset);
  if (conv.width < kLeastConvWidth || conv.width > kMostConvWidth)
    return fail(err, QM_UNSUPPORTED, "width is %d, the CUDA kernel takes %d to %d", conv.width, kLeastConvWidth,
                kMostConvWidth);
  return validate_call("x", problem->type, problem->batch, problem->tokens, problem->tokens / kConvTokens, err);
}

extern "C" int qm_cuda_plan_delta(const qm_cuda_delta_problem* problem, const qm_cuda_device* device,
                                  qm_cuda_delta_plan* plan, char* err) {
  const qm_delta& delta = problem->delta;
  QM_TRY(check_delta(delta, err));
  for (const int size : {delta.k_head_size, delta.v_head_size})
    if (size != 64 && size != 128)
      return fail(err, QM_UNSUPPORTED, "k_head_size is %d and v_head_size %d, the CUDA kernels take 64 and 128",
                  delta.k_head_size, delta.v_head_size);
  if (delta.decay_per_key && (delta.a_size % 4 || delta.a_offset % 4))
    return fail(err, QM_UNSUPPORTED, "a_size is %d and a_offset %d, the CUDA kernels take multiples of 4", delta.a_size,
                delta.a_offset);
  QM_TRY(validate_call("qkv", problem->type, problem->batch, problem->tokens, delta.num_v_heads, err));
  const bool few = problem->tokens <= kFewDeltaTokens;
  *plan = qm_cuda_delta_plan{};
  plan->columns = few && device->sm < 90 ? delta.v_head_size : kFewDeltaColumns;
  plan->cluster = few ? delta.v_head_size / plan->columns : 1;
  if (!delta.decay_per_key) plan->chunked = chunks_on(*device, problem->tokens);
  int64_t floats = few ? 0 : problem->batch * problem->tokens * delta.num_v_heads * delta.v_head_size;
  if (plan->chunked) {
    plan->columns = kScanColumns;
    floats += floats_of_chunks(problem->batch, problem->tokens, delta.num_v_heads, kChunkFloats<true>);
  }
  plan->workspace_bytes = static_cast<uint64_t>(floats) * 4;
  return QM_OK;
}

extern "C" int qm_cuda_plan_space(const qm_cuda_space_problem* problem, const qm_cuda_device* device,
                                  qm_cuda_space_plan* plan, char* err) {
  const qm_space& space = problem->space;
  QM_TRY(check_space(space, err));
  if (const int32_t size = space.state_size; size != 64 && size != 128 && size != 256)
    return fail(err, QM_UNSUPPORTED, "state_size is %d, the CUDA kernels take 64, 128 and 256", size);
  if (space.head_size % kSpaceColumns)
    return fail(err, QM_UNSUPPORTED, "head_size is %d, the CUDA kernels take multiples of %d", space.head_size,
                kSpaceColumns);
  if (constexpr int kMost = kSpaceGateEach * kSpaceGateThreads; space.norm_size > kMost)
    return fail(err, QM_UNSUPPORTED, "norm_size is %d, the CUDA kernels take up to %d", space.norm_size, kMost);
  QM_TRY(validate_call("xbc", problem->type, problem->batch, problem->tokens, space.num_heads, err));
  *plan = qm_cuda_space_plan{};
  if (space.state_size <= 128 && space.head_size % kScanColumns == 0)
    plan->chunked = chunks_on(*device, problem->tokens);
  int64_t floats = problem->batch * problem->tokens * width_of(space);
  if (plan->chunked) floats += floats_of_chunks(problem->batch, problem->tokens, space.num_heads, kChunkFloats<false>);
  plan->workspace_bytes = static_cast<uint64_t>(floats) * 4;
  return QM_OK;
}
