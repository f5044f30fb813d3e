// An operator's tensors of a call by their names in op.def.
#pragma once
#include <algorithm>

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

inline int64_t last_of(const qm_shape& shape) { return shape.rank > 0 ? shape.sizes[shape.rank - 1] : 1; }

// CachedAttention's slots before a call and after it. With a block_size these are the slots of a request's blocks.
struct AttentionSlots {
  int64_t past, all;
  AttentionSlots(const qm_attention& node, const qm_tensor* inputs) {
    const auto size = [&](int32_t input, int i) { return inputs[input].shape.sizes[i]; };
    past = node.block_size ? size(CachedAttention_block_table, 1) * node.block_size : size(CachedAttention_past_key, 2);
    all = node.block_size ? past : std::max(past, size(CachedAttention_attention_mask, 1));
  }
};

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
