// ONNX Runtime's side of the custom-op interface, for tests/cuda/custom_op: the functions of OrtApi that the
// CUDA library calls, over plain memory. It stands in for a CUDA build of ONNX Runtime, which the tests' machines do
// not have.
#include <cuda_runtime_api.h>
#include <dlfcn.h>

#include <cstdlib>
#include <cstring>
#include <map>
#include <sstream>
#include <string>
#include <vector>

#include "onnxruntime_c_api.h"

struct OrtStatus {
  OrtErrorCode code;
  std::string text;
};
struct OrtMemoryInfo {
  int id;
};
struct OrtCustomOpDomain {
  std::vector<const OrtCustomOp*> ops;
};
struct OrtSessionOptions {
  std::vector<OrtCustomOpDomain*> domains;
  std::map<std::string, std::string> entries;
};
struct OrtValue {
  int64_t dims[4];
  int32_t rank, constant;
  void* data;
};
constexpr int kInputs = 10, kOutputs = 3;  // of the operator that has most
struct OrtKernelInfo {
  std::map<std::string, int64_t> ints;
  std::map<std::string, float> floats;
  std::map<std::string, std::string> strings;
  OrtValue inputs[kInputs];
  int32_t count = 0;
};
struct OrtKernelContext {
  OrtValue inputs[kInputs], outputs[kOutputs];
  void* stream;
};

