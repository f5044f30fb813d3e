#include <fcntl.h>
#include <io.h>
#include <sys/stat.h>
#include <windows.h>

#include <stdexcept>
#include <string>

#include "files/mapped_file.h"

namespace quantmoe {

MappedFile::MappedFile(const std::filesystem::path& file) {
  const auto refuse = [] { throw std::runtime_error("Windows error " + std::to_string(GetLastError())); };
  // While it is mapped Windows lets nobody cut it off; a new one may take its name where the file system can do that.
  const HANDLE handle = CreateFileW(file.c_str(), GENERIC_READ, FILE_SHARE_READ | FILE_SHARE_DELETE, nullptr,
                                    OPEN_EXISTING, FILE_ATTRIBUTE_NORMAL, nullptr);
  if (handle == INVALID_HANDLE_VALUE) refuse();
  LARGE_INTEGER size{};
  HANDLE mapping = nullptr;
  const bool sized = GetFileSizeEx(handle, &size);
  if (sized && size.QuadPart) mapping = CreateFileMappingW(handle, nullptr, PAGE_READONLY, 0, 0, nullptr);
  if (mapping) data_ = static_cast<const char*>(MapViewOfFile(mapping, FILE_MAP_READ, 0, 0, 0));
  const DWORD why = GetLastError();   // of what failed first
  if (mapping) CloseHandle(mapping);  // the view keeps both
  CloseHandle(handle);
  if (sized && !size.QuadPart) throw std::runtime_error("it is empty");
  SetLastError(why);
  if (!data_) refuse();
  bytes_ = static_cast<size_t>(size.QuadPart);
}
MappedFile::~MappedFile() { UnmapViewOfFile(data_); }

std::FILE* create_file(const std::filesystem::path& file) {
  const int handle =
      _wopen(file.c_str(), _O_WRONLY | _O_CREAT | _O_EXCL | _O_BINARY | _O_NOINHERIT, _S_IREAD | _S_IWRITE);
  return handle < 0 ? nullptr : _fdopen(handle, "wb");
}

}  // namespace quantmoe
