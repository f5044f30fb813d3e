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
  int device_ordinal() const;
  void* stream_of(OrtKernelContext* context) const;
  // Freed when what uses it is enqueued; the allocator keeps it for this stream, where later work comes after.
  struct Release {
    OrtAllocator* allocator;
    void operator()(void* memory) const { allocator->Free(allocator, memory); }
  };
  using Scratch = std::unique_ptr<void, Release>;
  Scratch scratch_of(OrtKernelContext* context, size_t bytes) const;
  // op: null, the node's own. Throws for what its kernels do not take.
  qm_cuda_node_plan plan_of(const void* node, const qm_cuda_call& call, const char* op = nullptr) const;
  void check_node(const OrtKernelInfo* info, const void* node, const std::vector<qm_tensor>& constants, bool verify);
  void launch(OrtKernelContext* context, const void* node, qm_cuda_call call) const;

  qm_cuda_device device_{};

 private:
  void query_device();
  std::unique_ptr<OrtAllocator, void (*)(OrtAllocator*)> allocator_;  // of the node's device
  const OrtMemoryInfo* memory_ = nullptr;
};

}  // namespace quantmoe
