// A CPU kernel is one file src/cpu/panel_<isa>.cc that fills a CpuKernel, and one line in kernels.inc.
//
// The layer's driver (moe/) owns routing, threads and memory. A kernel owns the arithmetic. The elementwise passes are
// the plain loops of elementwise.h, compiled with the file's instruction set. The product multiplies token tiles with
// panels.
//
// panel_portable.multiply takes what pack_tile packed, so a kernel can begin with one kind of weights. Everything in
// the file is in an unnamed namespace. Otherwise the linker could merge an inline function with another file's, and
// carry AVX into the portable path. QUANTMOE_FORCE_KERNEL=panel_avx10 selects a kernel.
#pragma once
#include <cstddef>
#include <cstdint>

#include "cpu/calls.h"
#include "layouts/cpu_panel.h"

// What the activations of a slice of tokens may take of a workspace. Not an option: only tests set it.
extern "C" QM_API int64_t qm_slice_bytes;

namespace quantmoe {

// One activation row as a product reads it. For activation_format none x holds it; otherwise q, sums, step and
// zero_point.
struct ActivationRow {
  const float* x;       // [kp], zero past k
  const int8_t* q;      // [kp], zero past k
  const int32_t* sums;  // [spans()]: sum of q over each span
  float step;
  int32_t zero_point;
  const float* steps;  // [steps()], instead of step and zero_point where the matrix is stepped
};

// What activations that are integers have a step for: a row, each span of it, two spans.
enum Steps { kRowStep, kSpanStep, kPairStep };

constexpr int kMaxTileRows = 32;
constexpr int32_t kMaxExperts = 65536;

// Rows of a kernel's largest tile. A tile is a template for each number of rows, and instrumented ones take a compiler
// minutes: builds with sanitizers set QM_TILE_ROWS (CMakeLists.txt).
constexpr int tile_rows(int rows) {
#ifdef QM_TILE_ROWS
  return rows < QM_TILE_ROWS ? rows : QM_TILE_ROWS;
#else
  return rows;
#endif
}

// Rows of one tile interleaved for broadcast loads, unless a kernel packs q otherwise; byte offsets in `data`, m rows:
//   quantized: q int8 [kp / 4][m][4] | sums int32 [spans()][m] | step f32 [m] | zero_point int32 [m]
//   stepped:   q int8 [kp / 4][m][4] | sums int32 [spans()][m] | steps f32 [steps()][m]
//   float:     x f32 [kp][m]
struct TokenTile {
  const uint8_t* data;
  int m;
};
// Bytes of one row within a tile, so that tiles of any m lie back to back at row * tile_row_bytes.
inline int64_t tile_row_bytes(const PanelMatrix& matrix, bool quantized) {
  return quantized ? matrix.kp + 4 * (matrix.spans() + matrix.steps() + 2) : 4 * matrix.kp;
}

struct PanelProduct {
  const PanelMatrix* matrix;
  bool quantized;         // activations are integers: int8_token, int8_token_asym, or the matrix is stepped
  const uint8_t* panels;  // the first panel
  int64_t panel_count;
  const TokenTile* tiles;
  int64_t tile_count;
  // Row i of all tiles and row r of panel p goes to out[i * row_stride + (p % halves) * half_stride + (p / halves) * nr
  // + r].
  float* out;
  int64_t row_stride, half_stride;
  int halves;
};

// CachedAttention (its .def): what its kernels see of a call (attention.cc), and their arithmetic (attention.h).
constexpr int64_t kAttentionBlock = 256;                // slots whose softmax is one, counted from slot 0
constexpr int64_t kTileQueries = 128;                   // of a tile in prefill, which share the turned keys and values
constexpr int64_t kAttentionStep = 32;                  // keys that are transposed at a time
constexpr int64_t kScoreStride = kAttentionBlock + 16;  // of a query's scores: rows of a tile in different sets of L1

struct E4m3 {  // an element of a cache; read as its number times 2^-8
  uint8_t code;
};

struct AttentionTile {
  int64_t b, group, token, tokens;  // token: the first, counted from the row's first that counts
  const int32_t* slots = nullptr;   // of a tile that is one token with a list: slot i of the tile is slots[i]
  int64_t count = 0;                // of the list's slots; 0: there is none
};

struct AttentionContext {
  const qm_attention& node;
  const AttentionCall& call;
  float* q_scales;         // [batch, tokens]: 1 / norm of a token's queries, where qk_norm is row
  bool every_row = false;  // selects, where the call has `selected`; otherwise a row of more tokens than a list has

