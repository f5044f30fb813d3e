// QuantLinear: one quantized matrix.
#include "planned.h"

namespace quantmoe {
namespace {

class Linear final : public Planned<qm_cuda_linear_problem, qm_cuda_plan, qm_cuda_plan_linear> {
 public:
  Linear(SharedLayer layer, const qm_linear& linear)
      : Planned("QuantLinear", std::move(layer), &linear), linear_(linear) {}

 private:
  IPluginV3* make_copy() const override { return new Linear(layer_, linear_); }
  bool check_packed(const Dims* in) const override {
    return Plugin::check_packed("w", in[QuantLinear_w], 1, qm_cuda_linear_row_bytes(&linear_));
  }
  qm_cuda_linear_problem problem_of(const Inputs& in) const override {
    qm_cuda_linear_problem problem{};
    problem.linear = linear_;
    problem.type = qm_type(in.types[QuantLinear_x]);
    problem.rows = rows_of(in.dims[QuantLinear_x]);
    return problem;
  }
  const void* ordered(const void* const* inputs) const override {
    return linear_.w.perm ? inputs[QuantLinear_w] : nullptr;
  }
  int check_order(const void* rows, cudaStream_t stream, char* error) const override {
    return qm_cuda_check_linear(&problem_, rows, stream, error);
  }
  int launch(const void* const* inputs, void* const* outputs, void* workspace, cudaStream_t stream,
             char* error) override {
    const qm_cuda_linear_tensors tensors{inputs[QuantLinear_x], inputs[QuantLinear_w], outputs[0], workspace};
    return qm_cuda_launch_linear(&problem_, &plan_, &tensors, stream, error);
  }

  qm_linear linear_;
};

}  // namespace

IPluginV3* make_plugin(const SharedLayer& layer, const qm_linear& node, char* error) {
  const qm_cuda_linear_problem problem{node, type_beside(node.w), 1};
  return Linear::takes(problem, error) ? new Linear(layer, node) : nullptr;
}

}  // namespace quantmoe
