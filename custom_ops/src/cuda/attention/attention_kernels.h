// The attention kernels, which files of their own compile: by type of the activations and widths of keys and values,
// null where there are none.
#pragma once
#include <cstdint>

#include "cuda/attention/attention.h"

namespace quantmoe {

struct AttentionParams;
struct RingParams;
using AttentionKernel = void (*)(AttentionParams);
using RingKernel = void (*)(RingParams);

AttentionKernel few_kernel(int32_t type, int keys, int values);
AttentionKernel many_kernel(int32_t type, int keys, int values);
AttentionKernel wide_kernel(int32_t type, int keys, int values, int rows);
RingKernel ring_kernel(int32_t type, int keys, int values);
// The same over caches of codes.
AttentionKernel few_codes_kernel(int32_t type, int keys, int values);
AttentionKernel many_codes_kernel(int32_t type, int keys, int values);
AttentionKernel wide_codes_kernel(int32_t type, int keys, int values, int rows);
// Of nodes with `selected`, over both caches. size: of keys and of values.
AttentionKernel few_lists_kernel(int32_t type, int size, bool codes);
AttentionKernel many_lists_kernel(int32_t type, int size, bool codes);
AttentionKernel wide_lists_kernel(int32_t type, int size, bool codes);
// Of latent attention: on mma.sync, with the plan's stages; on wgmma; new keys to the cache where many tokens come.
// lists: of nodes with `selected`.
AttentionKernel latent_kernel(int32_t type, int stages, bool lists);
AttentionKernel latent_wide_kernel(int32_t type, bool lists);
AttentionKernel latent_append_kernel(int32_t type);
// Of keys that are their values: as of latents, and what comes first.
AttentionKernel equal_kernel(int32_t type, int stages);
AttentionKernel equal_wide_kernel(int32_t type);
AttentionKernel equal_append_kernel(int32_t type);

// The instance of a kernel's template <typename T, int DK, int DV, ..>; the last arguments are kCodes and kLists.
#define QM_ATTENTION_INSTANCE(kernel, ...) \
  return type == QM_BF16 ? kernel<__nv_bfloat16, __VA_ARGS__> : kernel<__half, __VA_ARGS__>

}  // namespace quantmoe
