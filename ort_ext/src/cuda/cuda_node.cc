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

// How many experts a packed tensor holds, whose rows are checked.
int64_t CudaNode::count_experts(const OrtKernelInfo* info, size_t input, size_t row_bytes) const {
  Shape shape;
  get_weight(info, input, shape);
  const int64_t words = static_cast<int64_t>(row_bytes / 4);
  // No words: an attribute is wrong, which the plan will name.
  if (words && shape[1] != words)
    fail(std::string(op_.inputs.first[input].name) + " has shape " + text_of(shape) + ", expected [experts, " +
         std::to_string(words) + " int32 words] for these attributes");
  return shape[0];
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

qm_cuda_node_plan CudaNode::plan_of(const char* op, const void* node, const qm_tensor* inputs) const {
  qm_cuda_node_plan plan;
  char error[QM_ERROR_SIZE];
  if (qm_cuda_plan_node(op, node, inputs, &device_, &plan, error)) fail(error);
  return plan;
}

}  // namespace quantmoe
