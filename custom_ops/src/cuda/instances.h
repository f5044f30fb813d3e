// The instantiated kernels: gate_up.cu, down.cu and wgmma.cu hold the code for symmetric int4, *_any.cu that for other
// formats, one file a compiler process.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "cuda/dequant.cuh"
#include "cuda/kernels.cuh"

namespace quantmoe {

constexpr int kWgmmaThreads = 384;
using GemmKernel = void (*)(GemmParams);

// body(Format) of the format whose weights these are, but for symmetric int4 and floats; per_block as below.
template <class Body>
GemmKernel ForFormat(const qm_projection& w, int per_block, const Body& body) {
  switch (KindOf(w)) {
    case WeightKind::kInt4Zero:
      return per_block == 2 ? body(Format<WeightKind::kInt4Zero, 2>{}) : body(Format<WeightKind::kInt4Zero, 1>{});
    case WeightKind::kInt8:
      return body(Format<WeightKind::kInt8>{});
    case WeightKind::kInt8Zero:
      return body(Format<WeightKind::kInt8Zero>{});
    case WeightKind::kFp8:
      return body(Format<WeightKind::kFp8>{});
    case WeightKind::kMxfp4:
      return body(Format<WeightKind::kMxfp4>{});
    case WeightKind::kNvfp4:
      return body(Format<WeightKind::kNvfp4>{});
    case WeightKind::kInt4:
    case WeightKind::kFloat:
      break;
  }
  return nullptr;  // no default: the compiler names a format without a case (-Werror=switch, CMakeLists.txt)
}
// The same of symmetric int4.
template <class Body>
GemmKernel ForInt4(const qm_projection& w, int per_block, const Body& body) {
  if (w.scale_type == k_scale_type_bf16)
    return per_block == 2 ? body(Int4<__nv_bfloat16, 2>{}) : body(Int4<__nv_bfloat16, 1>{});
  return per_block == 2 ? body(Int4<__half, 2>{}) : body(Int4<__half, 1>{});
}

// The kernel of a plan, null where none is compiled that is what it says; T is the type of the activations, per_block
// the groups in 64 columns (2 or 1).
template <typename T>
GemmKernel GateUpKernel(int path, const qm_projection& w, int per_block, const qm_cuda_gemm& shape);
template <typename T>
GemmKernel DownKernel(int path, const qm_projection& w, int per_block, const qm_cuda_gemm& shape);
template <typename T>
GemmKernel GateUpKernelAny(int path, const qm_projection& w, int per_block, const qm_cuda_gemm& shape);
template <typename T>
GemmKernel DownKernelAny(int path, const qm_projection& w, int per_block, const qm_cuda_gemm& shape);
// shape.packed only: nvfp4, and e4m3.
template <typename T>
GemmKernel PackedKernel(bool down, int path, const qm_projection& w, const qm_cuda_gemm& shape);
template <typename T>
GemmKernel PackedE4m3Kernel(bool down, int path, const qm_cuda_gemm& shape);
// QM_CUDA_WGMMA only.
template <typename T>
GemmKernel WgmmaKernel(bool down, const qm_projection& w, int per_block, const qm_cuda_gemm& shape);
template <typename T>
GemmKernel WgmmaKernelAny(bool down, const qm_projection& w, int per_block, const qm_cuda_gemm& shape);
// A linear's: QM_CUDA_DECODE where nothing is packed, and QM_CUDA_DENSE.
template <typename T>
GemmKernel LinearDecodeKernel(const qm_projection& w, int per_block, const qm_cuda_gemm& shape);
template <typename T>
GemmKernel LinearDecodeKernelAny(const qm_projection& w, int per_block, const qm_cuda_gemm& shape);
using LinearKernel = void (*)(LinearParams);
template <typename T>
LinearKernel DenseKernel(const qm_projection& w, const qm_cuda_gemm& shape);
template <typename T>
LinearKernel DenseKernelAny(const qm_projection& w, const qm_cuda_gemm& shape);
// The same of floats, and QM_CUDA_STREAM.
template <typename T>
GemmKernel FloatKernel(int path, const qm_cuda_gemm& shape);
template <typename T>
LinearKernel DenseFloatKernel(const qm_cuda_gemm& shape);
// QM_CUDA_FP8 only.
template <typename T>
GemmKernel Fp8Kernel(bool down, const qm_projection& w, const qm_cuda_gemm& shape);

}  // namespace quantmoe
