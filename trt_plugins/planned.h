// Plug-ins of operators that have plans: the plan of the inputs' shapes on this GPU, its workspace, the act-orders.
#pragma once
#include <algorithm>
#include <atomic>
#include <cstring>
#include <mutex>
#include <string>

#include "plugin.h"

namespace quantmoe {

// An engine may be built without a GPU, or for other GPUs than the builder's. Its workspace must do on each of these,
// with any number of multiprocessors.
constexpr qm_cuda_device kDevices[] = {{80, 0, 167936}, {86, 0, 102400},  {89, 0, 102400},
                                       {90, 0, 233472}, {100, 0, 233472}, {120, 0, 102400}};

// What decides the plan of an operator that runs by its name. free: the letters of dimensions that a run decides. A dot
// stands for "..", whose product is one dimension here. batch is the size B, tokens the size S or this product.
struct NodeProblem {
  const char* op;
  int32_t node[kMostAttributes];  // the operator's struct
  int64_t batch, tokens;
  qm_tensor inputs[kMostInputs];  // without data
  char free[kMostInputs][kMostDimensions];
};

// An operator that has plans.
template <class Problem, class Plan, int (*kPlan)(const Problem*, const qm_cuda_device*, Plan*, char*)>
class Planned : public Plugin {
 public:
  // Whether the kernels take a problem; why not is in error.
  static bool takes(const Problem& problem, char* error) {
    Plan plan;
    return !kPlan(&problem, &kDevices[0], &plan, error);
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
  using Plugin::Plugin;
  virtual Problem problem_of(const Inputs& in) const = 0;
  // The tensor whose act-order the kernels read, null where there is none; what is wrong with it.
  virtual const void* ordered(const void* const*) const { return nullptr; }
  virtual int check_order(const void*, cudaStream_t, char*) const { return QM_OK; }

  // A call that is captured cannot wait for the answer; kernels clamp what they read of an order.
  bool check_weights(const void* const* inputs, cudaStream_t stream) override {
    const void* rows = layer_->runs ? ordered(inputs) : nullptr;
    if (!rows || rows == checked_) return true;
    cudaStreamCaptureStatus capture;
    if (cudaError_t error = cudaStreamIsCapturing(stream, &capture))
      return wrong(std::string("CUDA: ") + cudaGetErrorString(error));
    if (capture != cudaStreamCaptureStatusNone) return true;
    char error[QM_ERROR_SIZE];
    if (check_order(rows, stream, error)) return wrong(error);
    checked_ = rows;
    return true;
  }
  bool configure(const Inputs& most) override {
    char error[QM_ERROR_SIZE];
    return takes(problem_of(most), error) || wrong(error);
  }
  // The plan for these inputs on the current device, made when they changed.
  bool prepare(const Inputs& in) override {
    const Problem problem = problem_of(in);
    if (!std::memcmp(&problem, &problem_, sizeof(problem))) return true;
    char error[QM_ERROR_SIZE];
    if (!device_.sm) {
      int ordinal = 0;
      if (cudaError_t e = cudaGetDevice(&ordinal)) return wrong(std::string("CUDA: ") + cudaGetErrorString(e));
      if (qm_cuda_query(ordinal, &device_, error)) return wrong(error);
    }
    Plan plan;
    if (kPlan(&problem, &device_, &plan, error)) return wrong(error);
    if (!check_workspace(problem, plan)) return false;
    problem_ = problem;
    plan_ = plan;
    return true;
  }

  qm_cuda_device device_{};  // sm 0: not asked for yet
  Problem problem_{};
  Plan plan_{};
  const void* checked_ = nullptr;  // weights whose act-order is good

 private:
  // A workspace that is large enough on every GPU, for as many rows or fewer. Fewer rows can take another path with a
  // larger workspace, so each number counts. That takes up to 0.3 s for 65536 tokens, but a model's layers are alike.
  // Attention and linear do so, too: each batch with each number of tokens, and the most slots.
  static size_t most_bytes(Problem problem) {
    static std::mutex mutex;
    static Problem last{};
    static size_t bytes = 0;
    const std::lock_guard<std::mutex> lock(mutex);
    if (!std::memcmp(&problem, &last, sizeof(problem))) return bytes;
    last = problem;
    bytes = 0;
    char error[QM_ERROR_SIZE];
    int64_t one = 1, &batch = batch_in(problem, one), &rows = rows_in(problem);
    for (const int64_t most = rows; batch > 0; --batch)
      for (rows = most; rows > 0; --rows) {
        if (most - rows > (1 << 16) && rows % 1024 != 0) continue;
        for (const qm_cuda_device& device : kDevices) {
          Plan plan{};
          if (!kPlan(&problem, &device, &plan, error)) bytes = std::max<size_t>(bytes, plan.workspace_bytes);
        }
      }
    return bytes;
  }
  // A GPU that kDevices has not, or an engine that another version of this library built, may need more than there is.
  bool check_workspace(const Problem& problem, const Plan& plan) const {
    if (!plan.workspace_bytes) return true;
    const auto known = [&](const qm_cuda_device& device) {
      return device.sm == device_.sm && device.shared_bytes == device_.shared_bytes;
    };
    uint64_t least = UINT64_MAX;  // of the profiles with room for these rows
    if (std::none_of(std::begin(kDevices), std::end(kDevices), known)) least = most_bytes(problem);
    if (const int64_t most = layer_->workspace_bytes) least = std::min<uint64_t>(least, static_cast<uint64_t>(most));
    if (plan.workspace_bytes <= least) return true;
    Problem copy = problem;
    int64_t one = 1;
    return wrong("needs " + std::to_string(plan.workspace_bytes) + " bytes of workspace for " +
                 std::to_string(batch_in(copy, one) * rows_in(copy)) + " rows on this GPU (compute capability " +
                 std::to_string(device_.sm / 10) + "." + std::to_string(device_.sm % 10) + ", " +
                 std::to_string(device_.shared_bytes) + " bytes of shared memory), the engine has " +
                 std::to_string(least) + ": build it here, with this library");
  }
  static int64_t& rows_in(qm_cuda_problem& problem) { return problem.tokens; }
  static int64_t& rows_in(qm_cuda_linear_problem& problem) { return problem.rows; }
  static int64_t& rows_in(qm_cuda_attention_problem& problem) { return problem.tokens; }
  static int64_t& rows_in(NodeProblem& problem) { return problem.tokens; }
  template <class Any>
  static int64_t& batch_in(Any&, int64_t& one) {
    return one;
  }
  static int64_t& batch_in(qm_cuda_attention_problem& problem, int64_t&) { return problem.batch; }
  static int64_t& batch_in(NodeProblem& problem, int64_t&) { return problem.batch; }
};

}  // namespace quantmoe
