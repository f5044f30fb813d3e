#include "provider/packed_file.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <new>
#include <random>
#include <stdexcept>
#include <system_error>

#include "files/mapped_file.h"
#include "hashes/blake3.h"
#include "hashes/samples.h"

namespace quantmoe {
namespace {

constexpr char kMagic[16] = "QuantMoE packed";
constexpr uint32_t kVersion = 2;
constexpr uint64_t kAlignment = 4096;  // of tensors
constexpr size_t kDigits = 64, kSampleDigits = 32;

struct Header {
  char magic[16];
  uint32_t version, count;
  uint64_t file_bytes;
  char sum[kDigits];  // of the header, this being zeros, and the table after it
};

struct Row {
  char key[kDigits], source[kDigits], all[kDigits], samples[kSampleDigits];
  uint64_t at, bytes;
};

uint64_t aligned(uint64_t at) { return (at + kAlignment - 1) / kAlignment * kAlignment; }

void put(char* to, const std::string& digits, size_t count) { std::memcpy(to, digits.data(), count); }

std::string sum_of(Header header, const Row* rows) {
  std::memset(header.sum, 0, sizeof header.sum);
  Blake3 sum;
  sum.update(&header, sizeof header);
  sum.update(rows, header.count * sizeof(Row));
  return sum.hex();
}

std::string samples_sum(const char* data, size_t bytes) {
  Blake3 sum;
  for (const size_t at : samples_of(bytes)) sum.update(data + at, std::min(kLine, bytes - at));
  return sum.hex().substr(0, kSampleDigits);
}

struct Aligned {
  void operator()(char* memory) const { ::operator delete[](memory, std::align_val_t{kAlignment}); }
};
using Memory = std::unique_ptr<char, Aligned>;

Memory allocate(size_t bytes) {
  char* memory = static_cast<char*>(::operator new[](bytes, std::align_val_t{kAlignment}, std::nothrow));
  if (!memory) throw std::runtime_error("no memory for packed weights, " + std::to_string(bytes) + " bytes");
  return Memory(memory);
}

// A pipe would wait for its other end, and what is renamed onto a device takes its place.
void expect_file(const std::filesystem::path& path) {
  std::error_code error;
  const auto found = std::filesystem::status(path, error);
  if (std::filesystem::exists(found) && !std::filesystem::is_regular_file(found))
    throw std::runtime_error("it is no regular file");
}

class FromFile : public PackedWeights {
 public:
  FromFile(const std::filesystem::path& path, const std::vector<PackedEntry>& entries, const SourceSum& verify)
      : file_(path) {
    Header header;
    if (file_.size() < sizeof header) throw std::runtime_error("it has no header");
    std::memcpy(&header, file_.data(), sizeof header);
    if (std::memcmp(header.magic, kMagic, sizeof kMagic) != 0)
      throw std::runtime_error("it is no file of packed weights");
    if (header.version != kVersion)
      throw std::runtime_error("it has version " + std::to_string(header.version) + ", expected " +
                               std::to_string(kVersion));
    if (header.file_bytes != file_.size())
      throw std::runtime_error("it has " + std::to_string(file_.size()) + " bytes, expected " +
                               std::to_string(header.file_bytes));
    if (header.count > (file_.size() - sizeof header) / sizeof(Row)) throw std::runtime_error("its table is cut off");
    std::vector<Row> rows(header.count);
    if (!rows.empty()) std::memcpy(rows.data(), file_.data() + sizeof header, rows.size() * sizeof(Row));
    if (std::memcmp(sum_of(header, rows.data()).data(), header.sum, kDigits) != 0)
      throw std::runtime_error("its header is damaged");
    if (rows.size() != entries.size()) throw std::runtime_error("it is of other weights");
    for (size_t i = 0; i < rows.size(); ++i) {
      const Row& row = rows[i];
      if (row.bytes != entries[i].bytes || std::memcmp(row.key, entries[i].key.data(), kDigits) != 0)
        throw std::runtime_error("it is of other weights");
      if (row.at % kAlignment || row.at > file_.size() || row.bytes > file_.size() - row.at)
        throw std::runtime_error("its table is damaged");
      const char* const data = file_.data() + row.at;
      bool same = std::memcmp(samples_sum(data, row.bytes).data(), row.samples, kSampleDigits) == 0;
      if (same && verify) {
        Blake3 all;
        all.update(data, row.bytes);
        same = std::memcmp(all.hex().data(), row.all, kDigits) == 0;
      }
      if (!same) throw std::runtime_error("its weights are damaged");
      if (verify && std::memcmp(verify(i).data(), row.source, kDigits) != 0)
        throw std::runtime_error("the model's weights have changed since");
      tensors_.push_back(data);
    }
  }

 private:
  MappedFile file_;
};

class InMemory : public PackedWeights {
 public:
  InMemory(const std::vector<PackedEntry>& entries, const Pack& pack) {
    for (size_t i = 0; i < entries.size(); ++i) {
      Memory& memory = memory_.emplace_back(allocate(entries[i].bytes));
      tensors_.push_back(memory.get());
      char* to = memory.get();
      pack(i, [&](const void* data, size_t bytes) {
        std::memcpy(to, data, bytes);
        to += bytes;
      });
    }
  }

