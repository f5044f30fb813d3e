// What the two ONNX Runtime libraries, the CPU's and the CUDA provider's, have in common: op.def as OrtCustomOps, the
// reading of a node's attributes and tensors, errors, registration. Each library is one file that includes this.
//
// One explicitly typed OrtCustomOp per operator, T and (QuantMoE) I or (CachedAttention) C, all of an operator's under
// one name; inputs and attributes come from op.def. Failures are exceptions in here; guard turns them into an
// OrtStatus, so that none leaves the library.
#pragma once
#include <algorithm>
#include <array>
#include <cstdio>
#include <deque>
#include <list>
#include <memory>
#include <mutex>
#include <numeric>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "core/attributes.h"
#include "core/identity.h"
#include "core/numbers.h"
#include "core/shapes.h"
#include "core/slots.h"
#include "experts/experts.h"
#include "ort_api.h"
#include "quantmoe/quant_moe.h"
#include "ranks/place.h"

namespace quantmoe {
namespace {

// ONNX Runtime 1.21. Later runtimes hand out this API and accept its OrtCustomOp, so one binary serves them all.
constexpr uint32_t kOrtApi = 21;

class Kernel;

struct Op : OrtCustomOp {
  // Makes the kernel of a node. Throws for a node that is not valid.
  using Make = Kernel* (*)(const Op& op, const OrtApi* api, const OrtKernelInfo* info);

  const OrtApi* api;
  const char* provider;  // null: the CPU
  const char* name;
  Slots inputs, outputs;
  ONNXTensorElementDataType float_type, other_type;  // T; I or C
  Make make;
  // Of the registration.
  bool lists_entries = false;  // whether the runtime does
  const ExpertSettings* experts = nullptr;
  const GroupSettings* group = nullptr;

  Op(const OrtApi* api, const char* provider, const char* name, ONNXTensorElementDataType float_type,
     ONNXTensorElementDataType other_type, Make make);
  static const Op& of(const OrtCustomOp* op) { return *static_cast<const Op*>(op); }
  ONNXTensorElementDataType resolve(Type type) const {
    switch (type) {
      case Type::T:
        return float_type;
      case Type::I:
      case Type::C:
        return other_type;
      case Type::float32:
        return ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT;
      case Type::int32:
        return ONNX_TENSOR_ELEMENT_DATA_TYPE_INT32;
      case Type::int64:
        break;
    }
    return ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64;
  }
  qm_type type() const { return float_type_of(float_type); }
  qm_type cache_type() const { return float_type_of(other_type); }
  int id_bytes() const { return other_type == ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64 ? 8 : 4; }

 private:
  static qm_type float_type_of(ONNXTensorElementDataType type) {
    return type == ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT     ? QM_F32
           : type == ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16 ? QM_F16
                                                           : QM_BF16;
  }
};

// What a node of any of the operators does; a subclass each.
class Kernel {
 public:
  virtual ~Kernel() = default;
  virtual void run(OrtKernelContext* context) const = 0;
  const OrtApi* api() const { return api_; }

 protected:
  Kernel(const Op& op, const OrtApi* api, const OrtKernelInfo* info);
  [[noreturn]] void fail(const std::string& what) const { throw std::invalid_argument(node_ + ": " + what); }
  void check(OrtStatus* status, const std::string& what = "ONNX Runtime") const;
  Shape shape_of(const OrtValue* value) const;
  void* data_of(const OrtValue* value) const;
  const OrtValue* get_input(const OrtKernelContext* context, size_t index) const;
  OrtValue* get_output(OrtKernelContext* context, size_t index, const Shape& shape) const;
  void read_attributes(const OrtKernelInfo* info, void* attributes);
  std::optional<std::string> find_string(const OrtKernelInfo* info, const std::string& attribute) const;
  const OrtValue* get_constant(const OrtKernelInfo* info, size_t input) const;
  const OrtValue* get_weight(const OrtKernelInfo* info, size_t input, Shape& shape) const;
  template <class Read>
  void check_identity(const OrtKernelInfo* info, size_t input, bool verify, const Read& read) const;

  // A line of ONNX Runtime's log, severity INFO.
  void log_info(const OrtKernelContext* context, const std::string& said) const {
    const OrtLogger* logger;
    check(api_->KernelContext_GetLogger(context, &logger));
    check(api_->Logger_LogMessage(logger, ORT_LOGGING_LEVEL_INFO, ("quantmoe: " + said).c_str(), ORT_FILE, __LINE__,
                                  __func__));
  }

