// The slow, obvious kernel: FORMAT.md section 4.2 as it is written. Every other kernel must give its bytes.
#include "core/minifloat.h"
#include "cpu/elementwise.h"

namespace quantmoe {
namespace {

template <typename T>
T load(const uint8_t* at, int64_t index) {
  T value;
  std::memcpy(&value, at + index * static_cast<int64_t>(sizeof(T)), sizeof(T));
  return value;
}

// Scale or zero point i of the nr * parts that end a block.
float load_scale(const PanelMatrix& p, const uint8_t* scales, int i) {
  switch (p.scale_type) {
    case k_scale_type_f32:
      return load<float>(scales, i);
    case k_scale_type_f16:
      return half_to_float(load<uint16_t>(scales, i));
    case k_scale_type_bf16:
      return bfloat_to_float(load<uint16_t>(scales, i));
    case k_scale_type_e8m0:
      return e8m0(scales[i]);
    default:
      return e4m3_scaled(scales[i]);
  }
}

// Scale and minimum of a group of FORMAT.md 2.10.
struct Levels {
  float scale, minimum;
};
Levels load_levels(const PanelMatrix& p, const uint8_t* panel, int64_t group, int r) {
  const uint8_t* at = panel + group / p.parts * p.block_bytes + p.codes_bytes;
  const bool minima = p.format != k_format_q6_k;
  const uint8_t* const codes = at + (minima ? 64 : 32) + group % p.parts * 16;
  const auto product = [&](const uint8_t* of_block, const uint8_t* of_group) {
    return half_to_float(load<uint16_t>(of_block, r)) * static_cast<float>(load<int8_t>(of_group, r));
  };
  return {product(at, codes), minima ? product(at + 32, codes + 16 * p.parts) : 0.0f};
}

// Values of row r of a panel of FORMAT.md 2.10: integers to `values`, weights to `floats`.
void decode_k(const PanelMatrix& p, const uint8_t* panel, int r, int32_t* values, float* floats) {
  for (int64_t k = 0; k < p.kp; ++k) {
    const int column = static_cast<int>(k % 32), quad = column / 4;
    const uint8_t* chunk =
        panel + k / p.block * p.block_bytes + k % p.block / 32 * (p.codes_bytes / 8) + 4 * r + column % 4;
    const int nibble = chunk[quad % 4 * 64] >> (quad < 4 ? 0 : 4) & 15;
    const int high = p.bits == 5   ? chunk[256] >> quad & 1
                     : p.bits == 6 ? chunk[256 + quad / 4 * 64] >> quad % 4 * 2 & 3
                                   : 0;
    values[k] = (nibble | high << 4) - (p.bits == 6 ? 32 : 0);
    const Levels levels = load_levels(p, panel, k / p.group(), r);
    floats[k] = fma(static_cast<float>(values[k]), levels.scale, -levels.minimum);
  }
}

// Values of row r of a panel, columns [0, kp), as FORMAT.md 2.8 scales them: integers to `values`, others to `floats`.
void decode(const PanelMatrix& p, const uint8_t* panel, int r, int32_t* values, float* floats) {
  for (int64_t k = 0; k < p.kp; ++k) {
    const uint8_t* block = panel + k / p.block * p.block_bytes;
    const int64_t column = k % p.block, chunk = column / 32 * 32, i = column % 32;
    if (p.columns) {
      const uint8_t* at = block + (column * 16 + r) * p.bits / 8;
      floats[k] = p.format == k_format_fp8_e4m3 ? e4m3_scaled(*at)
                  : p.format == k_format_bf16   ? bfloat_to_float(load<uint16_t>(at, 0))
                                                : half_to_float(load<uint16_t>(at, 0));
      continue;
    }
    const uint8_t byte = p.bits == 4 ? block[chunk * p.nr / 2 + (i / 8 % 2 * p.nr + r) * 8 + i % 8]
                                     : block[column / 8 * 8 * p.nr + r * 8 + i % 8];
    const int nibble = i < 16 ? byte & 15 : byte >> 4;
    const int64_t part = column / p.group();
    const int zero = p.zero_points ? block[p.zeros() + part * p.nr + r] : p.bits == 4 ? 8 : 128;
    values[k] = is_e2m1(p.format) ? kE2m1Doubled[nibble] : (p.bits == 4 ? nibble ^ 8 : byte ^ 0x80) - zero;
    floats[k] = static_cast<float>(values[k]);
  }
}

void multiply(const Product& product) {
  constexpr int64_t kColumns = 2 * 65536;  // kp: K is at most 65536 and the last block may be padded
  static thread_local int32_t values[kColumns];
  static thread_local float floats[kColumns];
  const PanelMatrix& p = *product.matrix;
  int64_t first_row = 0;
  for (int64_t t = 0; t < product.tile_count; first_row += product.tiles[t].m, ++t) {
    const int m = product.tiles[t].m;
    const uint8_t* data = product.tiles[t].data;
    const uint8_t* sums = data + p.kp * m;
    const uint8_t* steps = sums + 4 * p.groups() * m;
    for (int64_t panel = 0; panel < product.panel_count; ++panel) {
      const uint8_t* base = product.panels + panel * p.stride;
      const uint8_t* tail = base + p.tail();
      for (int r = 0; r < p.nr; ++r) {
        (is_k(p.format) ? decode_k : decode)(p, base, r, values, floats);
        for (int i = 0; i < m; ++i) {
          float acc = 0.0f;
          int32_t dot = 0;
          for (int64_t group = 0; group < p.groups(); ++group) {
            float partial = 0.0f;
            dot = 0;
            for (int64_t k = group * p.group(); k < (group + 1) * p.group(); ++k) {
              if (product.quantized)
                dot += values[k] * static_cast<int8_t>(data[(k & ~3) * m + 4 * i + (k & 3)]);
              else
                partial = fma(load<float>(data, k * m + i), floats[k], partial);
            }
            if (is_k(p.format)) {
              const Levels levels = load_levels(p, base, group, r);
              const float of_sum = static_cast<float>(load<int32_t>(sums, group * m + i));
              acc = product.quantized ? fma(-levels.minimum, of_sum, fma(static_cast<float>(dot), levels.scale, acc))
                                      : acc + partial;
              continue;
            }
            const uint8_t* scales = base + group / p.parts * p.block_bytes + p.codes_bytes;
            const float scale = p.grouped ? load_scale(p, scales, static_cast<int>(group % p.parts * p.nr) + r) : 0.0f;
            if (p.stepped)
              acc = fma(static_cast<float>(dot) * scale, load<float>(steps, group * m + i), acc);
            else
              acc = p.grouped ? fma(product.quantized ? static_cast<float>(dot) : partial, scale, acc) : partial;
          }
          const float bias = load<float>(base + p.biases(), r);
          // Where the tail has them: scales of channelwise rows, multipliers.
          const float scale = load<float>(tail, p.nr + r);
          float y;
          if (!product.quantized || p.stepped) {
            if (!p.grouped) acc = acc * (scale * (p.bits == 4 ? 16.0f : 1.0f));
            if (p.multiplied()) acc = acc * scale;
            y = acc + bias;
          } else {
            const float step = load<float>(steps, i);
            const int32_t zero_point = load<int32_t>(steps, m + i);
            if (p.grouped) {
              acc = fma(load<float>(tail, r), static_cast<float>(-zero_point), acc);
              if (p.multiplied()) acc = acc * scale;
              y = acc * step + bias;
            } else {
              // Unsigned: the sums of a damaged file may overflow, as they do in vector registers.
              const uint32_t corrected = (p.bits == 4 ? 16u : 1u) * static_cast<uint32_t>(dot) +
                                         load<uint32_t>(tail, r) * static_cast<uint32_t>(-zero_point);
              y = static_cast<float>(static_cast<int32_t>(corrected)) * (scale * step) + bias;
            }
          }
          product.out[(first_row + i) * product.row_stride + (panel % product.halves) * product.half_stride +
                      panel / product.halves * p.nr + r] = y;
        }
      }
    }
  }
}

}  // namespace

const CpuKernel panel_portable = {
    "panel_portable",    [] { return true; },       4, QM_ELEMENTWISE(pack_tile), multiply, int8_peak_portable,
    &attention_portable, &linear_attention_portable};

}  // namespace quantmoe
