// libFuzzer target: the execution provider's claim (provider/claim.h). The input makes a node of QMoE or MatMulNBits,
// mostly one that the provider takes, whose attributes, shapes and initializers may lie. A table of functions stands
// for ONNX Runtime. Checked:
//   - a node is left with a reason, or its weights have an identity and pack into exactly their bytes
//   - nothing is read outside an initializer's bytes (AddressSanitizer), also where it is shorter than its shape says
//   - a data file that cannot be read, or is shorter, is the weights' bytes or an error
#include "provider/claim.h"

#include <map>
#include <memory>

#include "fuzz.h"

using namespace quantmoe;

struct OrtStatus {
  std::string text;
};
struct OrtOpAttr {
  OrtOpAttrType type;
  int64_t integer = 0;
  float number = 0;
  std::string text;
};
struct OrtValueInfo {
  std::string name;
  ONNXTensorElementDataType type = ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT8;
  Shape shape;
  bool constant = true, external = false;
  int64_t offset = 0;
  std::vector<uint8_t> bytes;  // of an initializer; elements of the value, whatever the shape says
};
struct OrtNode {
  std::string type;
  std::vector<std::unique_ptr<OrtValueInfo>> inputs;
  std::map<std::string, OrtOpAttr> attributes;
};

namespace {

const std::filesystem::path kPath = own_file("claim");
const std::string kFile = kPath.filename();

template <class Opaque>
const OrtValueInfo& info_of(const Opaque* opaque) {
  return *reinterpret_cast<const OrtValueInfo*>(opaque);
}
size_t width_of(ONNXTensorElementDataType type) {
  return type == ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT ? 4 : type == ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16 ? 2 : 1;
}

// ONNX Runtime's functions by their places, as provider_api.h has them.
class Api {
 public:
  Api() {
    OrtApi& api = *reinterpret_cast<OrtApi*>(table_);
    api.GetErrorMessage = [](const OrtStatus* status) noexcept { return status->text.c_str(); };
    api.ReleaseStatus = [](OrtStatus* status) noexcept { delete status; };
    api.CastTypeInfoToTensorInfo = [](const OrtTypeInfo* info, const OrtTensorTypeAndShapeInfo** out) noexcept {
      *out = info_of(info).type == ONNX_TENSOR_ELEMENT_DATA_TYPE_UNDEFINED
                 ? nullptr
                 : reinterpret_cast<const OrtTensorTypeAndShapeInfo*>(info);
      return static_cast<OrtStatus*>(nullptr);
    };
    set_tensor_functions<OrtValueInfo>(api);
    api.GetTensorShapeElementCount = [](const OrtTensorTypeAndShapeInfo* info, size_t* out) noexcept {
      *out = info_of(info).bytes.size() / width_of(info_of(info).type);
      return static_cast<OrtStatus*>(nullptr);
    };
    api.ReadOpAttr = [](const OrtOpAttr* attribute, OrtOpAttrType type, void* out, size_t room, size_t* size) noexcept {
      if (attribute->type != type) return new OrtStatus{"the attribute has another type"};
      const std::string& text = attribute->text;
      const void* const from = type == ORT_OP_ATTR_INT     ? static_cast<const void*>(&attribute->integer)
                               : type == ORT_OP_ATTR_FLOAT ? static_cast<const void*>(&attribute->number)
                                                           : text.data();
      *size = type == ORT_OP_ATTR_INT ? 8 : type == ORT_OP_ATTR_FLOAT ? 4 : text.size();
      if (room < *size) return new OrtStatus{"no room for the attribute"};
      std::memcpy(out, from, *size);
      return static_cast<OrtStatus*>(nullptr);
    };
    put(
        289, +[](const OrtValueInfo* value, const char** out) {
          *out = value->name.c_str();
          return static_cast<OrtStatus*>(nullptr);
        });
    put(
        290, +[](const OrtValueInfo* value, const OrtTypeInfo** out) {
          *out = reinterpret_cast<const OrtTypeInfo*>(value);
          return static_cast<OrtStatus*>(nullptr);
        });
    put(
        326, +[](const OrtValueInfo* value, const OrtValue** out) {
          *out = reinterpret_cast<const OrtValue*>(value);
          return static_cast<OrtStatus*>(nullptr);
        });
    put(
        327, +[](const OrtValueInfo* value, OrtExternalInitializerInfo** out) {
          *out = value->external ? reinterpret_cast<OrtExternalInitializerInfo*>(const_cast<OrtValueInfo*>(value))
                                 : nullptr;
          return static_cast<OrtStatus*>(nullptr);
        });
    put(
        331, +[](const OrtValueInfo* value, bool* out) {
          *out = value->constant;
          return static_cast<OrtStatus*>(nullptr);
        });
    put(
        349, +[](const OrtNode*, const char** out) {
          *out = "";
          return static_cast<OrtStatus*>(nullptr);
        });
    put(
        350, +[](const OrtNode* node, const char** out) {
          *out = node->type.c_str();
          return static_cast<OrtStatus*>(nullptr);
        });
    put(
        353, +[](const OrtNode* node, size_t* out) {
          *out = node->inputs.size();
          return static_cast<OrtStatus*>(nullptr);
        });
    put(
        354, +[](const OrtNode* node, const OrtValueInfo** out, size_t count) {
          for (size_t i = 0; i < count; ++i) out[i] = node->inputs[i].get();
          return static_cast<OrtStatus*>(nullptr);
        });
    put(
        361, +[](const OrtNode* node, const char* name, const OrtOpAttr** out) {
          const auto found = node->attributes.find(name);
          *out = found == node->attributes.end() ? nullptr : &found->second;
          return found == node->attributes.end() ? new OrtStatus{"there is no such attribute"} : nullptr;
        });
    put(369, +[](OrtExternalInitializerInfo*) {});
    put(370, +[](const OrtExternalInitializerInfo*) { return kFile.c_str(); });
    put(371, +[](const OrtExternalInitializerInfo* info) { return info_of(info).offset; });
    put(372, +[](const OrtExternalInitializerInfo* info) { return info_of(info).bytes.size(); });
  }
  const OrtApi* get() const { return reinterpret_cast<const OrtApi*>(table_); }

