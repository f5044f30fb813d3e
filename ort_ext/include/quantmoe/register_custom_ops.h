// The operators, for a program that links libquantmoe_ort instead of naming its file.
#pragma once
#include <onnxruntime_c_api.h>

#ifdef __cplusplus
extern "C" {
#endif

// Adds the operators to `options`, from which a session is created later. `base` is OrtGetApiBase(). Returns NULL, or
// the error, which the caller releases by OrtApi's ReleaseStatus; in C++, Ort::ThrowOnError takes it.
OrtStatus* ORT_API_CALL RegisterCustomOps(OrtSessionOptions* options, const OrtApiBase* base);

#ifdef __cplusplus
}
#endif