  int64_t heads() const { return node.num_heads / node.kv_num_heads; }  // that share keys and values
  int64_t element() const { return call.type == QM_F32 ? 4 : 2; }       // bytes, of qkv and output
  // Where a token's gates are in qkv, and its queries.
  const uint8_t* gates_of(int64_t position) const {
    return static_cast<const uint8_t*>(call.qkv) + position * qkv_size(node) * element();
  }
  const uint8_t* queries_of(int64_t position) const { return gates_of(position) + gates_size(node) * element(); }
  // Of a head of keys or values in the cache, `width` numbers.
  int64_t slot_bytes(int64_t width) const {
    const int64_t element = node.cache_format != k_cache_format_none ? 1 : call.cache_type == QM_F32 ? 4 : 2;
    return width * element + cache_tail(node);
  }
  // Features of a slot in either cache.
  int64_t key_width() const { return node.key_split ? node.key_split : node.head_size; }
  int64_t value_width() const { return node.key_split ? node.head_size - node.key_split : node.v_head_size; }
  // A tile is some tokens' queries of the heads of one group: its rows, the heads of a token side by side.
  int64_t tile_tokens() const {
    return !call.selected && !node.compress_rate && heads() < kTileQueries ? kTileQueries / heads() : 1;
  }
  int64_t tile_rows() const { return heads() * tile_tokens(); }
  int64_t padded_values() const { return align_up(node.v_head_size, 16); }
  int64_t part_floats() const { return 16 + padded_values(); }  // of a row: largest score, sum, 14 unused, values
  // Scratch of a lane, in floats; each piece is a multiple of a cache line.
  int64_t queries_at() const { return 0; }
  int64_t keys_at() const { return align_up(tile_rows() * node.head_size, 16); }
  int64_t values_at() const { return keys_at() + kAttentionStep * node.head_size; }
  int64_t scores_at() const { return values_at() + kAttentionBlock * padded_values(); }
  int64_t parts_at() const { return scores_at() + tile_rows() * kScoreStride; }
  int64_t entries_at() const { return parts_at() + 2 * tile_rows() * part_floats(); }
  int64_t scratch_floats() const { return entries_at() + align_up(most_entries(), 16); }

