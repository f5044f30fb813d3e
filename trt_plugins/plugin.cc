// The operators of op.def as TensorRT plug-ins: a thin adapter over the C ABI of quant_moe_cuda.h.
//
// IPluginV3 with its core, build and runtime capabilities in one object; inputs and attributes come from op.def. What
// can be checked is checked when the plug-in is created (parsing, deserializing) or configured (building); messages go
// to TensorRT's logger and begin with the layer's name. Nothing here links to TensorRT.
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <link.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstring>
#include <exception>
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
// The same of IPluginRegistry: 10's has what it says of IPluginV2 before what follows, 11's has not.
struct PlainRegistryHead {
  virtual bool registerV2(void* creator, const char* name_space) noexcept = 0;
  virtual void* const* creatorsV2(int32_t* count) const noexcept = 0;
  virtual void* creatorV2(const char* name, const char* version, const char* name_space) noexcept = 0;
  virtual ~PlainRegistryHead() = default;
  virtual void setErrorRecorder(IErrorRecorder* recorder) noexcept = 0;
  virtual IErrorRecorder* getErrorRecorder() const noexcept = 0;
  virtual bool deregisterV2(const void* creator) noexcept = 0;
};
struct VersionedRegistryHead {
  virtual ~VersionedRegistryHead() = default;
  virtual void setErrorRecorder(IErrorRecorder* recorder) noexcept = 0;
  virtual IErrorRecorder* getErrorRecorder() const noexcept = 0;
};
template <class Head>
struct Registry : Head {
  virtual bool isParentSearchEnabled() const = 0;
  virtual void setParentSearchEnabled(bool enabled) = 0;
  virtual void* loadLibrary(const char* path) noexcept = 0;
  virtual void deregisterLibrary(void* library) noexcept = 0;
  virtual bool registerCreator(IPluginCreatorInterface& creator, const char* name_space) noexcept = 0;
  virtual IPluginCreatorInterface* const* getAllCreators(int32_t* count) const noexcept = 0;
  virtual IPluginCreatorInterface* getCreator(const char* name, const char* version,
                                              const char* name_space) noexcept = 0;
  virtual bool deregisterCreator(const IPluginCreatorInterface& creator) noexcept = 0;
};

namespace {

constexpr int32_t kMostInputs = std::max({
#define QM_OP(op, name, version) Slots(kInputs, #op).count,
#include "op.def"
});

// Of the TensorRT that loads this library; without one, getLogger of the TensorRT that it found.
PlainLoggerFinder* plain_finder = nullptr;
VersionedLoggerFinder* versioned_finder = nullptr;
PlainLogger* (*plain_logger)() = nullptr;
VersionedLogger* (*versioned_logger)() = nullptr;

// Where the library with this code or data is; nullptr when none has it.
const void* library_of(const void* address) {
  Dl_info where;
  return dladdr(address, &where) ? where.dli_fbase : nullptr;
}
const void* table_of(const void* object) { return *static_cast<void* const*>(object); }

// getInferLibVersion of the library whose code the object runs; 0 when it has none.
int32_t library_version(const void* object) {
  Dl_info where;
  if (!dladdr(table_of(object), &where) || !where.dli_fname) return 0;
  void* library = dlopen(where.dli_fname, RTLD_LAZY | RTLD_NOLOAD);
  if (!library) return 0;
  auto* version = reinterpret_cast<int32_t (*)()>(dlsym(library, "getInferLibVersion"));
  const int32_t found = version ? version() : 0;
  dlclose(library);
  return found;
}
// Whether a TensorRT of this version has the later tables. 10.6.0: 100600; TensorRT-RTX 1.7.1: 10701
constexpr int32_t kOldest = 10000;  // TensorRT-RTX 1.0; 8 and 9 have no V3 creators: 8.6.1 is 8601
bool versioned(int32_t version) { return version >= (version < 100000 ? 10500 : 110000); }

void log_message(Severity severity, const char* text) {
  if (versioned_finder) {
    if (VersionedLogger* logger = versioned_finder->findLogger()) return logger->log(severity, text);
  } else if (plain_finder) {
    if (PlainLogger* logger = plain_finder->findLogger()) return logger->log(severity, text);
  } else if (versioned_logger) {
    if (VersionedLogger* logger = versioned_logger()) return logger->log(severity, text);
  } else if (plain_logger) {
    if (PlainLogger* logger = plain_logger()) return logger->log(severity, text);
  }
  std::fprintf(stderr, "%s\n", text);
}
void log_message(Severity severity, const std::string& text) { log_message(severity, text.c_str()); }

// What TensorRT calls, as its result; `failed` where an exception, of memory most likely, ended it. Logs that without
// taking memory.
template <class Result, class Body>
Result guard(const char* layer, Result failed, const Body& body) noexcept {
  try {
    return body();
  } catch (const std::exception& error) {
    char text[QM_ERROR_SIZE];
    std::snprintf(text, sizeof(text), "%s %s", layer, error.what());
    log_message(Severity::kERROR, text);
  }
  return failed;
}

std::string to_text(const Dims& dims) {
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

// What a plug-in and its clones have in common.
struct PluginLayer {
  std::string name;  // operator and layer, the beginning of every message
  std::vector<Value> values;
  bool runs;  // of an engine that runs: its weights are the model's, not what the builder times with
  // The most that getWorkspaceSize returned, in an engine's plan as a field of its own; 0: not known.
  std::atomic<int64_t> workspace_bytes{0};

  PluginLayer(std::string name, std::vector<Value> values, bool runs, int64_t workspace_bytes)
      : name(std::move(name)), values(std::move(values)), runs(runs), workspace_bytes(workspace_bytes) {}
};
using SharedLayer = std::shared_ptr<PluginLayer>;
constexpr const char* kWorkspaceBytes = "workspace_bytes";

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
bool differ(int64_t a, int64_t b) { return a >= 0 && b >= 0 && a != b; }
bool is_none(const Dims& dims) { return dims.nbDims == 1 && dims.d[0] == 0; }  // of an input that may have no values
int64_t rows_of(const Dims& dims) {
  int64_t rows = 1;
  for (int32_t i = 0; i + 1 < dims.nbDims; ++i) rows *= dims.d[i];
  return rows;
}
// Of the activations that weights of 16-bit floats are multiplied with; others take either.
int32_t type_beside(const qm_projection& w) { return w.format == k_format_bf16 ? QM_BF16 : QM_F16; }
int32_t qm_type(DataType type) { return type == DataType::kHALF ? QM_F16 : type == DataType::kBF16 ? QM_BF16 : QM_F32; }

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
    if (count != inputs_.count) return refuse_count(count);
    for (int32_t i = 0; i < outputs_.count; ++i) {
      const Type type = outputs_.first[i].type;
      outputs[i] = type == Type::T       ? inputs[0]
                   : type == Type::C     ? inputs[CachedAttention_past_key]
                   : type == Type::int32 ? DataType::kINT32
                   : type == Type::int64 ? DataType::kINT64
                                         : DataType::kFLOAT;
    }
    return 0;
  }
  int32_t getOutputShapes(const DimsExprs* inputs, int32_t count, const DimsExprs*, int32_t, DimsExprs* outputs,
                          int32_t, IExprBuilder& builder) noexcept override {
    if (count != inputs_.count) return refuse_count(count);
    return attempt(-1, [&] { return set_shapes(inputs, outputs, builder) ? 0 : -1; });
  }
  bool supportsFormatCombination(int32_t at, const DynamicPluginTensorDesc* tensors, int32_t inputs,
                                 int32_t outputs) noexcept override {
    return attempt(false, [&] { return supports(at, tensors, inputs, outputs); });
  }
  int32_t configurePlugin(const DynamicPluginTensorDesc* inputs, int32_t, const DynamicPluginTensorDesc*,
                          int32_t) noexcept override {
    return attempt(-1, [&] {
      const Inputs in(inputs, inputs_.count);
      return check_shapes(in.dims) && configure(in) ? 0 : -1;
    });
  }
  int32_t onShapeChange(const PluginTensorDesc* inputs, int32_t, const PluginTensorDesc*, int32_t) noexcept override {
    return attempt(-1, [&] {
      const Inputs in(inputs, inputs_.count);
      return check_shapes(in.dims) && prepare(in) ? 0 : -1;
    });
  }
  int32_t enqueue(const PluginTensorDesc* descs, const PluginTensorDesc*, const void* const* inputs,
                  void* const* outputs, void* workspace, cudaStream_t stream) noexcept override {
    return attempt(-1, [&] {
      if (!prepare(Inputs(descs, inputs_.count)) || !check_weights(inputs, stream)) return -1;
      char error[QM_ERROR_SIZE];
      return launch(inputs, outputs, workspace, stream, error) ? fail(error) : 0;
    });
  }
  IPluginV3* clone() noexcept override {
    return attempt<IPluginV3*>(nullptr, [&] { return make_copy(); });
  }
  IPluginV3* attachToContext(IPluginResourceContext*) noexcept override { return clone(); }
  const PluginFieldCollection* getFieldsToSerialize() noexcept override;

