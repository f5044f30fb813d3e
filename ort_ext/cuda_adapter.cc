// The operators as ONNX Runtime custom operators on the CUDA execution provider: a thin adapter over the C ABI of
// quant_moe_cuda.h.
//
// A library of its own, so that the CPU's has no CUDA inside; a session takes one of them (ONNX Runtime refuses a
// second library for a domain). ONNX Runtime copies the packed weights, initializers of a CUDA node, to the device
// once, when the session is created; the kernels read them there. Launches go to ONNX Runtime's stream, with a
// workspace of its allocator for that stream. What can be checked is checked when a session is created.
#include <cuda_runtime_api.h>

#include "adapter.h"
#include "quantmoe/quant_moe_cuda.h"

namespace quantmoe {
namespace {

// A node on a device.
class CudaKernel : public Kernel {
 protected:
  CudaKernel(const Op& op, const OrtApi* api, const OrtKernelInfo* info);
  void CheckPacked(const OrtKernelInfo* info, size_t input, bool verify) const;
  int64_t Experts(const OrtKernelInfo* info, size_t input, size_t row_bytes) const;
  void Query();  // asks for the device: after what needs none is checked
  void* Stream(OrtKernelContext* context) const;
  template <class Plan, class Problem, class Make, class Launch>
  void Execute(OrtKernelContext* context, const Problem& problem, const Make& make, const Launch& launch) const;

  qm_cuda_device device_{};

 private:
  std::unique_ptr<OrtAllocator, void (*)(OrtAllocator*)> allocator_;  // of the node's device
  const OrtMemoryInfo* memory_ = nullptr;
};

CudaKernel::CudaKernel(const Op& op, const OrtApi* api, const OrtKernelInfo* info)
    : Kernel(op, api, info), allocator_(nullptr, api->ReleaseAllocator) {
  OrtAllocator* allocator;
  Check(api->KernelInfoGetAllocator(info, OrtMemTypeDefault, &allocator), "the device's allocator");
  allocator_.reset(allocator);
  memory_ = allocator->Info(allocator);
}

// How many experts a packed tensor holds, whose rows are checked.
int64_t CudaKernel::Experts(const OrtKernelInfo* info, size_t input, size_t row_bytes) const {
  Shape shape;
  Weight(info, input, shape);
  const int64_t words = static_cast<int64_t>(row_bytes / 4);
  // No words: an attribute is wrong, which the plan will name.
  if (words && shape[1] != words)
    Fail(std::string(op_.inputs.first[input].name) + " has shape " + Text(shape) + ", expected [experts, " +
         std::to_string(words) + " int32 words] for these attributes");
  return shape[0];
}

// Compares a packed tensor, which is on the device, with the node's identity of it.
void CudaKernel::CheckPacked(const OrtKernelInfo* info, size_t input, bool verify) const {
  Shape shape;
  const char* data = static_cast<const char*>(Data(Weight(info, input, shape)));
  std::vector<char> copy;
  CheckIdentity(info, input, verify, [&](size_t at, size_t size) {
    copy.resize(size);
    if (const cudaError_t e = cudaMemcpy(copy.data(), data + at, size, cudaMemcpyDefault))
      throw std::runtime_error(node_ + ": CUDA: " + cudaGetErrorString(e));
    return copy.data();
  });
}

void CudaKernel::Query() {
  int ordinal = 0;
  Check(api_->MemoryInfoGetId(memory_, &ordinal));
  char error[QM_ERROR_SIZE];
  if (qm_cuda_query(ordinal, &device_, error)) Fail(error);
}

void* CudaKernel::Stream(OrtKernelContext* context) const {
  void* stream = nullptr;
  Check(api_->KernelContext_GetGPUComputeStream(context, &stream));
  return stream;
}

// Plans a call, and makes it with a workspace.
template <class Plan, class Problem, class Make, class Launch>
void CudaKernel::Execute(OrtKernelContext* context, const Problem& problem, const Make& make,
                         const Launch& launch) const {
  Plan plan;
  char error[QM_ERROR_SIZE];
  if (make(&problem, &device_, &plan, error)) Fail(error);
  // Freed when the launch is enqueued; the allocator keeps it for this stream, where later work comes after.
  void* workspace = nullptr;
  if (plan.workspace_bytes)
    Check(api_->KernelContext_GetScratchBuffer(context, memory_, plan.workspace_bytes, &workspace));
  const auto release = [this](void* p) { allocator_->Free(allocator_.get(), p); };
  const std::unique_ptr<void, decltype(release)> owned(workspace, release);
  if (launch(plan, workspace, Stream(context), error)) throw std::runtime_error(node_ + ": " + error);
}

class CudaMoE : public CudaKernel {
 public:
  CudaMoE(const Op& op, const OrtApi* api, const OrtKernelInfo* info, bool verify);
  void Run(OrtKernelContext* context) const override;

