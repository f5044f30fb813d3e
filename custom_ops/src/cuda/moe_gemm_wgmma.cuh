// One grouped GEMM of the layer on wgmma (sm_90a), for many tokens: weights from registers, tokens from shared memory.
//
// A block computes 256 rows (16 panels) x up to 96 tokens of one expert. One producer warpgroup gathers token rows into
// a ring of 128-byte-swizzled stages; two consumer warpgroups hold 128 rows each. A consumer warp streams the codes of
// its panels through its own cp.async ring (as in stream.cuh, no barrier), dequantizes 64 columns ahead, and so keeps
// the ALUs busy while the tensor cores work on the 64 before.
//
// The order of a lane's columns (FORMAT.md 3.2) is not memory order within 32 columns, so tokens are stored permuted:
// MoePrepare writes x, the gate_up epilogue writes h that way.
#pragma once
#include "cuda/activation.cuh"
#include "cuda/dequant.cuh"
#include "cuda/instances.h"
#include "cuda/wgmma.cuh"

namespace quantmoe {

// 128 tokens would need more registers than there are: ptxas then serializes wgmma (C7512).
constexpr int kTileTokens = 96, kTilePanels = 16;
constexpr int kTokenStages = 7, kTokenStageBytes = kTileTokens * 128;
constexpr int kProducerLag = 2;  // stages in flight before their arrival is announced
constexpr int kCodeStages = 4;
__host__ __device__ constexpr int CodeStageBytes(int gs) { return 2 * (512 + 32 * 4 * gs); }
// Staging of a warpgroup's results: a row per token, padded by 16 bytes against bank conflicts.
__host__ __device__ constexpr int ResultRowBytes(bool down) { return (down ? 256 : 128) + 16; }
__host__ __device__ constexpr int WgmmaSharedBytes(int gs, bool down) {
  return 1024 + kTokenStages * kTokenStageBytes + 8 * kCodeStages * CodeStageBytes(gs) +
         2 * kTileTokens * ResultRowBytes(down);
}

// Where column c of a 32-column block of tokens is stored.
__device__ inline int StoredColumn(int c) { return (c & ~31) | (c & 4) << 2 | (c & 2) << 2 | (c & 24) >> 2 | (c & 1); }

template <typename T, typename Scale, int GS, bool down>
struct WgmmaConsumer {
  const GemmParams& p;
  uint32_t codes_at, full, empty, tokens_at;
  uint8_t* results;
  int g, t, lane, group, warp;  // warpgroup 0 or 1, warp of it
  int turn = 0;                 // token stages consumed so far
  uint64_t once;
  int* pairs;  // shared, [kTileTokens]: of the tile's tokens, and the router's weights of them
  float* weights;
  float acc[2][kTileTokens / 2];

  static __device__ uint32_t Twice(uint32_t pair, int which) {
    if constexpr (std::is_same_v<T, Scale>) return __byte_perm(pair, 0, which ? 0x3232 : 0x1010);
    const float f = which ? Half<Scale>::High(pair) : Half<Scale>::Low(pair);
    return Half<T>::Pack(f, f);
  }

  const uint8_t *codes[2], *scales[2];  // of this lane, in the panels being streamed

  __device__ __forceinline__ void Copy(int k) {
    const Weights& w = p.weights;
    if (k < w.units) {
      const uint32_t to = codes_at + k % kCodeStages * CodeStageBytes(GS);
      const int block = (k >> w.block_shift) * 32 * GS;
#pragma unroll
      for (int b = 0; b < 2; ++b) {
        CopyAsync16Once(to + b * 512 + lane * 16, codes[b] + k * 512, once);
        CopyAsyncSmall<4 * GS>(to + 1024 + (b * 32 + lane) * 4 * GS, scales[b] + block);
      }
    }
    CopyAsyncCommit();
  }
  // Points at a unit of work and asks for its first codes.
  __device__ __forceinline__ void Begin(const uint8_t* expert, int panel) {
    const Weights& w = p.weights;
#pragma unroll
    for (int b = 0; b < 2; ++b) {
      const int row = min(panel + 4 * b + warp, w.panels - 1);
      codes[b] = expert + static_cast<int64_t>(row) * w.units * 512 + lane * 16;
      scales[b] = expert + w.scales_at + (row * w.blocks * 8 + g) * 4 * GS;
    }
#pragma unroll 1
    for (int k = 0; k < kCodeStages - 1; ++k) Copy(k);
  }

