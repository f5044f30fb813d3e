// The operators as ONNX Runtime custom operators on the CPU: a thin adapter over the C ABI of quant_moe.h.
//
// One explicitly typed OrtCustomOp per operator, T and (QuantMoE) I, all of an operator's under one name; inputs and
// attributes come from op.def. What can be checked is checked when a session is created. Failures are exceptions in
// here; Guard turns them into an OrtStatus, so that none leaves this library.
#if defined(__linux__)
#include <sys/mman.h>
#endif

#include <algorithm>
#include <cstdlib>
#include <list>
#include <memory>
#include <mutex>
#include <numeric>
#include <stdexcept>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "onnxruntime_c_api.h"
#include "quantmoe/quant_moe.h"

namespace quantmoe {
namespace {

// ONNX Runtime 1.21. Later runtimes hand out this API and accept its OrtCustomOp, so one binary serves them all.
constexpr uint32_t kOrtApi = 21;

// The types of op.def: T and I are those of one OrtCustomOp.
enum {
  type_T = -1,
  type_I = -2,
  type_float = ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT,
  type_int32 = ONNX_TENSOR_ELEMENT_DATA_TYPE_INT32
};
struct Slot {
  const char* op;
  const char* name;
  int type;
};
constexpr Slot kInputs[] = {
#define QM_INPUT(op, name, type) {#op, #name, type_##type},
#include "op.def"
};
constexpr Slot kOutputs[] = {
#define QM_OUTPUT(op, name, type) {#op, #name, type_##type},
#include "op.def"
};
// Positions of an operator's inputs, as QuantMoE_w13 and so on.
template <size_t n>
constexpr size_t position(const Slot (&slots)[n], std::string_view op, std::string_view name) {
  size_t at = 0;
  for (const Slot& slot : slots) {
    if (op != slot.op) continue;
    if (name == slot.name) return at;
    ++at;
  }
  return at;  // name "": how many
}
#define QM_INPUT(op, name, type) constexpr size_t op##_##name = position(kInputs, #op, #name);
#include "op.def"
template <size_t n>
const Slot& at(const Slot (&slots)[n], std::string_view op, size_t index) {
  const Slot* first = std::find_if(slots, slots + n, [&](const Slot& slot) { return op == slot.op; });
  return first[index];  // op.def lists an operator's together
}

struct Op : OrtCustomOp {
  const OrtApi* api;
  const char* name;
  ONNXTensorElementDataType float_type, id_type;
  qm_type type;

  Op(const OrtApi* api, const char* name, ONNXTensorElementDataType float_type, qm_type type,
     ONNXTensorElementDataType id_type);
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

// Reads the mapped pages in now instead of at first use, when QUANTMOE_PREFAULT is 1. The kernel populates the page
// table too (Linux 5.14); elsewhere a byte of each page is touched.
void Prefault(const void* data, size_t bytes) {
  const char* wanted = std::getenv("QUANTMOE_PREFAULT");
  if (!wanted || std::string(wanted) != "1") return;
  constexpr uintptr_t kPage = 4096;
#if defined(__linux__)
  constexpr int kPopulateRead = 22;  // MADV_POPULATE_READ, newer than some headers
  const uintptr_t begin = reinterpret_cast<uintptr_t>(data) / kPage * kPage;
  if (madvise(reinterpret_cast<void*>(begin), reinterpret_cast<uintptr_t>(data) + bytes - begin, kPopulateRead) == 0)
    return;
#endif
  for (size_t at = 0; at < bytes; at += kPage) (void)static_cast<const volatile char*>(data)[at];
}

// What a node of any of the operators does; a subclass each.
class Kernel {
 public:
  virtual ~Kernel() { api_->ReleaseMemoryInfo(memory_); }
  virtual void Run(OrtKernelContext* context) const = 0;
  const OrtApi* api() const { return api_; }

 protected:
  Kernel(const Op& op, const OrtApi* api, const OrtKernelInfo* info);
  [[noreturn]] void Fail(const std::string& what) const { throw std::invalid_argument(node_ + ": " + what); }
  void Check(OrtStatus* status, const std::string& what = "ONNX Runtime") const;
  Shape ShapeOf(const OrtValue* value) const;
  void* Data(const OrtValue* value) const;
  const OrtValue* Input(const OrtKernelContext* context, size_t index) const;
  OrtValue* Output(OrtKernelContext* context, size_t index, const Shape& shape) const;
  void ReadAttributes(const OrtKernelInfo* info, void* attributes) const;
  const void* Weight(const OrtKernelInfo* info, size_t input, Shape& shape) const;
  template <class Call, class Size, class Body>
  void WithPool(OrtKernelContext* context, Call& call, const Size& workspace, const Body& run) const;

