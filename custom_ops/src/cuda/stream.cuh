// The inner loop of the mma.sync kernels: a warp's private stream of weights.
//
// Every lane copies with cp.async exactly the bytes it will read itself (the layout gives each lane 16 bytes of a unit, and a
// token's matching 16-byte pieces), so the pipeline needs no barrier: a warp waits for its own copies only, runs ahead
// across tiles and experts, and blocks meet only to add up the parts of K.
//
// Scales multiply the f32 products of a unit, not the weights: exact for every scale type, and at most 32 tokens a tile
// cheaper than multiplying each fragment.
#pragma once
#include "cuda/dequant.cuh"
#include "cuda/kernels.cuh"

namespace quantmoe {

// MT 16-row panels, NT 8-token tiles; GS groups in a unit (2 for groups of 32, else 1).
template <typename T, int MT, int NT, int GS>
struct Stream {
  static constexpr int kScaleBytes = 4 * GS;  // a lane's: rows g and g + 8, 16 bits each

  uint32_t shared;  // this warp's ring
  int stage_bytes, stages;
  int write = 0, read = 0;
  int columns;  // 8-token tiles: token columns a stage holds
  int lane, g, t;
  uint64_t once;

  __device__ Stream(uint8_t* ring, int stages_, int columns_)
      : stage_bytes(StageBytes(MT, columns_, kScaleBytes)), stages(stages_), columns(columns_) {
    lane = threadIdx.x % 32;
    g = lane / 4;
    t = lane % 4;
    shared = SharedAddress(ring) + (threadIdx.x / 32) * stages * stage_bytes;
    once = EvictFirstPolicy();
  }

  // Codes and scales of unit k of panels [panel, panel + MT) of an expert; panels past the end repeat the last.
  __device__ void CopyWeights(const Weights& w, const uint8_t* expert, int panel, int k) {
    uint32_t at = shared + write * stage_bytes + lane * 16;
    uint32_t scale_at = shared + write * stage_bytes + MT * 512 + lane * kScaleBytes;
    const int block = k >> w.block_shift;
#pragma unroll
    for (int m = 0; m < MT; ++m) {
      const int p = min(panel + m, w.panels - 1);
      CopyAsync16Once(at + m * 512, expert + (static_cast<uint32_t>(p * w.units + k) * 512u + lane * 16), once);
      CopyAsyncSmall<kScaleBytes>(scale_at + m * 32 * kScaleBytes,
                                  expert + w.scales_at + ((p * w.blocks + block) * 8 + g) * kScaleBytes);
    }
  }
  // A lane's 16-byte pieces of its tokens' unit k. rows[n]: the token row of column 8n + g, or null.
  __device__ void CopyTokens(const T* const (&rows)[NT], int n_tiles, int x_columns, int k) {
    const uint32_t at = shared + write * stage_bytes + MT * (512 + 32 * kScaleBytes) + lane * 16;
    if (g >= columns) return;
#pragma unroll
    for (int n = 0; n < NT; ++n) {
      if (n >= n_tiles) break;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int c = k * kUnit + half * 32 + t * 8;
        const bool valid = rows[n] != nullptr && c < x_columns;
        CopyAsync16(at + n * 1024 + half * HalfStride(), valid ? rows[n] + c : rows[n], valid);
      }
    }
  }
  __device__ int HalfStride() const { return min(columns, 8) * 64; }
  __device__ void Commit() {
    CopyAsyncCommit();
    write = write + 1 == stages ? 0 : write + 1;
  }
  // Ring depth is a run-time number, wait_group takes a constant.
  __device__ void Wait() {
    switch (stages) {
      case 2: CopyAsyncWait<0>(); break;
      case 3: CopyAsyncWait<1>(); break;
      case 4: CopyAsyncWait<2>(); break;
      case 5: CopyAsyncWait<3>(); break;
      case 6: CopyAsyncWait<4>(); break;
      case 7: CopyAsyncWait<5>(); break;
      default: CopyAsyncWait<6>(); break;
    }
  }
  // acc += scales * (codes x tokens) for the oldest stage, the first N token tiles.
  template <int N>
  __device__ void Consume(int scale_type, float (&acc)[MT][NT][4]) {
    const uint32_t base = shared + read * stage_bytes;
    read = read + 1 == stages ? 0 : read + 1;
    uint4 codes[MT], x[N][2];
    uint32_t scales[MT][GS];
#pragma unroll
    for (int m = 0; m < MT; ++m) {
      codes[m] = Load16(base + m * 512 + lane * 16);
      const uint32_t at = base + MT * 512 + (m * 32 + lane) * kScaleBytes;
#pragma unroll
      for (int s = 0; s < GS; ++s) scales[m][s] = Load4(at + 4 * s);
    }
    const uint32_t tokens = base + MT * (512 + 32 * kScaleBytes) + lane * 16;
#pragma unroll
    for (int n = 0; n < N; ++n) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        x[n][half] = make_uint4(0, 0, 0, 0);
        if (g < columns) x[n][half] = Load16(tokens + n * 1024 + half * HalfStride());
      }
    }
    float part[MT][N][4];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (half == 0 || GS == 2) {
#pragma unroll
        for (int m = 0; m < MT; ++m)
#pragma unroll
          for (int n = 0; n < N; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) part[m][n][i] = 0.f;
      }
#pragma unroll
      for (int m = 0; m < MT; ++m) {
        uint32_t a[4];
        DequantInt4<T>(half ? codes[m].z : codes[m].x, a);
#pragma unroll
        for (int n = 0; n < N; ++n) Half<T>::Mma(part[m][n], a, x[n][half].x, x[n][half].y);
        DequantInt4<T>(half ? codes[m].w : codes[m].y, a);
#pragma unroll
        for (int n = 0; n < N; ++n) Half<T>::Mma(part[m][n], a, x[n][half].z, x[n][half].w);
      }
      if (half == 1 || GS == 2) {
#pragma unroll
        for (int m = 0; m < MT; ++m) {
          const uint32_t s = scales[m][GS == 2 ? half : 0];
          const bool bf16 = scale_type == 2;
          const float low = bf16 ? Half<__nv_bfloat16>::Low(s) : Half<__half>::Low(s);
          const float high = bf16 ? Half<__nv_bfloat16>::High(s) : Half<__half>::High(s);
#pragma unroll
          for (int n = 0; n < N; ++n) {
            acc[m][n][0] += low * part[m][n][0];
            acc[m][n][1] += low * part[m][n][1];
            acc[m][n][2] += high * part[m][n][2];
            acc[m][n][3] += high * part[m][n][3];
          }
        }
      }
    }
  }

  __device__ static uint4 Load16(uint32_t at) {
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(at) : "memory");
    return v;
  }
  __device__ static uint32_t Load4(uint32_t at) {
    uint32_t v;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(at) : "memory");
    return v;
  }
};

}  // namespace quantmoe