  template <int N>
  __device__ __forceinline__ void Multiply() {
    const int units = p.weights.units;
#pragma unroll
    for (int b = 0; b < 2; ++b)
#pragma unroll
      for (int i = 0; i < N / 2; ++i) acc[b][i] = 0.f;

    uint32_t q[2][4], scale[2][GS];
    uint32_t first[2][2][4], second[2][2][4];  // A operands of columns 0..31 and 32..63 of a unit: [block of rows][k16]
    auto dequantize = [&](int half, uint32_t(&a)[2][2][4]) {
#pragma unroll
      for (int b = 0; b < 2; ++b) {
        const uint32_t pair = scale[b][GS == 2 ? half : 0];
        const uint32_t low = Twice(pair, 0), high = Twice(pair, 1);
#pragma unroll
        for (int step = 0; step < 2; ++step) {
          DequantInt4<T, true>(q[b][2 * half + step], a[b][step]);
#pragma unroll
          for (int i = 0; i < 4; ++i) a[b][step][i] = Half<T>::Mul(a[b][step][i], i % 2 ? high : low);
        }
      }
    };
    auto multiply = [&](uint64_t tokens, uint32_t(&a)[2][2][4]) {
      WgmmaFence();
#pragma unroll
      for (int step = 0; step < 2; ++step)
#pragma unroll
        for (int b = 0; b < 2; ++b) Wgmma<T, N>(acc[b], a[b][step], tokens + 2 * step);
      WgmmaCommit();
    };
    // One group of products is in flight while the operands of the next are made.
#pragma unroll 1
    for (int k = 0; k < units; ++k, ++turn) {
      CopyAsyncWait<kCodeStages - 2>();
      const uint32_t from = codes_at + k % kCodeStages * CodeStageBytes(GS);
#pragma unroll
      for (int b = 0; b < 2; ++b) {
        asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];"
                     : "=r"(q[b][0]), "=r"(q[b][1]), "=r"(q[b][2]), "=r"(q[b][3])
                     : "r"(from + b * 512 + lane * 16)
                     : "memory");
#pragma unroll
        for (int i = 0; i < GS; ++i)
          asm volatile("ld.shared.u32 %0, [%1];"
                       : "=r"(scale[b][i])
                       : "r"(from + 1024 + (b * 32 + lane) * 4 * GS + 4 * i)
                       : "memory");
      }
      dequantize(0, first);
      Copy(k + kCodeStages - 1);
      const int stage = turn % kTokenStages;
      BarrierWait(full + 8 * stage, turn / kTokenStages & 1);
      const uint64_t tokens = Descriptor(tokens_at + stage * kTokenStageBytes);
      multiply(tokens, first);
      WgmmaWait<1>();  // `second` is free, and the stage it was multiplied with
      if (k > 0) Release(turn - 1);
      dequantize(1, second);
      multiply(tokens + 4, second);
      WgmmaWait<1>();  // `first` is free
    }
    WgmmaWait<0>();
    Release(turn - 1);
  }
  __device__ __forceinline__ void Release(int used) {
    if (lane == 0) BarrierArrive(empty + 8 * (used % kTokenStages));
  }

  // Results of this warpgroup: columns of `out` from `column`, a row per token.
  template <int N>
  __device__ __forceinline__ void Store(const Tile& tile, const uint8_t* expert, int panel) {
    const Weights& w = p.weights;
    uint8_t* stage = results + group * kTileTokens * ResultRowBytes(down);
    NamedBarrier(1 + group, 128);  // pairs and weights are there
    float bias[2][2] = {};
    if (w.bias_at) {
#pragma unroll
      for (int b = 0; b < 2; ++b) {
        const int row = min(panel + 4 * b + warp, w.panels - 1) * 16 + g;
        const float* from = reinterpret_cast<const float*>(expert + w.bias_at) + row;
        bias[b][0] = from[0], bias[b][1] = from[8];
      }
    }
#pragma unroll
    for (int i = 0; i < N / 4; ++i) {
      const int token = 8 * (i / 2) + 2 * t + i % 2;
      const float weight = weights[token];  // of columns past the end: anything, they are not stored
      T* to = reinterpret_cast<T*>(stage + token * ResultRowBytes(down));
#pragma unroll
      for (int b = 0; b < 2; ++b) {
        const int local = 4 * b + warp;
        const float low = acc[b][i / 2 * 4 + i % 2], high = acc[b][i / 2 * 4 + 2 + i % 2];
        if constexpr (down) {
          to[local * 16 + g] = Half<T>::From(weight * (low + bias[b][0]));
          to[local * 16 + g + 8] = Half<T>::From(weight * (high + bias[b][1]));
        } else {
          // Panels past the end (padding of K for the next GEMM) are zero.
          const float h = Activate(p.activation, weight * low + bias[b][0], weight * high + bias[b][1]);
          to[StoredColumn(local * 8 + g)] = Half<T>::From(panel + local < w.panels ? h : 0.f);
        }
      }
    }
    NamedBarrier(1 + group, 128);
    constexpr int kRow = down ? 128 : 64, kChunks = kRow / 8;
    const int column = panel * (down ? 16 : 8);
    for (int i = threadIdx.x % 128; i < tile.count * kChunks; i += 128) {
      const int token = i / kChunks, c = i % kChunks * 8;
      if (column + c >= p.out_columns) continue;
      const int at = down ? pairs[token] : tile.first + token;
      *reinterpret_cast<uint4*>(static_cast<T*>(p.out) + static_cast<int64_t>(at) * p.out_columns + column + c) =
          *reinterpret_cast<const uint4*>(stage + token * ResultRowBytes(down) + c * 2);
    }
    NamedBarrier(1 + group, 128);
  }

  // Unit by unit; the next unit's first codes are on their way while this one's results are stored.
  template <int N>
  __device__ __forceinline__ void Run(const Tile& tile, const uint8_t* expert, int panel, const uint8_t* next_expert,
                                      int next_panel) {
    const int token = threadIdx.x % 128;
    if (token < tile.count) {  // asked for here, used after the products
      pairs[token] = p.sorted_pairs[tile.first + token];
      weights[token] = p.weight_here ? p.routing.topk_weights[pairs[token]] : 1.f;
    }
    Multiply<N>();
    if (next_expert != nullptr) Begin(next_expert, next_panel);
    Store<N>(tile, expert, panel);
  }
};