 private:
  qm_cuda_problem problem_{};  // but for tokens and top_k
};

CudaMoE::CudaMoE(const Op& op, const OrtApi* api, const OrtKernelInfo* info, bool verify) : CudaKernel(op, api, info) {
  ReadAttributes(info, &problem_.moe);
  problem_.type = op.type();
  problem_.id_bytes = op.id_bytes();
  problem_.local_experts = Experts(info, QuantMoE_w13, qm_cuda_row_bytes(&problem_.moe, 13));
  if (const int64_t experts = Experts(info, QuantMoE_w2, qm_cuda_row_bytes(&problem_.moe, 2));
      experts != problem_.local_experts)
    Fail("w13 has " + std::to_string(problem_.local_experts) + " experts and w2 " + std::to_string(experts) +
         ", expected the same number");
  Query();
  qm_cuda_problem probe = problem_;
  probe.tokens = probe.top_k = 1;
  qm_cuda_plan plan;
  char error[QM_ERROR_SIZE];
  if (qm_cuda_plan_moe(&probe, &device_, &plan, error)) Fail(error);
  CheckPacked(info, QuantMoE_w13, verify);
  CheckPacked(info, QuantMoE_w2, verify);
  Shape shape;
  const void* w13 = Data(Weight(info, QuantMoE_w13, shape));
  if (problem_.moe.w13.perm && qm_cuda_check_moe(&problem_, w13, nullptr, error)) Fail(error);
}

void CudaMoE::Run(OrtKernelContext* context) const {
  const Tokens tokens = ReadTokens(context, problem_.moe.hidden_size);
  OrtValue* output = Output(context, 0, tokens.shape);
  qm_cuda_problem problem = problem_;
  problem.tokens = Rows(tokens.shape);
  problem.top_k = tokens.top_k;
  if (problem.tokens == 0) return;
  Execute<qm_cuda_plan>(context, problem, qm_cuda_plan_moe,
                        [&](const qm_cuda_plan& plan, void* workspace, void* stream, char* error) {
                          qm_cuda_tensors tensors{};
                          tensors.hidden_states = Data(tokens.hidden_states);
                          tensors.topk_ids = Data(tokens.topk_ids);
                          tensors.topk_weights = static_cast<const float*>(Data(tokens.topk_weights));
                          tensors.w13 = Data(Input(context, QuantMoE_w13));
                          tensors.w2 = Data(Input(context, QuantMoE_w2));
                          tensors.output = Data(output);
                          tensors.workspace = workspace;
                          return qm_cuda_launch(&problem, &plan, &tensors, stream, error);
                        });
}

class CudaLinear : public CudaKernel {
 public:
  CudaLinear(const Op& op, const OrtApi* api, const OrtKernelInfo* info, bool verify) : CudaKernel(op, api, info) {
    ReadAttributes(info, &problem_.linear);
    problem_.type = op.type();
    if (const int64_t rows = Experts(info, QuantLinear_w, qm_cuda_linear_row_bytes(&problem_.linear)); rows != 1)
      Fail("w has " + std::to_string(rows) + " rows, expected 1");
    Query();
    qm_cuda_linear_problem probe = problem_;
    probe.rows = 1;
    qm_cuda_plan plan;
    char error[QM_ERROR_SIZE];
    if (qm_cuda_plan_linear(&probe, &device_, &plan, error)) Fail(error);
    CheckPacked(info, QuantLinear_w, verify);
    Shape shape;
    const void* w = Data(Weight(info, QuantLinear_w, shape));
    if (problem_.linear.w.perm && qm_cuda_check_linear(&problem_, w, nullptr, error)) Fail(error);
  }
  void Run(OrtKernelContext* context) const override;

