// What all layouts have in common: the matrices of one row of a packed tensor, and a row's parts.
#pragma once
#include <cstdint>

#include "core/parallel.h"

namespace quantmoe {

constexpr int64_t kRowAlignment = 64;

// Parts of a row, as qm_row counts them.
enum RowPart { kCodes, kScales, kZeroPoints, kGlobalScales, kBiases, kPerms, kInputScales, kPreScales };

// Gate and up, or one matrix: `halves` matrices [n, k].
struct RowMatrices {
  const qm_projection& w;
  int64_t n, k;
  int halves;
  qm_matrix* of[2];          // packing reads them, unpacking fills their arrays
  const int32_t* row_order;  // [n]: the matrix's row of each packed row; null: its own
  const int32_t* pre_order;  // [k]: the feature of each packed pre-scale; null: its own

  int64_t row(int64_t packed) const { return row_order ? row_order[packed] : packed; }
  int64_t groups() const { return w.group_size == -1 ? 1 : (k - 1) / w.group_size + 1; }
};

// The threads that a call works on.
struct PackingThreads {
  int lanes;
  qm_parallel_for parallel_for;
  void* context;
  template <class Body>
  void run(int64_t count, const Body& body) const {
    parallel(lanes, parallel_for, context, count, body);
  }
};

// A layout's own of a row: all parts before the permutations. The parts after the codes are zeros when it packs.
struct RowLayout {
  int (*row_of)(const qm_projection&, int64_t n, int64_t k, int halves, qm_row*, char* err);
  int (*pack)(const RowMatrices&, const qm_row&, uint8_t* row, const PackingThreads&, char* err);
  void (*unpack)(const RowMatrices&, const qm_row&, const uint8_t* row, const PackingThreads&);
};
extern const RowLayout kCpuPanelRow, kMarlinRow;

}  // namespace quantmoe
