#include "common/entries.h"

#include <algorithm>
#include <iterator>
#include <map>
#include <stdexcept>
#include <string_view>

namespace quantmoe {
namespace {

// A session's entries begin so. All are read when the library is registered.
constexpr std::string_view kPrefix = "quantmoe.";
constexpr const char* kEntries[] = {
#define QM_ENTRY(name) #name,
#include "common/entries.inc"
};

// Cut, as it becomes an entry, which ONNX Runtime limits.
std::string list_of(const std::map<std::string, std::string>& entries) {
  std::string text;
  for (const auto& [name, value] : entries) text += (text.empty() ? "" : ", ") + name + "=" + value;
  return text.substr(0, 1024);
}

// Throws for an entry that is none of kEntries.
std::map<std::string, std::string> check_names(std::map<std::string, std::string> entries) {
  for (const auto& [name, value] : entries)
    if (std::find(std::begin(kEntries), std::end(kEntries), name) == std::end(kEntries)) {
      std::string known;
      for (const char* entry : kEntries) known += (known.empty() ? "" : ", ") + std::string(entry);
      throw std::invalid_argument("quantmoe: there is no session entry \"quantmoe." + name + "\", expected one of " +
                                  known);
    }
  return entries;
}

}  // namespace

std::string entries_text(const OrtApi* api, const OrtSessionOptions* options) {
  return list_of(check_names(session_entries(api, options, kPrefix)));
}

void check_entries(const OrtApi* api, const OrtKernelInfo* info) {
  auto now = session_entries(api, info, kPrefix);
  const auto seen = now.extract(kSeen + kPrefix.size());
  now.erase(kRegistered + kPrefix.size());
  if (seen && list_of(check_names(now)) != seen.mapped())
    throw std::invalid_argument("quantmoe: session entries are \"" + list_of(now) + "\", but were \"" + seen.mapped() +
                                "\" when the library was registered; set them before that");
}

bool is_on(const OrtApi* api, const OrtSessionOptions* options, const std::string& entry) {
  const std::string wanted = session_entry(api, options, entry.c_str());
  if (wanted != "" && wanted != "0" && wanted != "1")
    throw std::invalid_argument("quantmoe: " + entry + " is \"" + wanted + "\", expected 0 or 1");
  return wanted == "1";
}

ExpertSettings expert_settings(const OrtApi* api, const OrtSessionOptions* options) {
  const auto entry = [&](const char* key) { return session_entry(api, options, key); };
  return {entry("quantmoe.experts"),    entry("quantmoe.ram"),    entry("quantmoe.reserve"), entry("quantmoe.trace"),
          entry("quantmoe.gpu_memory"), entry("quantmoe.misses"), entry("quantmoe.threads"), entry("quantmoe.warm")};
}

GroupSettings group_settings(const OrtApi* api, const OrtSessionOptions* options) {
  return {session_entry(api, options, "quantmoe.group"), session_entry(api, options, "quantmoe.timeout")};
}

}  // namespace quantmoe
