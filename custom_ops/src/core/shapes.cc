// Reads the shapes of op.def for a node: a small grammar, whose values the node's attributes make numbers.
#include "core/shapes.h"

#include <algorithm>
#include <cctype>
#include <cstring>
#include <stdexcept>

#include "core/attributes.h"

namespace quantmoe {
namespace {

struct NamedValue {
  const char* op;
  const char* name;
  const char* value;
};
constexpr NamedValue kSizes[] = {
#define QM_SIZE(op, name, value) {#op, #name, value},
#include "op.def"
};

class Reader {
 public:
  Reader(const char* op, const void* node, const char* text) : op_(op), node_(node), text_(text), at_(text) {}

  std::vector<Dimension> shape(bool& or_none) {
    if (next() != '[') {
      const bool first = number() != 0;
      expect('?');
      std::vector<Dimension> a = list();
      expect(':');
      std::vector<Dimension> b = list();
      end();
      return first ? a : b;
    }
    std::vector<Dimension> dimensions = list();
    or_none = next() != 0;
    if (or_none)
      for (const char* c = "or[0]"; *c; ++c) expect(*c);
    end();
    return dimensions;
  }
  int64_t number() {
    const Dimension value = sum();
    if (value.kind != Dimension::kNumber) fail("a number");
    return value.number;
  }
  void end() {
    if (next()) fail("its end");
  }

 private:
  [[noreturn]] void fail(const std::string& wanted) const {
    throw std::logic_error("op.def: " + std::string(op_) + ": \"" + text_ + "\" at \"" + at_ + "\": expected " +
                           wanted);
  }
  char next() {
    while (*at_ == ' ') ++at_;
    return *at_;
  }
  bool take(char c) { return next() == c && ++at_; }
  void expect(char c) {
    if (!take(c)) fail(std::string(1, c));
  }
  std::vector<Dimension> list() {
    std::vector<Dimension> dimensions;
    expect('[');
    do {
      if (next() == '.') {
        expect('.');
        expect('.');
        dimensions.push_back({Dimension::kRest});
      } else {
        dimensions.push_back(sum());
      }
    } while (take(','));
    expect(']');
    return dimensions;
  }
  Dimension sum() {
    Dimension value = product();
    for (;;) {
      const char sign = next();
      if (sign != '+' && sign != '-') return value;
      ++at_;
      const Dimension other = product();
      if (value.kind != Dimension::kNumber || other.kind != Dimension::kNumber) fail("a sum of numbers");
      value.number += sign == '+' ? other.number : -other.number;
    }
  }
  Dimension product() {
    Dimension value = atom();
    for (;;) {
      const char sign = next();
      if (sign != '*' && sign != '/') return value;
      ++at_;
      const Dimension other = atom();
      if (value.kind != Dimension::kNumber || (sign == '/' && other.kind != Dimension::kNumber))
        fail("a number before it");
      if (other.kind == Dimension::kNumber)
        value.number = sign == '*' ? value.number * other.number : value.number / std::max<int64_t>(1, other.number);
      else if (other.kind == Dimension::kFree)
        value = {Dimension::kTimes, value.number, other.name};
      else
        fail("a free size");
    }
  }
  Dimension atom() {
    if (take('(')) {
      const Dimension value = sum();
      expect(')');
      return value;
    }
    const char* begin = at_;
    while (std::isalnum(static_cast<unsigned char>(*at_)) || *at_ == '_') ++at_;
    const std::string word(begin, at_);
    if (word.empty()) fail("a value");
    if (std::isdigit(static_cast<unsigned char>(word[0]))) return {Dimension::kNumber, std::stoll(word)};
    if (word.size() == 1 && std::isupper(static_cast<unsigned char>(word[0]))) return {Dimension::kFree, 0, word[0]};
    return take('(') ? call(word) : Dimension{Dimension::kNumber, value_of(word)};
  }
  Dimension call(const std::string& function) {
    std::vector<Dimension> values;
    do values.push_back(sum());
    while (take(','));
    expect(')');
    if ((function == "max" || function == "min") && values.size() == 2 && values[0].kind == Dimension::kFree &&
        values[1].kind == Dimension::kFree)
      return {function == "max" ? Dimension::kMax : Dimension::kMin, 0, values[0].name, values[1].name};
    for (const Dimension& value : values)
      if (value.kind != Dimension::kNumber) fail("numbers");
    if (function == "where" && values.size() == 3) return values[0].number ? values[1] : values[2];
    if (function == "pick" && values[0].number >= 0 && values[0].number + 1 < static_cast<int64_t>(values.size()))
      return values[static_cast<size_t>(values[0].number) + 1];
    fail("max, min, where or pick");
  }
  int64_t value_of(const std::string& name) const {
    for (const NamedValue& size : kSizes)
      if (op_ == std::string_view(size.op) && name == size.name) return Reader(op_, node_, size.value).number();
    const qm_operator& op = *qm_find_operator(op_);
    for (size_t i = 0; i < op.count; ++i) {
      const qm_attribute& attribute = op.attributes[i];
      if (name != attribute.name || attribute.kind == 'f') continue;
      int32_t value;
      std::memcpy(&value, static_cast<const char*>(node_) + attribute.offset, sizeof value);
      return value;
    }
    fail("an attribute instead of " + name);
  }

