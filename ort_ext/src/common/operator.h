// An operator of op.def as an OrtCustomOp.
#pragma once
#include <vector>

#include "common/ort_api.h"
#include "core/slots.h"
#include "experts/experts.h"
#include "quantmoe/quant_moe.h"
#include "ranks/place.h"

namespace quantmoe {

// ONNX Runtime 1.21. Later runtimes hand out this API and accept its OrtCustomOp, so one binary serves them all.
constexpr uint32_t kOrtApi = 21;

class Node;

// One for each T and (QuantMoE) I or (CachedAttention) C, all of an operator's under one name.
struct Op : OrtCustomOp {
  // Makes a node. Throws for one that is not valid.
  using Make = Node* (*)(const Op& op, const OrtApi* api, const OrtKernelInfo* info);

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
  bool one_logit = false;  // sizes in host memory are 1

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
  // What a qm_tensor has as its type.
  int32_t type_of(Type type) const {
    if (type == Type::I) return other_type == ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64 ? QM_INT64 : QM_INT32;
    return float_type_of(type == Type::C ? other_type : float_type);
  }
  int id_bytes() const { return other_type == ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64 ? 8 : 4; }

 private:
  static qm_type float_type_of(ONNXTensorElementDataType type) {
    return type == ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT     ? QM_F32
           : type == ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16 ? QM_F16
                                                           : QM_BF16;
  }
};

// The types that an operator's I can have, or its C; one type, which nothing reads, where it has neither.
std::vector<ONNXTensorElementDataType> other_types(const char* op, std::vector<ONNXTensorElementDataType> caches);

}  // namespace quantmoe
