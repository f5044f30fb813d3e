// Every check that does not depend on the call, so that a bad node fails when the session or engine is created.
#include <string>

#include "cpu/kernel.h"
#include "cpu/operators.h"
#include "layouts/cpu_panel.h"

namespace quantmoe {
namespace {

// int32 accumulation of the channelwise products (quant_moe.def) needs 16 * 8 * 255 * K and 128 * 255 * K below 2^31.
constexpr int32_t kMaxFeatures = 65536;
constexpr int32_t kMaxOutputs = 1 << 24;  // of a linear: vocabularies

int check_words(const char* name, const qm_shape& shape, int64_t row_bytes, char* err) {
  const int64_t words = shape.rank == 2 ? shape.sizes[1] : -1;
  if (words == row_bytes / 4) return QM_OK;
  return fail(err, QM_INVALID, "%s has %lld int32 words a row, expected %lld for these attributes", name,
              (long long)words, (long long)(row_bytes / 4));
}

}  // namespace

int check_moe(const qm_moe& moe, char* err) {
  QM_TRY(check_node("QuantMoE", &moe, err));
  QM_TRY(check_range("num_experts", moe.num_experts, 1, kMaxExperts, err));
  QM_TRY(check_range("expert_offset", moe.expert_offset, 0, moe.num_experts - 1, err));
  QM_TRY(check_range("hidden_size", moe.hidden_size, 1, kMaxFeatures, err));
  QM_TRY(check_range("intermediate_size", moe.intermediate_size, 1, kMaxFeatures, err));
  QM_TRY(check_range("gated", moe.gated, 0, 1, err));
  QM_TRY(check_range("apply_router_weight_on_input", moe.apply_router_weight_on_input, 0, 1, err));
  QM_TRY(check_activation(moe, err));
  QM_TRY(check_w2_rotation(moe, err));
  QM_TRY(check_cpu_panel("w13_", moe.w13, halves(moe), moe.hidden_size, err));
  return check_cpu_panel("w2_", moe.w2, 1, moe.intermediate_size, err);
}

int check_linear(const qm_linear& linear, char* err) {
  QM_TRY(check_node("QuantLinear", &linear, err));
  QM_TRY(check_range("in_features", linear.in_features, 1, kMaxFeatures, err));
  QM_TRY(check_range("out_features", linear.out_features, 1, kMaxOutputs, err));
  return check_cpu_panel("w_", linear.w, 1, linear.in_features, err);
}

int check_packed(const qm_moe& moe, const qm_shape* packed, char* err) {
  QM_TRY(check_words("w13", packed[0], w13_row_bytes(moe), err));
  QM_TRY(check_words("w2", packed[1], w2_row_bytes(moe), err));
  const int64_t experts = packed[0].sizes[0];
  if (experts != packed[1].sizes[0] || experts < 1 || experts > moe.num_experts - moe.expert_offset)
    return fail(err, QM_INVALID,
                "w13 has %lld experts and w2 %lld, expected the same number, 1 to num_experts - expert_offset = %d",
                (long long)experts, (long long)packed[1].sizes[0], moe.num_experts - moe.expert_offset);
  return QM_OK;
}

int check_packed(const qm_linear& linear, const qm_shape* packed, char* err) {
  QM_TRY(check_words("w", packed[0], w2_row_bytes(as_moe(linear)), err));
  if (packed[0].sizes[0] == 1) return QM_OK;
  return fail(err, QM_INVALID, "w has %lld rows, expected 1", (long long)packed[0].sizes[0]);
}

}  // namespace quantmoe
