// QuantMoE as an ONNX Runtime custom operator on the CUDA execution provider: a thin adapter over the C ABI of
// quant_moe_cuda.h.
//
// A library of its own, so that the CPU's has no CUDA inside; a session takes one of them (ONNX Runtime refuses a
// second library for a domain). ONNX Runtime copies the packed weights, initializers of a CUDA node, to the device
// once, when the session is created; the kernels read them there. Launches go to ONNX Runtime's stream, with a
// workspace of its allocator for that stream. What can be checked is checked when a session is created.
#include "adapter.h"
#include "quantmoe/quant_moe_cuda.h"

namespace quantmoe {
namespace {

class CudaMoE : public Kernel {
 public:
  CudaMoE(const Op& op, const OrtApi* api, const OrtKernelInfo* info);
  void Run(OrtKernelContext* context) const override;

 private:
  int64_t Experts(const OrtKernelInfo* info, size_t input, int projection) const;

  qm_cuda_problem problem_{};  // but for tokens and top_k
  qm_cuda_device device_{};
  std::unique_ptr<OrtAllocator, void (*)(OrtAllocator*)> allocator_;  // of the node's device
  const OrtMemoryInfo* memory_ = nullptr;
};

// How many experts a packed tensor holds, whose rows are checked.
int64_t CudaMoE::Experts(const OrtKernelInfo* info, size_t input, int projection) const {
  Shape shape;
  Weight(info, input, shape);
  const int64_t words = static_cast<int64_t>(qm_cuda_row_bytes(&problem_.moe, projection) / 4);
  // No words: an attribute is wrong, which the plan will name.
  if (words && shape[1] != words)
    Fail(std::string(at(kInputs, op_.name, input).name) + " has shape " + Text(shape) + ", expected [experts, " +
         std::to_string(words) + " int32 words] for these attributes");
  return shape[0];
}

CudaMoE::CudaMoE(const Op& op, const OrtApi* api, const OrtKernelInfo* info)
    : Kernel(op, api, info), allocator_(nullptr, api->ReleaseAllocator) {
  ReadAttributes(info, &problem_.moe);
  problem_.type = op.type();
  problem_.id_bytes = op.id_bytes();
  problem_.local_experts = Experts(info, QuantMoE_w13, 13);
  if (const int64_t experts = Experts(info, QuantMoE_w2, 2); experts != problem_.local_experts)
    Fail("w13 has " + std::to_string(problem_.local_experts) + " experts and w2 " + std::to_string(experts) +
         ", expected the same number");

  OrtAllocator* allocator;
  Check(api->KernelInfoGetAllocator(info, OrtMemTypeDefault, &allocator), "the device's allocator");
  allocator_.reset(allocator);
  memory_ = allocator->Info(allocator);
  int ordinal = 0;
  Check(api->MemoryInfoGetId(memory_, &ordinal));
  char error[QM_ERROR_SIZE];
  if (qm_cuda_query(ordinal, &device_, error)) Fail(error);

  qm_cuda_problem probe = problem_;
  probe.tokens = probe.top_k = 1;
  qm_cuda_plan plan;
  if (qm_cuda_plan_moe(&probe, &device_, &plan, error)) Fail(error);
}

void CudaMoE::Run(OrtKernelContext* context) const {
  const Tokens tokens = ReadTokens(context, problem_.moe.hidden_size);
  OrtValue* output = Output(context, 0, tokens.shape);
  qm_cuda_problem problem = problem_;
  problem.tokens = Rows(tokens.shape);
  problem.top_k = tokens.top_k;
  if (problem.tokens == 0) return;
  qm_cuda_plan plan;
  char error[QM_ERROR_SIZE];
  if (qm_cuda_plan_moe(&problem, &device_, &plan, error)) Fail(error);

  void* stream = nullptr;
  Check(api_->KernelContext_GetGPUComputeStream(context, &stream));
  // Freed when the launch is enqueued; the allocator keeps it for this stream, where later work comes after.
  void* workspace = nullptr;
  Check(api_->KernelContext_GetScratchBuffer(context, memory_, plan.workspace_bytes, &workspace));
  const auto release = [this](void* p) { allocator_->Free(allocator_.get(), p); };
  const std::unique_ptr<void, decltype(release)> owned(workspace, release);

  qm_cuda_tensors tensors{};
  tensors.hidden_states = Data(tokens.hidden_states);
  tensors.topk_ids = Data(tokens.topk_ids);
  tensors.topk_weights = static_cast<const float*>(Data(tokens.topk_weights));
  tensors.w13 = Data(Input(context, QuantMoE_w13));
  tensors.w2 = Data(Input(context, QuantMoE_w2));
  tensors.output = Data(output);
  tensors.workspace = workspace;
  if (qm_cuda_launch(&problem, &plan, &tensors, stream, error)) throw std::runtime_error(node_ + ": " + error);
}

void Operators(const OrtApi* api, std::deque<Op>& ops) {
  const Op::Make make = [](const Op& op, const OrtApi* api, const OrtKernelInfo* info) -> Kernel* {
    return new CudaMoE(op, api, info);
  };
  for (auto id_type : {ONNX_TENSOR_ELEMENT_DATA_TYPE_INT32, ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64})
    for (auto type : {ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16, ONNX_TENSOR_ELEMENT_DATA_TYPE_BFLOAT16})
      ops.emplace_back(api, "CUDAExecutionProvider", "QuantMoE", type, id_type, make);
}

}  // namespace
}  // namespace quantmoe

extern "C" QM_API OrtStatus* ORT_API_CALL RegisterCustomOps(OrtSessionOptions* options, const OrtApiBase* base) {
  return quantmoe::Register(options, base, quantmoe::Operators);
}
