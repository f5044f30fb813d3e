// QuantMoE, QuantLinear and MoERouting as TensorRT plug-ins: a thin adapter over the C ABI of quant_moe_cuda.h.
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
#include <mutex>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "NvInferRuntime.h"
#include "core/attributes.h"
#include "core/slots.h"
#include "quantmoe/quant_moe_cuda.h"

namespace quantmoe {

using namespace nvinfer1;
using Severity = ILogger::Severity;

// TensorRT 10 has findLogger and log first in their classes' tables of virtual functions; in 11 and TensorRT-RTX 1.5
// they follow those of IVersionedInterface. A library compiled with either's headers must call both. Not in the
// anonymous namespace, where GCC sees that nothing implements them and calls __cxa_pure_virtual instead.
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

namespace {

constexpr int32_t kMostInputs = Slots(kInputs, "QuantMoE").count;

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

// The workspace of an engine built without a GPU, or for other GPUs than the builder's, must do on each of these, with
// any number of multiprocessors.
constexpr qm_cuda_device kDevices[] = {{80, 0, 167936}, {86, 0, 102400},  {89, 0, 102400},
                                       {90, 0, 233472}, {100, 0, 233472}, {120, 0, 102400}};

// An attribute as it was given and is serialized.
struct Value {
  const char* name;
  PluginFieldType type;
  std::string bytes;  // of the number, or the text and its NUL
};

// Types and sizes of the inputs.
struct Inputs {
  DataType types[kMostInputs];
  Dims dims[kMostInputs];

  Inputs(const PluginTensorDesc* in, int32_t count) {
    for (int32_t i = 0; i < count; ++i) types[i] = in[i].type, dims[i] = in[i].dims;
  }
  Inputs(const DynamicPluginTensorDesc* in, int32_t count) {  // the largest
    for (int32_t i = 0; i < count; ++i) types[i] = in[i].desc.type, dims[i] = in[i].max;
  }
};

// True when both are known (a -1 is not yet) and are not the same.
bool Differ(int64_t a, int64_t b) { return a >= 0 && b >= 0 && a != b; }
int64_t RowsOf(const Dims& dims) {
  int64_t rows = 1;
  for (int32_t i = 0; i + 1 < dims.nbDims; ++i) rows *= dims.d[i];
  return rows;
}
int32_t QmType(DataType type) { return type == DataType::kHALF ? QM_F16 : type == DataType::kBF16 ? QM_BF16 : QM_F32; }

// What the operators have in common; a subclass each.
class Plugin : public IPluginV3, public IPluginV3OneCore, public IPluginV3OneBuild, public IPluginV3OneRuntime {
 public:
  IPluginCapability* getCapabilityInterface(PluginCapabilityType type) noexcept override {
    if (type == PluginCapabilityType::kCORE) return static_cast<IPluginV3OneCore*>(this);
    if (type == PluginCapabilityType::kBUILD) return static_cast<IPluginV3OneBuild*>(this);
    if (type == PluginCapabilityType::kRUNTIME) return static_cast<IPluginV3OneRuntime*>(this);
    return nullptr;
  }
  const char* getPluginName() const noexcept override { return op_; }
  const char* getPluginVersion() const noexcept override { return "1"; }
  const char* getPluginNamespace() const noexcept override { return ""; }

