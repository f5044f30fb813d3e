#include "provider/claim.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <fstream>
#include <functional>
#include <limits>
#include <memory>
#include <numeric>
#include <system_error>

#include "core/attributes.h"
#include "core/half.h"
#include "core/parallel.h"
#include "hashes/blake3.h"
#include "hashes/samples.h"
#include "layouts/cpu_panel.h"

namespace quantmoe {
namespace {

constexpr auto kFloat = ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT;
constexpr auto kHalf = ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16;
constexpr auto kE4m3 = ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT8E4M3FN;
constexpr auto kByte = ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT8;
constexpr float kNoLimit = std::numeric_limits<float>::max();  // what swiglu_limit left out means to ONNX Runtime

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

int64_t size_of(const Shape& shape) {
  return std::accumulate(shape.begin(), shape.end(), int64_t{1}, std::multiplies<>());
}

class Reader {
 public:
  Reader(const GraphApi& api, const OrtNode* node) : api_(api), node_(node), inputs_(node_inputs(api, node)) {}

  int64_t integer(const char* name, int64_t absent) const {
    int64_t value = absent;
    read(name, ORT_OP_ATTR_INT, &value, sizeof value);
    return value;
  }
  int32_t size(const char* name) const {
    const int64_t value = integer(name, 0);
    if (value < 1 || value > INT32_MAX) throw Unclaimed(std::string(name) + " is " + std::to_string(value));
    return static_cast<int32_t>(value);
  }
  float number(const char* name, float absent) const {
    float value = absent;
    read(name, ORT_OP_ATTR_FLOAT, &value, sizeof value);
    return value;
  }
  std::string text(const char* name, const char* absent) const {
    char value[64] = {};
    return read(name, ORT_OP_ATTR_STRING, value, sizeof value - 1) ? value : absent;
  }
  bool has(const char* name) const { return attribute(name); }

  std::string name(size_t input) const { return input < inputs_.size() ? value_name(api_, inputs_[input]) : ""; }
  bool given(size_t input) const { return !name(input).empty(); }
  // The name of an input of a run: initializers are not kept for one.
  std::string running(size_t input, const char* what, bool required) const {
    if (!given(input)) {
      if (required) throw Unclaimed(std::string("it has no ") + what);
      return "";
    }
    if (is_constant(input)) throw Unclaimed(std::string(what) + " is an initializer");
    return name(input);
  }
  ONNXTensorElementDataType type(size_t input) const {
    Constant found;
    describe(input, found);
    return found.type;
  }
  // An initializer, of `type`; absent where it may be.
  Constant constant(size_t input, const char* what, ONNXTensorElementDataType type, bool required) const {
    Constant found;
    if (!given(input)) {
      if (required) throw Unclaimed(std::string("it has no ") + what);
      return found;
    }
    if (!is_constant(input)) throw Unclaimed(std::string(what) + " is no constant initializer");
    describe(input, found);
    if (found.type != type) throw Unclaimed(std::string(what) + " has a type that the kernels do not take");
    found.info = inputs_[input];
    return found;
  }
  void absent(size_t first, size_t last, const char* what) const {
    for (size_t i = first; i <= last; ++i)
      if (given(i)) throw Unclaimed(std::string("it has ") + what);
  }

 private:
  bool is_constant(size_t input) const {
    bool constant = false;
    api_.check(api_.ValueInfo_IsConstantInitializer(inputs_[input], &constant));
    return constant;
  }
  const OrtOpAttr* attribute(const char* name) const {
    const OrtOpAttr* found = nullptr;
    if (OrtStatus* status = api_.Node_GetAttributeByName(node_, name, &found)) {  // 1.23: not found is an error
      api_.api->ReleaseStatus(status);
      return nullptr;
    }
    return found;
  }
  bool read(const char* name, OrtOpAttrType type, void* value, size_t room) const {
    const OrtOpAttr* const found = attribute(name);
    size_t size = 0;
    if (!found) return false;
    try {
      api_.check(api_.api->ReadOpAttr(found, type, value, room, &size));
    } catch (const std::runtime_error& why) {
      throw Unclaimed(std::string("attribute ") + name + " cannot be read: " + why.what());
    }
    return true;
  }
  void describe(size_t input, Constant& found) const {
    if (!given(input)) return;
    const OrtTypeInfo* type = nullptr;
    const OrtTensorTypeAndShapeInfo* tensor = nullptr;
    api_.check(api_.GetValueInfoTypeInfo(inputs_[input], &type));
    api_.check(api_.api->CastTypeInfoToTensorInfo(type, &tensor));
    if (!tensor) return;
    size_t rank = 0;
    api_.check(api_.api->GetTensorElementType(tensor, &found.type));
    api_.check(api_.api->GetDimensionsCount(tensor, &rank));
    found.shape.resize(rank);
    api_.check(api_.api->GetDimensions(tensor, found.shape.data(), rank));
  }

