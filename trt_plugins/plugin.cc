// QuantMoE as a TensorRT plug-in: a thin adapter over the C ABI of quant_moe_cuda.h.
//
// IPluginV3 with its core, build and runtime capabilities in one object; inputs and attributes come from op.def. What
// can be checked is checked when the plug-in is created (parsing, deserializing) or configured (building); messages go
// to TensorRT's logger and begin with the layer's name. Nothing here links to TensorRT.
#include <cuda_runtime_api.h>
#include <dlfcn.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "NvInferRuntime.h"
#include "core/attributes.h"
#include "quantmoe/quant_moe_cuda.h"

namespace quantmoe {
namespace {

using namespace nvinfer1;
using Severity = ILogger::Severity;

enum class Type { T, I, float32, int32 };
constexpr Type type_T = Type::T, type_I = Type::I, type_float = Type::float32, type_int32 = Type::int32;
// Positions of the inputs, as QuantMoE_w13 and so on; QuantMoE is op.def's first operator.
enum Input : int32_t {
#define QM_INPUT(op, name, type) op##_##name,
#include "op.def"
};
struct Slot {
  const char* op;
  Type type;
};
constexpr Slot kInputs[] = {
#define QM_INPUT(op, name, type) {#op, type_##type},
#include "op.def"
};
constexpr Slot kOutputs[] = {
#define QM_OUTPUT(op, name, type) {#op, type_##type},
#include "op.def"
};
template <size_t n>
constexpr int32_t Count(const Slot (&slots)[n]) {
  int32_t count = 0;
  for (const Slot& slot : slots) count += std::string_view(slot.op) == "QuantMoE";
  return count;
}
constexpr int32_t kInputCount = Count(kInputs), kOutputCount = Count(kOutputs);

// TensorRT 10 has findLogger and log first in their classes' tables of virtual functions; in 11 and TensorRT-RTX 1.5
// they follow those of IVersionedInterface. A library compiled with either's headers must call both.
struct PlainLogger {
  virtual void log(Severity severity, const char* text) noexcept = 0;
};
struct PlainLoggerFinder {
  virtual PlainLogger* findLogger() = 0;
};
struct VersionedLogger : IVersionedInterface {
  virtual void log(Severity severity, const char* text) noexcept = 0;
};
struct VersionedLoggerFinder : IVersionedInterface {
  virtual VersionedLogger* findLogger() = 0;
};
PlainLoggerFinder* plain_finder = nullptr;
VersionedLoggerFinder* versioned_finder = nullptr;

// getInferLibVersion of the library whose code the object runs; 0 when it has none.
int32_t LibraryVersion(const void* object) {
  Dl_info where;
  if (!dladdr(*static_cast<void* const*>(object), &where) || !where.dli_fname) return 0;
  void* library = dlopen(where.dli_fname, RTLD_LAZY | RTLD_NOLOAD);
  if (!library) return 0;
  auto* version = reinterpret_cast<int32_t (*)()>(dlsym(library, "getInferLibVersion"));
  const int32_t found = version ? version() : 0;
  dlclose(library);
  return found;
}

void Log(Severity severity, const std::string& text) {
  if (versioned_finder) {
    if (VersionedLogger* logger = versioned_finder->findLogger()) return logger->log(severity, text.c_str());
  } else if (plain_finder) {
    if (PlainLogger* logger = plain_finder->findLogger()) return logger->log(severity, text.c_str());
  }
  std::fprintf(stderr, "%s\n", text.c_str());
}

std::string Text(const Dims& dims) {
  std::string text = "[";
  for (int32_t i = 0; i < dims.nbDims; ++i) text += (i ? ", " : "") + std::to_string(dims.d[i]);
  return text + "]";
}

// The workspace of an engine built without a GPU, or for other GPUs than the builder's, must do on each of these; plans
// depend on the compute capability and the shared memory.
constexpr qm_cuda_device kDevices[] = {{80, 108, 167936}, {86, 84, 102400}, {90, 132, 233472}, {120, 188, 102400}};

// An attribute as it was given and is serialized.
struct Value {
  const char* name;
  PluginFieldType type;
  std::string bytes;  // of the number, or the text and its NUL
};

class Plugin final : public IPluginV3, public IPluginV3OneCore, public IPluginV3OneBuild, public IPluginV3OneRuntime {
 public:
  Plugin(std::string layer, const qm_moe& moe, std::vector<Value> values)
      : layer_(std::move(layer)), moe_(moe), values_(std::move(values)) {}

