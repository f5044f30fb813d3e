// BLAKE3 in its hash mode (https://github.com/BLAKE3-team/BLAKE3-specs): what exports record of their weights.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>

namespace quantmoe {

class Blake3 {
 public:
  void update(const void* data, size_t size);
  std::string hex() const;  // of what came so far, 64 digits

 private:
  static constexpr size_t kChunk = 1024;
  struct Subtree {
    uint32_t words[8];
  };
  static Subtree chunk(const uint8_t* data, size_t size, uint64_t number, uint32_t root);
  static Subtree parent(const Subtree& left, const Subtree& right, uint32_t root);
  void push(Subtree node);

  Subtree stack_[54];  // roots of the whole subtrees so far, the largest first: 2^54 chunks are all of 64 bits
  int depth_ = 0;
  uint64_t chunks_ = 0;
  uint8_t last_[kChunk];  // held back: the last chunk may be the root
  size_t last_size_ = 0;
};

}  // namespace quantmoe
