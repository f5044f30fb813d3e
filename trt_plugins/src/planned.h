// Plug-ins of operators that have plans: the plan of the inputs' shapes on this GPU, its workspace, the act-orders.
#pragma once
#include <algorithm>
#include <atomic>
#include <cstring>
#include <mutex>
#include <string>
#include <type_traits>

#include "plugin.h"

namespace quantmoe {

// An engine may be built without a GPU, or for other GPUs than the builder's. Its workspace must do on each of these,
// with any number of multiprocessors.
constexpr qm_cuda_device kDevices[] = {{80, 0, 167936}, {86, 0, 102400},  {89, 0, 102400},
                                       {90, 0, 233472}, {100, 0, 233472}, {120, 0, 102400}};

// What decides a plan. free: the letters of dimensions that a run decides. A dot stands for "..", whose product is one
// dimension here. batch is the size B, tokens the size S or this product.
struct NodeProblem {
  const char* op;
  int32_t node[kMostAttributes];  // the operator's struct
  int64_t batch, tokens;
  int64_t slots;                  // QuantMoE: of a cache
  qm_tensor inputs[kMostInputs];  // without data
  char free[kMostInputs][kMostDimensions];

  template <class Node>
  NodeProblem(const char* op, const Node& own) {
    static_assert(sizeof own <= sizeof node);
    std::memset(this, 0, sizeof *this);  // it is compared by its bytes
    this->op = op;
    batch = tokens = 1;
    const Slots slots(kInputs, op);
    for (int32_t i = 0; i < kMostInputs; ++i) inputs[i] = {nullptr, QM_F16, {i < slots.count ? 2 : -1, {1, 1}}};
    std::memcpy(node, &own, sizeof own);
  }
  NodeProblem() { std::memset(this, 0, sizeof *this); }
};
static_assert(std::is_trivially_copyable_v<NodeProblem>);

constexpr char kRest = '.';
inline bool is_tokens(char letter) { return letter == 'S' || letter == kRest; }

inline int plan_node(const NodeProblem& problem, const qm_cuda_device& device, qm_cuda_node_plan* plan, char* err) {
  qm_tensor inputs[kMostInputs];
  std::copy(std::begin(problem.inputs), std::end(problem.inputs), inputs);
  for (int32_t i = 0; i < kMostInputs; ++i)
    for (int32_t d = 0; d < kMostDimensions; ++d) {
      if (problem.free[i][d] == 'B') inputs[i].shape.sizes[d] = problem.batch;
      if (is_tokens(problem.free[i][d])) inputs[i].shape.sizes[d] = problem.tokens;
    }
  qm_cuda_experts experts{};
  experts.slots = static_cast<int32_t>(problem.slots);
  const qm_cuda_call call{inputs, nullptr, nullptr, nullptr, problem.slots ? &experts : nullptr, nullptr};
  return qm_cuda_plan_node(problem.op, problem.node, &call, &device, plan, err);
}

// QuantMoE's plug-in (experts.cc).
IPluginV3* make_planned(const SharedLayer& layer, const char* op, const qm_moe& moe, char* error);

// An operator that has plans.
class Planned : public Plugin {
 public:
  Planned(SharedLayer layer, const NodeProblem& own) : Plugin(own.op, std::move(layer), own.node), own_(own) {
    for (int32_t i = 0; i < inputs_.count; ++i) {
      const std::vector<Dimension>& dimensions = rules_.input(static_cast<size_t>(i)).dimensions;
      for (size_t d = 0; d < dimensions.size(); ++d)
        own_.free[i][d] = dimensions[d].kind == Dimension::kFree   ? dimensions[d].name
                          : dimensions[d].kind == Dimension::kRest ? kRest
                                                                   : '\0';
    }
  }
  // Whether the kernels take a problem; why not is in error.
  static bool takes(const NodeProblem& problem, char* error) {
    qm_cuda_node_plan plan;
    return !plan_node(problem, kDevices[0], &plan, error);
  }
  // No memory: 0, which is less than a plan will need.
  size_t getWorkspaceSize(const DynamicPluginTensorDesc* inputs, int32_t, const DynamicPluginTensorDesc*,
                          int32_t) const noexcept override {
    return attempt<size_t>(0, [&] {
      const size_t bytes = most_bytes(problem_of(Inputs(inputs, inputs_.count)));
      std::atomic<int64_t>& most = layer_->workspace_bytes;
      for (int64_t old = most; old < static_cast<int64_t>(bytes) && !most.compare_exchange_weak(old, bytes);) {
      }
      return bytes;
    });
  }

