// The scores of SparseIndexer: ops/sparse_indexer.def, on the vectors of attention.h. A tile's heads share the turned
// keys.
#pragma once
#include "cpu/attention/attention.h"

namespace quantmoe {
namespace {

// The tile's queries, in panels.
template <class Isa>
void index_queries(const IndexerContext& indexer, const IndexerTile& tile, float* scratch) {
  const int64_t heads = indexer.node.num_heads, size = indexer.node.head_size, rows = tile.tokens * heads;
  const int64_t element = indexer.call.type == QM_F32 ? 4 : 2;
  float* const y = scratch + indexer.query_at();
  for (int64_t panel = 0; panel < panel_count<Isa>(rows); ++panel) {
    const int64_t first = panel_row<Isa>(rows, panel), count = panel_row<Isa>(rows, panel + 1) - first;
    for (int64_t i = 0; i < count; ++i) {
      const int64_t position = indexer.position(tile.b, tile.token + (first + i) / heads);
      const auto* const x = static_cast<const uint8_t*>(indexer.call.query);
      to_float(indexer.call.type, x + (position * heads + (first + i) % heads) * size * element, size, y);
      for (int64_t f = 0; f < size; ++f) scratch[first * size + f * count + i] = y[f];
    }
  }
}

// scores[i] = sum over heads of weights[head] * max(products[head][i], least), heads ascending.
void add_heads(const float* products, const float* weights, int64_t heads, float least, int64_t count, float* scores) {
  std::fill(scores, scores + count, 0.0f);
  for (int64_t head = 0; head < heads; ++head, products += kScoreStride) {
    const float weight = weights[head];
    for (int64_t i = 0; i < count; ++i) scores[i] = fma(weight, products[i] < least ? least : products[i], scores[i]);
  }
}

template <class Isa, class C>
void index_of(const IndexerContext& indexer, const IndexerTile& tile, int64_t first, int64_t count, float* scratch,
              float* scores, int64_t stride) {
  const int64_t heads = indexer.node.num_heads, size = indexer.node.head_size, rows = tile.tokens * heads;
  const int64_t last = indexer.scored(indexer.slot(tile.b, tile.token + tile.tokens - 1)) - 1;
  const int64_t groups = indexer.node.num_groups, each = heads / groups, stepped = indexer.step() * size;
  const float least = indexer.node.relu ? 0.0f : -kInfinity;
  float *const turned = scratch + indexer.keys_at(), *const products = scratch + indexer.products_at();
  const C* const keys = reinterpret_cast<const C*>(indexer.keys(tile.b, indexer.step() - 1));
  index_queries<Isa>(indexer, tile, scratch);
  for (int64_t block = first; block < first + count; ++block) {
    const int64_t at = block * kAttentionBlock, end = std::min(at + kAttentionBlock, align_up(last + 1, 16));
    for (int64_t step = at; step < end; step += kAttentionStep) {
      const int64_t sixteens = std::min(kAttentionStep, end - step) / 16;
      for (int64_t i = 0; i < sixteens; ++i) {
        const C* key[16];
        for (int64_t j = 0; j < 16; ++j) key[j] = keys + std::min(step + i * 16 + j, last) * stepped;
        turn_keys<Isa>(key, size, turned + i * size * 16);
      }
      const auto* const next = reinterpret_cast<const char*>(keys + (step + kAttentionBlock) * stepped);
      multiply_keys<Isa, kAttentionStep * sizeof(C)>(scratch, rows, size, turned, size * 16, sixteens, 1.0f,
                                                     products + step - at, {kScoreStride, 16}, {next, next, stepped});
    }
    for (int64_t list = 0; list < tile.tokens * groups; ++list)
      add_heads(products + list * each * kScoreStride,
                indexer.call.head_weights + indexer.position(tile.b, tile.token) * heads + list * each, each, least,
                end - at, scores + list * stride + at);
  }
}
template <class Isa>
void index(const IndexerContext& indexer, const IndexerTile& tile, int64_t first, int64_t count, float* scratch,
           float* scores, int64_t stride) {
  if (indexer.cache_type == QM_F32) return index_of<Isa, float>(indexer, tile, first, count, scratch, scores, stride);
  index_of<Isa, uint16_t>(indexer, tile, first, count, scratch, scores, stride);
}

}  // namespace
}  // namespace quantmoe
