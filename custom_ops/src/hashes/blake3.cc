#include "hashes/blake3.h"

#include <algorithm>
#include <cstring>

namespace quantmoe {
namespace {

typedef uint32_t Lanes __attribute__((vector_size(16)));  // a word of four chunks each
constexpr size_t kLanes = 4, kBlock = 64;
constexpr uint32_t kChunkStart = 1, kChunkEnd = 2, kParent = 4, kRoot = 8;
constexpr uint32_t kStart[8] = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                                0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
// Which word of a block a round mixes in: each round takes the one before by the specification's permutation.
constexpr uint8_t kWords[7][16] = {
    {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}, {2, 6, 3, 10, 7, 0, 4, 13, 1, 11, 12, 5, 9, 14, 15, 8},
    {3, 4, 10, 12, 13, 2, 7, 14, 6, 5, 9, 0, 11, 15, 8, 1}, {10, 7, 12, 9, 14, 3, 13, 15, 4, 0, 11, 2, 5, 8, 1, 6},
    {12, 13, 9, 11, 15, 10, 14, 8, 7, 2, 5, 3, 0, 1, 6, 4}, {9, 14, 11, 5, 8, 12, 15, 1, 13, 3, 0, 10, 2, 6, 4, 7},
    {11, 15, 5, 0, 1, 9, 8, 6, 14, 10, 2, 12, 3, 4, 7, 13}};

template <class Word>
Word rotate_right(Word x, int bits) {
  return x >> bits | x << (32 - bits);
}

// The chaining value after a block of one chunk, or of kLanes.
template <class Word>
void compress(Word (&chain)[8], const Word (&block)[16], Word low, Word high, uint32_t size, uint32_t flags) {
  const Word zero = low ^ low;
  Word v[16] = {chain[0], chain[1], chain[2], chain[3], chain[4], chain[5], chain[6], chain[7]};
  for (int i = 0; i < 4; ++i) v[8 + i] = zero + kStart[i];
  v[12] = low, v[13] = high, v[14] = zero + size, v[15] = zero + flags;
#pragma GCC unroll 7
  for (const auto& words : kWords) {
    const auto mix = [&](int a, int b, int c, int d, int first) {
      v[a] += v[b] + block[words[first]];
      v[d] = rotate_right(v[d] ^ v[a], 16);
      v[c] += v[d];
      v[b] = rotate_right(v[b] ^ v[c], 12);
      v[a] += v[b] + block[words[first + 1]];
      v[d] = rotate_right(v[d] ^ v[a], 8);
      v[c] += v[d];
      v[b] = rotate_right(v[b] ^ v[c], 7);
    };
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) mix(i, 4 + i, 8 + i, 12 + i, 2 * i);
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) mix(i, 4 + (i + 1) % 4, 8 + (i + 2) % 4, 12 + (i + 3) % 4, 8 + 2 * i);
  }
  for (int i = 0; i < 8; ++i) chain[i] = v[i] ^ v[i + 8];
}

}  // namespace

Blake3::Subtree Blake3::chunk(const uint8_t* data, size_t size, uint64_t number, uint32_t root) {
  Subtree node;
  std::copy_n(kStart, 8, node.words);
  const size_t blocks = std::max<size_t>(1, (size + kBlock - 1) / kBlock);
  for (size_t index = 0; index < blocks; ++index) {
    const size_t bytes = std::min(kBlock, size - index * kBlock);
    uint32_t block[16] = {};
    std::memcpy(block, data + index * kBlock, bytes);
    const uint32_t flags = (index == 0 ? kChunkStart : 0) | (index + 1 == blocks ? kChunkEnd | root : 0);
    compress(node.words, block, static_cast<uint32_t>(number), static_cast<uint32_t>(number >> 32),
             static_cast<uint32_t>(bytes), flags);
  }
  return node;
}

Blake3::Subtree Blake3::parent(const Subtree& left, const Subtree& right, uint32_t root) {
  Subtree node;
  std::copy_n(kStart, 8, node.words);
  uint32_t block[16];
  std::copy_n(left.words, 8, block);
  std::copy_n(right.words, 8, block + 8);
  compress(node.words, block, 0u, 0u, kBlock, kParent | root);
  return node;
}

// The next chunk, with the subtrees that it completes.
void Blake3::push(Subtree node) {
  for (uint64_t count = ++chunks_; count % 2 == 0; count /= 2) node = parent(stack_[--depth_], node, 0);
  stack_[depth_++] = node;
}

void Blake3::update(const void* data, size_t size) {
  const uint8_t* next = static_cast<const uint8_t*>(data);
  while (size) {
    if (last_size_ == kChunk) {
      push(chunk(last_, kChunk, chunks_, 0));
      last_size_ = 0;
    }
    if (last_size_ == 0 && size > kLanes * kChunk) {
      Lanes chains[8], low, high;
      for (size_t lane = 0; lane < kLanes; ++lane) {
        low[lane] = static_cast<uint32_t>(chunks_ + lane), high[lane] = static_cast<uint32_t>((chunks_ + lane) >> 32);
        for (int i = 0; i < 8; ++i) chains[i][lane] = kStart[i];
      }
      for (size_t index = 0; index < kChunk / kBlock; ++index) {
        uint32_t words[kLanes][16];
        for (size_t lane = 0; lane < kLanes; ++lane)
          std::memcpy(words[lane], next + lane * kChunk + index * kBlock, kBlock);
        Lanes block[16];
        for (int i = 0; i < 16; ++i) block[i] = Lanes{words[0][i], words[1][i], words[2][i], words[3][i]};
        const uint32_t flags = (index == 0 ? kChunkStart : 0) | (index + 1 == kChunk / kBlock ? kChunkEnd : 0);
        compress(chains, block, low, high, kBlock, flags);
      }
      for (size_t lane = 0; lane < kLanes; ++lane) {
        Subtree node;
        for (int i = 0; i < 8; ++i) node.words[i] = chains[i][lane];
        push(node);
      }
      next += kLanes * kChunk, size -= kLanes * kChunk;
      continue;
    }
    const size_t taken = std::min(size, kChunk - last_size_);
    std::memcpy(last_ + last_size_, next, taken);
    last_size_ += taken, next += taken, size -= taken;
  }
}

std::string Blake3::hex() const {
  Subtree node = chunk(last_, last_size_, chunks_, depth_ ? 0 : kRoot);
  for (int i = depth_; i-- > 0;) node = parent(stack_[i], node, i ? 0 : kRoot);
  std::string text;
  for (const uint32_t word : node.words)
    for (int byte = 0; byte < 4; ++byte)
      for (const int shift : {4, 0}) text += "0123456789abcdef"[word >> (8 * byte + shift) & 15];
  return text;
}

}  // namespace quantmoe
