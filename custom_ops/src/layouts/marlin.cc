// Codes into layout marlin (FORMAT.md 3.2): a unit of 64 columns of a 16-row panel, as tensor-core fragments.
//
// A column is 32 h + 8 t + 4 s + 2 a + b; row r * 8 + g of a panel is row g of gate (r = 0) and up (r = 1), or of one
// matrix. 4 bits: bytes [g][t][h][s][b][r], the code of a = 0 low; 8 bits: [r][g][t ^ g / 2][h ^ t % 2][s][b][a].
#include "layouts/marlin.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <iterator>

#include "core/parallel.h"

namespace quantmoe {
namespace {

constexpr int64_t kUnit = kMarlinUnit, kRows = 16;

void pack_unit4(const uint8_t (&c)[kRows][kUnit], uint8_t* to) {
  for (int g = 0; g < 8; ++g)
    for (int t = 0; t < 4; ++t)
      for (int h = 0; h < 2; ++h)
        for (int s = 0; s < 2; ++s)
          for (int b = 0; b < 2; ++b)
            for (int r = 0; r < 2; ++r) {
              const uint8_t* at = c[8 * r + g] + 32 * h + 8 * t + 4 * s + b;
              *to++ = static_cast<uint8_t>(at[0] | at[2] << 4);
            }
}

void pack_unit8(const uint8_t (&c)[kRows][kUnit], uint8_t* to) {
  static_assert(std::endian::native == std::endian::little);
  for (int row = 0; row < kRows; ++row, to += kUnit)
    for (int t = 0; t < 4; ++t)
      for (int h = 0; h < 2; ++h) {
        uint64_t v;
        std::memcpy(&v, c[row] + 32 * h + 8 * t, 8);
        v = (v & 0xff0000ffff0000ff) | (v & 0x0000ff000000ff00) << 8 | (v & 0x00ff000000ff0000) >> 8;
        std::memcpy(to + 16 * (t ^ row / 2 % 4) + 8 * (h ^ t % 2), &v, 8);
      }
}

constexpr bool carries(int32_t format) { return format >= k_format_int4 && format <= k_format_f16; }

int check_marlin(const qm_projection& w, int halves, char* err) {
  if (w.layout != k_layout_marlin || w.layout_version != kMarlinVersion)
    return fail(err, QM_INVALID, "layout %s version %d, expected marlin version %d: export the model again",
                enum_name("layout", w.layout), w.layout_version, kMarlinVersion);
  if (!carries(w.format))
    return fail(err, QM_UNSUPPORTED, "format %s; layout marlin carries %s", enum_name("format", w.format),
                enum_names("format", carries).c_str());
  const bool floats = code_bits(w.format) == 16;
  if (!is_marlin_group(w.group_size) || (floats && w.group_size != -1))
    return fail(err, QM_UNSUPPORTED, "group_size %d; layout marlin carries %s", w.group_size,
                floats ? "-1 of floats" : "-1, 16, 32, multiples of 64");
  QM_TRY(check_range("scale_type", w.scale_type, k_scale_type_f32, k_scale_type_e4m3, err));
  QM_TRY(check_range("zero_points", w.zero_points, 0, is_integer(w.format), err));
  QM_TRY(check_range("bias", w.bias, 0, 1, err));
  QM_TRY(check_range("pre_scale", w.pre_scale, 0, 1, err));
  return check_range("perm", w.perm, 0, halves, err);
}

}  // namespace
}  // namespace quantmoe

using namespace quantmoe;

int qm_pack_marlin(const uint8_t* gate, const uint8_t* up, int64_t n, int64_t k, int bits, uint8_t fill, void* dst,
                   int lanes, qm_parallel_for parallel_for, void* context, char* err) {
  if (n < 1 || k < 1 || (bits != 4 && bits != 8))
    return fail(err, QM_INVALID, "cannot pack [%lld, %lld] of %d bits", (long long)n, (long long)k, bits);
  const int64_t rows = gate ? 8 : kRows, units = ceil_div(k, kUnit), unit_bytes = kRows * kUnit * bits / 8;
  parallel(lanes, parallel_for, context, ceil_div(n, rows), [&](int, int64_t panel) {
    uint8_t codes[kRows][kUnit], *to = static_cast<uint8_t*>(dst) + panel * units * unit_bytes;
    for (int64_t u = 0; u < units; ++u, to += unit_bytes) {
      std::memset(codes, fill, sizeof codes);
      for (int64_t i = 0; i < kRows; ++i) {
        const int64_t row = panel * rows + (gate ? i % 8 : i);
        if (row < n)
          std::memcpy(codes[i], (gate && i < 8 ? gate : up) + row * k + u * kUnit,
                      static_cast<size_t>(std::min(kUnit, k - u * kUnit)));
      }
      (bits == 4 ? pack_unit4 : pack_unit8)(codes, to);
    }
  });
  return QM_OK;
}

int qm_marlin_row_of(const qm_projection* w, int64_t n, int64_t k, int halves, qm_marlin_row* row, char* err) {
  if (n < 1 || k < 1 || n > INT32_MAX || k > INT32_MAX / 2 - kMarlinUnit)
    return fail(err, QM_INVALID, "cannot pack [%lld, %lld]", (long long)n, (long long)k);
  QM_TRY(check_marlin(*w, halves, err));
  const MarlinRow found = marlin_row(*w, n, k, halves);
  const size_t starts[] = {
      0, found.scales_at, found.zeros_at, found.globals_at, found.bias_at, found.perm_at, found.input_at, found.pre_at};
  *row = {code_bits(w->format),
          found.panels,
          found.units,
          found.blocks,
          found.per_block,
          found.half,
          static_cast<int64_t>(found.bytes),
          {},
          {}};
  std::copy(std::begin(starts), std::end(starts), row->at);
  std::copy(std::begin(found.sizes), std::end(found.sizes), row->sizes);
  return QM_OK;
}