  // The sizes of a run, as its inputs have them; throws unless their shapes are op.def's.
  FreeSizes<int64_t> check_inputs(const OrtKernelContext* context) const;
  size_t input_count() const { return input_names_.size(); }
  // An output of the shape that op.def states.
  OrtValue* get_output(OrtKernelContext* context, size_t index, const FreeSizes<int64_t>& sizes) const {
    return get_output(context, index, shapes_.output(index, sizes, MakeNumbers{}));
  }

  // null: an input that is [0] for none.
  template <class T>
  void set_input(const OrtKernelContext* context, size_t index, const T*& data) const {
    const OrtValue* value = get_input(context, index);
    const bool none = shapes_.input(index).or_none && shape_of(value) == Shape{0};
    data = none ? nullptr : static_cast<const T*>(data_of(value));
  }
  template <class T>
  void set_output(OrtKernelContext* context, size_t index, const FreeSizes<int64_t>& sizes, T*& data) const {
    data = static_cast<T*>(data_of(get_output(context, index, sizes)));
  }
  // As check_inputs, of QuantMoE.
  FreeSizes<int64_t> check_tokens(const OrtKernelContext* context) const {
    const FreeSizes<int64_t> sizes = check_inputs(context);
    if (sizes.at('K') < 1)
      fail("topk_ids has shape " + text_of(shape_of(get_input(context, QuantMoE_topk_ids))) +
           ", expected one id or more");
    return sizes;
  }
  // present_key (1) or present_value (2); throws where a cache with fewer slots is bound to it.
  OrtValue* get_present(OrtKernelContext* context, size_t index, const FreeSizes<int64_t>& sizes) const;
  // Throws: a run needs so many slots of a cache that has fewer.
  [[noreturn]] void fail_slots(const FreeSizes<int64_t>& sizes, int64_t needed) const;
  // Throws unless the caches' type is that of cache_format.
  void check_caches(const qm_attention& attention) const;

  // Sizes and tensors of a run of CausalConv, GatedDelta or StateSpace, into the C ABI's structs, which on the CPU are
  // one; throws unless its inputs' shapes agree.
  template <class Sizes, class Tensors>
  void read_stateful(OrtKernelContext* context, const qm_conv&, Sizes& run, Tensors& tensors) const {
    const FreeSizes<int64_t> sizes = read_batch(context, run);
#define QM_ONLY "ops/causal_conv.def"
#include "tensors.inc"
  }
  template <class Sizes, class Tensors>
  void read_stateful(OrtKernelContext* context, const qm_delta&, Sizes& run, Tensors& tensors) const {
    const FreeSizes<int64_t> sizes = read_batch(context, run);
#define QM_ONLY "ops/gated_delta.def"
#include "tensors.inc"
  }
  template <class Sizes, class Tensors>
  void read_stateful(OrtKernelContext* context, const qm_space&, Sizes& run, Tensors& tensors) const {
    const FreeSizes<int64_t> sizes = read_batch(context, run);
#define QM_ONLY "ops/state_space.def"
#include "tensors.inc"
  }

  // A node's attributes; throws what `check` has against them.
  template <class Node>
  Node read_checked(const OrtKernelInfo* info, int (*check)(const Node&, char*)) {
    Node node{};
    read_attributes(info, &node);
    char error[QM_ERROR_SIZE];
    if (check(node, error)) fail(error);
    return node;
  }
  // The place of a node's rank in the group of the session entry, which `how` says how to set; throws without one.
  template <class Node>
  Place place_in_group(const Node& node, const std::string& how) const {
    const Place place = place_of(*op_.group, node);
    if (place.group.name == "")
      fail("this file is " + rank_of(place) + " of a sliced model: set the session entry quantmoe.group " + how);
    return place;
  }
  // Throws unless a node is of the rank that the file's first such node is of.
  void check_place(const Place& first, const Place& own) const;

  const Op& op_;
  const OrtApi* api_;
  std::string node_;  // the operator and the node's name, the beginning of every message

 private:
  std::string input_name(size_t index) const {
    return index < input_names_.size() ? input_names_[index] : op_.inputs.first[index].name;
  }

