#include "common/shape_inference.h"

#include <algorithm>
#include <memory>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "common/node_attributes.h"
#include "core/shapes.h"

namespace quantmoe {
namespace {

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
  GraphSize min(const GraphSize& a, const GraphSize& b) const {
    return a.size >= 0 && b.size >= 0 ? GraphSize{std::min(a.size, b.size)} : GraphSize{};
  }
};

// The shapes of a node's outputs from its inputs' shapes, by op.def.
class Inference {
 public:
  Inference(const Op& op, OrtShapeInferContext* context) : op_(op), context_(context) {}

  void run() const {
    ShapeRules rules;
    if (!read_rules(rules)) return;
    FreeSizes<GraphSize> sizes;
    const MakeGraphSizes make;
    size_t count;
    check(op_.api->ShapeInferContext_GetInputCount(context_, &count));
    for (size_t i = 0; i < count; ++i)
      if (const std::vector<GraphSize> found = get_input(i); !found.empty()) (void)rules.match(i, found, sizes, make);
    rules.set_host_sizes(sizes, [&](size_t i) { return i < count && !op_.one_logit ? GraphSize{} : GraphSize{1}; });
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
    std::vector<int32_t> node(qm_find_operator(op_.name)->count);
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
  // The first input with a type letter decides the type.
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

}  // namespace

void infer_shapes(const Op& op, OrtShapeInferContext* context) { Inference(op, context).run(); }

}  // namespace quantmoe
