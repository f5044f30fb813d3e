#include "common/node.h"

#include <memory>

#include "common/node_attributes.h"

namespace quantmoe {

Node::Node(const Op& op, const OrtApi* api, const OrtKernelInfo* info)
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

void Node::check(OrtStatus* status, const std::string& what) const {
  if (status) quantmoe::check(api_, status, node_ + ": " + what);
}

Shape Node::shape_of(const OrtValue* value) const {
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

void* Node::data_of(const OrtValue* value) const {
  void* data;  // API 21 has no accessor for const values
  check(api_->GetTensorMutableData(const_cast<OrtValue*>(value), &data));
  return data;
}

const OrtValue* Node::get_input(const OrtKernelContext* context, size_t index) const {
  const OrtValue* value;
  int given = 0;
  check(api_->KernelContext_GetInput(context, index, &value));
  if (value) check(api_->HasValue(value, &given));
  if (!given) fail("input " + input_name(index) + " is missing: feed it, or bind it");
  return value;
}

OrtValue* Node::get_output(OrtKernelContext* context, size_t index, const Shape& shape) const {
  OrtValue* value;
  check(api_->KernelContext_GetOutput(context, index, shape.data(), shape.size(), &value));
  return value;
}

void Node::read_attributes(const OrtKernelInfo* info, void* attributes) {
  struct Read {
    const Node& node;
    const OrtKernelInfo* info;
    void check(const qm_attribute& a, OrtStatus* status) const {
      if (status) node.check(status, std::string("attribute ") + a.name + " of kind " + a.kind + " is required");
    }
    int64_t integer(const qm_attribute& a) const {
      int64_t value;
      check(a, node.api_->KernelInfoGetAttribute_int64(info, a.name, &value));
      return value;
    }
    float number(const qm_attribute& a) const {
      float value;
      check(a, node.api_->KernelInfoGetAttribute_float(info, a.name, &value));
      return value;
    }
    std::string text(const qm_attribute& a) const {
      size_t size = 0;
      check(a, node.api_->KernelInfoGetAttribute_string(info, a.name, nullptr, &size));
      std::string value(size, '\0');
      check(a, node.api_->KernelInfoGetAttribute_string(info, a.name, value.data(), &size));
      return value;
    }
  };
  char error[QM_ERROR_SIZE];
  if (set_attributes(op_.name, attributes, Read{*this, info}, error)) fail(error);
  shapes_ = ShapeRules(op_.name, attributes);
}

// An attribute that a node may lack.
std::optional<std::string> Node::find_string(const OrtKernelInfo* info, const std::string& attribute) const {
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
const OrtValue* Node::get_constant(const OrtKernelInfo* info, size_t input) const {
  const std::string name = op_.inputs.first[input].name;
  int constant = 0;
  const OrtValue* value = nullptr;
  check(api_->KernelInfoGetConstantInput_tensor(info, input, &constant, &value), name);
  if (!constant || !value)
    fail(name + " is computed or fed at run time, expected an initializer that is not a graph input");
  return value;
}

// A packed tensor.
const OrtValue* Node::get_weight(const OrtKernelInfo* info, size_t input, Shape& shape) const {
  const OrtValue* value = get_constant(info, input);
  shape = shape_of(value);
  const std::string name = op_.inputs.first[input].name;
  if (find_string(info, name + "_external"))
    fail(name + " is in a data file that TensorRT's plug-in reads (" + name +
         "_external); for ONNX Runtime export without --external-experts");
  if (shape.size() != 2)
    fail(name + " has shape " + text_of(shape) + ", expected [experts, int32 words of a packed expert]");
  return value;
}

void Node::check_place(const Place& first, const Place& own) const {
  if (first.rank != own.rank || first.world != own.world || first.export_id != own.export_id)
    fail("it is " + rank_of(own) + " of " + export_of(own.export_id) + ", another node of the file " + rank_of(first) +
         " of " + export_of(first.export_id));
}

void Node::match(size_t index, const Shape& found, FreeSizes<int64_t>& sizes) const {
  if (!shapes_.match(index, found, sizes, MakeNumbers{}))
    fail(std::string(op_.inputs.first[index].name) + " has shape " + text_of(found) + ", expected " +
         shapes_.expected(index, sizes));
}

std::vector<qm_tensor> Node::read_constants(const OrtKernelInfo* info) const {
  constexpr struct {
    std::string_view op;
    int32_t input;
  } kConstants[] = {
#define QM_CONSTANT(op, name) {#op, op##_##name},
#include "op.def"
  };
  std::vector tensors(static_cast<size_t>(op_.inputs.most), qm_tensor{nullptr, op_.type(), {}});
  for (size_t i = 0; i < tensors.size(); ++i) tensors[i].shape.rank = has_input(i) ? 0 : -1;
  FreeSizes<int64_t> sizes;
  for (const auto& constant : kConstants) {
    if (constant.op != op_.name) continue;
    const auto index = static_cast<size_t>(constant.input);
    const OrtValue* value = get_constant(info, index);
    const Shape found = shape_of(value);
    match(index, found, sizes);
    tensors[index] = tensor_of(op_.inputs.first[index], value, found, false);
  }
  for (size_t i = 0; i < tensors.size(); ++i) {
    if (!is_packed(i)) continue;
    Shape shape;
    const OrtValue* value = get_weight(info, i, shape);
    tensors[i] = packed_tensor(data_of(value), shape);
  }
  return tensors;
}

FreeSizes<int64_t> Node::check_inputs(const OrtKernelContext* context, std::vector<qm_tensor>* tensors) const {
  FreeSizes<int64_t> sizes;
  const size_t count = std::max(static_cast<size_t>(op_.inputs.count), input_names_.size());  // with optional ones
  for (size_t i = 0; i < count; ++i) {
    if (shapes_.input(i).packed || (i < input_names_.size() && input_names_[i].empty())) continue;  // "": left out
    const OrtValue* value = get_input(context, i);
    const Shape found = shape_of(value);
    match(i, found, sizes);
    if (tensors) (*tensors)[i] = tensor_of(op_.inputs.first[i], value, found, shapes_.input(i).or_none);
  }
  shapes_.set_host_sizes(sizes, [&](size_t i) { return has_input(i) ? host_size(context, i) : int64_t{1}; });
  return sizes;
}

// The number in an input in host memory.
int64_t Node::host_size(const OrtKernelContext* context, size_t index) const {
  const int64_t size = *static_cast<const int64_t*>(data_of(get_input(context, index)));
  if (size < 1) fail(input_name(index) + " is " + std::to_string(size) + ", expected 1 or more");
  if (op_.one_logit && size != 1)
    fail(input_name(index) + " is " + std::to_string(size) + ", but the session entry quantmoe.one_logit is 1");
  return size;
}

qm_tensor Node::tensor_of(const TensorSlot& slot, const OrtValue* value, const Shape& shape, bool or_none) const {
  qm_tensor tensor{or_none && shape == Shape{0} ? nullptr : data_of(value),
                   op_.type_of(slot.type),
                   {static_cast<int32_t>(shape.size()), {}}};
  if (shape.size() > std::size(tensor.shape.sizes))
    fail(std::string(slot.name) + " has " + std::to_string(shape.size()) + " dimensions, expected at most " +
         std::to_string(std::size(tensor.shape.sizes)));
  std::copy(shape.begin(), shape.end(), tensor.shape.sizes);
  return tensor;
}

void Node::add_outputs(OrtKernelContext* context, const FreeSizes<int64_t>& sizes, Tensors& tensors) const {
  for (int32_t i = 0; i < op_.outputs.count; ++i) {
    const auto index = static_cast<size_t>(i);
    const Shape shape = shapes_.output(index, sizes, MakeNumbers{});
    OrtValue* const value =
        op_.outputs.first[i].type == Type::C ? get_present(context, index, sizes) : get_output(context, index, shape);
    tensors.outputs.push_back(tensor_of(op_.outputs.first[i], value, shape, false));
  }
}

OrtValue* Node::get_present(OrtKernelContext* context, size_t index, const FreeSizes<int64_t>& sizes) const {
  const Shape shape = shapes_.output(index, sizes, MakeNumbers{});
  OrtValue* value;
  OrtStatus* const status = api_->KernelContext_GetOutput(context, index, shape.data(), shape.size(), &value);
  if (status && sizes.find('P') && shape[2] > sizes.at('P')) {  // what is bound cannot grow
    api_->ReleaseStatus(status);
    fail_slots(sizes, shape[2]);
  }
  check(status);
  return value;
}

void Node::fail_slots(const FreeSizes<int64_t>& sizes, int64_t needed) const {
  size_t cache = 0;
  while (op_.inputs.first[cache].type != Type::C) ++cache;
  fail("the cache " + input_name(cache) + " has " + std::to_string(sizes.at('P')) + " slots, and this run needs " +
       std::to_string(needed) + ": " + std::to_string(sizes.at('S')) + " tokens are new, attention_mask has " +
       std::to_string(sizes.at('L')) + " columns; bind a cache with more slots, or feed fewer tokens");
}

void Node::check_caches(const qm_attention& node) const {
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

}  // namespace quantmoe