namespace {

OrtApi api{};
OrtMemoryInfo memory{0};
OrtSessionOptions options;
std::string error, logged;
int live_scratch = 0;
bool on_device = true;

OrtStatus* new_status(const char* text) { return new OrtStatus{ORT_FAIL, text}; }
template <class Map, class T>
OrtStatus* get_attribute(const Map& map, const char* name, T* out) {
  const auto found = map.find(name);
  if (found == map.end()) return new_status("no such attribute");
  *out = found->second;
  return nullptr;
}
OrtStatus* copy_text(const std::string& text, char* out, size_t* size) {
  if (out) std::memcpy(out, text.c_str(), text.size() + 1);
  *size = text.size() + 1;
  return nullptr;
}
struct Allocator : OrtAllocator {
  Allocator() : OrtAllocator{} {
    version = ORT_API_VERSION;
    Info = [](const OrtAllocator*) -> const OrtMemoryInfo* { return &memory; };
    Free = [](OrtAllocator*, void* p) {
      live_scratch -= p != nullptr;
      on_device ? (void)cudaFree(p) : std::free(p);
    };
  }
} allocator;

// One long function: a table, an entry of OrtApi a statement.
void fill_api() {
  api.CreateStatus = [](OrtErrorCode code, const char* text) noexcept { return new OrtStatus{code, text}; };
  api.GetErrorMessage = [](const OrtStatus* s) noexcept { return s->text.c_str(); };
  api.ReleaseStatus = [](OrtStatus* s) noexcept { delete s; };
  api.CreateCustomOpDomain = [](const char* name, OrtCustomOpDomain** out) noexcept -> OrtStatus* {
    if (std::string(name) != "quantmoe") return new_status(name);
    *out = new OrtCustomOpDomain;
    return nullptr;
  };
  api.CustomOpDomain_Add = [](OrtCustomOpDomain* d, const OrtCustomOp* op) noexcept -> OrtStatus* {
    d->ops.push_back(op);
    return nullptr;
  };
  api.AddCustomOpDomain = [](OrtSessionOptions* o, OrtCustomOpDomain* d) noexcept -> OrtStatus* {
    o->domains.push_back(d);
    return nullptr;
  };
  api.HasSessionConfigEntry = [](const OrtSessionOptions* o, const char* key, int* out) noexcept -> OrtStatus* {
    *out = o->entries.count(key);
    return nullptr;
  };
  api.GetSessionConfigEntry = [](const OrtSessionOptions* o, const char* key, char* out, size_t* size) noexcept {
    return copy_text(o->entries.at(key), out, size);
  };
  api.AddSessionConfigEntry = [](OrtSessionOptions* o, const char* key, const char* value) noexcept -> OrtStatus* {
    o->entries[key] = value;
    return nullptr;
  };
  api.KernelInfo_GetNodeName = [](const OrtKernelInfo*, char* out, size_t* size) noexcept {
    return copy_text("moe", out, size);
  };
  api.KernelInfo_GetInputCount = [](const OrtKernelInfo* i, size_t* out) noexcept -> OrtStatus* {
    *out = i->count;
    return nullptr;
  };
  api.KernelInfo_GetInputName = [](const OrtKernelInfo*, size_t at, char* out, size_t* size) noexcept {
    return copy_text("input " + std::to_string(at), out, size);
  };
  api.HasValue = [](const OrtValue*, int* out) noexcept -> OrtStatus* {
    *out = 1;
    return nullptr;
  };
  api.KernelInfoGetAttribute_int64 = [](const OrtKernelInfo* i, const char* name, int64_t* out) noexcept {
    return get_attribute(i->ints, name, out);
  };
  api.KernelInfoGetAttribute_float = [](const OrtKernelInfo* i, const char* name, float* out) noexcept {
    return get_attribute(i->floats, name, out);
  };
  api.KernelInfoGetAttribute_string = [](const OrtKernelInfo* i, const char* name, char* out, size_t* size) noexcept {
    const auto found = i->strings.find(name);
    return found == i->strings.end() ? new_status("no such attribute") : copy_text(found->second, out, size);
  };
  api.KernelInfoGetConstantInput_tensor = [](const OrtKernelInfo* i, size_t at, int* constant,
                                             const OrtValue** out) noexcept -> OrtStatus* {
    *constant = i->inputs[at].constant;
    *out = *constant ? &i->inputs[at] : nullptr;
    return nullptr;
  };
  api.KernelInfoGetAllocator = [](const OrtKernelInfo*, OrtMemType, OrtAllocator** out) noexcept -> OrtStatus* {
    *out = &allocator;
    return nullptr;
  };
  api.ReleaseAllocator = [](OrtAllocator*) noexcept {};
  api.MemoryInfoGetId = [](const OrtMemoryInfo* m, int* id) noexcept -> OrtStatus* {
    *id = m->id;
    return nullptr;
  };
  // One session at a time: the options stand for its logger.
  api.KernelInfo_GetLogger = [](const OrtKernelInfo*, const OrtLogger** out) noexcept -> OrtStatus* {
    *out = reinterpret_cast<const OrtLogger*>(&options);
    return nullptr;
  };
  api.KernelContext_GetLogger = [](const OrtKernelContext*, const OrtLogger** out) noexcept -> OrtStatus* {
    *out = reinterpret_cast<const OrtLogger*>(&options);
    return nullptr;
  };
  api.Logger_LogMessage = [](const OrtLogger*, OrtLoggingLevel, const char* text, const ORTCHAR_T*, int,
                             const char*) noexcept -> OrtStatus* {
    logged = text;
    return nullptr;
  };
  // A value serves as its own type and shape.
  api.GetTensorTypeAndShape = [](const OrtValue* v, OrtTensorTypeAndShapeInfo** out) noexcept -> OrtStatus* {
    *out = reinterpret_cast<OrtTensorTypeAndShapeInfo*>(const_cast<OrtValue*>(v));
    return nullptr;
  };
  api.ReleaseTensorTypeAndShapeInfo = [](OrtTensorTypeAndShapeInfo*) noexcept {};
  api.GetDimensionsCount = [](const OrtTensorTypeAndShapeInfo* v, size_t* out) noexcept -> OrtStatus* {
    *out = reinterpret_cast<const OrtValue*>(v)->rank;
    return nullptr;
  };
  api.GetDimensions = [](const OrtTensorTypeAndShapeInfo* v, int64_t* out, size_t count) noexcept -> OrtStatus* {
    std::memcpy(out, reinterpret_cast<const OrtValue*>(v)->dims, 8 * count);
    return nullptr;
  };
  api.GetTensorMutableData = [](OrtValue* v, void** out) noexcept -> OrtStatus* {
    *out = v->data;
    return nullptr;
  };
  api.KernelContext_GetInput = [](const OrtKernelContext* c, size_t at, const OrtValue** out) noexcept -> OrtStatus* {
    *out = &c->inputs[at];
    return nullptr;
  };
  api.KernelContext_GetOutput = [](OrtKernelContext* c, size_t at, const int64_t* dims, size_t rank,
                                   OrtValue** out) noexcept -> OrtStatus* {
    OrtValue& output = c->outputs[at];
    if (rank != static_cast<size_t>(output.rank) || std::memcmp(dims, output.dims, 8 * rank))
      return new_status("output shape");
    *out = &output;
    return nullptr;
  };
  api.KernelContext_GetGPUComputeStream = [](const OrtKernelContext* c, void** out) noexcept -> OrtStatus* {
    *out = c->stream;
    return nullptr;
  };
  api.KernelContext_GetScratchBuffer = [](const OrtKernelContext* c, const OrtMemoryInfo* m, size_t bytes,
                                          void** out) noexcept -> OrtStatus* {
    if (m != &memory) return new_status("not the device's memory");
    if (!on_device) {
      *out = std::malloc(bytes);
      ++live_scratch;
      return nullptr;
    }
    if (cudaMalloc(out, bytes)) return new_status("cudaMalloc");
    // NaN: scratch that is read before it is written shows. On the op's stream, or it may come after the kernels.
    cudaMemsetAsync(*out, 0xff, bytes, static_cast<cudaStream_t>(c->stream));
    ++live_scratch;
    return nullptr;
  };
}

}  // namespace

