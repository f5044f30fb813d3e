#include "common/operator.h"

#include <algorithm>
#include <iterator>
#include <string_view>

#include "common/entries.h"
#include "common/node.h"
#include "common/shape_inference.h"

namespace quantmoe {

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
    const bool size = std::any_of(std::begin(kHostSizes), std::end(kHostSizes), [&](const HostSize& host) {
      return host.op == op.name && host.input == static_cast<int32_t>(i);
    });
    return size || (packed && op.provider && op.experts->host()) ? OrtMemTypeCPUInput : OrtMemTypeDefault;
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
    const auto& self = *static_cast<const Node*>(kernel);
    return guard(self.api(), [&] { self.run(context); });
  };
  KernelDestroy = [](void* kernel) { delete static_cast<Node*>(kernel); };
  InferOutputShapeFn = [](const OrtCustomOp* self, OrtShapeInferContext* context) {
    return guard(of(self).api, [&] { infer_shapes(of(self), context); });
  };
}

std::vector<ONNXTensorElementDataType> other_types(const char* op, std::vector<ONNXTensorElementDataType> caches) {
  const Slots inputs(kInputs, op);
  const auto has = [&](Type type) {
    return std::any_of(inputs.first, inputs.first + inputs.most, [&](const TensorSlot& s) { return s.type == type; });
  };
  if (has(Type::C)) return caches;
  if (has(Type::I)) return {ONNX_TENSOR_ELEMENT_DATA_TYPE_INT32, ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64};
  return {ONNX_TENSOR_ELEMENT_DATA_TYPE_INT32};
}

}  // namespace quantmoe
