// CausalConv, GatedDelta and StateSpace: ops/*.def, operation by operation, on the vectors of attention.h. Of
// these Isa has
//
//   a head's state S, K rows:  | slab 0 | slab 1 | ...     a slab: kSlab vectors of columns of all K rows
//   a token, of each slab:     m = (k d) S, o = (q d) S    one pass over the rows, d being their decays
//                              delta = beta (v - m)
//                              S = d S + k delta, o += (q k) delta
//
// StateSpace's delta is x dt, its k and q are B and C, and there is no m.
//
//   kSlab                  vectors of a state's columns that are worked on at a time: their sums fit the registers, K
//                          rows of them L1
#pragma once
#include "cpu/attention/attention.h"

namespace quantmoe {
namespace {

// The sum of a[i] b[i], n numbers, in 16 lanes.
inline float dot_lanes(const float* a, const float* b, int64_t n) {
  float lanes[16] = {};
  int64_t i = 0;
  for (; i + 16 <= n; i += 16)
    for (int j = 0; j < 16; ++j) lanes[j] = fma(a[i + j], b[i + j], lanes[j]);
  for (int j = 0; i < n; ++i, ++j) lanes[j] = fma(a[i], b[i], lanes[j]);
  return sum_lanes(lanes);
}

// log(1 + e^x), within a few roundings: log(1 + u) = 2 artanh(u / (2 + u)), u in (0, 1]. The series has seven terms,
// and leaves out 2e-8 of it.
inline float softplus_f32(float x) {
  const float u = exp_f32(x < 0.0f ? x : -x), s = u / (2.0f + u), z = s * s;
  float p = 1.0f / 13.0f;
  p = fma(p, z, 1.0f / 11.0f);
  p = fma(p, z, 1.0f / 9.0f);
  p = fma(p, z, 1.0f / 7.0f);
  p = fma(p, z, 0.2f);
  p = fma(p, z, 1.0f / 3.0f);
  p = fma(p, z, 1.0f);
  return (x < 0.0f ? 0.0f : x) + (s + s) * p;
}

// What a token's decay is of a state; so small a one is 0, as products with it would be subnormal, which are slow.
inline float decay_f32(float rate, float x) {
  const float g = rate * softplus_f32(x);
  return g > 60.0f ? 0.0f : exp_f32(-g);
}

// One token of n channels. rows: W inputs [n] each, the oldest first. weights: [W][n].
template <int W>
void convolve(const float* const* rows, const float* weights, const float* bias, int64_t n, float* __restrict out) {
  for (int64_t c = 0; c < n; ++c) {
    float sum = bias[c];
    QM_EACH(j, W) sum = fma(weights[j * kConvChannels + c], rows[j][c], sum);
    out[c] = sum;
  }
}
void convolve(int64_t width, const float* const* rows, const float* weights, const float* bias, int64_t n,
              float* __restrict out) {
  if (width == 4) return convolve<4>(rows, weights, bias, n, out);
  std::copy_n(bias, n, out);
  for (int64_t j = 0; j < width; ++j)
    for (int64_t c = 0; c < n; ++c) out[c] = fma(weights[j * kConvChannels + c], rows[j][c], out[c]);
}

constexpr int64_t kConvAhead = 4;  // tokens, whose channels are too far apart for the hardware to foresee

// Channels first .. first + slice - 1 of an input between memory, [.., C] or a state's [C, W - 1], and rows of floats.
template <class Bits>
void convolution(const ConvContext& conv, int64_t batch_row, int64_t first, float* scratch) {
  const ConvCall& call = conv.call;
  const int64_t width = conv.node.width, before = width - 1, channels = conv.node.channels, tokens = call.tokens;
  const int64_t slice = std::min(kConvChannels, channels - first);
  const int64_t begin = call.rows[3 * batch_row], count = call.rows[3 * batch_row + 1];
  const int64_t state_at = (batch_row * channels + first) * before, window = conv.node.state_window;
  const Bits* const past = static_cast<const Bits*>(call.past_conv) + conv.live() + state_at;
  Bits* const slots = static_cast<Bits*>(call.present_conv) + state_at;
  Bits* const present = slots + conv.live();
  const int64_t size = x_of(conv.node).size;
  const Bits* const x = static_cast<const Bits*>(call.x) + batch_row * tokens * size + x_of(conv.node).offset + first;
  Bits* const y = static_cast<Bits*>(call.y) + batch_row * tokens * channels + first;
  for (int64_t token = 0; token < tokens; ++token)
    if (token < begin || token >= begin + count) std::fill_n(y + token * channels, slice, Bits{});
  if (past != present)
    for (int64_t i = 0; i < window - std::max<int64_t>(1, count); ++i)
      std::fill_n(slots + conv.slot(i), slice * before, Bits{});
  if (!count) {
    if (past != present) std::copy_n(past, slice * before, present);
    return;
  }
  float *const weights = scratch, *const bias = weights + width * kConvChannels, *const out = bias + kConvChannels;
  float* const ring = out + kConvChannels;  // the input of a token, counted from the first in the state, mod W
  Bits bits[kConvChannels];
  for (int64_t j = 0; j < width; ++j)
    for (int64_t c = 0; c < slice; ++c) weights[j * kConvChannels + c] = call.weight[(first + c) * width + j];
  for (int64_t c = 0; c < slice; ++c) bias[c] = call.bias ? call.bias[first + c] : 0.0f;
  for (int64_t j = 0; j < before; ++j) {
    for (int64_t c = 0; c < slice; ++c) bits[c] = call.rows[3 * batch_row + 2] ? past[c * before + j] : Bits{};
    to_float(call.type, bits, slice, ring + j * kConvChannels);
  }
  for (int64_t token = 0; token < count; ++token) {
    const float* rows[kMaxConvWidth];
    for (int64_t j = 0; j < width; ++j) rows[j] = ring + (token + j) % width * kConvChannels;
    for (int64_t c = 0; token + kConvAhead < count && c < slice; c += 64 / sizeof(Bits)) {
      __builtin_prefetch(x + (begin + token + kConvAhead) * size + c, 0, 2);
      __builtin_prefetch(y + (begin + token + kConvAhead) * channels + c, 1, 2);
    }
    to_float(call.type, x + (begin + token) * size, slice, ring + (token + before) % width * kConvChannels);
    convolve(width, rows, weights, bias, slice, out);
    static_assert(count_values("conv_activation") == 2, "the if below");
    if (conv.node.activation == k_conv_activation_silu)
      for (int64_t c = 0; c < slice; ++c) out[c] = silu_f32(out[c]);
    from_float(call.type, out, slice, y + (begin + token) * channels);
  }
  // The bits of the last inputs, after each of the window's tokens; past, which may be present's memory, is read until
  // the last.
  for (int64_t made = std::max<int64_t>(1, count - window + 1); made <= count; ++made) {
    Bits* const state = slots + conv.slot(window - 1 - count + made);
    const int64_t kept = std::max<int64_t>(0, before - made);
    for (int64_t c = 0; c < slice; ++c) {
      for (int64_t j = 0; j < kept; ++j)
        state[c * before + j] = call.rows[3 * batch_row + 2] ? past[c * before + made + j] : Bits{};
      for (int64_t j = kept; j < before; ++j) state[c * before + j] = x[(begin + made - before + j) * size + c];
    }
  }
}
void conv(const ConvContext& conv, int64_t b, int64_t first, float* scratch) {
  conv.call.type == QM_F32 ? convolution<uint32_t>(conv, b, first, scratch)
                           : convolution<uint16_t>(conv, b, first, scratch);
}

// A token's operands, K numbers each, except the last two.
struct Operands {
  const float *key, *decay;                  // what the state's update takes
  const float *decayed_key, *decayed_query;  // what the state before it is multiplied by
  float beta, product;                       // of key and query
};

// What a task works on: row b's tokens that count, of a head.
struct Head {
  const StateContext& states;
  int64_t b, head;
  float* scratch;

