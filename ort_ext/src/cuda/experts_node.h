// QuantMoE on a CUDA device. With the session entry quantmoe.experts = host the packed experts stay in host memory,
// with disk in their file (device_experts.h).
#pragma once
#include <cuda_runtime_api.h>

#include <memory>
#include <vector>

#include "cuda/cuda_node.h"
#include "experts/device_experts.h"

namespace quantmoe {

class CudaMoE : public CudaNode {
 public:
  CudaMoE(const Op& op, const OrtApi* api, const OrtKernelInfo* info, bool verify);
  void run(OrtKernelContext* context) const override;

 private:
  qm_moe moe_{};
  std::vector<qm_tensor> constants_;        // w13 and w2
  std::shared_ptr<DeviceExperts> experts_;  // null: they are inputs on the device
  std::shared_ptr<Experts> trace_;          // of what is routed to them; null: none is wanted
  [[maybe_unused]] int layer_ = 0;
  int traced_layer_ = 0;

  void trace(const qm_tensor& topk_ids, cudaStream_t stream) const;
};

}  // namespace quantmoe
