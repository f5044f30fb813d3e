// TensorRT's side of the plug-in interface, for tests/cuda/plugin: opens the library as TensorRT does,
// hands it fields and tensors, keeps what it logs. A plug-in's calls need no TensorRT and, but for enqueue, no GPU.
#include <cuda_runtime_api.h>
#include <dlfcn.h>

#include <algorithm>
#include <cstring>
#include <deque>
#include <string>
#include <type_traits>
#include <vector>

#include "NvInferRuntime.h"
#include "core/slots.h"

using namespace nvinfer1;

extern "C" int32_t driver_memory(int32_t allocations);  // fake_gpu.cc

namespace {

constexpr int kOperators = 0
#define QM_OP(op, name, version) +1
#include "op.def"
    ;
// The most that an operator has.
constexpr int kTensors = std::max({
#define QM_OP(op, name, version) \
  quantmoe::Slots(quantmoe::kInputs, #op).count + quantmoe::Slots(quantmoe::kOutputs, #op).count,
#include "op.def"
});
int32_t inputs = 5, outputs = 1;
IPluginCreatorInterface* const* creators = nullptr;

std::string log_text;
int32_t version = 0;

void keep_message(ILogger::Severity severity, const char* text) {
  const int32_t left = driver_memory(-1);
  log_text += std::to_string(static_cast<int>(severity)) + " " + text + "\n";
  driver_memory(left);
}
struct FakeLogger : ILogger {
  void log(Severity severity, const char* text) noexcept override { keep_message(severity, text); }
} logger;
struct Finder : ILoggerFinder {
  ILogger* findLogger() override { return &logger; }
} finder;
// As TensorRT 10 has them.
struct FakePlainLogger {
  virtual void log(ILogger::Severity severity, const char* text) noexcept { keep_message(severity, text); }
} plain_logger;
struct PlainFinder {
  virtual FakePlainLogger* findLogger() { return &plain_logger; }
} plain_finder;

// The global registry, if the test asks for one. Its tables are those of IPluginRegistry in NvInferRuntimeCommon.h
// of 10.6 (plain) and 11; what it does is what 10.6.0 and TensorRT-RTX 1.7.1 were seen to do with the same calls.
struct PlainHead {
  virtual bool registerV2(void*, const char*) noexcept { return false; }
  virtual void* const* creatorsV2(int32_t* count) const noexcept { return *count = 0, nullptr; }
  virtual void* creatorV2(const char*, const char*, const char*) noexcept { return nullptr; }
  virtual ~PlainHead() = default;
  virtual void setErrorRecorder(IErrorRecorder*) noexcept {}
  virtual IErrorRecorder* getErrorRecorder() const noexcept { return nullptr; }
  virtual bool deregisterV2(const void*) noexcept { return false; }
};
struct VersionedHead {
  virtual ~VersionedHead() = default;
  virtual void setErrorRecorder(IErrorRecorder*) noexcept {}
  virtual IErrorRecorder* getErrorRecorder() const noexcept { return nullptr; }
};
std::vector<IPluginCreatorInterface*> registered, of_libraries;
const char* name_of(const IPluginCreatorInterface* creator) {
  return static_cast<IPluginCreatorV3One*>(const_cast<IPluginCreatorInterface*>(creator))->getPluginName();
}
template <class Head>
struct FakeRegistry : Head {
  virtual bool isParentSearchEnabled() const { return true; }
  virtual void setParentSearchEnabled(bool) {}
  virtual void* loadLibrary(const char* path) noexcept {
    void* library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (!library) return nullptr;
    reinterpret_cast<void (*)(void*)>(dlsym(library, "setLoggerFinder"))(
        std::is_same_v<Head, PlainHead> ? static_cast<void*>(&plain_finder) : &finder);
    const auto creators =
        reinterpret_cast<IPluginCreatorInterface* const* (*)(int32_t&)>(dlsym(library, "getCreators"));
    int32_t count = 0;
    IPluginCreatorInterface* const* found = creators(count);
    if (!count) return nullptr;
    for (int32_t i = 0; i < count; ++i)
      if (getCreator(name_of(found[i]), "1", "")) {
        keep_message(ILogger::Severity::kERROR, "Cannot register the library as a plugin creator exists already.");
        return nullptr;
      }
    for (int32_t i = 0; i < count; ++i) registered.push_back(found[i]), of_libraries.push_back(found[i]);
    return library;
  }
  virtual void deregisterLibrary(void*) noexcept { registered.clear(), of_libraries.clear(); }
  virtual bool registerCreator(IPluginCreatorInterface& creator, const char*) noexcept {
    if (getCreator(name_of(&creator), "1", "")) {
      keep_message(ILogger::Severity::kERROR, "A plugin creator is registered already.");
      return false;
    }
    registered.push_back(&creator);
    return true;
  }
  virtual IPluginCreatorInterface* const* getAllCreators(int32_t* count) const noexcept {
    *count = static_cast<int32_t>(registered.size());
    return registered.data();
  }
  virtual IPluginCreatorInterface* getCreator(const char* name, const char*, const char*) noexcept {
    for (IPluginCreatorInterface* creator : registered)
      if (!std::strcmp(name_of(creator), name)) return creator;
    return nullptr;
  }
  virtual bool deregisterCreator(const IPluginCreatorInterface& creator) noexcept {
    if (std::count(of_libraries.begin(), of_libraries.end(), &creator)) {
      keep_message(ILogger::Severity::kERROR, "A plugin creator was loaded from a library and cannot be deregistered.");
      return false;
    }
    return std::erase(registered, &creator) == 1;
  }
};
FakeRegistry<PlainHead> plain_registry;
FakeRegistry<VersionedHead> versioned_registry;
void* global_registry = nullptr;

template <class T>
T* capability_of(void* plugin, PluginCapabilityType type) {
  return static_cast<T*>(static_cast<IPluginV3*>(plugin)->getCapabilityInterface(type));
}
// Sizes as TensorRT has them while it builds, here all known.
struct KnownSize : apiv::VDimensionExpr, IDimensionExpr {
  explicit KnownSize(int64_t value) : value(value) { mImpl = this; }
  bool isConstant() const override { return true; }
  int64_t getConstantValue() const override { return value; }
  bool isSizeTensor() const override { return false; }
  int64_t value;
};
struct Expressions : apiv::VExprBuilder {
  const IDimensionExpr* constant(int64_t value) override { return &sizes.emplace_back(value); }
  const IDimensionExpr* operation(DimensionOperation op, const IDimensionExpr& a, const IDimensionExpr& b) override {
    const int64_t x = a.getConstantValue(), y = b.getConstantValue();
    if (op == DimensionOperation::kMAX) return constant(std::max(x, y));
    if (op == DimensionOperation::kPROD) return constant(x * y);
    return op == DimensionOperation::kFLOOR_DIV ? constant(x / y) : nullptr;
  }
  const IDimensionExpr* declareSizeTensor(int32_t, const IDimensionExpr&, const IDimensionExpr&) override {
    return nullptr;
  }
  struct Builder : IExprBuilder {
    explicit Builder(apiv::VExprBuilder* to) { mImpl = to; }
  } builder{this};
  std::deque<KnownSize> sizes;
};
IPluginV3OneBuild* build_part(void* plugin) {
  return capability_of<IPluginV3OneBuild>(plugin, PluginCapabilityType::kBUILD);
}
IPluginV3OneRuntime* runtime_part(void* plugin) {
  return capability_of<IPluginV3OneRuntime>(plugin, PluginCapabilityType::kRUNTIME);
}

}  // namespace

extern "C" {

struct DriverField {
  const char* name;
  const void* data;
  int32_t type, length;
};
struct DriverTensor {
  int32_t type, format, rank;
  int64_t dims[4], most[4];
};

// What the plug-in asks of the library that the finder and the registry come from.
int32_t getInferLibVersion() { return version; }
IPluginRegistry* getPluginRegistry() noexcept { return static_cast<IPluginRegistry*>(global_registry); }
ILogger* getLogger() noexcept {
  return global_registry == &plain_registry ? reinterpret_cast<ILogger*>(&plain_logger) : &logger;
}

// Has a global registry from now on; see driver_open.
void driver_registry(int32_t as_version, int32_t plain) {
  version = as_version;
  global_registry = plain ? static_cast<void*>(&plain_registry) : &versioned_registry;
}
int32_t driver_registered() { return static_cast<int32_t>(registered.size()); }
void* driver_load(const char* path) {
  return global_registry == &plain_registry ? plain_registry.loadLibrary(path) : versioned_registry.loadLibrary(path);
}
void driver_unload(void* library) { versioned_registry.deregisterLibrary(library); }
// Creates a plug-in without attributes by the registered creator, which logs.
void driver_log_something() {
  auto* creator = static_cast<IPluginCreatorV3One*>(versioned_registry.getCreator("QuantMoE", "1", ""));
  const PluginFieldCollection none{};
  creator->createPlugin("experts", &none, TensorRTPhase::kBUILD);
}

// The creator of op.def's operator `index`; the functions below then take as many tensors.
void* driver_select(int32_t index, int32_t input_count, int32_t output_count) {
  inputs = input_count, outputs = output_count;
  return static_cast<IPluginCreatorV3One*>(creators[index]);
}
// as_version: that of the TensorRT to play, 0 for none; plain: its loggers have TensorRT 10's tables. Returns the
// creator.
// path "": the plug-in in here.
void* driver_open(const char* path, int32_t as_version, int32_t plain) {
  Dl_info here{};
  if (!*path) dladdr(reinterpret_cast<const void*>(&driver_memory), &here);
  void* library = dlopen(*path ? path : here.dli_fname, RTLD_NOW | RTLD_LOCAL);
  if (!library) {
    log_text = dlerror();
    return nullptr;
  }
  version = as_version;
  reinterpret_cast<void (*)(void*)>(dlsym(library, "setLoggerFinder"))(plain ? static_cast<void*>(&plain_finder)
                                                                             : &finder);
  int32_t count = 0;
  creators = reinterpret_cast<IPluginCreatorInterface* const* (*)(int32_t&)>(dlsym(library, "getCreators"))(count);
  for (int32_t i = 0; i < count; ++i)
    if (std::strcmp(creators[i]->getInterfaceInfo().kind, "PLUGIN CREATOR_V3ONE")) return nullptr;
  return count == kOperators ? driver_select(0, 5, 1) : nullptr;
}
const char* driver_log() { return log_text.c_str(); }
void driver_clear() { log_text.clear(); }
const char* driver_name(void* creator, int32_t which) {
  auto* c = static_cast<IPluginCreatorV3One*>(creator);
  return which == 0 ? c->getPluginName() : which == 1 ? c->getPluginVersion() : c->getPluginNamespace();
}

static int32_t copy_fields(const PluginFieldCollection* from, DriverField* to, int32_t room) {
  for (int32_t i = 0; i < std::min(room, from->nbFields); ++i) {
    const PluginField& f = from->fields[i];
    to[i] = {f.name, f.data, static_cast<int32_t>(f.type), f.length};
  }
  return from->nbFields;
}
int32_t driver_field_names(void* creator, DriverField* to, int32_t room) {
  return copy_fields(static_cast<IPluginCreatorV3One*>(creator)->getFieldNames(), to, room);
}
int32_t driver_serialize(void* plugin, DriverField* to, int32_t room) {
  return copy_fields(runtime_part(plugin)->getFieldsToSerialize(), to, room);
}
void* driver_create(void* creator, const char* layer, const DriverField* fields, int32_t count, int32_t phase) {
  PluginField given[64];
  for (int32_t i = 0; i < count; ++i)
    given[i] =
        PluginField(fields[i].name, fields[i].data, static_cast<PluginFieldType>(fields[i].type), fields[i].length);
  const PluginFieldCollection collection{count, given};
  return static_cast<IPluginCreatorV3One*>(creator)->createPlugin(layer, &collection,
                                                                  static_cast<TensorRTPhase>(phase));
}
void driver_destroy(void* plugin) { delete static_cast<IPluginV3*>(plugin); }
void* driver_attach(void* plugin) { return runtime_part(plugin)->attachToContext(nullptr); }

struct Tensors {
  PluginTensorDesc now[kTensors]{};
  DynamicPluginTensorDesc range[kTensors]{};
  explicit Tensors(const DriverTensor* from) {
    for (int i = 0; i < inputs + outputs; ++i) {
      now[i].type = static_cast<DataType>(from[i].type);
      now[i].format = static_cast<TensorFormat>(from[i].format);
      now[i].dims.nbDims = from[i].rank;
      Dims most = now[i].dims;
      std::copy_n(from[i].dims, 4, now[i].dims.d);
      std::copy_n(from[i].most, 4, most.d);
      range[i] = {now[i], most, most, most};
    }
  }
};
int32_t driver_supports(void* plugin, const DriverTensor* tensors, int32_t at) {
  return build_part(plugin)->supportsFormatCombination(at, Tensors(tensors).range, inputs, outputs);
}
int32_t driver_configure(void* plugin, const DriverTensor* tensors) {
  const Tensors t(tensors);
  return build_part(plugin)->configurePlugin(t.range, inputs, t.range + inputs, outputs);
}
size_t driver_workspace(void* plugin, const DriverTensor* tensors) {
  const Tensors t(tensors);
  return build_part(plugin)->getWorkspaceSize(t.range, inputs, t.range + inputs, outputs);
}
// The outputs' types and sizes by the plug-in, from those of the inputs in `tensors`, to what follows these there.
int32_t driver_outputs(void* plugin, DriverTensor* tensors) {
  if (build_part(plugin)->getNbOutputs() != outputs) return -1;
  Expressions expressions;
  DataType types[kTensors], of_outputs[kTensors];
  DimsExprs in[kTensors]{}, out[kTensors]{};
  for (int i = 0; i < inputs; ++i) {
    types[i] = static_cast<DataType>(tensors[i].type);
    in[i].nbDims = tensors[i].rank;
    for (int d = 0; d < tensors[i].rank; ++d) in[i].d[d] = expressions.constant(tensors[i].dims[d]);
  }
  if (build_part(plugin)->getOutputDataTypes(of_outputs, outputs, types, inputs) ||
      build_part(plugin)->getOutputShapes(in, inputs, nullptr, 0, out, outputs, expressions.builder))
    return -1;
  for (int i = 0; i < outputs; ++i) {
    DriverTensor& to = tensors[inputs + i];
    to.type = static_cast<int32_t>(of_outputs[i]);
    to.rank = out[i].nbDims;
    for (int d = 0; d < to.rank; ++d) to.dims[d] = out[i].d[d]->getConstantValue();
  }
  return 0;
}
int32_t driver_shape_change(void* plugin, const DriverTensor* tensors) {
  const Tensors t(tensors);
  return runtime_part(plugin)->onShapeChange(t.now, inputs, t.now + inputs, outputs);
}
int32_t driver_enqueue(void* plugin, const DriverTensor* tensors, const void* const* in, void* const* out,
                       void* workspace, void* stream) {
  const Tensors t(tensors);
  return runtime_part(plugin)->enqueue(t.now, t.now + inputs, in, out, workspace, static_cast<cudaStream_t>(stream));
}

}  // extern "C"