 protected:
  Plugin(const char* op, SharedLayer layer)
      : op_(op), inputs_(kInputs, op), outputs_(kOutputs, op), layer_(std::move(layer)) {
    for (const Value& value : layer_->values)
      fields_.emplace_back(value.name, value.bytes.data(), value.type,
                           value.type == PluginFieldType::kCHAR ? static_cast<int32_t>(value.bytes.size()) : 1);
    fields_.emplace_back(kWorkspaceBytes, &workspace_bytes_, PluginFieldType::kINT64, 1);
  }
  template <class Result, class Body>
  Result attempt(Result failed, const Body& body) const noexcept {
    return guard(layer_->name.c_str(), failed, body);
  }
  int32_t fail(const std::string& what) const {
    log_message(Severity::kERROR, layer_->name + " " + what);
    return -1;
  }
  bool wrong(const std::string& what) const { return fail(what) == 0; }  // false

  virtual IPluginV3* make_copy() const = 0;
  // Reports what is wrong with shapes (a -1 is not known yet); true when nothing is.
  virtual bool check_shapes(const Dims* in) const = 0;
  bool check_packed(const char* name, const Dims& dims, int64_t experts, size_t row_bytes) const;
  bool check_shape(const Dims* in, int32_t input, const std::vector<int64_t>& sizes) const;  // -1: any size
  bool check_rank(const DimsExprs* inputs, int32_t input, int32_t rank) const;
  virtual bool set_shapes(const DimsExprs* inputs, DimsExprs* outputs, IExprBuilder& builder) const;
  virtual int64_t last_size() const { return 0; }     // of the outputs' last dimension; 0: that of the first input
  virtual bool takes_float() const { return false; }  // T may be float32
  virtual bool configure(const Inputs& most) = 0;
  virtual bool prepare(const Inputs& in) = 0;
  virtual bool check_weights(const void* const*, cudaStream_t) { return true; }
  virtual int launch(const void* const* inputs, void* const* outputs, void* workspace, cudaStream_t stream,
                     char* error) = 0;

  const char* op_;
  Slots inputs_, outputs_;
  SharedLayer layer_;

 private:
  bool supports(int32_t at, const DynamicPluginTensorDesc* tensors, int32_t inputs, int32_t outputs);
  int32_t refuse_count(int32_t count) const noexcept {
    return attempt(-1, [&] {
      return fail("has " + std::to_string(count) + " inputs, expected " + std::to_string(inputs_.count));
    });
  }
  std::vector<PluginField> fields_;  // to serialize, the last one only when it is known
  int64_t workspace_bytes_ = 0;
  PluginFieldCollection collection_{};
  bool said_type_ = false;
};

bool Plugin::set_shapes(const DimsExprs* inputs, DimsExprs* outputs, IExprBuilder& builder) const {
  if (inputs[0].nbDims < 1) return wrong(std::string(inputs_.first[0].name) + " is a scalar, expected [.., features]");
  for (int32_t i = 0; i < outputs_.count; ++i) {
    outputs[i] = inputs[0];
    if (const int64_t size = last_size()) outputs[i].d[inputs[0].nbDims - 1] = builder.constant(size);
  }
  return true;
}

bool Plugin::supports(int32_t at, const DynamicPluginTensorDesc* tensors, int32_t inputs, int32_t outputs) {
  if (inputs != inputs_.count || outputs != outputs_.count) return false;
  const PluginTensorDesc& tensor = tensors[at].desc;
  if (tensor.format != TensorFormat::kLINEAR) return false;
  const auto warn = [&](const std::string& what) {
    if (!std::exchange(said_type_, true)) log_message(Severity::kWARNING, layer_->name + " " + what);
  };
  switch (at < inputs ? inputs_.first[at].type : outputs_.first[at - inputs].type) {
    case Type::T:
      if (at != 0) return tensor.type == tensors[0].desc.type;
      if (tensor.type == DataType::kFLOAT && !takes_float())
        warn(std::string("does not run with float32 ") + inputs_.first[0].name +
             ", the kernels take float16 and bfloat16");
      return tensor.type == DataType::kHALF || tensor.type == DataType::kBF16 ||
             (takes_float() && tensor.type == DataType::kFLOAT);
    case Type::I:
      return tensor.type == DataType::kINT32 || tensor.type == DataType::kINT64;
    case Type::C:
      if (tensor.type == tensors[0].desc.type) return true;
      warn("does not run with a cache that is not of qkv's type");
      return false;
    case Type::float32:
      return tensor.type == DataType::kFLOAT;
    case Type::int32:
      return tensor.type == DataType::kINT32;
    case Type::int64:
      return tensor.type == DataType::kINT64;
  }
  return false;
}

bool Plugin::check_packed(const char* name, const Dims& dims, int64_t experts, size_t row_bytes) const {
  const int64_t words = static_cast<int64_t>(row_bytes / 4);
  if (dims.nbDims == 2 && dims.d[0] >= 1 && !differ(dims.d[0], experts) && dims.d[1] == words) return true;
  const std::string count = experts < 0 ? "experts" : std::to_string(experts);
  return wrong(std::string(name) + " has shape " + to_text(dims) + ", expected [" + count + ", " +
               std::to_string(words) + " int32 words] for these attributes");
}

bool Plugin::check_shape(const Dims* in, int32_t input, const std::vector<int64_t>& sizes) const {
  Dims expected{static_cast<int32_t>(sizes.size()), {}};
  std::copy(sizes.begin(), sizes.end(), expected.d);
  bool same = in[input].nbDims == expected.nbDims;
  for (int32_t i = 0; same && i < expected.nbDims; ++i) same = !differ(in[input].d[i], expected.d[i]);
  return same || wrong(std::string(inputs_.first[input].name) + " has shape " + to_text(in[input]) + ", expected " +
                       to_text(expected) + " (-1: any size)");
}

