// What the kernels' host code calls of CUDA's runtime, over its driver (nvcuda.dll or libcuda.so.1), which is opened at
// the first call. Windows' libraries have it, because NVIDIA's static runtime there is for MSVC. Compilers' code
// registers each kernel by its name in the fatbin, which is nvcc's name on Linux, too.
//
// As with NVIDIA's runtime, a thread without a context gets the primary one of the first device, and an error stays
// until cudaGetLastError. Here are only the functions that something calls.
#include <cuda.h>
#include <cuda_runtime_api.h>

#include <map>
#include <mutex>
#include <string>

#if defined(_WIN32)
#define NOMINMAX
#include <windows.h>
#else
#include <dlfcn.h>
#endif

namespace {

// Both enumerations have one value for one error.
static_assert(int{cudaErrorInvalidValue} == CUDA_ERROR_INVALID_VALUE &&
              int{cudaErrorMemoryAllocation} == CUDA_ERROR_OUT_OF_MEMORY &&
              int{cudaErrorNoKernelImageForDevice} == CUDA_ERROR_NO_BINARY_FOR_GPU &&
              int{cudaErrorNotReady} == CUDA_ERROR_NOT_READY &&
              int{cudaErrorLaunchOutOfResources} == CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES &&
              int{cudaErrorNotSupported} == CUDA_ERROR_NOT_SUPPORTED);
// And so with these.
static_assert(int{cudaDevAttrComputeCapabilityMajor} == CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR &&
              int{cudaFuncAttributeMaxDynamicSharedMemorySize} == CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES &&
              int{cudaFuncAttributeNonPortableClusterSizeAllowed} ==
                  CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED &&
              sizeof(CUlaunchAttribute) == sizeof(cudaLaunchAttribute) &&
              cudaHostAllocMapped == CU_MEMHOSTALLOC_DEVICEMAP && cudaStreamNonBlocking == CU_STREAM_NON_BLOCKING);

void* driver_symbol(const char* name) {
#if defined(_WIN32)
  static const HMODULE driver = LoadLibraryExA("nvcuda.dll", nullptr, LOAD_LIBRARY_SEARCH_DEFAULT_DIRS);
  return driver ? reinterpret_cast<void*>(GetProcAddress(driver, name)) : nullptr;
#else
  static void* const driver = dlopen("libcuda.so.1", RTLD_NOW);
  return driver ? dlsym(driver, name) : nullptr;
#endif
}

thread_local cudaError_t last_error = cudaSuccess;

cudaError_t keep(cudaError_t error) {
  if (error != cudaSuccess && error != cudaErrorNotReady) last_error = error;
  return error;
}

template <class F, class... A>
CUresult call(F* function, A... arguments) {
  return function ? function(arguments...) : static_cast<CUresult>(cudaErrorInsufficientDriver);
}
// Calls a function of the driver. Its name is what cuda.h makes of `name`, with the version of its interface.
#define QM_NAME(name) #name
#define QM_DRIVER(name, ...)                                                                          \
  call(                                                                                               \
      [] {                                                                                            \
        static const auto function = reinterpret_cast<decltype(name)*>(driver_symbol(QM_NAME(name))); \
        return function;                                                                              \
      }(),                                                                                            \
      __VA_ARGS__)

// A context of the thread: the one that the engine has made current, or the primary one of the first device.
CUresult enter() {
  CUcontext context = nullptr;
  if (QM_DRIVER(cuCtxGetCurrent, &context) == CUDA_SUCCESS && context) return CUDA_SUCCESS;
  static std::mutex mutex;
  static CUcontext primary = nullptr;
  const std::lock_guard lock(mutex);
  if (!primary) {
    CUdevice device;
    CUresult result = QM_DRIVER(cuInit, 0);
    if (result == CUDA_SUCCESS) result = QM_DRIVER(cuDeviceGet, &device, 0);
    if (result == CUDA_SUCCESS) result = QM_DRIVER(cuDevicePrimaryCtxRetain, &primary, device);
    if (result != CUDA_SUCCESS) return result;
  }
  return QM_DRIVER(cuCtxSetCurrent, primary);
}

// A driver's call in the thread's context, and its error as the runtime's.
#define QM_CALL(name, ...)                                             \
  [&] {                                                                \
    CUresult result = enter();                                         \
    if (result == CUDA_SUCCESS) result = QM_DRIVER(name, __VA_ARGS__); \
    return keep(static_cast<cudaError_t>(result));                     \
  }()

CUdeviceptr address(const void* memory) { return reinterpret_cast<CUdeviceptr>(memory); }

struct Library {
  const void* fatbin;
  CUlibrary loaded = nullptr;
};
struct Kernel {
  Library* library;
  std::string name;
  CUkernel found = nullptr;
};
// Never destroyed: a session may still run on another thread while the process exits.
struct Kernels {
  std::mutex mutex;
  std::map<const void*, Kernel> all;  // by the host's function
};
Kernels& kernels() {
  static auto& one = *new Kernels;
  return one;
}

CUresult find(const void* host, CUkernel* kernel) {
  CUresult result = enter();
  if (result != CUDA_SUCCESS) return result;
  const std::lock_guard lock(kernels().mutex);
  const auto place = kernels().all.find(host);
  if (place == kernels().all.end()) return static_cast<CUresult>(cudaErrorInvalidDeviceFunction);
  Kernel& wanted = place->second;
  if (CUlibrary& loaded = wanted.library->loaded; !loaded)
    result = QM_DRIVER(cuLibraryLoadData, &loaded, wanted.library->fatbin, nullptr, nullptr, 0, nullptr, nullptr, 0);
  if (result == CUDA_SUCCESS && !wanted.found)
    result = QM_DRIVER(cuLibraryGetKernel, &wanted.found, wanted.library->loaded, wanted.name.c_str());
  *kernel = wanted.found;
  return result;
}

}  // namespace

