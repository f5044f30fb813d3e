// QuantMoE as an ONNX Runtime custom operator on the CUDA execution provider: a thin adapter over the C ABI of
// quant_moe_cuda.h.
//
// A library of its own, so that the CPU's has no CUDA inside; a session takes one of them (ONNX Runtime refuses a
// second library for a domain). ONNX Runtime copies the packed weights, initializers of a CUDA node, to the device
// once, when the session is created; the kernels read them there. Launches go to ONNX Runtime's stream, with a
// workspace of its allocator for that stream. What can be checked is checked when a session is created. Failures are
// exceptions in here; Guard turns them into an OrtStatus.
#include <algorithm>
#include <list>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <vector>

#include "onnxruntime_c_api.h"
#include "quantmoe/quant_moe_cuda.h"

namespace quantmoe {
namespace {

constexpr uint32_t kOrtApi = 21;  // ONNX Runtime 1.21, as the CPU library

enum {  // the types of op.def: T and I are those of one OrtCustomOp
  type_T = -1,
  type_I = -2,
  type_float = ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT,
  type_int32 = ONNX_TENSOR_ELEMENT_DATA_TYPE_INT32
};
enum Input : size_t {
#define QM_INPUT(op, name, type) op##_##name,
#include "op.def"
};
struct Slot {
  const char* op;
  const char* name;
  int type;
};
constexpr Slot kInputs[] = {
// QuantMoE's come first
#define QM_INPUT(op, name, type) {#op, #name, type_##type},
#include "op.def"
};
constexpr size_t kInputCount = QuantMoE_w2 + 1;

struct Op : OrtCustomOp {
  const OrtApi* api;
  ONNXTensorElementDataType float_type, id_type;

  Op(const OrtApi* api, ONNXTensorElementDataType float_type, ONNXTensorElementDataType id_type);
  static const Op& Of(const OrtCustomOp* op) { return *static_cast<const Op*>(op); }
  ONNXTensorElementDataType Resolve(int t) const {
    return t == type_T ? float_type : t == type_I ? id_type : static_cast<ONNXTensorElementDataType>(t);
  }
};

template <class F>
OrtStatus* Guard(const OrtApi* api, F&& body) noexcept {
  try {
    body();
    return nullptr;
  } catch (const std::invalid_argument& error) {
    return api->CreateStatus(ORT_INVALID_ARGUMENT, error.what());
  } catch (const std::exception& error) {
    return api->CreateStatus(ORT_FAIL, error.what());
  }
}

using Shape = std::vector<int64_t>;

std::string Text(const Shape& shape) {
  std::string text = "[";
  for (int64_t dim : shape) text += (text.size() > 1 ? ", " : "") + std::to_string(dim);
  return text + "]";
}

class Kernel {
 public:
  Kernel(const Op& op, const OrtApi* api, const OrtKernelInfo* info);
  void Run(OrtKernelContext* context) const;
  const OrtApi* api() const { return api_; }

 private:
  [[noreturn]] void Fail(const std::string& what) const { throw std::invalid_argument(node_ + ": " + what); }
  void Check(OrtStatus* status, const std::string& what = "ONNX Runtime") const;
  Shape ShapeOf(const OrtValue* value) const;
  void* Data(const OrtValue* value) const;
  void ReadAttributes(const OrtKernelInfo* info);
  Shape CheckWeight(const OrtKernelInfo* info, Input input, int projection) const;