  const GraphApi& api_;
  const OrtNode* node_;
  std::vector<const OrtValueInfo*> inputs_;
};

void expect(bool right, const Constant& tensor, const char* what, const std::string& expected) {
  if (!right) throw Unclaimed(std::string(what) + " has shape " + text_of(tensor.shape) + ", expected " + expected);
}

void expect_shape(const Constant& tensor, const char* what, const Shape& shape) {
  expect(tensor.shape == shape, tensor, what, text_of(shape));
}

// As older tools wrote MatMulNBits, rows may be one dimension.
void expect_rows(const Constant& tensor, const char* what, int64_t rows, int64_t columns) {
  expect(tensor.shape == Shape{rows, columns} || tensor.shape == Shape{rows * columns}, tensor, what,
         text_of({rows, columns}));
}

qm_projection projection_of(int64_t bits, int64_t group, ONNXTensorElementDataType scales, bool zero_points, bool bias,
                            bool int8) {
  qm_projection projection{};
  projection.format = bits <= 4 ? k_format_int4 : k_format_int8;
  projection.group_size = static_cast<int32_t>(group);
  projection.block_n = 1;
  projection.scale_type = scales == kFloat ? k_scale_type_f32 : k_scale_type_f16;
  projection.zero_points = zero_points;
  projection.bias = bias;
  projection.activation_format = int8 ? k_activation_format_int8_group : k_activation_format_none;
  projection.layout = k_layout_cpu_panel;
  projection.layout_version = 1;
  return projection;
}

// Which has none of the later attributes.
void set_first_version(const char* op, void* node) {
  char error[QM_ERROR_SIZE];
  const qm_value version{"op_version", 'i', 1, 0, nullptr};
  if (qm_set_attributes(op, node, &version, 1, error)) throw Unclaimed(error);
}

void find_row(Matrix& matrix) {
  char error[QM_ERROR_SIZE];
  if (qm_row_of(&matrix.projection, matrix.n, matrix.k, matrix.halves, &matrix.row, error)) throw Unclaimed(error);
}

qm_type type_of(const Reader& node) {
  const auto type = node.type(0);
  if (type != kFloat && type != kHalf) throw Unclaimed("its activations are neither float nor float16");
  return type == kFloat ? QM_F32 : QM_F16;
}

bool wants_int8(Activations wanted, int64_t accuracy_level) {
  return wanted == Activations::kInt8 || (wanted == Activations::kAuto && accuracy_level == 4);
}

int64_t bits_of(const Reader& node, const char* name, int64_t absent, bool three) {
  const int64_t bits = node.integer(name, absent);
  if (bits != 2 && (bits != 3 || !three) && bits != 4 && bits != 8)
    throw Unclaimed(std::string(name) + " is " + std::to_string(bits) + ", expected 2, " + (three ? "3, " : "") +
                    "4 or 8");
  return bits;
}

void read_linear(const Reader& node, Activations activations, Claim& claim) {
  Matrix matrix;
  const int64_t bits = bits_of(node, "bits", 4, false), group = node.size("block_size");
  matrix.bits = bits;
  matrix.k = node.size("K");
  matrix.n = node.size("N");
  if (node.integer("weight_prepacked", 0)) throw Unclaimed("its weights are packed for another provider");
  node.absent(4, 4, "g_idx");
  const int64_t blocks = ceil_div(matrix.k, group);
  const auto type = node.type(0);
  matrix.code_row = blocks * (group * bits / 8);
  matrix.codes = node.constant(1, "B", kByte, true);
  matrix.scales = node.constant(2, "scales", type, true);
  matrix.zero_points = node.constant(3, "zero_points", kByte, false);
  matrix.bias = node.constant(5, "bias", type, false);
  expect_shape(matrix.codes, "B", {matrix.n, blocks, group * bits / 8});
  expect_rows(matrix.scales, "scales", matrix.n, blocks);
  if (matrix.zero_points) expect_rows(matrix.zero_points, "zero_points", matrix.n, ceil_div(blocks * bits, 8));
  if (matrix.bias) expect_shape(matrix.bias, "bias", {matrix.n});
  const bool int8 = wants_int8(activations, node.integer("accuracy_level", 0));
  matrix.projection = projection_of(bits, group, type, bool(matrix.zero_points), bool(matrix.bias), int8);
  find_row(matrix);
  qm_linear& linear = claim.linear;
  char error[QM_ERROR_SIZE];
  const qm_shape packed{2, {1, matrix.row.bytes / 4}};
  set_first_version("QuantLinear", &linear);
  linear.in_features = static_cast<int32_t>(matrix.k);
  linear.out_features = static_cast<int32_t>(matrix.n);
  linear.w = matrix.projection;
  if (qm_validate("QuantLinear", &linear, &packed, error)) throw Unclaimed(error);
  claim.inputs = {node.running(0, "A", true)};
  claim.weights = {matrix};
}

// One of QMoE's two projections of NVFP4, whose inputs are codes, scales, bias from `first` on, and scales of experts.
Matrix read_nvfp4(const Reader& node, size_t first, size_t global_scales, const char* name, int halves, bool int8) {
  Matrix matrix;
  const std::string prefix = name, codes = prefix + "_experts_weights";
  matrix.codes = node.constant(first, codes.c_str(), kByte, true);
  matrix.scales = node.constant(first + 1, (prefix + "_scales").c_str(), kE4m3, true);
  matrix.bias = node.constant(first + 2, (prefix + "_experts_bias").c_str(), node.type(0), false);
  matrix.global_scales = node.constant(global_scales, (prefix + "_global_scale").c_str(), kFloat, true);
  const Shape& shape = matrix.codes.shape;
  expect(shape.size() == 3 && *std::min_element(shape.begin(), shape.end()) > 0 && shape[1] <= INT32_MAX &&
             shape[2] <= INT32_MAX / 2 && shape[0] <= INT32_MAX && shape[1] % 16 == 0 && shape[2] * 2 % halves == 0,
         matrix.codes, codes.c_str(), "experts, columns in groups of 16, pairs of rows");
  matrix.experts = shape[0];
  matrix.k = shape[1];
  matrix.halves = halves;
  const int64_t rows = 2 * shape[2];
  matrix.n = rows / halves;
  matrix.code_row = matrix.k / 2;
  matrix.columns = node.integer("weights_prepacked", -1) != 1;
  expect_shape(matrix.scales, (prefix + "_scales").c_str(), {matrix.experts, rows, matrix.k / 16});
  expect_shape(matrix.global_scales, (prefix + "_global_scale").c_str(), {matrix.experts});
  if (matrix.bias) expect_shape(matrix.bias, (prefix + "_experts_bias").c_str(), {matrix.experts, rows});
  matrix.projection = projection_of(4, 16, kFloat, false, bool(matrix.bias), int8);
  matrix.projection.format = k_format_nvfp4;
  matrix.projection.scale_type = k_scale_type_e4m3;
  find_row(matrix);
  return matrix;
}

// One of QMoE's two projections, whose inputs are codes, scales, bias from `first` on, and zero points.
Matrix read_experts(const Reader& node, size_t first, size_t zero_points, const char* name, int halves, int64_t bits,
                    int64_t group, bool int8) {
  Matrix matrix;
  matrix.bits = bits;
  const std::string prefix = name;
  const auto type = node.type(0);
  matrix.codes = node.constant(first, (prefix + "_experts_weights").c_str(), kByte, true);
  expect(matrix.codes.shape.size() == 3, matrix.codes, (prefix + "_experts_weights").c_str(), "three dimensions");
  matrix.experts = matrix.codes.shape[0];
  matrix.code_row = matrix.codes.shape[2];
  const auto [least, most] = std::minmax({matrix.experts, matrix.codes.shape[1], matrix.code_row});
  expect(least > 0 && most <= INT32_MAX && matrix.experts * matrix.codes.shape[1] <= INT64_MAX / matrix.code_row,
         matrix.codes, (prefix + "_experts_weights").c_str(), "experts, rows of gate and up, columns");
  matrix.halves = halves;
  const int64_t rows = matrix.codes.shape[1];
  matrix.n = rows / halves;
  const int64_t code_bits = matrix.code_row * 8;
  matrix.k = code_bits / bits;
  expect(matrix.experts > 0 && matrix.n > 0 && matrix.k > 0 && rows % halves == 0 && matrix.k * bits == code_bits,
         matrix.codes, (prefix + "_experts_weights").c_str(), "experts, rows of gate and up, columns");
  matrix.scales = node.constant(first + 1, (prefix + "_scales").c_str(), type, true);
  matrix.bias = node.constant(first + 2, (prefix + "_experts_bias").c_str(), type, false);
  matrix.zero_points = node.constant(zero_points, (prefix + "_zero_points").c_str(), kByte, false);
  const int64_t blocks = group > 0 ? matrix.k / group : 1;
  if (group > 0 && matrix.k % group) throw Unclaimed("block_size does not divide the input features");
  const bool wide = group > 0;
  expect(matrix.scales.shape == Shape{matrix.experts, rows, blocks} ||
             (blocks == 1 && matrix.scales.shape == Shape{matrix.experts, rows}),
         matrix.scales, (prefix + "_scales").c_str(), text_of({matrix.experts, rows, blocks}));
  if (matrix.zero_points) {
    if (!wide || blocks == 1) throw Unclaimed(prefix + "_zero_points are of whole rows");
    const Shape shape{matrix.experts, rows, ceil_div(blocks * bits, 8)};
    expect(matrix.zero_points.shape == shape, matrix.zero_points, (prefix + "_zero_points").c_str(), text_of(shape));
  }
  if (matrix.bias)
    expect(matrix.bias.shape == Shape{matrix.experts, rows}, matrix.bias, (prefix + "_experts_bias").c_str(),
           text_of({matrix.experts, rows}));
  matrix.projection = projection_of(bits, wide ? group : -1, type, bool(matrix.zero_points), bool(matrix.bias), int8);
  find_row(matrix);
  return matrix;
}

// The activation function of the core that computes QMoE's.
void find_activation(const Reader& node, qm_moe& moe) {
  const std::string type = node.text("activation_type", "relu");
  const float alpha = node.number("activation_alpha", 1), beta = node.number("activation_beta", 0);
  const float limit = node.number("swiglu_limit", kNoLimit);
  moe.gated = type == "swiglu";
  if (type == "silu") {
    moe.activation = k_activation_silu;
  } else if (type == "gelu") {
    moe.activation = k_activation_gelu_tanh;  // as ONNX Runtime's CPU kernel
  } else if (type != "swiglu") {
    throw Unclaimed("activation_type is " + type + ", expected swiglu, silu or gelu");
  } else if (!(limit > 0)) {
    throw Unclaimed("swiglu_limit is " + std::to_string(limit) + ", expected a positive number");
  } else if (beta == 1 && std::isfinite(alpha)) {
    moe.activation = k_activation_swiglu_oai;
    moe.swiglu_alpha = alpha;
    moe.swiglu_limit = limit;
  } else if (beta == 0 && alpha == 1 && limit == kNoLimit) {
    moe.activation = k_activation_silu;
  } else {
    throw Unclaimed("swiglu has alpha " + std::to_string(alpha) + " and beta " + std::to_string(beta) +
                    ", expected beta 1, or alpha 1, beta 0 and no limit");
  }
}

void read_moe(const Reader& node, Activations activations, Claim& claim) {
  claim.moe = true;
  const int64_t both = bits_of(node, "expert_weight_bits", 4, true), fusion = node.integer("swiglu_fusion", 0);
  const int64_t bits1 = bits_of(node, "fc1_expert_weight_bits", both, true);
  const int64_t bits2 = bits_of(node, "fc2_expert_weight_bits", both, true);
  const std::string type = node.text("quant_type", "int");
  const bool nvfp4 = type == "nvfp4";
  if (type != "int" && !nvfp4) throw Unclaimed("quant_type is " + type + ", expected int or nvfp4");
  if (!nvfp4 && node.integer("weights_prepacked", -1) > 0)
    throw Unclaimed("its weights are packed for another provider");
  if (nvfp4 && (bits1 != 4 || bits2 != 4)) throw Unclaimed("nvfp4 has other widths than 4 bits");
  if (node.integer("use_sparse_mixer", 0)) throw Unclaimed("it uses the sparse mixer");
  if (node.integer("swiglu_limit_after_activation", 0)) throw Unclaimed("it limits after the activation");
  node.absent(8, 10, "fc3");
  node.absent(13, 13, "fc3_zero_points");
  node.absent(nvfp4 ? 17 : 15, 20, "scales of other formats");
  qm_moe& moe = claim.experts;
  set_first_version("QuantMoE", &moe);
  find_activation(node, moe);
  if (moe.gated && node.integer("fc3_expert_weight_bits", both) != bits1)
    throw Unclaimed("fc1_expert_weight_bits is " + std::to_string(bits1) + ", expected that of fc3");
  if (moe.gated && fusion != 1 && fusion != 2)
    throw Unclaimed("swiglu_fusion is " + std::to_string(fusion) + ", expected 1 or 2");
  const bool int8 = wants_int8(activations, nvfp4 ? 0 : node.integer("accuracy_level", 0));
  const int64_t group = node.integer("block_size", -1);
  if (group < 1 && group != -1) throw Unclaimed("block_size is " + std::to_string(group));
  if (nvfp4) node.absent(11, 12, "zero points");
  const int halves = moe.gated ? 2 : 1;
  Matrix w13 = nvfp4 ? read_nvfp4(node, 2, 15, "fc1", halves, int8)
                     : read_experts(node, 2, 11, "fc1", halves, bits1, group, int8);
  Matrix w2 = nvfp4 ? read_nvfp4(node, 5, 16, "fc2", 1, int8) : read_experts(node, 5, 12, "fc2", 1, bits2, group, int8);
  w13.interleaved = fusion == 1;
  if (w13.experts != w2.experts || w13.n != w2.k || w13.k != w2.n || std::max(w13.experts, w13.k) > INT32_MAX)
    throw Unclaimed("fc1 is " + text_of(w13.codes.shape) + " and fc2 " + text_of(w2.codes.shape) +
                    ", which do not fit together");
  claim.top_k = node.integer("k", 1);
  if (claim.top_k < 1 || claim.top_k > w13.experts) throw Unclaimed("k is " + std::to_string(claim.top_k));
  claim.normalize = node.integer("normalize_routing_weights", 0) == 1;
  moe.num_experts = static_cast<int32_t>(w13.experts);
  moe.hidden_size = static_cast<int32_t>(w13.k);
  moe.intermediate_size = static_cast<int32_t>(w13.n);
  moe.w13 = w13.projection;
  moe.w2 = w2.projection;
  const qm_shape packed[] = {{2, {w13.experts, w13.row.bytes / 4}}, {2, {w2.experts, w2.row.bytes / 4}}};
  if (char error[QM_ERROR_SIZE]; qm_validate("QuantMoE", &moe, packed, error)) throw Unclaimed(error);
  claim.inputs = {node.running(0, "input", true), node.running(1, "router_probs", true),
                  node.running(14, "router_weights", false)};
  claim.weights = {w13, w2};
}

const void* data_of(const GraphApi& api, const Constant& tensor, size_t bytes) {
  if (!tensor) return nullptr;
  const OrtValue* value = nullptr;
  void* data = nullptr;
  api.check(api.ValueInfo_GetInitializerValue(tensor.info, &value));
  if (!value) throw std::runtime_error("quantmoe: ONNX Runtime has no data of " + value_name(api, tensor.info));
  // Its size was read from the graph, and is checked again: a data file may be another's.
  OrtTensorTypeAndShapeInfo* info = nullptr;
  size_t count = 0;
  api.check(api.api->GetTensorTypeAndShape(value, &info));
  OrtStatus* const status = api.api->GetTensorShapeElementCount(info, &count);
  api.api->ReleaseTensorTypeAndShapeInfo(info);
  api.check(status);
  const size_t width = tensor.type == kFloat ? 4 : tensor.type == kHalf ? 2 : 1;
  if (count * width != bytes)
    throw std::runtime_error("quantmoe: " + value_name(api, tensor.info) + " has " + std::to_string(count * width) +
                             " bytes, expected " + std::to_string(bytes));
  api.check(api.api->GetTensorMutableData(const_cast<OrtValue*>(value), &data));
  return data;
}

size_t bytes_of(const Constant& tensor) {
  const size_t width = tensor.type == kFloat ? 4 : tensor.type == kHalf ? 2 : 1;
  return static_cast<size_t>(size_of(tensor.shape)) * width;
}

// Where a tensor lies in a file, which file that is, and samples of its bytes; "" where it lies in none that can be
// read.
std::string file_identity(const GraphApi& api, const Constant& tensor, const std::filesystem::path& folder) {
  OrtExternalInitializerInfo* info = nullptr;
  api.check(api.ValueInfo_GetExternalInitializerInfo(tensor.info, &info));
  if (!info) return "";
  const std::unique_ptr<OrtExternalInitializerInfo, void (*)(OrtExternalInitializerInfo*)> owned(
      info, api.ReleaseExternalInitializerInfo.call);
  const std::filesystem::path name = api.ExternalInitializerInfo_GetFilePath(info), path = folder / name;
  std::error_code no_size, no_time;
  const auto size = std::filesystem::file_size(path, no_size);
  const auto time = std::filesystem::last_write_time(path, no_time);
  if (folder.empty() || no_size || no_time) return "";
  const auto offset = api.ExternalInitializerInfo_GetFileOffset(info);
  const size_t bytes = api.ExternalInitializerInfo_GetByteSize(info);
  std::ifstream file(path, std::ios::binary);
  Blake3 samples;
  for (const size_t at : samples_of(bytes)) {
    char line[kLine];
    const size_t count = std::min(kLine, bytes - at);
    if (!file.seekg(static_cast<std::streamoff>(offset + at)).read(line, static_cast<std::streamsize>(count)))
      return "";
    samples.update(line, count);
  }
  const auto text = [](auto number) { return std::to_string(number) + " "; };
  return "file " + text(offset) + text(bytes) + text(size) +
         text(static_cast<int64_t>(time.time_since_epoch().count())) + samples.hex() + " " + name.filename().string();
}

// Those that are packed; an absent one has its place, except for scales of experts, which most matrices lack.
std::vector<const Constant*> tensors_of(const Matrix& matrix) {
  std::vector<const Constant*> found = {&matrix.codes, &matrix.scales, &matrix.zero_points, &matrix.bias};
  if (matrix.global_scales) found.push_back(&matrix.global_scales);
  return found;
}

// Rows [first, first + count) of one half of an expert: canonical codes, scales, zero points, biases.
struct Rows {
  std::vector<uint8_t> codes, scales, zero_points;
  std::vector<float> bias;
};

class Packer {
 public:
  Packer(const GraphApi& api, const Matrix& m)
      : m_(m),
        codes_(static_cast<const uint8_t*>(data_of(api, m.codes, bytes_of(m.codes)))),
        scales_(static_cast<const char*>(data_of(api, m.scales, bytes_of(m.scales)))),
        zeros_(static_cast<const uint8_t*>(data_of(api, m.zero_points, bytes_of(m.zero_points)))),
        bias_(data_of(api, m.bias, bytes_of(m.bias))),
        globals_(static_cast<const float*>(data_of(api, m.global_scales, bytes_of(m.global_scales)))) {}

