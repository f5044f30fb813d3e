// Panels times tiles of many tokens with AMX; AVX512-VNNI takes the others.
//
//   A: a tile's tokens             B: unpacked codes of 16 rows         C: their products, which are stored
//      [token][64 columns]      x     [four][16 rows][4 columns]    =      [token][16 rows], and then scaled
//
// One instruction multiplies 16 tokens, 64 columns and 16 rows. A group of fewer columns has narrower tiles, because
// its products have a scale of their own. The rest of a wider group is 32 columns. With groups of 16 most of the work
// would be scales. A tile of tokens is packed in the order of A's tiles: its rows' lines would meet in few sets of L1.
// Rows are in the lanes' order of avx512_rows.h. Codes are signed, and 4-bit codes have their zero points subtracted,
// so sums start at 0. With 8-bit zero points sums start at another number for each row.
#include <sys/syscall.h>
#include <unistd.h>

#include "cpu/tiles/avx512_rows.h"
#include "cpu/tiles/code_panels.h"
#include "cpu/x86.h"

namespace quantmoe {
namespace {

// What ldtilecfg reads.
struct alignas(64) TileShapes {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};

struct AmxRows : Avx512Rows {
  static constexpr int code_tokens(int) { return kLeastTokens; }
  static constexpr int kLeastTokens = kTileRows < 8 ? kTileRows : 8;
  // Of a tile; fewer are as fast with AVX512-VNNI, which unpacks a code for each tile, and into registers.
  static int least_tokens(const PanelMatrix& matrix) {
    return std::min(kTileRows, matrix.span > 32 && matrix.bits == 4 ? 8 : 13);
  }
  static constexpr int kLeastGroup = 32, kCodeVectors = 1;
  static constexpr bool kSigned = true, kStores = true;
  template <int>
  static constexpr int kFours = 8;
  using Avx512Rows::add;
  static Integers add(Integers a, Integers b) { return _mm512_add_epi32(a, b); }

  template <class C, bool kOffset>
  [[gnu::always_inline]] static Integers code(Integers v) {
    if constexpr (kOffset) return C::low(v);
    return C::signed_low(v);
  }
  template <class C, bool kOffset>
  [[gnu::always_inline]] static void unpack(const Group& panels, int64_t offset, Integers (*codes)[1]) {
    constexpr bool k4 = C::kBits == 4;
    for (int line = 0; line < (k4 ? 2 : 4); ++line) {
      const int64_t at = offset + (k4 ? 64 : 32) * line;
      const Integers first = load_half<C::kBits>(panels, 0, at), second = load_half<C::kBits>(panels, 1, at);
      const Integers both[2] = {even_dwords(first, second), odd_dwords(first, second)};
      for (int j = 0; j < 2; ++j) {
        codes[2 * line + j][0] = code<C, kOffset>(both[j]);
        if constexpr (k4) codes[4 + 2 * line + j][0] = code<C, kOffset>(_mm512_srli_epi32(both[j], 4));
      }
    }
  }

  // 32 columns of codes less 8 to codes less zero points.
  [[gnu::always_inline]] static void centre(Integers (*codes)[1], Integers zeros) {
    const Integers less = _mm512_sub_epi32(integers(8), zeros);
    const Integers all = _mm512_mullo_epi32(_mm512_and_si512(less, integers(255)), integers(0x01010101));
    for (int j = 0; j < 8; ++j) codes[j][0] = _mm512_add_epi8(codes[j][0], all);
  }

  static Integers bytes(int n) { return _mm512_set1_epi8(static_cast<char>(n)); }
  struct Int4 : Avx512Rows::Int4 {
    static Integers signed_low(Integers v) { return _mm512_sub_epi8(low(v), bytes(8)); }
  };
  struct E2m1 : Avx512Rows::E2m1 {
    static Integers signed_low(Integers v) { return _mm512_sub_epi8(low(v), bytes(12)); }
  };
  struct Int8 : Avx512Rows::Int8 {
    static Integers low(Integers v) { return flip8(v); }
    static Integers signed_low(Integers v) { return v; }
  };