  int32_t getNbOutputs() const noexcept override { return outputs_.count; }
  int32_t getOutputDataTypes(DataType* outputs, int32_t, const DataType* inputs,
                             int32_t count) const noexcept override {
    if (count != inputs_.count) return Count(count);
    for (int32_t i = 0; i < outputs_.count; ++i) {
      const Type type = outputs_.first[i].type;
      outputs[i] = type == Type::T ? inputs[0] : type == Type::int32 ? DataType::kINT32 : DataType::kFLOAT;
    }
    return 0;
  }
  int32_t getOutputShapes(const DimsExprs* inputs, int32_t count, const DimsExprs*, int32_t, DimsExprs* outputs,
                          int32_t, IExprBuilder& builder) noexcept override {
    if (count != inputs_.count) return Count(count);
    for (int32_t i = 0; i < outputs_.count; ++i) {
      outputs[i] = inputs[0];
      if (const int64_t size = LastSize()) outputs[i].d[inputs[0].nbDims - 1] = builder.constant(size);
    }
    return 0;
  }
  bool supportsFormatCombination(int32_t at, const DynamicPluginTensorDesc* tensors, int32_t inputs,
                                 int32_t outputs) noexcept override;
  int32_t configurePlugin(const DynamicPluginTensorDesc* inputs, int32_t, const DynamicPluginTensorDesc*,
                          int32_t) noexcept override {
    const Inputs in(inputs, inputs_.count);
    return CheckShapes(in.dims) && Configure(in) ? 0 : -1;
  }
  int32_t onShapeChange(const PluginTensorDesc* inputs, int32_t, const PluginTensorDesc*, int32_t) noexcept override {
    const Inputs in(inputs, inputs_.count);
    return CheckShapes(in.dims) && Prepare(in) ? 0 : -1;
  }
  int32_t enqueue(const PluginTensorDesc* descs, const PluginTensorDesc*, const void* const* inputs,
                  void* const* outputs, void* workspace, cudaStream_t stream) noexcept override {
    if (!Prepare(Inputs(descs, inputs_.count))) return -1;
    char error[QM_ERROR_SIZE];
    return Launch(inputs, outputs, workspace, stream, error) ? Fail(error) : 0;
  }
  IPluginV3* attachToContext(IPluginResourceContext*) noexcept override { return clone(); }
  const PluginFieldCollection* getFieldsToSerialize() noexcept override;

 protected:
  Plugin(const char* op, std::string layer, std::vector<Value> values)
      : op_(op), inputs_(kInputs, op), outputs_(kOutputs, op), layer_(std::move(layer)), values_(std::move(values)) {}
  int32_t Fail(const std::string& what) const {
    Log(Severity::kERROR, layer_ + " " + what);
    return -1;
  }
  bool Wrong(const std::string& what) const { return Fail(what) == 0; }  // false

  // Reports what is wrong with shapes (a -1 is not known yet); true when nothing is.
  virtual bool CheckShapes(const Dims* in) const = 0;
  bool CheckPacked(const char* name, const Dims& dims, int64_t experts, size_t row_bytes) const;
  virtual int64_t LastSize() const { return 0; }     // of the outputs' last dimension; 0: that of the first input
  virtual bool TakesFloat() const { return false; }  // T may be float32
  virtual bool Configure(const Inputs& most) = 0;
  virtual bool Prepare(const Inputs& in) = 0;
  virtual int Launch(const void* const* inputs, void* const* outputs, void* workspace, cudaStream_t stream,
                     char* error) = 0;

  const char* op_;
  Slots inputs_, outputs_;
  std::string layer_;
  std::vector<Value> values_;