  const OrtApi* api_;
  std::string node_ = "QuantMoE node";  // with its name, the beginning of every message
  qm_cuda_problem problem_{};           // but for tokens and top_k
  qm_cuda_device device_{};
  std::unique_ptr<OrtAllocator, void (*)(OrtAllocator*)> allocator_;  // of the node's device
  const OrtMemoryInfo* memory_ = nullptr;
};

void Kernel::Check(OrtStatus* status, const std::string& what) const {
  if (!status) return;
  const std::unique_ptr<OrtStatus, void (*)(OrtStatus*)> owned(status, api_->ReleaseStatus);
  throw std::runtime_error(node_ + ": " + what + ": " + api_->GetErrorMessage(status));
}

Shape Kernel::ShapeOf(const OrtValue* value) const {
  OrtTensorTypeAndShapeInfo* info;
  Check(api_->GetTensorTypeAndShape(value, &info));
  const std::unique_ptr<OrtTensorTypeAndShapeInfo, void (*)(OrtTensorTypeAndShapeInfo*)> owned(
      info, api_->ReleaseTensorTypeAndShapeInfo);
  size_t rank;
  Check(api_->GetDimensionsCount(info, &rank));
  Shape shape(rank);
  Check(api_->GetDimensions(info, shape.data(), rank));
  return shape;
}

void* Kernel::Data(const OrtValue* value) const {
  void* data;  // API 21 has no accessor for const values
  Check(api_->GetTensorMutableData(const_cast<OrtValue*>(value), &data));
  return data;
}

void Kernel::ReadAttributes(const OrtKernelInfo* info) {
  char error[QM_ERROR_SIZE];
  const qm_attribute* a;
  for (size_t i = 0; (a = qm_attribute_at("QuantMoE", i)); ++i) {
    const std::string missing = std::string("attribute ") + a->name + " of kind " + a->kind + " is required";
    int status;
    if (a->kind == 'i') {
      int64_t value;
      Check(api_->KernelInfoGetAttribute_int64(info, a->name, &value), missing);
      status = qm_set_int("QuantMoE", &problem_.moe, a->name, value, error);
    } else if (a->kind == 'f') {
      float value;
      Check(api_->KernelInfoGetAttribute_float(info, a->name, &value), missing);
      status = qm_set_float("QuantMoE", &problem_.moe, a->name, value, error);
    } else {
      size_t size = 0;
      Check(api_->KernelInfoGetAttribute_string(info, a->name, nullptr, &size), missing);
      std::string value(size, '\0');
      Check(api_->KernelInfoGetAttribute_string(info, a->name, value.data(), &size), missing);
      status = qm_set_string("QuantMoE", &problem_.moe, a->name, value.c_str(), error);
    }
    if (status) Fail(error);
  }
}

Shape Kernel::CheckWeight(const OrtKernelInfo* info, Input input, int projection) const {
  const std::string name = kInputs[input].name;
  int constant = 0;
  const OrtValue* value = nullptr;
  Check(api_->KernelInfoGetConstantInput_tensor(info, input, &constant, &value), name);
  if (!constant || !value)
    Fail(name + " is computed or fed at run time, expected an initializer that is not a graph input");
  const Shape shape = ShapeOf(value);
  const int64_t words = static_cast<int64_t>(qm_cuda_row_bytes(&problem_.moe, projection) / 4);
  // No words: an attribute is wrong, which the plan will name.
  if (shape.size() != 2 || (words && shape[1] != words))
    Fail(name + " has shape " + Text(shape) + ", expected [experts, " + std::to_string(words) +
         " int32 words] for these attributes");
  return shape;
}

Kernel::Kernel(const Op& op, const OrtApi* api, const OrtKernelInfo* info)
    : api_(api), allocator_(nullptr, api->ReleaseAllocator) {
  size_t size = 0;
  Check(api->KernelInfo_GetNodeName(info, nullptr, &size));
  std::string name(size, '\0');
  Check(api->KernelInfo_GetNodeName(info, name.data(), &size));
  node_ += std::string(" \"") + name.c_str() + "\"";

  ReadAttributes(info);
  problem_.type = op.float_type == ONNX_TENSOR_ELEMENT_DATA_TYPE_BFLOAT16 ? QM_BF16 : QM_F16;
  problem_.id_bytes = op.id_type == ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64 ? 8 : 4;

  const Shape w13 = CheckWeight(info, QuantMoE_w13, 13), w2 = CheckWeight(info, QuantMoE_w2, 2);
  if (w2[0] != w13[0])
    Fail("w13 has " + std::to_string(w13[0]) + " experts and w2 " + std::to_string(w2[0]) +
         ", expected the same number");
  problem_.local_experts = w13[0];

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

void Kernel::Run(OrtKernelContext* context) const {
  const OrtValue* inputs[kInputCount];
  for (size_t i = 0; i < kInputCount; ++i) Check(api_->KernelContext_GetInput(context, i, &inputs[i]));
  const Shape x = ShapeOf(inputs[QuantMoE_hidden_states]);
  const Shape ids = ShapeOf(inputs[QuantMoE_topk_ids]), weights = ShapeOf(inputs[QuantMoE_topk_weights]);
  if (x.empty() || x.back() != problem_.moe.hidden_size)
    Fail("hidden_states has shape " + Text(x) + ", expected [.., hidden_size " +
         std::to_string(problem_.moe.hidden_size) + "]");
  if (ids.size() != x.size() || !std::equal(x.begin(), x.end() - 1, ids.begin()) || ids.back() < 1)
    Fail("topk_ids has shape " + Text(ids) + ", expected [.., top_k] and the sizes before it of hidden_states " +
         Text(x));
  if (weights != ids) Fail("topk_weights has shape " + Text(weights) + ", expected that of topk_ids " + Text(ids));

  OrtValue* output;
  Check(api_->KernelContext_GetOutput(context, 0, x.data(), x.size(), &output));
  qm_cuda_problem problem = problem_;
  problem.tokens = 1;
  for (size_t i = 0; i + 1 < x.size(); ++i) problem.tokens *= x[i];
  problem.top_k = ids.back();
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
  tensors.hidden_states = Data(inputs[QuantMoE_hidden_states]);
  tensors.topk_ids = Data(inputs[QuantMoE_topk_ids]);
  tensors.topk_weights = static_cast<const float*>(Data(inputs[QuantMoE_topk_weights]));
  tensors.w13 = Data(inputs[QuantMoE_w13]);
  tensors.w2 = Data(inputs[QuantMoE_w2]);
  tensors.output = Data(output);
  tensors.workspace = workspace;
  if (qm_cuda_launch(&problem, &plan, &tensors, stream, error)) throw std::runtime_error(node_ + ": " + error);
}

// The output has the shape of hidden_states; rank 0 stands for an unknown shape here.
OrtStatus* InferShape(const OrtCustomOp* self, OrtShapeInferContext* context) {
  const OrtApi* api = Op::Of(self).api;
  OrtTensorTypeAndShapeInfo* info;  // belongs to the context
  size_t rank = 0;
  OrtStatus* status = api->ShapeInferContext_GetInputTypeShape(context, QuantMoE_hidden_states, &info);
  if (!status) status = api->GetDimensionsCount(info, &rank);
  return status || !rank ? status : api->ShapeInferContext_SetOutputTypeShape(context, 0, info);
}

Op::Op(const OrtApi* api, ONNXTensorElementDataType float_type, ONNXTensorElementDataType id_type)
    : OrtCustomOp{}, api(api), float_type(float_type), id_type(id_type) {
  version = kOrtApi;
  GetName = [](const OrtCustomOp*) { return "QuantMoE"; };
  GetExecutionProviderType = [](const OrtCustomOp*) { return "CUDAExecutionProvider"; };
  GetInputTypeCount = [](const OrtCustomOp*) { return kInputCount; };
  GetInputType = [](const OrtCustomOp* self, size_t i) { return Of(self).Resolve(kInputs[i].type); };
  GetInputCharacteristic = [](const OrtCustomOp*, size_t) { return INPUT_OUTPUT_REQUIRED; };
  GetInputMemoryType = [](const OrtCustomOp*, size_t) { return OrtMemTypeDefault; };  // the device's
  GetOutputTypeCount = [](const OrtCustomOp*) { return size_t{1}; };
  GetOutputType = [](const OrtCustomOp* self, size_t) { return Of(self).float_type; };
  GetOutputCharacteristic = [](const OrtCustomOp*, size_t) { return INPUT_OUTPUT_REQUIRED; };
  GetStartVersion = GetEndVersion = [](const OrtCustomOp*) { return 1; };
  CreateKernelV2 = [](const OrtCustomOp* self, const OrtApi* api, const OrtKernelInfo* info, void** kernel) {
    return Guard(api, [&] { *kernel = new Kernel(Of(self), api, info); });
  };
  KernelComputeV2 = [](void* kernel, OrtKernelContext* context) {
    const auto& self = *static_cast<const Kernel*>(kernel);
    return Guard(self.api(), [&] { self.Run(context); });
  };
  KernelDestroy = [](void* kernel) { delete static_cast<Kernel*>(kernel); };
  InferOutputShapeFn = InferShape;
}

// Never destroyed, as in adapter.cc.
struct Registration {
  const OrtApi* api;
  std::vector<Op> ops;
  OrtCustomOpDomain* domain = nullptr;

  explicit Registration(const OrtApi* api) : api(api) {
    for (auto id_type : {ONNX_TENSOR_ELEMENT_DATA_TYPE_INT32, ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64})
      for (auto type : {ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16, ONNX_TENSOR_ELEMENT_DATA_TYPE_BFLOAT16})
        ops.emplace_back(api, type, id_type);
    OrtStatus* status = api->CreateCustomOpDomain("quantmoe", &domain);
    for (const Op& op : ops)
      if (!status) status = api->CustomOpDomain_Add(domain, &op);
    if (!status) return;
    api->ReleaseStatus(status);
    throw std::runtime_error("quantmoe: ONNX Runtime refuses the operator domain");
  }
};

}  // namespace
}  // namespace quantmoe

extern "C" QM_API OrtStatus* ORT_API_CALL RegisterCustomOps(OrtSessionOptions* options, const OrtApiBase* base) {
  using quantmoe::Registration;
  const OrtApi* api = base->GetApi(quantmoe::kOrtApi);
  if (!api) {
    const std::string message =
        std::string("quantmoe needs ONNX Runtime 1.21 or newer, found ") + base->GetVersionString();
    return base->GetApi(1)->CreateStatus(ORT_NOT_IMPLEMENTED, message.c_str());
  }
  OrtStatus* status = nullptr;
  OrtStatus* failure = quantmoe::Guard(api, [&] {
    static std::mutex mutex;
    static auto& all = *new std::list<Registration>;
    const std::lock_guard lock(mutex);
    auto r = std::find_if(all.begin(), all.end(), [&](const Registration& r) { return r.api == api; });
    if (r == all.end()) r = all.emplace(all.end(), api);
    status = api->AddCustomOpDomain(options, r->domain);
  });
  return failure ? failure : status;
}