  int64_t chunks() const { return ceil_div(m_.n, kRows) * m_.halves; }  // of an expert

  // Into an expert's row, whose bytes are zeros.
  void pack(int64_t expert, int64_t chunk, char* row) const {
    const int64_t half = chunk % m_.halves, first = chunk / m_.halves * kRows;
    const int64_t count = std::min<int64_t>(kRows, m_.n - first);
    const int64_t groups = m_.projection.group_size > 0 ? ceil_div(m_.k, m_.projection.group_size) : 1;
    const size_t width = m_.global_scales ? 1 : m_.projection.scale_type == k_scale_type_f32 ? 4 : 2;
    const int64_t zero_row = ceil_div(groups * m_.bits, 8);
    // without zero points the middle of the codes means 0, here and there
    const int more = zeros_ || m_.bits >= 4 ? 0 : 8 - (1 << (m_.bits - 1));
    const int64_t row_pairs = m_.n * m_.halves / 2;
    Rows rows;
    rows.codes.resize(static_cast<size_t>(count * m_.k));
    rows.scales.resize(static_cast<size_t>(count * groups) * width);
    if (zeros_) rows.zero_points.resize(static_cast<size_t>(count * groups));
    if (bias_) rows.bias.resize(static_cast<size_t>(count));
    for (int64_t i = 0; i < count; ++i) {
      const int64_t own = m_.interleaved ? (first + i) * m_.halves + half : half * m_.n + first + i;
      const int64_t stored = expert * m_.n * m_.halves + own;
      if (m_.columns) {
        const uint8_t* const from = codes_ + expert * m_.k * row_pairs + own / 2;
        for (int64_t j = 0; j < m_.k; ++j)
          rows.codes[static_cast<size_t>(i * m_.k + j)] = from[j * row_pairs] >> own % 2 * 4 & 15;
      } else {
        unpack(codes_ + stored * m_.code_row, m_.k, more, rows.codes.data() + i * m_.k);
      }
      std::memcpy(rows.scales.data() + static_cast<size_t>(i * groups) * width,
                  scales_ + static_cast<size_t>(stored * groups) * width, static_cast<size_t>(groups) * width);
      if (zeros_) unpack(zeros_ + stored * zero_row, groups, 0, rows.zero_points.data() + i * groups);
      if (bias_)
        rows.bias[static_cast<size_t>(i)] = m_.bias.type == kFloat
                                                ? static_cast<const float*>(bias_)[stored]
                                                : static_cast<float>(static_cast<const Half*>(bias_)[stored]);
    }
    PanelSource source{};
    source.format = m_.projection.format;
    source.group_size = m_.projection.group_size;
    source.scale_type = m_.projection.scale_type;
    source.n = count;
    source.k = m_.k;
    source.codes = rows.codes.data();
    source.scales = rows.scales.data();
    source.zero_points = zeros_ ? rows.zero_points.data() : nullptr;
    source.block_n = 1;
    source.global_scale = globals_ ? globals_[expert] : 1;
    source.bias = bias_ ? rows.bias.data() : nullptr;
    source.panel_step = m_.halves;
    const int64_t panel = first / m_.row.panel_rows * m_.halves + half;
    if (char error[QM_ERROR_SIZE]; pack_panels(source, row + panel * m_.row.panel_bytes, error))
      throw std::runtime_error(error);
  }

