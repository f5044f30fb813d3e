// The activation functions of op.def, in f32.
#pragma once
#include "cuda/common/kernels.cuh"
#include "cuda/common/ptx.cuh"

namespace quantmoe {

__device__ inline float silu(float z) { return z * sigmoid(z); }

__device__ inline float relu2(float z) { return z > 0.f ? z * z : (z == z ? 0.f : z); }
__device__ inline float swiglu_oai(const Activation& activation, float gate, float up) {
  // the comparisons keep NaN, fminf would drop it
  const float g = gate > activation.limit ? activation.limit : gate;
  const float u = up > activation.limit ? activation.limit : up < -activation.limit ? -activation.limit : up;
  return g * sigmoid(activation.alpha * g) * (u + 1.f);
}

// cap tanh(z / cap)
__device__ inline float softcap(float z, float cap) { return cap * tanhf(z / cap); }
__device__ inline float swiglu_tanh(const Activation& activation, float gate, float up) {
  return softcap(gate, activation.alpha) * sigmoid(gate) * softcap(up, activation.limit);
}

// Not inlined, like all that is not silu: code that is not there need not be fetched, and decode is short.
static __device__ __noinline__ float activate1(int kind, float z) {
  switch (kind) {
    case k_activation_silu:
      return silu(z);
    case k_activation_gelu:
      return 0.5f * z * (1.f + erff(z * 0.70710678f));
    case k_activation_gelu_tanh:
      return 0.5f * z * (1.f + tanhf(0.79788456f * (z + 0.044715f * z * z * z)));
    default:
      return relu2(z);
  }
}

static __device__ __noinline__ float activate_other(const Activation& activation, float gate, float up) {
  if (!activation.gated) return activate1(activation.kind, up);
  if (activation.kind == k_activation_swiglu_oai) return swiglu_oai(activation, gate, up);
  if (activation.kind == k_activation_swiglu_tanh) return swiglu_tanh(activation, gate, up);
  if (activation.kind == k_activation_swiglu_step) {
    float g = silu(gate);
    float u = up > activation.limit ? activation.limit : up < -activation.limit ? -activation.limit : up;
    return (g > activation.limit ? activation.limit : g) * u;
  }
  return activate1(activation.kind, gate) * up;
}

// gate and up of one feature; ungated layers pass up twice.
__device__ inline float activate(const Activation& activation, float gate, float up) {
  if (activation.kind == k_activation_silu && activation.gated) return silu(gate) * up;
  return activate_other(activation, gate, up);
}

}  // namespace quantmoe
