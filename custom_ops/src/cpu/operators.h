// What qm_validate, qm_workspace and qm_run call: a CpuOperator for each QM_CPU line of op.def.
#pragma once
#include "core/tensors.h"

namespace quantmoe {

struct CpuOperator {
  int (*check)(const void* node, char* err);  // of the attributes
  size_t (*workspace)(const void* node, const qm_call& call);
  int (*run)(const void* node, const qm_call& call, char* err);
  int (*check_packed)(const void* node, const qm_shape* packed, char* err) = nullptr;  // of operators that have them
};
#define QM_CPU(op, name) extern const CpuOperator cpu_##name;
#include "op.def"

// Of functions that take the operator's struct.
template <class Node, int (*kCheck)(const Node&, char*), size_t (*kWorkspace)(const Node&, const qm_call&),
          int (*kRun)(const Node&, const qm_call&, char*)>
constexpr CpuOperator kCpuOperator = {
    [](const void* node, char* err) { return kCheck(*static_cast<const Node*>(node), err); },
    [](const void* node, const qm_call& call) { return kWorkspace(*static_cast<const Node*>(node), call); },
    [](const void* node, const qm_call& call, char* err) { return kRun(*static_cast<const Node*>(node), call, err); }};

template <class Node, int (*kCheckPacked)(const Node&, const qm_shape*, char*)>
constexpr CpuOperator with_packed(CpuOperator op) {
  op.check_packed = [](const void* node, const qm_shape* packed, char* err) {
    return kCheckPacked(*static_cast<const Node*>(node), packed, err);
  };
  return op;
}
// Of packed weights (validate.cc).
int check_moe(const qm_moe& moe, char* err);
int check_linear(const qm_linear& linear, char* err);
int check_packed(const qm_moe& moe, const qm_shape* packed, char* err);
int check_packed(const qm_linear& linear, const qm_shape* packed, char* err);

}  // namespace quantmoe