  template <class Sizes>
  FreeSizes<int64_t> read_batch(OrtKernelContext* context, Sizes& run) const {
    const FreeSizes<int64_t> sizes = check_inputs(context);
    run.batch = sizes.at('B');
    run.tokens = sizes.at('S');
    return sizes;
  }
  std::vector<std::string> input_names_;  // the graph's
  ShapeRules shapes_;                     // from read_attributes on
};

Kernel::Kernel(const Op& op, const OrtApi* api, const OrtKernelInfo* info)
    : op_(op), api_(api), node_(std::string(op.name) + " node") {
  size_t size = 0;
  check(api->KernelInfo_GetNodeName(info, nullptr, &size));
  std::string name(size, '\0');
  check(api->KernelInfo_GetNodeName(info, name.data(), &size));
  node_ += std::string(" \"") + name.c_str() + "\"";
  check(api->KernelInfo_GetInputCount(info, &size));
  input_names_.resize(size);
  for (size_t i = 0; i < input_names_.size(); ++i) {
    check(api->KernelInfo_GetInputName(info, i, nullptr, &size));
    input_names_[i].resize(size);
    check(api->KernelInfo_GetInputName(info, i, input_names_[i].data(), &size));
    input_names_[i].resize(size - 1);  // its NUL
  }
}

void Kernel::check(OrtStatus* status, const std::string& what) const {
  if (!status) return;
  const std::unique_ptr<OrtStatus, void (*)(OrtStatus*)> owned(status, api_->ReleaseStatus);
  throw std::runtime_error(node_ + ": " + what + ": " + api_->GetErrorMessage(status));
}

Shape Kernel::shape_of(const OrtValue* value) const {
  OrtTensorTypeAndShapeInfo* info;
  check(api_->GetTensorTypeAndShape(value, &info));
  const std::unique_ptr<OrtTensorTypeAndShapeInfo, void (*)(OrtTensorTypeAndShapeInfo*)> owned(
      info, api_->ReleaseTensorTypeAndShapeInfo);
  size_t rank;
  check(api_->GetDimensionsCount(info, &rank));
  Shape shape(rank);
  check(api_->GetDimensions(info, shape.data(), rank));
  return shape;
}

void* Kernel::data_of(const OrtValue* value) const {
  void* data;  // API 21 has no accessor for const values
  check(api_->GetTensorMutableData(const_cast<OrtValue*>(value), &data));
  return data;
}

const OrtValue* Kernel::get_input(const OrtKernelContext* context, size_t index) const {
  const OrtValue* value;
  int given = 0;
  check(api_->KernelContext_GetInput(context, index, &value));
  if (value) check(api_->HasValue(value, &given));
  if (!given) fail("input " + input_name(index) + " is missing: feed it, or bind it");
  return value;
}

OrtValue* Kernel::get_output(OrtKernelContext* context, size_t index, const Shape& shape) const {
  OrtValue* value;
  check(api_->KernelContext_GetOutput(context, index, shape.data(), shape.size(), &value));
  return value;
}

// Sets an operator's struct to a node's attributes, as read has them: .integer(a), .number(a), .text(a) of a
// qm_attribute, which throw where the node lacks it. Returns 0, or a qm_status with the sentence in error.
template <class Read>
int set_attributes(const char* op, void* node, const Read& read, char* error) {
  int64_t version = 0;  // op_version, the first attribute
  for (size_t i = 0; const qm_attribute* attribute = qm_attribute_at(op, i); ++i) {
    if (i > 0 && attribute->since > version) continue;
    int status;
    if (i == 0) {
      version = read.integer(*attribute);
      status = qm_set_version(op, node, version, error);
    } else if (attribute->kind == 'i') {
      status = qm_set_int(op, node, attribute->name, read.integer(*attribute), error);
    } else if (attribute->kind == 'f') {
      status = qm_set_float(op, node, attribute->name, read.number(*attribute), error);
    } else {
      status = qm_set_string(op, node, attribute->name, read.text(*attribute).c_str(), error);
    }
    if (status) return status;
  }
  return QM_OK;
}

void Kernel::read_attributes(const OrtKernelInfo* info, void* attributes) {
  struct Read {
    const Kernel& kernel;
    const OrtKernelInfo* info;
    void check(const qm_attribute& a, OrtStatus* status) const {
      if (status) kernel.check(status, std::string("attribute ") + a.name + " of kind " + a.kind + " is required");
    }
    int64_t integer(const qm_attribute& a) const {
      int64_t value;
      check(a, kernel.api_->KernelInfoGetAttribute_int64(info, a.name, &value));
      return value;
    }
    float number(const qm_attribute& a) const {
      float value;
      check(a, kernel.api_->KernelInfoGetAttribute_float(info, a.name, &value));
      return value;
    }
    std::string text(const qm_attribute& a) const {
      size_t size = 0;
      check(a, kernel.api_->KernelInfoGetAttribute_string(info, a.name, nullptr, &size));
      std::string value(size, '\0');
      check(a, kernel.api_->KernelInfoGetAttribute_string(info, a.name, value.data(), &size));
      return value;
    }
  };
  char error[QM_ERROR_SIZE];
  if (set_attributes(op_.name, attributes, Read{*this, info}, error)) fail(error);
  shapes_ = ShapeRules(op_.name, attributes);
}

// An attribute that a node may lack.
std::optional<std::string> Kernel::find_string(const OrtKernelInfo* info, const std::string& attribute) const {
  size_t length = 0;
  if (OrtStatus* status = api_->KernelInfoGetAttribute_string(info, attribute.c_str(), nullptr, &length)) {
    api_->ReleaseStatus(status);
    return std::nullopt;
  }
  std::string value(length, '\0');
  check(api_->KernelInfoGetAttribute_string(info, attribute.c_str(), value.data(), &length), attribute);
  value.resize(length - 1);  // its NUL
  return value;
}

// An input that must be an initializer.
const OrtValue* Kernel::get_constant(const OrtKernelInfo* info, size_t input) const {
  const std::string name = op_.inputs.first[input].name;
  int constant = 0;
  const OrtValue* value = nullptr;
  check(api_->KernelInfoGetConstantInput_tensor(info, input, &constant, &value), name);
  if (!constant || !value)
    fail(name + " is computed or fed at run time, expected an initializer that is not a graph input");
  return value;
}

// A packed tensor.
const OrtValue* Kernel::get_weight(const OrtKernelInfo* info, size_t input, Shape& shape) const {
  const OrtValue* value = get_constant(info, input);
  shape = shape_of(value);
  const std::string name = op_.inputs.first[input].name;
  if (find_string(info, name + "_external"))
    fail(name + " is in a data file that TensorRT's plug-in reads (" + name +
         "_external); for ONNX Runtime export without --experts external");
  if (shape.size() != 2)
    fail(name + " has shape " + text_of(shape) + ", expected [experts, int32 words of a packed expert]");
  return value;
}

// Compares a packed tensor with what the node says of it, where it does. read: as check_identity's.
template <class Read>
void Kernel::check_identity(const OrtKernelInfo* info, size_t input, bool verify, const Read& read) const {
  const std::string name = op_.inputs.first[input].name, attribute = name + "_identity";
  const std::optional<std::string> wanted = find_string(info, attribute);
  if (!wanted) return;  // an export before there were any
  Shape shape;
  get_weight(info, input, shape);
  try {
    quantmoe::check_identity(name, *wanted, static_cast<size_t>(shape[0] * shape[1]) * 4, verify, read);
  } catch (const std::invalid_argument& error) {
    fail(error.what());
  }
}

int64_t elements(const Shape& shape) {
  return std::accumulate(shape.begin(), shape.end(), int64_t{1}, std::multiplies<>());
}

void Kernel::check_place(const Place& first, const Place& own) const {
  if (first.rank != own.rank || first.world != own.world || first.export_id != own.export_id)
    fail("it is " + rank_of(own) + " of " + export_of(own.export_id) + ", another node of the file " + rank_of(first) +
         " of " + export_of(first.export_id));
}

FreeSizes<int64_t> Kernel::check_inputs(const OrtKernelContext* context) const {
  FreeSizes<int64_t> sizes;
  const size_t count = std::max(static_cast<size_t>(op_.inputs.count), input_names_.size());  // with optional ones
  for (size_t i = 0; i < count; ++i) {
    if (shapes_.input(i).packed) continue;
    const Shape found = shape_of(get_input(context, i));
    if (!shapes_.match(i, found, sizes, MakeNumbers{}))
      fail(std::string(op_.inputs.first[i].name) + " has shape " + text_of(found) + ", expected " +
           shapes_.expected(i, sizes));
  }
  return sizes;
}

OrtValue* Kernel::get_present(OrtKernelContext* context, size_t index, const FreeSizes<int64_t>& sizes) const {
  const Shape shape = shapes_.output(index, sizes, MakeNumbers{});
  OrtValue* value;
  OrtStatus* const status = api_->KernelContext_GetOutput(context, index, shape.data(), shape.size(), &value);
  if (status && shape[2] > sizes.at('P')) {  // what is bound cannot grow
    api_->ReleaseStatus(status);
    fail_slots(sizes, shape[2]);
  }
  check(status);
  return value;
}

void Kernel::fail_slots(const FreeSizes<int64_t>& sizes, int64_t needed) const {
  fail("the cache " + input_name(CachedAttention_past_key) + " has " + std::to_string(sizes.at('P')) +
       " slots, and this run needs " + std::to_string(needed) + ": " + std::to_string(sizes.at('S')) +
       " tokens are new, attention_mask has " + std::to_string(sizes.at('L')) +
       " columns; bind a cache with more slots, or feed fewer tokens");
}

void Kernel::check_caches(const qm_attention& node) const {
  constexpr auto kInt8 = ONNX_TENSOR_ELEMENT_DATA_TYPE_INT8, kUint8 = ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT8;
  const auto type = op_.other_type;
  const auto text = [](auto type) { return type == kInt8 ? "int8" : type == kUint8 ? "uint8" : "floats"; };
  const auto wanted = node.cache_format == k_cache_format_none       ? ONNX_TENSOR_ELEMENT_DATA_TYPE_UNDEFINED
                      : node.cache_format == k_cache_format_fp8_e4m3 ? kUint8
                                                                     : kInt8;
  if (text(type) != text(wanted))
    fail(std::string("past_key is of ") + text(type) + ", caches of cache_format " +
         enum_name("cache_format", node.cache_format) + " are of " + text(wanted));
}

// A size in a graph: a number, or -1 and its name, "" where it has none.
struct GraphSize {
  int64_t size = -1;
  const char* name = "";
};
inline int64_t known_size(const GraphSize& size) { return size.size; }
struct MakeGraphSizes {
  GraphSize number(int64_t n) const { return {n}; }
  GraphSize times(const GraphSize& size, int64_t n) const { return {size.size < 0 ? -1 : size.size * n}; }
  GraphSize over(const GraphSize& size, int64_t n) const { return {size.size < 0 ? -1 : size.size / n}; }
  GraphSize max(const GraphSize& a, const GraphSize& b) const {  // the larger of two names has none
    if (a.size >= 0 && b.size >= 0) return {std::max(a.size, b.size)};
    if (a.size == 0 || std::string_view(a.name) == b.name) return b;
    return b.size == 0 ? a : GraphSize{};
  }
};

// Shapes of a node's outputs from those of its inputs, as op.def states them.
class Inference {
 public:
  Inference(const Op& op, OrtShapeInferContext* context) : op_(op), context_(context) {}

