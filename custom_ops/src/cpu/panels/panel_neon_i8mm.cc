// NEON with the int8 matrix multiply (Armv8.6; Neoverse V1, N2 and later, Graviton3, Apple M2).
#include "cpu/tiles/neon.h"

namespace quantmoe {
namespace {

// One row wastes half of each matrix product: with a scale every 32 columns or less the dot products take fewer
// instructions (tests/arm/instructions.py).
void multiply_rows(const PanelProduct& product) {
  const PanelMatrix& matrix = *product.matrix;
  const bool one = product.tile_count == 1 && product.tiles[0].m == 1;
  if (one && product.quantized && matrix.grouped && matrix.group() <= 32) return panel_neon_dotprod.multiply(product);
  multiply(product);
}

}  // namespace

const CpuKernel panel_neon_i8mm = {"panel_neon_i8mm",
                                   cpu_has_i8mm,
                                   16,
                                   QM_ELEMENTWISE(pack_rows),
                                   multiply_rows,
                                   int8_peak,
                                   &attention_neon_dotprod,
                                   &linear_attention_neon_dotprod};

}  // namespace quantmoe
