// Tensor maps for the copy engine. cuTensorMapEncodeTiled is a function of the driver that asks nothing of a GPU.
#pragma once
#include <cudaTypedefs.h>
#include <cuda_runtime_api.h>

#include <cstdint>
#include <cstdio>
#include <initializer_list>

#include "quantmoe/quant_moe.h"

namespace quantmoe {

// A tensor of values of 1 or 2 bytes in device memory, the innermost dimension first. sizes: of each dimension. bytes:
// from one index to the next, of each dimension except the first, multiples of 16. box: the part that is copied.
// swizzle: within 128 bytes. The part of a box outside of the tensor is zero.
inline int make_tensor_map(CUtensorMap* map, const void* at, int value_bytes, std::initializer_list<cuuint64_t> sizes,
                           std::initializer_list<cuuint64_t> strides, std::initializer_list<cuuint32_t> box,
                           bool swizzle, char* err) {
  static const auto encode = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult found{};
    cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &found);
    return reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(function);
  }();
  const cuuint32_t steps[] = {1, 1, 1};
  const CUresult result =
      encode ? encode(map, value_bytes == 1 ? CU_TENSOR_MAP_DATA_TYPE_UINT8 : CU_TENSOR_MAP_DATA_TYPE_UINT16,
                      static_cast<cuuint32_t>(sizes.size()), const_cast<void*>(at), sizes.begin(), strides.begin(),
                      box.begin(), steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
                      swizzle ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_NONE,
                      CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE)
             : CUDA_ERROR_NOT_FOUND;
  if (result == CUDA_SUCCESS) return QM_OK;
  std::snprintf(err, QM_ERROR_SIZE, "CUDA: cuTensorMapEncodeTiled: error %d", static_cast<int>(result));
  return QM_INVALID;
}

}  // namespace quantmoe