 protected:
  virtual NodeProblem problem_of(const Inputs& in) const {
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
  // The packed input whose act-order the kernels read, and its rows; null: there is none.
  struct Ordered {
    int32_t input;
    const void* rows;
  };
  virtual Ordered ordered(const void* const*) const { return {0, nullptr}; }

  // A call that is captured cannot wait for the answer; kernels clamp what they read of an order.
  bool check_weights(const void* const* inputs, cudaStream_t stream) override {
    const Ordered found = layer_->runs ? ordered(inputs) : Ordered{0, nullptr};
    if (!found.rows || found.rows == checked_) return true;
    cudaStreamCaptureStatus capture;
    if (cudaError_t error = cudaStreamIsCapturing(stream, &capture))
      return wrong(std::string("CUDA: ") + cudaGetErrorString(error));
    if (capture != cudaStreamCaptureStatusNone) return true;
    char error[QM_ERROR_SIZE];
    qm_tensor tensors[kMostInputs];
    std::copy(std::begin(problem_.inputs), std::end(problem_.inputs), tensors);
    tensors[found.input].data = const_cast<void*>(found.rows);
    const qm_cuda_call call{tensors, nullptr, nullptr, stream, nullptr, nullptr};
    if (qm_cuda_check_node(op_, own_.node, &plan_, &call, error)) return wrong(error);
    checked_ = found.rows;
    return true;
  }
  bool configure(const Inputs& most) override {
    char error[QM_ERROR_SIZE];
    return takes(problem_of(most), error) || wrong(error);
  }
  // The plan for these inputs on the current device, made when they changed.
  bool prepare(const Inputs& in) override {
    const NodeProblem problem = problem_of(in);
    if (!std::memcmp(&problem, &problem_, sizeof(problem))) return true;
    char error[QM_ERROR_SIZE];
    if (!device_.sm) {
      int ordinal = 0;
      if (cudaError_t e = cudaGetDevice(&ordinal)) return wrong(std::string("CUDA: ") + cudaGetErrorString(e));
      if (qm_cuda_query(ordinal, &device_, error)) return wrong(error);
    }
    qm_cuda_node_plan plan;
    if (plan_node(problem, device_, &plan, error)) return wrong(error);
    if (!check_workspace(problem, plan)) return false;
    problem_ = problem;
    plan_ = plan;
    return true;
  }

  // The tensors of a call.
  void set_tensors(const void* const* inputs, void* const* outputs, qm_tensor* given, qm_tensor* made) const {
    std::copy(std::begin(problem_.inputs), std::end(problem_.inputs), given);
    for (int32_t i = 0; i < inputs_.count; ++i) {
      const bool none = given[i].shape.rank == 1 && given[i].shape.sizes[0] == 0;
      given[i].data = none ? nullptr : const_cast<void*>(inputs[i]);
    }
    for (int32_t i = 0; i < outputs_.count; ++i) made[i].data = outputs[i];
  }
  int launch(const void* const* inputs, void* const* outputs, void* workspace, cudaStream_t stream,
             char* error) override {
    qm_tensor given[kMostInputs], made[kMostOutputs]{};
    set_tensors(inputs, outputs, given, made);
    const qm_cuda_call call{given, made, plan_.workspace_bytes ? workspace : nullptr, stream, nullptr, nullptr};
    return qm_cuda_launch_node(op_, own_.node, &plan_, &call, error);
  }

  NodeProblem own_;          // without the inputs
  qm_cuda_device device_{};  // sm 0: not asked for yet
  NodeProblem problem_{};
  qm_cuda_node_plan plan_{};
  const void* checked_ = nullptr;  // weights whose act-order is good

 private:
  // A workspace that is large enough on every GPU, for as many rows or fewer. Fewer rows can take another path with a
  // larger workspace, so each number counts. That takes up to 0.3 s for 65536 tokens, but a model's layers are alike.
  // Attention does so, too: each batch with each number of tokens, and the most slots.
  static size_t most_bytes(NodeProblem problem) {
    static std::mutex mutex;
    static NodeProblem last{};
    static size_t bytes = 0;
    const std::lock_guard<std::mutex> lock(mutex);
    if (!std::memcmp(&problem, &last, sizeof(problem))) return bytes;
    last = problem;
    bytes = 0;
    char error[QM_ERROR_SIZE];
    int64_t &batch = problem.batch, &rows = problem.tokens;
    for (const int64_t most = rows; batch > 0; --batch)
      for (rows = most; rows > 0; --rows) {
        if (most - rows > (1 << 16) && rows % 1024 != 0) continue;
        for (const qm_cuda_device& device : kDevices) {
          qm_cuda_node_plan plan;
          if (!plan_node(problem, device, &plan, error)) bytes = std::max<size_t>(bytes, plan.workspace_bytes);
        }
      }
    return bytes;
  }
  // A GPU that kDevices has not, or an engine that another version of this library built, may need more than there is.
  bool check_workspace(const NodeProblem& problem, const qm_cuda_node_plan& plan) const {
    if (!plan.workspace_bytes) return true;
    const auto known = [&](const qm_cuda_device& device) {
      return device.sm == device_.sm && device.shared_bytes == device_.shared_bytes;
    };
    uint64_t least = UINT64_MAX;  // of the profiles with room for these rows
    if (std::none_of(std::begin(kDevices), std::end(kDevices), known)) least = most_bytes(problem);
    if (const int64_t most = layer_->workspace_bytes) least = std::min<uint64_t>(least, static_cast<uint64_t>(most));
    if (plan.workspace_bytes <= least) return true;
    return wrong("needs " + std::to_string(plan.workspace_bytes) + " bytes of workspace for " +
                 std::to_string(problem.batch * problem.tokens) + " rows on this GPU (compute capability " +
                 std::to_string(device_.sm / 10) + "." + std::to_string(device_.sm % 10) + ", " +
                 std::to_string(device_.shared_bytes) + " bytes of shared memory), the engine has " +
                 std::to_string(least) + ": build it here, with this library");
  }
  // An input's shape in which ".." is one dimension.
  qm_shape shape_of(int32_t input, const Dims& dims) const {
    const std::vector<Dimension>& dimensions = rules_.input(static_cast<size_t>(input)).dimensions;
    const auto rest = dims.nbDims - static_cast<int32_t>(dimensions.size()) + 1;  // dimensions of ".."
    qm_shape shape;
    std::memset(&shape, 0, sizeof shape);  // problems are compared by their bytes
    for (int32_t d = 0; d < dims.nbDims;) {
      const bool is_rest = own_.free[input][shape.rank] == kRest;
      int64_t& size = shape.sizes[shape.rank++] = 1;
      for (auto count = is_rest ? rest : 1; count > 0; --count) size *= dims.d[d++];
    }
    return shape;
  }
};

}  // namespace quantmoe
