// A node on a CUDA device: its weights, ONNX Runtime's stream, and workspaces of its allocator for that stream.
#pragma once
#include <memory>

#include "common/node.h"
#include "quantmoe/quant_moe_cuda.h"

namespace quantmoe {

// A node on a device.
class CudaNode : public Node {
 protected:
  CudaNode(const Op& op, const OrtApi* api, const OrtKernelInfo* info);
  void check_packed(const OrtKernelInfo* info, size_t input, bool verify) const;
  int64_t count_experts(const OrtKernelInfo* info, size_t input, size_t row_bytes) const;
  int device_ordinal() const;
  void query_device();  // asks for the device: after what needs none is checked
  void* stream_of(OrtKernelContext* context) const;
  // Freed when what uses it is enqueued; the allocator keeps it for this stream, where later work comes after.
  struct Release {
    OrtAllocator* allocator;
    void operator()(void* memory) const { allocator->Free(allocator, memory); }
  };
  using Scratch = std::unique_ptr<void, Release>;
  Scratch scratch_of(OrtKernelContext* context, size_t bytes) const;
  template <class Plan, class Problem, class Make, class Launch>
  void execute(OrtKernelContext* context, const Problem& problem, const Make& make, const Launch& launch) const;
  // Of an operator that runs by its name. Throws for what its kernels do not take.
  qm_cuda_node_plan plan_of(const char* op, const void* node, const qm_tensor* inputs) const;

  qm_cuda_device device_{};

 private:
  std::unique_ptr<OrtAllocator, void (*)(OrtAllocator*)> allocator_;  // of the node's device
  const OrtMemoryInfo* memory_ = nullptr;
};

// Plans a call, and makes it with a workspace.
template <class Plan, class Problem, class Make, class Launch>
void CudaNode::execute(OrtKernelContext* context, const Problem& problem, const Make& make,
                       const Launch& launch) const {
  Plan plan;
  char error[QM_ERROR_SIZE];
  if (make(&problem, &device_, &plan, error)) fail(error);
  const Scratch workspace = scratch_of(context, plan.workspace_bytes);
  if (launch(plan, workspace.get(), stream_of(context), error)) throw std::runtime_error(node_ + ": " + error);
}

}  // namespace quantmoe
