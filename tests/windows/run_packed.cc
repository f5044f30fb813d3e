// usage: run_packed FILE: the execution provider's file of packed weights (provider/packed_file.h) as a system has it.
// A line for each step; what is wrong ends the program.
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iostream>
#include <stdexcept>
#include <string>

#include "provider/packed_file.h"

using namespace quantmoe;
using Path = std::filesystem::path;

static const std::vector<PackedEntry> kEntries{{std::string(64, 'a'), 100000}, {std::string(64, 'b'), 4096}};

static void expect(bool is_so, const char* what) {
  std::cout << what << (is_so ? "" : ": no") << std::endl;
  if (!is_so) std::exit(1);
}

static std::string bytes_of(size_t entry, char first) {
  std::string bytes(kEntries[entry].bytes, 0);
  for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<char>(first + i % 251);
  return bytes;
}
static std::string source_sum(size_t) { return std::string(64, 'c'); }
static std::string other_sum(size_t) { return std::string(64, 'd'); }
static void write(const Path& file, char first) {
  write_packed(file, kEntries, source_sum, [&](size_t entry, const Put& put) {
    const std::string bytes = bytes_of(entry, first);
    put(bytes.data(), bytes.size());
  });
}
static bool has(const PackedWeights& weights, char first) {
  for (size_t i = 0; i < kEntries.size(); ++i)
    if (std::memcmp(weights.at(i), bytes_of(i, first).data(), kEntries[i].bytes) != 0) return false;
  return true;
}
static bool is_refused(const Path& file, const SourceSum& source = source_sum) {
  try {
    map_packed(file, kEntries, source);
  } catch (const std::runtime_error&) {
    return true;
  }
  return false;
}

#if defined(_WIN32)
int wmain(int, wchar_t** argv) {
#else
int main(int, char** argv) {
#endif
  const Path file = argv[1];
  expect(is_refused(file), "a file that is not there is refused");
  write(file, 1);
  {
    const auto first = map_packed(file, kEntries, source_sum), second = map_packed(file, kEntries, nullptr);
    expect(has(*first, 1) && has(*second, 1), "it is mapped, twice");
    try {  // Windows may refuse it
      write(file, 2);
    } catch (const std::exception&) {
    }
    expect(has(*first, 1) && has(*second, 1), "written anew it leaves what is mapped");
  }
  write(file, 3);
  expect(has(*map_packed(file, kEntries, source_sum), 3), "and is replaced when nothing maps it");
  expect(is_refused(file, other_sum), "of other weights it is refused");
  std::filesystem::resize_file(file, 5000);
  expect(is_refused(file), "cut off it is refused");
  std::filesystem::resize_file(file, 0);
  expect(is_refused(file), "empty, too");
  try {
    write(file, 4);
    expect(false, "a file that is no cache is left as it is");
  } catch (const std::exception&) {
    expect(std::filesystem::is_empty(file), "a file that is no cache is left as it is");
  }
  std::filesystem::remove(file);
  expect(std::filesystem::is_empty(file.parent_path()), "no other file is left");
}
