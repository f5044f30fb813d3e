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
  void read_attributes(const OrtKernelInfo* info, void* attributes) const;
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

  // QuantMoE's inputs of a run; throws unless their shapes agree.
  struct Tokens {
    const OrtValue *hidden_states, *topk_ids, *topk_weights;
    Shape shape;  // of hidden_states and of the output
    int64_t top_k;
  };
  Tokens read_tokens(const OrtKernelContext* context, int64_t hidden_size) const;

  // Sizes of a run of CachedAttention; throws unless its inputs' shapes agree.
  struct AttentionShapes {
    int64_t batch, tokens, past_slots, mask, slots;
    Shape output, key, value;
  };
  AttentionShapes read_attention(const OrtKernelContext* context, const qm_attention& attention) const;
  // present_key (1) or present_value (2); throws where a cache with fewer slots is bound to it.
  OrtValue* get_present(OrtKernelContext* context, size_t index, const AttentionShapes& shapes) const;
  // Throws: a run needs so many slots of a cache that has fewer.
  [[noreturn]] void fail_slots(const AttentionShapes& shapes, int64_t needed) const;
  // Throws unless the caches' type is that of cache_format.
  void check_caches(const qm_attention& attention) const;

  // Sizes and tensors of a run of CausalConv, GatedDelta or StateSpace, into the C ABI's structs, which on the CPU are
  // one; throws unless its inputs' shapes agree.
  template <class Sizes, class Tensors>
  void read_stateful(OrtKernelContext* context, const qm_conv& conv, Sizes& sizes, Tensors& tensors) const;
  template <class Sizes, class Tensors>
  void read_stateful(OrtKernelContext* context, const qm_delta& delta, Sizes& sizes, Tensors& tensors) const;
  template <class Sizes, class Tensors>
  void read_stateful(OrtKernelContext* context, const qm_space& space, Sizes& sizes, Tensors& tensors) const;

  // A state's shape, with the window's size in front where there is one.
  static Shape windowed(int32_t window, Shape state) {
    if (window > 1) state.insert(state.begin(), window);
    return state;
  }

  // A node's attributes; throws what `check` has against them.
  template <class Node>
  Node read_checked(const OrtKernelInfo* info, int (*check)(const Node&, char*)) const {
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
  // The output of AllGather for its input, and of ReduceScatter.
  OrtValue* gathered(OrtKernelContext* context, const OrtValue* x, const qm_gather& gather) const;
  OrtValue* scattered(OrtKernelContext* context, const OrtValue* x, int32_t world) const;
  // Throws unless a node is of the rank that the file's first such node is of.
  void check_place(const Place& first, const Place& own) const;

  // Throws unless an input has the shape; -1: any size.
  void check_shape(const OrtKernelContext* context, int32_t input, const Shape& expected) const;

  const Op& op_;
  const OrtApi* api_;
  std::string node_;  // the operator and the node's name, the beginning of every message

 private:
  std::string input_name(size_t index) const {
    return index < input_names_.size() ? input_names_[index] : op_.inputs.first[index].name;
  }

  std::vector<std::string> input_names_;  // the graph's
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

void Kernel::read_attributes(const OrtKernelInfo* info, void* attributes) const {
  char error[QM_ERROR_SIZE];
  int64_t version = 0;  // op_version, the first attribute
  for (size_t i = 0; const qm_attribute* attribute = qm_attribute_at(op_.name, i); ++i) {
    if (i > 0 && attribute->since > version) continue;
    const std::string missing =
        std::string("attribute ") + attribute->name + " of kind " + attribute->kind + " is required";
    int status;
    if (attribute->kind == 'i') {
      int64_t value;
      check(api_->KernelInfoGetAttribute_int64(info, attribute->name, &value), missing);
      if (i == 0) version = value;
      status = i == 0 ? qm_set_version(op_.name, attributes, value, error)
                      : qm_set_int(op_.name, attributes, attribute->name, value, error);
    } else if (attribute->kind == 'f') {
      float value;
      check(api_->KernelInfoGetAttribute_float(info, attribute->name, &value), missing);
      status = qm_set_float(op_.name, attributes, attribute->name, value, error);
    } else {
      size_t size = 0;
      check(api_->KernelInfoGetAttribute_string(info, attribute->name, nullptr, &size), missing);
      std::string value(size, '\0');
      check(api_->KernelInfoGetAttribute_string(info, attribute->name, value.data(), &size), missing);
      status = qm_set_string(op_.name, attributes, attribute->name, value.c_str(), error);
    }
    if (status) fail(error);
  }
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

Kernel::Tokens Kernel::read_tokens(const OrtKernelContext* context, int64_t hidden_size) const {
  Tokens tokens{get_input(context, QuantMoE_hidden_states),
                get_input(context, QuantMoE_topk_ids),
                get_input(context, QuantMoE_topk_weights),
                {},
                0};
  tokens.shape = shape_of(tokens.hidden_states);
  const Shape &x = tokens.shape, ids = shape_of(tokens.topk_ids), weights = shape_of(tokens.topk_weights);
  if (x.empty() || x.back() != hidden_size)
    fail("hidden_states has shape " + text_of(x) + ", expected [.., hidden_size " + std::to_string(hidden_size) + "]");
  if (ids.size() != x.size() || !std::equal(x.begin(), x.end() - 1, ids.begin()) || ids.back() < 1)
    fail("topk_ids has shape " + text_of(ids) + ", expected [.., top_k] and the sizes before it of hidden_states " +
         text_of(x));
  if (weights != ids)
    fail("topk_weights has shape " + text_of(weights) + ", expected that of topk_ids " + text_of(ids));
  tokens.top_k = ids.back();
  return tokens;
}

int64_t elements(const Shape& shape) {
  return std::accumulate(shape.begin(), shape.end(), int64_t{1}, std::multiplies<>());
}

OrtValue* Kernel::gathered(OrtKernelContext* context, const OrtValue* x, const qm_gather& gather) const {
  Shape shape = shape_of(x);
  if (shape.empty()) fail("x has no dimensions, expected [.., N] or [N, ..]");
  (gather.axis < 0 ? shape.back() : shape.front()) *= gather.world;
  return get_output(context, 0, shape);
}

OrtValue* Kernel::scattered(OrtKernelContext* context, const OrtValue* x, int32_t world) const {
  Shape shape = shape_of(x);
  if (shape.empty() || shape.front() % world != 0)
    fail("x has shape " + text_of(shape) + ", expected [" + std::to_string(world) + " N, ..]");
  shape.front() /= world;
  return get_output(context, 0, shape);
}

void Kernel::check_place(const Place& first, const Place& own) const {
  if (first.rank != own.rank || first.world != own.world || first.export_id != own.export_id)
    fail("it is " + rank_of(own) + " of " + export_of(own.export_id) + ", another node of the file " + rank_of(first) +
         " of " + export_of(first.export_id));
}

void Kernel::check_shape(const OrtKernelContext* context, int32_t input, const Shape& expected) const {
  const Shape found = shape_of(get_input(context, static_cast<size_t>(input)));
  bool same = found.size() == expected.size();
  for (size_t i = 0; same && i < found.size(); ++i) same = expected[i] < 0 || found[i] == expected[i];
  if (!same)
    fail(std::string(op_.inputs.first[input].name) + " has shape " + text_of(found) + ", expected " +
         text_of(expected) + " (-1: any size)");
}

Kernel::AttentionShapes Kernel::read_attention(const OrtKernelContext* context, const qm_attention& node) const {
  AttentionShapes shapes{};
  const Shape qkv = shape_of(get_input(context, CachedAttention_qkv));
  const Shape past = shape_of(get_input(context, CachedAttention_past_key));
  const Shape mask = shape_of(get_input(context, CachedAttention_attention_mask));
  const auto check = [&](int32_t input, const Shape& expected) { check_shape(context, input, expected); };
  const int64_t heads = node.num_heads, groups = node.kv_num_heads, size = node.head_size, v_size = node.v_head_size,
                split = node.key_split;
  const int64_t key_width = split ? split : size, value_width = split ? size - split : v_size;
  check(CachedAttention_qkv, {-1, -1, qkv_size(node)});
  shapes.batch = qkv[0];
  shapes.tokens = qkv[1];
  const int64_t tail = cache_tail(node);
  check(CachedAttention_past_key, {shapes.batch, groups, -1, key_width + tail});
  check(CachedAttention_past_value, {shapes.batch, groups, past[2], value_width + tail});
  check(CachedAttention_rows, {shapes.batch, 3});
  check(CachedAttention_attention_mask, {shapes.batch, -1});
  for (const int32_t table : {CachedAttention_cos, CachedAttention_sin})
    check(table, {shapes.batch, shapes.tokens, node.rotary_size / 2});
  const auto weights = [&](int64_t all) {
    return node.qk_norm == k_qk_norm_none ? 0 : node.qk_norm == k_qk_norm_head ? size : all * size;
  };
  check(CachedAttention_q_norm, {weights(heads)});
  check(CachedAttention_k_norm, {weights(groups)});
  check(CachedAttention_sinks, {heads});
  if (node.nope_size) {
    size_t count;
    this->check(api_->KernelContext_GetInputCount(context, &count));
    if (count != static_cast<size_t>(op_.inputs.most))
      fail("it has " + std::to_string(count) + " inputs, expected " + std::to_string(op_.inputs.most) +
           ", k_up and v_up too, where nope_size is " + std::to_string(node.nope_size));
    check(CachedAttention_k_up, {heads, node.nope_size, v_size});
    check(CachedAttention_v_up, {heads, v_size, node.out_size});
  }
  shapes.past_slots = past[2];
  shapes.mask = mask[1];
  shapes.slots = std::max(past[2], mask[1]);
  shapes.output = {shapes.batch, shapes.tokens, heads * output_size(node)};
  shapes.key = {shapes.batch, groups, shapes.slots, key_width + tail};
  shapes.value = {shapes.batch, groups, shapes.slots, value_width + tail};
  return shapes;
}

OrtValue* Kernel::get_present(OrtKernelContext* context, size_t index, const AttentionShapes& shapes) const {
  const Shape& shape = index == 1 ? shapes.key : shapes.value;
  OrtValue* value;
  OrtStatus* const status = api_->KernelContext_GetOutput(context, index, shape.data(), shape.size(), &value);
  if (status && shapes.slots > shapes.past_slots) {  // what is bound cannot grow
    api_->ReleaseStatus(status);
    fail_slots(shapes, shapes.slots);
  }
  check(status);
  return value;
}

void Kernel::fail_slots(const AttentionShapes& shapes, int64_t needed) const {
  fail("the cache " + input_name(CachedAttention_past_key) + " has " + std::to_string(shapes.past_slots) +
       " slots, and this run needs " + std::to_string(needed) + ": " + std::to_string(shapes.tokens) +
       " tokens are new, attention_mask has " + std::to_string(shapes.mask) +
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

template <class Sizes, class Tensors>
void Kernel::read_stateful(OrtKernelContext* context, const qm_conv& conv, Sizes& sizes, Tensors& tensors) const {
  const int64_t channels = conv.channels;
  check_shape(context, CausalConv_x, {-1, -1, x_of(conv).size});
  Shape x = shape_of(get_input(context, CausalConv_x));
  x[2] = channels;
  const Shape bias = shape_of(get_input(context, CausalConv_bias));
  const Shape state = windowed(conv.state_window, {x[0], channels, conv.width - 1});
  check_shape(context, CausalConv_weight, {channels, conv.width});
  if (bias != Shape{0} && bias != Shape{channels})
    fail("bias has shape " + text_of(bias) + ", expected " + text_of({channels}) + " or, for none, [0]");
  check_shape(context, CausalConv_past_conv, state);
  check_shape(context, CausalConv_rows, {x[0], 3});
  const auto input = [&](int32_t index) { return data_of(get_input(context, static_cast<size_t>(index))); };
  sizes.batch = x[0];
  sizes.tokens = x[1];
  tensors.x = input(CausalConv_x);
  tensors.weight = static_cast<const float*>(input(CausalConv_weight));
  tensors.bias = bias[0] ? static_cast<const float*>(input(CausalConv_bias)) : nullptr;
  tensors.past_conv = input(CausalConv_past_conv);
  tensors.rows = static_cast<const int32_t*>(input(CausalConv_rows));
  tensors.y = data_of(get_output(context, 0, x));
  tensors.present_conv = data_of(get_output(context, 1, state));
}

template <class Sizes, class Tensors>
void Kernel::read_stateful(OrtKernelContext* context, const qm_delta& delta, Sizes& sizes, Tensors& tensors) const {
  const int64_t heads = delta.num_v_heads, k = delta.k_head_size, v = delta.v_head_size;
  const int64_t decays = heads * (delta.decay_per_key ? k : 1);
  check_shape(context, GatedDelta_qkv, {-1, -1, 2 * delta.num_k_heads * k + heads * v});
  const Shape qkv = shape_of(get_input(context, GatedDelta_qkv));
  const Shape output{qkv[0], qkv[1], heads * v}, state = windowed(delta.state_window, {qkv[0], heads, k, v});
  check_shape(context, GatedDelta_a, {qkv[0], qkv[1], a_of(delta).size});
  check_shape(context, GatedDelta_b, {qkv[0], qkv[1], b_of(delta).size});
  check_shape(context, GatedDelta_z, {qkv[0], qkv[1], z_of(delta).size});
  check_shape(context, GatedDelta_a_log, {heads});
  check_shape(context, GatedDelta_dt_bias, {decays});
  check_shape(context, GatedDelta_norm, {v});
  check_shape(context, GatedDelta_past_state, state);
  check_shape(context, GatedDelta_rows, {qkv[0], 3});
  const auto input = [&](int32_t index) { return data_of(get_input(context, static_cast<size_t>(index))); };
  const auto floats = [&](int32_t index) { return static_cast<const float*>(input(index)); };
  sizes.batch = qkv[0];
  sizes.tokens = qkv[1];
  tensors.qkv = input(GatedDelta_qkv);
  tensors.a = input(GatedDelta_a);
  tensors.b = input(GatedDelta_b);
  tensors.z = input(GatedDelta_z);
  tensors.a_log = floats(GatedDelta_a_log);
  tensors.dt_bias = floats(GatedDelta_dt_bias);
  tensors.norm = floats(GatedDelta_norm);
  tensors.past_state = floats(GatedDelta_past_state);
  tensors.rows = static_cast<const int32_t*>(input(GatedDelta_rows));
  tensors.y = data_of(get_output(context, 0, output));
  tensors.present_state = static_cast<float*>(data_of(get_output(context, 1, state)));
}

template <class Sizes, class Tensors>
void Kernel::read_stateful(OrtKernelContext* context, const qm_space& space, Sizes& sizes, Tensors& tensors) const {
  const int64_t heads = space.num_heads, width = width_of(space);
  check_shape(context, StateSpace_xbc, {-1, -1, width + 2 * int64_t{space.num_groups} * space.state_size});
  const Shape xbc = shape_of(get_input(context, StateSpace_xbc));
  const Shape output{xbc[0], xbc[1], width},
      state = windowed(space.state_window, {xbc[0], heads, space.state_size, space.head_size});
  check_shape(context, StateSpace_dt, {xbc[0], xbc[1], dt_of(space).size});
  check_shape(context, StateSpace_z, {xbc[0], xbc[1], z_of(space).size});
  for (const int32_t input : {StateSpace_a_log, StateSpace_dt_bias, StateSpace_d}) check_shape(context, input, {heads});
  check_shape(context, StateSpace_norm, {width});
  check_shape(context, StateSpace_past_state, state);
  check_shape(context, StateSpace_rows, {xbc[0], 3});
  const auto input = [&](int32_t index) { return data_of(get_input(context, static_cast<size_t>(index))); };
  const auto floats = [&](int32_t index) { return static_cast<const float*>(input(index)); };
  sizes.batch = xbc[0];
  sizes.tokens = xbc[1];
  tensors.xbc = input(StateSpace_xbc);
  tensors.dt = input(StateSpace_dt);
  tensors.z = input(StateSpace_z);
  tensors.a_log = floats(StateSpace_a_log);
  tensors.dt_bias = floats(StateSpace_dt_bias);
  tensors.d = floats(StateSpace_d);
  tensors.norm = floats(StateSpace_norm);
  tensors.past_state = floats(StateSpace_past_state);
  tensors.rows = static_cast<const int32_t*>(input(StateSpace_rows));
  tensors.y = data_of(get_output(context, 0, output));
  tensors.present_state = static_cast<float*>(data_of(get_output(context, 1, state)));
}

// What a graph says of a tensor: its type, sizes, and the names of those that are not numbers (-1). No sizes: unknown.
struct Inferred {
  ONNXTensorElementDataType type;
  Shape sizes;
  std::vector<const char*> names;

  void set(size_t at, int64_t size, const char* name = "") {
    sizes[at] = size;
    names[at] = name;
  }
};

// Shapes of a node's outputs from those of its inputs.
class Inference {
 public:
  Inference(const Op& op, OrtShapeInferContext* context) : op_(op), context_(context) {}

  // Outputs have the shape of the first input, but for the size of the last dimension, or of the first one;
  // CachedAttention's caches that of past with slots enough for the mask, other states that of past; TokenRows' are
  // [B, 3] and [B, 1, 1].
  void run() const {
    const std::string_view name = op_.name;
    Inferred first = get_input(0);
    if (first.sizes.empty()) return;
    if (name == "TokenRows") return infer_token_rows(first);
    const size_t last = first.sizes.size() - 1;
    if (name == "QuantLinear") first.set(last, get_attribute("out_features"));
    if (name == "MoERouting" || name == "MoERouter")
      first.set(last, get_attribute("top_k") + (get_attribute("op_version") > 1 ? get_attribute("shared_experts") : 0));
    if (name == "AllGather") {
      const bool rows = get_attribute("op_version") > 1 && get_attribute("axis") == 0;
      first.set(rows ? 0 : last, std::max(first.sizes[rows ? 0 : last] * get_attribute("world"), int64_t{-1}));
    }
    if (name == "ReduceScatter") first.set(0, first.sizes[0] < 0 ? -1 : first.sizes[0] / get_attribute("world"));
    if (name == "CausalConv") first.set(last, get_attribute("channels"));
    if (name == "CachedAttention") {
      const int64_t own = get_attribute("op_version") > 3 ? get_attribute("out_size") : 0;
      first.set(last, get_attribute("num_heads") * (own ? own : get_attribute("v_head_size")));
    }
    if (name == "GatedDelta") first.set(last, get_attribute("num_v_heads") * get_attribute("v_head_size"));
    if (name == "StateSpace") first.set(last, get_attribute("num_heads") * get_attribute("head_size"));
    const bool stateful =
        name == "CachedAttention" || name == "CausalConv" || name == "GatedDelta" || name == "StateSpace";
    const int32_t alike = stateful ? 1 : op_.outputs.count;
    for (int32_t i = 0; i < alike; ++i) {
      Inferred output = first;
      if (const Type type = op_.outputs.first[i].type; type != Type::T) output.type = op_.resolve(type);
      get_output(i, output);
    }
    if (name == "CachedAttention") infer_caches();
    if (name == "CausalConv") get_output(1, get_input(CausalConv_past_conv));
    if (name == "GatedDelta") get_output(1, get_input(GatedDelta_past_state));
    if (name == "StateSpace") get_output(1, get_input(StateSpace_past_state));
  }

 private:
  void infer_token_rows(Inferred rows) const {
    rows.sizes.resize(2);
    rows.names.resize(2);
    rows.type = ONNX_TENSOR_ELEMENT_DATA_TYPE_INT32;
    rows.set(1, 3);
    get_output(0, rows);
    rows.type = ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64;
    rows.set(1, 1);
    rows.sizes.push_back(1);
    rows.names.push_back("");
    get_output(1, rows);
  }
  void infer_caches() const {
    const Inferred mask = get_input(CachedAttention_attention_mask);
    for (const int32_t i : {0, 1}) {
      Inferred cache = get_input(CachedAttention_past_key + i);
      if (cache.sizes.size() != 4 || mask.sizes.size() != 2) continue;
      const int64_t past = cache.sizes[2], all = mask.sizes[1];
      const bool same = past < 0 && all < 0 && std::string_view(cache.names[2]) == mask.names[1];
      if (past >= 0 && all >= 0)
        cache.set(2, std::max(past, all));
      else if (past == 0)
        cache.set(2, all, mask.names[1]);
      else if (!same)
        continue;  // the larger of two sizes has no name
      get_output(1 + i, cache);
    }
  }
  void check(OrtStatus* status) const {
    if (!status) return;
    const std::string message = op_.api->GetErrorMessage(status);
    op_.api->ReleaseStatus(status);
    throw std::runtime_error(message);
  }
  Inferred get_input(int32_t index) const {
    OrtTensorTypeAndShapeInfo* info;  // belongs to the context
    Inferred found{};
    size_t rank = 0;
    check(op_.api->ShapeInferContext_GetInputTypeShape(context_, static_cast<size_t>(index), &info));
    check(op_.api->GetTensorElementType(info, &found.type));
    check(op_.api->GetDimensionsCount(info, &rank));
    found.sizes.resize(rank);
    found.names.resize(rank);
    check(op_.api->GetDimensions(info, found.sizes.data(), rank));
    check(op_.api->GetSymbolicDimensions(info, found.names.data(), rank));
    return found;
  }
  int64_t get_attribute(const char* name) const {
    const OrtOpAttr* attribute;
    int64_t value;
    size_t length;
    check(op_.api->ShapeInferContext_GetAttribute(context_, name, &attribute));
    check(op_.api->ReadOpAttr(attribute, ORT_OP_ATTR_INT, &value, sizeof value, &length));
    return value;
  }
  // The type is said too: ONNX Runtime asks the first of an operator's variants for all of them.
  void get_output(int32_t index, Inferred output) const {
    const size_t rank = output.sizes.size();
    for (size_t i = 0; i < rank; ++i)
      if (output.sizes[i] < 0 && !*output.names[i]) return;  // it would be taken for the number -1
    OrtTensorTypeAndShapeInfo* info;
    check(op_.api->CreateTensorTypeAndShapeInfo(&info));
    const std::unique_ptr<OrtTensorTypeAndShapeInfo, void (*)(OrtTensorTypeAndShapeInfo*)> owned(
        info, op_.api->ReleaseTensorTypeAndShapeInfo);
    check(op_.api->SetDimensions(info, output.sizes.data(), rank));
    check(op_.api->SetSymbolicDimensions(info, output.names.data(), rank));
    check(op_.api->SetTensorElementType(info, output.type));
    check(op_.api->ShapeInferContext_SetOutputTypeShape(context_, static_cast<size_t>(index), info));
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
