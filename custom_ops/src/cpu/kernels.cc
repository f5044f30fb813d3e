// The table of kernels and the choice among them.
#include <array>
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
constexpr size_t kCount = sizeof(kKernels) / sizeof(kKernels[0]);

// Whether this machine has what the kernel needs. It is asked once: in a virtual machine a cpuid costs microseconds,
// and every call of every operator comes here.
bool usable(size_t index) {
  static const auto found = [] {
    std::array<bool, kCount> all;
    for (size_t i = 0; i < kCount; ++i) all[i] = kKernels[i]->usable();
    return all;
  }();
  return found[index];
}
}  // namespace

const CpuKernel* select_kernel(char* err) {
  const char* forced = std::getenv("QUANTMOE_FORCE_KERNEL");
  std::string names;
  for (size_t i = 0; i < kCount; ++i) {
    if (forced && *forced) {
      names += std::string(names.empty() ? "" : ", ") + kKernels[i]->name + (usable(i) ? "" : " (not on this machine)");
      if (std::strcmp(forced, kKernels[i]->name) != 0) continue;
    }
    if (usable(i)) return kKernels[i];
  }
  fail(err, QM_UNSUPPORTED, "QUANTMOE_FORCE_KERNEL is \"%.64s\", kernels here: %s", forced ? forced : "",
       names.c_str());
  return nullptr;
}

}  // namespace quantmoe

using namespace quantmoe;

const char* qm_kernel_name(size_t index, int* runs) {
  if (index >= kCount) return nullptr;
  *runs = usable(index);
  return kKernels[index]->name;
}

const char* qm_kernel_selected(const qm_moe*, char* err) {
  const CpuKernel* kernel = select_kernel(err);
  return kernel ? kernel->name : nullptr;
}
