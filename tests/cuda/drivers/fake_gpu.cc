// The GPU and the memory of the plug-in that trt_driver.cc contains: a device that the test describes, kernels that
// only say what they were asked for, allocations that fail on demand.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <new>
#include <vector>

#include "core/slots.h"
#include "cuda/ranks/peers.h"
#include "experts/device_experts.h"
#include "quantmoe/quant_moe_cuda.h"
#include "ranks/trap.h"

cudaError_t quantmoe::launch_trap(bool, cudaStream_t) { return cudaSuccess; }

namespace {

qm_cuda_device device{};
int allocations_left = -1;  // then they fail; -1: they do not
bool capturing = false, order_is_good = true;
float between_events = 0;  // ms
int times_left = -1;       // then they fail; -1: they do not
int orders_checked = 0, launches = 0, allocations_failed = 0;
// The experts of the last QuantMoE: cuda_kernels.Launched.
struct Mixed {
  const void *w13, *w2;
  qm_cuda_experts experts;
} mixed{};
// Of the last operator.
std::vector<int32_t> node;
std::vector<qm_tensor> given, made;
void* workspace;

int check_order(char* err) {
  ++orders_checked;
  if (order_is_good) return QM_OK;
  std::snprintf(err, QM_ERROR_SIZE, "an act-order that the test calls bad");
  return QM_INVALID;
}

}  // namespace

void* operator new(size_t size) {
  if (allocations_left == 0) {
    ++allocations_failed;
    throw std::bad_alloc();
  }
  if (allocations_left > 0) --allocations_left;
  if (void* memory = std::malloc(size)) return memory;
  throw std::bad_alloc();
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, size_t) noexcept { std::free(memory); }

extern "C" {

void driver_device(int32_t sm, int32_t multiprocessors, int32_t shared_bytes) {
  device = {sm, multiprocessors, shared_bytes};
}
// Allocations that succeed from now on, -1: all; returns how many of the last number were left.
int32_t driver_memory(int32_t allocations) {
  const int32_t left = allocations_left;
  allocations_left = allocations;
  return left;
}
void driver_order(int32_t good, int32_t captured) { order_is_good = good, capturing = captured; }
// What passes between two events from now on; so many are told, then they fail (-1: all are).
void driver_clock(float milliseconds, int32_t times) { between_events = milliseconds, times_left = times; }
int32_t driver_cpu_takes(double copy, double compute, int64_t slots, int64_t experts) {
  return quantmoe::cpu_takes({copy, compute}, slots, experts);
}
// What happened so far: orders checked, launches, failed allocations.
int32_t driver_count(int32_t which) {
  const int32_t counts[] = {orders_checked, launches, allocations_failed};
  return counts[which];
}

// What the last QuantMoE was launched with.
void driver_mixed(Mixed* found) { *found = mixed; }
// What the last operator was launched with: its struct, the tensors, the workspace.
void driver_launched(int32_t* attributes, qm_tensor* inputs, qm_tensor* outputs, void** memory) {
  std::copy(node.begin(), node.end(), attributes);
  std::copy(given.begin(), given.end(), inputs);
  std::copy(made.begin(), made.end(), outputs);
  *memory = workspace;
}

// No other process reaches its memory.
cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t*, void*) { return cudaErrorNotSupported; }
cudaError_t cudaIpcOpenMemHandle(void**, cudaIpcMemHandle_t, unsigned) { return cudaErrorNotSupported; }
cudaError_t cudaIpcCloseMemHandle(void*) { return cudaSuccess; }
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr, int) {
  return *value = device.multiprocessors, cudaSuccess;
}
int qm_cuda_allocate_box(int32_t world, void** box, char*) {
  return *box = std::calloc(1, quantmoe::box_bytes(world)), *box ? QM_OK : QM_INVALID;
}

cudaError_t cudaSetDevice(int) { return cudaSuccess; }
cudaError_t cudaGetDevice(int* ordinal) { return *ordinal = 0, cudaSuccess; }
const char* cudaGetErrorString(cudaError_t) { return "an error of the fake GPU"; }
cudaError_t cudaMemcpy(void* to, const void* from, size_t size, cudaMemcpyKind) {
  return std::memcpy(to, from, size), cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t size, cudaMemcpyKind, cudaStream_t) {
  return std::memcpy(to, from, size), cudaSuccess;
}
cudaError_t cudaMemcpy2DAsync(void* to, size_t to_pitch, const void* from, size_t pitch, size_t width, size_t rows,
                              cudaMemcpyKind, cudaStream_t) {
  for (size_t row = 0; row < rows; ++row)
    std::memcpy(static_cast<char*>(to) + row * to_pitch, static_cast<const char*>(from) + row * pitch, width);
  return cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t) { return cudaSuccess; }
cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) {
  *status = capturing ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  return cudaSuccess;
}

// The device's memory is the host's, and streams are done at once.
cudaError_t cudaMalloc(void** memory, size_t size) {
  *memory = std::malloc(size);
  return *memory ? cudaSuccess : cudaErrorMemoryAllocation;
}
cudaError_t cudaFree(void* memory) { return std::free(memory), cudaSuccess; }
cudaError_t cudaHostAlloc(void** memory, size_t size, unsigned) { return cudaMalloc(memory, size); }
cudaError_t cudaFreeHost(void* memory) { return cudaFree(memory); }
cudaError_t cudaMemset(void* memory, int value, size_t size) { return std::memset(memory, value, size), cudaSuccess; }
cudaError_t cudaMemsetAsync(void* memory, int value, size_t size, cudaStream_t) {
  return std::memset(memory, value, size), cudaSuccess;
}
cudaError_t cudaMemGetInfo(size_t* free, size_t* total) { return *free = *total = size_t{1} << 32, cudaSuccess; }
cudaError_t cudaHostRegister(void*, size_t, unsigned) { return cudaSuccess; }
cudaError_t cudaHostUnregister(void*) { return cudaSuccess; }
cudaError_t cudaHostGetDevicePointer(void** device, void* host, unsigned) { return *device = host, cudaSuccess; }
cudaError_t cudaDeviceSynchronize() { return cudaSuccess; }
cudaError_t cudaGetLastError() { return cudaSuccess; }
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) { return *stream = nullptr, cudaSuccess; }
cudaError_t cudaStreamDestroy(cudaStream_t) { return cudaSuccess; }
cudaError_t cudaStreamQuery(cudaStream_t) { return cudaSuccess; }
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) { return *event = nullptr, cudaSuccess; }
cudaError_t cudaEventDestroy(cudaEvent_t) { return cudaSuccess; }
cudaError_t cudaEventRecord(cudaEvent_t, cudaStream_t) { return cudaSuccess; }
cudaError_t cudaEventSynchronize(cudaEvent_t) { return cudaSuccess; }
cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t, cudaEvent_t) {
  if (times_left == 0) return cudaErrorUnknown;
  if (times_left > 0) --times_left;
  return *milliseconds = between_events, cudaSuccess;
}
cudaError_t cudaEventQuery(cudaEvent_t) { return cudaSuccess; }
cudaError_t cudaStreamWaitEvent(cudaStream_t, cudaEvent_t, unsigned) { return cudaSuccess; }

int qm_cuda_query(int, qm_cuda_device* found, char*) { return *found = device, QM_OK; }
int qm_cuda_check_node(const char* op, const void* attributes, const qm_cuda_node_plan*, const qm_cuda_call* call,
                       char* err) {
  const bool layer = !std::strcmp(op, "QuantMoE");
  if (!layer && std::strcmp(op, "QuantLinear")) return QM_OK;
  const qm_projection& w =
      layer ? static_cast<const qm_moe*>(attributes)->w13 : static_cast<const qm_linear*>(attributes)->w;
  const qm_tensor& rows = call->inputs[layer ? quantmoe::QuantMoE_w13 : quantmoe::QuantLinear_w];
  return w.perm && rows.data ? check_order(err) : QM_OK;
}
int qm_cuda_launch_node(const char* op, const void* attributes, const qm_cuda_node_plan*, const qm_cuda_call* call,
                        char*) {
  if (call->peers) return QM_INVALID;
  if (!std::strcmp(op, "QuantMoE"))
    mixed = {call->inputs[quantmoe::QuantMoE_w13].data, call->inputs[quantmoe::QuantMoE_w2].data,
             call->experts ? *call->experts : qm_cuda_experts{}};
  const int32_t* const words = static_cast<const int32_t*>(attributes);
  node.assign(words, words + qm_find_operator(op)->count);
  given.assign(call->inputs, call->inputs + quantmoe::Slots(quantmoe::kInputs, op).count);
  made.assign(call->outputs, call->outputs + quantmoe::Slots(quantmoe::kOutputs, op).count);
  workspace = call->workspace;
  return ++launches, QM_OK;
}

}  // extern "C"