  int64_t count() const { return states.rows[3 * b + 1]; }
  int64_t token(int64_t i) const { return b * states.tokens + states.rows[3 * b] + i; }  // of its i-th, in the call
  // What an input or output of `width` numbers a token has of its i-th, from number `at` on.
  template <class Bytes>
  Bytes* of(Bytes* tensor, int64_t i, int64_t width, int64_t at) const {
    return tensor + (token(i) * width + at) * (states.type == QM_F32 ? 4 : 2);
  }
  const uint8_t* of(const void* tensor, int64_t i, int64_t width, int64_t at) const {
    return of(static_cast<const uint8_t*>(tensor), i, width, at);
  }
  const uint8_t* of(const void* tensor, int64_t i, Part part, int64_t at) const {
    return of(tensor, i, part.size, part.offset + at);
  }
  // Where the state after the i-th token goes, except the last state; null: nowhere.
  float* slot(int64_t i) const {
    const int64_t at = states.window - count() + i;
    if (at < 0 || i == count() - 1) return nullptr;
    return states.present_state + states.slot(at) + (b * states.heads + head) * states.head_state();
  }
  float* state() const { return scratch; }
  float* operands(int64_t i) const { return scratch + states.operands_at() + i * states.operand_floats(); }
  float* values(int64_t i) const { return scratch + states.values_at() + i * states.padded_values(); }
  float* outputs(int64_t i) const { return scratch + states.outputs_at() + i * states.padded_values(); }
  Operands read(int64_t i) const {
    const float* const at = operands(i);
    const int64_t k = states.padded_keys();
    return {at, at + k, at + 2 * k, at + 3 * k, at[4 * k], at[4 * k + 1]};
  }
};

struct DeltaHead : Head {
  static constexpr bool kRecalls = true;  // a token's delta is of what the state says to its key
  const DeltaContext& d;

