// What the kernels of QuantMoE and QuantLinear take. Pure; runs without a GPU.
#include "cuda/moe/validate.h"

#include <string>

#include "cuda/common/layout.h"

namespace quantmoe {
namespace {

constexpr int64_t kMaxExperts = 8192;  // moe_route counts them in shared memory
constexpr int64_t kMaxCached = 4096;   // resolve_experts has them and their slots in 48 KiB of shared memory

int validate_flag(int value, const char* prefix, const char* name, char* err) {
  if (value == 0 || value == 1) return QM_OK;
  return fail(err, QM_INVALID, "%s%s is %d, expected 0 or 1", prefix, name, value);
}

// kind_of calls weights that are of no format floats.
bool takes_format(int32_t format) {
  qm_projection w{};
  w.format = format;
  return kind_of(w) != WeightKind::kFloat || FloatFacts::is(w);
}
bool takes_zero_points(int32_t format) {
  qm_projection w{};
  w.format = format, w.zero_points = 1;
  return zero_bytes(kind_of(w)) > 0;
}

// Floats, which are what the activations are.
int validate_floats(const qm_projection& weights, const char* name, int type, char* err) {
  if (weights.format != (type == QM_F16 ? k_format_f16 : k_format_bf16))
    return fail(err, QM_UNSUPPORTED,
                "%s_format is %s and activations are %s; the CUDA kernels multiply floats of one type", name,
                enum_name("format", weights.format), type == QM_F16 ? "float16" : "bfloat16");
  const struct {
    const char* name;
    int value, want;
  } plain[] = {{"group_size", weights.group_size, -1},
               {"block_n", weights.block_n, 1},
               {"zero_points", weights.zero_points, 0},
               {"perm", weights.perm, 0},
               {"pre_scale", weights.pre_scale, 0}};
  for (const auto& attribute : plain)
    if (attribute.value != attribute.want)
      return fail(err, QM_UNSUPPORTED, "%s_%s is %d, the CUDA kernels take %d for floats", name, attribute.name,
                  attribute.value, attribute.want);
  if (weights.scale_type != k_scale_type_f32)
    return fail(err, QM_UNSUPPORTED, "%s_scale_type is %s, the CUDA kernels take f32 for floats", name,
                enum_name("scale_type", weights.scale_type));
  if (weights.activation_format != k_activation_format_none)
    return fail(err, QM_UNSUPPORTED, "%s_activation_format is %s, the CUDA kernels take none for floats", name,
                enum_name("activation_format", weights.activation_format));
  return validate_flag(weights.bias, name, "_bias", err);
}

int validate_layout(const qm_projection& weights, const char* name, char* err) {
  if (weights.layout == k_layout_marlin && weights.layout_version == kMarlinVersion) return QM_OK;
  return fail(err, QM_INVALID, "%s_layout is %s version %d, the CUDA kernels read marlin version %d: %s", name,
              enum_name("layout", weights.layout), weights.layout_version, kMarlinVersion,
              weights.layout != k_layout_marlin         ? "export with --target cuda"
              : weights.layout_version > kMarlinVersion ? "a later quantmoe wrote it"
                                                        : "export the model again");
}

// name: of the projection, the prefix of its attributes; type: of the activations; most_orders: that its perm may say.
int validate_weights(const qm_projection& weights, const char* name, int type, int most_orders, char* err) {
  QM_TRY(validate_layout(weights, name, err));
  if (FloatFacts::is(weights)) return validate_floats(weights, name, type, err);
  const char *format = enum_name("format", weights.format), *scales = enum_name("scale_type", weights.scale_type);
  if (!takes_format(weights.format))
    return fail(err, QM_UNSUPPORTED, "%s_format is %s, the CUDA kernels take %s", name, format,
                enum_names("format", takes_format).c_str());
  if (weights.zero_points != 0 && !(weights.zero_points == 1 && takes_zero_points(weights.format)))
    return fail(err, QM_UNSUPPORTED, "%s_zero_points is %d, the CUDA kernels take 0, and 1 with %s", name,
                weights.zero_points, enum_names("format", takes_zero_points).c_str());
  if (weights.activation_format == k_activation_format_int8_group)
    return fail(err, QM_UNSUPPORTED,
                "%s_activation_format is int8_group, the CUDA kernels do not quantize in groups: export with "
                "--activations float or int8-token",
                name);
  if (weights.block_n < 1) return fail(err, QM_INVALID, "%s_block_n is %d, expected 1 or more", name, weights.block_n);
  const int group = weights.group_size, of_format = group_size_of(weights);
  if (!of_format && group != -1 && group != 32 && (group < 64 || group & (group - 1)))  // no other scales would do
    return fail(err, QM_UNSUPPORTED, "%s_group_size is %d, the CUDA kernels take -1, 32 and powers of two from 64",
                name, group);
  const auto taken = [&](int32_t type) { return takes_scales(weights, type); };
  const char* instead = is_integer(weights.format) ? ": export with --scales bf16" : "";
  if (!taken(weights.scale_type))
    return fail(err, QM_UNSUPPORTED, "%s_scale_type is %s, the CUDA kernels take %s for %s%s", name, scales,
                enum_names("scale_type", taken).c_str(), format, weights.scale_type == k_scale_type_f32 ? instead : "");
  if (of_format && group != of_format)
    return fail(err, QM_UNSUPPORTED, "%s_group_size is %d, the CUDA kernels take %d for %s with %s scales", name, group,
                of_format, format, scales);
  if (weights.scale_type == k_scale_type_f32 && group == 32)
    return fail(err, QM_UNSUPPORTED,
                "%s_scale_type is f32 with group_size 32, the CUDA kernels take f32 scales of groups of 64 and more: "
                "export with --scales bf16",
                name);
  if (weights.pre_scale != 0 && weights.pre_scale != 1)
    return fail(err, QM_UNSUPPORTED, "%s_pre_scale is %d, the CUDA kernels take 0 and 1", name, weights.pre_scale);
  if (weights.perm < 0 || weights.perm > most_orders)
    return fail(err, QM_UNSUPPORTED, "%s_perm is %d, the CUDA kernels take 0 to %d", name, weights.perm, most_orders);
  return validate_flag(weights.bias, name, "_bias", err);
}

// Parts of a row are found by 32-bit offsets.
int validate_row(const qm_moe& moe, int projection, const char* name, char* err) {
  MarlinRow row{};
  marlin_row_of(moe, projection, &row);
  if (row.bytes > UINT32_MAX)
    return fail(err, QM_UNSUPPORTED, "%s has rows of %llu bytes, the CUDA kernels take less than 2^32", name,
                static_cast<unsigned long long>(row.bytes));
  return QM_OK;
}

int validate_machine(int type, const char* what, const qm_cuda_device& device, char* err) {
  if (type != QM_F16 && type != QM_BF16)
    return fail(err, QM_UNSUPPORTED, "%s type %d, the CUDA kernels take float16 (1) and bfloat16 (2)", what, type);
  if (device.sm < 80)
    return fail(err, QM_UNSUPPORTED, "compute capability %d.%d, the kernels need 8.0 or later", device.sm / 10,
                device.sm % 10);
  return QM_OK;
}

}  // namespace

int validate_moe(const MoEProblem& problem, const qm_cuda_device& device, char* err) {
  const qm_moe& moe = problem.moe;
  QM_TRY(check_node("QuantMoE", &moe, err));
  QM_TRY(validate_machine(problem.type, "hidden_states are", device, err));
  if (problem.id_bytes != 4 && problem.id_bytes != 8)
    return fail(err, QM_INVALID, "topk_ids are of another type than int32 and int64");
  if (moe.hidden_size <= 0 || moe.hidden_size % 8)
    return fail(err, QM_UNSUPPORTED, "hidden_size is %d, the CUDA kernels take positive multiples of 8",
                moe.hidden_size);
  if (moe.intermediate_size <= 0)
    return fail(err, QM_INVALID, "intermediate_size is %d, expected a positive number", moe.intermediate_size);
  if (problem.local_experts <= 0 || problem.local_experts > kMaxExperts)
    return fail(err, QM_UNSUPPORTED, "w13 has %lld experts, the CUDA kernels take 1 to %lld",
                static_cast<long long>(problem.local_experts), static_cast<long long>(kMaxExperts));
  if (moe.expert_offset < 0 || moe.expert_offset + problem.local_experts > moe.num_experts)
    return fail(err, QM_INVALID, "experts [%d, %lld) are not inside num_experts = %d", moe.expert_offset,
                static_cast<long long>(moe.expert_offset + problem.local_experts), moe.num_experts);
  if (problem.tokens < 0 || problem.top_k <= 0 || problem.tokens > INT32_MAX / 2 / problem.top_k)
    return fail(err, QM_INVALID, "topk_ids is [%lld, %lld], expected at least [0, 1] and at most %d ids",
                static_cast<long long>(problem.tokens), static_cast<long long>(problem.top_k), INT32_MAX / 2);
  if (problem.slots < 0 || problem.slots > problem.local_experts || problem.staging < 0 ||
      (problem.staging && !problem.slots))
    return fail(err, QM_INVALID, "a cache has %d slots and %d rows of staging for %lld experts", problem.slots,
                problem.staging, static_cast<long long>(problem.local_experts));
  if (problem.slots && (problem.local_experts > kMaxCached))
    return fail(err, QM_UNSUPPORTED, "a cache is for %lld experts, the CUDA kernels take up to %lld",
                static_cast<long long>(problem.local_experts), static_cast<long long>(kMaxCached));
  if (problem.host_share < 0 || problem.host_share > 256 || (problem.host_share && !problem.slots))
    return fail(err, QM_INVALID, "the host's share of misses is %d of 256 with %d slots, expected 0 to 256, 0 of none",
                problem.host_share, problem.slots);
  if (problem.host_share &&
      (problem.tokens > QM_CUDA_HOST_TOKENS || problem.tokens * problem.top_k > QM_CUDA_HOST_PAIRS))
    return fail(err, QM_INVALID, "topk_ids of a call with a host's share are [%lld, %lld], expected at most %d and %d",
                static_cast<long long>(problem.tokens), static_cast<long long>(problem.top_k), QM_CUDA_HOST_TOKENS,
                QM_CUDA_HOST_PAIRS);
  QM_TRY(validate_flag(moe.gated, "", "gated", err));
  QM_TRY(validate_flag(moe.apply_router_weight_on_input, "", "apply_router_weight_on_input", err));
  QM_TRY(check_activation(moe, err));
  if (moe.w2_hadamard)
    return fail(err, QM_UNSUPPORTED,
                "w2_hadamard is %d (the input of down_proj is rotated in each run), which no CUDA kernel does: export "
                "with --target cpu",
                moe.w2_hadamard);
  for (int which : {13, 2}) {
    const char* name = which == 13 ? "w13" : "w2";
    const int orders = which == 13 && moe.gated ? 2 : 1;
    QM_TRY(validate_weights(which == 13 ? moe.w13 : moe.w2, name, problem.type, orders, err));
    QM_TRY(validate_row(moe, which, name, err));
  }
  return check_marlin_layer(moe.w13, moe.w2, err);
}

int validate_linear(const LinearProblem& problem, const qm_cuda_device& device, char* err) {
  const qm_linear& linear = problem.linear;
  QM_TRY(check_node("QuantLinear", &linear, err));
  QM_TRY(validate_machine(problem.type, "x is", device, err));
  if (linear.in_features <= 0 || linear.in_features % 8)
    return fail(err, QM_UNSUPPORTED, "in_features is %d, the CUDA kernels take positive multiples of 8",
                linear.in_features);
  if (linear.out_features <= 0)
    return fail(err, QM_INVALID, "out_features is %d, expected a positive number", linear.out_features);
  if (problem.rows < 0 || problem.rows > INT32_MAX / 2)
    return fail(err, QM_INVALID, "x has %lld rows, expected 0 to %d", static_cast<long long>(problem.rows),
                INT32_MAX / 2);
  QM_TRY(validate_weights(linear.w, "w", problem.type, 1, err));
  return validate_row(moe_of(linear), 2, "w", err);
}

}  // namespace quantmoe
