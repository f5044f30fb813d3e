// CachedAttention on vectors of 16 floats: its .def, operation by operation. Isa says what an instruction
// set does with them (attention_<isa>.cc):
//   kRows, kVectors             queries and vectors of keys, or of values, whose sums fit the registers
//   kSlab                       of linear_attention.h
//   Vector                      16 floats, with zero(), load(elements of a cache), store(float*, Vector) and
//   multiply(a, x)              a * x, a float
//   multiply_add(a, x, sum)     a * x + sum, rounded once, a float
//   transpose(rows, at, out)    features at .. at + 15 of 16 keys to out [16 features][16 keys]
//   without_payload(x)          x with the quiet NaN for each NaN
//
//   prefill: a tile of rows, kRows at a time     decode: a split of the keys for all heads of a group
//     keys   [16 of them, transposed]              scores: 16 keys at a time, sums over the features in lanes
//     scores -> largest, weights, sums             values: kVectors vectors of columns at a time
//     values [16 of them] -> output                splits are added up in their order
//
// Everything else is plain loops, compiled for the including file's instruction set and in an unnamed namespace, as in
// elementwise.h. Elements of a cache are float, uint16_t of float16, int8_t and E4m3.
#pragma once
#include <algorithm>
#include <cmath>
#include <iterator>
#include <limits>
#include <type_traits>

#include "cpu/elementwise.h"