  DeltaHead(const DeltaContext& of, int64_t row, int64_t number, float* lane) : Head{of, row, number, lane}, d(of) {}
  const uint8_t* query(int64_t i) const { return of(d.call.qkv, i, d.qkv_width(), group() * d.keys); }
  const uint8_t* key(int64_t i) const {
    return of(d.call.qkv, i, d.qkv_width(), (d.node.num_k_heads + group()) * d.keys);
  }
  const uint8_t* value(int64_t i) const {
    return of(d.call.qkv, i, d.qkv_width(), d.qkv_width() - (d.heads - head) * d.node.v_head_size);
  }
  const uint8_t* z(int64_t i) const { return of(d.call.z, i, z_of(d.node), head * d.node.v_head_size); }
  uint8_t* y(int64_t i) const { return of(static_cast<uint8_t*>(d.call.y), i, d.width(), head * d.node.v_head_size); }
  int64_t group() const { return head / (d.heads / d.node.num_k_heads); }
};

struct SpaceHead : Head {
  static constexpr bool kRecalls = false;
  const SpaceContext& d;

  SpaceHead(const SpaceContext& of, int64_t row, int64_t number, float* lane) : Head{of, row, number, lane}, d(of) {}
  const uint8_t* value(int64_t i) const { return of(d.call.xbc, i, d.xbc_width(), head * d.node.head_size); }
  const uint8_t* key(int64_t i) const { return of(d.call.xbc, i, d.xbc_width(), d.width() + group() * d.keys); }
  const uint8_t* query(int64_t i) const {
    return of(d.call.xbc, i, d.xbc_width(), d.width() + (d.node.num_groups + group()) * d.keys);
  }
  const uint8_t* z(int64_t i) const { return of(d.call.z, i, z_of(d.node), head * d.node.head_size); }
  float* y(int64_t i) const { return d.outputs(token(i)) + head * d.node.head_size; }
  int64_t group() const { return head / (d.heads / d.node.num_groups); }
};

// Operands and values of `count` tokens, from the first-th on.
void prepare(const DeltaHead& head, int64_t first, int64_t count) {
  const qm_delta& node = head.d.node;
  const DeltaCall& call = head.d.call;
  const int64_t k = node.k_head_size, v = node.v_head_size, decays = node.decay_per_key ? k : 1;
  const float rate = exp_f32(call.a_log[head.head]);
  for (int64_t i = 0; i < count; ++i) {
    float* const key = head.operands(i);
    float *const decay = key + head.d.padded_keys(), *const decayed_key = decay + head.d.padded_keys();
    float *const query = decayed_key + head.d.padded_keys(), *const scalars = query + head.d.padded_keys();
    to_float(call.type, head.query(first + i), k, query);
    to_float(call.type, head.key(first + i), k, key);
    to_float(call.type, head.value(first + i), v, head.values(i));
    const float q_norm = 1.0f / std::sqrt(dot_lanes(query, query, k) + node.l2_epsilon);
    const float k_norm = 1.0f / std::sqrt(dot_lanes(key, key, k) + node.l2_epsilon);
    for (int64_t j = 0; j < k; ++j) query[j] = query[j] * q_norm * node.scale;
    for (int64_t j = 0; j < k; ++j) key[j] = key[j] * k_norm;
    scalars[1] = dot_lanes(query, key, k);
    to_float(call.type, head.of(call.b, first + i, b_of(node), head.head), 1, scalars);
    scalars[0] = node.beta_scale * sigmoid_f32(scalars[0]);
    to_float(call.type, head.of(call.a, first + i, a_of(node), head.head * decays), decays, decay);
    for (int64_t j = 0; j < decays; ++j) decay[j] = decay_f32(rate, decay[j] + call.dt_bias[head.head * decays + j]);
    if (decays == 1) std::fill(decay, decay + k, decay[0]);
    for (int64_t j = 0; j < k; ++j) decayed_key[j] = key[j] * decay[j];
    for (int64_t j = 0; j < k; ++j) query[j] = query[j] * decay[j];
  }
}
void prepare(const SpaceHead& head, int64_t first, int64_t count) {
  const SpaceCall& call = head.d.call;
  const int64_t k = head.d.keys, v = head.d.values;
  const float rate = exp_f32(call.a_log[head.head]);
  for (int64_t i = 0; i < count; ++i) {
    float* const key = head.operands(i);
    float *const decay = key + head.d.padded_keys(), *const query = decay + 2 * head.d.padded_keys();
    float *const scalars = query + head.d.padded_keys(), *const values = head.values(i);
    to_float(call.type, head.query(first + i), k, query);
    to_float(call.type, head.key(first + i), k, key);
    to_float(call.type, head.value(first + i), v, values);
    float dt;
    to_float(call.type, head.of(call.dt, first + i, dt_of(head.d.node), head.head), 1, &dt);
    const float x = dt + call.dt_bias[head.head], step = softplus_f32(x);
    std::fill(decay, decay + k, decay_f32(rate, x));
    scalars[1] = dot_lanes(query, key, k);
    for (int64_t j = 0; j < k; ++j) query[j] = query[j] * decay[j];
    for (int64_t j = 0; j < v; ++j) values[j] = values[j] * step;
  }
}

// A state, or what it becomes: rows of columns.
struct State {
  float* at;
  int64_t stride;
};

// Cache lines of a later token, which lie too far from those before them for the hardware to foresee. They are asked
// for one by one between other work: all at once would fill the buffers that loads wait for.
struct Lines {
  static constexpr int64_t kMost = 32, kRows = 4;  // kRows: of a state, from line to line
  const char* at[kMost];
  int64_t count = 0;

