// The shapes of op.def, once a node's attributes are known. An engine compares them with its inputs' sizes. A size is a
// number or an expression. known_size(size) is below 0 if it is not known.
#pragma once
#include <algorithm>
#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "core/slots.h"

namespace quantmoe {

// A dimension: a number, a free size, the larger or the smaller of two, a multiple of one, or any number of dimensions
// ("..").
struct Dimension {
  enum Kind { kNumber, kFree, kMax, kMin, kTimes, kRest } kind;
  int64_t number = 0;        // of kNumber and kTimes
  char name = 0, other = 0;  // of free sizes
};

struct ShapeRule {
  std::vector<Dimension> dimensions;
  bool packed = false;   // the layout knows
  bool or_none = false;  // or [0]
  int32_t alias = -1;    // of an output: the input that it is like
  const char* text;      // op.def's
};

inline int64_t known_size(int64_t size) { return size; }

// The free sizes of a node, as its inputs have them.
template <class Size>
class FreeSizes {
 public:
  const Size* find(char name) const { return known_[place(name)] ? &sizes_[place(name)] : nullptr; }
  const Size& at(char name) const { return sizes_[place(name)]; }  // of an input that matched
  const std::vector<Size>* rest() const { return has_rest_ ? &rest_ : nullptr; }
  void set(char name, const Size& size) {
    sizes_[place(name)] = size;
    known_[place(name)] = true;
  }
  void set_rest(std::vector<Size> rest) {
    rest_ = std::move(rest);
    has_rest_ = true;
  }

 private:
  static size_t place(char name) { return static_cast<size_t>(name - 'A'); }
  std::array<Size, 26> sizes_{};
  std::array<bool, 26> known_{};
  std::vector<Size> rest_;
  bool has_rest_ = false;
};

class ShapeRules {
 public:
  ShapeRules() = default;
  // node: the operator's struct, with valid attributes. Throws std::logic_error where op.def cannot be read.
  ShapeRules(const char* op, const void* node);

  const ShapeRule& input(size_t index) const { return inputs_[index]; }
  // Sets the sizes that are numbers in inputs. size_of(index): an input's.
  template <class Size, class SizeOf>
  void set_host_sizes(FreeSizes<Size>& free, const SizeOf& size_of) const {
    for (const HostSize& host : host_sizes_) free.set(host.size, size_of(static_cast<size_t>(host.input)));
  }

  // Whether an input may have these sizes, beside the ones before it. make: .over(size, n), n divides known sizes.
  template <class Size, class Make>
  bool match(size_t index, const std::vector<Size>& sizes, FreeSizes<Size>& free, const Make& make) const {
    const ShapeRule& rule = inputs_[index];
    if (rule.packed || (rule.or_none && sizes.size() == 1 && known_size(sizes[0]) == 0)) return true;
    const bool rests = std::any_of(rule.dimensions.begin(), rule.dimensions.end(),
                                   [](const Dimension& d) { return d.kind == Dimension::kRest; });
    const size_t least = rule.dimensions.size() - rests, rest = sizes.size() - least;
    if (sizes.size() < least || (rest && !rests)) return false;
    size_t at = 0;
    for (const Dimension& d : rule.dimensions) {
      if (d.kind == Dimension::kRest) {
        std::vector<Size> found(sizes.begin() + static_cast<int64_t>(at),
                                sizes.begin() + static_cast<int64_t>(at + rest));
        at += rest;
        if (!free.rest()) {
          free.set_rest(std::move(found));
          continue;
        }
        if (found.size() != free.rest()->size()) return false;
        for (size_t i = 0; i < found.size(); ++i)
          if (differ(known_size(found[i]), known_size((*free.rest())[i]))) return false;
        continue;
      }
      if (!match(d, sizes[at++], free, make)) return false;
    }
    return true;
  }

  // The sizes of an output; none where its rank is not known. make: .number(n), .times(size, n), .max(a, b), .min(a, b)
  // of sizes that are not 1.
  template <class Size, class Make>
  std::vector<Size> output(size_t index, const FreeSizes<Size>& free, const Make& make) const {
    std::vector<Size> sizes;
    const ShapeRule& own = outputs_[index];
    for (const Dimension& d : (own.alias < 0 ? own : inputs_[static_cast<size_t>(own.alias)]).dimensions) {
      if (d.kind == Dimension::kNumber) sizes.push_back(make.number(d.number));
      if (d.kind == Dimension::kFree) sizes.push_back(free.at(d.name));
      if (d.kind == Dimension::kTimes) sizes.push_back(make.times(free.at(d.name), d.number));
      if (d.kind == Dimension::kMax) sizes.push_back(make.max(free.at(d.name), free.at(d.other)));
      if (d.kind == Dimension::kMin) sizes.push_back(smaller(free.at(d.name), free.at(d.other), make));
      if (d.kind == Dimension::kRest && !free.rest()) return {};
      if (d.kind == Dimension::kRest) sizes.insert(sizes.end(), free.rest()->begin(), free.rest()->end());
    }
    return sizes;
  }

  // What an input is expected to have, free sizes as their letters: "[2, S, 64], which is [B, S, channels]".
  std::string expected(size_t index, const FreeSizes<int64_t>& free) const;

 private:
  static bool differ(int64_t a, int64_t b) { return a >= 0 && b >= 0 && a != b; }
  template <class Size, class Make>
  static Size smaller(const Size& a, const Size& b, const Make& make) {
    return known_size(a) == 1 ? a : known_size(b) == 1 ? b : make.min(a, b);
  }
  template <class Size, class Make>
  static bool match(const Dimension& d, const Size& size, FreeSizes<Size>& free, const Make& make) {
    if (d.kind == Dimension::kNumber) return !differ(d.number, known_size(size));
    if (d.kind == Dimension::kTimes && (d.number < 1 || (known_size(size) >= 0 && known_size(size) % d.number != 0)))
      return false;
    const Size own = d.kind == Dimension::kTimes ? make.over(size, d.number) : size;
    const Size* bound = free.find(d.name);
    if (bound && differ(known_size(*bound), known_size(own))) return false;
    if (!bound || (known_size(*bound) < 0 && known_size(own) >= 0)) free.set(d.name, own);
    return true;
  }

  std::vector<ShapeRule> inputs_, outputs_;
  std::vector<HostSize> host_sizes_;
};

// Numbers, below 0 where they are not known.
struct MakeNumbers {
  int64_t number(int64_t n) const { return n; }
  int64_t times(int64_t size, int64_t n) const { return size < 0 ? -1 : size * n; }
  int64_t over(int64_t size, int64_t n) const { return size < 0 ? -1 : size / n; }
  int64_t max(int64_t a, int64_t b) const { return a < 0 || b < 0 ? -1 : a > b ? a : b; }
  int64_t min(int64_t a, int64_t b) const { return a < 0 || b < 0 ? -1 : a < b ? a : b; }
};

}  // namespace quantmoe
