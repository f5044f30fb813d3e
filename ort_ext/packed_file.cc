#include "packed_file.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <new>
#include <stdexcept>
#include <system_error>

#include "core/blake3.h"
#include "core/samples.h"
#include "files/mapped_file.h"

namespace quantmoe {
namespace {

constexpr char kMagic[16] = "QuantMoE packed";
constexpr uint32_t kVersion = 1;
constexpr uint64_t kAlignment = 4096;  // of tensors
constexpr size_t kDigits = 64, kSampleDigits = 32;

struct Header {
  char magic[16];
  uint32_t version, count;
  uint64_t file_bytes;
  char sum[kDigits];  // of the header, this being zeros, and the table after it
};

struct Row {
  char key[kDigits], all[kDigits], samples[kSampleDigits];
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
  FromFile(const std::filesystem::path& path, const std::vector<PackedEntry>& entries, bool verify) : file_(path) {
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

// A file under a name of its own until it is whole.
class NewFile {
 public:
  explicit NewFile(const std::filesystem::path& to) : to_(to), path_(to) {
    expect_file(to);
    static std::atomic<int> count{0};
    path_ += std::string(".").append(std::to_string(process_id())).append(".").append(std::to_string(count++)) + ".tmp";
    stream_.open(path_, std::ios::binary | std::ios::trunc);
    if (!stream_) throw std::runtime_error(std::strerror(errno));
  }
  ~NewFile() {
    if (done_) return;
    stream_.close();
    std::error_code ignored;
    std::filesystem::remove(path_, ignored);
  }
  void write(const void* data, size_t bytes) {
    if (!stream_.write(static_cast<const char*>(data), static_cast<std::streamsize>(bytes)))
      throw std::runtime_error(std::strerror(errno));
  }
  void seek(uint64_t at) { stream_.seekp(static_cast<std::streamoff>(at)); }
  void finish() {
    stream_.close();
    if (!stream_) throw std::runtime_error(std::strerror(errno));
    std::filesystem::rename(path_, to_);
    done_ = true;
  }

 private:
  std::filesystem::path to_, path_;
  std::ofstream stream_;
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
                                          bool verify) {
  expect_file(file);
  return std::make_unique<FromFile>(file, entries, verify);
}

std::unique_ptr<PackedWeights> pack_in_memory(const std::vector<PackedEntry>& entries, const Pack& pack) {
  return std::make_unique<InMemory>(entries, pack);
}

void write_packed(const std::filesystem::path& file, const std::vector<PackedEntry>& entries, const Pack& pack) {
  NewFile out(file);
  std::vector<Row> rows(entries.size());
  uint64_t end = sizeof(Header) + rows.size() * sizeof(Row), next = aligned(end);
  for (size_t i = 0; i < entries.size(); ++i) {
    Row& row = rows[i];
    row.at = next;
    row.bytes = entries[i].bytes;
    if (row.bytes) end = next + row.bytes;
    next = aligned(next + row.bytes);
    out.seek(row.at);
    Sums sums(row.bytes);
    pack(i, [&](const void* data, size_t bytes) {
      sums.update(static_cast<const char*>(data), bytes);
      out.write(data, bytes);
    });
    put(row.key, entries[i].key, kDigits);
    put(row.all, sums.all(), kDigits);
    put(row.samples, sums.samples(), kSampleDigits);
  }
  if (next > end) {  // the last page is whole
    out.seek(next - 1);
    out.write("", 1);
  }
  Header header{};
  std::memcpy(header.magic, kMagic, sizeof kMagic);
  header.version = kVersion;
  header.count = static_cast<uint32_t>(rows.size());
  header.file_bytes = next;
  put(header.sum, sum_of(header, rows.data()), kDigits);
  out.seek(0);
  out.write(&header, sizeof header);
  out.write(rows.data(), rows.size() * sizeof(Row));
  out.finish();
}

}  // namespace quantmoe
