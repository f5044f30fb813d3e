// Compares a packed tensor with the one that a model was exported with (quant_moe.def, Identity).
#pragma once
#include <algorithm>
#include <stdexcept>
#include <string>

#include "hashes/blake3.h"
#include "hashes/samples.h"

namespace quantmoe {

// `wanted` is the attribute <name>_identity; compares the samples, or all `bytes` too. read(at, size) gives bytes of
// the tensor, until the next call. Throws std::invalid_argument.
template <class Read>
void check_identity(const std::string& name, const std::string& wanted, size_t bytes, bool verify, const Read& read) {
  constexpr size_t kAll = 64, kSome = 32, kPiece = 1 << 24;
  if (wanted.size() < kAll + kSome + 2)
    throw std::invalid_argument(name + "_identity is \"" + wanted + "\", expected two BLAKE3 sums and the data's name");
  const auto compare = [&](const std::string& found, size_t at, const char* what) {
    if (wanted.compare(at, found.size(), found) != 0)
      throw std::invalid_argument(name + " is not the data that this model was exported with: the BLAKE3 of its " +
                                  what + " is " + found + ", expected " + wanted.substr(at, found.size()) + ", of " +
                                  wanted.substr(kAll + kSome + 2) +
                                  "; put the data file of the same export beside the model");
  };
  Blake3 some, all;
  for (const size_t at : samples_of(bytes)) some.update(read(at, kLine), kLine);
  compare(some.hex().substr(0, kSome), kAll + 1, "samples");
  if (!verify) return;
  for (size_t at = 0; at < bytes; at += kPiece)
    all.update(read(at, std::min(kPiece, bytes - at)), std::min(kPiece, bytes - at));
  compare(all.hex(), 0, "bytes");
}

}  // namespace quantmoe