  const char* op_;
  const void* node_;
  const char *text_, *at_;
};

std::vector<ShapeRule> read(const char* op, const void* node, const Slots& slots, const Slots* inputs) {
  std::vector<ShapeRule> rules;
  for (int32_t i = 0; i < slots.most; ++i) {
    ShapeRule rule{};
    rule.text = slots.first[i].shape;
    rule.packed = std::string_view("packed") == rule.text;
    for (int32_t j = 0; inputs && j < inputs->most; ++j)
      if (std::string_view(inputs->first[j].name) == rule.text) rule.alias = j;
    if (!rule.packed && rule.alias < 0) rule.dimensions = Reader(op, node, rule.text).shape(rule.or_none);
    rules.push_back(std::move(rule));
  }
  return rules;
}

}  // namespace

ShapeRules::ShapeRules(const char* op, const void* node) {
  const Slots inputs(kInputs, op), outputs(kOutputs, op);
  inputs_ = read(op, node, inputs, nullptr);
  outputs_ = read(op, node, outputs, &inputs);
  for (const HostSize& host : kHostSizes)
    if (host.op == op) host_sizes_.push_back(host);
}

std::string ShapeRules::expected(size_t index, const FreeSizes<int64_t>& free) const {
  const ShapeRule& rule = inputs_[index];
  const auto size_of = [&](char name) {
    const int64_t* size = free.find(name);
    return size && *size >= 0 ? std::to_string(*size) : std::string(1, name);
  };
  std::string text;
  const auto add = [&](const std::string& size) { text += (text.empty() ? "" : ", ") + size; };
  for (const Dimension& d : rule.dimensions) {
    if (d.kind == Dimension::kNumber) add(std::to_string(d.number));
    if (d.kind == Dimension::kFree) add(size_of(d.name));
    if (d.kind == Dimension::kTimes) add(std::to_string(d.number) + " * " + size_of(d.name));
    if (d.kind == Dimension::kRest && !free.rest()) add("..");
    if (d.kind == Dimension::kRest && free.rest())
      for (const int64_t size : *free.rest()) add(size < 0 ? "any" : std::to_string(size));
  }
  text = "[" + text + "]";
  if (rule.or_none) text += " or, for none, [0]";
  return text == rule.text ? text : text + ", which is " + rule.text;
}

}  // namespace quantmoe

using namespace quantmoe;

int qm_infer_shapes(const char* op, const void* node, const qm_shape* inputs, int32_t count, qm_shape* outputs,
                    char* err) try {
  if (int status = check_node(op, node, err)) return status;
  const Slots slots(kInputs, op), made(kOutputs, op);
  if (count < slots.count || count > slots.most) {
    const std::string most = slots.most > slots.count ? " to " + std::to_string(slots.most) : "";
    return fail(err, QM_INVALID, "%s has %d inputs, expected %d%s", op, count, slots.count, most.c_str());
  }
  const ShapeRules rules(op, node);
  FreeSizes<int64_t> free;
  for (int32_t i = 0; i < count; ++i) {
    if (inputs[i].rank < 0) continue;
    const std::vector<int64_t> sizes(inputs[i].sizes, inputs[i].sizes + inputs[i].rank);
    if (rules.match(static_cast<size_t>(i), sizes, free, MakeNumbers{})) continue;
    std::string found;
    for (const int64_t size : sizes) found += (found.empty() ? "" : ", ") + std::to_string(size);
    return fail(err, QM_INVALID, "%s has shape [%s], expected %s", slots.first[i].name, found.c_str(),
                rules.expected(static_cast<size_t>(i), free).c_str());
  }
  rules.set_host_sizes(
      free, [&](size_t i) { return i < static_cast<size_t>(count) && inputs[i].rank >= 0 ? int64_t{-1} : int64_t{1}; });
  for (int32_t i = 0; i < made.count; ++i) {
    const std::vector<int64_t> sizes = rules.output(static_cast<size_t>(i), free, MakeNumbers{});
    outputs[i].rank = static_cast<int32_t>(sizes.size());
    std::copy(sizes.begin(), sizes.end(), outputs[i].sizes);
  }
  return QM_OK;
} catch (const std::exception& error) {
  return fail(err, QM_INVALID, "%s", error.what());
}
