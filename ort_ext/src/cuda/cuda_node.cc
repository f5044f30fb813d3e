#include "cuda/cuda_node.h"

#include <cuda_runtime_api.h>

#include <vector>

namespace quantmoe {

CudaNode::CudaNode(const Op& op, const OrtApi* api, const OrtKernelInfo* info)
    : Node(op, api, info), allocator_(nullptr, api->ReleaseAllocator) {
  OrtAllocator* allocator;
  check(api->KernelInfoGetAllocator(info, OrtMemTypeDefault, &allocator), "the device's allocator");
  allocator_.reset(allocator);
  memory_ = allocator->Info(allocator);
}

// Compares a packed tensor, which is on the device, with the node's identity of it.
void CudaNode::check_packed(const OrtKernelInfo* info, size_t input, bool verify) const {
  Shape shape;
  const char* data = static_cast<const char*>(data_of(get_weight(info, input, shape)));
  std::vector<char> copy;
  check_identity(info, input, verify, [&](size_t at, size_t size) {
    copy.resize(size);
    if (const cudaError_t e = cudaMemcpy(copy.data(), data + at, size, cudaMemcpyDefault))
      throw std::runtime_error(node_ + ": CUDA: " + cudaGetErrorString(e));
    return copy.data();
  });
}

int CudaNode::device_ordinal() const {
  int ordinal = 0;
  check(api_->MemoryInfoGetId(memory_, &ordinal));
  return ordinal;
}

void CudaNode::query_device() {
  char error[QM_ERROR_SIZE];
  if (qm_cuda_query(device_ordinal(), &device_, error)) fail(error);
}

void* CudaNode::stream_of(OrtKernelContext* context) const {
  void* stream = nullptr;
  check(api_->KernelContext_GetGPUComputeStream(context, &stream));
  return stream;
}

// Null for no bytes.
CudaNode::Scratch CudaNode::scratch_of(OrtKernelContext* context, size_t bytes) const {
  void* memory = nullptr;
  if (bytes) check(api_->KernelContext_GetScratchBuffer(context, memory_, bytes, &memory));
  return Scratch(memory, Release{allocator_.get()});
}

qm_cuda_node_plan CudaNode::plan_of(const void* node, const qm_cuda_call& call, const char* op) const {
  qm_cuda_node_plan plan;
  char error[QM_ERROR_SIZE];
  if (qm_cuda_plan_node(op ? op : op_.name, node, &call, &device_, &plan, error)) fail(error);
  return plan;
}

// Checks a node and its weights when a session is created: first what every GPU refuses, which needs none.
void CudaNode::check_node(const OrtKernelInfo* info, const void* node, const std::vector<qm_tensor>& constants,
                          bool verify) {
  const qm_cuda_call call{constants.data(), nullptr, nullptr, nullptr, nullptr, nullptr};
  device_ = {90, 0, 233472};
  (void)plan_of(node, call);
  query_device();
  const qm_cuda_node_plan plan = plan_of(node, call);
  for (size_t i = 0; i < constants.size(); ++i)
    if (is_packed(i)) check_packed(info, i, verify);
  char error[QM_ERROR_SIZE];
  if (qm_cuda_check_node(op_.name, node, &plan, &call, error)) fail(error);
}

// Plans a call, and makes it with a workspace.
void CudaNode::launch(OrtKernelContext* context, const void* node, qm_cuda_call call) const {
  const qm_cuda_node_plan plan = plan_of(node, call);
  const Scratch workspace = scratch_of(context, plan.workspace_bytes);
  call.workspace = workspace.get();
  call.stream = stream_of(context);
  char error[QM_ERROR_SIZE];
  if (qm_cuda_launch_node(op_.name, node, &plan, &call, error)) throw std::runtime_error(node_ + ": " + error);
}

}  // namespace quantmoe