 private:
  int32_t Count(int32_t count) const {
    return Fail("has " + std::to_string(count) + " inputs, expected " + std::to_string(inputs_.count));
  }
  std::vector<PluginField> fields_;
  PluginFieldCollection collection_{};
  bool said_float_ = false;
};

bool Plugin::supportsFormatCombination(int32_t at, const DynamicPluginTensorDesc* tensors, int32_t inputs,
                                       int32_t outputs) noexcept {
  if (inputs != inputs_.count || outputs != outputs_.count) return false;
  const PluginTensorDesc& tensor = tensors[at].desc;
  if (tensor.format != TensorFormat::kLINEAR) return false;
  switch (at < inputs ? inputs_.first[at].type : outputs_.first[at - inputs].type) {
    case Type::T:
      if (at != 0) return tensor.type == tensors[0].desc.type;
      if (tensor.type == DataType::kFLOAT && !TakesFloat() && !said_float_) {
        said_float_ = true;
        Log(Severity::kWARNING,
            layer_ + " does not run with float32 " + inputs_.first[0].name + ", the kernels take float16 and bfloat16");
      }
      return tensor.type == DataType::kHALF || tensor.type == DataType::kBF16 ||
             (TakesFloat() && tensor.type == DataType::kFLOAT);
    case Type::I:
      return tensor.type == DataType::kINT32 || tensor.type == DataType::kINT64;
    case Type::float32:
      return tensor.type == DataType::kFLOAT;
    case Type::int32:
      return tensor.type == DataType::kINT32;
  }
  return false;
}

bool Plugin::CheckPacked(const char* name, const Dims& dims, int64_t experts, size_t row_bytes) const {
  const int64_t words = static_cast<int64_t>(row_bytes / 4);
  if (dims.nbDims == 2 && dims.d[0] >= 1 && !Differ(dims.d[0], experts) && dims.d[1] == words) return true;
  const std::string count = experts < 0 ? "experts" : std::to_string(experts);
  return Wrong(std::string(name) + " has shape " + Text(dims) + ", expected [" + count + ", " + std::to_string(words) +
               " int32 words] for these attributes");
}

const PluginFieldCollection* Plugin::getFieldsToSerialize() noexcept {
  fields_.clear();
  for (const Value& value : values_)
    fields_.emplace_back(value.name, value.bytes.data(), value.type,
                         value.type == PluginFieldType::kCHAR ? static_cast<int32_t>(value.bytes.size()) : 1);
  collection_ = {static_cast<int32_t>(fields_.size()), fields_.data()};
  return &collection_;
}

// An operator with packed weights, which has plans.
template <class Problem, int (*kPlan)(const Problem*, const qm_cuda_device*, qm_cuda_plan*, char*)>
class Planned : public Plugin {
 public:
  size_t getWorkspaceSize(const DynamicPluginTensorDesc* inputs, int32_t, const DynamicPluginTensorDesc*,
                          int32_t) const noexcept override {
    Problem problem = ProblemOf(Inputs(inputs, inputs_.count));
    // Fewer tokens can take another path with a larger workspace, so each number counts: up to 0.3 s for 65536 tokens,
    // but the layers of a model are alike.
    static std::mutex mutex;
    static Problem last{};
    static size_t bytes = 0;
    const std::lock_guard<std::mutex> lock(mutex);
    if (!std::memcmp(&problem, &last, sizeof(problem))) return bytes;
    last = problem;
    bytes = 0;
    int64_t& rows = RowsIn(problem);
    char error[QM_ERROR_SIZE];
    for (const int64_t most = rows; rows > 0; --rows) {
      if (most - rows > (1 << 16) && rows % 1024 != 0) continue;
      for (const qm_cuda_device& device : kDevices) {
        qm_cuda_plan plan{};
        if (!kPlan(&problem, &device, &plan, error)) bytes = std::max<size_t>(bytes, plan.workspace_bytes);
      }
    }
    return bytes;
  }

 protected:
  using Plugin::Plugin;
  virtual Problem ProblemOf(const Inputs& in) const = 0;

  bool Configure(const Inputs& most) override {
    const Problem problem = ProblemOf(most);
    qm_cuda_plan plan;
    char error[QM_ERROR_SIZE];
    return !kPlan(&problem, &kDevices[0], &plan, error) || Wrong(error);
  }
  // The plan for these inputs on the current device, made when they changed.
  bool Prepare(const Inputs& in) override {
    const Problem problem = ProblemOf(in);
    if (!std::memcmp(&problem, &problem_, sizeof(problem))) return true;
    char error[QM_ERROR_SIZE];
    if (!device_.sm) {
      int ordinal = 0;
      if (cudaError_t e = cudaGetDevice(&ordinal)) return Wrong(std::string("CUDA: ") + cudaGetErrorString(e));
      if (qm_cuda_query(ordinal, &device_, error)) return Wrong(error);
    }
    if (kPlan(&problem, &device_, &plan_, error)) return Wrong(error);
    problem_ = problem;
    return true;
  }