extern "C" {

void** __cudaRegisterFatBinary(void* wrapper) {
  const void* fatbin = static_cast<void**>(wrapper)[1];  // after magic and version, 4 bytes each
  return reinterpret_cast<void**>(new Library{fatbin});
}
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}
void __cudaRegisterFunction(void** library, const char* host, char*, const char* name, int, void*, void*, void*, void*,
                            int*) {
  kernels().all[host] = {reinterpret_cast<Library*>(library), name};
}
// Only kernel<<<>>>() calls the rest of this part. No kernel is launched so; one that were would give this error.
unsigned __cudaPushCallConfiguration(dim3, dim3, size_t, void*) { return keep(cudaErrorNotSupported); }
cudaError_t __cudaPopCallConfiguration(dim3*, dim3*, size_t*, void*) { return cudaErrorNotSupported; }
#if !defined(_WIN32)  // nvcc's
char __cudaInitModule(void**) { return 1; }
cudaError_t __cudaGetKernel(cudaKernel_t*, const void*) { return cudaErrorNotSupported; }
cudaError_t __cudaLaunchKernel(cudaKernel_t, dim3, dim3, void**, size_t, cudaStream_t) { return cudaErrorNotSupported; }
#endif

cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* host, void** arguments) {
  CUkernel kernel = nullptr;
  if (const CUresult result = find(host, &kernel)) return keep(static_cast<cudaError_t>(result));
  CUlaunchConfig launch{};
  launch.gridDimX = config->gridDim.x, launch.gridDimY = config->gridDim.y, launch.gridDimZ = config->gridDim.z;
  launch.blockDimX = config->blockDim.x, launch.blockDimY = config->blockDim.y, launch.blockDimZ = config->blockDim.z;
  launch.sharedMemBytes = static_cast<unsigned>(config->dynamicSmemBytes);
  launch.hStream = config->stream;
  launch.attrs = reinterpret_cast<CUlaunchAttribute*>(config->attrs);
  launch.numAttrs = config->numAttrs;
  return QM_CALL(cuLaunchKernelEx, &launch, reinterpret_cast<CUfunction>(kernel), arguments, nullptr);
}
cudaError_t cudaLaunchKernel(const void* host, dim3 grid, dim3 threads, void** arguments, size_t shared_bytes,
                             cudaStream_t stream) {
  cudaLaunchConfig_t config{};
  config.gridDim = grid, config.blockDim = threads, config.dynamicSmemBytes = shared_bytes, config.stream = stream;
  return cudaLaunchKernelExC(&config, host, arguments);
}
cudaError_t cudaLaunchCooperativeKernel(const void* host, dim3 grid, dim3 threads, void** arguments,
                                        size_t shared_bytes, cudaStream_t stream) {
  cudaLaunchAttribute together{};
  together.id = cudaLaunchAttributeCooperative;
  together.val.cooperative = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = grid, config.blockDim = threads, config.dynamicSmemBytes = shared_bytes, config.stream = stream;
  config.attrs = &together, config.numAttrs = 1;
  return cudaLaunchKernelExC(&config, host, arguments);
}
cudaError_t cudaFuncSetAttribute(const void* host, cudaFuncAttribute attribute, int value) {
  CUkernel kernel = nullptr;
  CUdevice device = 0;
  CUresult result = find(host, &kernel);
  if (result == CUDA_SUCCESS) result = QM_DRIVER(cuCtxGetDevice, &device);
  if (result != CUDA_SUCCESS) return keep(static_cast<cudaError_t>(result));
  return QM_CALL(cuKernelSetAttribute, static_cast<CUfunction_attribute>(attribute), value, kernel, device);
}
// Only functions that have one version.
cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned, unsigned long long,
                                             cudaDriverEntryPointQueryResult* found) {
  *function = driver_symbol(name);
  *found = *function ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  return cudaSuccess;
}

