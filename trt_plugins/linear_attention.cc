// CausalConv, GatedDelta and StateSpace: linear attention and its states.
#include "planned.h"

namespace quantmoe {
namespace {

// A state stays where it is as a cache does: past and present are bound to the same memory.
class Conv final : public Plugin {
 public:
  Conv(SharedLayer layer, const qm_conv& conv)
      : Plugin("CausalConv", std::move(layer), &conv), problem_{conv, QM_F32, 0, 0}, bias_(false) {}

 private:
  IPluginV3* make_copy() const override { return new Conv(layer_, problem_.conv); }
  bool read_shapes(const Inputs& in) {
    const Dims& x = in.dims[CausalConv_x];
    problem_.type = qm_type(in.types[CausalConv_x]);
    problem_.batch = x.d[0];
    problem_.tokens = x.d[1];
    bias_ = in.dims[CausalConv_bias].d[0] > 0;
    char error[QM_ERROR_SIZE];
    return !qm_cuda_validate_conv(&problem_, error) || wrong(error);
  }
  bool configure(const Inputs& most) override { return read_shapes(most); }
  bool prepare(const Inputs& in) override { return read_shapes(in); }
  int launch(const void* const* inputs, void* const* outputs, void*, cudaStream_t stream, char* error) override {
    const auto floats = [&](int32_t input) { return static_cast<const float*>(inputs[input]); };
    qm_cuda_conv_tensors tensors{};
    tensors.x = inputs[CausalConv_x];
    tensors.weight = floats(CausalConv_weight);
    tensors.bias = bias_ ? floats(CausalConv_bias) : nullptr;
    tensors.past_conv = inputs[CausalConv_past_conv];
    tensors.rows = static_cast<const int32_t*>(inputs[CausalConv_rows]);
    tensors.y = outputs[0];
    tensors.present_conv = outputs[1];
    return qm_cuda_launch_conv(&problem_, &tensors, stream, error);
  }

  qm_cuda_conv_problem problem_;
  bool bias_;
};

class Delta final : public Planned<qm_cuda_delta_problem, qm_cuda_delta_plan, qm_cuda_plan_delta> {
 public:
  Delta(SharedLayer layer, const qm_delta& delta) : Planned("GatedDelta", std::move(layer), &delta), delta_(delta) {}

 private:
  IPluginV3* make_copy() const override { return new Delta(layer_, delta_); }
  qm_cuda_delta_problem problem_of(const Inputs& in) const override {
    const Dims& qkv = in.dims[GatedDelta_qkv];
    qm_cuda_delta_problem problem{};
    problem.delta = delta_;
    problem.type = qm_type(in.types[GatedDelta_qkv]);
    problem.batch = qkv.d[0];
    problem.tokens = qkv.d[1];
    return problem;
  }
  int launch(const void* const* inputs, void* const* outputs, void* workspace, cudaStream_t stream,
             char* error) override {
    const auto floats = [&](int32_t input) { return static_cast<const float*>(inputs[input]); };
    qm_cuda_delta_tensors tensors{};
    tensors.qkv = inputs[GatedDelta_qkv];
    tensors.a = inputs[GatedDelta_a];
    tensors.b = inputs[GatedDelta_b];
    tensors.z = inputs[GatedDelta_z];
    tensors.a_log = floats(GatedDelta_a_log);
    tensors.dt_bias = floats(GatedDelta_dt_bias);
    tensors.norm = floats(GatedDelta_norm);
    tensors.past_state = floats(GatedDelta_past_state);
    tensors.rows = static_cast<const int32_t*>(inputs[GatedDelta_rows]);
    tensors.y = outputs[0];
    tensors.present_state = static_cast<float*>(outputs[1]);
    tensors.workspace = workspace;
    return qm_cuda_launch_delta(&problem_, &plan_, &tensors, stream, error);
  }

  qm_delta delta_;
};

class Space final : public Planned<qm_cuda_space_problem, qm_cuda_space_plan, qm_cuda_plan_space> {
 public:
  Space(SharedLayer layer, const qm_space& space) : Planned("StateSpace", std::move(layer), &space), space_(space) {}

 private:
  IPluginV3* make_copy() const override { return new Space(layer_, space_); }
  qm_cuda_space_problem problem_of(const Inputs& in) const override {
    const Dims& xbc = in.dims[StateSpace_xbc];
    qm_cuda_space_problem problem{};
    problem.space = space_;
    problem.type = qm_type(in.types[StateSpace_xbc]);
    problem.batch = xbc.d[0];
    problem.tokens = xbc.d[1];
    return problem;
  }
  int launch(const void* const* inputs, void* const* outputs, void* workspace, cudaStream_t stream,
             char* error) override {
    const auto floats = [&](int32_t input) { return static_cast<const float*>(inputs[input]); };
    qm_cuda_space_tensors tensors{};
    tensors.xbc = inputs[StateSpace_xbc];
    tensors.dt = inputs[StateSpace_dt];
    tensors.z = inputs[StateSpace_z];
    tensors.a_log = floats(StateSpace_a_log);
    tensors.dt_bias = floats(StateSpace_dt_bias);
    tensors.d = floats(StateSpace_d);
    tensors.norm = floats(StateSpace_norm);
    tensors.past_state = floats(StateSpace_past_state);
    tensors.rows = static_cast<const int32_t*>(inputs[StateSpace_rows]);
    tensors.y = outputs[0];
    tensors.present_state = static_cast<float*>(outputs[1]);
    tensors.workspace = workspace;
    return qm_cuda_launch_space(&problem_, &plan_, &tensors, stream, error);
  }

  qm_space space_;
};

}  // namespace

IPluginV3* make_plugin(const SharedLayer& layer, const qm_conv& node, char* error) {
  const qm_cuda_conv_problem problem{node, QM_F16, 1, 1};
  return qm_cuda_validate_conv(&problem, error) ? nullptr : new Conv(layer, node);
}

IPluginV3* make_plugin(const SharedLayer& layer, const qm_delta& node, char* error) {
  const qm_cuda_delta_problem problem{node, QM_F16, 1, 1};
  return Delta::takes(problem, error) ? new Delta(layer, node) : nullptr;
}

IPluginV3* make_plugin(const SharedLayer& layer, const qm_space& node, char* error) {
  const qm_cuda_space_problem problem{node, QM_F16, 1, 1};
  return Space::takes(problem, error) ? new Space(layer, node) : nullptr;
}

}  // namespace quantmoe
