// Which file memory is mapped from, on Linux: ONNX Runtime names none to a kernel.
#pragma once
#if defined(__linux__)
#include <cerrno>
#include <cinttypes>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string>

namespace quantmoe {

// The line of /proc/self/maps that has `data`.
struct Mapping {
  uintptr_t begin = 0, end = 0;
  int64_t offset = 0;
  std::string identity, path;  // "device inode"; "" where no file is mapped

  explicit Mapping(const void* data) {
    const auto address = reinterpret_cast<uintptr_t>(data);
    std::FILE* file = std::fopen("/proc/self/maps", "r");
    if (!file) throw std::runtime_error("quantmoe: /proc/self/maps: " + std::string(std::strerror(errno)));
    char* line = nullptr;
    size_t room = 0;
    while (getline(&line, &room, file) > 0) {
      char device[32];
      uint64_t inode;
      int name = 0;
      if (std::sscanf(line, "%" SCNxPTR "-%" SCNxPTR " %*s %" SCNx64 " %31s %" SCNu64 " %n", &begin, &end, &offset,
                      device, &inode, &name) < 5 ||
          address < begin || address >= end)
        continue;
      identity = std::string(device) + " " + std::to_string(inode);
      path = name ? line + name : "";
      if (!path.empty() && path.back() == '\n') path.pop_back();
      break;
    }
    std::free(line);
    std::fclose(file);
    if (path.empty() || path[0] != '/') path.clear();
  }
};

}  // namespace quantmoe
#endif