  // Inputs that contradict op.def are the node's to refuse. An output of which a size or the rank is not known is left
  // out.
  void run() const {
    ShapeRules rules;
    if (!read_rules(rules)) return;
    FreeSizes<GraphSize> sizes;
    const MakeGraphSizes make;
    size_t count;
    check(op_.api->ShapeInferContext_GetInputCount(context_, &count));
    for (size_t i = 0; i < count; ++i)
      if (const std::vector<GraphSize> found = get_input(i); !found.empty()) (void)rules.match(i, found, sizes, make);
    for (int32_t i = 0; i < op_.outputs.count; ++i) set_output(i, rules.output(static_cast<size_t>(i), sizes, make));
  }

  // What set_attributes reads.
  int64_t integer(const qm_attribute& a) const {
    int64_t value;
    size_t length;
    check(op_.api->ReadOpAttr(attribute(a), ORT_OP_ATTR_INT, &value, sizeof value, &length));
    return value;
  }
  float number(const qm_attribute&) const { return 0; }  // no shape is made of one
  std::string text(const qm_attribute& a) const {
    char value[64] = {};
    size_t length;
    check(op_.api->ReadOpAttr(attribute(a), ORT_OP_ATTR_STRING, value, sizeof value - 1, &length));
    return value;
  }

