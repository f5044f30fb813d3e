// tdpbssd on registers: more independent sums than its latency takes.
#include <immintrin.h>

#include "cpu/kernel.h"

namespace quantmoe {

int64_t int8_peak_amxint8(int64_t rounds) {
  struct alignas(64) {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16};
  } const shapes;
  _tile_loadconfig(&shapes);
  _tile_zero(4);
  _tile_zero(5);
  for (int64_t r = 0; r < rounds; ++r) {
    _tile_dpbssd(0, 4, 5);
    _tile_dpbssd(1, 4, 5);
    _tile_dpbssd(2, 4, 5);
    _tile_dpbssd(3, 4, 5);
  }
  _tile_release();
  return rounds * 4 * 16 * 16 * 64;
}

}  // namespace quantmoe