  int64_t slot(int64_t b, int64_t token) const { return call.rows[3 * b + 2] + token; }  // of its token-th that counts
  // Where that token is in qkv and the output, and in cos and sin.
  int64_t position(int64_t b, int64_t token) const {
    return (node.block_size ? 0 : b * call.tokens) + call.rows[3 * b] + token;
  }
  int64_t turn(int64_t b, int64_t token) const { return node.block_size ? slot(b, token) : position(b, token); }
  // Where a slot of a row and group is in the caches, in slots of one head, and from there to the next slot.
  int64_t place(int64_t b, int64_t group, int64_t slot) const {
    if (!node.block_size) return (b * node.kv_num_heads + group) * call.slots + slot;
    const int64_t block = call.block_table[b * (call.slots / node.block_size) + slot / node.block_size];
    return (block * node.block_size + slot % node.block_size) * node.kv_num_heads + group;
  }
  int64_t step() const { return node.block_size ? node.kv_num_heads : 1; }
  bool selects(int64_t b) const {
    return call.selected && (every_row || call.rows[3 * b + 2] + call.rows[3 * b + 1] > call.selected_size);
  }
  // The slots that a token sees, ascending, of selected_size numbers; the others are below 0.
  const int32_t* list(int64_t b, int64_t token, int64_t group) const {
    return call.selected +
           (position(b, token) * call.selected_lists + group % call.selected_lists) * call.selected_size;
  }
  // With a compress_rate, what a token sees, ascending: ~slot of compressed keys, then the slots of its window. Returns
  // how many. out: null: they are only counted.
  int64_t entries(int64_t b, int64_t token, int64_t group, int32_t* out) const {
    const int64_t rate = node.compress_rate, own = slot(b, token);
    int64_t count = 0;
    const auto put = [&](int64_t entry) {
      if (out) out[count] = static_cast<int32_t>(entry);
      ++count;
    };
    if (selects(b)) {
      const int32_t* const slots = list(b, token, group);
      for (int64_t i = 0; i < call.selected_size && slots[i] >= 0; ++i)
        if ((slots[i] + 1) % rate == 0) put(~slots[i]);
    } else {
      for (int64_t at = rate - 1; at <= own; at += rate) put(~at);
    }
    for (int64_t at = first_slot(own); at <= own; ++at) put(at);
    return count;
  }
  int64_t most_entries() const {
    if (!node.compress_rate) return 0;
    const int64_t all = call.slots / node.compress_rate;
    const int64_t compressed = call.selected && call.selected_size < all ? call.selected_size : all;
    const bool window = node.sliding_window && node.sliding_window < call.slots;
    return compressed + (window ? node.sliding_window : call.slots);
  }
  // The first slot that the token in slot p sees.
  int64_t first_slot(int64_t p) const {
    const int64_t chunk = node.chunk_size ? p / node.chunk_size * node.chunk_size : 0;
    const int64_t window = node.sliding_window ? p - node.sliding_window + 1 : 0;
    return chunk > window ? chunk : window > 0 ? window : 0;
  }
  // The last block that a token of the tile sees.
  int64_t last_block(const AttentionTile& tile) const {
    return (tile.count ? tile.count - 1 : slot(tile.b, tile.token + tile.tokens - 1)) / kAttentionBlock;
  }
};

// Latent attention that multiplies by the up-projections itself (latent_attention.h). Rows of few new tokens have their
// queries absorbed, some at a time, and then attend as without a nope_size; others expand the latents.
constexpr int64_t kAbsorbedTokens = 128;   // at a time, or one row's tokens
constexpr int64_t kExpandedTokens = 2048;  // of a task that expands: few heads' queries and sums are in memory
constexpr int64_t kMostRows = 8;           // of a panel

struct LatentContext {
  const qm_attention& node;
  const AttentionCall& call;

  int64_t rank() const { return node.v_head_size; }
  int64_t turning() const { return node.head_size - node.v_head_size; }
  int64_t group_of(int64_t head) const { return head / (node.num_heads / node.kv_num_heads); }
  int64_t padded_rank() const { return align_up(rank(), 16); }
  int64_t padded_outputs() const { return align_up(node.out_size, 16); }
  // A row of so many new tokens expands where that multiplies less, over a long cache.
  bool expands(int64_t count) const { return count > most_absorbed(); }
  int64_t most_absorbed() const {
    const int64_t saved = node.head_size + rank() - query_size(node) - node.out_size;
    return saved > 0 ? ceil_div(rank() * (int64_t{node.nope_size} + node.out_size), saved) - 1 : INT64_MAX;
  }
  int64_t expanded_tokens() const { return call.tokens < kExpandedTokens ? call.tokens : kExpandedTokens; }