  qm_cuda_device device_{};  // sm 0: not asked for yet
  Problem problem_{};
  qm_cuda_plan plan_{};

 private:
  static int64_t& RowsIn(qm_cuda_problem& problem) { return problem.tokens; }
  static int64_t& RowsIn(qm_cuda_linear_problem& problem) { return problem.rows; }
};

class MoE final : public Planned<qm_cuda_problem, qm_cuda_plan_moe> {
 public:
  MoE(std::string layer, const qm_moe& moe, std::vector<Value> values)
      : Planned("QuantMoE", std::move(layer), std::move(values)), moe_(moe) {}
  IPluginV3* clone() noexcept override { return new MoE(layer_, moe_, values_); }

 private:
  bool CheckShapes(const Dims* in) const override;
  qm_cuda_problem ProblemOf(const Inputs& in) const override {
    const Dims& ids = in.dims[QuantMoE_topk_ids];
    qm_cuda_problem problem{};
    problem.moe = moe_;
    problem.type = QmType(in.types[QuantMoE_hidden_states]);
    problem.id_bytes = in.types[QuantMoE_topk_ids] == DataType::kINT64 ? 8 : 4;
    problem.tokens = RowsOf(ids);
    problem.top_k = ids.d[ids.nbDims - 1];
    problem.local_experts = in.dims[QuantMoE_w13].d[0];
    return problem;
  }
  int Launch(const void* const* inputs, void* const* outputs, void* workspace, cudaStream_t stream,
             char* error) override {
    qm_cuda_tensors tensors{};
    tensors.hidden_states = inputs[QuantMoE_hidden_states];
    tensors.topk_ids = inputs[QuantMoE_topk_ids];
    tensors.topk_weights = static_cast<const float*>(inputs[QuantMoE_topk_weights]);
    tensors.w13 = inputs[QuantMoE_w13];
    tensors.w2 = inputs[QuantMoE_w2];
    tensors.output = outputs[0];
    tensors.workspace = workspace;
    return qm_cuda_launch(&problem_, &plan_, &tensors, stream, error);
  }

  qm_moe moe_;
};

bool MoE::CheckShapes(const Dims* in) const {
  const Dims &x = in[QuantMoE_hidden_states], &ids = in[QuantMoE_topk_ids], &weights = in[QuantMoE_topk_weights];
  if (x.nbDims < 1 || Differ(x.d[x.nbDims - 1], moe_.hidden_size))
    return Wrong("hidden_states has shape " + Text(x) + ", expected [.., hidden_size " +
                 std::to_string(moe_.hidden_size) + "]");
  bool same = ids.nbDims == x.nbDims && weights.nbDims == x.nbDims;
  for (int32_t i = 0; same && i + 1 < x.nbDims; ++i) same = !Differ(ids.d[i], x.d[i]);
  for (int32_t i = 0; same && i < x.nbDims; ++i) same = !Differ(ids.d[i], weights.d[i]);
  if (!same)
    return Wrong("topk_ids and topk_weights have shapes " + Text(ids) + " and " + Text(weights) +
                 ", expected the same, and the sizes before the last of hidden_states " + Text(x));
  if (ids.d[ids.nbDims - 1] < 1)
    return Wrong("topk_ids has shape " + Text(ids) + ", expected a last dimension known when the engine is built");
  const Dims& w13 = in[QuantMoE_w13];
  return CheckPacked("w13", w13, -1, qm_cuda_row_bytes(&moe_, 13)) &&
         CheckPacked("w2", in[QuantMoE_w2], w13.d[0], qm_cuda_row_bytes(&moe_, 2));
}

class Linear final : public Planned<qm_cuda_linear_problem, qm_cuda_plan_linear> {
 public:
  Linear(std::string layer, const qm_linear& linear, std::vector<Value> values)
      : Planned("QuantLinear", std::move(layer), std::move(values)), linear_(linear) {}
  IPluginV3* clone() noexcept override { return new Linear(layer_, linear_, values_); }