namespace quantmoe {
namespace {

#define QM_EACH(i, n) _Pragma("GCC unroll 16") for (int i = 0; i < n; ++i)
constexpr float kInfinity = std::numeric_limits<float>::infinity();

// Calls f with the number of rows as a constant.
template <int R, class F>
inline void with_rows(int64_t rows, const F& f) {
  if (rows == R) return f(std::integral_constant<int, R>());
  if constexpr (R > 1) with_rows<R - 1>(rows, f);
}

// Panels of a tile: at most kRows rows each, and equally many in all panels except one.
template <class Isa>
inline int64_t panel_count(int64_t rows) {
  return ceil_div(rows, Isa::kRows);
}
template <class Isa>
inline int64_t panel_row(int64_t rows, int64_t panel) {
  return rows * panel / panel_count<Isa>(rows);
}

// Sums of 16 lanes, element i in lane i mod 16, in a fixed order.
inline float sum_lanes(float (&lanes)[16]) {
  for (int width = 8; width > 0; width /= 2)
    for (int i = 0; i < width; ++i) lanes[i] += lanes[i + width];
  return lanes[0];
}

// 1 / sqrt(mean of squares + epsilon) of a token's features.
float inverse_norm(const qm_attention& node, qm_type type, const uint8_t* x, int64_t features) {
  constexpr int64_t kPiece = 256;
  float lanes[16] = {}, piece[kPiece];
  const int64_t element = type == QM_F32 ? 4 : 2;
  for (int64_t first = 0; first < features; first += kPiece) {
    const int64_t count = std::min(kPiece, features - first);
    to_float(type, x + first * element, count, piece);
    int64_t i = 0;
    for (; i + 16 <= count; i += 16)
      for (int j = 0; j < 16; ++j) lanes[j] = fma(piece[i + j], piece[i + j], lanes[j]);
    for (int j = 0; i < count; ++i, ++j) lanes[j] = fma(piece[i], piece[i], lanes[j]);
  }
  return 1.0f / std::sqrt(sum_lanes(lanes) / static_cast<float>(features) + node.norm_epsilon);
}

// Turns the first features of y by that row of cos and sin.
void rotate(const qm_attention& node, const AttentionCall& call, int64_t row, float* y) {
  const int64_t half = node.rotary_size / 2;
  const float *cos = call.cos + row * half, *sin = call.sin + row * half;
  const auto pair = [&](float& x, float& other, int64_t i) {
    const float first = x, second = other;
    x = first * cos[i] - second * sin[i];
    other = second * cos[i] + first * sin[i];
  };
  if (node.rotary_interleaved)
    for (int64_t i = 0; i < half; ++i) pair(y[2 * i], y[2 * i + 1], i);
  else
    for (int64_t i = 0; i < half; ++i) pair(y[i], y[i + half], i);
}

// Asks for lines into L1: they come while other work is done. kWrite: 1: they are written next.
template <int kWrite>
inline void prefetch(const uint8_t* at, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(at + i, kWrite);
}

// One head's query or key, normed and turned, to y [D]. row: of cos and sin; row_scale: of qk_norm row; weights: of
// this head.
void turn(const AttentionContext& context, const uint8_t* x, int64_t row, const float* weights, float row_scale,
          float* y) {
  const qm_attention& node = context.node;
  static_assert(count_values("qk_norm") == 3, "the ifs below");
  to_float(context.call.type, x, node.head_size, y);
  if (node.qk_norm != k_qk_norm_none) {
    const float scale =
        node.qk_norm == k_qk_norm_row ? row_scale : inverse_norm(node, context.call.type, x, node.head_size);
    for (int64_t i = 0; i < node.head_size; ++i) y[i] = y[i] * scale * weights[i];
  }
  rotate(node, context.call, row, y);
}

// The norm's weights of a head.
inline const float* weights_of(const qm_attention& node, const float* weights, int64_t head) {
  return weights + (node.qk_norm == k_qk_norm_row ? head * node.head_size : 0);
}

// What codes are multiplied by, with what `widen` left out: the scores' own scale, too; values.
inline float widened(const qm_attention& node) { return node.cache_format == k_cache_format_fp8_e4m3 ? 256.0f : 1.0f; }
inline float score_factor(const qm_attention& node) { return node.scale * node.k_scale * widened(node); }
inline float value_factor(const qm_attention& node) { return node.v_scale * widened(node); }

// A head's key or value [width] into the cache.
void store_head(const AttentionContext& context, float scale, const float* x, int64_t width, uint8_t* out) {
  static_assert(count_values("cache_format") == 4, "the cases below");
  const auto code = [](float x, float least, float most) {
    const float clamped = x < least ? least : x > most ? most : x;
    return static_cast<uint8_t>(static_cast<int32_t>(x != x ? 0.0f : round_half_even(clamped)));
  };
  switch (context.node.cache_format) {
    case k_cache_format_int8:
      for (int64_t i = 0; i < width; ++i) out[i] = code(x[i] / scale, -128.0f, 127.0f);
      return;
    case k_cache_format_fp8_e4m3:
      for (int64_t i = 0; i < width; ++i) {
        const float number = x[i] / scale;
        const int magnitude = float_to_half(round_e4m3(number) * 0x1p-8f) >> 7 & 0x7f;
        const int sign = static_cast<int>(bit_cast<uint32_t>(number) >> 24 & 0x80);  // rounding loses a zero's sign
        out[i] = static_cast<uint8_t>(number != number ? 0x7f : magnitude | sign);
      }
      return;
    case k_cache_format_int8_token: {
      const float most = largest_magnitude(x, width),
                  own = bit_cast<uint32_t>(most) < 0x7f800000u ? most / 127.0f : bit_cast<float>(0x7fc00000u);
      const float divisor = own > 0.0f ? own : kInfinity;
      for (int64_t i = 0; i < width; ++i) out[i] = code(own > 0.0f ? x[i] / divisor : 0.0f, -127.0f, 127.0f);
      std::memcpy(out + width, &own, 4);
      return;
    }
    default:
      return from_float(context.call.cache_type, x, width, out);
  }
}

void append(const AttentionContext& context, int64_t batch_row, int64_t token, float* y) {
  const qm_attention& node = context.node;
  const AttentionCall& call = context.call;
  const int64_t head_size = node.head_size, v = node.v_head_size, groups = node.kv_num_heads;
  const int64_t element = context.element();
  const int64_t key_width = context.key_width(), value_width = context.value_width();
  const int64_t position = context.position(batch_row, token), angles = context.turn(batch_row, token),
                slot = context.slot(batch_row, token);
  const uint8_t* const q = context.queries_of(position);
  const uint8_t* const k = q + int64_t{node.num_heads} * query_size(node) * element;
  const uint8_t* const values = k + groups * head_size * element;
  float row_scale = 1.0f;
  if (node.qk_norm == k_qk_norm_row) {
    context.q_scales[position] = inverse_norm(node, call.type, q, node.num_heads * head_size);
    row_scale = inverse_norm(node, call.type, k, groups * head_size);
  }
  for (int64_t group = 0; group < groups; ++group) {
    turn(context, k + group * head_size * element, angles, weights_of(node, call.k_norm, group), row_scale, y);
    const int64_t row = context.place(batch_row, group, slot);
    store_head(context, node.k_scale, y, key_width,
               static_cast<uint8_t*>(call.present_key) + row * context.slot_bytes(key_width));
    if (!node.key_split) to_float(call.type, values + group * v * element, v, y);
    store_head(context, node.v_scale, node.key_split ? y + key_width : y, value_width,
               static_cast<uint8_t*>(call.present_value) + row * context.slot_bytes(value_width));
  }
}

template <class Isa>
void queries(const AttentionContext& context, const AttentionTile& tile, float* scratch) {
  const qm_attention& node = context.node;
  const int64_t head_size = node.head_size, rows = tile.tokens * context.heads(), element = context.element();
  float* const y = scratch + context.keys_at();
  for (int64_t panel = 0; panel < panel_count<Isa>(rows); ++panel) {
    const int64_t first = panel_row<Isa>(rows, panel), count = panel_row<Isa>(rows, panel + 1) - first;
    for (int64_t i = 0; i < count; ++i) {
      const int64_t head = tile.group * context.heads() + (first + i) % context.heads();
      const int64_t token = tile.token + (first + i) / context.heads();
      const int64_t position = context.position(tile.b, token);
      const uint8_t* const x = context.queries_of(position) + head * head_size * element;
      if (token + 1 < tile.token + tile.tokens) prefetch<0>(x + qkv_size(node) * element, head_size * element);
      const float row_scale = node.qk_norm == k_qk_norm_row ? context.q_scales[position] : 1.0f;
      turn(context, x, context.turn(tile.b, token), weights_of(node, context.call.q_norm, head), row_scale, y);
      float* const panels = scratch + context.queries_at() + first * head_size;
      for (int64_t f = 0; f < head_size; ++f) panels[f * count + i] = y[f];
    }
  }
}

// The next block comes from memory into L2 while this block is worked on. Each step of the products and the values asks
// for a few lines. All lines at once would fill the buffers that all loads wait for. Past the cache's end nothing
// happens.
template <int kBytes>
inline void fetch(const void* at) {
  QM_EACH(line, (kBytes + 63) / 64) __builtin_prefetch(static_cast<const char*>(at) + line * 64, 0, 2);
}

// What is fetched during a tile's products: from `keys` on in the first `split` features, in the others from `others`.
struct Ahead {
  const char *keys, *others;
  int64_t split;
};

// Where the products with rows of queries and sixteens of keys lie: from row to row, from sixteen to sixteen.
struct Strides {
  int64_t row, sixteen;
};

// out[r][k] = (q[r] . key k) scale, 16 K keys of [D][16], `stride` from one to the next; fetches kBytes for each
// feature.
template <class Isa, int R, int K, int kBytes>
void products(const float* q, const float* keys, int64_t features, int64_t stride, float scale, float* out,
              Strides strides, const Ahead& ahead) {
  typename Isa::Vector sum[R][K];
  QM_EACH(r, R) QM_EACH(k, K) sum[r][k] = Isa::zero();
  for (int64_t f = 0; f < features; ++f, q += R, keys += 16) {
    fetch<kBytes>(f < ahead.split ? ahead.keys + f * kBytes : ahead.others + (f - ahead.split) * kBytes);
    QM_EACH(k, K) {
      const typename Isa::Vector x = Isa::load(keys + k * stride);
      QM_EACH(r, R) sum[r][k] = Isa::multiply_add(q[r], x, sum[r][k]);
    }
  }
  QM_EACH(r, R) QM_EACH(k, K) Isa::store(out + r * strides.row + k * strides.sixteen, Isa::multiply(scale, sum[r][k]));
}

// The products of all panels of queries [rows, D] with a few sixteens of keys.
template <class Isa, int kBytes>
void multiply_keys(const float* queries, int64_t rows, int64_t features, const float* keys, int64_t stride,
                   int64_t sixteens, float scale, float* out, Strides strides, const Ahead& ahead) {
  for (int64_t panel = 0; panel < panel_count<Isa>(rows); ++panel) {
    const int64_t row = panel_row<Isa>(rows, panel);
    with_rows<Isa::kRows>(panel_row<Isa>(rows, panel + 1) - row, [&](auto r) {
      constexpr int R = decltype(r)::value, K = Isa::kVectors;
      const float* const q = queries + row * features;
      float* const own = out + row * strides.row;
      int64_t i = 0;
      if (panel == 0 && sixteens >= K) {
        products<Isa, R, K, kBytes>(q, keys, features, stride, scale, own, strides, ahead);
        i += K;
      }
      for (; i + K <= sixteens; i += K)
        products<Isa, R, K, 0>(q, keys + i * stride, features, stride, scale, own + i * strides.sixteen, strides,
                               ahead);
      for (; i < sixteens; ++i)
        products<Isa, R, 1, 0>(q, keys + i * stride, features, stride, scale, own + i * strides.sixteen, strides,
                               ahead);
    });
  }
}

// acc[r][v] += weights[r][slot] * values[slot][v] for slots ascending, 16 V values; fetches as many from `ahead` on
// where the values are the cache.
template <class Isa, int R, int V, bool kCache, class C>
void add_values(const float* weights, const C* values, int64_t stride, int64_t slots, float* acc, int64_t acc_stride,
                const C* ahead) {
  typename Isa::Vector sum[R][V];
  QM_EACH(r, R) QM_EACH(v, V) sum[r][v] = Isa::load(acc + r * acc_stride + v * 16);
  for (int64_t slot = 0; slot < slots; ++slot, values += stride) {
    if constexpr (kCache) fetch<V * 16 * sizeof(C)>(ahead + slot * V * 16);
    QM_EACH(v, V) {
      const typename Isa::Vector x = Isa::load(values + v * 16);
      QM_EACH(r, R) sum[r][v] = Isa::multiply_add(weights[r * kScoreStride + slot], x, sum[r][v]);
    }
  }
  QM_EACH(r, R) QM_EACH(v, V) Isa::store(acc + r * acc_stride + v * 16, sum[r][v]);
}
template <class Isa, bool kCache, class C>
void add_values(int64_t rows, const float* weights, const C* values, int64_t stride, int64_t width, int64_t slots,
                float* acc, int64_t acc_stride) {
  with_rows<Isa::kRows>(rows, [&](auto r) {
    constexpr int R = decltype(r)::value, V = R == 1 ? 4 : R == 2 ? 2 * Isa::kVectors : Isa::kVectors;
    int64_t v = 0;
    for (; v + 16 * V <= width; v += 16 * V)
      add_values<Isa, R, V, kCache>(weights, values + v, stride, slots, acc + v, acc_stride,
                                    values + kAttentionBlock * (stride + v));
    for (; v < width; v += 16)
      add_values<Isa, R, 1, kCache>(weights, values + v, stride, slots, acc + v, acc_stride,
                                    values + kAttentionBlock * (stride + v));
  });
}

// Where the output of a head of the tile's group is, for a token of the tile.
inline int64_t output_bytes(const AttentionContext& context) { return context.node.v_head_size * context.element(); }
inline uint8_t* output_of(const AttentionContext& context, const AttentionTile& tile, int64_t token, int64_t head) {
  const int64_t first = context.position(tile.b, tile.token + token) * context.node.num_heads;
  return static_cast<uint8_t*>(context.call.output) +
         (first + tile.group * context.heads() + head) * output_bytes(context);
}

struct SlotRange {
  int64_t begin, end;
};
// What the tile's token sees of a block, counted from the block's first slot; begin >= end: nothing.
inline SlotRange seen(const AttentionContext& context, const AttentionTile& tile, int64_t token, int64_t block) {
  const int64_t p = context.slot(tile.b, tile.token + token), first = block * kAttentionBlock;
  if (tile.count) return {0, std::min(kAttentionBlock, tile.count - first)};
  return {std::max<int64_t>(0, context.first_slot(p) - first), std::min(kAttentionBlock, p + 1 - first)};
}

// The largest score of a row, after the softcap.
float largest_score(float softcap, SlotRange range, float* scores) {
  const int64_t first = range.begin / 16 * 16, last = align_up(range.end, 16);
  if (softcap != 0.0f)
    for (int64_t i = first; i < last; ++i) scores[i] = softcap * tanh_f32(scores[i] / softcap);
  std::fill(scores + first, scores + range.begin, -kInfinity);
  std::fill(scores + range.end, scores + last, -kInfinity);
  constexpr int kTops = 64;  // vectors that do not wait for each other
  float tops[kTops];
  std::fill(tops, tops + kTops, -kInfinity);
  const auto larger = [](float a, float b) { return a > b ? a : b; };
  int64_t slot = first;
  for (; slot + kTops <= last; slot += kTops)
    for (int j = 0; j < kTops; ++j) tops[j] = larger(scores[slot + j], tops[j]);
  for (; slot < last; slot += 16)
    for (int j = 0; j < 16; ++j) tops[j] = larger(scores[slot + j], tops[j]);
  for (int width = kTops / 2; width > 0; width /= 2)
    for (int j = 0; j < width; ++j) tops[j] = larger(tops[j + width], tops[j]);
  return tops[0];
}

// Scores to weights; returns the sum of the weights.
float soften(SlotRange range, float top, float* scores) {
  float sums[16] = {};
  for (int64_t i = range.begin / 16 * 16; i < range.end; i += 16) {
    for (int j = 0; j < 16; ++j) {
      const float weight = exp_f32(scores[i + j] - top);
      scores[i + j] = scores[i + j] == -kInfinity ? 0.0f : weight;
      sums[j] += scores[i + j];
    }
  }
  return sum_lanes(sums);
}

// Features of 16 keys to out [features][16].
template <class Isa, class C>
void turn_keys(const C* const* key, int64_t features, float* out) {
  int64_t f = 0;
  for (; f + 16 <= features; f += 16) Isa::transpose(key, f, out + f * 16);
  for (; f < features; ++f)
    for (int j = 0; j < 16; ++j) out[f * 16 + j] = widen(key[j][f]);
}

// A block of the caches, and elements from slot to slot.
template <class C>
struct Block {
  const C *keys, *values;
  int64_t key_pitch, pitch;
  const int32_t* slots = nullptr;  // of a tile with a list: keys and values begin at slot 0

