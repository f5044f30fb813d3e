#include "plugin.h"

namespace quantmoe {

int64_t rows_of(const Dims& dims) {
  int64_t rows = 1;
  for (int32_t i = 0; i + 1 < dims.nbDims; ++i) rows *= dims.d[i];
  return rows;
}

std::string to_text(const Dims& dims) {
  std::string text = "[";
  for (int32_t i = 0; i < dims.nbDims; ++i) text += (i ? ", " : "") + std::to_string(dims.d[i]);
  return text + "]";
}

bool Plugin::set_shapes(const DimsExprs* inputs, DimsExprs* outputs, IExprBuilder& builder) const {
  if (inputs[0].nbDims < 1) return wrong(std::string(inputs_.first[0].name) + " is a scalar, expected [.., features]");
  for (int32_t i = 0; i < outputs_.count; ++i) {
    outputs[i] = inputs[0];
    if (const int64_t size = last_size()) outputs[i].d[inputs[0].nbDims - 1] = builder.constant(size);
  }
  return true;
}

bool Plugin::supports(int32_t position, const DynamicPluginTensorDesc* tensors, int32_t inputs, int32_t outputs) {
  if (inputs != inputs_.count || outputs != outputs_.count) return false;
  const PluginTensorDesc& tensor = tensors[position].desc;
  if (tensor.format != TensorFormat::kLINEAR) return false;
  const auto warn = [&](const std::string& what) {
    if (!std::exchange(said_type_, true)) log_message(Severity::kWARNING, layer_->name + " " + what);
  };
  switch (position < inputs ? inputs_.first[position].type : outputs_.first[position - inputs].type) {
    case Type::T:
      if (position != 0) return tensor.type == tensors[0].desc.type;
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

}  // namespace quantmoe
