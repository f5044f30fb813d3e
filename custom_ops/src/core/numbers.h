// Rounding of sizes, and what op.def's formats and types of scales take.
#pragma once
#include <cstdint>

#include "core/attributes.h"

namespace quantmoe {

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
constexpr int64_t align_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }

constexpr int scale_size(int32_t scale_type) {
  return scale_type == k_scale_type_f32 ? 4 : scale_type == k_scale_type_f16 || scale_type == k_scale_type_bf16 ? 2 : 1;
}
constexpr bool is_integer(int32_t format) { return format == k_format_int4 || format == k_format_int8; }
constexpr bool is_e2m1(int32_t format) { return format == k_format_mxfp4 || format == k_format_nvfp4; }
constexpr int code_bits(int32_t format) {
  return format == k_format_bf16 || format == k_format_f16        ? 16
         : format == k_format_int8 || format == k_format_fp8_e4m3 ? 8
                                                                  : 4;
}

}  // namespace quantmoe
