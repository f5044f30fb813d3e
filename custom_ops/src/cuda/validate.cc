// What the kernels of QuantMoE, QuantLinear and MoERouting take. Pure; runs without a GPU.
#include "cuda/validate.h"

#include <string>

#include "cuda/layout.h"

namespace quantmoe {
namespace {

constexpr int64_t kMaxExperts = 8192;    // moe_route counts them in shared memory
constexpr int64_t kMaxCached = 4096;     // resolve_experts has them and their slots in 48 KiB of shared memory
constexpr int kMaxRoutedExperts = 2048;  // moe_select keeps four words of each there

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
int validate_floats(const qm_projection& w, const char* name, int type, char* err) {
  if (w.format != (type == QM_F16 ? k_format_f16 : k_format_bf16))
    return fail(err, QM_UNSUPPORTED,
                "%s_format is %s and activations are %s; the CUDA kernels multiply floats of one type", name,
                enum_name("format", w.format), type == QM_F16 ? "float16" : "bfloat16");
  const struct {
    const char* name;
    int value, want;
  } plain[] = {{"group_size", w.group_size, -1},
               {"block_n", w.block_n, 1},
               {"zero_points", w.zero_points, 0},
               {"perm", w.perm, 0},
               {"pre_scale", w.pre_scale, 0}};
  for (const auto& p : plain)
    if (p.value != p.want)
      return fail(err, QM_UNSUPPORTED, "%s_%s is %d, the CUDA kernels take %d for floats", name, p.name, p.value,
                  p.want);
  if (w.scale_type != k_scale_type_f32)
    return fail(err, QM_UNSUPPORTED, "%s_scale_type is %s, the CUDA kernels take f32 for floats", name,
                enum_name("scale_type", w.scale_type));
  if (w.activation_format != k_activation_format_none)
    return fail(err, QM_UNSUPPORTED, "%s_activation_format is %s, the CUDA kernels take none for floats", name,
                enum_name("activation_format", w.activation_format));
  return validate_flag(w.bias, name, "_bias", err);
}

int validate_layout(const qm_projection& w, const char* name, char* err) {
  if (w.layout == k_layout_marlin && w.layout_version == kMarlinVersion) return QM_OK;
  return fail(err, QM_INVALID, "%s_layout is %s version %d, the CUDA kernels read marlin version %d: %s", name,
              enum_name("layout", w.layout), w.layout_version, kMarlinVersion,
              w.layout != k_layout_marlin         ? "export with --target cuda"
              : w.layout_version > kMarlinVersion ? "a later quantmoe wrote it"
                                                  : "export the model again");
}

// name: of the projection, the prefix of its attributes; type: of the activations; most_orders: that its perm may say.
int validate_weights(const qm_projection& w, const char* name, int type, int most_orders, char* err) {
  QM_TRY(validate_layout(w, name, err));
  if (FloatFacts::is(w)) return validate_floats(w, name, type, err);
  const char *format = enum_name("format", w.format), *scales = enum_name("scale_type", w.scale_type);
  if (!takes_format(w.format))
    return fail(err, QM_UNSUPPORTED, "%s_format is %s, the CUDA kernels take %s", name, format,
                enum_names("format", takes_format).c_str());
  if (w.zero_points != 0 && !(w.zero_points == 1 && takes_zero_points(w.format)))
    return fail(err, QM_UNSUPPORTED, "%s_zero_points is %d, the CUDA kernels take 0, and 1 with %s", name,
                w.zero_points, enum_names("format", takes_zero_points).c_str());
  if (w.block_n < 1) return fail(err, QM_INVALID, "%s_block_n is %d, expected 1 or more", name, w.block_n);
  const auto taken = [&](int32_t type) { return takes_scales(w, type); };
  const char* instead = is_integer(w.format) ? ": export with --scales bf16" : "";
  if (!taken(w.scale_type))
    return fail(err, QM_UNSUPPORTED, "%s_scale_type is %s, the CUDA kernels take %s for %s%s", name, scales,
                enum_names("scale_type", taken).c_str(), format, w.scale_type == k_scale_type_f32 ? instead : "");
  const int g = w.group_size;
  if (const int of_format = group_size_of(w); of_format && g != of_format)
    return fail(err, QM_UNSUPPORTED, "%s_group_size is %d, the CUDA kernels take %d for %s with %s scales", name, g,
                of_format, format, scales);
  else if (!of_format && g != -1 && g != 32 && (g < 64 || g & (g - 1)))
    return fail(err, QM_UNSUPPORTED, "%s_group_size is %d, the CUDA kernels take -1, 32 and powers of two from 64",
                name, g);
  if (w.scale_type == k_scale_type_f32 && g == 32)
    return fail(err, QM_UNSUPPORTED,
                "%s_scale_type is f32 with group_size 32, the CUDA kernels take f32 scales of groups of 64 and more: "
                "export with --scales bf16",
                name);
  if (w.pre_scale != 0 && w.pre_scale != 1)
    return fail(err, QM_UNSUPPORTED, "%s_pre_scale is %d, the CUDA kernels take 0 and 1", name, w.pre_scale);
  if (w.perm < 0 || w.perm > most_orders)
    return fail(err, QM_UNSUPPORTED, "%s_perm is %d, the CUDA kernels take 0 to %d", name, w.perm, most_orders);
  return validate_flag(w.bias, name, "_bias", err);
}

// Parts of a row are found by 32-bit offsets.
int validate_row(const qm_moe& m, int projection, const char* name, char* err) {
  MarlinRow row{};
  marlin_row_of(m, projection, &row);
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

int validate_moe(const qm_cuda_problem& p, const qm_cuda_device& device, char* err) {
  const qm_moe& m = p.moe;
  QM_TRY(check_node("QuantMoE", &m, err));
  QM_TRY(validate_machine(p.type, "hidden_states are", device, err));
  if (p.id_bytes != 4 && p.id_bytes != 8)
    return fail(err, QM_INVALID, "topk_ids are %d bytes wide, expected 4 or 8", p.id_bytes);
  if (m.hidden_size <= 0 || m.hidden_size % 8)
    return fail(err, QM_UNSUPPORTED, "hidden_size is %d, the CUDA kernels take positive multiples of 8", m.hidden_size);
  if (m.intermediate_size <= 0)
    return fail(err, QM_INVALID, "intermediate_size is %d, expected a positive number", m.intermediate_size);
  if (p.local_experts <= 0 || p.local_experts > kMaxExperts)
    return fail(err, QM_UNSUPPORTED, "w13 has %lld experts, the CUDA kernels take 1 to %lld",
                static_cast<long long>(p.local_experts), static_cast<long long>(kMaxExperts));
  if (m.expert_offset < 0 || m.expert_offset + p.local_experts > m.num_experts)
    return fail(err, QM_INVALID, "experts [%d, %lld) are not inside num_experts = %d", m.expert_offset,
                static_cast<long long>(m.expert_offset + p.local_experts), m.num_experts);
  if (p.tokens < 0 || p.top_k <= 0 || p.tokens > INT32_MAX / 2 / p.top_k)
    return fail(err, QM_INVALID, "topk_ids is [%lld, %lld], expected at least [0, 1] and at most %d ids",
                static_cast<long long>(p.tokens), static_cast<long long>(p.top_k), INT32_MAX / 2);
  if (p.slots < 0 || p.slots > p.local_experts || p.staging < 0 || (p.staging && !p.slots))
    return fail(err, QM_INVALID, "a cache has %d slots and %d rows of staging for %lld experts", p.slots, p.staging,
                static_cast<long long>(p.local_experts));
  if (p.slots && (p.local_experts > kMaxCached))
    return fail(err, QM_UNSUPPORTED, "a cache is for %lld experts, the CUDA kernels take up to %lld",
                static_cast<long long>(p.local_experts), static_cast<long long>(kMaxCached));
  QM_TRY(validate_flag(m.gated, "", "gated", err));
  QM_TRY(validate_flag(m.apply_router_weight_on_input, "", "apply_router_weight_on_input", err));
  QM_TRY(check_activation(m, err));
  for (int which : {13, 2}) {
    const char* name = which == 13 ? "w13" : "w2";
    const int orders = which == 13 && m.gated ? 2 : 1;
    QM_TRY(validate_weights(which == 13 ? m.w13 : m.w2, name, p.type, orders, err));
    QM_TRY(validate_row(m, which, name, err));
  }
  return check_marlin_layer(m.w13, m.w2, err);
}

int validate_linear(const qm_cuda_linear_problem& p, const qm_cuda_device& device, char* err) {
  const qm_linear& l = p.linear;
  QM_TRY(check_node("QuantLinear", &l, err));
  QM_TRY(validate_machine(p.type, "x is", device, err));
  if (l.in_features <= 0 || l.in_features % 8)
    return fail(err, QM_UNSUPPORTED, "in_features is %d, the CUDA kernels take positive multiples of 8", l.in_features);
  if (l.out_features <= 0)
    return fail(err, QM_INVALID, "out_features is %d, expected a positive number", l.out_features);
  if (p.rows < 0 || p.rows > INT32_MAX / 2)
    return fail(err, QM_INVALID, "x has %lld rows, expected 0 to %d", static_cast<long long>(p.rows), INT32_MAX / 2);
  QM_TRY(validate_weights(l.w, "w", p.type, 1, err));
  return validate_row(moe_of(l), 2, "w", err);
}

}  // namespace quantmoe

using namespace quantmoe;

extern "C" int qm_cuda_validate_routing(const qm_cuda_routing_problem* problem, char* err) {
  const qm_routing& r = problem->routing;
  QM_TRY(check_routing(r, {kMaxRoutedExperts, false, "the CUDA kernel takes"}, err));
  if (problem->type < QM_F32 || problem->type > QM_BF16)
    return fail(err, QM_INVALID, "type is %d, the CUDA kernel takes %d to %d", problem->type, QM_F32, QM_BF16);
  if (problem->tokens < 0 || problem->tokens > INT32_MAX)
    return fail(err, QM_INVALID, "logits have %lld rows, expected 0 to %d", static_cast<long long>(problem->tokens),
                INT32_MAX);
  return QM_OK;
}