 private:
  std::vector<Memory> memory_;
};

// Throws unless the name is free, or names a file of packed weights. Any other file is somebody's.
void expect_ours(const std::filesystem::path& path) {
  const auto found = std::filesystem::symlink_status(path);
  if (!std::filesystem::exists(found)) return;
  if (std::filesystem::is_symlink(found)) throw std::runtime_error("it is a link");
  expect_file(path);
  char magic[sizeof kMagic] = {};
  if (!std::ifstream(path, std::ios::binary).read(magic, sizeof magic) || std::memcmp(magic, kMagic, sizeof kMagic))
    throw std::runtime_error("a file that is no cache of packed weights has this name, and is left as it is");
}

// A file under a name of its own until it is whole.
class NewFile {
 public:
  explicit NewFile(const std::filesystem::path& to) : to_(to), path_(to) {
    expect_ours(to);
    std::random_device random;  // containers that share a folder may have equal process ids
    path_ += ".";
    path_ += std::to_string(random());
    path_ += std::to_string(random());
    path_ += ".tmp";
    file_ = create_file(path_);
    if (!file_) throw std::runtime_error(std::strerror(errno));
  }
  ~NewFile() {
    if (done_) return;
    if (file_) std::fclose(file_);
    std::error_code ignored;
    std::filesystem::remove(path_, ignored);
  }
  NewFile(const NewFile&) = delete;
  NewFile& operator=(const NewFile&) = delete;
  void write(const void* data, size_t bytes) {
    if (std::fwrite(data, 1, bytes, file_) != bytes) throw std::runtime_error(std::strerror(errno));
    at_ += bytes;
  }
  void fill_to(uint64_t at) {
    static constexpr char kZeros[kAlignment] = {};
    while (at_ < at) write(kZeros, std::min<uint64_t>(kAlignment, at - at_));
  }
  void to_begin() {
    if (std::fseek(file_, 0, SEEK_SET)) throw std::runtime_error(std::strerror(errno));
  }
  void finish() {
    const bool closed = std::fclose(file_) == 0;
    file_ = nullptr;
    if (!closed) throw std::runtime_error(std::strerror(errno));
    expect_ours(to_);
    std::filesystem::rename(path_, to_);
    done_ = true;
  }

 private:
  std::filesystem::path to_, path_;
  std::FILE* file_;
  uint64_t at_ = 0;
  bool done_ = false;
};

// What is written, and its sums.
class Sums {
 public:
  explicit Sums(size_t bytes) : bytes_(bytes), at_(samples_of(bytes)) {}
  void update(const char* data, size_t bytes) {
    all_.update(data, bytes);
    for (size_t i = 0; i < at_.size(); ++i)  // a sample may lie in two pieces
      for (size_t b = at_[i]; b < std::min(at_[i] + kLine, bytes_); ++b)
        if (b >= done_ && b < done_ + bytes) lines_[i][b - at_[i]] = data[b - done_];
    done_ += bytes;
  }
  std::string all() const { return all_.hex(); }
  std::string samples() const {
    Blake3 sum;
    for (size_t i = 0; i < at_.size(); ++i) sum.update(lines_[i].data(), std::min(kLine, bytes_ - at_[i]));
    return sum.hex().substr(0, kSampleDigits);
  }

 private:
  size_t bytes_, done_ = 0;
  std::array<size_t, 8> at_;
  std::array<std::array<char, kLine>, 8> lines_{};
  Blake3 all_;
};

}  // namespace

std::unique_ptr<PackedWeights> map_packed(const std::filesystem::path& file, const std::vector<PackedEntry>& entries,
                                          const SourceSum& verify) {
  expect_file(file);
  return std::make_unique<FromFile>(file, entries, verify);
}

std::unique_ptr<PackedWeights> pack_in_memory(const std::vector<PackedEntry>& entries, const Pack& pack) {
  return std::make_unique<InMemory>(entries, pack);
}

void write_packed(const std::filesystem::path& file, const std::vector<PackedEntry>& entries, const SourceSum& source,
                  const Pack& pack) {
  NewFile out(file);
  std::vector<Row> rows(entries.size());
  uint64_t next = aligned(sizeof(Header) + rows.size() * sizeof(Row));
  for (size_t i = 0; i < entries.size(); ++i) {
    Row& row = rows[i];
    row.at = next;
    row.bytes = entries[i].bytes;
    next = aligned(next + row.bytes);
    out.fill_to(row.at);
    Sums sums(row.bytes);
    pack(i, [&](const void* data, size_t bytes) {
      sums.update(static_cast<const char*>(data), bytes);
      out.write(data, bytes);
    });
    put(row.key, entries[i].key, kDigits);
    put(row.source, source(i), kDigits);
    put(row.all, sums.all(), kDigits);
    put(row.samples, sums.samples(), kSampleDigits);
  }
  out.fill_to(next);  // the last page is whole
  Header header{};
  std::memcpy(header.magic, kMagic, sizeof kMagic);
  header.version = kVersion;
  header.count = static_cast<uint32_t>(rows.size());
  header.file_bytes = next;
  put(header.sum, sum_of(header, rows.data()), kDigits);
  out.to_begin();
  out.write(&header, sizeof header);
  out.write(rows.data(), rows.size() * sizeof(Row));
  out.finish();
}

}  // namespace quantmoe