 private:
  int64_t LastSize() const override { return linear_.out_features; }
  bool CheckShapes(const Dims* in) const override {
    const Dims& x = in[QuantLinear_x];
    if (x.nbDims < 1 || Differ(x.d[x.nbDims - 1], linear_.in_features))
      return Wrong("x has shape " + Text(x) + ", expected [.., in_features " + std::to_string(linear_.in_features) +
                   "]");
    return CheckPacked("w", in[QuantLinear_w], 1, qm_cuda_linear_row_bytes(&linear_));
  }
  qm_cuda_linear_problem ProblemOf(const Inputs& in) const override {
    qm_cuda_linear_problem problem{};
    problem.linear = linear_;
    problem.type = QmType(in.types[QuantLinear_x]);
    problem.rows = RowsOf(in.dims[QuantLinear_x]);
    return problem;
  }
  int Launch(const void* const* inputs, void* const* outputs, void* workspace, cudaStream_t stream,
             char* error) override {
    const qm_cuda_linear_tensors tensors{inputs[QuantLinear_x], inputs[QuantLinear_w], outputs[0], workspace};
    return qm_cuda_launch_linear(&problem_, &plan_, &tensors, stream, error);
  }

  qm_linear linear_;
};

class Routing final : public Plugin {
 public:
  Routing(std::string layer, const qm_routing& routing, std::vector<Value> values)
      : Plugin("MoERouting", std::move(layer), std::move(values)), problem_{routing, QM_F32, 0} {}
  IPluginV3* clone() noexcept override { return new Routing(layer_, problem_.routing, values_); }
  size_t getWorkspaceSize(const DynamicPluginTensorDesc*, int32_t, const DynamicPluginTensorDesc*,
                          int32_t) const noexcept override {
    return 0;
  }

 private:
  int64_t LastSize() const override { return problem_.routing.top_k; }
  bool TakesFloat() const override { return true; }
  bool CheckShapes(const Dims* in) const override {
    const Dims &logits = in[MoERouting_logits], &bias = in[MoERouting_correction_bias];
    const std::string experts = "num_experts " + std::to_string(problem_.routing.num_experts) + "]";
    if (logits.nbDims < 1 || Differ(logits.d[logits.nbDims - 1], problem_.routing.num_experts))
      return Wrong("logits has shape " + Text(logits) + ", expected [.., " + experts);
    if (bias.nbDims != 1 || Differ(bias.d[0], problem_.routing.num_experts))
      return Wrong("correction_bias has shape " + Text(bias) + ", expected [" + experts);
    return true;
  }
  bool Configure(const Inputs&) override { return true; }
  bool Prepare(const Inputs& in) override {
    problem_.type = QmType(in.types[MoERouting_logits]);
    problem_.tokens = RowsOf(in.dims[MoERouting_logits]);
    return true;
  }
  int Launch(const void* const* inputs, void* const* outputs, void*, cudaStream_t stream, char* error) override {
    const qm_cuda_routing_tensors tensors{inputs[MoERouting_logits],
                                          static_cast<const float*>(inputs[MoERouting_correction_bias]),
                                          static_cast<int32_t*>(outputs[0]), static_cast<float*>(outputs[1])};
    return qm_cuda_launch_routing(&problem_, &tensors, stream, error);
  }

  qm_cuda_routing_problem problem_;
};

// The attributes of any operator; the version is the first of each.
union Node {
  int32_t op_version;
  qm_moe moe;
  qm_linear linear;
  qm_routing routing;
};

class Creator final : public IPluginCreatorV3One {
 public:
  Creator(const char* op, int32_t version) : op_(op), version_(version) {
    const qm_attribute* a;
    for (size_t i = 0; (a = qm_attribute_at(op, i)); ++i) fields_.emplace_back(a->name, nullptr, FieldType(a->kind), 1);
    collection_ = {static_cast<int32_t>(fields_.size()), fields_.data()};
  }
  const char* getPluginName() const noexcept override { return op_; }
  const char* getPluginVersion() const noexcept override { return "1"; }
  // TensorRT's parser looks for creators in the empty namespace, whatever the node's domain is.
  const char* getPluginNamespace() const noexcept override { return ""; }
  const PluginFieldCollection* getFieldNames() noexcept override { return &collection_; }
  IPluginV3* createPlugin(const char* name, const PluginFieldCollection* given, TensorRTPhase) noexcept override;

