// The operators' inputs and outputs in op.def as tables, for the adapters to the engines.
#pragma once
#include <cstdint>
#include <string_view>

namespace quantmoe {

enum class Type { T, I, C, float32, int32, int64 };
constexpr Type type_T = Type::T, type_I = Type::I, type_C = Type::C, type_float = Type::float32,
               type_int32 = Type::int32, type_int64 = Type::int64;
struct TensorSlot {
  const char* op;
  const char* name;
  Type type;
  bool optional;
  const char* shape;
};
constexpr TensorSlot kInputs[] = {
#define QM_INPUT(op, name, type, shape) {#op, #name, type_##type, false, shape},
#define QM_INPUT_OPTIONAL(op, name, type, shape) {#op, #name, type_##type, true, shape},
#include "op.def"
};
constexpr TensorSlot kOutputs[] = {
#define QM_OUTPUT(op, name, type, shape) {#op, #name, type_##type, false, shape},
#include "op.def"
};

// The tensors of an operator, which op.def lists together. count: every node has them. most: with the optional ones.
struct Slots {
  const TensorSlot* first;
  int32_t count, most;

  template <size_t n>
  constexpr Slots(const TensorSlot (&slots)[n], std::string_view op) : first(nullptr), count(0), most(0) {
    for (const TensorSlot& slot : slots) {
      if (op != slot.op) continue;
      if (!most++) first = &slot;
      count += !slot.optional;
    }
  }
  constexpr int32_t position(std::string_view name) const {
    int32_t at = 0;
    while (name != first[at].name) ++at;
    return at;
  }
};

// Positions of inputs and outputs, as QuantMoE_w13.
#define QM_INPUT(op, name, type, shape) constexpr int32_t op##_##name = Slots(kInputs, #op).position(#name);
#define QM_INPUT_OPTIONAL QM_INPUT
#define QM_OUTPUT(op, name, type, shape) constexpr int32_t op##_##name = Slots(kOutputs, #op).position(#name);
#include "op.def"

// A size that is the number in an input.
struct HostSize {
  std::string_view op;
  int32_t input;
  char size;
};
constexpr HostSize kHostSizes[] = {
#define QM_HOST_SIZE(op, name, size) {#op, op##_##name, #size[0]},
#include "op.def"
};

}  // namespace quantmoe
