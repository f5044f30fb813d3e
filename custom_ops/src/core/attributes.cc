// The node attributes, expanded from op.def: names, kinds, setters and enum tables.
#include "core/attributes.h"

#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <string>

namespace quantmoe {

int fail(char* err, int status, const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(err, QM_ERROR_SIZE, format, arguments);
  va_end(arguments);
  return status;
}

namespace {

struct EnumValue {
  const char* kind;
  const char* name;
  int32_t code;
};
constexpr EnumValue kEnumValues[] = {
#define QM_VALUE(kind, name, code) {#kind, #name, code},
#include "op.def"
};

struct Field {
  const char* op;
  qm_attribute attribute;
  const char* kind;  // "i", "f" or an enum of op.def
  size_t offset;     // in the operator's struct
};
using QuantMoE = qm_moe;  // the struct of an operator, by its name in op.def
using QuantLinear = qm_linear;
using MoERouting = qm_routing;
constexpr char kind_letter(const char* kind) { return kind[1] ? 's' : kind[0]; }
#define QM_FIELD(op, kind, name, member) {#op, {name, kind_letter(#kind)}, #kind, offsetof(op, member)},
constexpr Field kFields[] = {
#define QM_ATTR(op, kind, name) QM_FIELD(op, kind, #name, name)
#include "op.def"
#define QM_PROJECTION_ATTR(kind, name) QM_FIELD(QuantMoE, kind, "w13_" #name, w13.name)
#include "op.def"
#define QM_PROJECTION_ATTR(kind, name) QM_FIELD(QuantMoE, kind, "w2_" #name, w2.name)
#include "op.def"
#define QM_PROJECTION_ATTR(kind, name) QM_FIELD(QuantLinear, kind, "w_" #name, w.name)
#include "op.def"
};

const Field* find(const char* op, const char* name, char kind, char* err) {
  for (const Field& field : kFields) {
    if (std::strcmp(field.op, op) != 0 || std::strcmp(field.attribute.name, name) != 0) continue;
    if (field.attribute.kind == kind) return &field;
    fail(err, QM_INVALID, "attribute %s has the wrong type", name);
    return nullptr;
  }
  fail(err, QM_INVALID, "unknown attribute %s", name);
  return nullptr;
}

template <typename T>
void store(void* node, const Field& field, T value) {
  std::memcpy(static_cast<char*>(node) + field.offset, &value, sizeof(T));
}

}  // namespace

const char* enum_name(const char* kind, int32_t code) {
  for (const EnumValue& value : kEnumValues)
    if (value.code == code && std::strcmp(value.kind, kind) == 0) return value.name;
  return "?";
}

}  // namespace quantmoe

using namespace quantmoe;

const qm_attribute* qm_attribute_at(const char* op, size_t index) {
  for (const Field& field : kFields)
    if (std::strcmp(field.op, op) == 0 && index-- == 0) return &field.attribute;
  return nullptr;
}

int qm_set_int(const char* op, void* node, const char* name, int64_t value, char* err) {
  const Field* field = find(op, name, 'i', err);
  if (!field) return QM_INVALID;
  if (value != static_cast<int32_t>(value))
    return fail(err, QM_INVALID, "%s is %lld, outside int32", name, (long long)value);
  store(node, *field, static_cast<int32_t>(value));
  return QM_OK;
}

int qm_set_float(const char* op, void* node, const char* name, float value, char* err) {
  const Field* field = find(op, name, 'f', err);
  if (!field) return QM_INVALID;
  store(node, *field, value);
  return QM_OK;
}

int qm_set_string(const char* op, void* node, const char* name, const char* value, char* err) {
  const Field* field = find(op, name, 's', err);
  if (!field) return QM_INVALID;
  std::string known;
  for (const EnumValue& candidate : kEnumValues) {
    if (std::strcmp(candidate.kind, field->kind) != 0) continue;
    if (std::strcmp(candidate.name, value) == 0) {
      store(node, *field, candidate.code);
      return QM_OK;
    }
    known += known.empty() ? "" : ", ";
    known += candidate.name;
  }
  return fail(err, QM_INVALID, "%s is \"%.64s\", the operator defines: %s", name, value, known.c_str());
}
