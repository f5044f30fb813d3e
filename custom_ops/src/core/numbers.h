// Rounding of sizes, and what op.def's formats and types of scales take.
#pragma once
#include <cstdint>

#include "core/attributes.h"

namespace quantmoe {

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
constexpr int64_t align_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }

constexpr int scale_size(int32_t scale_type) {
  return scale_type == k_scale_type_f32                                      ? 4
         : scale_type == k_scale_type_f16 || scale_type == k_scale_type_bf16 ? 2
         : scale_type == k_scale_type_k32                                    ? 20
         : scale_type == k_scale_type_k16                                    ? 18
         : scale_type == k_scale_type_k16_minima                             ? 20
         : scale_type == k_scale_type_f16_minima                             ? 4
         : scale_type == k_scale_type_f32_minima                             ? 8
                                                                             : 1;
}
constexpr bool is_integer(int32_t format) { return format == k_format_int4 || format == k_format_int8; }
constexpr bool is_e2m1(int32_t format) { return format == k_format_mxfp4 || format == k_format_nvfp4; }
// FORMAT.md 2.10: whether codes are integers in planes, features of a group, and whether codes are places in a table of
// floats. Then whether groups have a minimum: a scale times a zero point is one.
constexpr bool is_k(int32_t format) { return format >= k_format_q4_k && format <= k_format_int6; }
constexpr bool is_plane_integer(int32_t format) { return format >= k_format_int2 && format <= k_format_int6; }
constexpr int k_group(int32_t format) { return format == k_format_q6_k || format == k_format_q2_k ? 16 : 32; }
constexpr bool is_table(int32_t format) { return format == k_format_nf4 || format == k_format_bnb_fp4; }
// Whether its codes are multiplied by floats only.
constexpr bool of_floats(int32_t format) { return is_table(format) || format == k_format_q8_min; }
constexpr bool has_minima(int32_t format) { return is_k(format) && format != k_format_q6_k && !is_table(format); }
constexpr bool takes_zero_point(int32_t format) { return is_integer(format) || is_plane_integer(format); }
// Of scales of these formats: how many factors of a block are stored, bytes of one, and whether groups have numbers
// beside it.
constexpr int stored_factors(int32_t format) { return has_minima(format) && !is_plane_integer(format) ? 2 : 1; }
constexpr int factor_size(int32_t scale_type) {
  return scale_type == k_scale_type_f32 || scale_type == k_scale_type_f32_minima ? 4 : 2;
}
constexpr bool has_levels(int32_t scale_type) {
  return scale_type == k_scale_type_k32 || scale_type == k_scale_type_k16 || scale_type == k_scale_type_k16_minima;
}
constexpr int code_bits(int32_t format) {
  static_assert(count_values("format") == 20, "a new format: its bits, and is_integer, is_e2m1");
  return format == k_format_bf16 || format == k_format_f16        ? 16
         : format == k_format_int8 || format == k_format_fp8_e4m3 ? 8
         : format == k_format_q8_min                              ? 8
         : format == k_format_q6_k || format == k_format_int6     ? 6
         : format == k_format_q5_k || format == k_format_q5_1     ? 5
         : format == k_format_int5                                ? 5
         : format == k_format_int3                                ? 3
         : format == k_format_q2_k || format == k_format_int2     ? 2
                                                                  : 4;
}

// The group sizes and types of scales of each.
constexpr bool takes_k_scales(int32_t format, int32_t group_size, int32_t scale_type) {
  const bool power = group_size == 32 || group_size == 64 || group_size == 128 || group_size == 256;
  if (is_plane_integer(format))
    return (group_size == -1 || (group_size > 0 && group_size <= 65536 && group_size % 32 == 0)) &&
           scale_type <= k_scale_type_bf16;
  if (is_table(format)) return power && scale_type == k_scale_type_f32;
  if (format == k_format_q8_min) return power && scale_type == k_scale_type_f32_minima;
  if (format == k_format_q4_1 || format == k_format_q5_1)
    return scale_type == k_scale_type_f16_minima ? group_size == 32 : power && scale_type == k_scale_type_f32_minima;
  return group_size == 256 && scale_type == (format == k_format_q6_k   ? k_scale_type_k16
                                             : format == k_format_q2_k ? k_scale_type_k16_minima
                                                                       : k_scale_type_k32);
}
constexpr const char* kKScales =
    "q4_k and q5_k have k32 scales, q6_k has k16 and q2_k k16_minima scales, in groups of 256; q4_1 and q5_1 have "
    "f16_minima scales in groups of 32; in groups of 32, 64, 128 or 256, q4_1, q5_1 and q8_min have f32_minima scales, "
    "nf4 and bnb_fp4 f32 scales; int2, int3, int5 and int6 have f32, f16 or bf16 scales in groups of -1 or a multiple "
    "of 32 up to 65536";

// Whether the row holds the scales that its activations are quantized with.
inline bool has_input_scales(const qm_projection& w) {
  return w.activation_format == k_activation_format_fp8_tensor || w.activation_format == k_activation_format_nvfp4;
}

}  // namespace quantmoe
