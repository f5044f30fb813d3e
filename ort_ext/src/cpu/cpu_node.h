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
  void check_packed(const OrtKernelInfo* info, size_t input, const void* data, const Shape& shape) const;
  template <class Call, class Size, class Body>
  void with_pool(OrtKernelContext* context, Call& call, const Size& workspace, const Body& run) const;

 private:
  struct alignas(64) Line {
    char bytes[64];
  };
  WeightSource weights_;
  bool verify_;
  std::vector<std::unique_ptr<Line[]>> copies_;
  OrtMemoryInfo* memory_ = nullptr;
};

// Completes a call with the session's threads and a workspace of workspace() bytes, and makes it.
template <class Call, class Size, class Body>
void CpuNode::with_pool(OrtKernelContext* context, Call& call, const Size& workspace, const Body& run) const {
  try {
    quantmoe::with_pool(api_, context, memory_, call, workspace, run);
  } catch (const std::invalid_argument& error) {
    fail(error.what());
  }
}

}  // namespace quantmoe
