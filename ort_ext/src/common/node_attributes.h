// One loop reads a node's attributes, of whatever ONNX Runtime hands out.
#pragma once
#include "core/attributes.h"

namespace quantmoe {

// Sets an operator's struct to a node's attributes, as read has them: .integer(a), .number(a), .text(a) of a
// qm_attribute, which throw where the node lacks it. Returns 0, or a qm_status with the sentence in error.
template <class Read>
int set_attributes(const char* op, void* node, const Read& read, char* error) {
  int64_t version = 0;  // op_version, the first attribute
  for (size_t i = 0; const qm_attribute* attribute = qm_attribute_at(op, i); ++i) {
    if (i > 0 && attribute->since > version) continue;
    int status;
    if (i == 0) {
      version = read.integer(*attribute);
      status = qm_set_version(op, node, version, error);
    } else if (attribute->kind == 'i') {
      status = qm_set_int(op, node, attribute->name, read.integer(*attribute), error);
    } else if (attribute->kind == 'f') {
      status = qm_set_float(op, node, attribute->name, read.number(*attribute), error);
    } else {
      status = qm_set_string(op, node, attribute->name, read.text(*attribute).c_str(), error);
    }
    if (status) return status;
  }
  return QM_OK;
}

}  // namespace quantmoe
