// Choosing tokens, and what the host asks of a device beside that: a stream, page-locked memory, copies.
#include <algorithm>

#include "core/attributes.h"
#include "cuda/common/launcher.h"
#include "cuda/sampling/choose.cuh"

namespace quantmoe {
namespace {

struct Places {  // in the workspace
  size_t maxima, listed, scores, end;
};
Places places_of(const qm_cuda_choice_problem& problem) {
  const size_t batch = problem.batch, maxima = (batch * sizeof(ChoiceRow) + 255) / 256 * 256;
  const size_t listed = maxima + batch * kChoiceThreads * sizeof(uint32_t);
  const size_t scores = listed + batch * kListed * sizeof(uint64_t);
  return {maxima, listed, scores, scores + batch * problem.vocabulary * sizeof(float)};
}

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
  const dim3 grid(blocks, params.problem.batch);
  const auto kernel = reinterpret_cast<const void*>(choose<T>);
  return blocks == 1 ? cudaLaunchKernel(kernel, grid, kChoiceThreads, given, 0, stream)
                     : cudaLaunchCooperativeKernel(kernel, grid, kChoiceThreads, given, 0, stream);
}

}  // namespace
}  // namespace quantmoe

using namespace quantmoe;

size_t qm_cuda_choice_bytes(const qm_cuda_choice_problem* problem) { return places_of(*problem).end; }

int qm_cuda_launch_choice(const qm_cuda_choice_problem* problem, const qm_cuda_choice_tensors* tensors, void* stream,
                          char* err) {
  if (problem->vocabulary < 1 || problem->vocabulary > 1 << kIdBits)
    return fail(err, QM_UNSUPPORTED, "a vocabulary of %d tokens, expected 1 to %d", problem->vocabulary, 1 << kIdBits);
  if (problem->batch < 1 || problem->batch > 65535)
    return fail(err, QM_UNSUPPORTED, "%d rows, expected 1 to 65535", problem->batch);
  const auto queue = static_cast<cudaStream_t>(stream);
  const Places places = places_of(*problem);
  const auto at = static_cast<char*>(tensors->workspace);
  const bool adjusts = tensors->bias || tensors->allowed || tensors->counts || tensors->history;
  ChoiceParams params{*problem,
                      *tensors,
                      reinterpret_cast<ChoiceRow*>(at),
                      reinterpret_cast<uint32_t*>(at + places.maxima),
                      reinterpret_cast<uint64_t*>(at + places.listed),
                      adjusts ? reinterpret_cast<float*>(at + places.scores) : nullptr,
                      3};
  while (1 << params.id_bits < problem->vocabulary) params.id_bits += 3;
  if (params.problem.top_k >= problem->vocabulary) params.problem.top_k = 0;
  int blocks;
  cudaError_t error = blocks_of(problem->batch, &blocks);
  if (error == cudaSuccess) error = cudaMemsetAsync(at, 0, problem->batch * sizeof(ChoiceRow), queue);
  if (error == cudaSuccess)
    error = problem->type == QM_F32   ? launch<float>(params, blocks, queue)
            : problem->type == QM_F16 ? launch<half>(params, blocks, queue)
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
