// What a library keeps for each session, or for what shares a budget as its layers do, and what it says of it.
#pragma once
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

namespace quantmoe {

template <class T>
class PerSession {
 public:
  // The one of a session, made of `settings` where there is none. `session` identifies it as long as it lives.
  template <class Settings>
  static std::shared_ptr<T> of(const void* session, const Settings& settings) {
    const std::lock_guard lock(mutex());
    std::erase_if(all(), [](const auto& entry) { return entry.second.expired(); });
    auto& entry = all()[session];
    std::shared_ptr<T> found = entry.lock();
    if (!found) entry = found = std::make_shared<T>(settings);
    return found;
  }

  static std::vector<std::shared_ptr<T>> alive() {
    const std::lock_guard lock(mutex());
    std::vector<std::shared_ptr<T>> found;
    for (const auto& entry : all())
      if (auto one = entry.second.lock()) found.push_back(std::move(one));
    return found;
  }

 private:
  // Never destroyed: sessions may outlive the library's exit handlers.
  static std::mutex& mutex() {
    static auto& one = *new std::mutex;
    return one;
  }
  static auto& all() {
    static auto& map = *new std::map<const void*, std::weak_ptr<T>>;
    return map;
  }
};

// A line of JSON.
inline std::string json_line(const std::vector<std::pair<const char*, uint64_t>>& values) {
  std::string text;
  for (const auto& [name, value] : values)
    text += (text.empty() ? "{\"" : ", \"") + std::string(name) + "\": " + std::to_string(value);
  return text + "}\n";
}

}  // namespace quantmoe
