// A node on the CPU: its packed weights, and calls of the core on the session's threads.
#pragma once
#include <memory>
#include <vector>

#include "common/node.h"
#include "cpu/pool.h"

namespace quantmoe {

// What a session does with the packed weights when it is created. They stay in the file, mapped by ONNX Runtime, or
// they are read there. Or they are copied to memory that no change of the file reaches.
enum class WeightSource { kMapped, kPrefaulted, kCopied };

// A node on the session's threads.
class CpuNode : public Node {
 public:
  ~CpuNode() override { api_->ReleaseMemoryInfo(memory_); }

 protected:
  CpuNode(const Op& op, const OrtApi* api, const OrtKernelInfo* info, WeightSource weights, bool verify)
      : Node(op, api, info), weights_(weights), verify_(verify) {
    check(api->CreateCpuMemoryInfo(OrtArenaAllocator, OrtMemTypeDefault, &memory_));
  }
  const void* read_packed(const OrtKernelInfo* info, size_t input, Shape& shape);
  void validate(const void* node, const qm_shape* packed = nullptr) const;
  void check_packed(const OrtKernelInfo* info, size_t input, const void* data, const Shape& shape) const;
  void call(OrtKernelContext* context, const void* node, const Tensors& tensors, qm_read_experts read_experts = nullptr,
            void* experts_context = nullptr) const;

 private:
  struct alignas(64) Line {
    char bytes[64];
  };
  WeightSource weights_;
  bool verify_;
  std::vector<std::unique_ptr<Line[]>> copies_;
  OrtMemoryInfo* memory_ = nullptr;
};

}  // namespace quantmoe