cudaError_t cudaGetLastError() {
  const cudaError_t error = last_error;
  last_error = cudaSuccess;
  return error;
}
const char* cudaGetErrorString(cudaError_t error) {
  if (error == cudaErrorInsufficientDriver) return "no NVIDIA driver for CUDA 13 is installed";
  if (error == cudaErrorInvalidDeviceFunction) return "a kernel that is not in this library";
  const char* text = nullptr;
  (void)QM_DRIVER(cuGetErrorString, static_cast<CUresult>(error), &text);
  return text ? text : "an error that the driver does not name";
}

// These two make no context.
cudaError_t cudaGetDevice(int* device) {
  if (QM_DRIVER(cuCtxGetDevice, device) != CUDA_SUCCESS) *device = 0;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int ordinal) {
  CUdevice device;
  CUresult result = QM_DRIVER(cuInit, 0);
  if (result == CUDA_SUCCESS) result = QM_DRIVER(cuDeviceGet, &device, ordinal);
  if (result == CUDA_SUCCESS)
    result = QM_DRIVER(cuDeviceGetAttribute, value, static_cast<CUdevice_attribute>(attribute), device);
  return keep(static_cast<cudaError_t>(result));
}
cudaError_t cudaMalloc(void** memory, size_t bytes) {
  *memory = nullptr;
  return bytes ? QM_CALL(cuMemAlloc, reinterpret_cast<CUdeviceptr*>(memory), bytes) : cudaSuccess;
}
cudaError_t cudaFree(void* memory) { return memory ? QM_CALL(cuMemFree, address(memory)) : cudaSuccess; }
cudaError_t cudaHostAlloc(void** memory, size_t bytes, unsigned flags) {
  *memory = nullptr;
  return bytes ? QM_CALL(cuMemHostAlloc, memory, bytes, flags) : cudaSuccess;
}
// The driver knows by an address whose memory it is.
cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind) {
  return QM_CALL(cuMemcpy, address(to), address(from), bytes);
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind, cudaStream_t stream) {
  return QM_CALL(cuMemcpyAsync, address(to), address(from), bytes, stream);
}
cudaError_t cudaMemcpy2DAsync(void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width,
                              size_t height, cudaMemcpyKind, cudaStream_t stream) {
  CUDA_MEMCPY2D copy{};
  copy.srcMemoryType = copy.dstMemoryType = CU_MEMORYTYPE_UNIFIED;
  copy.srcDevice = address(from), copy.srcPitch = from_pitch;
  copy.dstDevice = address(to), copy.dstPitch = to_pitch;
  copy.WidthInBytes = width, copy.Height = height;
  return width && height ? QM_CALL(cuMemcpy2DAsync, &copy, stream) : cudaSuccess;
}
cudaError_t cudaMemsetAsync(void* memory, int value, size_t bytes, cudaStream_t stream) {
  return QM_CALL(cuMemsetD8Async, address(memory), static_cast<unsigned char>(value), bytes, stream);
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) {
  return QM_CALL(cuStreamCreate, stream, flags);
}
cudaError_t cudaStreamSynchronize(cudaStream_t stream) { return QM_CALL(cuStreamSynchronize, stream); }
cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  return QM_CALL(cuStreamIsCapturing, stream, reinterpret_cast<CUstreamCaptureStatus*>(status));
}
}