  int64_t at(int64_t slot) const { return slots ? slots[slot] : slot; }
  // Below 0 are compressed keys (AttentionContext::entries), which lie in the other cache.
  const C* key(int64_t slot) const {
    const int64_t own = at(slot);
    return own < 0 ? values + ~own * pitch : keys + own * key_pitch;
  }
  const C* value(int64_t slot) const { return values + at(slot) * pitch; }
};

// The keys of 16 slots, `first` and on, to out [features][16]. Past the last slot it is the last one again: its score
// is not used.
template <class Isa, class C>
void turn_slots(const AttentionContext& context, const Block<C>& cache, int64_t first, int64_t last, float* out) {
  const C* row[16];
  for (int j = 0; j < 16; ++j) row[j] = cache.key(std::min(first + j, last));
  turn_keys<Isa>(row, context.key_width(), out);
  if (!context.node.key_split) return;
  for (int j = 0; j < 16; ++j) row[j] = cache.value(std::min(first + j, last));
  turn_keys<Isa>(row, context.value_width(), out + context.key_width() * 16);
}

// Products of the tile's queries and the block's keys.
template <class Isa, class C>
void score(const AttentionContext& context, SlotRange all, const Block<C>& cache, int64_t rows, float* scratch) {
  const int64_t head_size = context.node.head_size;
  const float scale = score_factor(context.node);
  float *const turned = scratch + context.keys_at(), *const scores = scratch + context.scores_at();
  for (int64_t step = all.begin / 16 * 16; step < all.end; step += kAttentionStep) {
    const int64_t sixteens = std::min(kAttentionStep, align_up(all.end, 16) - step) / 16;
    for (int64_t i = 0; i < sixteens; ++i)
      turn_slots<Isa>(context, cache, step + i * 16, all.end - 1, turned + i * head_size * 16);
    const auto next = [&](const C* from, int64_t pitch) {
      return reinterpret_cast<const char*>(from + (step + kAttentionBlock) * pitch);
    };
    const Ahead ahead{next(cache.keys, cache.key_pitch), next(cache.values, cache.pitch), context.key_width()};
    multiply_keys<Isa, kAttentionStep * sizeof(C)>(scratch + context.queries_at(), rows, head_size, turned,
                                                   head_size * 16, sixteens, scale, scores + step, {kScoreStride, 16},
                                                   ahead);
  }
}

// Adds the values of the block's slots, a panel of rows at once where all of them see a slot.
template <class Isa, bool kCache, class C>
void add_block(const AttentionContext& context, const AttentionTile& tile, int64_t block, const C* values,
               int64_t stride, const float* scores, float* parts) {
  const int64_t rows = tile.tokens * context.heads(), width = context.padded_values(), part = context.part_floats();
  for (int64_t panel = 0; panel < panel_count<Isa>(rows); ++panel) {
    const int64_t row = panel_row<Isa>(rows, panel), end = panel_row<Isa>(rows, panel + 1);
    const auto add = [&](int64_t first, int64_t count, int64_t begin, int64_t until) {
      if (begin < until)
        add_values<Isa, kCache>(count, scores + first * kScoreStride + begin, values + begin * stride, stride, width,
                                until - begin, parts + first * part + 16, part);
    };
    // A later token sees no earlier slot, and at least as many at the end.
    const SlotRange early = seen(context, tile, row / context.heads(), block),
                    late = seen(context, tile, (end - 1) / context.heads(), block);
    if (early.begin == late.begin && early.end == late.end) {
      add(row, end - row, early.begin, early.end);
      continue;
    }
    SlotRange common{late.begin, early.end};
    if (common.begin >= common.end) common = {kAttentionBlock, kAttentionBlock};
    for (int64_t r = row; r < end; ++r) {
      const SlotRange range = seen(context, tile, r / context.heads(), block);
      add(r, 1, range.begin, std::min(range.end, common.begin));
    }
    add(row, end - row, common.begin, common.end);
    for (int64_t r = row; r < end; ++r) add(r, 1, common.end, seen(context, tile, r / context.heads(), block).end);
  }
}

// The scales that int8_token has after the codes of a block's slots. All rows of a tile are multiplied by them.
template <class C>
void read_scales(const Block<C>& cache, const C* codes, int64_t pitch, int64_t width, SlotRange range, float* scales) {
  for (int64_t i = range.begin; i < range.end; ++i)
    std::memcpy(scales + i, reinterpret_cast<const uint8_t*>(codes) + cache.at(i) * pitch + width, 4);
}

inline void scale_slots(const float* scales, SlotRange range, float* scores) {
  for (int64_t i = range.begin; i < range.end; ++i) scores[i] = scores[i] * scales[i];
}

template <class Isa, class C>
void widen_all(const C* from, int64_t n, float* out) {
  int64_t i = 0;
  for (; i + 16 <= n; i += 16) Isa::store(out + i, Isa::load(from + i));
  for (; i < n; ++i) out[i] = widen(from[i]);
}

// The value of a slot. Of latent attention it begins in either cache, whose slots are features alone. With a
// compress_rate a key is its value.
template <class Isa, class C>
void widen_value(const AttentionContext& context, const Block<C>& cache, int64_t slot, float* out) {
  const int64_t v_head_size = context.node.v_head_size, split = context.node.key_split;
  const int64_t in_keys = context.node.compress_rate ? v_head_size
                          : split ? std::max<int64_t>(0, split - (context.node.head_size - v_head_size))
                                  : 0;
  const int64_t begin = split ? context.value_width() - (v_head_size - in_keys) : 0;
  widen_all<Isa>(cache.key(slot) + context.key_width() - in_keys, in_keys, out);
  if (in_keys < v_head_size) widen_all<Isa>(cache.value(slot) + begin, v_head_size - in_keys, out + in_keys);
}

// A block of a row's and a group's caches.
template <class C>
Block<C> block_at(const AttentionContext& context, int64_t batch_row, int64_t group, int64_t block) {
  const int64_t first = context.place(batch_row, group, block * kAttentionBlock), step = context.step();
  const int64_t element = sizeof(C), key_width = context.slot_bytes(context.key_width()) / element;
  const int64_t width = context.slot_bytes(context.value_width()) / element;
  return {static_cast<const C*>(context.call.present_key) + first * key_width,
          static_cast<const C*>(context.call.present_value) + first * width, key_width * step, width * step};
}

// What any of the tile's tokens sees of a block.
inline SlotRange seen_by_any(const AttentionContext& context, const AttentionTile& tile, int64_t block) {
  SlotRange all{kAttentionBlock, 0};
  for (int64_t token = 0; token < tile.tokens; ++token) {
    const SlotRange range = seen(context, tile, token, block);
    if (range.begin < range.end) all = {std::min(all.begin, range.begin), std::max(all.end, range.end)};
  }
  return all;
}

// A block's scores to weights, and a part of each row. All heads' largest scores come first, so that no row's weights
// wait for their own. The lines that `finish` writes come meanwhile.
template <class C>
void soften_block(const AttentionContext& context, const AttentionTile& tile, int64_t block, SlotRange all,
                  const Block<C>& cache, float* scores, float* parts) {
  const int64_t part = context.part_floats();
  const bool tails = cache_tail(context.node), last = block == context.last_block(tile);
  float key_scales[kAttentionBlock], value_scales[kAttentionBlock];
  if (tails) {
    read_scales(cache, cache.keys, cache.key_pitch, context.node.head_size, all, key_scales);
    read_scales(cache, cache.values, cache.pitch, context.node.v_head_size, all, value_scales);
  }
  for (int64_t token = 0; token < tile.tokens; ++token) {
    const SlotRange range = seen(context, tile, token, block);
    const int64_t first = token * context.heads(), end = first + context.heads();
    std::fill(parts + first * part, parts + end * part, 0.0f);
    if (range.begin >= range.end) continue;
    for (int64_t row = first; row < end; ++row) {
      if (tails) scale_slots(key_scales, range, scores + row * kScoreStride);
      parts[row * part] = largest_score(context.node.softcap, range, scores + row * kScoreStride);
    }
    for (int64_t row = first; row < end; ++row) {
      if (last) prefetch<1>(output_of(context, tile, token, row - first), output_bytes(context));
      parts[row * part + 1] = soften(range, parts[row * part], scores + row * kScoreStride);
      if (tails) scale_slots(value_scales, range, scores + row * kScoreStride);
    }
  }
}

template <class Isa, class C>
void block_of(const AttentionContext& context, const AttentionTile& tile, int64_t block, float* scratch, float* parts) {
  const int64_t rows = tile.tokens * context.heads(), v_head_size = context.node.v_head_size;
  const int64_t width = context.padded_values();
  Block<C> cache = block_at<C>(context, tile.b, tile.group, tile.slots ? 0 : block);
  if (tile.slots) cache.slots = tile.slots + block * kAttentionBlock;
  float *const scores = scratch + context.scores_at(), *const wide = scratch + context.values_at();
  const SlotRange all = seen_by_any(context, tile, block);
  if (all.begin >= all.end) return;
  score<Isa>(context, all, cache, rows, scratch);
  soften_block(context, tile, block, all, cache, scores, parts);
  if (v_head_size == width && panel_count<Isa>(rows) <= 2 && !context.node.key_split && !tile.slots)
    return add_block<Isa, true>(context, tile, block, cache.values, cache.pitch, scores, parts);
  for (int64_t slot = all.begin; slot < all.end; ++slot) {
    float* const out = wide + slot * width;
    widen_value<Isa>(context, cache, slot, out);
    std::fill(out + v_head_size, out + width, 0.0f);
  }
  add_block<Isa, false>(context, tile, block, static_cast<const float*>(wide), width, scores, parts);
}
template <class Isa>
void block(const AttentionContext& context, const AttentionTile& tile, int64_t block, float* scratch, float* parts) {
  static_assert(count_values("cache_format") == 4, "the ifs below");
  if (context.node.cache_format == k_cache_format_fp8_e4m3)
    return block_of<Isa, E4m3>(context, tile, block, scratch, parts);
  if (context.node.cache_format != k_cache_format_none)
    return block_of<Isa, int8_t>(context, tile, block, scratch, parts);
  if (context.call.cache_type == QM_F32) return block_of<Isa, float>(context, tile, block, scratch, parts);
  block_of<Isa, uint16_t>(context, tile, block, scratch, parts);
}

void begin(const AttentionContext& context, const AttentionTile& tile, float* parts) {
  for (int64_t row = 0; row < tile.tokens * context.heads(); ++row, parts += context.part_floats()) {
    parts[0] = context.call.sinks[tile.group * context.heads() + row % context.heads()];
    parts[1] = 1.0f;
    std::fill(parts + 16, parts + context.part_floats(), 0.0f);
  }
}

void merge(const AttentionContext& context, const AttentionTile& tile, int64_t block, const float* parts, float* into) {
  const int64_t part = context.part_floats();
  for (int64_t token = 0; token < tile.tokens; ++token) {
    const SlotRange range = seen(context, tile, token, block);
    for (int64_t head = 0; head < context.heads(); ++head, parts += part, into += part) {
      if (range.begin >= range.end) continue;
      const float top = parts[0] > into[0] ? parts[0] : into[0];
      const float before = exp_f32(into[0] - top), here = exp_f32(parts[0] - top);
      into[0] = top;
      into[1] = fma(into[1], before, parts[1] * here);
      for (int64_t v = 16; v < part; ++v) into[v] = fma(into[v], before, parts[v] * here);
    }
  }
}

void gate_output(const AttentionContext& context, const uint8_t* gates, int64_t size, float* y) {
  float gate[64];
  for (int64_t first = 0; first < size; first += std::size(gate)) {
    const int64_t count = std::min<int64_t>(std::size(gate), size - first);
    to_float(context.call.type, gates + first * context.element(), count, gate);
    for (int64_t i = 0; i < count; ++i) y[first + i] = y[first + i] * sigmoid_f32(gate[i]);
  }
}

void finish(const AttentionContext& context, const AttentionTile& tile, float* parts) {
  const int64_t v = context.node.v_head_size;
  const float factor = value_factor(context.node);
  for (int64_t token = 0; token < tile.tokens; ++token) {
    const uint8_t* const gates = context.gates_of(context.position(tile.b, tile.token + token));
    for (int64_t head = 0; head < context.heads(); ++head, parts += context.part_floats()) {
      scale(1.0f / parts[1] * factor, parts + 16, v);
      const int64_t own = (tile.group * context.heads() + head) * output_bytes(context);
      if (context.node.gated) gate_output(context, gates + own, v, parts + 16);
      from_float(context.call.type, parts + 16, v, output_of(context, tile, token, head));
    }
  }
}

}  // namespace
}  // namespace quantmoe