 private:
  static constexpr int64_t kRows = 256;  // a multiple of every panel's rows

  // Codes are a stream of bits, the lowest first. `more` is added to each.
  void unpack(const uint8_t* from, int64_t count, int more, uint8_t* codes) const {
    if (m_.bits == 8) {
      std::memcpy(codes, from, static_cast<size_t>(count));
      return;
    }
    if (m_.bits < 4) {
      for (int64_t i = 0, at = 0; i < count; ++i, at += m_.bits) {
        const int over = static_cast<int>(at % 8 + m_.bits - 8);  // bits in the next byte
        const int pair = from[at / 8] | (over > 0 ? from[at / 8 + 1] << 8 : 0);
        codes[i] = static_cast<uint8_t>((pair >> at % 8 & ((1 << m_.bits) - 1)) + more);
      }
      return;
    }
    for (int64_t i = 0; i + 1 < count; i += 2) {
      codes[i] = from[i / 2] & 15;
      codes[i + 1] = from[i / 2] >> 4;
    }
    if (count % 2) codes[count - 1] = from[count / 2] & 15;
  }

  const Matrix& m_;
  const uint8_t* codes_;
  const char* scales_;
  const uint8_t* zeros_;
  const void* bias_;
  const float* globals_;
};

}  // namespace

std::string value_name(const GraphApi& api, const OrtValueInfo* value) {
  const char* name = "";
  if (value) api.check(api.GetValueInfoName(value, &name));
  return name;
}

std::string node_name(const GraphApi& api, const OrtNode* node) {
  const char *name = "", *type = "";
  api.check(api.Node_GetName(node, &name));
  api.check(api.Node_GetOperatorType(node, &type));
  return *name ? name : type;
}

std::vector<const OrtValueInfo*> node_inputs(const GraphApi& api, const OrtNode* node) {
  size_t count = 0;
  api.check(api.Node_GetNumInputs(node, &count));
  std::vector<const OrtValueInfo*> inputs(count);
  api.check(api.Node_GetInputs(node, inputs.data(), count));
  return inputs;
}

bool is_candidate(const GraphApi& api, const OrtNode* node) {
  const char *domain = "", *type = "";
  api.check(api.Node_GetDomain(node, &domain));
  api.check(api.Node_GetOperatorType(node, &type));
  return !std::strcmp(domain, "com.microsoft") && (!std::strcmp(type, "QMoE") || !std::strcmp(type, "MatMulNBits"));
}

Claim read_claim(const GraphApi& api, const OrtNode* node, Activations activations) {
  const Reader reader(api, node);
  const char* type = "";
  api.check(api.Node_GetOperatorType(node, &type));
  Claim claim;
  claim.node = node_name(api, node);
  claim.type = type_of(reader);
  (std::strcmp(type, "QMoE") ? read_linear : read_moe)(reader, activations, claim);
  return claim;
}

std::string identity_of(const GraphApi& api, const Matrix& matrix, const std::filesystem::path& folder) {
  Blake3 sum;
  const auto add = [&](const std::string& text) { sum.update(text.data(), text.size()); };
  const qm_projection& projection = matrix.projection;
  add("panels 1 ");
  for (const int64_t number :
       {int64_t{projection.format}, int64_t{projection.group_size}, int64_t{projection.scale_type}, matrix.experts,
        matrix.n, matrix.k, int64_t{matrix.halves}, int64_t{matrix.interleaved}})
    add(std::to_string(number) + " ");
  if (matrix.bits < 4) add("bits " + std::to_string(matrix.bits) + " ");
  if (matrix.columns) add("columns ");
  for (const Constant* tensor : tensors_of(matrix)) {
    add("\n");
    if (!*tensor) continue;
    const std::string file = file_identity(api, *tensor, folder);
    add(file);
    if (!file.empty()) continue;
    Blake3 bytes;
    bytes.update(data_of(api, *tensor, bytes_of(*tensor)), bytes_of(*tensor));
    add("bytes " + bytes.hex());
  }
  return sum.hex();
}

std::string source_sum(const GraphApi& api, const Matrix& matrix) {
  Blake3 sum;
  for (const Constant* tensor : tensors_of(matrix))
    if (*tensor) sum.update(data_of(api, *tensor, bytes_of(*tensor)), bytes_of(*tensor));
  return sum.hex();
}

void pack_matrix(const GraphApi& api, const Matrix& matrix, const Put& put) {
  constexpr int64_t kAtOnce = 64 << 20;  // bytes
  const Packer packer(api, matrix);
  const int64_t experts = std::clamp<int64_t>(kAtOnce / matrix.row.bytes, 1, matrix.experts);
  std::vector<char> rows(static_cast<size_t>(experts * matrix.row.bytes));
  for (int64_t first = 0; first < matrix.experts; first += experts) {
    const int64_t count = std::min(experts, matrix.experts - first);
    std::fill(rows.begin(), rows.end(), '\0');
    std::atomic<bool> failed{false};  // of memory: nothing may be thrown through another thread
    parallel(cpus(), nullptr, nullptr, count * packer.chunks(), [&](int, int64_t task) {
      try {
        packer.pack(first + task / packer.chunks(), task % packer.chunks(),
                    rows.data() + task / packer.chunks() * matrix.row.bytes);
      } catch (const std::exception&) {
        failed = true;
      }
    });
    if (failed) throw std::runtime_error("quantmoe: no memory for packing weights");
    put(rows.data(), static_cast<size_t>(count * matrix.row.bytes));
  }
}

}  // namespace quantmoe