 private:
  void check(OrtStatus* status) const {
    if (!status) return;
    const std::string message = op_.api->GetErrorMessage(status);
    op_.api->ReleaseStatus(status);
    throw std::runtime_error(message);
  }
  std::vector<GraphSize> get_input(size_t index) const {
    OrtTensorTypeAndShapeInfo* info;  // belongs to the context
    size_t rank = 0;
    check(op_.api->ShapeInferContext_GetInputTypeShape(context_, index, &info));
    check(op_.api->GetDimensionsCount(info, &rank));
    Shape sizes(rank);
    std::vector<const char*> names(rank);
    check(op_.api->GetDimensions(info, sizes.data(), rank));
    check(op_.api->GetSymbolicDimensions(info, names.data(), rank));
    std::vector<GraphSize> found;
    for (size_t i = 0; i < rank; ++i) found.push_back({sizes[i], names[i]});
    return found;
  }
  const OrtOpAttr* attribute(const qm_attribute& a) const {
    const OrtOpAttr* found;
    check(op_.api->ShapeInferContext_GetAttribute(context_, a.name, &found));
    return found;
  }
  // The shapes for the node's attributes; false where one is missing or wrong, which the node refuses.
  bool read_rules(ShapeRules& rules) const try {
    std::vector<int32_t> node(qm_node_size(op_.name) / sizeof(int32_t));
    char error[QM_ERROR_SIZE];
    if (set_attributes(op_.name, node.data(), *this, error)) return false;
    rules = ShapeRules(op_.name, node.data());
    return true;
  } catch (const std::exception&) {
    return false;
  }
  // The type is said too: ONNX Runtime asks the first of an operator's variants for all of them.
  void set_output(int32_t index, const std::vector<GraphSize>& sizes) const {
    Shape numbers;
    std::vector<const char*> names;
    if (sizes.empty()) return;
    for (const GraphSize& size : sizes) {
      if (size.size < 0 && !*size.name) return;  // it would be taken for the number -1
      numbers.push_back(size.size);
      names.push_back(size.name);
    }
    OrtTensorTypeAndShapeInfo* info;
    check(op_.api->CreateTensorTypeAndShapeInfo(&info));
    const std::unique_ptr<OrtTensorTypeAndShapeInfo, void (*)(OrtTensorTypeAndShapeInfo*)> owned(
        info, op_.api->ReleaseTensorTypeAndShapeInfo);
    check(op_.api->SetDimensions(info, numbers.data(), numbers.size()));
    check(op_.api->SetSymbolicDimensions(info, names.data(), names.size()));
    check(op_.api->SetTensorElementType(info, type_of(op_.outputs.first[index].type)));
    check(op_.api->ShapeInferContext_SetOutputTypeShape(context_, static_cast<size_t>(index), info));
  }
  // A type that inputs decide is that of the first input that has it.
  ONNXTensorElementDataType type_of(Type type) const {
    ONNXTensorElementDataType found = op_.resolve(type);
    for (int32_t i = 0; i < op_.inputs.count; ++i) {
      if (op_.inputs.first[i].type != type) continue;
      OrtTensorTypeAndShapeInfo* info;
      check(op_.api->ShapeInferContext_GetInputTypeShape(context_, static_cast<size_t>(i), &info));
      check(op_.api->GetTensorElementType(info, &found));
      break;
    }
    return found;
  }

