// The node attributes, expanded from op.def: names, kinds, setters and enum tables.
#include "core/attributes.h"

#include <array>
#include <cmath>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <string_view>

namespace quantmoe {

int fail(char* err, int status, const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(err, QM_ERROR_SIZE, format, arguments);
  va_end(arguments);
  return status;
}

namespace {

// A member of a struct: an attribute, or a projection, which has no kind.
struct StructMember {
  const char* op;
  const char* kind;  // "i", "f" or an enum of op.def
  const char* name;
  size_t offset;
  int32_t since = 1;
  const char* absent = nullptr;  // what a file before `since` means
};
#define QM_OP(op, name, version) using op = qm_##name;
#include "op.def"
constexpr StructMember kMembers[] = {
#define QM_ATTR(op, kind, name) {#op, #kind, #name, offsetof(op, name)},
#define QM_ATTR_SINCE(op, version, kind, name, absent) {#op, #kind, #name, offsetof(op, name), version, #absent},
#define QM_PROJECTION(op, prefix) {#op, nullptr, #prefix, offsetof(op, prefix)},
#include "op.def"
};
constexpr StructMember kProjectionMembers[] = {
#define QM_PROJECTION_ATTR(kind, name) {nullptr, #kind, #name, offsetof(qm_projection, name)},
#include "op.def"
};
struct Operator {
  const char* name;
  int32_t version;
  size_t size;
};
constexpr Operator kOperators[] = {
#define QM_OP(op, name, version) {#op, version, sizeof(qm_##name)},
#include "op.def"
};

struct Field {
  const char* op;
  const char* kind;
  const char* absent;
  qm_attribute attribute;
};
constexpr size_t fields() {
  size_t count = 0;
  for (const StructMember& m : kMembers) count += m.kind ? 1 : std::size(kProjectionMembers);
  return count;
}
constexpr Field field(const StructMember& member, const StructMember* projection) {
  Field made{member.op,
             member.kind,
             member.absent,
             {"", member.kind[1] ? 's' : member.kind[0], member.since, static_cast<int32_t>(member.offset)}};
  char* end = made.attribute.name;  // too long a name does not compile
  if (projection) {
    made.op = projection->op;
    made.attribute.offset += static_cast<int32_t>(projection->offset);
    for (const char* c = projection->name; *c; ++c) *end++ = *c;
    *end++ = '_';
  }
  for (const char* c = member.name; *c; ++c) *end++ = *c;
  *end = 0;
  return made;
}
constexpr auto kFields = [] {
  std::array<Field, fields()> all{};
  size_t count = 0;
  for (const StructMember& m : kMembers) {
    if (m.kind) all[count++] = field(m, nullptr);
    for (const StructMember& p : kProjectionMembers)
      if (!m.kind) all[count++] = field(p, &m);
  }
  return all;
}();
// Every member is of 4 bytes, without gaps, op_version first.
constexpr bool packed() {
  for (const Operator& op : kOperators) {
    size_t end = 0;
    for (const Field& field : kFields) {
      if (std::string_view(field.op) != op.name) continue;
      if ((end == 0) != (std::string_view(field.attribute.name) == "op_version")) return false;
      if (field.attribute.offset != static_cast<int32_t>(end)) return false;
      end += 4;
    }
    if (end != op.size) return false;
  }
  return true;
}
static_assert(packed());

const Operator* find_operator(std::string_view name) {
  for (const Operator& op : kOperators)
    if (name == op.name) return &op;
  return nullptr;
}

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
  std::memcpy(static_cast<char*>(node) + field.attribute.offset, &value, sizeof(T));
}

std::string names(const char* kind) {
  return enum_names(kind, [](int32_t) { return true; });
}

int check_version(const char* op, int64_t version, char* err) {
  const Operator* known = find_operator(op);
  if (!known) return fail(err, QM_INVALID, "unknown operator %s", op);
  if (version >= 1 && version <= known->version) return QM_OK;
  return fail(err, QM_UNSUPPORTED, "op_version is %lld, this library knows %s%d", (long long)version,
              known->version > 1 ? "1 to " : "", known->version);
}

}  // namespace

int check_node(const char* op, const void* node, char* err) {
  for (const Field& field : kFields) {
    if (std::strcmp(field.op, op) != 0) continue;
    const qm_attribute& attribute = field.attribute;
    int32_t value;
    std::memcpy(&value, static_cast<const char*>(node) + attribute.offset, sizeof(value));
    if (attribute.offset == 0)
      if (int status = check_version(op, value, err)) return status;
    if (attribute.kind == 's' && *enum_name(field.kind, value) == '?')
      return fail(err, QM_INVALID, "%s is %d, no code of the operator's: %s", attribute.name, value,
                  names(field.kind).c_str());
  }
  return QM_OK;
}

int check_range(const char* name, int32_t value, int32_t low, int32_t high, char* err) {
  if (value >= low && value <= high) return QM_OK;
  return fail(err, QM_INVALID, "%s is %d, expected %d to %d", name, value, low, high);
}

int check_not_negative(const char* name, float value, char* err) {
  if (value >= 0.0f && std::isfinite(value)) return QM_OK;
  return fail(err, QM_INVALID, "%s is %g, expected 0 or a positive number", name, value);
}

int check_finite(const char* name, float value, char* err) {
  return std::isfinite(value) ? QM_OK : fail(err, QM_INVALID, "%s is %g, expected a number", name, value);
}

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

size_t qm_node_size(const char* op) {
  const Operator* found = find_operator(op);
  return found ? found->size : 0;
}

int qm_set_version(const char* op, void* node, int64_t op_version, char* err) {
  if (int status = check_version(op, op_version, err)) return status;
  for (const Field& field : kFields) {
    const qm_attribute& attribute = field.attribute;
    if (std::strcmp(field.op, op) != 0 || attribute.since <= op_version) continue;
    const int status = attribute.kind == 's' ? qm_set_string(op, node, attribute.name, field.absent, err)
                       : attribute.kind == 'f'
                           ? qm_set_float(op, node, attribute.name, std::strtof(field.absent, nullptr), err)
                           : qm_set_int(op, node, attribute.name, std::strtoll(field.absent, nullptr, 10), err);
    if (status) return status;
  }
  return qm_set_int(op, node, "op_version", op_version, err);
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
  for (const EnumValue& candidate : kEnumValues) {
    if (std::strcmp(candidate.kind, field->kind) != 0 || std::strcmp(candidate.name, value) != 0) continue;
    store(node, *field, candidate.code);
    return QM_OK;
  }
  return fail(err, QM_INVALID, "%s is \"%.64s\", the operator defines: %s", name, value, names(field->kind).c_str());
}
