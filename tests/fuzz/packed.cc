// libFuzzer target: the provider's cache of packed weights (provider/packed_file.h). A file is written and damaged,
// whole or so that its header's sum holds: reading it says why not, or gives tensors that lie in it; with all bytes
// compared, the ones that were written. Writing replaces such a file alone.
#include <cstddef>
#include <stdexcept>

#include "fuzz.h"
#include "hashes/blake3.h"
#include "provider/packed_file.h"

namespace {

using quantmoe::PackedEntry;
constexpr size_t kSum = 32, kHeader = 96, kRow = 240, kDigits = 64;  // where a file's sum is; what it is of

std::string random_key(FuzzedDataProvider& data) {
  std::string key(kDigits, '0');
  for (size_t i = 0; i < 4; ++i) key[i] = "0123456789abcdef"[data.ConsumeIntegralInRange(0, 15)];
  return key;
}

// Makes the sum that of the header and the table again.
void forge(std::string& file) {
  uint32_t count;
  if (file.size() < kHeader) return;
  std::memcpy(&count, &file[20], sizeof count);
  if (count > (file.size() - kHeader) / kRow) return;
  std::string head = file.substr(0, kHeader + count * kRow);
  std::fill_n(head.begin() + kSum, kDigits, '\0');
  quantmoe::Blake3 sum;
  sum.update(head.data(), head.size());
  file.replace(kSum, kDigits, sum.hex());
}

// Numbers at the ends of ranges, where sums of them overflow.
uint64_t number(FuzzedDataProvider& data, size_t size) {
  switch (data.ConsumeIntegralInRange(0, 4)) {
    case 0:
      return data.ConsumeIntegral<uint64_t>();
    case 1:
      return data.ConsumeIntegralInRange<uint64_t>(0, 2 * size);
    case 2:
      return 0 - data.ConsumeIntegralInRange<uint64_t>(0, 2 * size);
    case 3:
      return data.ConsumeIntegralInRange<uint64_t>(0, 8) * 4096;
    default:
      return 0 - data.ConsumeIntegralInRange<uint64_t>(0, 8) * 4096;
  }
}

void damage(FuzzedDataProvider& data, std::string& file, size_t tensors) {
  const auto put = [&](size_t at, size_t width) {
    const uint64_t value = number(data, file.size());
    if (at + width <= file.size()) std::memcpy(&file[at], &value, width);
  };
  for (int n = data.ConsumeIntegralInRange(0, 3); n > 0 && !file.empty(); --n) {
    const size_t row = kHeader + data.ConsumeIntegralInRange<size_t>(0, tensors) * kRow;
    switch (data.ConsumeIntegralInRange(0, 6)) {
      case 0:
        file[data.ConsumeIntegralInRange<size_t>(0, file.size() - 1)] ^= 1 << data.ConsumeIntegralInRange(0, 7);
        break;
      case 1:
        file.resize(data.ConsumeIntegralInRange<size_t>(0, file.size()));
        break;
      case 2:
        file.append(data.ConsumeIntegralInRange<size_t>(1, 9000), '\0');
        break;
      case 3:
        put(20, 4);
        break;  // count
      case 4:
        put(24, 8);
        break;  // file_bytes
      case 5:
        put(row + 224, 8);
        break;  // at
      default:
        put(row + 232, 8);  // bytes
    }
  }
  if (data.ConsumeBool()) forge(file);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* bytes, size_t size) {
  FuzzedDataProvider data(bytes, size);
  static const std::filesystem::path path = own_file("packed");
  std::vector<PackedEntry> entries(data.ConsumeIntegralInRange<size_t>(0, 3));
  std::vector<std::string> tensors;
  Rng rng(data.ConsumeIntegral<uint32_t>());
  for (PackedEntry& entry : entries) {
    entry = {random_key(data), data.ConsumeIntegralInRange<size_t>(0, 9000)};
    random_bytes(rng, tensors.emplace_back(entry.bytes, '\0').data(), entry.bytes);
  }
  const size_t piece = data.ConsumeIntegralInRange<size_t>(1, 5000);
  const quantmoe::Pack pack = [&](size_t i, const quantmoe::Put& put) {
    for (size_t at = 0; at < entries[i].bytes; at += piece)
      put(tensors[i].data() + at, std::min(piece, entries[i].bytes - at));
  };
  bool changed = false;  // the weights that a tensor was packed from
  const quantmoe::SourceSum source = [&](size_t i) {
    return std::string(kDigits, changed ? 'f' : static_cast<char>('0' + i));
  };
  quantmoe::write_packed(path, entries, source, pack);
  const std::string whole = read_file(path);
  std::string file = whole;
  damage(data, file, entries.size());
  write_file(path, file);
  if (data.ConsumeIntegralInRange(0, 7) == 0)
    entries.resize(data.ConsumeIntegralInRange<size_t>(0, 4), {random_key(data), 5});
  const bool verify = data.ConsumeBool();
  changed = data.ConsumeIntegralInRange(0, 7) == 0;
  try {
    const auto found = quantmoe::map_packed(path, entries, verify ? source : nullptr);
    CHECK(!verify || !changed || entries.empty(), "a cache of other weights is taken");
    CHECK(entries.size() <= tensors.size(), "%zu tensors of a file of %zu", entries.size(), tensors.size());
    for (size_t i = 0; i < entries.size(); ++i) {
      const char* const tensor = static_cast<const char*>(found->at(i));
      CHECK(reinterpret_cast<uintptr_t>(tensor) % 64 == 0, "tensor %zu is at %p", i, static_cast<const void*>(tensor));
      const std::string read(tensor, entries[i].bytes);  // ends the process where it does not lie in the mapping
      CHECK(!verify || read == tensors[i], "tensor %zu is another", i);
    }
  } catch (const std::runtime_error& why) {
    CHECK(file != whole || entries.size() != tensors.size() || (verify && changed), "a whole file is refused: %s",
          why.what());
  }
  if (data.ConsumeIntegralInRange(0, 7) == 0 && entries.size() <= tensors.size()) {  // written anew, or left as it is
    for (size_t i = 0; i < entries.size(); ++i) tensors[i].resize(entries[i].bytes);
    try {
      quantmoe::write_packed(path, entries, source, pack);
      (void)quantmoe::map_packed(path, entries, source);
    } catch (const std::runtime_error&) {
      CHECK(read_file(path) == file, "somebody's file is written over");
    }
  }
  std::filesystem::remove(path);
  return 0;
}
