#include "cpu/moe/down.h"

#include <cmath>

namespace quantmoe {
namespace {

// Activation formats with a step for a group of features: of features before act-order, quant_moe.def, Activations.
bool is_groupwise(int32_t activation_format) {
  return activation_format == k_activation_format_fp8_group128 || activation_format == k_activation_format_nvfp4 ||
         activation_format == k_activation_format_mxfp8 || activation_format == k_activation_format_mxfp4;
}

}  // namespace

Down::Down(const LayerCall& layer, const qm_projection& node, const PanelMatrix& panel, const RowParts& parts,
           const void* rows, const float* weights, void* output)
    : w2(node, panel, parts, rows, 1), layer_(layer), weights_(weights), output_(static_cast<uint8_t*>(output)) {}

void Down::plan() {
  const int64_t most = layer_.most_lanes;
  column_ranges_ = std::clamp<int64_t>(most > 1 ? (layer_.tokens < kSerialRows ? 8 : 4) * most : 1, 1,
                                       ceil_div(w2.panel.n, layer_.columns_of_task()));
}

void Down::lay_out_tokens(Arena& arena) {
  tiles_ = arena.take<uint8_t>(layer_.pairs() * w2.tile_bytes);
  y_ = arena.take<float>(layer_.type == QM_F32 ? 0 : layer_.tokens * w2.panel.n);
}

void Down::lay_out(Arena& arena) { w2.largest = arena.take<uint32_t>(layer_.local_experts); }

float* Down::sums() const {
  return layer_.type == QM_F32 ? reinterpret_cast<float*>(output_) + layer_.first_token * w2.panel.n : y_;
}

void Down::pack(int lane, int64_t expert, int64_t first, int64_t last, const Hidden& from, const RowScratch& scratch,
                uint8_t* bad_tokens) {
  const Routes& routes = layer_.routes;
  const int64_t rows = routes.rows(expert), count = layer_.tile_count(rows), k = w2.panel.k;
  if (rows == 0) return;
  // h has the order of the packed columns, as packing reordered the rows of gate and up.
  const bool regrouped = w2.node.perm && is_groupwise(w2.node.activation_format);
  const bool own = w2.is_expert_dependent() || regrouped;
  Preparation how{};
  if (own) {
    how = w2.known_preparation(expert, 0, regrouped);
    how.packed = true;
    if (regrouped && !w2.check_perm(how.perm, expert)) return;
  }
  int64_t position = routes.begin[expert] + first * (rows / count) + std::min(first, rows % count);
  uint8_t* data = tiles_ + position * w2.tile_bytes;
  for (int64_t tile_index = first; tile_index < last; ++tile_index) {
    const int tokens = LayerCall::rows_of_tile(rows, count, tile_index);
    ActivationRow list[kMaxTileRows];
    for (int i = 0; i < tokens; ++i, ++position) {
      const float* h = from.h + position * k;
      // The next row, which other cores have written: one line after the other, each would be waited for.
      for (int64_t at = 0; at < k; at += 16) __builtin_prefetch(h + k + at);
      const RowBuffers buffers = scratch.at(lane, i);
      const bool finite = own ? prepare_row(layer_.kernel, w2, how, h, buffers, &list[i])
                              : prepare_plain_row(layer_.kernel, w2, h, buffers, &list[i]);
      if (!finite) mark(bad_tokens + routes.order[position].token);
    }
    layer_.kernel.pack_tile(w2.panel, w2.quantized, list, tokens, data);
    data += tokens * w2.tile_bytes;
  }
}

void Down::multiply() const {
  const int64_t n = w2.panel.n, range = align_up(ceil_div(n, column_ranges_), layer_.columns_of_task());
  layer_.for_each(ceil_div(n, range),
                  [&](int lane, int64_t i) { multiply_range(lane, i * range, std::min(n, (i + 1) * range)); });
}

// Adds the products of some tiles, the rows from position `first` on, to y in columns [begin, end).
void Down::multiply_tiles(int lane, int64_t expert, const TokenTile* tiles, int64_t count, int64_t first, int64_t rows,
                          int64_t begin, int64_t end, float* y) const {
  const PanelMatrix& panel = w2.panel;
  const Pair* const order = layer_.routes.order + first;
  float* const out = layer_.out(lane);
  for (int64_t column = begin; column < end; column += kColumnsPerStep) {
    const int64_t columns = std::min(kColumnsPerStep, end - column);
    layer_.kernel.multiply({&panel, w2.quantized, w2.row(expert) + column / panel.nr * panel.stride,
                            ceil_div(columns, panel.nr), tiles, count, out, kColumnsPerStep, 0, 1});
    for (int64_t i = 0; i < rows; ++i) {
      // Rows of y are scattered: ask for the one that comes some rows later.
      const float* later = y + order[std::min(i + 4, rows - 1)].token * panel.n + column;
      for (int64_t line = 0; line < columns; line += 16) __builtin_prefetch(later + line, 1);
      const Pair pair = order[i];
      const int64_t of_call = (layer_.first_token + pair.token) * layer_.top_k + pair.slot;
      layer_.kernel.accumulate(weights_ ? weights_[of_call] : 1.0f, out + i * kColumnsPerStep, columns,
                               y + pair.token * panel.n + column);
    }
  }
}

void Down::multiply_range(int lane, int64_t begin, int64_t end) const {
  const int64_t stride = w2.panel.n;
  float* const y = sums();
  if (layer_.first_expert == 0)
    for (int64_t t = 0; t < layer_.tokens; ++t) std::fill(y + t * stride + begin, y + t * stride + end, 0.0f);
  for (int64_t expert = layer_.first_expert; expert < layer_.end_expert; ++expert) {
    const int64_t all_rows = layer_.routes.rows(expert), count = layer_.tile_count(all_rows);
    int64_t tile = 0, position = layer_.routes.begin[expert];
    while (tile < count) {
      // As many tiles as fit a block of rows.
      TokenTile tiles[kBlockRows];
      int64_t taken = 0, rows = 0;
      const int64_t first = position;
      for (; tile < count; ++tile) {
        const int tokens = LayerCall::rows_of_tile(all_rows, count, tile);
        if (rows + tokens > layer_.block_rows) break;
        tiles[taken++] = {tiles_ + position * w2.tile_bytes, tokens};
        position += tokens;
        rows += tokens;
      }
      multiply_tiles(lane, expert, tiles, taken, first, rows, begin, end, y);
    }
  }
  if (layer_.end_expert < layer_.local_experts) return;
  for (int64_t t = 0; t < layer_.tokens; ++t) {
    float* row = y + t * stride + begin;
    if (layer_.bad[t]) std::fill(row, row + (end - begin), NAN);
    layer_.kernel.from_float(layer_.type, row, end - begin,
                             output_ + ((layer_.first_token + t) * stride + begin) * layer_.element());
  }
}

}  // namespace quantmoe
