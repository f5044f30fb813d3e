// QuantMoE as an ONNX Runtime custom operator on the CPU: a thin adapter over the C ABI of quant_moe.h.
//
// One explicitly typed OrtCustomOp per (hidden_states type, topk_ids type), all under one name; inputs and attributes
// come from op.def. What can be checked is checked when a session is created. Failures are exceptions in here; Guard
// turns them into an OrtStatus, so that none leaves this library.
#if defined(__linux__)
#include <sys/mman.h>
#endif

#include <algorithm>
#include <cstdlib>
#include <list>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
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
enum Input : size_t {
#define QM_INPUT(op, name, type) name,
#include "op.def"
};
constexpr struct {
  const char* name;
  int type;
} kInputs[] = {
#define QM_INPUT(op, name, type) {#name, type_##type},
#include "op.def"
};
constexpr int kOutputs[] = {
#define QM_OUTPUT(op, name, type) type_##type,
#include "op.def"
};

struct Op : OrtCustomOp {
  const OrtApi* api;
  ONNXTensorElementDataType float_type, id_type;
  qm_type type;

  Op(const OrtApi* api, ONNXTensorElementDataType float_type, qm_type type, ONNXTensorElementDataType id_type);
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
  ~Kernel() { api_->ReleaseMemoryInfo(memory_); }
  void Run(OrtKernelContext* context) const;
  const OrtApi* api() const { return api_; }

 private:
  [[noreturn]] void Fail(const std::string& what) const { throw std::invalid_argument(node_ + ": " + what); }
  void Check(OrtStatus* status, const std::string& what = "ONNX Runtime") const;
  Shape ShapeOf(const OrtValue* value) const;
  void* Data(const OrtValue* value) const;
  void ReadAttributes(const OrtKernelInfo* info);
  const void* Weight(const OrtKernelInfo* info, Input input, Shape& shape) const;

  const Op& op_;
  const OrtApi* api_;
  std::string node_ = "QuantMoE node";  // with its name, the beginning of every message
  qm_moe moe_{};
  const void *w13_, *w2_;
  int64_t local_experts_;
  // The session's pool may be smaller; a lane that gets no thread of its own finds no work left.
  int lanes_ = static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
  OrtMemoryInfo* memory_ = nullptr;
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
  size_t count;
  const qm_attribute* attributes = qm_moe_attributes(&count);
  for (const qm_attribute* a = attributes; a != attributes + count; ++a) {
    const std::string missing = std::string("attribute ") + a->name + " of kind " + a->kind + " is required";
    int status;
    if (a->kind == 'i') {
      int64_t value;
      Check(api_->KernelInfoGetAttribute_int64(info, a->name, &value), missing);
      status = qm_moe_set_int(&moe_, a->name, value, error);
    } else if (a->kind == 'f') {
      float value;
      Check(api_->KernelInfoGetAttribute_float(info, a->name, &value), missing);
      status = qm_moe_set_float(&moe_, a->name, value, error);
    } else {
      size_t size = 0;
      Check(api_->KernelInfoGetAttribute_string(info, a->name, nullptr, &size), missing);
      std::string value(size, '\0');
      Check(api_->KernelInfoGetAttribute_string(info, a->name, value.data(), &size), missing);
      status = qm_moe_set_string(&moe_, a->name, value.c_str(), error);
    }
    if (status) Fail(error);
  }
}