  const Op& op_;
  const OrtApi* api_;
  std::string node_;  // the operator and the node's name, the beginning of every message
  // The session's pool may be smaller; a lane that gets no thread of its own finds no work left.
  int lanes_ = static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
  OrtMemoryInfo* memory_ = nullptr;
};

Kernel::Kernel(const Op& op, const OrtApi* api, const OrtKernelInfo* info)
    : op_(op), api_(api), node_(std::string(op.name) + " node") {
  size_t size = 0;
  Check(api->KernelInfo_GetNodeName(info, nullptr, &size));
  std::string name(size, '\0');
  Check(api->KernelInfo_GetNodeName(info, name.data(), &size));
  node_ += std::string(" \"") + name.c_str() + "\"";
  Check(api->CreateCpuMemoryInfo(OrtArenaAllocator, OrtMemTypeDefault, &memory_));
}

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

const OrtValue* Kernel::Input(const OrtKernelContext* context, size_t index) const {
  const OrtValue* value;
  Check(api_->KernelContext_GetInput(context, index, &value));
  return value;
}

OrtValue* Kernel::Output(OrtKernelContext* context, size_t index, const Shape& shape) const {
  OrtValue* value;
  Check(api_->KernelContext_GetOutput(context, index, shape.data(), shape.size(), &value));
  return value;
}

void Kernel::ReadAttributes(const OrtKernelInfo* info, void* attributes) const {
  char error[QM_ERROR_SIZE];
  for (size_t i = 0; const qm_attribute* a = qm_attribute_at(op_.name, i); ++i) {
    const std::string missing = std::string("attribute ") + a->name + " of kind " + a->kind + " is required";
    int status;
    if (a->kind == 'i') {
      int64_t value;
      Check(api_->KernelInfoGetAttribute_int64(info, a->name, &value), missing);
      status = qm_set_int(op_.name, attributes, a->name, value, error);
    } else if (a->kind == 'f') {
      float value;
      Check(api_->KernelInfoGetAttribute_float(info, a->name, &value), missing);
      status = qm_set_float(op_.name, attributes, a->name, value, error);
    } else {
      size_t size = 0;
      Check(api_->KernelInfoGetAttribute_string(info, a->name, nullptr, &size), missing);
      std::string value(size, '\0');
      Check(api_->KernelInfoGetAttribute_string(info, a->name, value.data(), &size), missing);
      status = qm_set_string(op_.name, attributes, a->name, value.c_str(), error);
    }
    if (status) Fail(error);
  }
}

// Where ONNX Runtime keeps the packed tensor for the life of the session: its memory-mapped external data.
const void* Kernel::Weight(const OrtKernelInfo* info, size_t input, Shape& shape) const {
  const std::string name = at(kInputs, op_.name, input).name;
  int constant = 0;
  const OrtValue* value = nullptr;
  Check(api_->KernelInfoGetConstantInput_tensor(info, input, &constant, &value), name);
  if (!constant || !value)
    Fail(name + " is computed or fed at run time, expected an initializer that is not a graph input");
  shape = ShapeOf(value);
  if (shape.size() != 2)
    Fail(name + " has shape " + Text(shape) + ", expected [experts, int32 words of a packed expert]");
  const void* data = Data(value);
  if (reinterpret_cast<uintptr_t>(data) % 64)
    Fail(name + " is not 64-byte aligned in memory, expected external data at an offset that is a multiple of 64 KiB");
  return data;
}

// The session's own threads. A batch count of 0 hands out single indices dynamically; the calling thread takes part.
struct Pool {
  const OrtApi* api;
  const OrtKernelContext* context;
  OrtStatus* status = nullptr;

