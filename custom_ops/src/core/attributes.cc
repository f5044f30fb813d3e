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
// What the C interface shows of them.
constexpr auto kAttributes = [] {
  std::array<qm_attribute, fields()> all{};
  for (size_t i = 0; i < all.size(); ++i) all[i] = kFields[i].attribute;
  return all;
}();
struct Operator {
  qm_operator shown;
  int32_t version;
  const Field* fields;
};
constexpr Operator find_fields(const char* name, int32_t version, size_t size) {
  size_t first = 0, count = 0;
  while (std::string_view(kFields[first].op) != name) ++first;
  while (first + count < kFields.size() && std::string_view(kFields[first + count].op) == name) ++count;
  return {{name, size, count, kAttributes.data() + first}, version, kFields.data() + first};
}
constexpr Operator kOperators[] = {
#define QM_OP(op, name, version) find_fields(#op, version, sizeof(qm_##name)),
#include "op.def"
};
// Every member is of 4 bytes, without gaps, op_version first.
constexpr bool packed() {
  size_t all = 0;
  for (const Operator& op : kOperators) {
    all += op.shown.count;
    if (op.shown.bytes != 4 * op.shown.count || std::string_view(op.shown.attributes->name) != "op_version")
      return false;
    for (size_t i = 0; i < op.shown.count; ++i)
      if (op.shown.attributes[i].offset != static_cast<int32_t>(4 * i)) return false;
  }
  return all == kFields.size();
}
static_assert(packed());

const Operator* find_operator(std::string_view name) {
  for (const Operator& op : kOperators)
    if (name == op.shown.name) return &op;
  return nullptr;
}

template <typename T>
void store(void* node, const Field& field, T value) {
  std::memcpy(static_cast<char*>(node) + field.attribute.offset, &value, sizeof(T));
}

std::string names(const char* kind) {
  return enum_names(kind, [](int32_t) { return true; });
}

int check_version(const Operator& op, int64_t version, char* err) {
  if (version >= 1 && version <= op.version) return QM_OK;
  return fail(err, QM_UNSUPPORTED, "op_version is %lld, this library knows %s%d", (long long)version,
              op.version > 1 ? "1 to " : "", op.version);
}

int set_name(void* node, const Field& field, const char* name, char* err) {
  for (const EnumValue& candidate : kEnumValues) {
    if (std::strcmp(candidate.kind, field.kind) != 0 || std::strcmp(candidate.name, name) != 0) continue;
    store(node, field, candidate.code);
    return QM_OK;
  }
  return fail(err, QM_INVALID, "%s is \"%.64s\", the operator defines: %s", field.attribute.name, name,
              names(field.kind).c_str());
}

int set_absent(void* node, const Field& field, char* err) {
  if (field.attribute.kind == 's') return set_name(node, field, field.absent, err);
  if (field.attribute.kind == 'f')
    store(node, field, std::strtof(field.absent, nullptr));
  else
    store(node, field, static_cast<int32_t>(std::strtoll(field.absent, nullptr, 10)));
  return QM_OK;
}

int set(const Operator& op, void* node, const qm_value& value, char* err) {
  for (const Field* field = op.fields; field < op.fields + op.shown.count; ++field) {
    if (std::strcmp(field->attribute.name, value.name) != 0) continue;
    if (field->attribute.kind != value.kind)
      return fail(err, QM_INVALID, "attribute %s has the wrong type", value.name);
    if (value.kind == 's') return set_name(node, *field, value.text, err);
    if (value.kind == 'i' && value.integer != static_cast<int32_t>(value.integer))
      return fail(err, QM_INVALID, "%s is %lld, outside int32", value.name, (long long)value.integer);
    value.kind == 'f' ? store(node, *field, value.number) : store(node, *field, static_cast<int32_t>(value.integer));
    return QM_OK;
  }
  return fail(err, QM_INVALID, "unknown attribute %s", value.name);
}

}  // namespace

int check_node(const char* op, const void* node, char* err) {
  const Operator* const known = find_operator(op);
  if (!known) return fail(err, QM_INVALID, "unknown operator %s", op);
  for (const Field* field = known->fields; field < known->fields + known->shown.count; ++field) {
    const qm_attribute& attribute = field->attribute;
    int32_t value;
    std::memcpy(&value, static_cast<const char*>(node) + attribute.offset, sizeof(value));
    if (attribute.offset == 0) QM_TRY(check_version(*known, value, err));
    if (attribute.kind == 's' && *enum_name(field->kind, value) == '?')
      return fail(err, QM_INVALID, "%s is %d, no code of the operator's: %s", attribute.name, value,
                  names(field->kind).c_str());
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

int check_positive(const char* name, float value, char* err) {
  if (value > 0.0f && std::isfinite(value)) return QM_OK;
  return fail(err, QM_INVALID, "%s is %g, expected a positive number", name, value);
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

const qm_operator* qm_find_operator(const char* op) {
  const Operator* const known = find_operator(op);
  return known ? &known->shown : nullptr;
}

int qm_set_attributes(const char* op, void* node, const qm_value* values, size_t count, char* err) {
  const Operator* const known = find_operator(op);
  if (!known) return fail(err, QM_INVALID, "unknown operator %s", op);
  for (const qm_value* value = values; value < values + count; ++value) {
    if (value->kind != 'i' || std::strcmp(value->name, "op_version") != 0) continue;
    QM_TRY(check_version(*known, value->integer, err));
    for (const Field* field = known->fields; field < known->fields + known->shown.count; ++field)
      if (field->attribute.since > value->integer) QM_TRY(set_absent(node, *field, err));
  }
  for (const qm_value* value = values; value < values + count; ++value) QM_TRY(set(*known, node, *value, err));
  return QM_OK;
}