// Where ONNX Runtime keeps the packed tensor for the life of the session: its memory-mapped external data.
const void* Kernel::Weight(const OrtKernelInfo* info, Input input, Shape& shape) const {
  const std::string name = kInputs[input].name;
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

Kernel::Kernel(const Op& op, const OrtApi* api, const OrtKernelInfo* info) : op_(op), api_(api) {
  size_t size = 0;
  Check(api->KernelInfo_GetNodeName(info, nullptr, &size));
  std::string name(size, '\0');
  Check(api->KernelInfo_GetNodeName(info, name.data(), &size));
  node_ += std::string(" \"") + name.c_str() + "\"";

  ReadAttributes(info);
  Shape w13_shape, w2_shape;
  w13_ = Weight(info, w13, w13_shape);
  w2_ = Weight(info, w2, w2_shape);
  local_experts_ = w13_shape[0];
  char error[QM_ERROR_SIZE];
  if (qm_moe_validate(&moe_, w13_shape.data(), w2_shape.data(), error)) Fail(error);
  Prefault(w13_, static_cast<size_t>(w13_shape[0] * w13_shape[1]) * 4);
  Prefault(w2_, static_cast<size_t>(w2_shape[0] * w2_shape[1]) * 4);
  Check(api->CreateCpuMemoryInfo(OrtArenaAllocator, OrtMemTypeDefault, &memory_));
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

void Kernel::Run(OrtKernelContext* context) const {
  const OrtValue* inputs[std::size(kInputs)];
  for (Input i : {hidden_states, topk_ids, topk_weights}) Check(api_->KernelContext_GetInput(context, i, &inputs[i]));
  const Shape x = ShapeOf(inputs[hidden_states]);
  const Shape ids = ShapeOf(inputs[topk_ids]), weights = ShapeOf(inputs[topk_weights]);
  if (x.empty() || x.back() != moe_.hidden_size)
    Fail("hidden_states has shape " + Text(x) + ", expected [.., hidden_size " + std::to_string(moe_.hidden_size) +
         "]");
  if (ids.size() != x.size() || !std::equal(x.begin(), x.end() - 1, ids.begin()) || ids.back() < 1)
    Fail("topk_ids has shape " + Text(ids) + ", expected [.., top_k] and the sizes before it of hidden_states " +
         Text(x));
  if (weights != ids) Fail("topk_weights has shape " + Text(weights) + ", expected that of topk_ids " + Text(ids));

  OrtValue* output;
  Check(api_->KernelContext_GetOutput(context, 0, x.data(), x.size(), &output));
  qm_moe_call call{};
  call.tokens = 1;
  for (size_t i = 0; i + 1 < x.size(); ++i) call.tokens *= x[i];
  if (call.tokens == 0) return;
  Pool pool{api_, context};
  call.type = op_.type;
  call.id_bytes = op_.id_type == ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64 ? 8 : 4;
  call.top_k = ids.back();
  call.local_experts = local_experts_;
  call.hidden_states = Data(inputs[hidden_states]);
  call.topk_ids = Data(inputs[topk_ids]);
  call.topk_weights = static_cast<const float*>(Data(inputs[topk_weights]));
  call.w13 = w13_;
  call.w2 = w2_;
  call.output = Data(output);
  call.lanes = lanes_;
  call.parallel_for = Pool::ParallelFor;
  call.parallel_context = &pool;

  OrtAllocator* allocator;
  Check(api_->KernelContext_GetAllocator(context, memory_, &allocator));
  const std::unique_ptr<OrtAllocator, void (*)(OrtAllocator*)> owned(allocator, api_->ReleaseAllocator);
  size_t size = qm_moe_workspace(&moe_, &call) + 63;
  const auto release = [allocator](void* p) { allocator->Free(allocator, p); };
  const std::unique_ptr<void, decltype(release)> scratch(allocator->Alloc(allocator, size), release);
  void* aligned = scratch.get();
  if (!std::align(64, size - 63, aligned, size))
    Fail("no memory for a workspace of " + std::to_string(size) + " bytes");
  call.workspace = aligned;
  char error[QM_ERROR_SIZE];
  const int status = qm_moe_run(&moe_, &call, error);
  Check(pool.status);
  if (status) Fail(error);
}

// The output has the shape of hidden_states; rank 0 stands for an unknown shape here.
OrtStatus* InferShape(const OrtCustomOp* self, OrtShapeInferContext* context) {
  const OrtApi* api = Op::Of(self).api;
  OrtTensorTypeAndShapeInfo* info;  // belongs to the context
  size_t rank = 0;
  OrtStatus* status = api->ShapeInferContext_GetInputTypeShape(context, hidden_states, &info);
  if (!status) status = api->GetDimensionsCount(info, &rank);
  return status || !rank ? status : api->ShapeInferContext_SetOutputTypeShape(context, 0, info);
}

Op::Op(const OrtApi* api, ONNXTensorElementDataType float_type, qm_type type, ONNXTensorElementDataType id_type)
    : OrtCustomOp{}, api(api), float_type(float_type), id_type(id_type), type(type) {
  version = kOrtApi;
  GetName = [](const OrtCustomOp*) { return "QuantMoE"; };
  GetExecutionProviderType = [](const OrtCustomOp*) -> const char* { return nullptr; };  // the CPU
  GetInputTypeCount = [](const OrtCustomOp*) { return std::size(kInputs); };
  GetInputType = [](const OrtCustomOp* self, size_t i) { return Of(self).Resolve(kInputs[i].type); };
  GetInputCharacteristic = [](const OrtCustomOp*, size_t) { return INPUT_OUTPUT_REQUIRED; };
  GetInputMemoryType = [](const OrtCustomOp*, size_t) { return OrtMemTypeDefault; };
  GetOutputTypeCount = [](const OrtCustomOp*) { return std::size(kOutputs); };
  GetOutputType = [](const OrtCustomOp* self, size_t i) { return Of(self).Resolve(kOutputs[i]); };
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

// What the sessions of one ONNX Runtime refer to; a process may hold several runtimes. Never destroyed: a session may
// still run on another thread while the process exits, and the library stays loaded (nodelete, CMakeLists.txt).
struct Registration {
  const OrtApi* api;
  std::vector<Op> ops;
  OrtCustomOpDomain* domain = nullptr;

  explicit Registration(const OrtApi* api) : api(api) {
    for (auto id_type : {ONNX_TENSOR_ELEMENT_DATA_TYPE_INT32, ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64}) {
      ops.emplace_back(api, ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT, QM_F32, id_type);
      ops.emplace_back(api, ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16, QM_F16, id_type);
      ops.emplace_back(api, ONNX_TENSOR_ELEMENT_DATA_TYPE_BFLOAT16, QM_BF16, id_type);
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