 private:
  template <class Function>
  void put(size_t place, Function* function) {
    std::memcpy(&table_[place], &function, sizeof function);
  }
  alignas(OrtApi) void* table_[512] = {};
};

class Maker {
 public:
  Maker(FuzzedDataProvider& data) : data_(data), rng_(data.ConsumeIntegral<uint32_t>()) {}

  std::unique_ptr<OrtNode> linear() {
    const int64_t bits = data_.PickValueInArray({2, 4, 8}), group = 16 << data_.ConsumeIntegralInRange(0, 3);
    const int64_t n = size(), k = size(), blocks = (k + group - 1) / group;
    set("bits", bits);
    set("block_size", group);
    set("N", n);
    set("K", k);
    set("accuracy_level", data_.ConsumeIntegralInRange(0, 4));
    running("A");
    weight("B", ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT8, {n, blocks, group * bits / 8});
    weight("scales", type_, {n, blocks});
    weight("zeros", ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT8, {n, (blocks * bits + 7) / 8}, true);
    absent();
    weight("bias", type_, {n}, true);
    node_->type = "MatMulNBits";
    return finish();
  }

  std::unique_ptr<OrtNode> experts() {
    const int64_t bits = data_.PickValueInArray({2, 3, 4, 8});
    const int64_t group = data_.ConsumeBool() ? -1 : 32, experts = 1 + size() % 4;
    const int64_t hidden = 32 * (1 + size() % 3), inner = 32 * (1 + size() % 3);
    const bool gated = data_.ConsumeBool(), zeros = group > 0 && data_.ConsumeBool();
    set("expert_weight_bits", bits);
    if (group > 0) set("block_size", group);
    set("k", data_.ConsumeIntegralInRange<int64_t>(1, experts));
    set("swiglu_fusion", data_.ConsumeIntegralInRange(1, 2));
    set("normalize_routing_weights", data_.ConsumeBool());
    set("activation_type", gated ? "swiglu" : data_.ConsumeBool() ? "silu" : "gelu");
    running("x");
    running("probs");
    const auto projection = [&](int64_t rows, int64_t k) {
      weight("codes", ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT8, {experts, rows, k * bits / 8});
      weight("scales", type_, group > 0 ? Shape{experts, rows, k / group} : Shape{experts, rows});
      weight("bias", type_, {experts, rows}, true);
    };
    const auto zero_points = [&](int64_t rows, int64_t k) {
      if (zeros && k > group)
        weight("zeros", ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT8, {experts, rows, (k / group * bits + 7) / 8});
      else
        absent();
    };
    projection(inner * (1 + gated), hidden);
    projection(hidden, inner);
    for (int i = 0; i < 3; ++i) absent();
    zero_points(inner * (1 + gated), hidden);
    zero_points(hidden, inner);
    absent();
    if (data_.ConsumeBool()) running("factors");
    node_->type = "QMoE";
    return finish();
  }

 private:
  int64_t size() { return data_.ConsumeIntegralInRange<int64_t>(1, data_.ConsumeIntegralInRange(0, 7) ? 40 : 300); }
  void set(const std::string& name, int64_t value) { node_->attributes[name] = {ORT_OP_ATTR_INT, value, 0, ""}; }
  void set(const std::string& name, const char* text) { node_->attributes[name] = {ORT_OP_ATTR_STRING, 0, 0, text}; }
  OrtValueInfo& add(const char* name) {
    node_->inputs.push_back(std::make_unique<OrtValueInfo>());
    node_->inputs.back()->name = name;
    return *node_->inputs.back();
  }
  void absent() { add(""); }
  void running(const char* name) {
    OrtValueInfo& value = add(name);
    value.type = type_;
    value.shape = {-1, 64};
    value.constant = false;
  }
  void weight(const char* name, ONNXTensorElementDataType type, const Shape& shape, bool optional = false) {
    if (optional && data_.ConsumeBool()) return absent();
    OrtValueInfo& value = add(name);
    value.type = type;
    value.shape = shape;
    size_t bytes = width_of(type);
    for (const int64_t dim : shape) bytes *= static_cast<size_t>(dim);
    value.bytes.resize(bytes);
    random_bytes(rng_, value.bytes.data(), bytes);
    value.external = data_.ConsumeIntegralInRange(0, 3) == 0;
    value.offset = data_.ConsumeIntegralInRange<int64_t>(0, 4096);
  }

