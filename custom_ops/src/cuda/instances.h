// The instantiated kernels: gate_up.cu, down.cu and wgmma.cu hold the code for symmetric int4, *_any.cu that for other
// formats, one file a compiler process.
#pragma once
#include "cuda/kernels.cuh"

namespace quantmoe {

constexpr int kWgmmaThreads = 384;
using GemmKernel = void (*)(GemmParams);

// The kernel of a plan; T is the type of the activations, per_block the groups in 64 columns (2 or 1).
template <typename T>
GemmKernel GateUpKernel(int path, const qm_projection& w, int per_block, const qm_cuda_gemm& shape);
template <typename T>
GemmKernel DownKernel(int path, const qm_projection& w, int per_block, const qm_cuda_gemm& shape);
template <typename T>
GemmKernel GateUpKernelAny(int path, const qm_projection& w, int per_block, const qm_cuda_gemm& shape);
template <typename T>
GemmKernel DownKernelAny(int path, const qm_projection& w, int per_block, const qm_cuda_gemm& shape);
// QM_CUDA_WGMMA only.
template <typename T>
GemmKernel WgmmaKernel(bool down, const qm_projection& w, int per_block, int tokens);
template <typename T>
GemmKernel WgmmaKernelAny(bool down, const qm_projection& w, int per_block, int tokens);

}  // namespace quantmoe