bool Plugin::check_rank(const DimsExprs* inputs, int32_t input, int32_t rank) const {
  return inputs[input].nbDims == rank ||
         wrong(std::string(inputs_.first[input].name) + " has " + std::to_string(inputs[input].nbDims) +
               " dimensions, expected " + std::to_string(rank));
}

const PluginFieldCollection* Plugin::getFieldsToSerialize() noexcept {
  workspace_bytes_ = layer_->workspace_bytes;
  collection_ = {static_cast<int32_t>(fields_.size() - !workspace_bytes_), fields_.data()};
  return &collection_;
}

// An operator that has plans.
template <class Problem, class Plan, int (*kPlan)(const Problem*, const qm_cuda_device*, Plan*, char*)>
class Planned : public Plugin {
 public:
  // No memory: 0, which is less than a plan will need.
  size_t getWorkspaceSize(const DynamicPluginTensorDesc* inputs, int32_t, const DynamicPluginTensorDesc*,
                          int32_t) const noexcept override {
    return attempt<size_t>(0, [&] {
      const size_t bytes = most_bytes(problem_of(Inputs(inputs, inputs_.count)));
      std::atomic<int64_t>& most = layer_->workspace_bytes;
      for (int64_t old = most; old < static_cast<int64_t>(bytes) && !most.compare_exchange_weak(old, bytes);) {
      }
      return bytes;
    });
  }

 protected:
  using Plugin::Plugin;
  virtual Problem problem_of(const Inputs& in) const = 0;
  // The tensor whose act-order the kernels read, null where there is none; what is wrong with it.
  virtual const void* ordered(const void* const*) const { return nullptr; }
  virtual int check_order(const void*, cudaStream_t, char*) const { return QM_OK; }

  // A call that is captured cannot wait for the answer; kernels clamp what they read of an order.
  bool check_weights(const void* const* inputs, cudaStream_t stream) override {
    const void* rows = layer_->runs ? ordered(inputs) : nullptr;
    if (!rows || rows == checked_) return true;
    cudaStreamCaptureStatus capture;
    if (cudaError_t e = cudaStreamIsCapturing(stream, &capture))
      return wrong(std::string("CUDA: ") + cudaGetErrorString(e));
    if (capture != cudaStreamCaptureStatusNone) return true;
    char error[QM_ERROR_SIZE];
    if (check_order(rows, stream, error)) return wrong(error);
    checked_ = rows;
    return true;
  }
  bool configure(const Inputs& most) override {
    const Problem problem = problem_of(most);
    Plan plan;
    char error[QM_ERROR_SIZE];
    return !kPlan(&problem, &kDevices[0], &plan, error) || wrong(error);
  }
  // The plan for these inputs on the current device, made when they changed.
  bool prepare(const Inputs& in) override {
    const Problem problem = problem_of(in);
    if (!std::memcmp(&problem, &problem_, sizeof(problem))) return true;
    char error[QM_ERROR_SIZE];
    if (!device_.sm) {
      int ordinal = 0;
      if (cudaError_t e = cudaGetDevice(&ordinal)) return wrong(std::string("CUDA: ") + cudaGetErrorString(e));
      if (qm_cuda_query(ordinal, &device_, error)) return wrong(error);
    }
    Plan plan;
    if (kPlan(&problem, &device_, &plan, error)) return wrong(error);
    if (!check_workspace(problem, plan)) return false;
    problem_ = problem;
    plan_ = plan;
    return true;
  }

  qm_cuda_device device_{};  // sm 0: not asked for yet
  Problem problem_{};
  Plan plan_{};
  const void* checked_ = nullptr;  // weights whose act-order is good

 private:
  // What every GPU can do with for as many rows or fewer. Fewer can take another path with a larger workspace, so each
  // number counts: up to 0.3 s for 65536 tokens, but the layers of a model are alike. Attention, linear too: each batch
  // with each number of tokens; of slots the most.
  static size_t most_bytes(Problem problem) {
    static std::mutex mutex;
    static Problem last{};
    static size_t bytes = 0;
    const std::lock_guard<std::mutex> lock(mutex);
    if (!std::memcmp(&problem, &last, sizeof(problem))) return bytes;
    last = problem;
    bytes = 0;
    char error[QM_ERROR_SIZE];
    int64_t one = 1, &batch = batch_in(problem, one), &rows = rows_in(problem);
    for (const int64_t most = rows; batch > 0; --batch)
      for (rows = most; rows > 0; --rows) {
        if (most - rows > (1 << 16) && rows % 1024 != 0) continue;
        for (const qm_cuda_device& device : kDevices) {
          Plan plan{};
          if (!kPlan(&problem, &device, &plan, error)) bytes = std::max<size_t>(bytes, plan.workspace_bytes);
        }
      }
    return bytes;
  }
  // A GPU that kDevices has not, or an engine that another version of this library built, may need more than there is.
  bool check_workspace(const Problem& problem, const Plan& plan) const {
    const auto known = [&](const qm_cuda_device& d) {
      return d.sm == device_.sm && d.shared_bytes == device_.shared_bytes;
    };
    uint64_t least = UINT64_MAX;  // of the profiles with room for these rows
    if (std::none_of(std::begin(kDevices), std::end(kDevices), known)) least = most_bytes(problem);
    if (const int64_t most = layer_->workspace_bytes) least = std::min<uint64_t>(least, static_cast<uint64_t>(most));
    if (plan.workspace_bytes <= least) return true;
    Problem copy = problem;
    int64_t one = 1;
    return wrong("needs " + std::to_string(plan.workspace_bytes) + " bytes of workspace for " +
                 std::to_string(batch_in(copy, one) * rows_in(copy)) + " rows on this GPU (compute capability " +
                 std::to_string(device_.sm / 10) + "." + std::to_string(device_.sm % 10) + ", " +
                 std::to_string(device_.shared_bytes) + " bytes of shared memory), the engine has " +
                 std::to_string(least) + ": build it here, with this library");
  }
  static int64_t& rows_in(qm_cuda_problem& problem) { return problem.tokens; }
  static int64_t& rows_in(qm_cuda_linear_problem& problem) { return problem.rows; }
  static int64_t& rows_in(qm_cuda_attention_problem& problem) { return problem.tokens; }
  static int64_t& rows_in(qm_cuda_delta_problem& problem) { return problem.tokens; }
  static int64_t& rows_in(qm_cuda_router_problem& problem) { return problem.tokens; }
  template <class Any>
  static int64_t& batch_in(Any&, int64_t& one) {
    return one;
  }
  static int64_t& batch_in(qm_cuda_attention_problem& problem, int64_t&) { return problem.batch; }
  static int64_t& batch_in(qm_cuda_delta_problem& problem, int64_t&) { return problem.batch; }
};

class MoE final : public Planned<qm_cuda_problem, qm_cuda_plan, qm_cuda_plan_moe> {
 public:
  MoE(SharedLayer layer, const qm_moe& moe) : Planned("QuantMoE", std::move(layer)), moe_(moe) {}