  // Weights of values, [rows][n]: pieces of kAttentionBlock, each [rows][kScoreStride].
  static int64_t weights_floats(int64_t rows, int64_t n) { return ceil_div(n, kAttentionBlock) * rows * kScoreStride; }
  // Scratch of a lane, in floats; each piece is a multiple of a cache line. Of queries and outputs by their head:
  // the head's matrix, a panel of weights, and of sums, and a query.
  int64_t panel_at() const {
    const int64_t k_up = node.nope_size * padded_rank(), v_up = rank() * padded_outputs();
    return k_up > v_up ? k_up : v_up;
  }
  int64_t panel_sums_at() const {
    return panel_at() + weights_floats(kMostRows, node.nope_size > rank() ? node.nope_size : rank());
  }
  int64_t query_at() const {
    return panel_sums_at() + kMostRows * (padded_rank() > padded_outputs() ? padded_rank() : padded_outputs());
  }
  // For a task that expands: k_up in panels and v_up. A step's latents, rotated and as weights. A block's keys
  // (rotated) and values. All queries. A tile's scores and parts. All sums.
  int64_t v_up_at() const { return align_up(node.nope_size * rank(), 16); }
  int64_t turned_at() const { return v_up_at() + rank() * padded_outputs(); }
  int64_t latents_at() const { return turned_at() + kAttentionStep * node.head_size; }
  int64_t keys_at() const { return latents_at() + weights_floats(kAttentionStep, rank()) + padded_rank(); }
  int64_t values_at() const { return keys_at() + kAttentionBlock * query_size(node); }
  int64_t queries_at() const { return values_at() + kAttentionBlock * padded_outputs(); }
  int64_t scores_at() const { return queries_at() + align_up(expanded_tokens() * query_size(node), 16); }
  int64_t parts_at() const { return scores_at() + kTileQueries * kScoreStride; }
  int64_t sums_at() const { return parts_at() + kTileQueries * (16 + padded_outputs()); }
  int64_t scratch_floats() const {
    const int64_t absorbs = query_at() + align_up(query_size(node), 16);
    const int64_t expands = sums_at() + expanded_tokens() * (16 + padded_outputs());
    return absorbs > expands || call.tokens <= most_absorbed() ? absorbs : expands;
  }
};

// Rows of a call, from first_row on, whose queries are absorbed, of each the tokens from first_token on.
struct AbsorbedRows {
  int64_t first_row, first_token, count, tokens;
  const int32_t* rows;       // [count, 3]: 0, new tokens or 0 for none of these, slots before
  float *queries, *outputs;  // [count, tokens, (num_heads + kv_num_heads) D], queries first; [.., num_heads V]
};

// SparseIndexer: what its kernels see of a call (indexer.cc), and their arithmetic (indexer.h).
using IndexerCall = SequenceCall<qm_indexer>;

struct IndexerContext {
  const qm_indexer& node;
  const IndexerCall& call;
  qm_type cache_type;
  int64_t past_slots, slots;

  int64_t slot_bytes() const { return node.head_size * int64_t{cache_type == QM_F32 ? 4 : 2}; }
  uint8_t* keys(int64_t b, int64_t slot) const {
    return static_cast<uint8_t*>(call.present_keys) + (b * slots + slot) * slot_bytes();
  }
  int64_t slot(int64_t b, int64_t token) const { return call.rows[3 * b + 2] + token; }  // as AttentionContext's
  int64_t position(int64_t b, int64_t token) const { return b * call.tokens + call.rows[3 * b] + token; }
  // Every step() slots the last one has a score; a token in `slot` sees so many of them.
  int64_t step() const { return node.best_slot ? 1 : node.block_size; }
  int64_t scored(int64_t slot) const { return (slot + 1) / step(); }
  int64_t list_size() const { return node.top_k + step() - 1; }  // a token in a lower slot selects all
  // A tile is some tokens' queries of all heads, which share the turned keys.
  int64_t tile_tokens() const { return node.num_heads < kTileQueries ? kTileQueries / node.num_heads : 1; }
  int64_t tile_rows() const { return tile_tokens() * node.num_heads; }
  // Scratch of a lane, in floats; each piece is a multiple of a cache line.
  int64_t keys_at() const { return align_up(tile_rows() * node.head_size, 16); }
  int64_t products_at() const { return keys_at() + kAttentionStep * node.head_size; }
  int64_t query_at() const { return products_at() + tile_rows() * kScoreStride; }
  int64_t scratch_floats() const { return query_at() + align_up(node.head_size, 16); }
};

struct IndexerTile {
  int64_t b, token, tokens;  // token: counted from the row's first that counts
};

struct AttentionFunctions {
  // Stores the keys and values of a token, and its q_scales.
  void (*append)(const AttentionContext& a, int64_t b, int64_t token, float* scratch);
  // Norms and turns the tile's queries, into scratch.
  void (*queries)(const AttentionContext& a, const AttentionTile& tile, float* scratch);
  // The softmax over a block's slots, a part for each row.
  void (*block)(const AttentionContext& a, const AttentionTile& tile, int64_t block, float* scratch, float* parts);
  void (*begin)(const AttentionContext& a, const AttentionTile& tile, float* parts);  // no slot yet: the sinks
  // Adds a block's parts to the parts before it.
  void (*merge)(const AttentionContext& a, const AttentionTile& tile, int64_t block, const float* parts, float* into);
  void (*finish)(const AttentionContext& a, const AttentionTile& tile, float* parts);  // writes the output
  // A head's queries, turned and multiplied by k_up; its outputs, multiplied by v_up.
  void (*absorb)(const LatentContext& latent, const AbsorbedRows& rows, int64_t head, float* scratch);
  void (*release)(const LatentContext& latent, const AbsorbedRows& rows, int64_t head, float* scratch);
  // Attention of a head's tokens first .. of a row, of keys and values that it expands.
  void (*expand)(const LatentContext& latent, int64_t batch_row, int64_t head, int64_t first, int64_t tokens,
                 float* scratch);
  // Scores of the tile's tokens [tokens, groups, stride] for `count` blocks of keys with scores, from block `first` on.
  void (*index)(const IndexerContext& indexer, const IndexerTile& tile, int64_t first, int64_t count, float* scratch,
                float* scores, int64_t stride);
};
extern const AttentionFunctions attention_portable, attention_avx2, attention_avx512vnni, attention_neon_dotprod;

// CausalConv, GatedDelta and StateSpace: what their kernels see of a call (linear_attention.cc), and their arithmetic
// (linear_attention.h, ops/*.def).
constexpr int64_t kConvChannels = 256;  // of a task
constexpr int64_t kDeltaTokens = 32;    // whose operands are prepared together
constexpr int64_t kDeltaHere = 8;       // most tokens that work on the state where it is

using ConvCall = SequenceCall<qm_conv>;
using DeltaCall = SequenceCall<qm_delta>;
using SpaceCall = SequenceCall<qm_space>;

struct ConvContext {
  const qm_conv& node;
  const ConvCall& call;

