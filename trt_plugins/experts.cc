// QuantMoE: the experts of a layer.
#include "planned.h"

namespace quantmoe {
namespace {

class MoE final : public Planned<qm_cuda_problem, qm_cuda_plan, qm_cuda_plan_moe> {
 public:
  MoE(SharedLayer layer, const qm_moe& moe) : Planned("QuantMoE", std::move(layer)), moe_(moe) {}

 private:
  IPluginV3* make_copy() const override { return new MoE(layer_, moe_); }
  bool check_shapes(const Dims* in) const override;
  qm_cuda_problem problem_of(const Inputs& in) const override {
    const Dims& ids = in.dims[QuantMoE_topk_ids];
    qm_cuda_problem problem{};
    problem.moe = moe_;
    problem.type = qm_type(in.types[QuantMoE_hidden_states]);
    problem.id_bytes = in.types[QuantMoE_topk_ids] == DataType::kINT64 ? 8 : 4;
    problem.tokens = rows_of(ids);
    problem.top_k = ids.d[ids.nbDims - 1];
    problem.local_experts = in.dims[QuantMoE_w13].d[0];
    return problem;
  }
  const void* ordered(const void* const* inputs) const override {
    return moe_.w13.perm ? inputs[QuantMoE_w13] : nullptr;
  }
  int check_order(const void* rows, cudaStream_t stream, char* error) const override {
    return qm_cuda_check_moe(&problem_, rows, stream, error);
  }
  int launch(const void* const* inputs, void* const* outputs, void* workspace, cudaStream_t stream,
             char* error) override {
    qm_cuda_tensors tensors{};
    tensors.hidden_states = inputs[QuantMoE_hidden_states];
    tensors.topk_ids = inputs[QuantMoE_topk_ids];
    tensors.topk_weights = static_cast<const float*>(inputs[QuantMoE_topk_weights]);
    tensors.w13 = inputs[QuantMoE_w13];
    tensors.w2 = inputs[QuantMoE_w2];
    tensors.output = outputs[0];
    tensors.workspace = workspace;
    return qm_cuda_launch(&problem_, &plan_, &tensors, stream, error);
  }

  qm_moe moe_;
};

bool MoE::check_shapes(const Dims* in) const {
  const Dims &x = in[QuantMoE_hidden_states], &ids = in[QuantMoE_topk_ids], &weights = in[QuantMoE_topk_weights];
  if (x.nbDims < 1 || differ(x.d[x.nbDims - 1], moe_.hidden_size))
    return wrong("hidden_states has shape " + to_text(x) + ", expected [.., hidden_size " +
                 std::to_string(moe_.hidden_size) + "]");
  bool same = ids.nbDims == x.nbDims && weights.nbDims == x.nbDims;
  for (int32_t i = 0; same && i + 1 < x.nbDims; ++i) same = !differ(ids.d[i], x.d[i]);
  for (int32_t i = 0; same && i < x.nbDims; ++i) same = !differ(ids.d[i], weights.d[i]);
  if (!same)
    return wrong("topk_ids and topk_weights have shapes " + to_text(ids) + " and " + to_text(weights) +
                 ", expected the same, and the sizes before the last of hidden_states " + to_text(x));
  if (ids.d[ids.nbDims - 1] < 1)
    return wrong("topk_ids has shape " + to_text(ids) + ", expected a last dimension known when the engine is built");
  const Dims& w13 = in[QuantMoE_w13];
  return check_packed("w13", w13, -1, qm_cuda_row_bytes(&moe_, 13)) &&
         check_packed("w2", in[QuantMoE_w2], w13.d[0], qm_cuda_row_bytes(&moe_, 2));
}

}  // namespace

IPluginV3* make_plugin(const SharedLayer& layer, const qm_moe& node, char* error) {
  const int64_t experts = int64_t{node.num_experts} - std::max(0, node.expert_offset);
  const qm_projection& floats = node.w13.format == k_format_bf16 ? node.w13 : node.w2;
  const qm_cuda_problem problem{node, type_beside(floats), 4, 1, 1, std::max<int64_t>(1, experts), 0, 0};
  return MoE::takes(problem, error) ? new MoE(layer, node) : nullptr;
}

}  // namespace quantmoe