 private:
  static PluginFieldType FieldType(char kind) {
    return kind == 'i' ? PluginFieldType::kINT32 : kind == 'f' ? PluginFieldType::kFLOAT32 : PluginFieldType::kCHAR;
  }
  const char* op_;
  int32_t version_;
  std::vector<PluginField> fields_;
  PluginFieldCollection collection_{};
};

// Sets the attribute of a field and keeps its value; false with the sentence in error.
bool Set(const char* op, Node* node, std::vector<Value>* values, const PluginField& expected, const PluginField& field,
         char* error) {
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
    return !qm_set_string(op, node, field.name, value.c_str(), error);
  }
  values->push_back({expected.name, expected.type, std::string(data, 4)});
  if (expected.type == PluginFieldType::kFLOAT32) {
    float value;
    std::memcpy(&value, data, sizeof(value));
    return !qm_set_float(op, node, field.name, value, error);
  }
  int32_t value;
  std::memcpy(&value, data, sizeof(value));
  return !qm_set_int(op, node, field.name, value, error);
}

IPluginV3* Creator::createPlugin(const char* name, const PluginFieldCollection* given, TensorRTPhase) noexcept {
  const std::string layer = std::string(op_) + " layer \"" + (name ? name : "") + "\":";
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
  Node node{};
  std::vector<Value> values;
  char error[QM_ERROR_SIZE];
  // op_version, the first: a file of another version may have other attributes.
  for (const PluginField& expected : fields_) {
    const PluginField* field = find(expected.name);
    if (field == end) return refuse(std::string("attribute ") + expected.name + " is required");
    if (!Set(op_, &node, &values, expected, *field, error)) return refuse(error);
    if (node.op_version != version_)
      return refuse("op_version is " + std::to_string(node.op_version) + ", this library knows " +
                    std::to_string(version_));
  }
  for (const PluginField* field = given->fields; field != end; ++field) {
    if (!field->name) return refuse("an attribute has no name");
    if (std::none_of(fields_.begin(), fields_.end(),
                     [&](const PluginField& f) { return !std::strcmp(f.name, field->name); }))
      return refuse(std::string("unknown attribute ") + field->name);
  }
  // Attributes no kernel can have are refused here, where the layer is named; shapes come later.
  qm_cuda_plan plan;
  if (op_ == std::string_view("QuantLinear")) {
    const qm_cuda_linear_problem problem{node.linear, QM_F16, 1};
    if (qm_cuda_plan_linear(&problem, &kDevices[0], &plan, error)) return refuse(error);
    return new Linear(layer, node.linear, std::move(values));
  }
  if (op_ == std::string_view("MoERouting")) {
    const qm_cuda_routing_problem problem{node.routing, QM_F32, 1};
    if (qm_cuda_validate_routing(&problem, error)) return refuse(error);
    return new Routing(layer, node.routing, std::move(values));
  }
  const qm_cuda_problem problem{node.moe, QM_F16, 4, 1, 1, std::max(1, node.moe.num_experts - node.moe.expert_offset)};
  if (qm_cuda_plan_moe(&problem, &kDevices[0], &plan, error)) return refuse(error);
  return new MoE(layer, node.moe, std::move(values));
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
  using quantmoe::Creator;
  static Creator moe("QuantMoE", quantmoe::k_version_QuantMoE), linear("QuantLinear", quantmoe::k_version_QuantLinear),
      routing("MoERouting", quantmoe::k_version_MoERouting);
  static nvinfer1::IPluginCreatorInterface* const creators[] = {&moe, &linear, &routing};
  count = 3;
  return creators;
}