  int64_t state_size() const { return int64_t{node.channels} * (node.width - 1); }  // of a row
  int64_t slot(int64_t i) const { return i * call.batch * state_size(); }           // of the window, in numbers
  int64_t live() const { return slot(node.state_window - 1); }
  // Weights, bias, output, and the inputs of W tokens.
  int64_t scratch_floats() const { return (2 * int64_t{node.width} + 2) * kConvChannels; }
};

// What GatedDelta and StateSpace share: a state of [keys, values] a head.
struct StateContext {
  qm_type type;
  int64_t batch, tokens;
  const int32_t* rows;
  const float* past_state;
  float* present_state;
  int64_t heads, keys, values, window;

  int64_t head_state() const { return keys * values; }
  int64_t slot(int64_t i) const { return i * batch * heads * head_state(); }  // of the window
  int64_t live() const { return slot(window - 1); }
  int64_t width() const { return heads * values; }  // of z and y
  int64_t padded_keys() const { return align_up(keys, 16); }
  int64_t padded_values() const { return align_up(values, 16); }
  int64_t operand_floats() const { return 4 * padded_keys() + 16; }  // of a token
  // Scratch of a lane, in floats; each piece is a multiple of a cache line. The state's columns are in slabs, one after
  // the other, each [keys][its columns].
  int64_t operands_at() const { return keys * padded_values(); }
  int64_t values_at() const { return operands_at() + kDeltaTokens * operand_floats(); }
  int64_t outputs_at() const { return values_at() + kDeltaTokens * padded_values(); }
  int64_t scan_floats() const { return outputs_at() + kDeltaTokens * padded_values(); }
};

struct DeltaContext : StateContext {
  const qm_delta& node;
  const DeltaCall& call;

  DeltaContext(const qm_delta& of, const DeltaCall& made)
      : StateContext{made.type,          made.batch,     made.tokens,    made.rows,      made.past_state,
                     made.present_state, of.num_v_heads, of.k_head_size, of.v_head_size, of.state_window},
        node(of),
        call(made) {}
  int64_t qkv_width() const { return 2 * int64_t{node.num_k_heads} * node.k_head_size + width(); }
  int64_t scratch_floats() const { return scan_floats(); }
};

struct SpaceContext : StateContext {
  const qm_space& node;
  const SpaceCall& call;
  void* workspace;

