// The activation functions of op.def, in f32.
#pragma once
#include "cuda/common/kernels.cuh"
#include "cuda/common/ptx.cuh"

namespace quantmoe {

__device__ inline float silu(float z) { return z * sigmoid(z); }

__device__ inline float relu2(float z) { return z > 0.f ? z * z : (z == z ? 0.f : z); }
// The comparisons keep NaN, which fminf would drop.
__device__ inline float at_most(float z, float limit) { return z > limit ? limit : z; }
__device__ inline float clamp_to(float z, float limit) { return z > limit ? limit : z < -limit ? -limit : z; }
__device__ inline float swiglu_oai(const Activation& activation, float gate, float up) {
  const float g = at_most(gate, activation.limit);
  return g * sigmoid(activation.alpha * g) * (clamp_to(up, activation.limit) + 1.f);
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
  if (activation.kind == k_activation_swiglu_step)
    return at_most(silu(gate), activation.limit) * clamp_to(up, activation.limit);
  if (activation.kind == k_activation_swiglu_clamp)
    return silu(at_most(gate, activation.limit)) * clamp_to(up, activation.limit);
  return activate1(activation.kind, gate) * up;
}

// gate and up of one feature; ungated layers pass up twice.
__device__ inline float activate(const Activation& activation, float gate, float up) {
  if (activation.kind == k_activation_silu && activation.gated) return silu(gate) * up;
  return activate_other(activation, gate, up);
}

}  // namespace quantmoe
