// The inner loop of the mma.sync kernels: a warp's private stream of weights.
//
// Every lane copies with cp.async exactly the bytes it will read itself (the layout gives each lane 16 bytes of a unit,
// and a token's matching 16-byte pieces), so the pipeline needs no barrier: a warp waits for its own copies only, runs
// ahead across tiles and experts, and blocks meet only to add up the parts of K.
//
// Scales multiply the f32 products of a unit, not the weights: exact for every scale type, and for the few tokens of a
// tile cheaper than multiplying each fragment. For one token tile the zero point leaves the inner loop as well: sum (q
// - 8) x = sum (base + q) x - (base + 8) sum x, where one mma with ones gives sum x for all panels.
#pragma once
#include "cuda/dequant.cuh"
#include "cuda/kernels.cuh"

namespace quantmoe {

// MT 16-row panels, NT 8-token tiles; GS groups in a unit (2 for groups of 32, else 1); Scale, the scales' type.
template <typename T, typename Scale, int MT, int NT, int GS>
struct Stream {
  static constexpr int kScaleBytes = 4 * GS;  // a lane's: rows g and g + 8, 16 bits each
  static constexpr int kScalesAt = MT * 512, kTokensAt = kScalesAt + MT * 32 * kScaleBytes;
  static constexpr int kStageBytes = StageBytes(MT, NT, kScaleBytes);

  int lane, g, t;
  uint32_t codes_at, scales_at;  // this lane's bytes in the first stage of the warp's ring
  uint64_t once;
  // What is copied next: this lane's bytes of a unit of the first panel.
  const uint8_t *codes, *scales;
  const T* tokens[NT];  // null: zero
  int k, last, columns_left, panel_bytes,
      scale_panel_bytes;  // columns_left: from the lane's first to the end of the row

  __device__ explicit Stream(uint8_t* rings) {
    lane = threadIdx.x % 32;
    g = lane / 4;
    t = lane % 4;
    const uint32_t ring = SharedAddress(rings) + (threadIdx.x / 32) * kStages * kStageBytes;
    codes_at = ring + lane * 16;
    scales_at = ring + kScalesAt + lane * kScaleBytes;
    once = EvictFirstPolicy();
    // Opaque from here on, or the compiler derives them from threadIdx again in every turn.
    asm volatile("" : "+r"(codes_at), "+r"(scales_at), "+r"(lane), "+r"(g), "+r"(t));
  }
  // Points at unit k_ of panels [panel, panel + MT) of an expert; panels past the end repeat the last.
  __device__ void SeekWeights(const Weights& w, const uint8_t* expert, int panel, int k_) {
    k = k_;
    panel = min(panel, w.panels - 1);
    last = w.panels - 1 - panel;
    panel_bytes = w.units * 512;
    scale_panel_bytes = w.blocks * 8 * kScaleBytes;
    codes = expert + (static_cast<int64_t>(panel) * w.units + k) * 512 + lane * 16;
    scales = expert + w.scales_at + (panel * w.blocks * 8 + g) * kScaleBytes;
  }
  __device__ void SeekTokens(int n, const T* row, int x_columns) {
    tokens[n] = row == nullptr ? nullptr : row + k * kUnit + t * 8;
    columns_left = x_columns - k * kUnit - t * 8;
  }

