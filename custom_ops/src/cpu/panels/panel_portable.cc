// The slow, obvious kernel: the products of quant_moe.def as they are written. Every other kernel must give
// its bytes.
#include <algorithm>

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
float load_scale(const PanelMatrix& matrix, const uint8_t* scales, int i) {
  switch (matrix.scale_type) {
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
GroupLevels load_levels(const PanelMatrix& matrix, const uint8_t* panel, int64_t group, int row) {
  const uint8_t* block = panel + group / matrix.parts * matrix.block_bytes + matrix.codes_bytes;
  const int stored = stored_factors(matrix.format), factors = 16 * factor_size(matrix.scale_type);  // bytes
  const KLevels levels = k_levels(matrix, block + stored * factors + row, group % matrix.parts, 16);
  const auto product = [&](const uint8_t* of_block, int level) {
    const float factor = factors == 64                            ? load<float>(of_block, row)
                         : matrix.scale_type == k_scale_type_bf16 ? bfloat_to_float(load<uint16_t>(of_block, row))
                                                                  : half_to_float(load<uint16_t>(of_block, row));
    return factor * static_cast<float>(level);
  };
  const bool minima = has_minima(matrix.format);
  return {product(block, levels.scale), minima ? product(block + (stored - 1) * factors, levels.minimum) : 0.0f};
}

// Some columns of one row of a panel, decoded.
struct Decoded {
  static constexpr int64_t kColumns = 256;
  int64_t first, end;
  int32_t values[kColumns];
  float floats[kColumns];
};

// Values of row r of a panel of FORMAT.md 2.10: integers to `values`, weights to `floats`.
void decode_k(const PanelMatrix& matrix, const uint8_t* panel, int row, Decoded& out) {
  for (int64_t k = out.first; k < out.end; ++k) {
    const int column = static_cast<int>(k % 32), quad = column / 4;
    const uint8_t* chunk = panel + k / matrix.block * matrix.block_bytes + k % matrix.block / 32 * (64 * matrix.bits) +
                           4 * row + column % 4;
    const int32_t value = plane_code(chunk, quad, matrix.bits) - (matrix.format == k_format_q6_k ? 32 : 0);
    const GroupLevels levels = load_levels(matrix, panel, k / matrix.group(), row);
    out.values[k - out.first] = value;
    const float number = matrix.format == k_format_nf4       ? kNf4[value]
                         : matrix.format == k_format_bnb_fp4 ? kBnbFp4[value]
                                                             : static_cast<float>(value);
    out.floats[k - out.first] = fma(number, levels.scale, -levels.minimum);
  }
}

// Values of row r of a panel as FORMAT.md 2.8 scales them: integers to `values`, others to `floats`.
void decode(const PanelMatrix& matrix, const uint8_t* panel, int row, Decoded& out) {
  for (int64_t k = out.first; k < out.end; ++k) {
    float& number = out.floats[k - out.first];
    const uint8_t* block = panel + k / matrix.block * matrix.block_bytes;
    const int64_t column = k % matrix.block, chunk = column / 32 * 32, i = column % 32;
    if (matrix.columns) {
      const uint8_t* at = block + (column * 16 + row) * matrix.bits / 8;
      number = matrix.format == k_format_fp8_e4m3 ? e4m3_scaled(*at)
               : matrix.format == k_format_bf16   ? bfloat_to_float(load<uint16_t>(at, 0))
                                                  : half_to_float(load<uint16_t>(at, 0));
      continue;
    }
    const uint8_t byte = matrix.bits == 4 ? block[chunk * matrix.nr / 2 + (i / 8 % 2 * matrix.nr + row) * 8 + i % 8]
                                          : block[column / 8 * 8 * matrix.nr + row * 8 + i % 8];
    const int nibble = i < 16 ? byte & 15 : byte >> 4;
    const int64_t part = column / matrix.group();
    const int zero = matrix.zero_points ? block[matrix.zeros() + part * matrix.nr + row] : matrix.bits == 4 ? 8 : 128;
    const int32_t value =
        is_e2m1(matrix.format) ? kE2m1Doubled[nibble] : (matrix.bits == 4 ? nibble ^ 8 : byte ^ 0x80) - zero;
    out.values[k - out.first] = value;
    number = static_cast<float>(value);
  }
}

// A token tile's parts (cpu/kernel.h).
struct TileParts {
  const uint8_t *data, *sums, *steps;
  int m;
};

// What a row of weights and a token sum up to: over spans, of the last one alone, and of those that share its step.
struct RowSums {
  float acc, partial, of_step;
  int32_t dot;
};

// Adds the end of a span to the sum over spans.
void add_span(const PanelMatrix& matrix, bool quantized, const uint8_t* panel, int row, const TileParts& tile, int i,
              int64_t span, RowSums& sum) {
  const int64_t group = span * matrix.span / matrix.group();
  const float of_span = quantized ? static_cast<float>(sum.dot) : sum.partial;
  float scale = 1.0f, minimum = 0.0f;
  if (is_k(matrix.format)) {
    const GroupLevels levels = load_levels(matrix, panel, group, row);
    scale = levels.scale, minimum = levels.minimum;
  } else if (matrix.grouped) {
    const uint8_t* scales = panel + group / matrix.parts * matrix.block_bytes + matrix.codes_bytes;
    scale = load_scale(matrix, scales, static_cast<int>(group % matrix.parts * matrix.nr) + row);
  }
  float step = 1.0f;
  if (matrix.stepped) {
    const int64_t place = span % matrix.step_spans;
    step = load<float>(tile.steps, span / matrix.step_spans * tile.m + i);
    sum.of_step = place ? fma(of_span, scale, sum.of_step) : of_span * scale;
    if (place == matrix.step_spans - 1) sum.acc = fma(sum.of_step, step, sum.acc);
  } else if (is_k(matrix.format) && !quantized) {
    sum.acc = sum.acc + of_span;
  } else {
    sum.acc = matrix.grouped ? fma(of_span, scale, sum.acc) : sum.partial;
  }
  if (has_minima(matrix.format) && quantized) {
    const float of_tokens = static_cast<float>(load<int32_t>(tile.sums, span * tile.m + i));
    sum.acc = fma(-minimum, of_tokens * step, sum.acc);
  }
}

// Adds decoded columns of row r, times token i.
void add_columns(const PanelMatrix& matrix, bool quantized, const uint8_t* panel, int row, const TileParts& tile, int i,
                 const Decoded& decoded, RowSums& sum) {
  const int64_t size = matrix.span;
  for (int64_t first = decoded.first, end; first < decoded.end; first = end) {
    const int64_t span = first / size;
    end = std::min((span + 1) * size, decoded.end);
    const bool begins = first == span * size;
    float partial = begins ? 0.0f : sum.partial;
    int32_t dot = begins ? 0 : sum.dot;
    if (quantized) {
      for (int64_t k = first; k < end; k += 4)
        for (int c = 0; c < 4; ++c)
          dot += decoded.values[k - decoded.first + c] * static_cast<int8_t>(tile.data[k * tile.m + 4 * i + c]);
    } else {
      for (int64_t k = first; k < end; ++k)
        partial = fma(load<float>(tile.data, k * tile.m + i), decoded.floats[k - decoded.first], partial);
    }
    sum.partial = partial;
    sum.dot = dot;
    if (end == (span + 1) * size) add_span(matrix, quantized, panel, row, tile, i, span, sum);
  }
}

// The output of row r and token i.
float finish_row(const PanelMatrix& matrix, bool quantized, const uint8_t* panel, int row, const TileParts& tile, int i,
                 const RowSums& sum) {
  const uint8_t* tail = panel + matrix.tail();
  const float bias = load<float>(panel + matrix.biases(), row);
  const float scale = load<float>(tail, matrix.nr + row);  // where the tail has them: of channelwise rows, multipliers
  if (!quantized || matrix.stepped) {
    float y = sum.acc;
    if (!matrix.grouped) y = y * (scale * (matrix.bits == 4 ? 16.0f : 1.0f));
    if (matrix.multiplied()) y = y * scale;
    return y + bias;
  }
  const float step = load<float>(tile.steps, i);
  const int32_t zero_point = load<int32_t>(tile.steps, tile.m + i);
  if (matrix.grouped) {
    float y = fma(load<float>(tail, row), static_cast<float>(-zero_point), sum.acc);
    if (matrix.multiplied()) y = y * scale;
    return y * step + bias;
  }
  // Unsigned: the sums of a damaged file may overflow, as they do in vector registers.
  const uint32_t corrected = (matrix.bits == 4 ? 16u : 1u) * static_cast<uint32_t>(sum.dot) +
                             load<uint32_t>(tail, row) * static_cast<uint32_t>(-zero_point);
  return static_cast<float>(static_cast<int32_t>(corrected)) * (scale * step) + bias;
}

void multiply(const PanelProduct& product) {
  Decoded decoded;
  const PanelMatrix& matrix = *product.matrix;
  int64_t first_row = 0;
  for (int64_t tile_index = 0; tile_index < product.tile_count;
       first_row += product.tiles[tile_index].m, ++tile_index) {
    const int tokens = product.tiles[tile_index].m;
    const uint8_t *const data = product.tiles[tile_index].data, *const sums = data + matrix.kp * tokens;
    const TileParts tile{data, sums, sums + 4 * matrix.spans() * tokens, tokens};
    for (int64_t index = 0; index < product.panel_count; ++index) {
      const uint8_t* const panel = product.panels + index * matrix.stride;
      float* const out =
          product.out + index % product.halves * product.half_stride + index / product.halves * matrix.nr;
      for (int row = 0; row < matrix.nr; ++row) {
        RowSums sums[kMaxTileRows] = {};
        for (decoded.first = 0; decoded.first < matrix.kp; decoded.first = decoded.end) {
          decoded.end = std::min(decoded.first + Decoded::kColumns, matrix.kp);
          (is_k(matrix.format) ? decode_k : decode)(matrix, panel, row, decoded);
          for (int i = 0; i < tokens; ++i)
            add_columns(matrix, product.quantized, panel, row, tile, i, decoded, sums[i]);
        }
        for (int i = 0; i < tokens; ++i)
          out[(first_row + i) * product.row_stride + row] =
              finish_row(matrix, product.quantized, panel, row, tile, i, sums[i]);
      }
    }
  }
}

}  // namespace

const CpuKernel panel_portable = {
    "panel_portable",    [] { return true; },       4, QM_ELEMENTWISE(pack_tile), multiply, int8_peak_portable,
    &attention_portable, &linear_attention_portable};

}  // namespace quantmoe
