// The table of kernels, the choice among them, and what the library says of itself.
#include <array>
#include <cstdlib>
#include <cstring>
#include <string>

#include "core/parallel.h"
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

#define QM_TEXT(number) QM_TEXT_OF(number)
#define QM_TEXT_OF(number) #number

int qm_describe(qm_library* library, char* err) {
  *library = {};
  library->version = "0.1.0";
#if defined(__clang__)
  library->compiler = "clang " QM_TEXT(__clang_major__) "." QM_TEXT(__clang_minor__) "." QM_TEXT(__clang_patchlevel__);
#elif defined(__GNUC__)
  library->compiler = "gcc " QM_TEXT(__GNUC__) "." QM_TEXT(__GNUC_MINOR__) "." QM_TEXT(__GNUC_PATCHLEVEL__);
#else
  library->compiler = "an unknown compiler";
#endif
  static_assert(kCount <= QM_MOST_KERNELS);
  for (size_t i = 0; i < kCount; ++i) {
    library->kernels[i] = kKernels[i]->name;
    library->usable[i] = usable(i);
  }
  library->cpus = cpus();
  const CpuKernel* const kernel = select_kernel(err);
  if (!kernel) return QM_UNSUPPORTED;
  library->kernel = kernel->name;
  return QM_OK;
}
