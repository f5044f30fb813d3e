// MoERouting and MoERouter: which experts a token has.
#include "planned.h"

namespace quantmoe {
namespace {

class MoERouting final : public Plugin {
 public:
  MoERouting(SharedLayer layer, const qm_routing& routing)
      : Plugin("MoERouting", std::move(layer), &routing), problem_{routing, QM_F32, 0} {}

 private:
  IPluginV3* make_copy() const override { return new MoERouting(layer_, problem_.routing); }
  bool takes_float() const override { return true; }
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
  Router(SharedLayer layer, const qm_router& router)
      : Planned("MoERouter", std::move(layer), &router), router_(router) {}

 private:
  IPluginV3* make_copy() const override { return new Router(layer_, router_); }
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
