// Choosing tokens, and what the host asks of a device beside that: a stream, page-locked memory, copies.
#include <algorithm>

#include "core/attributes.h"
#include "cuda/common/launcher.h"
#include "cuda/sampling/choose.cuh"

namespace quantmoe {
namespace {

// Blocks of a row, a power of two. All of them run at once with all other rows' blocks.
cudaError_t blocks_of(int batch, int* blocks) {
  int device, multiprocessors;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
  *blocks = 1;
  while (error == cudaSuccess && *blocks < kMostBlocks && 2 * *blocks * batch <= 2 * multiprocessors) *blocks *= 2;
  return error;
}

template <typename T>
cudaError_t launch(ChoiceParams params, int blocks, cudaStream_t stream) {
  void* given[] = {&params};
  const dim3 grid(blocks, params.choice.batch);
  const auto kernel = reinterpret_cast<const void*>(choose<T>);
  return blocks == 1 ? cudaLaunchKernel(kernel, grid, kChoiceThreads, given, 0, stream)
                     : cudaLaunchCooperativeKernel(kernel, grid, kChoiceThreads, given, 0, stream);
}

}  // namespace
}  // namespace quantmoe

using namespace quantmoe;

int qm_cuda_launch_choice(const qm_cuda_choice* choice, void* stream, char* err) {
  if (choice->vocabulary < 1 || choice->vocabulary > 1 << kIdBits)
    return fail(err, QM_UNSUPPORTED, "a vocabulary of %d tokens, expected 1 to %d", choice->vocabulary, 1 << kIdBits);
  if (choice->batch < 1 || choice->batch > 65535)
    return fail(err, QM_UNSUPPORTED, "%d rows, expected 1 to 65535", choice->batch);
  const auto queue = static_cast<cudaStream_t>(stream);
  auto* const listed = static_cast<uint64_t*>(choice->workspace);
  auto* const maxima = reinterpret_cast<uint32_t*>(listed + size_t{kListed} * choice->batch);
  auto* const rows = reinterpret_cast<ChoiceRow*>(maxima + size_t{kChoiceThreads} * choice->batch);
  ChoiceParams params{*choice, rows, maxima, listed, 3};
  if (!(choice->bias || choice->allowed || choice->counts || choice->history)) params.choice.scores = nullptr;
  while (1 << params.id_bits < choice->vocabulary) params.id_bits += 3;
  if (params.choice.top_k >= choice->vocabulary) params.choice.top_k = 0;
  int blocks;
  cudaError_t error = blocks_of(choice->batch, &blocks);
  if (error == cudaSuccess) error = cudaMemsetAsync(rows, 0, choice->batch * sizeof(ChoiceRow), queue);
  if (error == cudaSuccess)
    error = choice->type == QM_F32   ? launch<float>(params, blocks, queue)
            : choice->type == QM_F16 ? launch<half>(params, blocks, queue)
                                     : launch<nv_bfloat16>(params, blocks, queue);
  return report(error, err);
}

int qm_cuda_open_stream(void** stream, char* err) {
  return report(cudaStreamCreateWithFlags(reinterpret_cast<cudaStream_t*>(stream), cudaStreamNonBlocking), err);
}
int qm_cuda_wait(void* stream, char* err) {
  return report(cudaStreamSynchronize(static_cast<cudaStream_t>(stream)), err);
}
int qm_cuda_allocate(size_t bytes, void** memory, char* err) {
  const int status = report(cudaMalloc(memory, bytes), err);
  if (status) cudaGetLastError();  // or the engine takes it for its own
  return status;
}
int qm_cuda_free(void* memory, char* err) { return report(cudaFree(memory), err); }
int qm_cuda_host_memory(size_t bytes, void** memory, char* err) {
  return report(cudaHostAlloc(memory, bytes, cudaHostAllocPortable), err);
}
int qm_cuda_copy(void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width, size_t height,
                 void* stream, char* err) {
  return report(cudaMemcpy2DAsync(to, to_pitch, from, from_pitch, width, height, cudaMemcpyDefault,
                                  static_cast<cudaStream_t>(stream)),
                err);
}
