// The TensorRT that called or was found: its version, its logger, and calls that no exception leaves.
#pragma once
#include <cstdio>
#include <exception>
#include <string>

#include "NvInferRuntime.h"
#include "quantmoe/quant_moe.h"

namespace quantmoe {

using Severity = nvinfer1::ILogger::Severity;

// TensorRT 10 has findLogger and log first in the tables of virtual functions. In 11 and TensorRT-RTX 1.5 they follow
// IVersionedInterface's functions. A library compiled with either's headers must call both. The classes are not in the
// anonymous namespace: GCC would see that nothing implements them, and call __cxa_pure_virtual.
struct PlainLogger {
  virtual void log(Severity severity, const char* text) noexcept = 0;
};
struct PlainLoggerFinder {
  virtual PlainLogger* findLogger() = 0;
};
struct VersionedLogger : nvinfer1::IVersionedInterface {
  virtual void log(Severity severity, const char* text) noexcept = 0;
};
struct VersionedLoggerFinder : nvinfer1::IVersionedInterface {
  virtual VersionedLogger* findLogger() = 0;
};

// Of the TensorRT that loads this library; without one, getLogger of the TensorRT that it found.
extern PlainLoggerFinder* plain_finder;
extern VersionedLoggerFinder* versioned_finder;
extern PlainLogger* (*plain_logger)();
extern VersionedLogger* (*versioned_logger)();

// getInferLibVersion of the library whose code the object runs; 0 when it has none.
int32_t library_version(const void* object);
inline const void* table_of(const void* object) { return *static_cast<void* const*>(object); }
// Whether a TensorRT of this version has the later tables. 10.6.0: 100600; TensorRT-RTX 1.7.1: 10701
inline bool versioned(int32_t version) { return version >= (version < 100000 ? 10500 : 110000); }

void log_message(Severity severity, const char* text);
inline void log_message(Severity severity, const std::string& text) { log_message(severity, text.c_str()); }

// What TensorRT calls, as its result; `failed` where an exception, of memory most likely, ended it. Logs that without
// taking memory.
template <class Result, class Body>
Result guard(const char* layer, Result failed, const Body& body) noexcept {
  try {
    return body();
  } catch (const std::exception& error) {
    char text[QM_ERROR_SIZE];
    std::snprintf(text, sizeof(text), "%s %s", layer, error.what());
    log_message(Severity::kERROR, text);
  }
  return failed;
}

}  // namespace quantmoe
