// What is asked of the system about files: mapped_file_posix.cc and mapped_file_windows.cc.
#pragma once
#include <cstddef>
#include <cstdio>
#include <filesystem>

namespace quantmoe {

// A file's bytes, mapped for reading, as long as this lives. Throws std::runtime_error, which says why, where it is
// empty or cannot be mapped.
class MappedFile {
 public:
  explicit MappedFile(const std::filesystem::path& file);
  ~MappedFile();
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;
  const char* data() const { return data_; }
  size_t size() const { return bytes_; }

 private:
  const char* data_ = nullptr;
  size_t bytes_ = 0;
};

// Creates a file and opens it for writing. Returns nullptr, and errno says why, where something has that name, also a
// link, or where the system refuses. The caller closes it.
std::FILE* create_file(const std::filesystem::path& file);

}  // namespace quantmoe
