#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <stdexcept>
#include <string>

#include "files/mapped_file.h"

namespace quantmoe {

MappedFile::MappedFile(const std::filesystem::path& file) {
  const int handle = open(file.c_str(), O_RDONLY | O_CLOEXEC);
  struct stat status {};
  if (handle < 0 || fstat(handle, &status)) {
    const std::string why = std::strerror(errno);
    if (handle >= 0) close(handle);
    throw std::runtime_error(why);
  }
  bytes_ = static_cast<size_t>(status.st_size);
  void* const data = bytes_ ? mmap(nullptr, bytes_, PROT_READ, MAP_SHARED, handle, 0) : MAP_FAILED;
  const std::string why = bytes_ ? std::strerror(errno) : "it is empty";
  close(handle);
  if (data == MAP_FAILED) throw std::runtime_error(why);
  data_ = static_cast<const char*>(data);
}
MappedFile::~MappedFile() { munmap(const_cast<char*>(data_), bytes_); }

std::FILE* create_file(const std::filesystem::path& file) {
  const int handle = open(file.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
  return handle < 0 ? nullptr : fdopen(handle, "wb");
}

}  // namespace quantmoe
