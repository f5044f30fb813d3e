#include "cpu/cpu_node.h"

#if defined(__linux__)
#include <sys/mman.h>
#elif defined(_WIN32)
#define NOMINMAX
#include <windows.h>
#endif

#include <cstring>
#include <new>

namespace quantmoe {
namespace {

constexpr uintptr_t kPage = 4096;

// Asks the system to read mapped bytes ahead, in one piece where it can. An advice: nothing depends on it.
void will_need([[maybe_unused]] const void* data, [[maybe_unused]] size_t bytes) {
#if defined(__linux__)
  const uintptr_t begin = reinterpret_cast<uintptr_t>(data) / kPage * kPage;
  (void)madvise(reinterpret_cast<void*>(begin), reinterpret_cast<uintptr_t>(data) + bytes - begin, MADV_WILLNEED);
#elif defined(_WIN32)
  WIN32_MEMORY_RANGE_ENTRY range{const_cast<void*>(data), bytes};
  (void)PrefetchVirtualMemory(GetCurrentProcess(), 1, &range, 0);
#endif
}

// Reads the mapped pages in now instead of at first use. The kernel populates the page table too (Linux 5.14);
// elsewhere a byte of each page is touched.
void prefault(const void* data, size_t bytes) {
#if defined(__linux__)
  constexpr int kPopulateRead = 22;  // MADV_POPULATE_READ, newer than some headers
  const uintptr_t begin = reinterpret_cast<uintptr_t>(data) / kPage * kPage;
  if (madvise(reinterpret_cast<void*>(begin), reinterpret_cast<uintptr_t>(data) + bytes - begin, kPopulateRead) == 0)
    return;
#else
  will_need(data, bytes);
#endif
  for (size_t at = 0; at < bytes; at += kPage) (void)static_cast<const volatile char*>(data)[at];
}

}  // namespace

// The packed tensor, for the life of the session: ONNX Runtime's memory-mapped external data, or a copy of it.
const void* CpuNode::read_packed(const OrtKernelInfo* info, size_t input, Shape& shape) {
  const void* data = data_of(get_weight(info, input, shape));
  const std::string name = op_.inputs.first[input].name;
  const size_t bytes = static_cast<size_t>(shape[0] * shape[1]) * 4;
  if (weights_ == WeightSource::kCopied) {
    try {
      copies_.emplace_back(new Line[(bytes + sizeof(Line) - 1) / sizeof(Line)]);  // not initialized
    } catch (const std::bad_alloc&) {
      fail("no memory for a copy of " + name + ", " + std::to_string(bytes) + " bytes");
    }
    return std::memcpy(copies_.back().get(), data, bytes);
  }
  if (reinterpret_cast<uintptr_t>(data) % 64)
    fail(name +
         " is not 64-byte aligned in memory, expected external data at a multiple of 64 in its file and buffers of "
         "yours at such an address; with others, as .ort bytes used in place, set the session entry "
         "quantmoe.prefault to copy");
  if (weights_ == WeightSource::kPrefaulted) prefault(data, bytes);
  return data;
}

void CpuNode::validate(const void* node, const qm_shape* packed) const {
  char error[QM_ERROR_SIZE];
  if (qm_validate(op_.name, node, packed, error)) fail(error);
}

// Makes a call on the session's threads, in its memory.
void CpuNode::call(OrtKernelContext* context, const void* node, const Tensors& tensors, qm_read_experts read_experts,
                   void* experts_context) const {
  qm_call call{};
  call.inputs = tensors.inputs.data();
  call.outputs = tensors.outputs.data();
  call.read_experts = read_experts;
  call.experts_context = experts_context;
  try {
    run_with_pool(api_, context, memory_, op_.name, node, call);
  } catch (const std::invalid_argument& error) {
    fail(error.what());
  }
}

// What can be checked of a packed tensor whose shape is right.
void CpuNode::check_packed(const OrtKernelInfo* info, size_t input, const void* data, const Shape& shape) const {
  // Asks for the pages of all samples at once, and only for these. One after the other, each would wait for the disk
  // and for the pages around it.
  for (const size_t at : samples_of(static_cast<size_t>(shape[0] * shape[1]) * 4))
    will_need(static_cast<const char*>(data) + at, 1);
  check_identity(info, input, verify_, [data](size_t at, size_t) { return static_cast<const char*>(data) + at; });
}

}  // namespace quantmoe
