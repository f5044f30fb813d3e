// AddRMSNorm.
#include "plugin.h"

namespace quantmoe {
namespace {

class Norm final : public Plugin {
 public:
  Norm(SharedLayer layer, const qm_norm& norm) : Plugin("AddRMSNorm", std::move(layer), &norm) { problem_.norm = norm; }

 private:
  IPluginV3* make_copy() const override { return new Norm(layer_, problem_.norm); }
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

qm_cuda_norm_problem norm_problem(const qm_norm& norm, const Inputs& in) {
  return {norm, qm_type(in.types[AddRMSNorm_x]), rows_of(in.dims[AddRMSNorm_x]), in.dims[AddRMSNorm_weight].d[0]};
}

IPluginV3* make_plugin(const SharedLayer& layer, const qm_norm& node, char* error) {
  const qm_cuda_norm_problem problem{node, QM_F16, 1, 1};
  return qm_cuda_validate_norm(&problem, error) ? nullptr : new Norm(layer, node);
}

}  // namespace quantmoe
