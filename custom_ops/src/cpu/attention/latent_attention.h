// CachedAttention that multiplies by the up-projections of its latents itself: its .def, on the vectors of
// attention.h.
//
//   few new tokens    query -> k_up -> as a query of latents (attention.h) -> v_up -> output
//   many              a head's block of latents -> k_up, v_up -> keys and values, which all its queries then share
//
// The queries of all tokens are there before the first block, so that a block is expanded once.
#pragma once
#include "cpu/attention/attention.h"
#include "cpu/attention/indexer.h"

namespace quantmoe {
namespace {

// x [n] as row `row` of weights of values, where a piece has `rows` of them.
inline void to_weights(const float* x, int64_t n, int64_t row, int64_t rows, float* weights) {
  for (int64_t at = 0; at < n; at += kAttentionBlock)
    std::copy_n(x + at, std::min(kAttentionBlock, n - at),
                weights + (at / kAttentionBlock * rows + row) * kScoreStride);
}

// out[r] = sum of x[r][i] matrix[i], i ascending, for `count` rows of weights from x on; matrix: [n][width]. A cold
// matrix is read once, in the order of memory. Reading takes the time, not the sums, which are not in registers.
template <class Isa>
void multiply_rows(int64_t count, const float* x, int64_t rows, int64_t n, const float* matrix, int64_t width,
                   float* out, bool cold) {
  std::fill(out, out + count * width, 0.0f);
  for (int64_t at = 0; at < n; at += kAttentionBlock, x += rows * kScoreStride) {
    const int64_t here = std::min(kAttentionBlock, n - at);
    if (!cold) {
      add_values<Isa, false>(count, x, matrix + at * width, width, width, here, out, width);
      continue;
    }
    for (int64_t i = 0; i < here; ++i)
      for (int64_t r = 0; r < count; ++r)
        accumulate(x[r * kScoreStride + i], matrix + (at + i) * width, width, out + r * width);
  }
}

// A head's matrix [n][width] of k_up or v_up, rows padded to vectors: where it is, or in `wide`.
inline const float* matrix_of(qm_type type, const void* all, int64_t head, int64_t n, int64_t width, float* wide) {
  const int64_t padded = align_up(width, 16), element = type == QM_F32 ? 4 : 2;
  const uint8_t* const own = static_cast<const uint8_t*>(all) + head * n * width * element;
  if (type == QM_F32 && padded == width) return reinterpret_cast<const float*>(own);
  for (int64_t i = 0; i < n; ++i) {
    to_float(type, own + i * width * element, width, wide + i * padded);
    std::fill(wide + i * padded + width, wide + (i + 1) * padded, 0.0f);
  }
  return wide;
}

// A token's query of a head, its features that turn turned; returns the token's place in the call.
inline int64_t query_of(const LatentContext& latent, int64_t batch_row, int64_t token, int64_t head, float* y) {
  const int64_t size = query_size(latent.node), element = latent.call.type == QM_F32 ? 4 : 2;
  const int64_t position = batch_row * latent.call.tokens + latent.call.rows[3 * batch_row] + token;
  to_float(latent.call.type,
           static_cast<const uint8_t*>(latent.call.qkv) + (position * qkv_size(latent.node) + head * size) * element,
           size, y);
  rotate(latent.node, latent.call, position, y + latent.node.nope_size);
  return position;
}

// begin(batch_row, token, i) for panels of up to kRows tokens, i counting them, then end(count, whether it is the
// first) for each.
template <class Isa, class Begin, class End>
void each_panel(const AbsorbedRows& rows, const Begin& begin, const End& end) {
  int count = 0;
  bool first = true;
  for (int64_t batch_row = 0; batch_row < rows.count; ++batch_row) {
    for (int64_t token = 0; token < rows.rows[3 * batch_row + 1]; ++token) {
      begin(batch_row, token, count);
      if (++count < Isa::kRows) continue;
      end(count, first);
      count = 0;
      first = false;
    }
  }
  if (count) end(count, first);
}

template <class Isa>
void absorb(const LatentContext& latent, const AbsorbedRows& rows, int64_t head, float* scratch) {
  static_assert(Isa::kRows <= kMostRows, "scratch");
  const int64_t nope = latent.node.nope_size, rank = latent.rank(), padded = latent.padded_rank(),
                head_size = latent.node.head_size;
  const float* const matrix = matrix_of(latent.call.type, latent.call.k_up, head, nope, rank, scratch);
  float *const panel = scratch + latent.panel_at(), *const sums = scratch + latent.panel_sums_at(), *to[kMostRows];
  each_panel<Isa>(
      rows,
      [&](int64_t batch_row, int64_t token, int i) {
        float* const y = scratch + latent.query_at();
        query_of(latent, rows.first_row + batch_row, rows.first_token + token, head, y);
        to_weights(y, nope, i, kMostRows, panel);
        to[i] =
            rows.queries +
            ((batch_row * rows.tokens + token) * (latent.node.num_heads + latent.node.kv_num_heads) + head) * head_size;
        std::copy_n(y + nope, head_size - rank, to[i]);
      },
      [&](int count, bool first) {
        multiply_rows<Isa>(count, panel, kMostRows, nope, matrix, padded, sums, first);
        for (int i = 0; i < count; ++i) std::copy_n(sums + i * padded, rank, to[i] + head_size - rank);
      });
}

template <class Isa>
void release(const LatentContext& latent, const AbsorbedRows& rows, int64_t head, float* scratch) {
  const int64_t rank = latent.rank(), size = latent.node.out_size, padded = latent.padded_outputs(),
                heads = latent.node.num_heads;
  const int64_t element = latent.call.type == QM_F32 ? 4 : 2;
  const float* const matrix = matrix_of(latent.call.type, latent.call.v_up, head, rank, size, scratch);
  float *const panel = scratch + latent.panel_at(), *const sums = scratch + latent.panel_sums_at();
  uint8_t* to[kMostRows];
  each_panel<Isa>(
      rows,
      [&](int64_t batch_row, int64_t token, int i) {
        to_weights(rows.outputs + ((batch_row * rows.tokens + token) * heads + head) * rank, rank, i, kMostRows, panel);
        const int64_t row = rows.first_row + batch_row,
                      position = row * latent.call.tokens + latent.call.rows[3 * row] + rows.first_token + token;
        to[i] = static_cast<uint8_t*>(latent.call.output) + (position * heads + head) * size * element;
      },
      [&](int count, bool first) {
        multiply_rows<Isa>(count, panel, kMostRows, rank, matrix, padded, sums, first);
        for (int i = 0; i < count; ++i) from_float(latent.call.type, sums + i * padded, size, to[i]);
      });
}

// The keys, turned, and the values of a block's slots.
template <class Isa, class C>
void expand_block(const LatentContext& latent, const Block<C>& cache, SlotRange all, const float* v_up,
                  float* scratch) {
  const AttentionContext latents{latent.node, latent.call, nullptr};
  const int64_t nope = latent.node.nope_size, head_size = latent.node.head_size, rank = latent.rank(),
                turning = latent.turning();
  const int64_t keys = query_size(latent.node) * 16, width = latent.padded_outputs();
  float *const turned = scratch + latent.turned_at(), *const weights = scratch + latent.latents_at();
  float* const wide = scratch + latent.keys_at() - latent.padded_rank();
  for (int64_t step = all.begin / 16 * 16; step < all.end; step += kAttentionStep) {
    const int64_t sixteens = std::min(kAttentionStep, align_up(all.end, 16) - step) / 16;
    float* const into = scratch + latent.keys_at() + step / 16 * keys;
    for (int64_t i = 0; i < sixteens; ++i) {
      turn_slots<Isa>(latents, cache, step + i * 16, all.end - 1, turned + i * head_size * 16);
      std::copy_n(turned + i * head_size * 16, turning * 16, into + i * keys + nope * 16);
    }
    multiply_keys<Isa, 0>(scratch, nope, rank, turned + turning * 16, head_size * 16, sixteens, 1.0f, into, {16, keys},
                          {});
    const int64_t first = std::max(step, all.begin), count = std::min(step + kAttentionStep, all.end) - first;
    for (int64_t i = 0; i < count; ++i) {
      widen_value<Isa>(latents, cache, first + i, wide);
      to_weights(wide, rank, i, kAttentionStep, weights);
    }
    for (int64_t panel = 0; panel < panel_count<Isa>(count); ++panel) {
      const int64_t row = panel_row<Isa>(count, panel);
      multiply_rows<Isa>(panel_row<Isa>(count, panel + 1) - row, weights + row * kScoreStride, kAttentionStep, rank,
                         v_up, width, scratch + latent.values_at() + (first + row) * width, false);
    }
  }
}

// What a task that expands computes with: heads that share nothing.
inline qm_attention expanded_node(qm_attention node) {
  node.head_size = query_size(node);
  node.v_head_size = node.out_size;
  node.kv_num_heads = node.num_heads;
  node.key_split = node.nope_size = 0;
  return node;
}

template <class Isa, class C>
void expand_of(const LatentContext& latent, int64_t batch_row, int64_t head, int64_t first, int64_t tokens,
               float* scratch) {
  const qm_attention node = expanded_node(latent.node);
  const AttentionContext context{node, latent.call, nullptr};
  const int64_t head_size = node.head_size, rank = latent.rank(), part = context.part_floats();
  float *const queries = scratch + latent.queries_at(), *const scores = scratch + latent.scores_at();
  float *const parts = scratch + latent.parts_at(), *const sums = scratch + latent.sums_at();
  const auto each_tile = [&](const auto& body) {
    for (int64_t at = 0; at < tokens; at += kTileQueries)
      body(AttentionTile{batch_row, head, first + at, std::min(kTileQueries, tokens - at)}, queries + at * head_size,
           sums + at * part);
  };
  // Rows to panels.
  const auto interleave = [](int64_t rows, int64_t size, const auto& row, float* out) {
    for (int64_t panel = 0; panel < panel_count<Isa>(rows); ++panel) {
      const int64_t begin = panel_row<Isa>(rows, panel), count = panel_row<Isa>(rows, panel + 1) - begin;
      for (int64_t i = 0; i < count; ++i) {
        const float* const x = row(begin + i);
        for (int64_t f = 0; f < size; ++f) out[begin * size + f * count + i] = x[f];
      }
    }
  };
  const int64_t element = latent.call.type == QM_F32 ? 4 : 2;
  const uint8_t* const k_up =
      static_cast<const uint8_t*>(latent.call.k_up) + head * latent.node.nope_size * rank * element;
  const auto k_up_row = [&](int64_t i) {
    to_float(latent.call.type, k_up + i * rank * element, rank, scratch + latent.turned_at());
    return scratch + latent.turned_at();
  };
  interleave(latent.node.nope_size, rank, k_up_row, scratch);
  const float* const v_up =
      matrix_of(latent.call.type, latent.call.v_up, head, rank, latent.node.out_size, scratch + latent.v_up_at());
  each_tile([&](const AttentionTile& tile, float* out, float* sum) {
    const auto query = [&](int64_t i) {
      query_of(latent, batch_row, tile.token + i, head, scratch + latent.keys_at());
      return scratch + latent.keys_at();
    };
    interleave(tile.tokens, head_size, query, out);
    begin(context, tile, sum);
  });
  const AttentionTile whole{batch_row, head, first, tokens};
  const int64_t last = context.slot(batch_row, first + tokens - 1) / kAttentionBlock;
  for (int64_t block = context.first_slot(context.slot(batch_row, first)) / kAttentionBlock; block <= last; ++block) {
    const SlotRange all = seen_by_any(context, whole, block);
    if (all.begin >= all.end) continue;
    const Block<C> cache = block_at<C>({latent.node, latent.call, nullptr}, batch_row, latent.group_of(head), block);
    expand_block<Isa>(latent, cache, all, v_up, scratch);
    each_tile([&](const AttentionTile& tile, const float* q, float* sum) {
      const SlotRange here = seen_by_any(context, tile, block);
      if (here.begin >= here.end) return;
      for (int64_t step = here.begin / 16 * 16; step < here.end; step += kAttentionStep)
        multiply_keys<Isa, 0>(q, tile.tokens, head_size, scratch + latent.keys_at() + step * head_size, head_size * 16,
                              std::min(kAttentionStep, align_up(here.end, 16) - step) / 16, score_factor(node),
                              scores + step, {kScoreStride, 16}, {});
      for (int64_t r = 0; r < tile.tokens; ++r) {
        const SlotRange range = seen(context, tile, r, block);
        std::fill(parts + r * part + 16, parts + (r + 1) * part, 0.0f);
        if (range.begin >= range.end) continue;
        parts[r * part] = largest_score(node.softcap, range, scores + r * kScoreStride);
        parts[r * part + 1] = soften(range, parts[r * part], scores + r * kScoreStride);
      }
      add_block<Isa, false>(context, tile, block, static_cast<const float*>(scratch + latent.values_at()),
                            latent.padded_outputs(), scores, parts);
      merge(context, tile, block, parts, sum);
    });
  }
  each_tile([&](const AttentionTile& tile, const float*, float* sum) { finish(context, tile, sum); });
}
template <class Isa>
void expand(const LatentContext& latent, int64_t batch_row, int64_t head, int64_t first, int64_t tokens,
            float* scratch) {
  if (latent.call.cache_type == QM_F32) return expand_of<Isa, float>(latent, batch_row, head, first, tokens, scratch);
  expand_of<Isa, uint16_t>(latent, batch_row, head, first, tokens, scratch);
}

template <class Isa>
constexpr AttentionFunctions attention_kernel = {append, queries<Isa>, block<Isa>,   begin,       merge,
                                                 finish, absorb<Isa>,  release<Isa>, expand<Isa>, index<Isa>};

}  // namespace
}  // namespace quantmoe
