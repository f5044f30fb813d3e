// Launches of CUDA's runtime over its driver, nvcuda.dll, which is loaded at the first one. clang's code registers each
// kernel by its name in the fatbin: kernels are found by names that are nvcc's on Linux.
#include <cuda.h>
#include <driver_types.h>
#include <windows.h>

#include <map>
#include <string>

namespace {

struct Library {
  const void* fatbin;
  CUlibrary loaded = nullptr;
};
struct Kernel {
  Library* library;
  std::string name;
  CUkernel found = nullptr;
};

std::map<const void*, Kernel>& kernels() {
  static std::map<const void*, Kernel> all;
  return all;
}

template <class F>
F* of_driver(const char* name) {
  static const HMODULE driver = LoadLibraryA("nvcuda.dll");
  return driver ? reinterpret_cast<F*>(reinterpret_cast<void*>(GetProcAddress(driver, name))) : nullptr;
}
#define DRIVER(name) of_driver<decltype(name)>(#name)

cudaError_t find(const void* host, CUkernel* kernel) {
  const auto place = kernels().find(host);
  if (place == kernels().end()) return cudaErrorInvalidDeviceFunction;
  Kernel& wanted = place->second;
  const auto load = DRIVER(cuLibraryLoadData);
  const auto get = DRIVER(cuLibraryGetKernel);
  if (!load || !get) return cudaErrorInsufficientDriver;
  CUresult result = CUDA_SUCCESS;
  if (CUlibrary& loaded = wanted.library->loaded; !loaded)
    result = load(&loaded, wanted.library->fatbin, nullptr, nullptr, 0, nullptr, nullptr, 0);
  if (result == CUDA_SUCCESS && !wanted.found) result = get(&wanted.found, wanted.library->loaded, wanted.name.c_str());
  *kernel = wanted.found;
  return static_cast<cudaError_t>(result);
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
  kernels()[host] = {reinterpret_cast<Library*>(library), name};
}
// Only launches of the form <<<>>> use these two.
unsigned __cudaPushCallConfiguration(dim3, dim3, size_t, void*) { return 1; }
cudaError_t __cudaPopCallConfiguration(dim3*, dim3*, size_t*, void*) { return cudaErrorNotSupported; }

cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* host, void** arguments) {
  static_assert(sizeof(CUlaunchAttribute) == sizeof(cudaLaunchAttribute));
  CUkernel kernel = nullptr;
  if (const cudaError_t error = find(host, &kernel)) return error;
  CUlaunchConfig launch{};
  launch.gridDimX = config->gridDim.x, launch.gridDimY = config->gridDim.y, launch.gridDimZ = config->gridDim.z;
  launch.blockDimX = config->blockDim.x, launch.blockDimY = config->blockDim.y, launch.blockDimZ = config->blockDim.z;
  launch.sharedMemBytes = static_cast<unsigned>(config->dynamicSmemBytes);
  launch.hStream = config->stream;
  launch.attrs = reinterpret_cast<CUlaunchAttribute*>(config->attrs);
  launch.numAttrs = config->numAttrs;
  const auto start = DRIVER(cuLaunchKernelEx);
  if (!start) return cudaErrorInsufficientDriver;
  return static_cast<cudaError_t>(start(&launch, reinterpret_cast<CUfunction>(kernel), arguments, nullptr));
}
cudaError_t cudaLaunchKernel(const void* host, dim3 grid, dim3 threads, void** arguments, size_t shared_bytes,
                             cudaStream_t stream) {
  cudaLaunchConfig_t config{};
  config.gridDim = grid, config.blockDim = threads, config.dynamicSmemBytes = shared_bytes, config.stream = stream;
  return cudaLaunchKernelExC(&config, host, arguments);
}
cudaError_t cudaFuncSetAttribute(const void* host, cudaFuncAttribute attribute, int value) {
  CUkernel kernel = nullptr;
  if (const cudaError_t error = find(host, &kernel)) return error;
  const auto set = DRIVER(cuKernelSetAttribute);
  return set ? static_cast<cudaError_t>(set(static_cast<CUfunction_attribute>(attribute), value, kernel, 0))
             : cudaErrorInsufficientDriver;
}
}
