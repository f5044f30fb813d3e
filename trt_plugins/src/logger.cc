#include "logger.h"

#include <dlfcn.h>

namespace quantmoe {

PlainLoggerFinder* plain_finder = nullptr;
VersionedLoggerFinder* versioned_finder = nullptr;
PlainLogger* (*plain_logger)() = nullptr;
VersionedLogger* (*versioned_logger)() = nullptr;

int32_t library_version(const void* object) {
  Dl_info where;
  if (!dladdr(table_of(object), &where) || !where.dli_fname) return 0;
  void* library = dlopen(where.dli_fname, RTLD_LAZY | RTLD_NOLOAD);
  if (!library) return 0;
  auto* version = reinterpret_cast<int32_t (*)()>(dlsym(library, "getInferLibVersion"));
  const int32_t found = version ? version() : 0;
  dlclose(library);
  return found;
}

void log_message(Severity severity, const char* text) {
  if (versioned_finder) {
    if (VersionedLogger* logger = versioned_finder->findLogger()) return logger->log(severity, text);
  } else if (plain_finder) {
    if (PlainLogger* logger = plain_finder->findLogger()) return logger->log(severity, text);
  } else if (versioned_logger) {
    if (VersionedLogger* logger = versioned_logger()) return logger->log(severity, text);
  } else if (plain_logger) {
    if (PlainLogger* logger = plain_logger()) return logger->log(severity, text);
  }
  std::fprintf(stderr, "%s\n", text);
}

}  // namespace quantmoe
