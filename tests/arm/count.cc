// Runs the products that instructions.py counts, each with 128 and with 256 columns of zeros, and prints a line for
// each: kernel, format, rows, and the multiply-accumulates that the second has more than the first. What runs between
// two calls of mark() is one product.
#include <cstdio>
#include <vector>

#include "cpu/kernel.h"

extern "C" [[gnu::noinline]] void mark() { asm volatile(""); }

namespace {
using namespace quantmoe;

struct Format {
  const char* name;
  int32_t format, scale_type;
  int group_size;
  bool zero_points;
  int32_t activation_format;
  bool kleidiai;  // has it
};
constexpr int32_t kInt8 = k_activation_format_int8_token_asym, kNone = k_activation_format_none;
constexpr Format kFormats[] = {
    {"int4, groups of 32", k_format_int4, k_scale_type_bf16, 32, false, kInt8, true},
    {"int4, groups of 128", k_format_int4, k_scale_type_bf16, 128, false, kInt8, true},
    {"int4, channelwise", k_format_int4, k_scale_type_bf16, -1, false, kInt8, true},
    {"int8, channelwise", k_format_int8, k_scale_type_bf16, -1, false, kInt8, true},
    {"int4, groups of 32, zero points", k_format_int4, k_scale_type_bf16, 32, true, kInt8, false},
    {"int4, groups of 128, zero points", k_format_int4, k_scale_type_bf16, 128, true, kInt8, false},
    {"int4, groups of 16", k_format_int4, k_scale_type_bf16, 16, false, kInt8, false},
    {"mxfp4", k_format_mxfp4, k_scale_type_e8m0, 32, false, kInt8, false},
    {"nvfp4", k_format_nvfp4, k_scale_type_e4m3, 16, false, kInt8, false},
    {"nvfp4, nvfp4 activations", k_format_nvfp4, k_scale_type_e4m3, 16, false, k_activation_format_nvfp4, false},
    {"int4, groups of 32, float activations", k_format_int4, k_scale_type_bf16, 32, false, kNone, false},
    {"int4, groups of 32, zero points, float activations", k_format_int4, k_scale_type_bf16, 32, true, kNone, false},
    {"mxfp4, float activations", k_format_mxfp4, k_scale_type_e8m0, 32, false, kNone, false},
    {"nvfp4, float activations", k_format_nvfp4, k_scale_type_e4m3, 16, false, kNone, false},
    {"fp8_e4m3, groups of 128", k_format_fp8_e4m3, k_scale_type_bf16, 128, false, kNone, false},
    {"bf16", k_format_bf16, k_scale_type_f32, -1, false, kNone, false},
    {"f16", k_format_f16, k_scale_type_f32, -1, false, kNone, false},
};

// That many zero bytes, and what a kernel may read past a tile.
std::vector<uint64_t> zeros(int64_t bytes) { return std::vector<uint64_t>(static_cast<size_t>(bytes / 8 + 8)); }

int64_t run(const CpuKernel& kernel, const Format& f, int rows, int64_t k) {
  constexpr int64_t kFeatures = 16;  // one panel, two or four
  qm_projection w{};
  w.format = f.format;
  w.scale_type = f.scale_type;
  w.group_size = f.group_size;
  w.zero_points = f.zero_points;
  w.activation_format = f.activation_format;
  const PanelMatrix p = panel_matrix(w, kFeatures, k);
  const bool quantized = is_int8_activation(w) || p.stepped;
  const auto panels = zeros(p.panels * p.stride), rows_of_x = zeros(rows * tile_row_bytes(p, quantized));
  auto out = zeros(4 * rows * kFeatures);
  const TokenTile tile{reinterpret_cast<const uint8_t*>(rows_of_x.data()), rows};
  const PanelProduct product{&p,
                             quantized,
                             reinterpret_cast<const uint8_t*>(panels.data()),
                             p.panels,
                             &tile,
                             1,
                             reinterpret_cast<float*>(out.data()),
                             kFeatures,
                             0,
                             1};
  mark();
  kernel.multiply(product);
  mark();
  return rows * k * kFeatures;
}

}  // namespace

int main() {
  for (const CpuKernel* kernel : {&panel_kleidiai, &panel_neon_i8mm, &panel_neon_dotprod})
    for (const Format& f : kFormats)
      for (int rows : {1, 4, 8}) {
        // Others are the same code: a pass is 4 units, and of float activations 4 rows with either instruction set.
        if (kernel == &panel_kleidiai && !f.kleidiai) continue;
        if (kernel == &panel_neon_dotprod && (rows == 8 || f.activation_format == kNone)) continue;
        if (kernel == &panel_neon_i8mm && rows == (f.activation_format == kNone ? 8 : f.kleidiai ? 0 : 4)) continue;
        const int64_t less = run(*kernel, f, rows, 128);
        std::printf("%s|%s|%d|%lld\n", kernel->name, f.name, rows,
                    static_cast<long long>(run(*kernel, f, rows, 256) - less));
      }
}
