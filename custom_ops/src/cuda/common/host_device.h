// A constexpr function of the plans that kernels call, too.
#pragma once

#ifdef __CUDACC__
#define QM_CONSTEXPR __host__ __device__ constexpr
#else
#define QM_CONSTEXPR constexpr
#endif
