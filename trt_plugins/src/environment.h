// What the process's environment says; TensorRT has no options for plug-ins of an engine that runs.
#pragma once
#include <cstdlib>
#include <string>

namespace quantmoe {

// "": it is not set.
inline std::string environment(const char* name) {
  const char* value = std::getenv(name);
  return value ? value : "";
}

}  // namespace quantmoe