  SpaceContext(const qm_space& of, const SpaceCall& made, void* workspace)
      : StateContext{made.type,          made.batch,   made.tokens,   made.rows,    made.past_state,
                     made.present_state, of.num_heads, of.state_size, of.head_size, of.state_window},
        node(of),
        call(made),
        workspace(workspace) {}
  int64_t xbc_width() const { return width() + 2 * int64_t{node.num_groups} * node.state_size; }
  // The workspace begins with what the norm takes, [B, S, H P]. A lane has its scan, then what gates a norm's features.
  float* outputs(int64_t token) const { return static_cast<float*>(workspace) + token * width(); }
  int64_t output_floats() const { return align_up(batch * tokens * width(), 16); }
  int64_t scratch_floats() const { return std::max(scan_floats(), align_up(node.norm_size, 16)); }
};

struct LinearAttentionFunctions {
  // Row b's tokens, in channels first .. first + kConvChannels - 1.
  void (*conv)(const ConvContext& conv, int64_t b, int64_t first, float* scratch);
  // Row b's tokens, of a value head; `ahead`, a state like that head's, is read soon.
  void (*delta)(const DeltaContext& delta, int64_t b, int64_t head, const float* ahead, float* scratch);
  // As above, without the norm; and gate and norm of a token of row b.
  void (*space)(const SpaceContext& space, int64_t b, int64_t head, const float* ahead, float* scratch);
  void (*space_norm)(const SpaceContext& space, int64_t b, int64_t token, float* scratch);
};
extern const LinearAttentionFunctions linear_attention_portable, linear_attention_avx2, linear_attention_avx512vnni,
    linear_attention_neon_dotprod;

struct CpuKernel {
  const char* name;
  bool (*usable)();
  int tile_rows;  // most rows of a tile

  void (*to_float)(qm_type type, const void* source, int64_t n, float* out);
  void (*from_float)(qm_type type, const float* source, int64_t n, void* out);
  void (*scale)(float factor, float* x, int64_t n);  // x *= factor
  bool (*all_finite)(const float* x, int64_t n);
  // Quantizes x [k] to q [kp]; false when the row counts as not finite.
  bool (*quantize)(int32_t activation_format, const float* x, int64_t k, int64_t kp, int8_t* q, float* step,
                   int32_t* zero_point);
  void (*block_sums)(const int8_t* q, int64_t block, int64_t blocks, int32_t* sums);
  // Rounds x [k] to a float activation_format, as f32 [k]; false when the row is not finite. stored: the scale that
  // fp8_tensor and nvfp4 divide by.
  bool (*round_row)(int32_t activation_format, float stored, const float* x, int64_t k, float* out);
  // Quantizes x [k] to int8_group, with a step for each 32 or 64 columns: q [kp], zero past k, and steps [kp /
  // columns]. False: x is not finite.
  bool (*quantize_int8)(const float* x, int64_t k, int64_t kp, int64_t columns, int8_t* q, float* steps);
  // Quantizes x [k] to nvfp4: doubled values q [16 groups], zero past k, and halved steps; false when it is not finite.
  bool (*quantize_nvfp4)(float stored, const float* x, int64_t k, int64_t groups, int8_t* q, float* steps);
  // h[i] = act(gate[i], up[i]), or act(up[i]) when gate is null.
  void (*activate)(const qm_moe& moe, const float* gate, const float* up, int64_t n, float* h);
  void (*accumulate)(float weight, const float* x, int64_t n, float* y);  // y = fma(weight, x, y)
  void (*pack_tile)(const PanelMatrix& p, bool quantized, const ActivationRow* rows, int m, uint8_t* out);
  void (*multiply)(const PanelProduct& product);
  // The instructions of this kernel's int8 products on registers alone; returns the multiply-adds done. probe_<isa>.cc
  int64_t (*int8_peak)(int64_t rounds);
  const AttentionFunctions* attention;
  const LinearAttentionFunctions* linear_attention;
};

int64_t int8_peak_portable(int64_t rounds);
int64_t int8_peak_avx2(int64_t rounds);
int64_t int8_peak_avx512vnni(int64_t rounds);
int64_t int8_peak_amxint8(int64_t rounds);

#define QM_CPU_KERNEL(name) extern const CpuKernel name;
#include "cpu/kernels.inc"

// The best usable kernel, or the one QUANTMOE_FORCE_KERNEL names; null and a sentence in err when there is none.
const CpuKernel* select_kernel(char* err);

}  // namespace quantmoe