  // Lies: up to three.
  std::unique_ptr<OrtNode> finish() {
    for (int n = data_.ConsumeIntegralInRange(-2, 3); n > 0; --n) {
      OrtValueInfo& value = *node_->inputs[data_.ConsumeIntegralInRange<size_t>(0, node_->inputs.size() - 1)];
      auto attribute = node_->attributes.begin();
      std::advance(attribute, data_.ConsumeIntegralInRange<size_t>(0, node_->attributes.size() - 1));
      static const char* const kOthers[] = {"weight_prepacked", "weights_prepacked",     "use_sparse_mixer",
                                            "swiglu_limit",     "activation_beta",       "activation_alpha",
                                            "quant_type",       "fc2_expert_weight_bits"};
      switch (data_.ConsumeIntegralInRange(0, 8)) {
        case 0:
          attribute->second = {data_.ConsumeBool() ? ORT_OP_ATTR_INT : ORT_OP_ATTR_FLOAT, number(), 1.5f, ""};
          break;
        case 1:
          attribute->second = {ORT_OP_ATTR_STRING, 0, 0, data_.ConsumeRandomLengthString(80)};
          break;
        case 2:
          node_->attributes[data_.PickValueInArray(kOthers)] = {
              data_.ConsumeBool() ? ORT_OP_ATTR_INT : ORT_OP_ATTR_FLOAT, number(), data_.ConsumeFloatingPoint<float>(),
              "int"};
          break;
        case 3:
          if (!value.shape.empty())
            value.shape[data_.ConsumeIntegralInRange<size_t>(0, value.shape.size() - 1)] = number();
          break;
        case 4:
          value.shape.resize(data_.ConsumeIntegralInRange<size_t>(0, 4), number());
          break;
        case 5:
          value.bytes.resize(data_.ConsumeIntegralInRange<size_t>(0, value.bytes.size() + 9));
          value.bytes.shrink_to_fit();
          break;
        case 6:
          value.type = static_cast<ONNXTensorElementDataType>(data_.ConsumeIntegralInRange(0, 16));
          break;
        case 7:
          value.constant = !value.constant;
          break;
        default:
          node_->inputs.resize(data_.ConsumeIntegralInRange<size_t>(1, node_->inputs.size()));
      }
    }
    return std::move(node_);
  }
  int64_t number() {
    switch (data_.ConsumeIntegralInRange(0, 2)) {
      case 0:
        return data_.ConsumeIntegral<int64_t>();
      case 1:
        return data_.ConsumeIntegralInRange<int64_t>(-2, 300);
      default:
        return int64_t{1} << data_.ConsumeIntegralInRange(0, 62);
    }
  }

  FuzzedDataProvider& data_;
  Rng rng_;
  const ONNXTensorElementDataType type_ =
      data_.ConsumeBool() ? ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT : ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16;
  std::unique_ptr<OrtNode> node_ = std::make_unique<OrtNode>();
};

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* bytes, size_t size) {
  static const Api table;
  static const bool written = (write_file(kPath, std::string(20000, 'w')), true);  // most initializers end within it
  if (!written) return 0;
  FuzzedDataProvider data(bytes, size);
  const GraphApi api(table.get());
  Maker maker(data);
  const auto node = data.ConsumeBool() ? maker.linear() : maker.experts();
  try {
    const Claim claim = read_claim(api, node.get(), static_cast<Activations>(data.ConsumeIntegralInRange(0, 2)));
    CHECK(claim.weights.size() == (claim.moe ? 2 : 1), "%zu weights", claim.weights.size());
    const bool packs = data.ConsumeIntegralInRange(0, 3) == 0;
    for (const Matrix& matrix : claim.weights) {
      const std::string identity =
          identity_of(api, matrix, data.ConsumeBool() ? kPath.parent_path() : std::filesystem::path());
      CHECK(identity.size() == 64, "an identity of %zu digits", identity.size());
      CHECK(source_sum(api, matrix).size() == 64, "a sum of other digits");
      if (!packs) continue;
      CHECK(matrix.bytes() <= size_t{1} << 30, "%zu bytes of weights that are smaller", matrix.bytes());
      size_t packed = 0;
      pack_matrix(api, matrix, [&](const void* piece, size_t count) {
        packed += count;
        static volatile char last;  // reads it
        if (count) last = static_cast<const char*>(piece)[count - 1];
      });
      CHECK(packed == matrix.bytes(), "%zu bytes, expected %zu", packed, matrix.bytes());
    }
  } catch (const std::runtime_error& why) {  // Unclaimed, too
    CHECK(why.what()[0], "a node is left without a reason");
  }
  return 0;
}