extern "C" {

const char* driver_error() { return error.c_str(); }
static bool is_ok(OrtStatus* status) {
  error = status ? status->text : "";
  delete status;
  return error.empty();
}
// 0: scratch is host memory, for the fake GPU.
void driver_scratch_on_device(int32_t yes) { on_device = yes; }
int32_t driver_live_scratch() { return live_scratch; }

// Registers the library as a runtime would whose newest API is api_version, in a session with these entries, lines of
// key=value; returns the number of operators, -1 on failure.
int32_t driver_open(const char* path, uint32_t api_version, const char* entries) {
  fill_api();
  static uint32_t newest;
  newest = api_version;
  void* library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (!library) {
    error = dlerror();
    return -1;
  }
  static const OrtApiBase base{
      [](uint32_t version) noexcept -> const OrtApi* { return version <= newest ? &api : nullptr; },
      []() noexcept {
        static std::string version;
        version = "1." + std::to_string(newest);
        return version.c_str();
      }};
  options.domains.clear();
  options.entries.clear();
  std::istringstream lines(entries);
  for (std::string key, entry; std::getline(lines, key, '=') && std::getline(lines, entry);)
    options.entries[key] = entry;
  auto* entry =
      reinterpret_cast<OrtStatus* (*)(OrtSessionOptions*, const OrtApiBase*)>(dlsym(library, "RegisterCustomOps"));
  if (!is_ok(entry(&options, &base))) return -1;
  return static_cast<int32_t>(options.domains.at(0)->ops.size());
}

static const OrtCustomOp* op_at(int32_t op) { return options.domains.at(0)->ops.at(op); }
// which: 0 name, 1 provider.
const char* driver_name(int32_t op, int32_t which) {
  return which ? op_at(op)->GetExecutionProviderType(op_at(op)) : op_at(op)->GetName(op_at(op));
}
int32_t driver_type(int32_t op, int32_t input) {
  return input < 0 ? op_at(op)->GetOutputType(op_at(op), 0) : op_at(op)->GetInputType(op_at(op), input);
}

// 1: ONNX Runtime leaves this input of the operator in host memory.
int32_t driver_in_host_memory(int32_t op, int32_t input) {
  return op_at(op)->GetInputMemoryType(op_at(op), input) == OrtMemTypeCPUInput;
}
// What the library logged last.
const char* driver_logged() { return logged.c_str(); }

OrtKernelInfo* driver_info() { return new OrtKernelInfo{}; }
void driver_set_int(OrtKernelInfo* i, const char* name, int64_t value) { i->ints[name] = value; }
void driver_set_float(OrtKernelInfo* i, const char* name, float value) { i->floats[name] = value; }
void driver_set_string(OrtKernelInfo* i, const char* name, const char* value) { i->strings[name] = value; }
// The node has so many inputs; 0: the operator's required ones, and messages have their names.
void driver_set_count(OrtKernelInfo* i, int32_t count) { i->count = count; }
void* driver_create(int32_t op, OrtKernelInfo* info, const OrtValue* inputs) {
  std::memcpy(info->inputs, inputs, sizeof(info->inputs));
  void* kernel = nullptr;
  const bool took = is_ok(op_at(op)->CreateKernelV2(op_at(op), &api, info, &kernel));
  delete info;
  return took ? kernel : nullptr;
}
// tensors: room for kInputs inputs, then for kOutputs outputs.
int32_t driver_run(int32_t op, void* kernel, const OrtValue* tensors, void* stream) {
  OrtKernelContext context{};
  std::memcpy(context.inputs, tensors, sizeof(context.inputs));
  std::memcpy(context.outputs, tensors + kInputs, sizeof(context.outputs));
  context.stream = stream;
  return is_ok(op_at(op)->KernelComputeV2(kernel, &context)) ? 0 : -1;
}
void driver_destroy(int32_t op, void* kernel) { op_at(op)->KernelDestroy(kernel); }

}  // extern "C"