  static void ParallelFor(void* self, qm_task task, void* arg, size_t count) {
    auto& pool = *static_cast<Pool*>(self);
    if (!pool.status) pool.status = pool.api->KernelContext_ParallelFor(pool.context, task, count, 0, arg);
  }
};

// Completes a call with the session's threads and a workspace of workspace() bytes, and makes it.
template <class Call, class Size, class Body>
void Kernel::WithPool(OrtKernelContext* context, Call& call, const Size& workspace, const Body& run) const {
  Pool pool{api_, context};
  call.lanes = lanes_;
  call.parallel_for = Pool::ParallelFor;
  call.parallel_context = &pool;

  OrtAllocator* allocator;
  Check(api_->KernelContext_GetAllocator(context, memory_, &allocator));
  const std::unique_ptr<OrtAllocator, void (*)(OrtAllocator*)> owned(allocator, api_->ReleaseAllocator);
  size_t size = workspace() + 63;
  const auto release = [allocator](void* p) { allocator->Free(allocator, p); };
  const std::unique_ptr<void, decltype(release)> scratch(allocator->Alloc(allocator, size), release);
  void* aligned = scratch.get();
  if (!std::align(64, size - 63, aligned, size))
    Fail("no memory for a workspace of " + std::to_string(size) + " bytes");
  call.workspace = aligned;
  char error[QM_ERROR_SIZE];
  const int status = run(error);
  Check(pool.status);
  if (status) Fail(error);
}

int64_t Rows(const Shape& shape) {
  return std::accumulate(shape.begin(), shape.end() - 1, int64_t{1}, std::multiplies<>());
}

class MoEKernel : public Kernel {
 public:
  MoEKernel(const Op& op, const OrtApi* api, const OrtKernelInfo* info) : Kernel(op, api, info) {
    ReadAttributes(info, &moe_);
    Shape w13_shape, w2_shape;
    w13_ = Weight(info, QuantMoE_w13, w13_shape);
    w2_ = Weight(info, QuantMoE_w2, w2_shape);
    local_experts_ = w13_shape[0];
    char error[QM_ERROR_SIZE];
    if (qm_moe_validate(&moe_, w13_shape.data(), w2_shape.data(), error)) Fail(error);
    Prefault(w13_, static_cast<size_t>(w13_shape[0] * w13_shape[1]) * 4);
    Prefault(w2_, static_cast<size_t>(w2_shape[0] * w2_shape[1]) * 4);
  }
  void Run(OrtKernelContext* context) const override;

 private:
  qm_moe moe_{};
  const void *w13_, *w2_;
  int64_t local_experts_;
};

void MoEKernel::Run(OrtKernelContext* context) const {
  const OrtValue* hidden_states = Input(context, QuantMoE_hidden_states);
  const OrtValue* topk_ids = Input(context, QuantMoE_topk_ids);
  const OrtValue* topk_weights = Input(context, QuantMoE_topk_weights);
  const Shape x = ShapeOf(hidden_states), ids = ShapeOf(topk_ids), weights = ShapeOf(topk_weights);
  if (x.empty() || x.back() != moe_.hidden_size)
    Fail("hidden_states has shape " + Text(x) + ", expected [.., hidden_size " + std::to_string(moe_.hidden_size) +
         "]");
  if (ids.size() != x.size() || !std::equal(x.begin(), x.end() - 1, ids.begin()) || ids.back() < 1)
    Fail("topk_ids has shape " + Text(ids) + ", expected [.., top_k] and the sizes before it of hidden_states " +
         Text(x));
  if (weights != ids) Fail("topk_weights has shape " + Text(weights) + ", expected that of topk_ids " + Text(ids));

  OrtValue* output = Output(context, 0, x);
  qm_moe_call call{};
  call.tokens = Rows(x);
  if (call.tokens == 0) return;
  call.type = op_.type;
  call.id_bytes = op_.id_type == ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64 ? 8 : 4;
  call.top_k = ids.back();
  call.local_experts = local_experts_;
  call.hidden_states = Data(hidden_states);
  call.topk_ids = Data(topk_ids);
  call.topk_weights = static_cast<const float*>(Data(topk_weights));
  call.w13 = w13_;
  call.w2 = w2_;
  call.output = Data(output);
  WithPool(
      context, call, [&] { return qm_moe_workspace(&moe_, &call); },
      [&](char* error) { return qm_moe_run(&moe_, &call, error); });
}

class LinearKernel : public Kernel {
 public:
  LinearKernel(const Op& op, const OrtApi* api, const OrtKernelInfo* info) : Kernel(op, api, info) {
    ReadAttributes(info, &linear_);
    Shape shape;
    w_ = Weight(info, QuantLinear_w, shape);
    char error[QM_ERROR_SIZE];
    if (qm_linear_validate(&linear_, shape.data(), error)) Fail(error);
  }
  void Run(OrtKernelContext* context) const override;