 private:
  qm_cuda_linear_problem problem_{};  // but for rows
};

void CudaLinear::Run(OrtKernelContext* context) const {
  const OrtValue* x = Input(context, QuantLinear_x);
  Shape shape = ShapeOf(x);
  if (shape.empty() || shape.back() != problem_.linear.in_features)
    Fail("x has shape " + Text(shape) + ", expected [.., in_features " + std::to_string(problem_.linear.in_features) +
         "]");
  qm_cuda_linear_problem problem = problem_;
  problem.rows = Rows(shape);
  shape.back() = problem_.linear.out_features;
  OrtValue* y = Output(context, 0, shape);
  if (problem.rows == 0) return;
  Execute<qm_cuda_plan>(
      context, problem, qm_cuda_plan_linear, [&](const qm_cuda_plan& plan, void* workspace, void* stream, char* error) {
        const qm_cuda_linear_tensors tensors{Data(x), Data(Input(context, QuantLinear_w)), Data(y), workspace};
        return qm_cuda_launch_linear(&problem, &plan, &tensors, stream, error);
      });
}

class CudaRouting : public CudaKernel {
 public:
  CudaRouting(const Op& op, const OrtApi* api, const OrtKernelInfo* info, bool) : CudaKernel(op, api, info) {
    ReadAttributes(info, &problem_.routing);
    problem_.type = op.type();
    char error[QM_ERROR_SIZE];
    if (qm_cuda_validate_routing(&problem_, error)) Fail(error);
  }
  void Run(OrtKernelContext* context) const override;

 private:
  qm_cuda_routing_problem problem_{};  // but for tokens
};

void CudaRouting::Run(OrtKernelContext* context) const {
  const OrtValue* logits = Input(context, MoERouting_logits);
  const OrtValue* bias = Input(context, MoERouting_correction_bias);
  const qm_routing& routing = problem_.routing;
  Shape shape = ShapeOf(logits);
  const std::string experts = "num_experts " + std::to_string(routing.num_experts);
  if (shape.empty() || shape.back() != routing.num_experts + routing.shared_gate)
    Fail("logits has shape " + Text(shape) + ", expected [.., " + experts + (routing.shared_gate ? " + 1]" : "]"));
  if (const Shape found = ShapeOf(bias); found != Shape{routing.num_experts})
    Fail("correction_bias has shape " + Text(found) + ", expected [" + experts + "]");
  qm_cuda_routing_problem problem = problem_;
  problem.tokens = Rows(shape);
  shape.back() = routing.top_k + routing.shared_experts;
  OrtValue *ids = Output(context, 0, shape), *weights = Output(context, 1, shape);
  const qm_cuda_routing_tensors tensors{Data(logits), static_cast<const float*>(Data(bias)),
                                        static_cast<int32_t*>(Data(ids)), static_cast<float*>(Data(weights))};
  char error[QM_ERROR_SIZE];
  if (qm_cuda_launch_routing(&problem, &tensors, Stream(context), error))
    throw std::runtime_error(node_ + ": " + error);
}

class CudaRouter : public CudaKernel {
 public:
  CudaRouter(const Op& op, const OrtApi* api, const OrtKernelInfo* info, bool) : CudaKernel(op, api, info) {
    ReadAttributes(info, &problem_.router);
    problem_.type = op.type();
    Query();
    qm_cuda_router_plan plan;
    char error[QM_ERROR_SIZE];
    if (qm_cuda_plan_router(&problem_, &device_, &plan, error)) Fail(error);
    const qm_router& router = problem_.router;
    const Shape wanted{router.num_experts + router.shared_gate, router.hidden_size};
    if (const Shape found = ShapeOf(Constant(info, MoERouter_weight)); found != wanted)
      Fail("weight has shape " + Text(found) + ", expected [num_experts + shared_gate, hidden_size] " + Text(wanted));
  }
  void Run(OrtKernelContext* context) const override;

