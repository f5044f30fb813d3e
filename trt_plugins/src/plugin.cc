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

namespace {

// A size in a network.
struct NetworkSize {
  const IDimensionExpr* expression;
};
int64_t known_size(const NetworkSize& size) {
  return size.expression->isConstant() ? size.expression->getConstantValue() : -1;
}

struct MakeNetworkSizes {
  IExprBuilder& builder;
  NetworkSize number(int64_t n) const { return {builder.constant(n)}; }
  NetworkSize times(const NetworkSize& size, int64_t n) const {
    return make(DimensionOperation::kPROD, size, number(n));
  }
  NetworkSize over(const NetworkSize& size, int64_t n) const {
    return make(DimensionOperation::kFLOOR_DIV, size, number(n));
  }
  NetworkSize max(const NetworkSize& a, const NetworkSize& b) const { return make(DimensionOperation::kMAX, a, b); }
  NetworkSize min(const NetworkSize& a, const NetworkSize& b) const { return make(DimensionOperation::kMIN, a, b); }
  NetworkSize make(DimensionOperation operation, const NetworkSize& a, const NetworkSize& b) const {
    return {builder.operation(operation, *a.expression, *b.expression)};
  }
};

}  // namespace

bool Plugin::check_shapes(const Dims* in) const {
  FreeSizes<int64_t> sizes;
  for (int32_t i = 0; i < inputs_.count; ++i)
    if (const auto at = static_cast<size_t>(i);
        !rules_.match(at, std::vector<int64_t>(in[i].d, in[i].d + std::max(0, in[i].nbDims)), sizes, MakeNumbers{}))
      return wrong(std::string(inputs_.first[i].name) + " has shape " + to_text(in[i]) + ", expected " +
                   rules_.expected(at, sizes));
  return true;
}

bool Plugin::infer_shapes(const DimsExprs* inputs, DimsExprs* outputs, IExprBuilder& builder) const {
  std::vector<std::vector<NetworkSize>> shapes(static_cast<size_t>(inputs_.count));
  std::vector<Dims> known(shapes.size());
  for (size_t i = 0; i < shapes.size(); ++i) {
    known[i].nbDims = inputs[i].nbDims;
    for (int32_t d = 0; d < inputs[i].nbDims; ++d) {
      shapes[i].push_back({inputs[i].d[d]});
      known[i].d[d] = known_size(shapes[i].back());
    }
  }
  if (!check_shapes(known.data())) return false;
  const MakeNetworkSizes make{builder};
  FreeSizes<NetworkSize> sizes;
  for (size_t i = 0; i < shapes.size(); ++i) (void)rules_.match(i, shapes[i], sizes, make);
  rules_.set_host_sizes(sizes, [&](size_t) { return make.number(1); });
  for (int32_t i = 0; i < outputs_.count; ++i) {
    outputs[i].nbDims = 0;
    for (const NetworkSize& size : rules_.output(static_cast<size_t>(i), sizes, make))
      outputs[i].d[outputs[i].nbDims++] = size.expression;
  }
  return true;
}

bool Plugin::supports(int32_t position, const DynamicPluginTensorDesc* tensors, int32_t inputs, int32_t outputs) {
  if (!takes_count(inputs) || outputs != outputs_.count) return false;
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

const PluginFieldCollection* Plugin::getFieldsToSerialize() noexcept {
  workspace_bytes_ = layer_->workspace_bytes;
  collection_ = {static_cast<int32_t>(fields_.size() - !workspace_bytes_), fields_.data()};
  return &collection_;
}

}  // namespace quantmoe
