#include "quantmoe/quant_moe.h"

#define QM_TEXT(number) QM_TEXT_OF(number)
#define QM_TEXT_OF(number) #number

const char* qm_version(void) { return "0.1.0"; }

const char* qm_compiler(void) {
#if defined(__clang__)
  return "clang " QM_TEXT(__clang_major__) "." QM_TEXT(__clang_minor__) "." QM_TEXT(__clang_patchlevel__);
#elif defined(__GNUC__)
  return "gcc " QM_TEXT(__GNUC__) "." QM_TEXT(__GNUC_MINOR__) "." QM_TEXT(__GNUC_PATCHLEVEL__);
#else
  return "an unknown compiler";
#endif
}
