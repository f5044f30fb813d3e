// Packed weights in a file beside a model: written once, mapped afterwards.
#pragma once
#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace quantmoe {

// One packed tensor. `key` names its weights and how they are packed, in 64 hexadecimal digits.
struct PackedEntry {
  std::string key;
  size_t bytes;
};

// The tensors of `entries`, in this order, in memory as long as this lives; each at a multiple of 64 bytes.
class PackedWeights {
 public:
  virtual ~PackedWeights() = default;
  const void* at(size_t entry) const { return tensors_[entry]; }

 protected:
  std::vector<const void*> tensors_;
};

// Packs a tensor piece by piece: calls put(data, bytes) until all its bytes are there.
using Put = std::function<void(const void* data, size_t bytes)>;
using Pack = std::function<void(size_t entry, const Put& put)>;

// The BLAKE3 of the weights that a tensor is packed from: 64 hexadecimal digits.
using SourceSum = std::function<std::string(size_t entry)>;

// Maps the file. Throws std::runtime_error, which says why, unless it holds exactly these entries and is whole: its
// header has a sum, each tensor one of samples. Where `verify` is given, all bytes are compared with their sum, too,
// and the weights that they were packed from with the present ones.
std::unique_ptr<PackedWeights> map_packed(const std::filesystem::path& file, const std::vector<PackedEntry>& entries,
                                          const SourceSum& verify);

// Writes the file, under another name first. Throws std::runtime_error where the system refuses, and where the name is
// taken by a link or by a file that this function has not written.
void write_packed(const std::filesystem::path& file, const std::vector<PackedEntry>& entries, const SourceSum& source,
                  const Pack& pack);

// The same tensors in memory alone.
std::unique_ptr<PackedWeights> pack_in_memory(const std::vector<PackedEntry>& entries, const Pack& pack);

}  // namespace quantmoe
