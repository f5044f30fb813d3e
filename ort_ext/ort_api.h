// What every file that speaks to ONNX Runtime needs: its header, errors, session entries.
#pragma once
#include <cstdint>
#include <functional>
#include <numeric>
#include <stdexcept>
#include <string>
#include <vector>

#if defined(__MINGW32__) && !defined(_Return_type_success_)
// Microsoft's annotation, which the next header defines for other systems only.
#define _Return_type_success_(condition)
#endif
#include "onnxruntime_c_api.h"

namespace quantmoe {

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
  const std::string message = what + ": " + api->GetErrorMessage(status);
  api->ReleaseStatus(status);
  throw std::runtime_error(message);
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

}  // namespace quantmoe
