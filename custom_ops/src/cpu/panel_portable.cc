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
struct GroupLevels {
  float scale, minimum;
};
GroupLevels load_levels(const PanelMatrix& p, const uint8_t* panel, int64_t group, int r) {
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
    const GroupLevels levels = load_levels(p, panel, k / p.group(), r);
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

// A token tile's parts (cpu/kernel.h).
struct TileParts {
  const uint8_t *data, *sums, *steps;
  int m;
};

// What a row of weights and a token sum up to: over groups, and of the last one alone.
struct RowSums {
  float acc, partial;
  int32_t dot;
};

// Row r of a panel, decoded, times token i.
RowSums multiply_row(const PanelMatrix& p, bool quantized, const uint8_t* panel, int r, const TileParts& tile, int i,
                     const int32_t* values, const float* floats) {
  RowSums sum{};
  for (int64_t group = 0; group < p.groups(); ++group) {
    sum.partial = 0.0f;
    sum.dot = 0;
    for (int64_t k = group * p.group(); k < (group + 1) * p.group(); ++k) {
      if (quantized)
        sum.dot += values[k] * static_cast<int8_t>(tile.data[(k & ~3) * tile.m + 4 * i + (k & 3)]);
      else
        sum.partial = fma(load<float>(tile.data, k * tile.m + i), floats[k], sum.partial);
    }
    const float of_group = quantized ? static_cast<float>(sum.dot) : sum.partial;
    if (is_k(p.format)) {
      const GroupLevels levels = load_levels(p, panel, group, r);
      const float of_tokens = static_cast<float>(load<int32_t>(tile.sums, group * tile.m + i));
      sum.acc = quantized ? fma(-levels.minimum, of_tokens, fma(of_group, levels.scale, sum.acc)) : sum.acc + of_group;
      continue;
    }
    const uint8_t* scales = panel + group / p.parts * p.block_bytes + p.codes_bytes;
    const float scale = p.grouped ? load_scale(p, scales, static_cast<int>(group % p.parts * p.nr) + r) : 0.0f;
    if (p.stepped)
      sum.acc = fma(of_group * scale, load<float>(tile.steps, group * tile.m + i), sum.acc);
    else
      sum.acc = p.grouped ? fma(of_group, scale, sum.acc) : sum.partial;
  }
  return sum;
}

// The output of row r and token i.
float finish_row(const PanelMatrix& p, bool quantized, const uint8_t* panel, int r, const TileParts& tile, int i,
                 const RowSums& sum) {
  const uint8_t* tail = panel + p.tail();
  const float bias = load<float>(panel + p.biases(), r);
  const float scale = load<float>(tail, p.nr + r);  // where the tail has them: of channelwise rows, multipliers
  if (!quantized || p.stepped) {
    float y = sum.acc;
    if (!p.grouped) y = y * (scale * (p.bits == 4 ? 16.0f : 1.0f));
    if (p.multiplied()) y = y * scale;
    return y + bias;
  }
  const float step = load<float>(tile.steps, i);
  const int32_t zero_point = load<int32_t>(tile.steps, tile.m + i);
  if (p.grouped) {
    float y = fma(load<float>(tail, r), static_cast<float>(-zero_point), sum.acc);
    if (p.multiplied()) y = y * scale;
    return y * step + bias;
  }
  // Unsigned: the sums of a damaged file may overflow, as they do in vector registers.
  const uint32_t corrected = (p.bits == 4 ? 16u : 1u) * static_cast<uint32_t>(sum.dot) +
                             load<uint32_t>(tail, r) * static_cast<uint32_t>(-zero_point);
  return static_cast<float>(static_cast<int32_t>(corrected)) * (scale * step) + bias;
}

void multiply(const PanelProduct& product) {
  constexpr int64_t kColumns = 2 * 65536;  // kp: K is at most 65536 and the last block may be padded
  static thread_local int32_t values[kColumns];
  static thread_local float floats[kColumns];
  const PanelMatrix& p = *product.matrix;
  int64_t first_row = 0;
  for (int64_t t = 0; t < product.tile_count; first_row += product.tiles[t].m, ++t) {
    const int m = product.tiles[t].m;
    const uint8_t *const data = product.tiles[t].data, *const sums = data + p.kp * m;
    const TileParts tile{data, sums, sums + 4 * p.groups() * m, m};
    for (int64_t index = 0; index < product.panel_count; ++index) {
      const uint8_t* const panel = product.panels + index * p.stride;
      float* const out = product.out + index % product.halves * product.half_stride + index / product.halves * p.nr;
      for (int r = 0; r < p.nr; ++r) {
        (is_k(p.format) ? decode_k : decode)(p, panel, r, values, floats);
        for (int i = 0; i < m; ++i) {
          const RowSums sum = multiply_row(p, product.quantized, panel, r, tile, i, values, floats);
          out[(first_row + i) * product.row_stride + r] = finish_row(p, product.quantized, panel, r, tile, i, sum);
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
