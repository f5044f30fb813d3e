// Experts and linears to rows and back: which matrices a row has and in which order, and the parts that all layouts
// have: permutations, input scales, pre-scales.
#include "layouts/row.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <string_view>
#include <vector>

#include "core/numbers.h"

namespace quantmoe {
namespace {

const RowLayout& layout_of(const qm_projection& w) {
  return w.layout == k_layout_marlin ? kMarlinRow : kCpuPanelRow;  // which refuses every other
}

// Refuses an order that does not have each of 0 to count - 1 once: kernels and packers follow it.
int check_order(const char* what, const int32_t* order, int64_t count, char* err) {
  std::vector<bool> seen(static_cast<size_t>(count));
  for (int64_t i = 0; order && i < count; ++i) {
    if (order[i] < 0 || order[i] >= count || seen[static_cast<size_t>(order[i])])
      return fail(err, QM_INVALID, "%s has %d at %lld, expected each of 0 to %lld once", what, order[i], (long long)i,
                  (long long)(count - 1));
    seen[static_cast<size_t>(order[i])] = true;
  }
  return QM_OK;
}
int check_perms(const RowMatrices& matrices, char* err) {
  for (int i = 0; i < matrices.w.perm; ++i)
    QM_TRY(check_order("the permutation", matrices.of[i]->perm, matrices.k, err));
  return QM_OK;
}

// Number i of a part of vectors [k].
int64_t vector_at(const qm_row& row, RowPart part, int64_t i, int64_t k) {
  return row.at[part] + i * align_up(4 * k, kRowAlignment);
}

int pack_row(const RowMatrices& matrices, void* out, const PackingThreads& pool, char* err) {
  qm_row parts{};
  const RowLayout& layout = layout_of(matrices.w);
  QM_TRY(layout.row_of(matrices.w, matrices.n, matrices.k, matrices.halves, &parts, err));
  QM_TRY(check_perms(matrices, err));
  uint8_t* const row = static_cast<uint8_t*>(out);
  std::memset(row + parts.sizes[kCodes], 0, static_cast<size_t>(parts.bytes - parts.sizes[kCodes]));
  QM_TRY(layout.pack(matrices, parts, row, pool, err));
  for (int i = 0; i < matrices.w.perm; ++i) {
    int32_t* const perm = reinterpret_cast<int32_t*>(row + vector_at(parts, kPerms, i, matrices.k));
    for (int64_t k = 0; k < matrices.k; ++k)
      perm[k] = matrices.of[i]->perm ? matrices.of[i]->perm[k] : static_cast<int32_t>(k);
  }
  for (int64_t i = 0; i < parts.sizes[kInputScales] / 4; ++i)
    std::memcpy(row + parts.at[kInputScales] + 4 * i, &matrices.of[i]->input_scale, 4);
  for (int i = 0; i < matrices.w.pre_scale; ++i) {
    float* const scales = reinterpret_cast<float*>(row + vector_at(parts, kPreScales, i, matrices.k));
    const float* const from = matrices.of[i]->pre_scale;
    for (int64_t k = 0; k < matrices.k; ++k)
      scales[k] = !from ? 1.0f : from[matrices.pre_order ? matrices.pre_order[k] : k];
  }
  return QM_OK;
}

int unpack_row(const RowMatrices& matrices, const void* from, const PackingThreads& pool, char* err) {
  qm_row parts{};
  const RowLayout& layout = layout_of(matrices.w);
  QM_TRY(layout.row_of(matrices.w, matrices.n, matrices.k, matrices.halves, &parts, err));
  const uint8_t* const row = static_cast<const uint8_t*>(from);
  // Of what gate and up share each gets its own.
  const auto of_half = [&](int half, int64_t count) { return std::min<int64_t>(half, count - 1); };
  for (int half = 0; half < matrices.halves && matrices.w.perm; ++half)
    std::memcpy(matrices.of[half]->perm, row + vector_at(parts, kPerms, of_half(half, matrices.w.perm), matrices.k),
                static_cast<size_t>(4 * matrices.k));
  QM_TRY(check_perms(matrices, err));  // which pre_order may be
  layout.unpack(matrices, parts, row, pool);
  for (int half = 0; half < matrices.halves; ++half) {
    qm_matrix& target = *matrices.of[half];
    target.input_scale = 0;
    if (const int64_t count = parts.sizes[kInputScales] / 4)
      std::memcpy(&target.input_scale, row + parts.at[kInputScales] + 4 * of_half(half, count), 4);
    if (!matrices.w.pre_scale) continue;
    const float* const scales = reinterpret_cast<const float*>(
        row + vector_at(parts, kPreScales, of_half(half, matrices.w.pre_scale), matrices.k));
    for (int64_t k = 0; k < matrices.k; ++k)
      target.pre_scale[matrices.pre_order ? matrices.pre_order[k] : k] = scales[k];
  }
  return QM_OK;
}

// FORMAT.md 2.6: gate's and up's rows are in down's order, so h is in the order of w2's columns.
RowMatrices w13_of(const qm_moe& moe, qm_matrix* gate, qm_matrix* up, const qm_matrix* down) {
  const int32_t* const order = moe.w2.perm ? down->perm : nullptr;
  if (moe.gated) return {moe.w13, moe.intermediate_size, moe.hidden_size, 2, {gate, up}, order, nullptr};
  return {moe.w13, moe.intermediate_size, moe.hidden_size, 1, {up, nullptr}, order, nullptr};
}
RowMatrices w2_of(const qm_moe& moe, qm_matrix* down) {
  return {
      moe.w2, moe.hidden_size, moe.intermediate_size, 1, {down, nullptr}, nullptr, moe.w2.perm ? down->perm : nullptr};
}
// Kernels of marlin multiply a linear's x before they gather it (FORMAT.md 3.5). Kernels of cpu_panel do it after
// (2.9).
RowMatrices linear_of(const qm_linear& linear, qm_matrix* matrix) {
  const bool packed_order = linear.w.perm && linear.w.layout != k_layout_marlin;
  return {linear.w,
          linear.out_features,
          linear.in_features,
          1,
          {matrix, nullptr},
          nullptr,
          packed_order ? matrix->perm : nullptr};
}

// Puts the name of what was refused before why.
int of_tensor(const char* name, int status, char* err) {
  return status ? fail(err, status, "%s: %s", name, std::string(err).c_str()) : QM_OK;
}

// body(name, matrices, row) for each of an operator's rows; w2 comes first, as w13 takes down's order.
template <class Row, class Body>
int for_rows(std::string_view op, const void* node, qm_matrix* matrices, Row* rows, const Body& body, char* err) {
  if (op == "QuantLinear") return body("w", linear_of(*static_cast<const qm_linear*>(node), matrices), rows[0]);
  if (op != "QuantMoE")
    return fail(err, QM_UNSUPPORTED, "%.64s has no packed weights, expected QuantMoE or QuantLinear", op.data());
  const qm_moe& moe = *static_cast<const qm_moe*>(node);
  qm_matrix *const up = matrices + (moe.gated ? 1 : 0), *const down = up + 1;
  QM_TRY(body("w2", w2_of(moe, down), rows[1]));
  return body("w13", w13_of(moe, matrices, up, down), rows[0]);
}

}  // namespace
}  // namespace quantmoe

using namespace quantmoe;

int qm_row_of(const qm_projection* w, int64_t n, int64_t k, int halves, qm_row* row, char* err) {
  *row = {};
  return layout_of(*w).row_of(*w, n, k, halves, row, err);
}

int qm_pack(const char* op, const void* node, const qm_matrix* matrices, void* const* rows, int lanes,
            qm_parallel_for parallel_for, void* context, char* err) {
  const auto pack = [&](const char* name, const RowMatrices& from, void* row) {
    return of_tensor(name, pack_row(from, row, {lanes, parallel_for, context}, err), err);
  };
  return for_rows(op, node, const_cast<qm_matrix*>(matrices), rows, pack, err);
}

int qm_unpack(const char* op, const void* node, const void* const* rows, qm_matrix* matrices, int lanes,
              qm_parallel_for parallel_for, void* context, char* err) {
  const auto unpack = [&](const char* name, const RowMatrices& to, const void* row) {
    return of_tensor(name, unpack_row(to, row, {lanes, parallel_for, context}, err), err);
  };
  return for_rows(op, node, matrices, rows, unpack, err);
}
