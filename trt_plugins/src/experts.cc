// QuantMoE: the experts of a layer.
#include "core/tensors.h"
#include "experts/row_bytes.h"
#include "external.h"
#include "planned.h"

namespace quantmoe {
namespace {

class MoE final : public Planned {
 public:
  MoE(SharedLayer layer, const NodeProblem& own, std::shared_ptr<const ExternalExperts> external)
      : Planned(std::move(layer), own), external_(std::move(external)) {}

 private:
  const qm_moe& moe() const { return *reinterpret_cast<const qm_moe*>(own_.node); }
  IPluginV3* make_copy() const override { return new MoE(layer_, own_, external_); }
  bool check_packed(const Dims* in) const override;
  NodeProblem problem_of(const Inputs& in) const override {
    NodeProblem problem = Planned::problem_of(in);
    if (external_) external_->describe(&problem);
    return problem;
  }
  Ordered ordered(const void* const* inputs) const override {
    if (!moe().w13.perm) return {QuantMoE_w13, nullptr};
    return {QuantMoE_w13, external_ ? external_->w13() : inputs[QuantMoE_w13]};
  }
  int launch(const void* const* inputs, void* const* outputs, void* workspace, cudaStream_t stream,
             char* error) override {
    if (!external_) return Planned::launch(inputs, outputs, workspace, stream, error);
    qm_tensor given[kMostInputs], made[kMostOutputs]{};
    set_tensors(inputs, outputs, given, made);
    return launch_external({given, made, workspace, stream, nullptr, nullptr}, given, error);
  }
  int launch_external(qm_cuda_call call, qm_tensor* inputs, char* error) const;

  std::shared_ptr<const ExternalExperts> external_;  // null: they are inputs
};

// The slots are known from the first launch on, and the plan follows them.
int MoE::launch_external(qm_cuda_call call, qm_tensor* inputs, char* error) const {
  const qm_shape& ids = inputs[QuantMoE_topk_ids].shape;
  const auto stream = static_cast<cudaStream_t>(call.stream);
  const int64_t tokens = rows_of(ids);
  if (tokens == 0) return QM_OK;
  if (!layer_->runs)  // a builder has no files
    return write_zeros(call.outputs->data, static_cast<size_t>(tokens * moe().hidden_size * 2), stream, error);
  if (external_->failure() != "") return quantmoe::fail(error, QM_INVALID, "%s", external_->failure().c_str());
  std::string said;
  const DeviceExperts::Turn turn(external_->experts(), stream, last_of(ids), &said);
  if (said != "") log_message(Severity::kINFO, "quantmoe: " + said);
  qm_cuda_experts experts{};
  turn.place(external_->number(), inputs, &experts);
  call.experts = &experts;
  qm_cuda_node_plan plan;
  if (const int status = qm_cuda_plan_node(op_, own_.node, &call, &device_, &plan, error)) return status;
  return qm_cuda_launch_node(op_, own_.node, &plan, &call, error);
}

bool MoE::check_packed(const Dims* in) const {
  const Dims& ids = in[QuantMoE_topk_ids];
  if (ids.d[ids.nbDims - 1] < 1)
    return wrong("topk_ids has shape " + to_text(ids) + ", expected a last dimension known when the engine is built");
  const Dims &w13 = in[QuantMoE_w13], &w2 = in[QuantMoE_w2];
  if (external_)
    return (is_none(w13) && is_none(w2)) || wrong("w13 and w2 have shapes " + to_text(w13) + " and " + to_text(w2) +
                                                  ", expected [0]: their bytes are in files");
  const std::array bytes = row_bytes_of(moe());
  return Plugin::check_packed("w13", w13, -1, static_cast<size_t>(bytes[0])) &&
         Plugin::check_packed("w2", w2, w13.d[0], static_cast<size_t>(bytes[1]));
}

}  // namespace

IPluginV3* make_planned(const SharedLayer& layer, const char* op, const qm_moe& node, char* error) {
  const int64_t experts = int64_t{node.num_experts} - std::max(0, node.expert_offset);
  const qm_projection& floats = node.w13.format == k_format_bf16 ? node.w13 : node.w2;
  NodeProblem problem(op, node);
  problem.inputs[QuantMoE_hidden_states].type = type_beside(floats);
  problem.inputs[QuantMoE_topk_ids].type = QM_INT32;
  for (const int32_t w : {QuantMoE_w13, QuantMoE_w2})
    problem.inputs[w].shape = {2, {std::max<int64_t>(1, experts), -1}};
  if (!Planned::takes(problem, error)) return nullptr;
  try {
    const std::shared_ptr<ExternalExperts> external = ExternalExperts::of(*layer, node);
    if (external) {
      NodeProblem cached = problem;
      external->describe(&cached);
      if (!Planned::takes(cached, error)) return nullptr;
      if (layer->runs) external->open(*layer, node);
    }
    return new MoE(layer, problem, external);
  } catch (const std::exception& why) {
    fail(error, QM_INVALID, "%s", why.what());
    return nullptr;
  }
}

}  // namespace quantmoe