  const Op& op_;
  OrtShapeInferContext* context_;
};

// A session's entries begin so. All are read when the library is registered.
constexpr std::string_view kPrefix = "quantmoe.";
constexpr const char* kEntries[] = {"prefault",   "verify", "experts", "ram",  "reserve", "trace",
                                    "gpu_memory", "misses", "threads", "warm", "group",   "timeout"};
// Left in the options by the registration: which library they have; what the entries were.
constexpr const char* kRegistered = "quantmoe.registered";
constexpr const char* kSeen = "quantmoe.seen";

// Cut, as it becomes an entry, which ONNX Runtime limits.
std::string list_of(const std::map<std::string, std::string>& entries) {
  std::string text;
  for (const auto& [name, value] : entries) text += (text.empty() ? "" : ", ") + name + "=" + value;
  return text.substr(0, 1024);
}

// Throws for an entry that is none of kEntries.
std::map<std::string, std::string> check_names(std::map<std::string, std::string> entries) {
  for (const auto& [name, value] : entries)
    if (std::find(std::begin(kEntries), std::end(kEntries), name) == std::end(kEntries)) {
      std::string known;
      for (const char* entry : kEntries) known += (known.empty() ? "" : ", ") + std::string(entry);
      throw std::invalid_argument("quantmoe: there is no session entry \"quantmoe." + name + "\", expected one of " +
                                  known);
    }
  return entries;
}

// Throws where a session's entries are others than those that the library was registered with.
void check_entries(const OrtApi* api, const OrtKernelInfo* info) {
  auto now = session_entries(api, info, kPrefix);
  const auto seen = now.extract(kSeen + kPrefix.size());
  now.erase(kRegistered + kPrefix.size());
  if (seen && list_of(check_names(now)) != seen.mapped())
    throw std::invalid_argument("quantmoe: session entries are \"" + list_of(now) + "\", but were \"" + seen.mapped() +
                                "\" when the library was registered; set them before that");
}

Op::Op(const OrtApi* api, const char* provider, const char* name, ONNXTensorElementDataType float_type,
       ONNXTensorElementDataType other_type, Make make)
    : OrtCustomOp{},
      api(api),
      provider(provider),
      name(name),
      inputs(kInputs, name),
      outputs(kOutputs, name),
      float_type(float_type),
      other_type(other_type),
      make(make) {
  version = kOrtApi;
  GetName = [](const OrtCustomOp* self) { return of(self).name; };
  GetExecutionProviderType = [](const OrtCustomOp* self) { return of(self).provider; };
  GetInputTypeCount = [](const OrtCustomOp* self) { return static_cast<size_t>(of(self).inputs.most); };
  GetInputType = [](const OrtCustomOp* self, size_t i) { return of(self).resolve(of(self).inputs.first[i].type); };
  GetInputCharacteristic = [](const OrtCustomOp* self, size_t i) {
    return of(self).inputs.first[i].optional ? INPUT_OUTPUT_OPTIONAL : INPUT_OUTPUT_REQUIRED;
  };
  GetInputMemoryType = [](const OrtCustomOp* self, size_t i) {
    const Op& op = of(self);
    const bool packed = std::string_view(op.name) == "QuantMoE" && (i == QuantMoE_w13 || i == QuantMoE_w2);
    return packed && op.provider && op.experts->host() ? OrtMemTypeCPUInput : OrtMemTypeDefault;
  };
  GetOutputTypeCount = [](const OrtCustomOp* self) { return static_cast<size_t>(of(self).outputs.count); };
  GetOutputType = [](const OrtCustomOp* self, size_t i) { return of(self).resolve(of(self).outputs.first[i].type); };
  GetOutputCharacteristic = [](const OrtCustomOp*, size_t) { return INPUT_OUTPUT_REQUIRED; };
  GetStartVersion = GetEndVersion = [](const OrtCustomOp*) { return 1; };
  CreateKernelV2 = [](const OrtCustomOp* self, const OrtApi* api, const OrtKernelInfo* info, void** kernel) {
    return guard(api, [&] {
      if (of(self).lists_entries) check_entries(api, info);
      *kernel = of(self).make(of(self), api, info);
    });
  };
  KernelComputeV2 = [](void* kernel, OrtKernelContext* context) {
    const auto& self = *static_cast<const Kernel*>(kernel);
    return guard(self.api(), [&] { self.run(context); });
  };
  KernelDestroy = [](void* kernel) { delete static_cast<Kernel*>(kernel); };
  InferOutputShapeFn = [](const OrtCustomOp* self, OrtShapeInferContext* context) {
    return guard(of(self).api, [&] { Inference(of(self), context).run(); });
  };
}

// Whether sessions with these options compare all bytes of the packed weights when they are created.
bool wants_verify(const OrtApi* api, const OrtSessionOptions* options) {
  const std::string wanted = session_entry(api, options, "quantmoe.verify");
  if (wanted != "" && wanted != "0" && wanted != "1")
    throw std::invalid_argument("quantmoe: quantmoe.verify is \"" + wanted + "\", expected 0 or 1");
  return wanted == "1";
}

// What sessions with these options do with experts.
ExpertSettings expert_settings(const OrtApi* api, const OrtSessionOptions* options) {
  const auto entry = [&](const char* key) { return session_entry(api, options, key); };
  return {entry("quantmoe.experts"),    entry("quantmoe.ram"),    entry("quantmoe.reserve"), entry("quantmoe.trace"),
          entry("quantmoe.gpu_memory"), entry("quantmoe.misses"), entry("quantmoe.threads"), entry("quantmoe.warm")};
}

// Which ranks of a sliced model a session adds up with, and how long it waits for them.
GroupSettings group_settings(const OrtApi* api, const OrtSessionOptions* options) {
  return {session_entry(api, options, "quantmoe.group"), session_entry(api, options, "quantmoe.timeout")};
}

// Appends a library's operators.
using Fill = void (*)(const OrtApi* api, std::deque<Op>& ops);

// What the sessions of one ONNX Runtime refer to; a process may hold several runtimes. Never destroyed: a session may
// still run on another thread while the process exits, and the library stays loaded (nodelete, CMakeLists.txt).
struct Registration {
  const OrtApi* api;
  Fill fill;
  const ExpertSettings experts;
  const GroupSettings group;
  std::deque<Op> ops;
  OrtCustomOpDomain* domain = nullptr;