 private:
  IPluginV3* make_copy() const override { return new MoE(layer_, moe_); }
  bool check_shapes(const Dims* in) const override;
  qm_cuda_problem problem_of(const Inputs& in) const override {
    const Dims& ids = in.dims[QuantMoE_topk_ids];
    qm_cuda_problem problem{};
    problem.moe = moe_;
    problem.type = qm_type(in.types[QuantMoE_hidden_states]);
    problem.id_bytes = in.types[QuantMoE_topk_ids] == DataType::kINT64 ? 8 : 4;
    problem.tokens = rows_of(ids);
    problem.top_k = ids.d[ids.nbDims - 1];
    problem.local_experts = in.dims[QuantMoE_w13].d[0];
    return problem;
  }
  const void* ordered(const void* const* inputs) const override {
    return moe_.w13.perm ? inputs[QuantMoE_w13] : nullptr;
  }
  int check_order(const void* rows, cudaStream_t stream, char* error) const override {
    return qm_cuda_check_moe(&problem_, rows, stream, error);
  }
  int launch(const void* const* inputs, void* const* outputs, void* workspace, cudaStream_t stream,
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

bool MoE::check_shapes(const Dims* in) const {
  const Dims &x = in[QuantMoE_hidden_states], &ids = in[QuantMoE_topk_ids], &weights = in[QuantMoE_topk_weights];
  if (x.nbDims < 1 || differ(x.d[x.nbDims - 1], moe_.hidden_size))
    return wrong("hidden_states has shape " + to_text(x) + ", expected [.., hidden_size " +
                 std::to_string(moe_.hidden_size) + "]");
  bool same = ids.nbDims == x.nbDims && weights.nbDims == x.nbDims;
  for (int32_t i = 0; same && i + 1 < x.nbDims; ++i) same = !differ(ids.d[i], x.d[i]);
  for (int32_t i = 0; same && i < x.nbDims; ++i) same = !differ(ids.d[i], weights.d[i]);
  if (!same)
    return wrong("topk_ids and topk_weights have shapes " + to_text(ids) + " and " + to_text(weights) +
                 ", expected the same, and the sizes before the last of hidden_states " + to_text(x));
  if (ids.d[ids.nbDims - 1] < 1)
    return wrong("topk_ids has shape " + to_text(ids) + ", expected a last dimension known when the engine is built");
  const Dims& w13 = in[QuantMoE_w13];
  return check_packed("w13", w13, -1, qm_cuda_row_bytes(&moe_, 13)) &&
         check_packed("w2", in[QuantMoE_w2], w13.d[0], qm_cuda_row_bytes(&moe_, 2));
}

class Linear final : public Planned<qm_cuda_linear_problem, qm_cuda_plan, qm_cuda_plan_linear> {
 public:
  Linear(SharedLayer layer, const qm_linear& linear) : Planned("QuantLinear", std::move(layer)), linear_(linear) {}

 private:
  IPluginV3* make_copy() const override { return new Linear(layer_, linear_); }
  int64_t last_size() const override { return linear_.out_features; }
  bool check_shapes(const Dims* in) const override {
    const Dims& x = in[QuantLinear_x];
    if (x.nbDims < 1 || differ(x.d[x.nbDims - 1], linear_.in_features))
      return wrong("x has shape " + to_text(x) + ", expected [.., in_features " + std::to_string(linear_.in_features) +
                   "]");
    return check_packed("w", in[QuantLinear_w], 1, qm_cuda_linear_row_bytes(&linear_));
  }
  qm_cuda_linear_problem problem_of(const Inputs& in) const override {
    qm_cuda_linear_problem problem{};
    problem.linear = linear_;
    problem.type = qm_type(in.types[QuantLinear_x]);
    problem.rows = rows_of(in.dims[QuantLinear_x]);
    return problem;
  }
  const void* ordered(const void* const* inputs) const override {
    return linear_.w.perm ? inputs[QuantLinear_w] : nullptr;
  }
  int check_order(const void* rows, cudaStream_t stream, char* error) const override {
    return qm_cuda_check_linear(&problem_, rows, stream, error);
  }
  int launch(const void* const* inputs, void* const* outputs, void* workspace, cudaStream_t stream,
             char* error) override {
    const qm_cuda_linear_tensors tensors{inputs[QuantLinear_x], inputs[QuantLinear_w], outputs[0], workspace};
    return qm_cuda_launch_linear(&problem_, &plan_, &tensors, stream, error);
  }

  qm_linear linear_;
};

class MoERouting final : public Plugin {
 public:
  MoERouting(SharedLayer layer, const qm_routing& routing)
      : Plugin("MoERouting", std::move(layer)), problem_{routing, QM_F32, 0} {}
  size_t getWorkspaceSize(const DynamicPluginTensorDesc*, int32_t, const DynamicPluginTensorDesc*,
                          int32_t) const noexcept override {
    return 0;
  }

 private:
  IPluginV3* make_copy() const override { return new MoERouting(layer_, problem_.routing); }
  int64_t last_size() const override { return problem_.routing.top_k + problem_.routing.shared_experts; }
  bool takes_float() const override { return true; }
  bool check_shapes(const Dims* in) const override {
    const Dims &logits = in[MoERouting_logits], &bias = in[MoERouting_correction_bias];
    const qm_routing& r = problem_.routing;
    const std::string experts = "num_experts " + std::to_string(r.num_experts);
    if (logits.nbDims < 1 || differ(logits.d[logits.nbDims - 1], r.num_experts + r.shared_gate))
      return wrong("logits has shape " + to_text(logits) + ", expected [.., " + experts +
                   (r.shared_gate ? " + 1]" : "]"));
    if (bias.nbDims != 1 || differ(bias.d[0], r.num_experts))
      return wrong("correction_bias has shape " + to_text(bias) + ", expected [" + experts + "]");
    return true;
  }
  bool configure(const Inputs&) override { return true; }
  bool prepare(const Inputs& in) override {
    problem_.type = qm_type(in.types[MoERouting_logits]);
    problem_.tokens = rows_of(in.dims[MoERouting_logits]);
    return true;
  }
  int launch(const void* const* inputs, void* const* outputs, void*, cudaStream_t stream, char* error) override {
    const qm_cuda_routing_tensors tensors{inputs[MoERouting_logits],
                                          static_cast<const float*>(inputs[MoERouting_correction_bias]),
                                          static_cast<int32_t*>(outputs[0]), static_cast<float*>(outputs[1])};
    return qm_cuda_launch_routing(&problem_, &tensors, stream, error);
  }

  qm_cuda_routing_problem problem_;
};

class Router final : public Planned<qm_cuda_router_problem, qm_cuda_router_plan, qm_cuda_plan_router> {
 public:
  Router(SharedLayer layer, const qm_router& router) : Planned("MoERouter", std::move(layer)), router_(router) {}

 private:
  IPluginV3* make_copy() const override { return new Router(layer_, router_); }
  int64_t last_size() const override { return router_.top_k + router_.shared_experts; }
  bool check_shapes(const Dims* in) const override {
    const Dims& x = in[MoERouter_hidden_states];
    if (x.nbDims < 1 || differ(x.d[x.nbDims - 1], router_.hidden_size))
      return wrong("hidden_states has shape " + to_text(x) + ", expected [.., hidden_size " +
                   std::to_string(router_.hidden_size) + "]");
    const int64_t experts = router_.num_experts, rows = experts + router_.shared_gate;
    return check_shape(in, MoERouter_weight, {rows, router_.hidden_size}) &&
           (is_none(in[MoERouter_bias]) || check_shape(in, MoERouter_bias, {rows})) &&
           (is_none(in[MoERouter_correction_bias]) || check_shape(in, MoERouter_correction_bias, {experts}));
  }
  qm_cuda_router_problem problem_of(const Inputs& in) const override {
    qm_cuda_router_problem problem{};
    problem.router = router_;
    problem.type = qm_type(in.types[MoERouter_hidden_states]);
    problem.tokens = rows_of(in.dims[MoERouter_hidden_states]);
    return problem;
  }
  bool prepare(const Inputs& in) override {
    none_[0] = in.dims[MoERouter_bias].d[0] == 0;
    none_[1] = in.dims[MoERouter_correction_bias].d[0] == 0;
    return Planned::prepare(in);
  }
  int launch(const void* const* inputs, void* const* outputs, void* workspace, cudaStream_t stream,
             char* error) override {
    const auto bias = [&](int32_t input, bool none) {
      return none ? nullptr : static_cast<const float*>(inputs[input]);
    };
    qm_cuda_router_tensors tensors{};
    tensors.hidden_states = inputs[MoERouter_hidden_states];
    tensors.weight = inputs[MoERouter_weight];
    tensors.bias = bias(MoERouter_bias, none_[0]);
    tensors.correction_bias = bias(MoERouter_correction_bias, none_[1]);
    tensors.topk_ids = static_cast<int32_t*>(outputs[0]);
    tensors.topk_weights = static_cast<float*>(outputs[1]);
    tensors.workspace = workspace;
    return qm_cuda_launch_router(&problem_, &plan_, &tensors, stream, error);
  }

  qm_router router_;
  bool none_[2] = {};  // which biases are empty
};

class Norm final : public Plugin {
 public:
  Norm(SharedLayer layer, const qm_norm& norm) : Plugin("AddRMSNorm", std::move(layer)) { problem_.norm = norm; }
  size_t getWorkspaceSize(const DynamicPluginTensorDesc*, int32_t, const DynamicPluginTensorDesc*,
                          int32_t) const noexcept override {
    return 0;
  }

 private:
  IPluginV3* make_copy() const override { return new Norm(layer_, problem_.norm); }
  bool check_shapes(const Dims* in) const override {
    const Dims &x = in[AddRMSNorm_x], &weight = in[AddRMSNorm_weight];
    if (weight.nbDims != 1 || x.nbDims < 1 || differ(x.d[x.nbDims - 1], weight.d[0]))
      return wrong("x has shape " + to_text(x) + " and weight " + to_text(weight) + ", expected [.., H] and [H]");
    return check_shape(in, AddRMSNorm_residual, std::vector<int64_t>(x.d, x.d + x.nbDims));
  }
  bool configure(const Inputs&) override { return true; }
  bool prepare(const Inputs& in) override {
    problem_.type = qm_type(in.types[AddRMSNorm_x]);
    problem_.rows = rows_of(in.dims[AddRMSNorm_x]);
    problem_.columns = in.dims[AddRMSNorm_weight].d[0];
    return true;
  }
  int launch(const void* const* inputs, void* const* outputs, void*, cudaStream_t stream, char* error) override {
    const qm_cuda_norm_tensors tensors{inputs[AddRMSNorm_x], inputs[AddRMSNorm_residual], inputs[AddRMSNorm_weight],
                                       outputs[0], outputs[1]};
    return qm_cuda_launch_norm(&problem_, &tensors, stream, error);
  }

  qm_cuda_norm_problem problem_{};
};

class TokenRows final : public Plugin {
 public:
  TokenRows(SharedLayer layer, const qm_rows& node) : Plugin("TokenRows", std::move(layer)) { problem_.node = node; }
  size_t getWorkspaceSize(const DynamicPluginTensorDesc*, int32_t, const DynamicPluginTensorDesc*,
                          int32_t) const noexcept override {
    return 0;
  }

 private:
  IPluginV3* make_copy() const override { return new TokenRows(layer_, problem_.node); }
  bool set_shapes(const DimsExprs* inputs, DimsExprs* outputs, IExprBuilder& builder) const override {
    outputs[0].nbDims = 2;
    outputs[1].nbDims = 3;
    outputs[0].d[0] = outputs[1].d[0] = inputs[TokenRows_attention_mask].d[0];
    outputs[0].d[1] = builder.constant(3);
    outputs[1].d[1] = outputs[1].d[2] = builder.constant(1);
    return true;
  }
  bool check_shapes(const Dims* in) const override {
    const int64_t batch = in[TokenRows_attention_mask].d[0];
    return check_shape(in, TokenRows_attention_mask, {-1, -1}) &&
           check_shape(in, TokenRows_past_key, {batch, -1, -1, -1}) &&
           check_shape(in, TokenRows_input_ids, {batch, -1});
  }
  bool configure(const Inputs&) override { return true; }
  bool prepare(const Inputs& in) override {
    const Dims& mask = in.dims[TokenRows_attention_mask];
    problem_.batch = mask.d[0];
    problem_.tokens = in.dims[TokenRows_input_ids].d[1];
    problem_.past_slots = in.dims[TokenRows_past_key].d[2];
    problem_.length = mask.d[1];
    return true;
  }
  int launch(const void* const* inputs, void* const* outputs, void*, cudaStream_t stream, char* error) override {
    const qm_cuda_rows_tensors tensors{static_cast<const int64_t*>(inputs[TokenRows_attention_mask]),
                                       static_cast<int32_t*>(outputs[0]), static_cast<int64_t*>(outputs[1])};
    return qm_cuda_launch_rows(&problem_, &tensors, stream, error);
  }

  qm_cuda_rows_problem problem_{};
};

// A cache stays where it is when past and present are bound to the same memory: past is an input of the network,
// present an output, and TensorRT copies neither. Nothing says so to it (getAliasedInput of IPluginV3OneBuildV2), since
// the present of an engine whose cache grows is larger than past.
class Attention final : public Planned<qm_cuda_attention_problem, qm_cuda_attention_plan, qm_cuda_plan_attention> {
 public:
  Attention(SharedLayer layer, const qm_attention& attention)
      : Planned("CachedAttention", std::move(layer)), attention_(attention) {}

 private:
  IPluginV3* make_copy() const override { return new Attention(layer_, attention_); }
  bool set_shapes(const DimsExprs* inputs, DimsExprs* outputs, IExprBuilder& builder) const override;
  bool check_shapes(const Dims* in) const override;
  qm_cuda_attention_problem problem_of(const Inputs& in) const override {
    const Dims& qkv = in.dims[CachedAttention_qkv];
    qm_cuda_attention_problem problem{};
    problem.attention = attention_;
    problem.type = qm_type(in.types[CachedAttention_qkv]);
    problem.batch = qkv.d[0];
    problem.tokens = qkv.d[1];
    problem.past_slots = in.dims[CachedAttention_past_key].d[2];
    problem.slots = std::max(problem.past_slots, in.dims[CachedAttention_attention_mask].d[1]);
    return problem;
  }
  int launch(const void* const* inputs, void* const* outputs, void* workspace, cudaStream_t stream,
             char* error) override {
    const auto floats = [&](int32_t input) { return static_cast<const float*>(inputs[input]); };
    qm_cuda_attention_tensors tensors{};
    tensors.qkv = inputs[CachedAttention_qkv];
    tensors.past_key = inputs[CachedAttention_past_key];
    tensors.past_value = inputs[CachedAttention_past_value];
    tensors.rows = static_cast<const int32_t*>(inputs[CachedAttention_rows]);
    tensors.cos = floats(CachedAttention_cos);
    tensors.sin = floats(CachedAttention_sin);
    tensors.q_norm = floats(CachedAttention_q_norm);
    tensors.k_norm = floats(CachedAttention_k_norm);
    tensors.sinks = floats(CachedAttention_sinks);
    tensors.output = outputs[0];
    tensors.present_key = outputs[1];
    tensors.present_value = outputs[2];
    tensors.workspace = workspace;
    return qm_cuda_launch_attention(&problem_, &plan_, &tensors, stream, error);
  }

  qm_attention attention_;
};

bool Attention::set_shapes(const DimsExprs* inputs, DimsExprs* outputs, IExprBuilder& builder) const {
  const DimsExprs &qkv = inputs[CachedAttention_qkv], &mask = inputs[CachedAttention_attention_mask];
  for (const auto& [input, rank] : {std::pair{CachedAttention_qkv, 3},
                                    {CachedAttention_past_key, 4},
                                    {CachedAttention_past_value, 4},
                                    {CachedAttention_attention_mask, 2}})
    if (!check_rank(inputs, input, rank)) return false;
  outputs[0] = qkv;
  outputs[0].d[2] = builder.constant(int64_t{attention_.num_heads} * attention_.v_head_size);
  for (const int32_t i : {0, 1}) {
    outputs[1 + i] = inputs[CachedAttention_past_key + i];
    IDimensionExpr const*& slots = outputs[1 + i].d[2];
    slots = builder.operation(DimensionOperation::kMAX, *slots, *mask.d[1]);
  }
  return true;
}

bool Attention::check_shapes(const Dims* in) const {
  const qm_attention& a = attention_;
  const auto check = [&](int32_t input, const std::vector<int64_t>& sizes) { return check_shape(in, input, sizes); };
  const int64_t heads = a.num_heads, groups = a.kv_num_heads, d = a.head_size, v = a.v_head_size, n = a.key_split;
  const auto weights = [&](int64_t all) {
    return a.qk_norm == k_qk_norm_none ? 0 : a.qk_norm == k_qk_norm_head ? d : all * d;
  };
  const Dims &qkv = in[CachedAttention_qkv], &past = in[CachedAttention_past_key];
  return check(CachedAttention_qkv, {-1, -1, (heads + groups) * d + (n ? 0 : groups * v)}) &&
         check(CachedAttention_past_key, {qkv.d[0], groups, -1, n ? n : d}) &&
         check(CachedAttention_past_value, {qkv.d[0], groups, past.d[2], n ? d - n : v}) &&
         check(CachedAttention_rows, {qkv.d[0], 3}) && check(CachedAttention_attention_mask, {qkv.d[0], -1}) &&
         check(CachedAttention_cos, {qkv.d[0], qkv.d[1], a.rotary_size / 2}) &&
         check(CachedAttention_sin, {qkv.d[0], qkv.d[1], a.rotary_size / 2}) &&
         check(CachedAttention_q_norm, {weights(heads)}) && check(CachedAttention_k_norm, {weights(groups)}) &&
         check(CachedAttention_sinks, {heads});
}

// A state's shape, with the window's size in front where there is one.
std::vector<int64_t> windowed(int32_t window, std::vector<int64_t> state) {
  if (window > 1) state.insert(state.begin(), window);
  return state;
}

// A state stays where it is as a cache does: past and present are bound to the same memory.
class Conv final : public Plugin {
 public:
  Conv(SharedLayer layer, const qm_conv& conv)
      : Plugin("CausalConv", std::move(layer)), problem_{conv, QM_F32, 0, 0}, bias_(false) {}
  size_t getWorkspaceSize(const DynamicPluginTensorDesc*, int32_t, const DynamicPluginTensorDesc*,
                          int32_t) const noexcept override {
    return 0;
  }

 private:
  IPluginV3* make_copy() const override { return new Conv(layer_, problem_.conv); }
  bool set_shapes(const DimsExprs* inputs, DimsExprs* outputs, IExprBuilder& builder) const override {
    const int32_t rank = problem_.conv.state_window > 1 ? 4 : 3;
    if (!check_rank(inputs, CausalConv_x, 3) || !check_rank(inputs, CausalConv_past_conv, rank)) return false;
    outputs[0] = inputs[CausalConv_x];
    outputs[0].d[2] = builder.constant(problem_.conv.channels);
    outputs[1] = inputs[CausalConv_past_conv];
    return true;
  }
  bool check_shapes(const Dims* in) const override {
    const int64_t channels = problem_.conv.channels, width = problem_.conv.width;
    const Dims &x = in[CausalConv_x], &bias = in[CausalConv_bias];
    const auto check = [&](int32_t input, const std::vector<int64_t>& sizes) { return check_shape(in, input, sizes); };
    return check(CausalConv_x, {-1, -1, x_of(problem_.conv).size}) && check(CausalConv_weight, {channels, width}) &&
           (is_none(bias) || check(CausalConv_bias, {channels})) &&
           check(CausalConv_past_conv, windowed(problem_.conv.state_window, {x.d[0], channels, width - 1})) &&
           check(CausalConv_rows, {x.d[0], 3});
  }
  bool read_shapes(const Inputs& in) {
    const Dims& x = in.dims[CausalConv_x];
    problem_.type = qm_type(in.types[CausalConv_x]);
    problem_.batch = x.d[0];
    problem_.tokens = x.d[1];
    bias_ = in.dims[CausalConv_bias].d[0] > 0;
    char error[QM_ERROR_SIZE];
    return !qm_cuda_validate_conv(&problem_, error) || wrong(error);
  }
  bool configure(const Inputs& most) override { return read_shapes(most); }
  bool prepare(const Inputs& in) override { return read_shapes(in); }
  int launch(const void* const* inputs, void* const* outputs, void*, cudaStream_t stream, char* error) override {
    const auto floats = [&](int32_t input) { return static_cast<const float*>(inputs[input]); };
    qm_cuda_conv_tensors tensors{};
    tensors.x = inputs[CausalConv_x];
    tensors.weight = floats(CausalConv_weight);
    tensors.bias = bias_ ? floats(CausalConv_bias) : nullptr;
    tensors.past_conv = inputs[CausalConv_past_conv];
    tensors.rows = static_cast<const int32_t*>(inputs[CausalConv_rows]);
    tensors.y = outputs[0];
    tensors.present_conv = outputs[1];
    return qm_cuda_launch_conv(&problem_, &tensors, stream, error);
  }

  qm_cuda_conv_problem problem_;
  bool bias_;
};

class Delta final : public Planned<qm_cuda_delta_problem, qm_cuda_delta_plan, qm_cuda_plan_delta> {
 public:
  Delta(SharedLayer layer, const qm_delta& delta) : Planned("GatedDelta", std::move(layer)), delta_(delta) {}

 private:
  IPluginV3* make_copy() const override { return new Delta(layer_, delta_); }
  bool set_shapes(const DimsExprs* inputs, DimsExprs* outputs, IExprBuilder& builder) const override {
    const int32_t rank = delta_.state_window > 1 ? 5 : 4;
    if (!check_rank(inputs, GatedDelta_qkv, 3) || !check_rank(inputs, GatedDelta_past_state, rank)) return false;
    outputs[0] = inputs[GatedDelta_qkv];
    outputs[0].d[2] = builder.constant(int64_t{delta_.num_v_heads} * delta_.v_head_size);
    outputs[1] = inputs[GatedDelta_past_state];
    return true;
  }
  bool check_shapes(const Dims* in) const override {
    const int64_t heads = delta_.num_v_heads, k = delta_.k_head_size, v = delta_.v_head_size;
    const int64_t decays = heads * (delta_.decay_per_key ? k : 1);
    const Dims& qkv = in[GatedDelta_qkv];
    const auto check = [&](int32_t input, const std::vector<int64_t>& sizes) { return check_shape(in, input, sizes); };
    return check(GatedDelta_qkv, {-1, -1, 2 * delta_.num_k_heads * k + heads * v}) &&
           check(GatedDelta_a, {qkv.d[0], qkv.d[1], a_of(delta_).size}) &&
           check(GatedDelta_b, {qkv.d[0], qkv.d[1], b_of(delta_).size}) &&
           check(GatedDelta_z, {qkv.d[0], qkv.d[1], z_of(delta_).size}) && check(GatedDelta_a_log, {heads}) &&
           check(GatedDelta_dt_bias, {decays}) && check(GatedDelta_norm, {v}) &&
           check(GatedDelta_past_state, windowed(delta_.state_window, {qkv.d[0], heads, k, v})) &&
           check(GatedDelta_rows, {qkv.d[0], 3});
  }
  qm_cuda_delta_problem problem_of(const Inputs& in) const override {
    const Dims& qkv = in.dims[GatedDelta_qkv];
    qm_cuda_delta_problem problem{};
    problem.delta = delta_;
    problem.type = qm_type(in.types[GatedDelta_qkv]);
    problem.batch = qkv.d[0];
    problem.tokens = qkv.d[1];
    return problem;
  }
  int launch(const void* const* inputs, void* const* outputs, void* workspace, cudaStream_t stream,
             char* error) override {
    const auto floats = [&](int32_t input) { return static_cast<const float*>(inputs[input]); };
    qm_cuda_delta_tensors tensors{};
    tensors.qkv = inputs[GatedDelta_qkv];
    tensors.a = inputs[GatedDelta_a];
    tensors.b = inputs[GatedDelta_b];
    tensors.z = inputs[GatedDelta_z];
    tensors.a_log = floats(GatedDelta_a_log);
    tensors.dt_bias = floats(GatedDelta_dt_bias);
    tensors.norm = floats(GatedDelta_norm);
    tensors.past_state = floats(GatedDelta_past_state);
    tensors.rows = static_cast<const int32_t*>(inputs[GatedDelta_rows]);
    tensors.y = outputs[0];
    tensors.present_state = static_cast<float*>(outputs[1]);
    tensors.workspace = workspace;
    return qm_cuda_launch_delta(&problem_, &plan_, &tensors, stream, error);
  }

  qm_delta delta_;
};

// The attributes of any operator; the version is the first of each.
union Node {
  int32_t op_version;
#define QM_OP(op, name, version) qm_##name name;
#include "op.def"
};

class Creator final : public IPluginCreatorV3One {
 public:
  explicit Creator(const char* op) : op_(op) {
    const qm_attribute* a;
    for (size_t i = 0; (a = qm_attribute_at(op, i)); ++i)
      fields_.emplace_back(a->name, nullptr, field_type(a->kind), 1);
    collection_ = {static_cast<int32_t>(fields_.size()), fields_.data()};
  }
  const char* getPluginName() const noexcept override { return op_; }
  const char* getPluginVersion() const noexcept override { return "1"; }
  // TensorRT's parser looks for creators in the empty namespace, whatever the node's domain is.
  const char* getPluginNamespace() const noexcept override { return ""; }
  const PluginFieldCollection* getFieldNames() noexcept override { return &collection_; }
  IPluginV3* createPlugin(const char* name, const PluginFieldCollection* given, TensorRTPhase phase) noexcept override {
    return guard<IPluginV3*>(op_, nullptr, [&] { return create(name, given, phase == TensorRTPhase::kRUNTIME); });
  }

 private:
  IPluginV3* create(const char* name, const PluginFieldCollection* given, bool runs) const;
  bool read_fields(const PluginFieldCollection* given, bool runs, Node* node, std::vector<Value>* values,
                   int64_t* workspace_bytes, std::string* why) const;
  static PluginFieldType field_type(char kind) {
    return kind == 'i' ? PluginFieldType::kINT32 : kind == 'f' ? PluginFieldType::kFLOAT32 : PluginFieldType::kCHAR;
  }
  const char* op_;
  std::vector<PluginField> fields_;
  PluginFieldCollection collection_{};
};

// Sets the attribute of a field and keeps its value; false with the sentence in error.
bool set(const char* op, Node* node, std::vector<Value>* values, const PluginField& expected, const PluginField& field,
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

// The attributes of a layer; false with the reason in why.
bool Creator::read_fields(const PluginFieldCollection* given, bool runs, Node* node, std::vector<Value>* values,
                          int64_t* workspace_bytes, std::string* why) const {
  auto refuse = [&](const std::string& what) {
    *why = what;
    return false;
  };
  const PluginField* const end = given ? given->fields + given->nbFields : nullptr;
  auto find = [&](const char* attribute) {
    return given ? std::find_if(given->fields, end,
                                [&](const PluginField& f) { return f.name && !std::strcmp(f.name, attribute); })
                 : end;
  };
  char error[QM_ERROR_SIZE];
  // op_version is the first: a file of an earlier one lacks the attributes that came later.
  const auto later = [&](size_t i) { return i > 0 && qm_attribute_at(op_, i)->since > node->op_version; };
  for (size_t i = 0; i < fields_.size(); ++i) {
    if (later(i)) continue;
    const PluginField* field = find(fields_[i].name);
    if (field == end) return refuse(std::string("attribute ") + fields_[i].name + " is required");
    if (!set(op_, node, values, fields_[i], *field, error)) return refuse(error);
    if (i == 0 && qm_set_version(op_, node, node->op_version, error)) return refuse(error);
  }
  *workspace_bytes = 0;
  for (const PluginField* field = given->fields; field != end; ++field) {
    if (!field->name) return refuse("an attribute has no name");
    if (runs && !std::strcmp(field->name, kWorkspaceBytes) && field->type == PluginFieldType::kINT64 && field->data &&
        field->length == 1) {
      std::memcpy(workspace_bytes, field->data, sizeof(*workspace_bytes));
      continue;
    }
    size_t i = 0;
    while (i < fields_.size() && std::strcmp(fields_[i].name, field->name)) ++i;
    if (i == fields_.size() || later(i)) return refuse(std::string("unknown attribute ") + field->name);
  }
  return true;
}

IPluginV3* Creator::create(const char* name, const PluginFieldCollection* given, bool runs) const {
  const std::string layer = std::string(op_) + " layer \"" + (name ? name : "") + "\":";
  auto refuse = [&](const std::string& what) {
    log_message(Severity::kERROR, layer + " " + what);
    return nullptr;
  };
  Node node{};
  std::vector<Value> values;
  int64_t workspace_bytes;
  if (std::string why; !read_fields(given, runs, &node, &values, &workspace_bytes, &why)) return refuse(why);
  char error[QM_ERROR_SIZE];
  // Attributes no kernel can have are refused here, where the layer is named; shapes come later.
  const auto shared = std::make_shared<PluginLayer>(layer, std::move(values), runs, workspace_bytes);
  qm_cuda_plan plan;
  if (op_ == std::string_view("QuantLinear")) {
    const qm_cuda_linear_problem problem{node.linear, type_beside(node.linear.w), 1};
    if (qm_cuda_plan_linear(&problem, &kDevices[0], &plan, error)) return refuse(error);
    return new Linear(shared, node.linear);
  }
  if (op_ == std::string_view("MoERouting")) {
    const qm_cuda_routing_problem problem{node.routing, QM_F32, 1};
    if (qm_cuda_validate_routing(&problem, error)) return refuse(error);
    return new MoERouting(shared, node.routing);
  }
  if (op_ == std::string_view("MoERouter")) {
    const qm_cuda_router_problem problem{node.router, QM_F16, 1};
    qm_cuda_router_plan path;
    if (qm_cuda_plan_router(&problem, &kDevices[0], &path, error)) return refuse(error);
    return new Router(shared, node.router);
  }
  if (op_ == std::string_view("AddRMSNorm")) {
    const qm_cuda_norm_problem problem{node.norm, QM_F16, 1, 1};
    if (qm_cuda_validate_norm(&problem, error)) return refuse(error);
    return new Norm(shared, node.norm);
  }
  if (op_ == std::string_view("TokenRows")) return new TokenRows(shared, node.rows);
  if (op_ == std::string_view("AllReduce") || op_ == std::string_view("AllGather") ||
      op_ == std::string_view("ReduceScatter"))
    return refuse("the plug-ins have no sums over ranks: ONNX Runtime's CUDA provider runs slices of a model");
  if (op_ == std::string_view("CachedAttention")) {
    if (const int32_t format = node.attention.cache_format; format != k_cache_format_none)
      return refuse(std::string("cache_format is \"") + enum_name("cache_format", format) +
                    "\", the plug-in's caches have qkv's type: export with --cache bf16 (or f16, as --dtype)");
    const qm_cuda_attention_problem problem{node.attention, QM_F16, 1, 1, 0, 1};
    qm_cuda_attention_plan tiles;
    if (qm_cuda_plan_attention(&problem, &kDevices[0], &tiles, error)) return refuse(error);
    return new Attention(shared, node.attention);
  }
  if (op_ == std::string_view("CausalConv")) {
    const qm_cuda_conv_problem problem{node.conv, QM_F16, 1, 1};
    if (qm_cuda_validate_conv(&problem, error)) return refuse(error);
    return new Conv(shared, node.conv);
  }
  if (op_ == std::string_view("GatedDelta")) {
    const qm_cuda_delta_problem problem{node.delta, QM_F16, 1, 1};
    qm_cuda_delta_plan blocks;
    if (qm_cuda_plan_delta(&problem, &kDevices[0], &blocks, error)) return refuse(error);
    return new Delta(shared, node.delta);
  }
  const int64_t experts = int64_t{node.moe.num_experts} - std::max(0, node.moe.expert_offset);
  const qm_projection& floats = node.moe.w13.format == k_format_bf16 ? node.moe.w13 : node.moe.w2;
  const qm_cuda_problem problem{node.moe, type_beside(floats), 4, 1, 1, std::max<int64_t>(1, experts)};
  if (qm_cuda_plan_moe(&problem, &kDevices[0], &plan, error)) return refuse(error);
  return new MoE(shared, node.moe);
}

// Never destroyed: TensorRT may ask for their names while the process exits.
std::vector<IPluginCreatorInterface*>& creators() {
  static auto& creators = *new std::vector<IPluginCreatorInterface*>{
#define QM_OP(op, name, version) new Creator(#op),
#include "op.def"
  };
  return creators;
}

// A TensorRT's global registry.
struct Global {
  void* registry;
  bool versioned;

  template <class Use>
  bool with_registry(const Use& use) const {
    return versioned ? use(*static_cast<Registry<VersionedRegistryHead>*>(registry))
                     : use(*static_cast<Registry<PlainRegistryHead>*>(registry));
  }
};
// Those that hold the creators because this library was only opened: trtexec --staticPlugins, ONNX Runtime's
// trt_extra_plugin_lib_paths, dlopen.
std::mutex registered_mutex;
std::vector<Global>& registered() {
  static auto& registered = *new std::vector<Global>;
  return registered;
}

// Whether another copy of this library, an engine's for example, is registered. getCreator would log that it is not.
template <class R>
bool holds(const R& registry) {
  int32_t count = 0;
  IPluginCreatorInterface* const* creators = registry.getAllCreators(&count);
  return std::any_of(creators, creators + count, [](IPluginCreatorInterface* creator) {
    return !std::strcmp(creator->getInterfaceInfo().kind, "PLUGIN CREATOR_V3ONE") &&
           !std::strcmp(static_cast<IPluginCreatorV3One*>(creator)->getPluginName(), "QuantMoE");
  });
}

// Every TensorRT in the process; this library links to none.
void register_where_loaded() {
  std::vector<std::string> names;  // of what is loaded; "" is the program
  dl_iterate_phdr(
      [](dl_phdr_info* info, size_t, void* to) {
        static_cast<std::vector<std::string>*>(to)->emplace_back(info->dlpi_name);
        return 0;
      },
      &names);
  for (const std::string& name : names) {
    void* library = dlopen(name.empty() ? nullptr : name.c_str(), RTLD_LAZY | RTLD_NOLOAD);
    if (!library) continue;
    auto* get = reinterpret_cast<void* (*)()>(dlsym(library, "getPluginRegistry"));
    void* registry = get && dlsym(library, "getInferLibVersion") ? get() : nullptr;
    const int32_t version = registry ? library_version(registry) : 0;
    const Global global{registry, versioned(version)};
    const bool registers = version >= kOldest && global.with_registry([](auto& r) {
      if (holds(r)) return false;
      for (IPluginCreatorInterface* creator : creators()) r.registerCreator(*creator, "");
      return true;
    });
    if (registers) {
      registered().push_back(global);
      void* logger = dlsym(library, "getLogger");
      if (global.versioned) {
        versioned_logger = reinterpret_cast<VersionedLogger* (*)()>(logger);
      } else {
        plain_logger = reinterpret_cast<PlainLogger* (*)()>(logger);
      }
      continue;  // stays loaded: its registry and logger are used as long as this library is there
    }
    dlclose(library);
  }
}

// A registry that loads the library registers what getCreators gives it, and refuses what is registered already: takes
// the creators from the TensorRT in this library, from no other. When that one deregisters the library it has none.
void unregister(const void* tensorrt) {
  std::vector<Global> calling;
  {
    const std::lock_guard<std::mutex> lock(registered_mutex);
    std::vector<Global>& all = registered();
    const auto others = std::partition(all.begin(), all.end(), [&](const Global& global) {
      return library_of(table_of(global.registry)) != tensorrt;
    });
    calling.assign(others, all.end());
    all.erase(others, all.end());
  }
  for (const Global& global : calling)
    for (IPluginCreatorInterface* creator : creators())
      global.with_registry([&](auto& r) { return r.deregisterCreator(*creator); });
}

__attribute__((constructor)) void opened() {
  guard("quantmoe:", 0, [] {
    register_where_loaded();
    return 0;
  });
}

}  // namespace
}  // namespace quantmoe

extern "C" QM_API void setLoggerFinder(nvinfer1::ILoggerFinder* finder) {
  using namespace quantmoe;
  const int32_t version = finder ? library_version(finder) : 0;
  plain_finder = nullptr;
  versioned_finder = nullptr;
  if (versioned(version)) {
    versioned_finder = reinterpret_cast<VersionedLoggerFinder*>(finder);
  } else if (version) {
    plain_finder = reinterpret_cast<PlainLoggerFinder*>(finder);
  }
}

extern "C" QM_API nvinfer1::IPluginCreatorInterface* const* getCreators(int32_t& count) {
  using namespace quantmoe;
  count = 0;
  const void* caller = library_of(__builtin_return_address(0));
  return guard<IPluginCreatorInterface* const*>("quantmoe:", nullptr, [&] {
    unregister(caller);
    count = static_cast<int32_t>(creators().size());
    return creators().data();
  });
}
