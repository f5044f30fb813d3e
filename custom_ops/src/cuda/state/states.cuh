// What the kernels share that keep a state of each row of the batch: CausalConv, GatedDelta, StateSpace.
#pragma once
#include "cuda/common/ptx.cuh"

namespace quantmoe {

// What a batch row says. One that asks for tokens that are not there counts nothing, and its output is NaN.
struct TokenRow {
  int begin, count;
  bool from_past, valid;
  __device__ bool has(int token) const { return token >= begin && token < begin + count; }
};
__device__ inline TokenRow read_token_row(const int* rows, int b, int tokens) {
  TokenRow r{rows[3 * b], rows[3 * b + 1], rows[3 * b + 2] != 0, true};
  r.valid = r.begin >= 0 && r.count >= 0 && rows[3 * b + 2] >= 0 && r.begin <= tokens - r.count;
  if (!r.valid) r.begin = r.count = 0;
  return r;
}
// Of a row the last tokens, whose past is what a launch before has made.
__device__ inline TokenRow tail_of(const TokenRow& row, int tail) {
  const int own = min(row.count, tail);
  return {row.begin + row.count - own, own, true, row.valid};
}
__device__ inline float not_a_number() { return __int_as_float(0x7fffffff); }
__device__ inline float sigmoid_of(float x) { return 1.f / (1.f + expf(-x)); }
// log(1 + e^x)
__device__ inline float softplus(float x) { return (x > 0.f ? x : 0.f) + log1pf(expf(-fabsf(x))); }

// Asks for what a later load finds in L1. global: a multiple of 2.
__device__ inline void touch(const void* global) {
  [[maybe_unused]] uint16_t unused;
  asm volatile("ld.global.u16 %0, [%1];" : "=h"(unused) : "l"(global) : "memory");
}

// Four values, which may be part of a wider tensor and lie at any address of their type. to: aligned as all four.
template <typename T>
__device__ inline void read_four(T (&to)[4], const T* from) {
  if (reinterpret_cast<uintptr_t>(from) % sizeof(to) == 0)
    *reinterpret_cast<uint2*>(to) = *reinterpret_cast<const uint2*>(from);
  else
#pragma unroll
    for (int i = 0; i < 4; ++i) to[i] = from[i];
}

}  // namespace quantmoe
