// A driver without a GPU. It prints what it is asked for. It knows kernels, and the bytes of their parameters, by the
// file that kernels.py has made of their code, and QM_KERNELS names.
#include <cuda.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <map>
#include <string>

namespace {

struct Kernel {
  std::string name;
  size_t parameter_bytes;
};
using Library = std::map<std::string, Kernel>;

// By the sizes of their fatbins.
std::map<size_t, Library> libraries() {
  std::map<size_t, Library> found;
  std::ifstream lines(std::getenv("QM_KERNELS"));
  size_t fatbin, bytes;
  for (std::string name; lines >> fatbin >> name >> bytes;) found[fatbin][name] = {name, bytes};
  return found;
}

const auto context = reinterpret_cast<CUcontext>(1);

unsigned long long number(const void* address) { return reinterpret_cast<unsigned long long>(address); }

}  // namespace

extern "C" {

CUresult CUDAAPI cuInit(unsigned) { return CUDA_SUCCESS; }
CUresult CUDAAPI cuGetErrorString(CUresult error, const char** text) {
  *text = error == CUDA_ERROR_NOT_FOUND ? "named symbol not found" : nullptr;
  return CUDA_SUCCESS;
}
CUresult CUDAAPI cuDeviceGet(CUdevice* device, int ordinal) {
  *device = ordinal;
  return CUDA_SUCCESS;
}
CUresult CUDAAPI cuDeviceGetAttribute(int* value, CUdevice_attribute attribute, CUdevice) {
  *value = attribute == CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR               ? 9
           : attribute == CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT                 ? 132
           : attribute == CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR ? 233472
                                                                                   : 0;
  return CUDA_SUCCESS;
}
CUresult CUDAAPI cuDevicePrimaryCtxRetain(CUcontext* found, CUdevice device) {
  std::printf("context of %d\n", device);
  *found = context;
  return CUDA_SUCCESS;
}
static thread_local CUcontext current = nullptr;
CUresult CUDAAPI cuCtxSetCurrent(CUcontext now) {
  current = now;
  return CUDA_SUCCESS;
}
CUresult CUDAAPI cuCtxGetCurrent(CUcontext* found) {
  *found = current;
  return CUDA_SUCCESS;
}
CUresult CUDAAPI cuCtxGetDevice(CUdevice* device) {
  *device = 0;
  return current ? CUDA_SUCCESS : CUDA_ERROR_INVALID_CONTEXT;
}

CUresult CUDAAPI cuLibraryLoadData(CUlibrary* library, const void* code, CUjit_option*, void**, unsigned,
                                   CUlibraryOption*, void**, unsigned) {
  static auto& all = *new std::map<size_t, Library>(libraries());
  uint64_t header[2];
  std::memcpy(header, code, sizeof header);  // the magic number, versions and its own size; the size of the rest
  const auto found = all.find(header[1] + 16);
  if (static_cast<uint32_t>(header[0]) != 0xba55ed50 || found == all.end()) return CUDA_ERROR_INVALID_IMAGE;
  *library = reinterpret_cast<CUlibrary>(&found->second);
  return CUDA_SUCCESS;
}
CUresult CUDAAPI cuLibraryGetKernel(CUkernel* kernel, CUlibrary library, const char* name) {
  auto& all = *reinterpret_cast<Library*>(library);
  const auto found = all.find(name);
  if (found == all.end()) return CUDA_ERROR_NOT_FOUND;
  *kernel = reinterpret_cast<CUkernel>(&found->second);
  return CUDA_SUCCESS;
}
CUresult CUDAAPI cuKernelSetAttribute(CUfunction_attribute attribute, int value, CUkernel, CUdevice device) {
  std::printf("attribute %d of device %d is %d\n", attribute, device, value);
  return CUDA_SUCCESS;
}
CUresult CUDAAPI cuLaunchKernelEx(const CUlaunchConfig* config, CUfunction function, void** arguments, void**) {
  const auto& kernel = *reinterpret_cast<Kernel*>(function);
  std::printf("%s, grid %u %u %u, threads %u %u %u, %u bytes, stream %llx\n", kernel.name.c_str(), config->gridDimX,
              config->gridDimY, config->gridDimZ, config->blockDimX, config->blockDimY, config->blockDimZ,
              config->sharedMemBytes, number(config->hStream));
  for (unsigned i = 0; i < config->numAttrs; ++i)
    std::printf("  launch attribute %d: %u\n", config->attrs[i].id, config->attrs[i].value.clusterDim.x);
  std::printf("  parameters ");
  for (size_t at = 0; at < kernel.parameter_bytes; ++at)
    std::printf("%02x", static_cast<unsigned char*>(arguments[0])[at]);
  std::printf("\n");
  return CUDA_SUCCESS;
}

CUresult CUDAAPI cuTensorMapEncodeTiled(CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank, void* at,
                                        const cuuint64_t* sizes, const cuuint64_t* strides, const cuuint32_t* box,
                                        const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle swizzle,
                                        CUtensorMapL2promotion, CUtensorMapFloatOOBfill) {
  std::printf("tensor map %d %u %llx %d:", type, rank, number(at), swizzle);
  for (cuuint32_t i = 0; i < rank; ++i)
    std::printf(" %llu %llu %u", static_cast<unsigned long long>(sizes[i]),
                static_cast<unsigned long long>(i ? strides[i - 1] : 0), box[i]);
  std::printf("\n");
  std::memset(map, 7, sizeof *map);
  return CUDA_SUCCESS;
}
CUresult CUDAAPI cuMemAlloc(CUdeviceptr* memory, size_t bytes) {
  std::printf("%zu bytes\n", bytes);
  *memory = CUdeviceptr{77} << 32;
  return CUDA_SUCCESS;
}
CUresult CUDAAPI cuMemFree(CUdeviceptr memory) {
  std::printf("free %llx\n", memory);
  return CUDA_SUCCESS;
}
CUresult CUDAAPI cuMemHostAlloc(void** memory, size_t bytes, unsigned flags) {
  std::printf("%zu bytes of the host, flags %u\n", bytes, flags);
  *memory = reinterpret_cast<void*>(CUdeviceptr{78} << 32);
  return CUDA_SUCCESS;
}
CUresult CUDAAPI cuMemcpy2DAsync(const CUDA_MEMCPY2D* copy, CUstream stream) {
  std::printf("copy %llx %zu %llx %zu %zu %zu, memory %d %d, stream %llx\n", copy->dstDevice, copy->dstPitch,
              copy->srcDevice, copy->srcPitch, copy->WidthInBytes, copy->Height, copy->dstMemoryType,
              copy->srcMemoryType, number(stream));
  return CUDA_SUCCESS;
}
CUresult CUDAAPI cuMemsetD8Async(CUdeviceptr memory, unsigned char value, size_t bytes, CUstream stream) {
  std::printf("set %llx %d %zu, stream %llx\n", memory, value, bytes, number(stream));
  return CUDA_SUCCESS;
}
CUresult CUDAAPI cuStreamCreate(CUstream* stream, unsigned flags) {
  std::printf("stream, flags %u\n", flags);
  *stream = reinterpret_cast<CUstream>(32);
  return CUDA_SUCCESS;
}
CUresult CUDAAPI cuStreamSynchronize(CUstream stream) {
  std::printf("wait %llx\n", number(stream));
  return CUDA_SUCCESS;
}
}
