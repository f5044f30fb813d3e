// The operators that run by their names.
#include "cpu/operators.h"

#include <string>
#include <string_view>

#include "cpu/kernel.h"

using namespace quantmoe;

namespace {

constexpr struct {
  const char* op;
  const CpuOperator* functions;
} kOperators[] = {
#define QM_CPU(op, name) {#op, &cpu_##name},
#include "op.def"
};

const CpuOperator* find(std::string_view op) {
  for (const auto& known : kOperators)
    if (op == known.op) return known.functions;
  return nullptr;
}

int refuse(const char* op, char* err) {
  std::string names;
  for (const auto& known : kOperators) names += (names.empty() ? "" : ", ") + std::string(known.op);
  return fail(err, QM_UNSUPPORTED, "%.64s does not run by its name, expected one of: %s", op, names.c_str());
}

}  // namespace

int qm_validate(const char* op, const void* node, const qm_shape* packed, char* err) {
  const CpuOperator* found = find(op);
  if (!found) return refuse(op, err);
  QM_TRY(found->check(node, err));
  if (packed && found->check_packed) QM_TRY(found->check_packed(node, packed, err));
  return select_kernel(err) ? QM_OK : QM_UNSUPPORTED;
}

size_t qm_workspace(const char* op, const void* node, const qm_call* call) {
  const CpuOperator* found = find(op);
  return found ? found->workspace(node, *call) : 0;
}

int qm_run(const char* op, const void* node, const qm_call* call, char* err) {
  const CpuOperator* found = find(op);
  return found ? found->run(node, *call, err) : refuse(op, err);
}
