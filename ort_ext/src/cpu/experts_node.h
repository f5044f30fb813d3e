// QuantMoE on the CPU, with the experts that are outside memory.
#pragma once
#include <memory>

#include "cpu/cpu_node.h"
#include "experts/experts.h"

namespace quantmoe {

class MoENode : public CpuNode {
 public:
  MoENode(const Op& op, const OrtApi* api, const OrtKernelInfo* info, WeightSource weights, bool verify);
  void run(OrtKernelContext* context) const override;

 private:
  ExpertLayer::Tensor find(const void* data, int64_t rows, int64_t row_bytes) const;
  int add(ExpertLayer layer) const;
  void check_file(const OrtKernelInfo* info, size_t input, const ExpertLayer::Tensor& tensor, bool verify) const;
  void start_experts(OrtKernelContext* context, const Tensors& tensors) const;

  qm_moe moe_{};
  qm_tensor weights_[2];              // w13, w2
  std::shared_ptr<Experts> experts_;  // null: nothing is asked of it
  int layer_ = 0;
};

}  // namespace quantmoe