 private:
  qm_cuda_router_problem problem_{};  // but for tokens
};

void CudaRouter::Run(OrtKernelContext* context) const {
  const qm_router& router = problem_.router;
  const OrtValue* x = Input(context, MoERouter_hidden_states);
  Shape shape = ShapeOf(x);
  if (shape.empty() || shape.back() != router.hidden_size)
    Fail("hidden_states has shape " + Text(shape) + ", expected [.., hidden_size " +
         std::to_string(router.hidden_size) + "]");
  const auto bias = [&](int32_t input, int64_t size) {
    const OrtValue* value = Input(context, static_cast<size_t>(input));
    if (ShapeOf(value) == Shape{0}) return static_cast<const float*>(nullptr);
    CheckShape(context, input, {size});
    return static_cast<const float*>(Data(value));
  };
  qm_cuda_router_problem problem = problem_;
  problem.tokens = Rows(shape);
  shape.back() = router.top_k + router.shared_experts;
  qm_cuda_router_tensors tensors{};
  tensors.hidden_states = Data(x);
  tensors.weight = Data(Input(context, MoERouter_weight));
  tensors.bias = bias(MoERouter_bias, router.num_experts + router.shared_gate);
  tensors.correction_bias = bias(MoERouter_correction_bias, router.num_experts);
  tensors.topk_ids = static_cast<int32_t*>(Data(Output(context, 0, shape)));
  tensors.topk_weights = static_cast<float*>(Data(Output(context, 1, shape)));
  Execute<qm_cuda_router_plan>(context, problem, qm_cuda_plan_router,
                               [&](const qm_cuda_router_plan& plan, void* workspace, void* stream, char* error) {
                                 tensors.workspace = workspace;
                                 return qm_cuda_launch_router(&problem, &plan, &tensors, stream, error);
                               });
}

class CudaNorm : public CudaKernel {
 public:
  CudaNorm(const Op& op, const OrtApi* api, const OrtKernelInfo* info, bool) : CudaKernel(op, api, info) {
    ReadAttributes(info, &problem_.norm);
    problem_.type = op.type();
    const Shape weight = ShapeOf(Constant(info, AddRMSNorm_weight));
    if (weight.size() != 1) Fail("weight has shape " + Text(weight) + ", expected [features]");
    problem_.columns = weight[0];
    char error[QM_ERROR_SIZE];
    if (qm_cuda_validate_norm(&problem_, error)) Fail(error);
  }
  void Run(OrtKernelContext* context) const override;

 private:
  qm_cuda_norm_problem problem_{};  // but for rows
};

void CudaNorm::Run(OrtKernelContext* context) const {
  const OrtValue* x = Input(context, AddRMSNorm_x);
  const Shape shape = ShapeOf(x);
  if (shape.empty() || shape.back() != problem_.columns)
    Fail("x has shape " + Text(shape) + ", expected [.., " + std::to_string(problem_.columns) + "] as weight has");
  CheckShape(context, AddRMSNorm_residual, shape);
  qm_cuda_norm_problem problem = problem_;
  problem.rows = Rows(shape);
  OrtValue *y = Output(context, 0, shape), *sum = Output(context, 1, shape);
  const qm_cuda_norm_tensors tensors{Data(x), Data(Input(context, AddRMSNorm_residual)),
                                     Data(Input(context, AddRMSNorm_weight)), Data(y), Data(sum)};
  char error[QM_ERROR_SIZE];
  if (qm_cuda_launch_norm(&problem, &tensors, Stream(context), error)) throw std::runtime_error(node_ + ": " + error);
}

class CudaRows : public CudaKernel {
 public:
  CudaRows(const Op& op, const OrtApi* api, const OrtKernelInfo* info, bool) : CudaKernel(op, api, info) {
    ReadAttributes(info, &problem_.node);
    char error[QM_ERROR_SIZE];
    if (qm_cuda_validate_rows(&problem_, error)) Fail(error);
  }
  void Run(OrtKernelContext* context) const override;

