// Enum codes of op.def as C++ constants, and the one way to fail.
#pragma once
#include "quantmoe/quant_moe.h"

namespace quantmoe {

#define QM_VALUE(kind, name, code) constexpr int32_t k_##kind##_##name = code;
#include "op.def"
#define QM_OP(op, version) constexpr int32_t k_version_##op = version;
#include "op.def"

// Name of an enum's code in op.def, "?" for a code it does not have.
const char* enum_name(const char* kind, int32_t code);

// Writes the sentence to err (QM_ERROR_SIZE bytes) and returns status.
[[gnu::format(printf, 3, 4)]] int fail(char* err, int status, const char* format, ...);

}  // namespace quantmoe
