// The operators of op.def as TensorRT plug-ins: a thin adapter over the C ABI of quant_moe_cuda.h.
//
// An object is an IPluginV3 with its core, build and runtime capabilities. Inputs and attributes come from op.def.
// Checks run when the plug-in is created (parsing, deserializing) or configured (building). Messages go to TensorRT's
// logger and begin with the layer's name. Nothing here links to TensorRT.
#pragma once
#include <cuda_runtime_api.h>

#include <algorithm>
#include <atomic>
#include <iterator>
#include <memory>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "NvInferRuntime.h"
#include "core/attributes.h"
#include "core/shapes.h"
#include "core/slots.h"
#include "logger.h"
#include "quantmoe/quant_moe_cuda.h"

namespace quantmoe {

using namespace nvinfer1;

constexpr int32_t kMostInputs = std::max({
#define QM_OP(op, name, version) Slots(kInputs, #op).most,
#include "op.def"
});
constexpr int32_t kMostOutputs = std::max({
#define QM_OP(op, name, version) Slots(kOutputs, #op).count,
#include "op.def"
});
constexpr size_t kMostAttributes = std::max({
#define QM_OP(op, name, version) sizeof(qm_##name) / sizeof(int32_t),
#include "op.def"
});
constexpr int32_t kMostDimensions = std::extent_v<decltype(qm_shape::sizes)>;

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

  // A string of op.def's that it may lack; null where it does.
  const char* text(std::string_view attribute) const {
    for (const Value& value : values)
      if (attribute == value.name) return value.bytes.c_str();
    return nullptr;
  }

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

// True if both are known and differ. -1 is not known yet.
inline bool differ(int64_t a, int64_t b) { return a >= 0 && b >= 0 && a != b; }
// Of an input that may have no values.
inline bool is_none(const Dims& dims) { return dims.nbDims == 1 && dims.d[0] == 0; }
int64_t rows_of(const Dims& dims);
std::string to_text(const Dims& dims);
// Of the activations that weights of 16-bit floats are multiplied with; others take either.
inline int32_t type_beside(const qm_projection& w) { return w.format == k_format_bf16 ? QM_BF16 : QM_F16; }
inline int32_t qm_type(DataType type) {
  if (type == DataType::kINT32) return QM_INT32;
  if (type == DataType::kINT64) return QM_INT64;
  return type == DataType::kHALF ? QM_F16 : type == DataType::kBF16 ? QM_BF16 : QM_F32;
}

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
    if (!takes_count(count)) return refuse_count(count);
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
    if (!takes_count(count)) return refuse_count(count);
    return attempt(-1, [&] { return infer_shapes(inputs, outputs, builder) ? 0 : -1; });
  }
  bool supportsFormatCombination(int32_t position, const DynamicPluginTensorDesc* tensors, int32_t inputs,
                                 int32_t outputs) noexcept override {
    return attempt(false, [&] { return supports(position, tensors, inputs, outputs); });
  }
  int32_t configurePlugin(const DynamicPluginTensorDesc* inputs, int32_t, const DynamicPluginTensorDesc*,
                          int32_t) noexcept override {
    return attempt(-1, [&] {
      const Inputs in(inputs, inputs_.count);
      return check_shapes(in.dims) && check_packed(in.dims) && configure(in) ? 0 : -1;
    });
  }
  int32_t onShapeChange(const PluginTensorDesc* inputs, int32_t, const PluginTensorDesc*, int32_t) noexcept override {
    return attempt(-1, [&] {
      const Inputs in(inputs, inputs_.count);
      return check_shapes(in.dims) && check_packed(in.dims) && prepare(in) ? 0 : -1;
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
  Plugin(const char* op, SharedLayer layer, const void* node)
      : op_(op), inputs_(kInputs, op), outputs_(kOutputs, op), layer_(std::move(layer)), rules_(op, node) {
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
  // Reports what is wrong with the shapes of packed inputs, which op.def leaves open; true when nothing is.
  virtual bool check_packed(const Dims*) const { return true; }
  bool check_packed(const char* name, const Dims& dims, int64_t experts, size_t row_bytes) const;
  virtual bool takes_float() const { return false; }  // T may be float32
  virtual bool configure(const Inputs& most) = 0;
  virtual bool prepare(const Inputs& in) = 0;
  virtual bool check_weights(const void* const*, cudaStream_t) { return true; }
  // What a builder gets, which has nothing to choose: zeros. Of them an index can be made, too.
  static int write_zeros(void* output, size_t bytes, cudaStream_t stream, char* error) {
    const cudaError_t result = cudaMemsetAsync(output, 0, bytes, stream);
    return result ? quantmoe::fail(error, QM_INVALID, "CUDA: %s", cudaGetErrorString(result)) : QM_OK;
  }
  virtual int launch(const void* const* inputs, void* const* outputs, void* workspace, cudaStream_t stream,
                     char* error) = 0;

  const char* op_;
  Slots inputs_, outputs_;
  SharedLayer layer_;
  ShapeRules rules_;

 private:
  bool check_shapes(const Dims* in) const;  // as op.def states them; a -1 is not known yet
  bool infer_shapes(const DimsExprs* inputs, DimsExprs* outputs, IExprBuilder& builder) const;
  bool supports(int32_t position, const DynamicPluginTensorDesc* tensors, int32_t inputs, int32_t outputs);
  // An input with a size is not read: TensorRT has it on the device. The size is 1, as without the input.
  bool takes_count(int32_t count) const noexcept {
    return count == inputs_.count ||
           std::any_of(std::begin(kHostSizes), std::end(kHostSizes),
                       [&](const HostSize& host) { return host.op == op_ && count == host.input + 1; });
  }
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

// The plug-in of an operator's node, in the file of its class. Attributes that no kernel can have are refused here,
// where the layer is named, shapes later: null, with the sentence in error.
#define QM_OP(op, name, version) IPluginV3* make_plugin(const SharedLayer& layer, const qm_##name& node, char* error);
#include "op.def"

// A creator for each operator.
std::vector<IPluginCreatorInterface*>& creators();

}  // namespace quantmoe
