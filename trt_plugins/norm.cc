// AddRMSNorm.
#include "plugin.h"

namespace quantmoe {
namespace {

class Norm final : public Plugin {
 public:
  Norm(SharedLayer layer, const qm_norm& norm) : Plugin("AddRMSNorm", std::move(layer)) { problem_.norm = norm; }

 private:
  IPluginV3* make_copy() const override { return new Norm(layer_, problem_.norm); }
  bool check_shapes(const Dims* in) const override { return check_norm(in); }
  bool configure(const Inputs&) override { return true; }
  bool prepare(const Inputs& in) override {
    problem_ = norm_problem(problem_.norm, in);
    return true;
  }
  int launch(const void* const* inputs, void* const* outputs, void*, cudaStream_t stream, char* error) override {
    const qm_cuda_norm_tensors tensors{inputs[AddRMSNorm_x], inputs[AddRMSNorm_residual], inputs[AddRMSNorm_weight],
                                       outputs[0], outputs[1]};
    return qm_cuda_launch_norm(&problem_, &tensors, stream, error);
  }

  qm_cuda_norm_problem problem_{};
};

}  // namespace

bool Plugin::check_norm(const Dims* in) const {
  const Dims &x = in[AddRMSNorm_x], &weight = in[AddRMSNorm_weight];
  if (weight.nbDims != 1 || x.nbDims < 1 || differ(x.d[x.nbDims - 1], weight.d[0]))
    return wrong("x has shape " + to_text(x) + " and weight " + to_text(weight) + ", expected [.., H] and [H]");
  return check_shape(in, AddRMSNorm_residual, std::vector<int64_t>(x.d, x.d + x.nbDims));
}

qm_cuda_norm_problem norm_problem(const qm_norm& norm, const Inputs& in) {
  return {norm, qm_type(in.types[AddRMSNorm_x]), rows_of(in.dims[AddRMSNorm_x]), in.dims[AddRMSNorm_weight].d[0]};
}

IPluginV3* make_plugin(const SharedLayer& layer, const qm_norm& node, char* error) {
  const qm_cuda_norm_problem problem{node, QM_F16, 1, 1};
  return qm_cuda_validate_norm(&problem, error) ? nullptr : new Norm(layer, node);
}

}  // namespace quantmoe