  void add(const void* from, int64_t bytes) {
    for (int64_t i = 0; i < bytes && count < kMost; i += 64) at[count++] = static_cast<const char*>(from) + i;
  }
};

// What the i-th token of a head reads and writes; queries and keys, or the rest.
template <class OwnHead>
Lines lines_of(const OwnHead& head, int64_t i, bool rest) {
  const int64_t element = head.d.type == QM_F32 ? 4 : 2, k = head.d.keys * element, v = head.d.values * element;
  Lines lines;
  if (!rest) {
    lines.add(head.query(i), k);
    lines.add(head.key(i), k);
  } else {
    lines.add(head.value(i), v);
    lines.add(head.z(i), v);
    lines.add(head.y(i), v);
  }
  return lines;
}

// Updates K rows of 16 V columns of a head's state with a token's delta, if there is one. Then multiplies them by the
// next token's operands, if there is one. `lines` come into L2. kLast: no NaN has a payload, and rows from `ahead` on
// come into L2. kRecalls: recalled is made.
template <class Isa, int V, bool kUpdate, bool kMultiply, bool kLast, bool kRecalls>
inline void pass(const float* from, int64_t from_stride, State state, int64_t k, const Operands& token,
                 const typename Isa::Vector (&delta)[V], const Operands& next, typename Isa::Vector (&recalled)[V],
                 typename Isa::Vector (&outputs)[V], const float* ahead = nullptr, const Lines* lines = nullptr) {
  if (kMultiply) QM_EACH(v, V) recalled[v] = outputs[v] = Isa::zero();
  for (int64_t i = 0; i < k; ++i, from += from_stride, state.at += state.stride) {
    typename Isa::Vector row[V];
    QM_EACH(v, V) row[v] = Isa::load(from + v * 16);
    if (kLast) QM_EACH(v, V) __builtin_prefetch(ahead + i * state.stride + v * 16, 0, 2);
    if (kUpdate && kMultiply && i % Lines::kRows == 0 && i < lines->count * Lines::kRows)
      __builtin_prefetch(lines->at[i / Lines::kRows], 0, 2);
    if (kUpdate) {
      QM_EACH(v, V) row[v] = Isa::multiply_add(token.key[i], delta[v], Isa::multiply(token.decay[i], row[v]));
      QM_EACH(v, V) Isa::store(state.at + v * 16, kLast ? Isa::without_payload(row[v]) : row[v]);
    }
    if (kMultiply) {
      if (kRecalls) QM_EACH(v, V) recalled[v] = Isa::multiply_add(next.decayed_key[i], row[v], recalled[v]);
      QM_EACH(v, V) outputs[v] = Isa::multiply_add(next.decayed_query[i], row[v], outputs[v]);
    }
  }
}

// Columns from `column` on, 16 V of them, of a state as it is between two tokens.
template <class Isa, int V>
void save(const Head& head, State state, int64_t column, float* slot) {
  const int64_t v = head.states.values, width = std::min<int64_t>(16 * V, v - column);
  for (int64_t i = 0; i < head.states.keys; ++i, state.at += state.stride) {
    float columns[16 * V];
    QM_EACH(j, V) Isa::store(columns + j * 16, Isa::without_payload(Isa::load(state.at + j * 16)));
    std::copy_n(columns, width, slot + i * v + column);
  }
}

// `count` tokens, from the first-th on, over 16 V columns of a state, from `column` on: values to outputs. ahead: null,
// or the tokens are the last, and what pass brings into L2.
template <class Isa, int V, class OwnHead>
void slab(const OwnHead& head, const float* from, int64_t from_stride, State state, int64_t column, int64_t first,
          int64_t count, const float* ahead) {
  constexpr bool kRecalls = OwnHead::kRecalls;
  const int64_t k = head.states.keys;
  typename Isa::Vector recalled[V], outputs[V], delta[V];
  Operands token = head.read(0);
  pass<Isa, V, false, true, false, kRecalls>(from, from_stride, {}, k, token, delta, token, recalled, outputs);
  for (int64_t i = 0; i < count; ++i) {
    QM_EACH(v, V) {
      delta[v] = Isa::load(head.values(i) + column + v * 16);
      if (kRecalls) delta[v] = Isa::multiply(token.beta, Isa::multiply_add(-1.0f, recalled[v], delta[v]));
      Isa::store(head.outputs(i) + column + v * 16, Isa::multiply_add(token.product, delta[v], outputs[v]));
    }
    if (i + 1 < count) {
      const Operands next = head.read(i + 1);
      const int64_t later = first + kDeltaTokens + i;
      const Lines lines = later < head.count() ? lines_of(head, later, column > 0) : Lines();
      pass<Isa, V, true, true, false, kRecalls>(from, from_stride, state, k, token, delta, next, recalled, outputs,
                                                nullptr, &lines);
      token = next;
    } else if (ahead) {
      pass<Isa, V, true, false, true, kRecalls>(from, from_stride, state, k, token, delta, token, recalled, outputs,
                                                ahead);
    } else {
      pass<Isa, V, true, false, false, kRecalls>(from, from_stride, state, k, token, delta, token, recalled, outputs);
    }
    if (float* const slot = head.slot(first + i)) save<Isa, V>(head, state, column, slot);
    from = state.at;
    from_stride = state.stride;
  }
}
template <class Isa, int V = Isa::kSlab, class OwnHead>
void slab(int64_t vectors, const OwnHead& head, const float* from, int64_t from_stride, State state, int64_t column,
          int64_t first, int64_t count, const float* ahead) {
  if (vectors >= V) return slab<Isa, V>(head, from, from_stride, state, column, first, count, ahead);
  if constexpr (V > 1) slab<Isa, V - 1>(vectors, head, from, from_stride, state, column, first, count, ahead);
}

// Outputs of `count` tokens, from the first-th on, normed and gated, to y.
void finish(const DeltaHead& head, int64_t first, int64_t count) {
  const qm_delta& node = head.d.node;
  const int64_t v = node.v_head_size;
  float* const z = head.values(0);
  static_assert(count_values("output_gate") == 2, "the if below");
  for (int64_t i = 0; i < count; ++i) {
    float* const output = head.outputs(i);
    const float norm = 1.0f / std::sqrt(dot_lanes(output, output, v) / static_cast<float>(v) + node.norm_epsilon);
    to_float(head.d.type, head.z(first + i), v, z);
    if (node.gate == k_output_gate_silu)
      for (int64_t j = 0; j < v; ++j) z[j] = silu_f32(z[j]);
    else
      for (int64_t j = 0; j < v; ++j) z[j] = sigmoid_f32(z[j]);
    for (int64_t j = 0; j < v; ++j) output[j] = output[j] * norm * head.d.call.norm[j] * z[j];
    from_float(head.d.type, output, v, head.y(first + i));
  }
}
// The same with D x, to what the norm takes.
void finish(const SpaceHead& head, int64_t first, int64_t count) {
  const int64_t v = head.d.values;
  const float d = head.d.call.d[head.head];
  float* const x = head.values(0);
  for (int64_t i = 0; i < count; ++i) {
    const float* const output = head.outputs(i);
    float* const y = head.y(first + i);
    to_float(head.d.type, head.value(first + i), v, x);
    for (int64_t j = 0; j < v; ++j) y[j] = fma(d, x[j], output[j]);
  }
}

// All tokens of a row and head. ahead: a state that this lane probably takes next.
template <class Isa, class OwnHead>
void scan(const OwnHead& head, const float* ahead) {
  const StateContext& states = head.states;
  const int64_t keys = states.keys, values = states.values, count = head.count(),
                state_at = (head.b * states.heads + head.head) * states.head_state();
  const float* const past = states.past_state + states.live() + state_at;
  float* const present = states.present_state + states.live() + state_at;
  if (past != present)
    for (int64_t i = 0; i < states.window - std::max<int64_t>(1, count); ++i)
      std::fill_n(states.present_state + states.slot(i) + state_at, keys * values, 0.0f);
  if (!count) {
    if (past != present) std::memcpy(present, past, static_cast<size_t>(keys * values) * 4);
    return;
  }
  // A few tokens read and write the state where it is; for more, slabs of it lie together, in other sets of L1.
  const bool here = count <= kDeltaHere && values % 16 == 0, zeros = states.rows[3 * head.b + 2] == 0;
  if (zeros) std::fill_n(here ? present : head.state(), keys * (here ? values : states.padded_values()), 0.0f);
  const auto each_slab = [&](const auto& body) {
    for (int64_t c = 0; c < states.padded_values(); c += 16 * Isa::kSlab)
      body(c, std::min<int64_t>(Isa::kSlab, (states.padded_values() - c) / 16));
  };
  const auto copy = [&](bool in) {
    each_slab([&](int64_t column, int64_t vectors) {
      const int64_t columns = std::min(16 * vectors, values - column);
      for (int64_t i = 0; i < keys; ++i) {
        float* const inside = head.state() + keys * column + i * 16 * vectors;
        if (!in) {
          std::copy_n(inside, columns, present + i * values + column);
        } else {
          std::copy_n(past + i * values + column, columns, inside);
          std::fill(inside + columns, inside + 16 * vectors, 0.0f);
        }
      }
    });
  };
  if (!here && !zeros) copy(true);
  for (int64_t first = 0; first < count; first += kDeltaTokens) {
    const int64_t tokens = std::min(kDeltaTokens, count - first);
    const bool last = first + tokens == count;
    prepare(head, first, tokens);
    each_slab([&](int64_t c, int64_t vectors) {
      const State to = here ? State{present + c, values} : State{head.state() + keys * c, 16 * vectors};
      const float* const from = here && !zeros ? past + c : to.at;
      slab<Isa>(vectors, head, from, to.stride, to, c, first, tokens, !last ? nullptr : here ? ahead + c : from);
    });
    finish(head, first, tokens);
  }
  if (!here) copy(false);
}

template <class Isa>
void delta(const DeltaContext& context, int64_t b, int64_t v_head, const float* ahead, float* scratch) {
  const DeltaHead head{context, b, v_head, scratch};
  const int64_t begin = context.rows[3 * b], width = context.values * (context.type == QM_F32 ? 4 : 2);
  for (int64_t t = -begin; t < context.tokens - begin; ++t)
    if (t < 0 || t >= head.count()) std::memset(head.y(t), 0, static_cast<size_t>(width));
  scan<Isa>(head, ahead);
}

template <class Isa>
void space(const SpaceContext& context, int64_t b, int64_t head, const float* ahead, float* scratch) {
  scan<Isa>(SpaceHead{context, b, head, scratch}, ahead);
}

void space_norm(const SpaceContext& context, int64_t b, int64_t token, float* z) {
  const qm_space& node = context.node;
  const int64_t begin = context.rows[3 * b], at = b * context.tokens + token, n = node.norm_size,
                width = context.width(), element = context.type == QM_F32 ? 4 : 2;
  uint8_t* const y = static_cast<uint8_t*>(context.call.y) + at * width * element;
  if (token < begin || token >= begin + context.rows[3 * b + 1])
    return void(std::memset(y, 0, static_cast<size_t>(width * element)));
  const Part part = z_of(node);
  const uint8_t* const gates = static_cast<const uint8_t*>(context.call.z) + (at * part.size + part.offset) * element;
  for (int64_t first = 0; first < width; first += n) {
    float* const output = context.outputs(at) + first;
    to_float(context.type, gates + first * element, n, z);
    for (int64_t j = 0; j < n; ++j) output[j] = output[j] * silu_f32(z[j]);
    const float by = 1.0f / std::sqrt(dot_lanes(output, output, n) / static_cast<float>(n) + node.norm_epsilon);
    for (int64_t j = 0; j < n; ++j) output[j] = output[j] * by * context.call.norm[first + j];
    from_float(context.type, output, n, y + first * element);
  }
}

template <class Isa>
constexpr LinearAttentionFunctions linear_attention_kernel = {conv, delta<Isa>, space<Isa>, space_norm};

}  // namespace
}  // namespace quantmoe