  IPluginCapability* getCapabilityInterface(PluginCapabilityType type) noexcept override {
    if (type == PluginCapabilityType::kCORE) return static_cast<IPluginV3OneCore*>(this);
    if (type == PluginCapabilityType::kBUILD) return static_cast<IPluginV3OneBuild*>(this);
    if (type == PluginCapabilityType::kRUNTIME) return static_cast<IPluginV3OneRuntime*>(this);
    return nullptr;
  }
  IPluginV3* clone() noexcept override { return new Plugin(layer_, moe_, values_); }

  const char* getPluginName() const noexcept override { return "QuantMoE"; }
  const char* getPluginVersion() const noexcept override { return "1"; }
  const char* getPluginNamespace() const noexcept override { return ""; }

  int32_t getNbOutputs() const noexcept override { return kOutputCount; }
  int32_t getOutputDataTypes(DataType* outputs, int32_t, const DataType* inputs,
                             int32_t count) const noexcept override {
    if (count != kInputCount) return Fail("has " + std::to_string(count) + " inputs, expected 5");
    outputs[0] = inputs[QuantMoE_hidden_states];
    return 0;
  }
  int32_t getOutputShapes(const DimsExprs* inputs, int32_t count, const DimsExprs*, int32_t, DimsExprs* outputs,
                          int32_t, IExprBuilder&) noexcept override {
    if (count != kInputCount) return Fail("has " + std::to_string(count) + " inputs, expected 5");
    outputs[0] = inputs[QuantMoE_hidden_states];
    return 0;
  }
  bool supportsFormatCombination(int32_t at, const DynamicPluginTensorDesc* tensors, int32_t,
                                 int32_t) noexcept override;
  int32_t configurePlugin(const DynamicPluginTensorDesc* inputs, int32_t, const DynamicPluginTensorDesc*,
                          int32_t) noexcept override;
  size_t getWorkspaceSize(const DynamicPluginTensorDesc* inputs, int32_t, const DynamicPluginTensorDesc*,
                          int32_t) const noexcept override;

  int32_t onShapeChange(const PluginTensorDesc* inputs, int32_t, const PluginTensorDesc*, int32_t) noexcept override;
  int32_t enqueue(const PluginTensorDesc* input_descs, const PluginTensorDesc*, const void* const* inputs,
                  void* const* outputs, void* workspace, cudaStream_t stream) noexcept override;
  IPluginV3* attachToContext(IPluginResourceContext*) noexcept override { return clone(); }
  const PluginFieldCollection* getFieldsToSerialize() noexcept override;

 private:
  int32_t Fail(const std::string& what) const {
    Log(Severity::kERROR, layer_ + " " + what);
    return -1;
  }
  // Reports what is wrong with shapes (a -1 is not known yet); true when nothing is.
  bool CheckShapes(const Dims& x, const Dims& ids, const Dims& weights, const Dims& w13_dims,
                   const Dims& w2_dims) const;
  qm_cuda_problem ProblemOf(DataType type, DataType id_type, const Dims& ids, const Dims& w13_dims) const;
  // The plan for these inputs on the current device, made when they changed.
  bool Prepare(const PluginTensorDesc* inputs);

