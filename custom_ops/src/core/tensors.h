// An operator's tensors of a call by their names in op.def.
#pragma once
#include "core/slots.h"
#include "quantmoe/quant_moe.h"

namespace quantmoe {

// The C++ type of a tensor's elements; void where the call decides the type.
template <Type type>
struct ElementOf {
  using Element = void;
};
template <>
struct ElementOf<Type::float32> {
  using Element = float;
};
template <>
struct ElementOf<Type::int32> {
  using Element = int32_t;
};
template <>
struct ElementOf<Type::int64> {
  using Element = int64_t;
};
template <Type type>
using Element = typename ElementOf<type>::Element;

// TensorsOf<qm_conv>{call.inputs, call.outputs}.past_conv
template <class Node>
struct TensorsOf;
#define QM_OP(op, name, version) \
  template <>                    \
  struct TensorsOf<qm_##name> {  \
    const qm_tensor* of_inputs;  \
    const qm_tensor* of_outputs;
#define QM_INPUT(op, name, type, shape) \
  const Element<type_##type>* name = static_cast<const Element<type_##type>*>(of_inputs[op##_##name].data);
#define QM_INPUT_OPTIONAL QM_INPUT
#define QM_OUTPUT(op, name, type, shape) \
  Element<type_##type>* name = static_cast<Element<type_##type>*>(of_outputs[op##_##name].data);
#define QM_END(op, name) \
  }                      \
  ;
#include "op.def"

// The product of all sizes except the last.
inline int64_t rows_of(const qm_shape& shape) {
  int64_t rows = 1;
  for (int32_t i = 0; i + 1 < shape.rank; ++i) rows *= shape.sizes[i];
  return rows;
}

// A call of an operator whose first input is [B, S, ..].
template <class Node>
struct SequenceCall : TensorsOf<Node> {
  SequenceCall(const qm_tensor* inputs, const qm_tensor* outputs)
      : TensorsOf<Node>{inputs, outputs},
        type(static_cast<qm_type>(inputs->type)),
        batch(inputs->shape.sizes[0]),
        tokens(inputs->shape.sizes[1]) {}
  qm_type type;  // T
  int64_t batch, tokens;
};

}  // namespace quantmoe
