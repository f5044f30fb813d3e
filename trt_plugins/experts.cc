// QuantMoE: the experts of a layer.
#include "external.h"
#include "planned.h"

namespace quantmoe {
namespace {

class MoE final : public Planned<qm_cuda_problem, qm_cuda_plan, qm_cuda_plan_moe> {
 public:
  MoE(SharedLayer layer, const qm_moe& moe, std::shared_ptr<const ExternalExperts> external)
      : Planned("QuantMoE", std::move(layer), &moe), moe_(moe), external_(std::move(external)) {}

 private:
  IPluginV3* make_copy() const override { return new MoE(layer_, moe_, external_); }
  bool check_packed(const Dims* in) const override;
  qm_cuda_problem problem_of(const Inputs& in) const override {
    const Dims& ids = in.dims[QuantMoE_topk_ids];
    qm_cuda_problem problem{};
    problem.moe = moe_;
    problem.type = qm_type(in.types[QuantMoE_hidden_states]);
    problem.id_bytes = in.types[QuantMoE_topk_ids] == DataType::kINT64 ? 8 : 4;
    problem.tokens = rows_of(ids);
    problem.top_k = ids.d[ids.nbDims - 1];
    problem.local_experts = external_ ? external_->count() : in.dims[QuantMoE_w13].d[0];
    // As many slots as there can be: the workspace is the same for less, and none takes less.
    if (external_) problem.slots = static_cast<int32_t>(problem.local_experts);
    return problem;
  }
  const void* ordered(const void* const* inputs) const override {
    return !moe_.w13.perm ? nullptr : external_ ? external_->w13() : inputs[QuantMoE_w13];
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
    tensors.output = outputs[0];
    tensors.workspace = workspace;
    if (external_) return launch_external(&tensors, stream, error);
    tensors.w13 = inputs[QuantMoE_w13];
    tensors.w2 = inputs[QuantMoE_w2];
    return qm_cuda_launch(&problem_, &plan_, &tensors, stream, error);
  }
  int launch_external(qm_cuda_tensors* tensors, cudaStream_t stream, char* error) const;

  qm_moe moe_;
  std::shared_ptr<const ExternalExperts> external_;  // null: they are inputs
};

// The slots are known from the first launch on, and the plan follows them.
int MoE::launch_external(qm_cuda_tensors* tensors, cudaStream_t stream, char* error) const {
  qm_cuda_problem problem = problem_;
  if (problem.tokens == 0) return QM_OK;
  if (!layer_->runs)  // a builder has no files
    return write_zeros(tensors->output, static_cast<size_t>(problem.tokens * moe_.hidden_size * 2), stream, error);
  if (external_->failure() != "") return quantmoe::fail(error, QM_INVALID, "%s", external_->failure().c_str());
  std::string said;
  const DeviceExperts::Turn turn(external_->experts(), stream, problem.top_k, &said);
  if (said != "") log_message(Severity::kINFO, "quantmoe: " + said);
  problem.slots = 0;
  turn.place(external_->number(), &problem, tensors);
  qm_cuda_plan plan;
  if (const int status = qm_cuda_plan_moe(&problem, &device_, &plan, error)) return status;
  return qm_cuda_launch(&problem, &plan, tensors, stream, error);
}

bool MoE::check_packed(const Dims* in) const {
  const Dims& ids = in[QuantMoE_topk_ids];
  if (ids.d[ids.nbDims - 1] < 1)
    return wrong("topk_ids has shape " + to_text(ids) + ", expected a last dimension known when the engine is built");
  const Dims &w13 = in[QuantMoE_w13], &w2 = in[QuantMoE_w2];
  if (external_)
    return (is_none(w13) && is_none(w2)) || wrong("w13 and w2 have shapes " + to_text(w13) + " and " + to_text(w2) +
                                                  ", expected [0]: their bytes are in files");
  return Plugin::check_packed("w13", w13, -1, qm_cuda_row_bytes(&moe_, 13)) &&
         Plugin::check_packed("w2", w2, w13.d[0], qm_cuda_row_bytes(&moe_, 2));
}

}  // namespace

IPluginV3* make_plugin(const SharedLayer& layer, const qm_moe& node, char* error) {
  const int64_t experts = int64_t{node.num_experts} - std::max(0, node.expert_offset);
  const qm_projection& floats = node.w13.format == k_format_bf16 ? node.w13 : node.w2;
  qm_cuda_problem problem{node, type_beside(floats), 4, 1, 1, std::max<int64_t>(1, experts), 0, 0, 0, 0};
  if (!MoE::takes(problem, error)) return nullptr;
  try {
    const std::shared_ptr<ExternalExperts> external = ExternalExperts::of(*layer, node);
    if (external) {
      problem.local_experts = external->count();
      problem.slots = 1;
      if (!MoE::takes(problem, error)) return nullptr;
      if (layer->runs) external->open(*layer, node);
    }
    return new MoE(layer, node, external);
  } catch (const std::exception& why) {
    fail(error, QM_INVALID, "%s", why.what());
    return nullptr;
  }
}

}  // namespace quantmoe