  std::string layer_;
  qm_moe moe_;
  std::vector<Value> values_;
  qm_cuda_device device_{};  // sm 0: not asked for yet
  qm_cuda_problem problem_{};
  qm_cuda_plan plan_{};
  std::vector<PluginField> fields_;
  PluginFieldCollection collection_{};
  bool said_float_ = false;
};

bool Plugin::supportsFormatCombination(int32_t at, const DynamicPluginTensorDesc* tensors, int32_t inputs,
                                       int32_t outputs) noexcept {
  if (inputs != kInputCount || outputs != kOutputCount) return false;
  const PluginTensorDesc& tensor = tensors[at].desc;
  if (tensor.format != TensorFormat::kLINEAR) return false;
  switch (at < kInputCount ? kInputs[at].type : kOutputs[at - kInputCount].type) {
    case Type::T:
      if (at != QuantMoE_hidden_states) return tensor.type == tensors[QuantMoE_hidden_states].desc.type;
      if (tensor.type == DataType::kFLOAT && !said_float_) {
        said_float_ = true;
        Log(Severity::kWARNING,
            layer_ + " does not run with float32 hidden_states, the kernels take float16 and bfloat16");
      }
      return tensor.type == DataType::kHALF || tensor.type == DataType::kBF16;
    case Type::I:
      return tensor.type == DataType::kINT32 || tensor.type == DataType::kINT64;
    case Type::float32:
      return tensor.type == DataType::kFLOAT;
    case Type::int32:
      return tensor.type == DataType::kINT32;
  }
  return false;
}

bool Plugin::CheckShapes(const Dims& x, const Dims& ids, const Dims& weights, const Dims& w13_dims,
                         const Dims& w2_dims) const {
  auto differ = [](int64_t a, int64_t b) { return a >= 0 && b >= 0 && a != b; };
  if (x.nbDims < 1 || differ(x.d[x.nbDims - 1], moe_.hidden_size))
    return Fail("hidden_states has shape " + Text(x) + ", expected [.., hidden_size " +
                std::to_string(moe_.hidden_size) + "]") == 0;
  bool same = ids.nbDims == x.nbDims && weights.nbDims == x.nbDims;
  for (int32_t i = 0; same && i + 1 < x.nbDims; ++i) same = !differ(ids.d[i], x.d[i]);
  for (int32_t i = 0; same && i < x.nbDims; ++i) same = !differ(ids.d[i], weights.d[i]);
  if (!same)
    return Fail("topk_ids and topk_weights have shapes " + Text(ids) + " and " + Text(weights) +
                ", expected the same, and the sizes before the last of hidden_states " + Text(x)) == 0;
  if (ids.d[ids.nbDims - 1] < 1)
    return Fail("topk_ids has shape " + Text(ids) + ", expected a last dimension known when the engine is built") == 0;
  const struct {
    const char* name;
    int projection;
    const Dims& dims;
  } packed[] = {{"w13", 13, w13_dims}, {"w2", 2, w2_dims}};
  for (const auto& w : packed) {
    const int64_t words = static_cast<int64_t>(qm_cuda_row_bytes(&moe_, w.projection) / 4);
    if (w.dims.nbDims != 2 || w.dims.d[0] < 1 || w.dims.d[0] != w13_dims.d[0] || w.dims.d[1] != words)
      return Fail(std::string(w.name) + " has shape " + Text(w.dims) + ", expected [experts, " + std::to_string(words) +
                  " int32 words] for these attributes, experts as in w13 " + Text(w13_dims)) == 0;
  }
  return true;
}

qm_cuda_problem Plugin::ProblemOf(DataType type, DataType id_type, const Dims& ids, const Dims& w13_dims) const {
  qm_cuda_problem problem{};
  problem.moe = moe_;
  problem.type = type == DataType::kHALF ? QM_F16 : type == DataType::kBF16 ? QM_BF16 : QM_F32;
  problem.id_bytes = id_type == DataType::kINT64 ? 8 : 4;
  problem.tokens = 1;
  for (int32_t i = 0; i + 1 < ids.nbDims; ++i) problem.tokens *= ids.d[i];
  problem.top_k = ids.d[ids.nbDims - 1];
  problem.local_experts = w13_dims.d[0];
  return problem;
}

int32_t Plugin::configurePlugin(const DynamicPluginTensorDesc* inputs, int32_t, const DynamicPluginTensorDesc*,
                                int32_t) noexcept {
  const auto* in = inputs;
  if (!CheckShapes(in[QuantMoE_hidden_states].max, in[QuantMoE_topk_ids].max, in[QuantMoE_topk_weights].max,
                   in[QuantMoE_w13].max, in[QuantMoE_w2].max))
    return -1;
  const qm_cuda_problem problem = ProblemOf(in[QuantMoE_hidden_states].desc.type, in[QuantMoE_topk_ids].desc.type,
                                            in[QuantMoE_topk_ids].max, in[QuantMoE_w13].max);
  qm_cuda_plan plan;
  char error[QM_ERROR_SIZE];
  return qm_cuda_plan_moe(&problem, &kDevices[0], &plan, error) ? Fail(error) : 0;
}

size_t Plugin::getWorkspaceSize(const DynamicPluginTensorDesc* inputs, int32_t, const DynamicPluginTensorDesc*,
                                int32_t) const noexcept {
  qm_cuda_problem problem = ProblemOf(inputs[QuantMoE_hidden_states].desc.type, inputs[QuantMoE_topk_ids].desc.type,
                                      inputs[QuantMoE_topk_ids].max, inputs[QuantMoE_w13].max);
  // Fewer tokens can take another path with a larger workspace, so each number counts. A plan takes less than a
  // microsecond.
  size_t bytes = 0;
  char error[QM_ERROR_SIZE];
  for (const int64_t most = problem.tokens; problem.tokens > 0; --problem.tokens) {
    if (most - problem.tokens > (1 << 16) && problem.tokens % 1024 != 0) continue;
    for (const qm_cuda_device& device : kDevices) {
      qm_cuda_plan plan{};
      if (!qm_cuda_plan_moe(&problem, &device, &plan, error)) bytes = std::max<size_t>(bytes, plan.workspace_bytes);
    }
  }
  return bytes;
}

bool Plugin::Prepare(const PluginTensorDesc* in) {
  const qm_cuda_problem problem = ProblemOf(in[QuantMoE_hidden_states].type, in[QuantMoE_topk_ids].type,
                                            in[QuantMoE_topk_ids].dims, in[QuantMoE_w13].dims);
  if (!std::memcmp(&problem, &problem_, sizeof(problem))) return true;
  char error[QM_ERROR_SIZE];
  if (!device_.sm) {
    int ordinal = 0;
    if (cudaError_t e = cudaGetDevice(&ordinal)) return Fail(std::string("CUDA: ") + cudaGetErrorString(e)) == 0;
    if (qm_cuda_query(ordinal, &device_, error)) return Fail(error) == 0;
  }
  if (qm_cuda_plan_moe(&problem, &device_, &plan_, error)) return Fail(error) == 0;
  problem_ = problem;
  return true;
}

int32_t Plugin::onShapeChange(const PluginTensorDesc* in, int32_t, const PluginTensorDesc*, int32_t) noexcept {
  if (!CheckShapes(in[QuantMoE_hidden_states].dims, in[QuantMoE_topk_ids].dims, in[QuantMoE_topk_weights].dims,
                   in[QuantMoE_w13].dims, in[QuantMoE_w2].dims))
    return -1;
  return Prepare(in) ? 0 : -1;
}

int32_t Plugin::enqueue(const PluginTensorDesc* in, const PluginTensorDesc*, const void* const* inputs,
                        void* const* outputs, void* workspace, cudaStream_t stream) noexcept {
  if (!Prepare(in)) return -1;
  qm_cuda_tensors tensors{};
  tensors.hidden_states = inputs[QuantMoE_hidden_states];
  tensors.topk_ids = inputs[QuantMoE_topk_ids];
  tensors.topk_weights = static_cast<const float*>(inputs[QuantMoE_topk_weights]);
  tensors.w13 = inputs[QuantMoE_w13];
  tensors.w2 = inputs[QuantMoE_w2];
  tensors.output = outputs[0];
  tensors.workspace = workspace;
  char error[QM_ERROR_SIZE];
  return qm_cuda_launch(&problem_, &plan_, &tensors, stream, error) ? Fail(error) : 0;
}

const PluginFieldCollection* Plugin::getFieldsToSerialize() noexcept {
  fields_.clear();
  for (const Value& value : values_)
    fields_.emplace_back(value.name, value.bytes.data(), value.type,
                         value.type == PluginFieldType::kCHAR ? static_cast<int32_t>(value.bytes.size()) : 1);
  collection_ = {static_cast<int32_t>(fields_.size()), fields_.data()};
  return &collection_;
}

class Creator final : public IPluginCreatorV3One {
 public:
  Creator() {
    const qm_attribute* a;
    for (size_t i = 0; (a = qm_attribute_at("QuantMoE", i)); ++i)
      fields_.emplace_back(a->name, nullptr, FieldType(a->kind), 1);
    collection_ = {static_cast<int32_t>(fields_.size()), fields_.data()};
  }
  const char* getPluginName() const noexcept override { return "QuantMoE"; }
  const char* getPluginVersion() const noexcept override { return "1"; }
  // TensorRT's parser looks for creators in the empty namespace, whatever the node's domain is.
  const char* getPluginNamespace() const noexcept override { return ""; }
  const PluginFieldCollection* getFieldNames() noexcept override { return &collection_; }
  IPluginV3* createPlugin(const char* name, const PluginFieldCollection* given, TensorRTPhase) noexcept override;

