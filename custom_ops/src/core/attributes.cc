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
  qm_attribute attribute;
  const char* kind;  // "i", "f" or an enum of op.def
  size_t offset;
};
constexpr char kind_letter(const char* kind) { return kind[1] ? 's' : kind[0]; }
#define QM_FIELD(kind, name, member) {{name, kind_letter(#kind)}, #kind, offsetof(qm_moe, member)},
constexpr Field kFields[] = {
#define QM_ATTR(op, kind, name) QM_FIELD(kind, #name, name)
#include "op.def"
#define QM_PROJECTION_ATTR(kind, name) QM_FIELD(kind, "w13_" #name, w13.name)
#include "op.def"
#define QM_PROJECTION_ATTR(kind, name) QM_FIELD(kind, "w2_" #name, w2.name)
#include "op.def"
};
constexpr size_t kFieldCount = sizeof(kFields) / sizeof(kFields[0]);

const Field* find(const char* name, char kind, char* err) {
  for (const Field& field : kFields) {
    if (std::strcmp(field.attribute.name, name) != 0) continue;
    if (field.attribute.kind == kind) return &field;
    fail(err, QM_INVALID, "attribute %s has the wrong type", name);
    return nullptr;
  }
  fail(err, QM_INVALID, "unknown attribute %s", name);
  return nullptr;
}

template <typename T>
void store(qm_moe* moe, const Field& field, T value) {
  std::memcpy(reinterpret_cast<char*>(moe) + field.offset, &value, sizeof(T));
}

}  // namespace

const char* enum_name(const char* kind, int32_t code) {
  for (const EnumValue& value : kEnumValues)
    if (value.code == code && std::strcmp(value.kind, kind) == 0) return value.name;
  return "?";
}

}  // namespace quantmoe

using namespace quantmoe;

const qm_attribute* qm_moe_attributes(size_t* count) {
  static const auto table = [] {
    struct Table {
      qm_attribute rows[kFieldCount];
    } out;
    for (size_t i = 0; i < kFieldCount; ++i) out.rows[i] = kFields[i].attribute;
    return out;
  }();
  *count = kFieldCount;
  return table.rows;
}

int qm_moe_set_int(qm_moe* moe, const char* name, int64_t value, char* err) {
  const Field* field = find(name, 'i', err);
  if (!field) return QM_INVALID;
  if (value != static_cast<int32_t>(value))
    return fail(err, QM_INVALID, "%s is %lld, outside int32", name, (long long)value);
  store(moe, *field, static_cast<int32_t>(value));
  return QM_OK;
}

int qm_moe_set_float(qm_moe* moe, const char* name, float value, char* err) {
  const Field* field = find(name, 'f', err);
  if (!field) return QM_INVALID;
  store(moe, *field, value);
  return QM_OK;
}

int qm_moe_set_string(qm_moe* moe, const char* name, const char* value, char* err) {
  const Field* field = find(name, 's', err);
  if (!field) return QM_INVALID;
  std::string known;
  for (const EnumValue& candidate : kEnumValues) {
    if (std::strcmp(candidate.kind, field->kind) != 0) continue;
    if (std::strcmp(candidate.name, value) == 0) {
      store(moe, *field, candidate.code);
      return QM_OK;
    }
    known += known.empty() ? "" : ", ";
    known += candidate.name;
  }
  return fail(err, QM_INVALID, "%s is \"%.64s\", the operator defines: %s", name, value, known.c_str());
}
