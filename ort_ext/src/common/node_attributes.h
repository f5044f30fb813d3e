// One loop reads a node's attributes, of whatever ONNX Runtime hands out.
#pragma once
#include <string>
#include <vector>

#include "core/attributes.h"

namespace quantmoe {

// Sets an operator's struct to a node's attributes, as read has them: .integer(a), .number(a), .text(a) of a
// qm_attribute, which throw where the node lacks it. Returns 0, or a qm_status with the sentence in error.
template <class Read>
int set_attributes(const char* op, void* node, const Read& read, char* error) {
  const qm_operator& known = *qm_find_operator(op);
  std::vector<qm_value> values;
  std::vector<std::string> texts(known.count);
  for (size_t i = 0; i < known.count; ++i) {
    const qm_attribute& attribute = known.attributes[i];
    if (i > 0 && attribute.since > values[0].integer) continue;  // than op_version, the first
    qm_value value{attribute.name, attribute.kind, 0, 0, nullptr};
    if (attribute.kind == 'i') value.integer = read.integer(attribute);
    if (attribute.kind == 'f') value.number = read.number(attribute);
    if (attribute.kind == 's') value.text = (texts[i] = read.text(attribute)).c_str();
    values.push_back(value);
  }
  return qm_set_attributes(op, node, values.data(), values.size(), error);
}

}  // namespace quantmoe
