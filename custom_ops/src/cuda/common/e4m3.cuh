// Numbers as e4m3 codes times a step (quant_moe.def, Activations).
#pragma once
#include <stdint.h>

namespace quantmoe {

struct E4m3Step {
  float step = 1.f;
  float inverse = 1.f;  // 0 where it does not serve for quotients

  E4m3Step() = default;
  // most: the largest magnitude, which may be infinite or NaN: then the step is NaN. stored: the step, if not 0.
  __device__ explicit E4m3Step(float most, float stored = 0.f) {
    step = stored != 0.f ? stored : __fdiv_rn(most, 448.f);
    if (step == 0.f) step = 1.f;
    if (!(most < __int_as_float(0x7f800000))) step = __int_as_float(0x7fffffff);
    inverse = step > 0x1p-100f && step < 0x1p100f ? __frcp_rn(step) : 0.f;
  }
  // v / step, rounded: an estimate, and the rest of v that corrects it to the nearest (Markstein). Steps at the edge of
  // f32, and steps that are not a number, divide. Beyond the largest code, and perhaps beyond f32, the estimate is
  // enough.
  __device__ float quotient(float v) const {
    if (inverse == 0.f) return __fdiv_rn(v, step);
    const float q = v * inverse, corrected = fmaf(fmaf(-q, step, v), inverse, q);
    return fabsf(q) > 512.f ? q : corrected;
  }
  // Codes of two columns, the first in the low byte.
  __device__ uint32_t pair_of(float first, float second) const {
    uint16_t codes;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(codes) : "f"(quotient(second)), "f"(quotient(first)));
    return codes;
  }
};

}  // namespace quantmoe