 private:
  qm_cuda_rows_problem problem_{};  // but for the sizes
};

void CudaRows::Run(OrtKernelContext* context) const {
  const OrtValue* mask = Input(context, TokenRows_attention_mask);
  CheckShape(context, TokenRows_attention_mask, {-1, -1});
  const Shape shape = ShapeOf(mask);
  CheckShape(context, TokenRows_past_key, {shape[0], -1, -1, -1});
  CheckShape(context, TokenRows_input_ids, {shape[0], -1});
  qm_cuda_rows_problem problem = problem_;
  problem.batch = shape[0];
  problem.tokens = ShapeOf(Input(context, TokenRows_input_ids))[1];
  problem.past_slots = ShapeOf(Input(context, TokenRows_past_key))[2];
  problem.length = shape[1];
  const qm_cuda_rows_tensors tensors{static_cast<const int64_t*>(Data(mask)),
                                     static_cast<int32_t*>(Data(Output(context, 0, {shape[0], 3}))),
                                     static_cast<int64_t*>(Data(Output(context, 1, {shape[0], 1, 1})))};
  char error[QM_ERROR_SIZE];
  if (qm_cuda_launch_rows(&problem, &tensors, Stream(context), error)) throw std::runtime_error(node_ + ": " + error);
}

class CudaAttention : public CudaKernel {
 public:
  CudaAttention(const Op& op, const OrtApi* api, const OrtKernelInfo* info, bool) : CudaKernel(op, api, info) {
    ReadAttributes(info, &problem_.attention);
    problem_.type = op.type();
    Query();
    qm_cuda_attention_plan plan;
    char error[QM_ERROR_SIZE];
    if (qm_cuda_plan_attention(&problem_, &device_, &plan, error)) Fail(error);
    CheckCaches(problem_.attention);
  }
  void Run(OrtKernelContext* context) const override;

 private:
  qm_cuda_attention_problem problem_{};  // but for the shapes
};

void CudaAttention::Run(OrtKernelContext* context) const {
  const AttentionShapes shapes = ReadAttention(context, problem_.attention);
  const auto input = [&](int32_t index) { return Data(Input(context, static_cast<size_t>(index))); };
  const auto floats = [&](int32_t index) { return static_cast<const float*>(input(index)); };
  qm_cuda_attention_problem problem = problem_;
  problem.batch = shapes.batch;
  problem.tokens = shapes.tokens;
  problem.past_slots = shapes.past_slots;
  problem.slots = shapes.slots;
  qm_cuda_attention_tensors tensors{};
  tensors.qkv = input(CachedAttention_qkv);
  tensors.past_key = input(CachedAttention_past_key);
  tensors.past_value = input(CachedAttention_past_value);
  tensors.rows = static_cast<const int32_t*>(input(CachedAttention_rows));
  tensors.cos = floats(CachedAttention_cos);
  tensors.sin = floats(CachedAttention_sin);
  tensors.q_norm = floats(CachedAttention_q_norm);
  tensors.k_norm = floats(CachedAttention_k_norm);
  tensors.sinks = floats(CachedAttention_sinks);
  tensors.output = Data(Output(context, 0, shapes.output));
  tensors.present_key = Data(Output(context, 1, shapes.key));
  tensors.present_value = Data(Output(context, 2, shapes.value));
  Execute<qm_cuda_attention_plan>(context, problem, qm_cuda_plan_attention,
                                  [&](const qm_cuda_attention_plan& plan, void* workspace, void* stream, char* error) {
                                    tensors.workspace = workspace;
                                    return qm_cuda_launch_attention(&problem, &plan, &tensors, stream, error);
                                  });
}

class CudaConv : public CudaKernel {
 public:
  CudaConv(const Op& op, const OrtApi* api, const OrtKernelInfo* info, bool) : CudaKernel(op, api, info) {
    ReadAttributes(info, &problem_.conv);
    problem_.type = op.type();
    char error[QM_ERROR_SIZE];
    if (qm_cuda_validate_conv(&problem_, error)) Fail(error);
  }
  void Run(OrtKernelContext* context) const override;

