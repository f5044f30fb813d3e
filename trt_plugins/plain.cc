// The operators that run by their names: those with a QM_CUDA line in op.def.
#include "planned.h"

namespace quantmoe {
namespace {

constexpr char kRest = '.';
bool is_tokens(char letter) { return letter == 'S' || letter == kRest; }

int plan_node(const NodeProblem* problem, const qm_cuda_device* device, qm_cuda_node_plan* plan, char* err) {
  qm_tensor inputs[kMostInputs];
  std::copy(std::begin(problem->inputs), std::end(problem->inputs), inputs);
  for (int32_t i = 0; i < kMostInputs; ++i)
    for (int32_t d = 0; d < kMostDimensions; ++d) {
      if (problem->free[i][d] == 'B') inputs[i].shape.sizes[d] = problem->batch;
      if (is_tokens(problem->free[i][d])) inputs[i].shape.sizes[d] = problem->tokens;
    }
  return qm_cuda_plan_node(problem->op, problem->node, inputs, device, plan, err);
}

// A state stays where it is as a cache does: past and present are bound to the same memory.
class Plain final : public Planned<NodeProblem, qm_cuda_node_plan, plan_node> {
 public:
  Plain(SharedLayer layer, const NodeProblem& own) : Planned(own.op, std::move(layer), own.node), own_(own) {
    for (int32_t i = 0; i < inputs_.count; ++i) {
      const std::vector<Dimension>& dimensions = rules_.input(static_cast<size_t>(i)).dimensions;
      for (size_t d = 0; d < dimensions.size(); ++d)
        own_.free[i][d] = dimensions[d].kind == Dimension::kFree   ? dimensions[d].name
                          : dimensions[d].kind == Dimension::kRest ? kRest
                                                                   : '\0';
    }
  }
  size_t getWorkspaceSize(const DynamicPluginTensorDesc* inputs, int32_t count, const DynamicPluginTensorDesc* outputs,
                          int32_t made) const noexcept override {
    const bool none = attempt(false, [&] {
      const NodeProblem most = problem_of(Inputs(inputs, inputs_.count));
      return std::all_of(std::begin(kDevices), std::end(kDevices), [&](const qm_cuda_device& device) {
        char error[QM_ERROR_SIZE];
        qm_cuda_node_plan plan;
        return !plan_node(&most, &device, &plan, error) && !plan.workspace_bytes;
      });
    });
    return none ? 0 : Planned::getWorkspaceSize(inputs, count, outputs, made);
  }

 private:
  IPluginV3* make_copy() const override { return new Plain(layer_, own_); }
  bool takes_float() const override {
    NodeProblem problem = own_;
    for (qm_tensor& input : problem.inputs) input.type = QM_F32;
    char error[QM_ERROR_SIZE];
    return takes(problem, error);
  }
  // An input's shape in which ".." is one dimension.
  qm_shape shape_of(int32_t input, const Dims& dims) const {
    const size_t others = rules_.input(static_cast<size_t>(input)).dimensions.size() - 1;
    qm_shape shape{0, {}};
    for (int32_t d = 0; d < dims.nbDims;) {
      const bool rest = own_.free[input][shape.rank] == kRest;
      int64_t& size = shape.sizes[shape.rank++] = 1;
      for (auto count = rest ? dims.nbDims - static_cast<int32_t>(others) : 1; count > 0; --count) size *= dims.d[d++];
    }
    return shape;
  }
  NodeProblem problem_of(const Inputs& in) const override {
    NodeProblem problem = own_;
    for (int32_t i = 0; i < inputs_.count; ++i) {
      qm_tensor& tensor = problem.inputs[i];
      tensor.type = qm_type(in.types[i]);
      tensor.shape = shape_of(i, in.dims[i]);
      for (int32_t d = 0; d < tensor.shape.rank; ++d) {
        if (problem.free[i][d] == 'B') problem.batch = tensor.shape.sizes[d];
        if (is_tokens(problem.free[i][d])) problem.tokens = tensor.shape.sizes[d];
      }
    }
    return problem;
  }
  int launch(const void* const* inputs, void* const* outputs, void* workspace, cudaStream_t stream,
             char* error) override {
    qm_tensor given[kMostInputs], made[kMostOutputs]{};
    std::copy(std::begin(problem_.inputs), std::end(problem_.inputs), given);
    for (int32_t i = 0; i < inputs_.count; ++i) {
      const bool none = given[i].shape.rank == 1 && given[i].shape.sizes[0] == 0;
      given[i].data = none ? nullptr : const_cast<void*>(inputs[i]);
    }
    for (int32_t i = 0; i < outputs_.count; ++i) made[i].data = outputs[i];
    const qm_cuda_call call{given, made, plan_.workspace_bytes ? workspace : nullptr, stream};
    return qm_cuda_launch_node(op_, own_.node, &plan_, &call, error);
  }

  NodeProblem own_;  // without the inputs
};

template <class Node>
IPluginV3* make_plain(const SharedLayer& layer, const char* op, const Node& node, char* error) {
  static_assert(sizeof node <= sizeof NodeProblem::node);
  NodeProblem problem{};
  problem.op = op;
  problem.batch = problem.tokens = 1;
  for (qm_tensor& input : problem.inputs) input = {nullptr, QM_F16, {2, {1, 1}}};
  std::memcpy(problem.node, &node, sizeof node);
  return Plain::takes(problem, error) ? new Plain(layer, problem) : nullptr;
}

}  // namespace

#define QM_CUDA(op, name)                                                                \
  IPluginV3* make_plugin(const SharedLayer& layer, const qm_##name& node, char* error) { \
    return make_plain(layer, #op, node, error);                                          \
  }
#include "op.def"

}  // namespace quantmoe
