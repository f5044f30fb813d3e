#include "ranks/place.h"

#include <charconv>
#include <cstdio>
#include <stdexcept>

namespace quantmoe {

std::chrono::seconds GroupSettings::patience() const {
  constexpr int kUsual = 30, kMost = 86400;
  int seconds = kUsual;
  if (timeout != "") {
    const char* end = timeout.data() + timeout.size();
    const auto [at, error] = std::from_chars(timeout.data(), end, seconds);
    if (error != std::errc() || at != end || seconds < 1 || seconds > kMost)
      throw std::invalid_argument(std::string("quantmoe: ") + timeout_key + " is \"" + timeout + "\", expected 1 to " +
                                  std::to_string(kMost) + " seconds");
  }
  return std::chrono::seconds(seconds);
}

std::string export_of(int32_t export_id) {
  if (export_id == 0) return "an export that has no export_id";
  char text[32];
  std::snprintf(text, sizeof(text), "export %08x", static_cast<unsigned>(export_id));
  return text;
}

}  // namespace quantmoe
