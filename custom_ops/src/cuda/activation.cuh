// The activation functions of op.def, in f32.
#pragma once
#include "cuda/kernels.cuh"
#include "cuda/ptx.cuh"

namespace quantmoe {

// 1 / (1 + e^-z); 0 for z below -87.3, where it is less than 2^-126.
__device__ inline float Sigmoid(float z) { return Reciprocal(1.f + Exp2(-1.44269504f * z)); }
__device__ inline float Silu(float z) { return z * Sigmoid(z); }

// Not inlined, like all that is not silu: code that is not there need not be fetched, and decode is short.
static __device__ __noinline__ float Activate1(int kind, float z) {
  switch (kind) {
    case k_activation_silu:
      return Silu(z);
    case k_activation_gelu:
      return 0.5f * z * (1.f + erff(z * 0.70710678f));
    case k_activation_gelu_tanh:
      return 0.5f * z * (1.f + tanhf(0.79788456f * (z + 0.044715f * z * z * z)));
    default:
      return z > 0.f ? z * z : (z == z ? 0.f : z);  // relu2
  }
}

static __device__ __noinline__ float ActivateOther(const Activation& f, float gate, float up) {
  if (!f.gated) return Activate1(f.kind, up);
  if (f.kind == k_activation_swiglu_oai) {  // the comparisons keep NaN, fminf would drop it
    float g = gate > f.limit ? f.limit : gate;
    float u = up > f.limit ? f.limit : up < -f.limit ? -f.limit : up;
    return g * Sigmoid(f.alpha * g) * (u + 1.f);
  }
  if (f.kind == k_activation_swiglu_step) {
    float g = Silu(gate);
    float u = up > f.limit ? f.limit : up < -f.limit ? -f.limit : up;
    return (g > f.limit ? f.limit : g) * u;
  }
  return Activate1(f.kind, gate) * up;
}

// gate and up of one feature; ungated layers pass up twice.
__device__ inline float Activate(const Activation& f, float gate, float up) {
  if (f.kind == k_activation_silu && f.gated) return Silu(gate) * up;
  return ActivateOther(f, gate, up);
}

}  // namespace quantmoe
