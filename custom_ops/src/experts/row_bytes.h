// Bytes of the rows of an expert.
#pragma once
#include <array>
#include <stdexcept>

#include "quantmoe/quant_moe.h"

namespace quantmoe {

// Of w13 and w2. Throws std::invalid_argument for attributes that their layouts refuse.
inline std::array<int64_t, 2> row_bytes_of(const qm_moe& moe) {
  char error[QM_ERROR_SIZE];
  qm_row w13, w2;
  if (qm_row_of(&moe.w13, moe.intermediate_size, moe.hidden_size, moe.gated ? 2 : 1, &w13, error) ||
      qm_row_of(&moe.w2, moe.hidden_size, moe.intermediate_size, 1, &w2, error))
    throw std::invalid_argument(error);
  return {w13.bytes, w2.bytes};
}

}  // namespace quantmoe
