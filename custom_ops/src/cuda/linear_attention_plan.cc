// CausalConv and GatedDelta: what the kernels take, and the plan. Pure; runs without a GPU.
#include <algorithm>

#include "core/attributes.h"
#include "cuda/linear_attention.h"
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

}  // namespace
}  // namespace quantmoe

using namespace quantmoe;

extern "C" int qm_cuda_validate_conv(const qm_cuda_conv_problem* problem, char* err) {
  const qm_conv& c = problem->conv;
  QM_TRY(check_conv(c, err));
  if (c.channels % 2)
    return fail(err, QM_UNSUPPORTED, "channels is %d, the CUDA kernel takes even numbers", c.channels);
  if (c.x_size % 2) return fail(err, QM_UNSUPPORTED, "x_size is %d, the CUDA kernel takes even numbers", c.x_size);
  if (c.width < kLeastConvWidth || c.width > kMostConvWidth)
    return fail(err, QM_UNSUPPORTED, "width is %d, the CUDA kernel takes %d to %d", c.width, kLeastConvWidth,
                kMostConvWidth);
  return validate_call("x", problem->type, problem->batch, problem->tokens, problem->tokens / kConvTokens, err);
}

extern "C" int qm_cuda_plan_delta(const qm_cuda_delta_problem* problem, const qm_cuda_device* device,
                                  qm_cuda_delta_plan* plan, char* err) {
  const qm_delta& d = problem->delta;
  QM_TRY(check_delta(d, err));
  for (const int size : {d.k_head_size, d.v_head_size})
    if (size != 64 && size != 128)
      return fail(err, QM_UNSUPPORTED, "k_head_size is %d and v_head_size %d, the CUDA kernels take 64 and 128",
                  d.k_head_size, d.v_head_size);
  if (d.decay_per_key && (d.a_size % 4 || d.a_offset % 4))
    return fail(err, QM_UNSUPPORTED, "a_size is %d and a_offset %d, the CUDA kernels take multiples of 4", d.a_size,
                d.a_offset);
  QM_TRY(validate_call("qkv", problem->type, problem->batch, problem->tokens, d.num_v_heads, err));
  const bool few = problem->tokens <= kFewDeltaTokens;
  *plan = qm_cuda_delta_plan{};
  plan->columns = few && device->sm < 90 ? d.v_head_size : kFewDeltaColumns;
  plan->cluster = few ? d.v_head_size / plan->columns : 1;
  plan->chunked =
      problem->tokens >= kLeastChunkedTokens && !d.decay_per_key && device->shared_bytes > kDeltaScanShared + 1024;
  int64_t floats = few ? 0 : problem->batch * problem->tokens * d.num_v_heads * d.v_head_size;
  if (plan->chunked) {
    plan->columns = kDeltaScanColumns;
    const int64_t chunks = std::min<int64_t>(kMostDeltaChunks, (problem->tokens + kDeltaTokens - 1) / kDeltaTokens);
    floats += problem->batch * chunks * d.num_v_heads * kDeltaMade;
  }
  plan->workspace_bytes = static_cast<uint64_t>(floats) * 4;
  return QM_OK;
}
