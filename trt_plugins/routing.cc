// MoERouting and MoERouter: which experts a token has.
#include "planned.h"

namespace quantmoe {
namespace {

class MoERouting final : public Plugin {
 public:
  MoERouting(SharedLayer layer, const qm_routing& routing)
      : Plugin("MoERouting", std::move(layer)), problem_{routing, QM_F32, 0} {}

 private:
  IPluginV3* make_copy() const override { return new MoERouting(layer_, problem_.routing); }
  int64_t last_size() const override { return problem_.routing.top_k + problem_.routing.shared_experts; }
  bool takes_float() const override { return true; }
  bool check_shapes(const Dims* in) const override {
    const Dims &logits = in[MoERouting_logits], &bias = in[MoERouting_correction_bias];
    const qm_routing& routing = problem_.routing;
    const std::string experts = "num_experts " + std::to_string(routing.num_experts);
    if (logits.nbDims < 1 || differ(logits.d[logits.nbDims - 1], routing.num_experts + routing.shared_gate))
      return wrong("logits has shape " + to_text(logits) + ", expected [.., " + experts +
                   (routing.shared_gate ? " + 1]" : "]"));
    if (bias.nbDims != 1 || differ(bias.d[0], routing.num_experts))
      return wrong("correction_bias has shape " + to_text(bias) + ", expected [" + experts + "]");
    return true;
  }
  bool configure(const Inputs&) override { return true; }
  bool prepare(const Inputs& in) override {
    problem_.type = qm_type(in.types[MoERouting_logits]);
    problem_.tokens = rows_of(in.dims[MoERouting_logits]);
    return true;
  }
  int launch(const void* const* inputs, void* const* outputs, void*, cudaStream_t stream, char* error) override {
    const qm_cuda_routing_tensors tensors{inputs[MoERouting_logits],
                                          static_cast<const float*>(inputs[MoERouting_correction_bias]),
                                          static_cast<int32_t*>(outputs[0]), static_cast<float*>(outputs[1])};
    return qm_cuda_launch_routing(&problem_, &tensors, stream, error);
  }

  qm_cuda_routing_problem problem_;
};

class Router final : public Planned<qm_cuda_router_problem, qm_cuda_router_plan, qm_cuda_plan_router> {
 public:
  Router(SharedLayer layer, const qm_router& router) : Planned("MoERouter", std::move(layer)), router_(router) {}

 private:
  IPluginV3* make_copy() const override { return new Router(layer_, router_); }
  int64_t last_size() const override { return router_.top_k + router_.shared_experts; }
  bool check_shapes(const Dims* in) const override {
    const Dims& x = in[MoERouter_hidden_states];
    if (x.nbDims < 1 || differ(x.d[x.nbDims - 1], router_.hidden_size))
      return wrong("hidden_states has shape " + to_text(x) + ", expected [.., hidden_size " +
                   std::to_string(router_.hidden_size) + "]");
    const int64_t experts = router_.num_experts, rows = experts + router_.shared_gate;
    return check_shape(in, MoERouter_weight, {rows, router_.hidden_size}) &&
           (is_none(in[MoERouter_bias]) || check_shape(in, MoERouter_bias, {rows})) &&
           (is_none(in[MoERouter_correction_bias]) || check_shape(in, MoERouter_correction_bias, {experts}));
  }
  qm_cuda_router_problem problem_of(const Inputs& in) const override {
    qm_cuda_router_problem problem{};
    problem.router = router_;
    problem.type = qm_type(in.types[MoERouter_hidden_states]);
    problem.tokens = rows_of(in.dims[MoERouter_hidden_states]);
    return problem;
  }
  bool prepare(const Inputs& in) override {
    none_[0] = in.dims[MoERouter_bias].d[0] == 0;
    none_[1] = in.dims[MoERouter_correction_bias].d[0] == 0;
    return Planned::prepare(in);
  }
  int launch(const void* const* inputs, void* const* outputs, void* workspace, cudaStream_t stream,
             char* error) override {
    const auto bias = [&](int32_t input, bool none) {
      return none ? nullptr : static_cast<const float*>(inputs[input]);
    };
    qm_cuda_router_tensors tensors{};
    tensors.hidden_states = inputs[MoERouter_hidden_states];
    tensors.weight = inputs[MoERouter_weight];
    tensors.bias = bias(MoERouter_bias, none_[0]);
    tensors.correction_bias = bias(MoERouter_correction_bias, none_[1]);
    tensors.topk_ids = static_cast<int32_t*>(outputs[0]);
    tensors.topk_weights = static_cast<float*>(outputs[1]);
    tensors.workspace = workspace;
    return qm_cuda_launch_router(&problem_, &plan_, &tensors, stream, error);
  }

  qm_router router_;
  bool none_[2] = {};  // which biases are empty
};

}  // namespace

IPluginV3* make_plugin(const SharedLayer& layer, const qm_routing& node, char* error) {
  const qm_cuda_routing_problem problem{node, QM_F32, 1};
  return qm_cuda_validate_routing(&problem, error) ? nullptr : new MoERouting(layer, node);
}

IPluginV3* make_plugin(const SharedLayer& layer, const qm_router& node, char* error) {
  const qm_cuda_router_problem problem{node, QM_F16, 1};
  return Router::takes(problem, error) ? new Router(layer, node) : nullptr;
}

}  // namespace quantmoe