  Registration(const OrtApi* api, Fill fill, bool lists_entries, const ExpertSettings& experts,
               const GroupSettings& group)
      : api(api), fill(fill), experts(experts), group(group) {
    fill(api, ops);
    for (Op& op : ops) {
      op.lists_entries = lists_entries;
      op.experts = &this->experts;
      op.group = &this->group;
    }
    OrtStatus* status = api->CreateCustomOpDomain("quantmoe", &domain);
    for (const Op& op : ops)
      if (!status) status = api->CustomOpDomain_Add(domain, &op);
    if (!status) return;
    api->ReleaseStatus(status);
    throw std::runtime_error("quantmoe: ONNX Runtime refuses the operator domain");
  }
};

// RegisterCustomOps of the library for a provider; choose(api, options) says which operators the session gets. Options
// that have them stay as they are: ONNX Runtime would refuse the domain a second time. The entry says so to other
// copies of the library, too, and goes with the options when they are cloned.
template <class Choose>
OrtStatus* register_ops(OrtSessionOptions* options, const OrtApiBase* base, const std::string& provider,
                        const Choose& choose) {
  const OrtApi* api = base->GetApi(kOrtApi);
  if (!api) {
    const std::string message =
        std::string("quantmoe needs ONNX Runtime 1.21 or newer, found ") + base->GetVersionString();
    return base->GetApi(1)->CreateStatus(ORT_NOT_IMPLEMENTED, message.c_str());
  }
  OrtStatus* status = nullptr;
  OrtStatus* failure = guard(api, [&] {
    static std::mutex mutex;
    static auto& all = *new std::list<Registration>;
    const std::lock_guard lock(mutex);
    if (const std::string found = session_entry(api, options, kRegistered); found != "") {
      if (found == provider) return;
      throw std::invalid_argument("quantmoe: these session options have the " + found +
                                  "'s library, expected that or the " + provider + "'s, not both");
    }
    int minor = 0;
    const bool lists_entries = std::sscanf(base->GetVersionString(), "1.%d", &minor) == 1 && minor >= kListsEntries;
    std::string seen;
    if (lists_entries) seen = list_of(check_names(session_entries(api, options, kPrefix)));
    const Fill fill = choose(api, options);
    const ExpertSettings experts = expert_settings(api, options);
    const GroupSettings group = group_settings(api, options);
    (void)group.patience();
    if (provider != "CPU") experts.check_cuda();
    auto r = std::find_if(all.begin(), all.end(), [&](const Registration& r) {
      return r.api == api && r.fill == fill && r.experts == experts && r.group == group;
    });
    if (r == all.end()) r = all.emplace(all.end(), api, fill, lists_entries, experts, group);
    status = api->AddCustomOpDomain(options, r->domain);
    if (!status) status = api->AddSessionConfigEntry(options, kRegistered, provider.c_str());
    if (!status && lists_entries) status = api->AddSessionConfigEntry(options, kSeen, seen.c_str());
  });
  return failure ? failure : status;
}

}  // namespace
}  // namespace quantmoe