 private:
  static PluginFieldType FieldType(char kind) {
    return kind == 'i' ? PluginFieldType::kINT32 : kind == 'f' ? PluginFieldType::kFLOAT32 : PluginFieldType::kCHAR;
  }
  std::vector<PluginField> fields_;
  PluginFieldCollection collection_{};
};

// Sets the attribute of a field and keeps its value; false with the sentence in error.
bool Set(qm_moe* moe, std::vector<Value>* values, const PluginField& expected, const PluginField& field, char* error) {
  const bool text = expected.type == PluginFieldType::kCHAR;
  if (field.type != expected.type || !field.data || (text ? field.length < 1 : field.length != 1)) {
    fail(error, QM_INVALID, "attribute %s is of field type %d and length %d, expected one %s", field.name,
         static_cast<int>(field.type), field.length,
         text                                       ? "string"
         : expected.type == PluginFieldType::kINT32 ? "int32"
                                                    : "float32");
    return false;
  }
  const char* data = static_cast<const char*>(field.data);
  if (text) {  // the length counts the NUL, which a damaged plan may lack
    const std::string value(data, strnlen(data, field.length));
    values->push_back({expected.name, expected.type, std::string(value.c_str(), value.size() + 1)});
    return !qm_set_string("QuantMoE", moe, field.name, value.c_str(), error);
  }
  values->push_back({expected.name, expected.type, std::string(data, 4)});
  if (expected.type == PluginFieldType::kFLOAT32) {
    float value;
    std::memcpy(&value, data, sizeof(value));
    return !qm_set_float("QuantMoE", moe, field.name, value, error);
  }
  int32_t value;
  std::memcpy(&value, data, sizeof(value));
  return !qm_set_int("QuantMoE", moe, field.name, value, error);
}

IPluginV3* Creator::createPlugin(const char* name, const PluginFieldCollection* given, TensorRTPhase) noexcept {
  const std::string layer = std::string("QuantMoE layer \"") + (name ? name : "") + "\":";
  auto refuse = [&](const std::string& what) {
    Log(Severity::kERROR, layer + " " + what);
    return nullptr;
  };
  const PluginField* const end = given ? given->fields + given->nbFields : nullptr;
  auto find = [&](const char* attribute) {
    return given ? std::find_if(given->fields, end,
                                [&](const PluginField& f) { return f.name && !std::strcmp(f.name, attribute); })
                 : end;
  };
  qm_moe moe{};
  std::vector<Value> values;
  char error[QM_ERROR_SIZE];
  // op_version, the first: a file of another version may have other attributes.
  for (const PluginField& expected : fields_) {
    const PluginField* field = find(expected.name);
    if (field == end) return refuse(std::string("attribute ") + expected.name + " is required");
    if (!Set(&moe, &values, expected, *field, error)) return refuse(error);
    if (moe.op_version != k_version_QuantMoE)
      return refuse("op_version is " + std::to_string(moe.op_version) + ", this library knows " +
                    std::to_string(k_version_QuantMoE));
  }
  for (const PluginField* field = given->fields; field != end; ++field)
    if (std::none_of(fields_.begin(), fields_.end(),
                     [&](const PluginField& f) { return !std::strcmp(f.name, field->name); }))
      return refuse(std::string("unknown attribute ") + field->name);
  // Attributes no kernel can have are refused here, where the layer is named; shapes come later.
  qm_cuda_problem problem{moe, QM_F16, 4, 1, 1, std::max(1, moe.num_experts - moe.expert_offset)};
  qm_cuda_plan plan;
  if (qm_cuda_plan_moe(&problem, &kDevices[0], &plan, error)) return refuse(error);
  return new Plugin(layer, moe, std::move(values));
}

}  // namespace
}  // namespace quantmoe

extern "C" QM_API void setLoggerFinder(nvinfer1::ILoggerFinder* finder) {
  using namespace quantmoe;
  const int32_t version = finder ? LibraryVersion(finder) : 0;  // 10.6.0: 100600; TensorRT-RTX 1.7.1: 10701
  const bool rtx = version < 100000;
  plain_finder = nullptr;
  versioned_finder = nullptr;
  if (version >= (rtx ? 10500 : 110000)) {
    versioned_finder = reinterpret_cast<VersionedLoggerFinder*>(finder);
  } else if (version) {
    plain_finder = reinterpret_cast<PlainLoggerFinder*>(finder);
  }
}

extern "C" QM_API nvinfer1::IPluginCreatorInterface* const* getCreators(int32_t& count) {
  static quantmoe::Creator creator;
  static nvinfer1::IPluginCreatorInterface* const creators[] = {&creator};
  count = 1;
  return creators;
}
