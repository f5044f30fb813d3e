// QuantMoE on a CUDA device. With the session entry quantmoe.experts = host the packed experts stay in host memory,
// with disk in their file (device_experts.h).
#pragma once
#include <cuda_runtime_api.h>

#include <memory>

#include "cuda/cuda_node.h"
#include "experts/device_experts.h"

namespace quantmoe {

class CudaMoE : public CudaNode {
 public:
  CudaMoE(const Op& op, const OrtApi* api, const OrtKernelInfo* info, bool verify);
  void run(OrtKernelContext* context) const override;

 private:
  qm_cuda_problem problem_{};               // without tokens and top_k
  std::shared_ptr<DeviceExperts> experts_;  // null: they are inputs on the device
  std::shared_ptr<Experts> trace_;          // of what is routed to them; null: none is wanted
  [[maybe_unused]] int layer_ = 0;
  int traced_layer_ = 0;

  void trace(const qm_cuda_problem& problem, const void* topk_ids, cudaStream_t stream) const;
};

}  // namespace quantmoe