 private:
  qm_cuda_conv_problem problem_{};  // but for the sizes
};

void CudaConv::Run(OrtKernelContext* context) const {
  qm_cuda_conv_problem problem = problem_;
  qm_cuda_conv_tensors tensors{};
  ReadConv(context, problem.conv, problem, tensors);
  char error[QM_ERROR_SIZE];
  if (qm_cuda_launch_conv(&problem, &tensors, Stream(context), error)) throw std::runtime_error(node_ + ": " + error);
}

class CudaDelta : public CudaKernel {
 public:
  CudaDelta(const Op& op, const OrtApi* api, const OrtKernelInfo* info, bool) : CudaKernel(op, api, info) {
    ReadAttributes(info, &problem_.delta);
    problem_.type = op.type();
    Query();
    qm_cuda_delta_plan plan;
    char error[QM_ERROR_SIZE];
    if (qm_cuda_plan_delta(&problem_, &device_, &plan, error)) Fail(error);
  }
  void Run(OrtKernelContext* context) const override;

 private:
  qm_cuda_delta_problem problem_{};  // but for the sizes
};

void CudaDelta::Run(OrtKernelContext* context) const {
  qm_cuda_delta_problem problem = problem_;
  qm_cuda_delta_tensors tensors{};
  ReadDelta(context, problem.delta, problem, tensors);
  Execute<qm_cuda_delta_plan>(context, problem, qm_cuda_plan_delta,
                              [&](const qm_cuda_delta_plan& plan, void* workspace, void* stream, char* error) {
                                tensors.workspace = workspace;
                                return qm_cuda_launch_delta(&problem, &plan, &tensors, stream, error);
                              });
}

template <class T, bool verify>
Kernel* Make(const Op& op, const OrtApi* api, const OrtKernelInfo* info) {
  return new T(op, api, info, verify);
}

template <bool verify>
void Operators(const OrtApi* api, std::deque<Op>& ops) {
  constexpr auto kId32 = ONNX_TENSOR_ELEMENT_DATA_TYPE_INT32, kId64 = ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64;
  constexpr auto kFloat = ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT;
  constexpr const char* kProvider = "CUDAExecutionProvider";
  for (auto type : {ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16, ONNX_TENSOR_ELEMENT_DATA_TYPE_BFLOAT16}) {
    for (auto id_type : {kId32, kId64})
      ops.emplace_back(api, kProvider, "QuantMoE", type, id_type, Make<CudaMoE, verify>);
    ops.emplace_back(api, kProvider, "QuantLinear", type, kId32, Make<CudaLinear, verify>);
    ops.emplace_back(api, kProvider, "MoERouting", type, kId32, Make<CudaRouting, verify>);
    ops.emplace_back(api, kProvider, "MoERouter", type, kId32, Make<CudaRouter, verify>);
    ops.emplace_back(api, kProvider, "AddRMSNorm", type, kId32, Make<CudaNorm, verify>);
    for (auto cache : {type, ONNX_TENSOR_ELEMENT_DATA_TYPE_INT8, ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT8}) {
      ops.emplace_back(api, kProvider, "TokenRows", type, cache, Make<CudaRows, verify>);
      ops.emplace_back(api, kProvider, "CachedAttention", type, cache, Make<CudaAttention, verify>);
    }
    ops.emplace_back(api, kProvider, "CausalConv", type, kId32, Make<CudaConv, verify>);
    ops.emplace_back(api, kProvider, "GatedDelta", type, kId32, Make<CudaDelta, verify>);
  }
  ops.emplace_back(api, kProvider, "MoERouting", kFloat, kId32, Make<CudaRouting, verify>);
}

}  // namespace
}  // namespace quantmoe

extern "C" QM_API OrtStatus* ORT_API_CALL RegisterCustomOps(OrtSessionOptions* options, const OrtApiBase* base) {
  return quantmoe::Register(options, base, "CUDA provider", [](const OrtApi* api, const OrtSessionOptions* options) {
    return quantmoe::Verify(api, options) ? quantmoe::Operators<true> : quantmoe::Operators<false>;
  });
}
