// The slow, obvious kernel: FORMAT.md section 4.2 as it is written. Every other kernel must give its bytes.
#include "cpu/elementwise.h"

namespace quantmoe {
namespace {

float load_scale(const PanelMatrix& p, const uint8_t* scales, int r) {
  if (p.scale_type == k_scale_type_f32) {
    float value;
    std::memcpy(&value, scales + 4 * r, 4);
    return value;
  }
  uint16_t bits;
  std::memcpy(&bits, scales + 2 * r, 2);
  return p.scale_type == k_scale_type_f16 ? half_to_float(bits) : bfloat_to_float(bits);
}

// Values of row r of a panel, columns [0, kp).
void decode(const PanelMatrix& p, const uint8_t* panel, int r, int8_t* values) {
  for (int64_t k = 0; k < p.kp; k += p.bits == 4 ? 32 : 8) {
    const int64_t column = k % p.block;
    const uint8_t* chunk = panel + k / p.block * p.block_bytes + column * p.nr * p.bits / 8;
    if (p.bits == 8) {
      std::memcpy(values + k, chunk + r * 8, 8);
      continue;
    }
    for (int s = 0; s < 2; ++s)
      for (int i = 0; i < 8; ++i) {
        const uint8_t byte = chunk[(s * p.nr + r) * 8 + i] ^ 0x88;
        values[k + 8 * s + i] = static_cast<int8_t>((byte & 15) - 8);
        values[k + 8 * s + i + 16] = static_cast<int8_t>((byte >> 4) - 8);
      }
  }
}

template <typename T>
T load(const uint8_t* at, int64_t index) {
  T value;
  std::memcpy(&value, at + index * static_cast<int64_t>(sizeof(T)), sizeof(T));
  return value;
}

void multiply(const Product& product) {
  static thread_local int8_t values[2 * 65536];  // kp: K is at most 65536 and the last block may be padded
  const PanelMatrix& p = *product.matrix;
  int64_t first_row = 0;
  for (int64_t t = 0; t < product.tile_count; first_row += product.tiles[t].m, ++t) {
    const int m = product.tiles[t].m;
    const uint8_t* data = product.tiles[t].data;
    const uint8_t* sums = data + p.kp * m;
    const uint8_t* steps = sums + 4 * p.blocks * m;
    for (int64_t panel = 0; panel < product.panel_count; ++panel) {
      const uint8_t* base = product.panels + panel * p.stride;
      const uint8_t* tail = base + p.tail();
      for (int r = 0; r < p.nr; ++r) {
        decode(p, base, r, values);
        for (int i = 0; i < m; ++i) {
          float acc = 0.0f;
          int32_t dot = 0;
          for (int64_t b = 0; b < p.blocks; ++b) {
            float partial = 0.0f;
            dot = 0;
            for (int64_t k = b * p.block; k < (b + 1) * p.block; ++k) {
              if (product.quantized)
                dot += values[k] * static_cast<int8_t>(data[(k & ~3) * m + 4 * i + (k & 3)]);
              else
                partial = fma(load<float>(data, k * m + i), static_cast<float>(values[k]), partial);
            }
            const float scale = p.grouped ? load_scale(p, base + b * p.block_bytes + p.codes_bytes, r) : 0.0f;
            acc = p.grouped ? fma(product.quantized ? static_cast<float>(dot) : partial, scale, acc) : partial;
          }
          const float bias = load<float>(tail, (p.grouped ? 1 : 2) * p.nr + r);
          float y;
          if (!product.quantized) {
            if (!p.grouped) acc = acc * (load<float>(tail, p.nr + r) * (p.bits == 4 ? 16.0f : 1.0f));
            y = acc + bias;
          } else {
            const float step = load<float>(steps, i);
            const int32_t zero_point = load<int32_t>(steps, m + i);
            if (p.grouped) {
              y = fma(load<float>(tail, r), static_cast<float>(-zero_point), acc) * step + bias;
            } else {
              // Unsigned: the sums of a damaged file may overflow, as they do in vector registers.
              const uint32_t corrected = (p.bits == 4 ? 16u : 1u) * static_cast<uint32_t>(dot) +
                                         load<uint32_t>(tail, r) * static_cast<uint32_t>(-zero_point);
              y = static_cast<float>(static_cast<int32_t>(corrected)) * (load<float>(tail, p.nr + r) * step) + bias;
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

const CpuKernel panel_portable = {"panel_portable", [] { return true; }, 4, QM_ELEMENTWISE(pack_tile),
                                  multiply,         int8_peak_portable};

}  // namespace quantmoe
