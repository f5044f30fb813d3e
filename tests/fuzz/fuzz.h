// What the libFuzzer targets share.
#pragma once
#include <fuzzer/FuzzedDataProvider.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <random>
#include <string>
#include <string_view>
#include <vector>

#include "core/attributes.h"
#include "cpu/kernel.h"
#include "quantmoe/quant_moe.h"

namespace {

#define CHECK(condition, ...)                                              \
  do {                                                                     \
    if (condition) break;                                                  \
    std::fprintf(stderr, "%s:%d: %s\n  ", __FILE__, __LINE__, #condition); \
    std::fprintf(stderr, __VA_ARGS__);                                     \
    std::fprintf(stderr, "\n");                                            \
    std::abort();                                                          \
  } while (0)

// A buffer of a fixed place between two inaccessible pages; data lies at its end or at its beginning.
class Guarded {
 public:
  static constexpr size_t kPage = 4096, kBytes = size_t{8} << 20;
  Guarded() {
    base_ = static_cast<uint8_t*>(
        mmap(nullptr, kBytes + 2 * kPage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    mprotect(base_, kPage, PROT_NONE);
    mprotect(base_ + kPage + kBytes, kPage, PROT_NONE);
  }
  void* place(size_t bytes, bool at_end) {
    CHECK(bytes <= kBytes, "%zu bytes", bytes);
    return base_ + kPage + (at_end ? kBytes - bytes : 0);
  }

 private:
  uint8_t* base_;
};

// Any value of an enum of op.def.
inline int32_t any_value(FuzzedDataProvider& data, std::string_view kind) {
  return data.ConsumeIntegralInRange(0, quantmoe::count_values(kind) - 1);
}

using Rng = std::minstd_rand;
inline double uniform(Rng& rng) { return (rng() - Rng::min()) / static_cast<double>(Rng::max() - Rng::min()); }

template <typename T>
inline float to_float(T bits, bool half) {
  if (!half) {
    const uint32_t wide = uint32_t{bits} << 16;
    float out;
    std::memcpy(&out, &wide, 4);
    return out;
  }
  _Float16 out;
  std::memcpy(&out, &bits, 2);
  return static_cast<float>(out);
}

// n values in [low, high) of a qm_type or a scale_type (both number f32, f16, bf16 from 0).
inline void fill(Rng& rng, int type, double low, double high, void* out, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    const float value = static_cast<float>(low + (high - low) * uniform(rng));
    uint32_t raw;
    std::memcpy(&raw, &value, 4);
    if (type == QM_F32) {
      static_cast<float*>(out)[i] = value;
    } else if (type == QM_F16) {
      const _Float16 half = static_cast<_Float16>(value);
      std::memcpy(static_cast<uint16_t*>(out) + i, &half, 2);
    } else {
      static_cast<uint16_t*>(out)[i] = static_cast<uint16_t>(raw >> 16);
    }
  }
}
inline double value_at(int type, const void* data, int64_t i) {
  if (type == QM_F32) return static_cast<const float*>(data)[i];
  return to_float(static_cast<const uint16_t*>(data)[i], type == QM_F16);
}

// What the formats from q4_k on are carried with: a group size and a type of scales that each takes.
inline void set_two_levels(qm_projection* p) {
  for (int32_t group_size : {256, 32})
    for (int32_t type = 0; type < quantmoe::count_values("scale_type"); ++type)
      if (quantmoe::takes_k_scales(p->format, group_size, type)) p->group_size = group_size, p->scale_type = type;
  p->block_n = 1;
  p->zero_points = 0;
}

// Random bytes, copied from a pool: drawing each one, instrumented, would take most of a target's time.
inline void random_bytes(Rng& rng, void* to, size_t n) {
  static const std::vector<uint8_t> pool = [] {
    std::vector<uint8_t> bytes(1 << 16);
    Rng own;
    for (uint8_t& byte : bytes) byte = static_cast<uint8_t>(own() >> 8);
    return bytes;
  }();
  for (size_t done = 0; done < n;) {
    const size_t from = rng() % pool.size(), count = std::min(n - done, pool.size() - from);
    std::memcpy(static_cast<uint8_t*>(to) + done, &pool[from], count);
    done += count;
  }
}

// The path of this process's file, in memory where the system has a place for that. It goes with the process.
inline const std::filesystem::path& own_file(const std::string& name) {
  static std::filesystem::path path;
  const std::filesystem::path memory = "/dev/shm";
  path = access(memory.c_str(), W_OK) ? std::filesystem::temp_directory_path() : memory;
  path /= "quantmoe-fuzz-" + name + "-" + std::to_string(getpid());
  std::atexit([] {
    std::error_code absent;
    std::filesystem::remove(path, absent);
  });
  return path;
}
inline std::string read_file(const std::filesystem::path& path) {
  std::ifstream stream(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(stream), {}};
}
inline void write_file(const std::filesystem::path& path, const std::string& bytes) {
  CHECK(std::ofstream(path, std::ios::binary | std::ios::trunc) << bytes, "%s is not written", path.c_str());
}

// Damages a file's bytes up to three times, as any file may be or in one of the target's own ways: own(at), whose place
// is within the file.
template <class Own>
void damage(FuzzedDataProvider& data, std::string& file, const Own& own) {
  for (int n = data.ConsumeIntegralInRange(0, 3); n > 0 && !file.empty(); --n) {
    const size_t at = data.ConsumeIntegralInRange<size_t>(0, file.size() - 1);
    switch (data.ConsumeIntegralInRange(0, 4)) {
      case 0:
        file[at] ^= static_cast<char>(1 << data.ConsumeIntegralInRange(0, 7));
        break;
      case 1:
        file.resize(at);
        break;
      case 2:
        file.replace(at, data.ConsumeIntegralInRange<size_t>(0, 9), data.ConsumeRandomLengthString(9));
        break;
      default:
        own(at);
    }
  }
}

#ifdef ORT_API_VERSION  // of a target that has ONNX Runtime's headers
// What ONNX Runtime is asked of a tensor. Tensor: what the target has in its place, with type, shape and bytes.
template <class Tensor>
void set_tensor_functions(OrtApi& api) {
  api.GetTensorTypeAndShape = [](const OrtValue* value, OrtTensorTypeAndShapeInfo** out) noexcept {
    *out = reinterpret_cast<OrtTensorTypeAndShapeInfo*>(const_cast<OrtValue*>(value));
    return static_cast<OrtStatus*>(nullptr);
  };
  api.GetTensorElementType = [](const OrtTensorTypeAndShapeInfo* info, ONNXTensorElementDataType* out) noexcept {
    *out = reinterpret_cast<const Tensor*>(info)->type;
    return static_cast<OrtStatus*>(nullptr);
  };
  api.GetDimensionsCount = [](const OrtTensorTypeAndShapeInfo* info, size_t* out) noexcept {
    *out = reinterpret_cast<const Tensor*>(info)->shape.size();
    return static_cast<OrtStatus*>(nullptr);
  };
  api.GetDimensions = [](const OrtTensorTypeAndShapeInfo* info, int64_t* out, size_t count) noexcept {
    std::copy_n(reinterpret_cast<const Tensor*>(info)->shape.begin(), count, out);
    return static_cast<OrtStatus*>(nullptr);
  };
  api.GetTensorMutableData = [](OrtValue* value, void** out) noexcept {
    *out = reinterpret_cast<Tensor*>(value)->bytes.data();
    return static_cast<OrtStatus*>(nullptr);
  };
  api.ReleaseTensorTypeAndShapeInfo = [](OrtTensorTypeAndShapeInfo*) noexcept {};
}
#endif

// One lane after another, which all synchronisation must allow; threads are ThreadSanitizer's subject.
inline void one_after_another(void*, qm_task task, void* arg, size_t count) {
  for (size_t i = 0; i < count; ++i) task(arg, i);
}

// Two kernels' outputs are the same bytes; but which NaN it is, is nobody's promise.
inline void check_equal(int type, const void* got, const void* first, int64_t n, const std::string& name,
                        const std::string& first_name) {
  for (int64_t i = 0; i < n; ++i) {
    const double a = value_at(type, got, i), b = value_at(type, first, i);
    CHECK((a == b && std::signbit(a) == std::signbit(b)) || (std::isnan(a) && std::isnan(b)),
          "element %lld is %g with %s, %g with %s", (long long)i, a, name.c_str(), b, first_name.c_str());
  }
}

// What a call gives, with every kernel.
struct Outcome {
  int status = 0;
  std::string kernel;  // the first
  std::vector<uint8_t> bytes;
};

// Sets an attribute, which may be refused.
inline void set_attribute(const char* op, void* node, const qm_value& value) {
  char err[QM_ERROR_SIZE];
  qm_set_attributes(op, node, &value, 1, err);
}

// Runs a call by each kernel that this machine has, with one to three lanes, in slices or whole: all give one status
// and the same elements.
template <class Run>
Outcome every_kernel(FuzzedDataProvider& data, const char* op, const void* node, qm_call& call, void* output,
                     int64_t elements, Guarded& place, bool at_end, const Run& run) {
  Outcome first;
  qm_library library;
  char err[QM_ERROR_SIZE];
  (void)qm_describe(&library, err);
  const auto type = static_cast<qm_type>(call.inputs->type);
  const int64_t bytes = elements * (type == QM_F32 ? 4 : 2);
  call.parallel_for = one_after_another;
  for (size_t i = 0; i < QM_MOST_KERNELS; ++i) {
    const char* const name = library.kernels[i];
    if (!library.usable[i]) continue;
    setenv("QUANTMOE_FORCE_KERNEL", name, 1);
    call.lanes = data.ConsumeIntegralInRange(1, 3);
    qm_slice_bytes = data.ConsumeBool() ? 1 : 1 << 28;  // a token a slice, or all tokens in one
    call.workspace = place.place(qm_workspace(op, node, &call), at_end);
    std::memset(output, 0xa5, bytes);
    const int status = run();
    if (first.kernel.empty()) {
      const uint8_t* got = static_cast<const uint8_t*>(output);
      first = {status, name, {got, got + bytes}};
    }
    CHECK(status == first.status, "%s returns %d, %s %d", name, status, first.kernel.c_str(), first.status);
    if (status == QM_OK) check_equal(type, output, first.bytes.data(), elements, name, first.kernel);
  }
  return first;
}

// Values of op.def's enums, and names that are none.
const char* const kNames[] = {
    "swiglu_tanh",  "silu", "gelu",       "gelu_tanh",       "relu2",     "swiglu_oai", "swiglu_step",
    "swiglu_clamp", "int4", "int8",       "mxfp4",           "f32",       "f16",        "bf16",
    "e8m0",         "none", "int8_token", "int8_token_asym", "fp8_token", "cpu_panel",  "marlin",
    "head",         "row",  "sigmoid",    "int8_group",      "",          "?"};

}  // namespace
