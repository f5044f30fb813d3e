// The table of kernels and the choice among them.
#include <cstdlib>
#include <cstring>
#include <string>

#include "cpu/kernel.h"

namespace quantmoe {

namespace {
const CpuKernel* const kKernels[] = {
#define QM_CPU_KERNEL(name) &name,
#include "cpu/kernels.inc"
};
}  // namespace

const CpuKernel* select_kernel(char* err) {
  const char* forced = std::getenv("QUANTMOE_FORCE_KERNEL");
  std::string names;
  for (const CpuKernel* kernel : kKernels) {
    if (forced && *forced) {
      names +=
          std::string(names.empty() ? "" : ", ") + kernel->name + (kernel->usable() ? "" : " (not on this machine)");
      if (std::strcmp(forced, kernel->name) != 0) continue;
    }
    if (kernel->usable()) return kernel;
  }
  fail(err, QM_UNSUPPORTED, "QUANTMOE_FORCE_KERNEL is \"%.64s\", kernels here: %s", forced ? forced : "",
       names.c_str());
  return nullptr;
}

}  // namespace quantmoe

using namespace quantmoe;

const char* qm_kernel_name(size_t index, int* usable) {
  if (index >= sizeof(kKernels) / sizeof(kKernels[0])) return nullptr;
  *usable = kKernels[index]->usable();
  return kKernels[index]->name;
}

const char* qm_kernel_selected(const qm_moe*, char* err) {
  const CpuKernel* kernel = select_kernel(err);
  return kernel ? kernel->name : nullptr;
}