  __device__ void CopyWeights(int stage, int block_shift) {
    const uint32_t to = codes_at + stage * kStageBytes, scales_to = scales_at + stage * kStageBytes;
    const uint8_t* s = scales + (k >> block_shift) * (8 * kScaleBytes);
    const uint8_t* c = codes;
#pragma unroll
    for (int m = 0; m < MT; ++m) {
      CopyAsync16Once(to + m * 512, c, once);
      CopyAsyncSmall<kScaleBytes>(scales_to + m * 32 * kScaleBytes, s);
      if (m < last) c += panel_bytes, s += scale_panel_bytes;
    }
    codes += 512;
  }
  __device__ void CopyTokens(int stage, int n_tiles) {
    const uint32_t to = codes_at + stage * kStageBytes + kTokensAt;
#pragma unroll
    for (int n = 0; n < NT; ++n) {
      if (NT > 1 && n >= n_tiles) break;
      // A null row stays near null and is never read.
      const bool valid = reinterpret_cast<uintptr_t>(tokens[n]) >= kNullEnd;
      CopyAsync16(to + n * 1024, tokens[n], valid && columns_left > 0);
      CopyAsync16(to + n * 1024 + 512, tokens[n] + 32, valid && columns_left > 32);
      tokens[n] += kUnit;
    }
    columns_left -= kUnit;
    ++k;
  }
  static constexpr uintptr_t kNullEnd = 1 << 20;

  // acc += scales * (codes x tokens) * factor of the column (2t, 2t + 1) of a stage, for the first N token tiles.
  template <int N, bool kFactor = false>
  __device__ void Consume(int stage, float (&acc)[MT][NT][4], const float* factor = nullptr) const {
    constexpr bool kSums = N == 1;
    const uint32_t base = codes_at + stage * kStageBytes;
    uint4 q[MT], x[N][2];
    uint32_t scale[MT][GS];
#pragma unroll
    for (int m = 0; m < MT; ++m) {
      q[m] = Load16(base + m * 512);
#pragma unroll
      for (int s = 0; s < GS; ++s) scale[m][s] = Load4(scales_at + stage * kStageBytes + m * 32 * kScaleBytes + 4 * s);
    }
#pragma unroll
    for (int n = 0; n < N; ++n) {
      x[n][0] = Load16(base + kTokensAt + n * 1024);
      x[n][1] = Load16(base + kTokensAt + n * 1024 + 512);
    }
    float part[MT][N][4], sum[4];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (half == 0 || GS == 2) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          sum[i] = 0.f;
#pragma unroll
          for (int m = 0; m < MT; ++m)
#pragma unroll
            for (int n = 0; n < N; ++n) part[m][n][i] = 0.f;
        }
      }
      if constexpr (kSums) {
        constexpr uint32_t one = Half<T>::kOne;
        const uint32_t ones[4] = {one, one, one, one};
        Half<T>::Mma(sum, ones, x[0][half].x, x[0][half].y);
        Half<T>::Mma(sum, ones, x[0][half].z, x[0][half].w);
      }
#pragma unroll
      for (int m = 0; m < MT; ++m) {
        uint32_t a[4];
        DequantInt4<T, !kSums>(half ? q[m].z : q[m].x, a);
#pragma unroll
        for (int n = 0; n < N; ++n) Half<T>::Mma(part[m][n], a, x[n][half].x, x[n][half].y);
        DequantInt4<T, !kSums>(half ? q[m].w : q[m].y, a);
#pragma unroll
        for (int n = 0; n < N; ++n) Half<T>::Mma(part[m][n], a, x[n][half].z, x[n][half].w);
      }
      if (half == 1 || GS == 2) {
#pragma unroll
        for (int m = 0; m < MT; ++m) {
          const uint32_t s = scale[m][GS == 2 ? half : 0];
          const float low = Half<Scale>::Low(s), high = Half<Scale>::High(s);
#pragma unroll
          for (int n = 0; n < N; ++n) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
              float p = part[m][n][i];
              if constexpr (kSums) p -= Half<T>::kInt4ZeroValue * sum[i % 2];
              if constexpr (kFactor) p *= factor[i % 2];
              acc[m][n][i] += (i < 2 ? low : high) * p;
            }
          }
        }
      }
    }
  }

  __device__ static uint4 Load16(uint32_t at) {
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "r"(at)
                 : "memory");
    return v;
  }
  __device__ static uint32_t Load4(uint32_t at) {
    uint32_t v;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(at) : "memory");
    return v;
  }
};

}  // namespace quantmoe
