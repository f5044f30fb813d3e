// Every check that does not depend on the call, so that a bad node fails when the session or engine is created.
#include <string>

#include "cpu/kernel.h"
#include "layouts/cpu_panel.h"

namespace quantmoe {
namespace {

// int32 accumulation of the channelwise products (FORMAT.md 4.2) needs 16 * 8 * 255 * K and 128 * 255 * K below 2^31.
constexpr int32_t kMaxFeatures = 65536;
constexpr int32_t kMaxOutputs = 1 << 24;  // of a linear: vocabularies
int check_attributes(const qm_moe& moe, char* err) {
  QM_TRY(check_node("QuantMoE", &moe, err));
  QM_TRY(check_range("num_experts", moe.num_experts, 1, kMaxExperts, err));
  QM_TRY(check_range("expert_offset", moe.expert_offset, 0, moe.num_experts - 1, err));
  QM_TRY(check_range("hidden_size", moe.hidden_size, 1, kMaxFeatures, err));
  QM_TRY(check_range("intermediate_size", moe.intermediate_size, 1, kMaxFeatures, err));
  QM_TRY(check_range("gated", moe.gated, 0, 1, err));
  QM_TRY(check_range("apply_router_weight_on_input", moe.apply_router_weight_on_input, 0, 1, err));
  QM_TRY(check_activation(moe, err));
  QM_TRY(check_cpu_panel("w13_", moe.w13, halves(moe), moe.hidden_size, err));
  return check_cpu_panel("w2_", moe.w2, 1, moe.intermediate_size, err);
}

int check_linear(const qm_linear& linear, char* err) {
  QM_TRY(check_node("QuantLinear", &linear, err));
  QM_TRY(check_range("in_features", linear.in_features, 1, kMaxFeatures, err));
  QM_TRY(check_range("out_features", linear.out_features, 1, kMaxOutputs, err));
  return check_cpu_panel("w_", linear.w, 1, linear.in_features, err);
}

int check_shape(const char* name, const int64_t shape[2], int64_t row_bytes, char* err) {
  if (shape[1] == row_bytes / 4) return QM_OK;
  return fail(err, QM_INVALID, "%s has %lld int32 words a row, expected %lld for these attributes", name,
              (long long)shape[1], (long long)(row_bytes / 4));
}

}  // namespace
}  // namespace quantmoe

using namespace quantmoe;

size_t qm_row_bytes(const qm_moe* m, int projection) {
  char err[QM_ERROR_SIZE];
  if (check_attributes(*m, err)) return 0;
  return static_cast<size_t>(projection == 2 ? w2_row_bytes(*m) : w13_row_bytes(*m));
}

int qm_moe_validate(const qm_moe* moe, const int64_t w13_shape[2], const int64_t w2_shape[2], char* err) {
  QM_TRY(check_attributes(*moe, err));
  QM_TRY(check_shape("w13", w13_shape, w13_row_bytes(*moe), err));
  QM_TRY(check_shape("w2", w2_shape, w2_row_bytes(*moe), err));
  if (w13_shape[0] != w2_shape[0] || w13_shape[0] < 1 || w13_shape[0] > moe->num_experts - moe->expert_offset)
    return fail(err, QM_INVALID,
                "w13 has %lld experts and w2 %lld, expected the same number, 1 to num_experts - expert_offset = %d",
                (long long)w13_shape[0], (long long)w2_shape[0], moe->num_experts - moe->expert_offset);
  return select_kernel(err) ? QM_OK : QM_UNSUPPORTED;
}

int qm_linear_validate(const qm_linear* l, const int64_t w_shape[2], char* err) {
  QM_TRY(check_linear(*l, err));
  QM_TRY(check_shape("w", w_shape, w2_row_bytes(as_moe(*l)), err));
  if (w_shape[0] != 1) return fail(err, QM_INVALID, "w has %lld rows, expected 1", (long long)w_shape[0]);
  return select_kernel(err) ? QM_OK : QM_UNSUPPORTED;
}

int qm_attention_validate(const qm_attention* a, char* err) {
  QM_TRY(check_attention(*a, err));
  return select_kernel(err) ? QM_OK : QM_UNSUPPORTED;
}