template <typename T, typename Scale, int GS, bool down>
__global__ void __launch_bounds__(kWgmmaThreads, 1) MoeGemmWgmma(const __grid_constant__ GemmParams p) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) uint8_t raw[];
  LaunchDependents();
  uint8_t* shared = raw + (1024 - SharedAddress(raw) % 1024) % 1024;
  __shared__ uint64_t barriers[2 * kTokenStages];
  __shared__ int pairs[2][kTileTokens];
  __shared__ float router_weights[2][kTileTokens];
  const uint32_t full = SharedAddress(barriers), empty = full + 8 * kTokenStages;
  if (threadIdx.x == 0) {
    for (int i = 0; i < kTokenStages; ++i) {
      BarrierInit(full + 8 * i, 128);
      BarrierInit(empty + 8 * i, 8);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  WaitForPrevious();
  const int blocks = (p.weights.panels + kTilePanels - 1) / kTilePanels;
  const int units = p.tiles[p.max_tiles].count * blocks;
  const int warpgroup = threadIdx.x / 128;
  if (warpgroup == 0) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    int turn = 0;
    const int chunk = threadIdx.x % 8, first_row = threadIdx.x / 8;
    const uint32_t to = SharedAddress(shared) + first_row * 128 + ((chunk ^ (first_row & 7)) << 4);
    for (int unit = blockIdx.x; unit < units; unit += gridDim.x) {
      const Tile tile = p.tiles[unit / blocks];
      const T* rows[kTileTokens / 16];
#pragma unroll
      for (int i = 0; i < kTileTokens / 16; ++i) {
        const int row = min(first_row + 16 * i, tile.count - 1);  // rows past the end repeat the last
        const int at = down ? tile.first + row : p.sorted_pairs[tile.first + row] / p.x_divisor;
        rows[i] = static_cast<const T*>(p.x) + static_cast<int64_t>(at) * p.x_columns + chunk * 8;
      }
      for (int k = 0; k < p.weights.units; ++k, ++turn) {
        const int stage = turn % kTokenStages;
        if (turn >= kTokenStages) BarrierWait(empty + 8 * stage, (turn / kTokenStages + 1) & 1);
#pragma unroll
        for (int i = 0; i < kTileTokens / 16; ++i)
          if (16 * i < tile.count) CopyAsync16(to + stage * kTokenStageBytes + i * 2048, rows[i] + k * kUnit, true);
        CopyAsyncCommit();
        if (turn >= kProducerLag) {
          CopyAsyncWait<kProducerLag>();
          FenceAsyncProxy();
          BarrierArrive(full + 8 * ((turn - kProducerLag) % kTokenStages));
        }
      }
    }
    CopyAsyncWait<0>();
    FenceAsyncProxy();
    for (int i = max(0, turn - kProducerLag); i < turn; ++i) BarrierArrive(full + 8 * (i % kTokenStages));
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    const int warp = threadIdx.x / 32 - 4;
    uint8_t* codes = shared + kTokenStages * kTokenStageBytes;
    WgmmaConsumer<T, Scale, GS, down> c{p};
    c.tokens_at = SharedAddress(shared);
    c.codes_at = SharedAddress(codes) + warp * kCodeStages * CodeStageBytes(GS);
    c.results = codes + 8 * kCodeStages * CodeStageBytes(GS);
    c.full = full, c.empty = empty;
    c.lane = threadIdx.x % 32, c.g = c.lane / 4, c.t = c.lane % 4;
    c.group = warpgroup - 1, c.warp = warp % 4;
    c.pairs = pairs[c.group], c.weights = router_weights[c.group];
    c.once = EvictFirstPolicy();
    Tile tile{};
    const uint8_t* expert = nullptr;
    int panel = 0;
    auto locate = [&](int unit) {
      expert = nullptr;
      if (unit >= units) return;
      tile = p.tiles[unit / blocks];
      expert = p.weights.rows + tile.expert * p.weights.row_bytes;
      panel = unit % blocks * kTilePanels + c.group * 8;
    };
    locate(blockIdx.x);
    if (expert != nullptr) c.Begin(expert, panel);
    for (int unit = blockIdx.x; unit < units; unit += gridDim.x) {
      const Tile now = tile;
      const uint8_t* now_expert = expert;
      const int now_panel = panel;
      locate(unit + gridDim.x);
      if (now.count <= 16) {
        c.template Run<16>(now, now_expert, now_panel, expert, panel);
      } else if (now.count <= 32) {
        c.template Run<32>(now, now_expert, now_panel, expert, panel);
      } else if (now.count <= 48) {
        c.template Run<48>(now, now_expert, now_panel, expert, panel);
      } else if (now.count <= 64) {
        c.template Run<64>(now, now_expert, now_panel, expert, panel);
      } else {
        c.template Run<96>(now, now_expert, now_panel, expert, panel);
      }
    }
  }
#endif
}

}  // namespace quantmoe