 private:
  qm_linear linear_{};
  const void* w_;
};

void LinearKernel::Run(OrtKernelContext* context) const {
  const OrtValue* x = Input(context, QuantLinear_x);
  Shape shape = ShapeOf(x);
  if (shape.empty() || shape.back() != linear_.in_features)
    Fail("x has shape " + Text(shape) + ", expected [.., in_features " + std::to_string(linear_.in_features) + "]");
  qm_linear_call call{};
  call.rows = Rows(shape);
  shape.back() = linear_.out_features;
  OrtValue* y = Output(context, 0, shape);
  if (call.rows == 0) return;
  call.type = op_.type;
  call.x = Data(x);
  call.w = w_;
  call.y = Data(y);
  WithPool(
      context, call, [&] { return qm_linear_workspace(&linear_, &call); },
      [&](char* error) { return qm_linear_run(&linear_, &call, error); });
}

class RoutingKernel : public Kernel {
 public:
  RoutingKernel(const Op& op, const OrtApi* api, const OrtKernelInfo* info) : Kernel(op, api, info) {
    ReadAttributes(info, &routing_);
    char error[QM_ERROR_SIZE];
    if (qm_routing_validate(&routing_, error)) Fail(error);
  }
  void Run(OrtKernelContext* context) const override;

 private:
  qm_routing routing_{};
};

void RoutingKernel::Run(OrtKernelContext* context) const {
  const OrtValue* logits = Input(context, MoERouting_logits);
  const OrtValue* bias = Input(context, MoERouting_correction_bias);
  Shape shape = ShapeOf(logits);
  const std::string experts = "num_experts " + std::to_string(routing_.num_experts) + "]";
  if (shape.empty() || shape.back() != routing_.num_experts)
    Fail("logits has shape " + Text(shape) + ", expected [.., " + experts);
  if (const Shape found = ShapeOf(bias); found != Shape{routing_.num_experts})
    Fail("correction_bias has shape " + Text(found) + ", expected [" + experts);
  qm_routing_call call{};
  call.tokens = Rows(shape);
  shape.back() = routing_.top_k;
  OrtValue *ids = Output(context, 0, shape), *weights = Output(context, 1, shape);
  if (call.tokens == 0) return;
  call.type = op_.type;
  call.logits = Data(logits);
  call.correction_bias = static_cast<const float*>(Data(bias));
  call.topk_ids = static_cast<int32_t*>(Data(ids));
  call.topk_weights = static_cast<float*>(Data(weights));
  WithPool(
      context, call, [&] { return qm_routing_workspace(&routing_, &call); },
      [&](char* error) { return qm_routing_run(&routing_, &call, error); });
}

// Outputs have the shape of the first input, but for the size of QuantLinear's and MoERouting's last dimension; rank 0
// stands for an unknown shape here.
OrtStatus* InferShape(const OrtCustomOp* self, OrtShapeInferContext* context) {
  const Op& op = Op::Of(self);
  const OrtApi* api = op.api;
  OrtTensorTypeAndShapeInfo* info;  // belongs to the context
  size_t rank = 0;
  OrtStatus* status = api->ShapeInferContext_GetInputTypeShape(context, 0, &info);
  if (!status) status = api->GetDimensionsCount(info, &rank);
  if (status || !rank) return status;
  const char* last = op.name == std::string_view("QuantLinear")  ? "out_features"
                     : op.name == std::string_view("MoERouting") ? "top_k"
                                                                 : nullptr;
  if (last) {
    const OrtOpAttr* attribute;
    int64_t size;
    size_t length;
    status = api->ShapeInferContext_GetAttribute(context, last, &attribute);
    if (!status) status = api->ReadOpAttr(attribute, ORT_OP_ATTR_INT, &size, sizeof size, &length);
    std::vector<int64_t> shape(rank);
    std::vector<const char*> symbols(rank);
    if (!status) status = api->GetDimensions(info, shape.data(), rank);
    if (!status) status = api->GetSymbolicDimensions(info, symbols.data(), rank);
    if (status) return status;
    for (size_t i = 0; i + 1 < rank; ++i)
      if (shape[i] < 0 && !*symbols[i]) return nullptr;  // a size without a name would be taken for the number -1
    shape.back() = size;
    symbols.back() = "";
    OrtTensorTypeAndShapeInfo* changed;
    if (OrtStatus* failed = api->CreateTensorTypeAndShapeInfo(&changed)) return failed;
    status = api->SetDimensions(changed, shape.data(), rank);
    if (!status) status = api->SetSymbolicDimensions(changed, symbols.data(), rank);
    ONNXTensorElementDataType input_type;  // ONNX Runtime asks the first of an operator's variants for all of them
    if (!status) status = api->GetTensorElementType(info, &input_type);
    for (size_t i = 0; i < position(kOutputs, op.name, "") && !status; ++i) {
      const int type = at(kOutputs, op.name, i).type;
      status = api->SetTensorElementType(changed, type == type_T ? input_type : op.Resolve(type));
      if (!status) status = api->ShapeInferContext_SetOutputTypeShape(context, i, changed);
    }
    api->ReleaseTensorTypeAndShapeInfo(changed);
    return status;
  }
  return api->ShapeInferContext_SetOutputTypeShape(context, 0, info);
}

Op::Op(const OrtApi* api, const char* name, ONNXTensorElementDataType float_type, qm_type type,
       ONNXTensorElementDataType id_type)
    : OrtCustomOp{}, api(api), name(name), float_type(float_type), id_type(id_type), type(type) {
  version = kOrtApi;
  GetName = [](const OrtCustomOp* self) { return Of(self).name; };
  GetExecutionProviderType = [](const OrtCustomOp*) -> const char* { return nullptr; };  // the CPU
  GetInputTypeCount = [](const OrtCustomOp* self) { return position(kInputs, Of(self).name, ""); };
  GetInputType = [](const OrtCustomOp* self, size_t i) { return Of(self).Resolve(at(kInputs, Of(self).name, i).type); };
  GetInputCharacteristic = [](const OrtCustomOp*, size_t) { return INPUT_OUTPUT_REQUIRED; };
  GetInputMemoryType = [](const OrtCustomOp*, size_t) { return OrtMemTypeDefault; };
  GetOutputTypeCount = [](const OrtCustomOp* self) { return position(kOutputs, Of(self).name, ""); };
  GetOutputType = [](const OrtCustomOp* self, size_t i) {
    return Of(self).Resolve(at(kOutputs, Of(self).name, i).type);
  };
  GetOutputCharacteristic = [](const OrtCustomOp*, size_t) { return INPUT_OUTPUT_REQUIRED; };
  GetStartVersion = GetEndVersion = [](const OrtCustomOp*) { return 1; };
  CreateKernelV2 = [](const OrtCustomOp* self, const OrtApi* api, const OrtKernelInfo* info, void** kernel) {
    return Guard(api, [&] {
      const Op& op = Of(self);
      const std::string_view name = op.name;
      Kernel* made;
      if (name == "QuantLinear")
        made = new LinearKernel(op, api, info);
      else if (name == "MoERouting")
        made = new RoutingKernel(op, api, info);
      else
        made = new MoEKernel(op, api, info);
      *kernel = made;
    });
  };
  KernelComputeV2 = [](void* kernel, OrtKernelContext* context) {
    const auto& self = *static_cast<const Kernel*>(kernel);
    return Guard(self.api(), [&] { self.Run(context); });
  };
  KernelDestroy = [](void* kernel) { delete static_cast<Kernel*>(kernel); };
  InferOutputShapeFn = InferShape;
}

// What the sessions of one ONNX Runtime refer to; a process may hold several runtimes. Never destroyed: a session may
// still run on another thread while the process exits, and the library stays loaded (nodelete, CMakeLists.txt).
struct Registration {
  const OrtApi* api;
  std::vector<Op> ops;
  OrtCustomOpDomain* domain = nullptr;

  explicit Registration(const OrtApi* api) : api(api) {
    constexpr auto kId32 = ONNX_TENSOR_ELEMENT_DATA_TYPE_INT32, kId64 = ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64;
    const std::pair<ONNXTensorElementDataType, qm_type> floats[] = {{ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT, QM_F32},
                                                                    {ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16, QM_F16},
                                                                    {ONNX_TENSOR_ELEMENT_DATA_TYPE_BFLOAT16, QM_BF16}};
    for (const auto& [onnx, type] : floats) {
      for (auto id_type : {kId32, kId64}) ops.emplace_back(api, "QuantMoE", onnx, type, id_type);
      for (const char* name : {"QuantLinear", "MoERouting"}) ops.emplace_back(api, name, onnx, type, kId32);
    }
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
