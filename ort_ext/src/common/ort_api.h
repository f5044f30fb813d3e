// What every file that speaks to ONNX Runtime needs: its header, errors, session entries.
#pragma once
#include <cstdint>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <numeric>
#include <stdexcept>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#if defined(__MINGW32__) && !defined(_Return_type_success_)
// Microsoft's annotation, which the next header defines for other systems only.
#define _Return_type_success_(condition)
#endif
#include "onnxruntime_c_api.h"

struct OrtKeyValuePairs;

namespace quantmoe {

// A function of OrtApi that the headers lack, because they have an older API (FindORTHeaders.cmake). It is taken by its
// place in the table of functions, which is ABI and only grows.
template <size_t kPlace, class Function>
struct ApiFunction {
  Function* call;
  explicit ApiFunction(const OrtApi* api) {
    std::memcpy(&call, reinterpret_cast<const char*>(api) + kPlace * sizeof(void*), sizeof call);
  }
  template <class... Arguments>
  auto operator()(Arguments... arguments) const {
    return call(arguments...);
  }
};

template <class F>
OrtStatus* guard(const OrtApi* api, F&& body) noexcept {
  try {
    body();
    return nullptr;
  } catch (const std::invalid_argument& error) {
    return api->CreateStatus(ORT_INVALID_ARGUMENT, error.what());
  } catch (const std::exception& error) {
    return api->CreateStatus(ORT_FAIL, error.what());
  }
}

// Throws what a status says, after `what`.
inline void check(const OrtApi* api, OrtStatus* status, const std::string& what = "ONNX Runtime") {
  if (!status) return;
  std::string message = api->GetErrorMessage(status);
  api->ReleaseStatus(status);
  if (message == "std::bad_alloc") message = "no memory";  // ONNX Runtime passes on the exception's own text
  throw std::runtime_error(what + ": " + message);
}

using Shape = std::vector<int64_t>;

inline std::string text_of(const Shape& shape) {
  std::string text = "[";
  for (int64_t dim : shape) text += (text.size() > 1 ? ", " : "") + std::to_string(dim);
  return text + "]";
}

inline int64_t rows_of(const Shape& shape) {
  return std::accumulate(shape.begin(), shape.end() - 1, int64_t{1}, std::multiplies<>());
}

// A session's configuration entry, "" where there is none.
inline std::string session_entry(const OrtApi* api, const OrtSessionOptions* options, const char* key) {
  int has = 0;
  size_t size = 0;
  std::string value;
  OrtStatus* status = api->HasSessionConfigEntry(options, key, &has);
  if (!status && has) status = api->GetSessionConfigEntry(options, key, nullptr, &size);
  if (!status && has) {
    value.resize(size);
    status = api->GetSessionConfigEntry(options, key, value.data(), &size);
    value.resize(size - 1);  // its NUL
  }
  check(api, status, std::string("quantmoe: session entry ") + key);
  return value;
}

// Minor version of the runtime from which on it lists a session's entries.
constexpr int kListsEntries = 24;

// The entries with `prefix` of session options, or of the session of a kernel, by the rest of their names.
template <class Of>
std::map<std::string, std::string> session_entries(const OrtApi* api, const Of* of, std::string_view prefix) {
  // GetSessionOptionsConfigEntries, KernelInfo_GetConfigEntries
  constexpr size_t kPlace = std::is_same_v<Of, OrtSessionOptions> ? 379 : 391;
  const ApiFunction<kPlace, OrtStatus * ORT_API_CALL(const Of*, OrtKeyValuePairs**)> list{api};
  const ApiFunction<298, void ORT_API_CALL(const OrtKeyValuePairs*, const char* const** keys,
                                           const char* const** values, size_t* count)>
      read{api};
  const ApiFunction<300, void ORT_API_CALL(OrtKeyValuePairs*)> release{api};
  OrtKeyValuePairs* pairs = nullptr;
  check(api, list(of, &pairs), "the session's entries");
  const std::unique_ptr<OrtKeyValuePairs, void (*)(OrtKeyValuePairs*)> owned(pairs, release.call);
  const char *const *keys = nullptr, *const *values = nullptr;
  size_t count = 0;
  read(pairs, &keys, &values, &count);
  std::map<std::string, std::string> found;
  for (size_t i = 0; i < count; ++i)
    if (const std::string_view key = keys[i]; key.starts_with(prefix))
      found.emplace(key.substr(prefix.size()), values[i]);
  return found;
}

}  // namespace quantmoe