  // Columns that an instruction multiplies: kNarrow of what is left of spans of more than 64.
  static constexpr int kNarrow = 32;
  static int wide(int64_t span) { return span < 64 ? static_cast<int>(span) : 64; }
  // Tiles of even and of odd heights have registers of their own, because the heights of one product differ by at most
  // one token. If a span is one instruction, every second span has its sums in place of narrow tokens. It need not wait
  // until the sums before are stored.
  enum Registers { kSums, kWideTokens = 2, kNarrowTokens = 4, kWideCodes = 6, kNarrowCodes = 7 };
  static TileShapes shapes(int64_t span, const int (&heights)[2]) {
    TileShapes all;
    const auto set = [&](int tile, int rows, int row_bytes) {
      all.rows[tile] = static_cast<uint8_t>(rows), all.row_bytes[tile] = static_cast<uint16_t>(row_bytes);
    };
    for (int odd = 0; odd < 2; ++odd) {
      set(kSums + odd, heights[odd], 64);
      set(kWideTokens + odd, heights[odd], wide(span));
      set(kNarrowTokens + odd, heights[odd], span > 64 ? kNarrow : 64);
    }
    set(kWideCodes, wide(span) / 4, 64);
    set(kNarrowCodes, kNarrow / 4, 64);
    return all;
  }

// gcc's intrinsics take a register's number as it is written.
#define QM_MULTIPLY(SUMS, TOKENS, CODES, COLUMNS) \
  _tile_loadd(TOKENS, x, COLUMNS);                \
  _tile_loadd(CODES, codes, 64);                  \
  if constexpr (kUnsigned) {                      \
    _tile_dpbsud(SUMS, TOKENS, CODES);            \
  } else {                                        \
    _tile_dpbssd(SUMS, TOKENS, CODES);            \
  }
#define QM_PRODUCTS(SUMS, WIDE, NARROW)                                        \
  _tile_zero(SUMS);                                                            \
  for (; columns >= step; columns -= step, x += step * M, codes += step / 4) { \
    QM_MULTIPLY(SUMS, WIDE, 6, step)                                           \
  }                                                                            \
  if (columns) {                                                               \
    QM_MULTIPLY(SUMS, NARROW, 7, kNarrow)                                      \
  }                                                                            \
  _tile_stored(SUMS, dot, 64);
  template <int M, bool kUnsigned, int kSpan>
  [[gnu::always_inline]] static void products(const Integers (*codes)[1], const uint8_t* x, int64_t span, int columns,
                                              bool odd, Integers* dot) {
    const int step = kSpan ? kSpan : wide(span);
    if constexpr (kSpan) columns = kSpan;
    static_assert(kSpan <= 64);
    asm volatile("" ::: "memory");  // gcc 12 does not say that a tile's load reads memory
    if (kSpan && odd) {             // nothing is narrow
      if constexpr (M % 2) {
        QM_PRODUCTS(5, 3, 1)
      } else {
        QM_PRODUCTS(4, 2, 0)
      }
    } else if constexpr (M % 2) {
      QM_PRODUCTS(1, 3, 5)
    } else {
      QM_PRODUCTS(0, 2, 4)
    }
  }
#undef QM_PRODUCTS
#undef QM_MULTIPLY
};

bool has_tiles(const PanelMatrix& matrix, bool quantized, int tokens) {
  return has_codes<AmxRows>(matrix, quantized) && tokens >= AmxRows::least_tokens(matrix);
}

void place(const PanelMatrix& matrix, const uint8_t* const* rows, int count, int64_t bytes, uint8_t* __restrict out) {
  const int64_t span = matrix.span, step = AmxRows::wide(span);
  for (int64_t at = 0, columns; at < bytes; at += columns) {
    columns = std::min(step, span - at % span);
    if (columns == 64)  // inline: a copy is less than a call
      for (int i = 0; i < count; ++i, out += 64) _mm512_storeu_si512(out, AmxRows::load(rows[i] + at));
    else
      for (int i = 0; i < count; ++i, out += columns) std::memcpy(out, rows[i] + at, static_cast<size_t>(columns));
  }
}
void pack(const PanelMatrix& matrix, bool quantized, const ActivationRow* rows, int tokens, uint8_t* out) {
  const auto packed = has_tiles(matrix, quantized, tokens) ? pack_rows<place> : pack_rows<interleave>;
  packed(matrix, quantized, rows, tokens, out);
}

void multiply(const PanelProduct& product) {
  const PanelMatrix& matrix = *product.matrix;
  PanelProduct part = product;  // tiles of the same kind, and for tile registers of two heights
  for (const TokenTile* const end = product.tiles + product.tile_count; part.tiles != end;
       part.tiles += part.tile_count) {
    const int most = part.tiles->m;
    const bool tiles = has_tiles(matrix, product.quantized, most);
    int64_t tokens = 0;
    const TokenTile* next = part.tiles;
    for (; next != end && has_tiles(matrix, product.quantized, next->m) == tiles &&
           (!tiles || next->m == most || next->m == most - 1);
         ++next)
      tokens += next->m;
    part.tile_count = next - part.tiles;
    if (tiles) {
      const int heights[2] = {most % 2 ? most - 1 : most, most % 2 ? most : most - 1};
      const TileShapes shapes = AmxRows::shapes(matrix.span, heights);
      _tile_loadconfig(&shapes);
      multiply_codes<AmxRows>(part);
      _tile_release();
    } else {
      panel_avx512vnni.multiply(part);
    }
    part.out += tokens * product.row_stride;
  }
}

// The system saves a tile's registers for processes that have asked for it.
bool usable() {
  constexpr long kRequest = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  return x86_has(kSavesTiles, bit_AVX | bit_FMA | bit_F16C, bit_AVX512F | bit_AVX512BW | bit_AVX512VL | bit_AVX512DQ,
                 bit_AVX512VNNI, kAmxTile | kAmxInt8) &&
         syscall(SYS_arch_prctl, kRequest, kTileData) == 0;
}

}  // namespace

const CpuKernel panel_amxint8 = {"panel_amxint8",
                                 usable,
                                 AmxRows::kTileRows,
                                 QM_ELEMENTWISE(pack),
                                 multiply,
                                 int8_peak_amxint8,
                                 &attention_avx512vnni,
                                 &linear_attention_avx512vnni};

}  // namespace quantmoe
