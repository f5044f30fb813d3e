// Runs the products that instructions.py counts, each with 128 and with 256 columns of zeros, and prints a line for
// each: kernel, what, and the multiply-accumulates that the second has more than the first. What runs between two
// calls of mark() is one product.
#include <cstdio>
#include <cstring>
#include <vector>

#include "cpu/kernel.h"

namespace {
using namespace quantmoe;

extern "C" [[gnu::noinline]] void mark() { asm volatile(""); }

// A tensor of that many bytes, and what a kernel may read past a tile.
std::vector<uint64_t> zeros(int64_t bytes) { return std::vector<uint64_t>(static_cast<size_t>(bytes / 8 + 8)); }

int64_t run(const CpuKernel& kernel, const qm_projection& w, int rows, int64_t k) {
  constexpr int64_t kFeatures = 16;  // one panel, two, or four
  const PanelMatrix p = panel_matrix(w, kFeatures, k);
  const bool quantized = is_int8_activation(w) || p.stepped;
  const auto panels = zeros(p.panels * p.stride), rows_of_x = zeros(rows * tile_row_bytes(p, quantized));
  auto out = zeros(4 * rows * kFeatures);
  const Tile tile{reinterpret_cast<const uint8_t*>(rows_of_x.data()), rows};
  const Product product{&p,    quantized, reinterpret_cast<const uint8_t*>(panels.data()), p.panels, &tile, 1,
                        reinterpret_cast<float*>(out.data()), kFeatures, 0, 1};
  mark();
  kernel.multiply(product);
  mark();
  return rows * k * kFeatures;
}

}  // namespace

int main() {
  constexpr int32_t kInt8 = k_activation_format_int8_token_asym, kNone = k_activation_format_none;
  const struct {
    const char* name;
    int32_t format, scale_type;
    int group_size;
    bool zero_points;
    int32_t activation_format;
  } formats[] = {
      {"int4 bf16 32", k_format_int4, k_scale_type_bf16, 32, false, kInt8},
      {"int4 bf16 128", k_format_int4, k_scale_type_bf16, 128, false, kInt8},
      {"int4 bf16 channelwise", k_format_int4, k_scale_type_bf16, -1, false, kInt8},
      {"int8 bf16 channelwise", k_format_int8, k_scale_type_bf16, -1, false, kInt8},
      {"int4 bf16 32 zeros", k_format_int4, k_scale_type_bf16, 32, true, kInt8},
      {"int4 bf16 128 zeros", k_format_int4, k_scale_type_bf16, 128, true, kInt8},
      {"int4 bf16 16", k_format_int4, k_scale_type_bf16, 16, false, kInt8},
      {"mxfp4 32", k_format_mxfp4, k_scale_type_e8m0, 32, false, kInt8},
      {"nvfp4 16", k_format_nvfp4, k_scale_type_e4m3, 16, false, kInt8},
      {"nvfp4 16 stepped", k_format_nvfp4, k_scale_type_e4m3, 16, false, k_activation_format_nvfp4},
      {"int4 bf16 32 float", k_format_int4, k_scale_type_bf16, 32, false, kNone},
      {"int4 bf16 32 zeros float", k_format_int4, k_scale_type_bf16, 32, true, kNone},
      {"mxfp4 32 float", k_format_mxfp4, k_scale_type_e8m0, 32, false, kNone},
      {"nvfp4 16 float", k_format_nvfp4, k_scale_type_e4m3, 16, false, kNone},
      {"fp8_e4m3 bf16 128", k_format_fp8_e4m3, k_scale_type_bf16, 128, false, kNone},
      {"bf16", k_format_bf16, k_scale_type_f32, -1, false, kNone},
      {"f16", k_format_f16, k_scale_type_f32, -1, false, kNone},
  };
  for (const CpuKernel* kernel : {&panel_kleidiai, &panel_neon_i8mm, &panel_neon_dotprod})
    for (const auto& f : formats)
      for (int rows : {1, 4, 8}) {
        qm_projection w{};
        w.format = f.format;
        w.scale_type = f.scale_type;
        w.group_size = f.group_size;
        w.zero_points = f.zero_points;
        w.activation_format = f.activation_format;
        const int64_t less = run(*kernel, w, rows, 128);
        std::printf("%s, %s, %d row%s: %lld\n", kernel->name, f.name, rows, rows == 1 ? "" : "s",
                    static_cast<long long>(run(*kernel, w, rows, 256) - less));
      }
}
