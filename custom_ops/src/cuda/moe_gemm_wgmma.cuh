// One grouped GEMM of the layer on wgmma (sm_90a), for many tokens: weights from registers, tokens from shared memory.
//
// A block computes 256 or 512 rows (16 or 32 panels) x up to kTokens tokens of one expert. One producer warpgroup
// gathers token rows into a ring of 128-byte-swizzled stages; two consumer warpgroups hold half of the rows each. A
// consumer warp streams the codes of its panels through its own cp.async ring (as in stream.cuh, no barrier),
// dequantizes 64 columns ahead, and so keeps the ALUs busy while the tensor cores work on the 64 before.
//
// The order of a lane's columns (FORMAT.md 3.2) is not memory order within 32 columns, so tokens are stored permuted:
// MoePrepare writes x, the gate_up epilogue writes h that way.
#pragma once
#include "cuda/activation.cuh"
#include "cuda/dequant.cuh"
#include "cuda/instances.h"
#include "cuda/wgmma.cuh"

namespace quantmoe {

// Block shapes: up to 144 tokens (an expert with 128 on average seldom has more), one block a multiprocessor; up to 48
// tokens, two blocks, which hide each other's waits when there is little to multiply; up to 24 tokens and 512 rows, of
// 4-bit codes, where that leaves each block something to do.
template <typename F, bool down, int kTokens>
struct WgmmaTile {
  static constexpr WgmmaSizes kSizes = WgmmaSizesOf(kTokens, Sizes<F>::kBits, Sizes<F>::kLaneBytes, down);
  static constexpr bool kSmall = kTokens <= 48;
  static constexpr int kPanels = kSizes.panels;  // of a warp
  static constexpr int kTilePanels = 8 * kPanels;
  static constexpr int kBlocks = kSmall ? 2 : 1;
  static constexpr int kBuffers = kSmall ? 1 : 2;  // of dequantized weights
  static constexpr int kStages = kSizes.token_stages, kStageBytes = kTokens * 128;
  static constexpr int kLag = kStages - 3;  // token stages in flight before their arrival is announced
  static constexpr int kCodeStages = kSizes.code_stages, kCodeStageBytes = kSizes.code_stage_bytes;
  static constexpr int kResultRowBytes = kSizes.result_row_bytes;
  // With barriers, works, pairs and weights; a block's, and a multiprocessor's less 1024 a block.
  static_assert(kSizes.shared_bytes + 16 * kStages + 64 + 16 * kTokens <= (kSmall ? 115712 : 232448));
};

// What a warpgroup does next: columns [k_begin, k_end) * 64, a part of K, of its panels of an expert (-1: nothing) for
// the tokens of a tile.
struct Work {
  int expert, panel, first, count, k_begin, k_end, part;
};

// Where column c of a 32-column block of tokens is stored.
__device__ inline int StoredColumn(int c) { return (c & ~31) | (c & 4) << 2 | (c & 2) << 2 | (c & 24) >> 2 | (c & 1); }

// What products are to be multiplied by; nvfp4's also by the global scale.
template <typename T, typename F>
__host__ __device__ constexpr float ProductFactor() {
  switch (F::kKind) {
    case WeightKind::kInt4:
    case WeightKind::kInt8:
      return 1 / kInt4Result<T>;
    case WeightKind::kInt4Zero:
    case WeightKind::kInt8Zero:
      return 1 / kInt8Result<T>;
    case WeightKind::kFp8:
      return kBf16<T> ? 0x1p56f : 1.f;
    case WeightKind::kMxfp4:
      return 1 / kMxfp4Result<T>;
    default:
      return 1 / kNvfp4Result<T>;
  }
}

template <typename T, typename F, bool down, int kTokens>
struct WgmmaConsumer {
  using Shape = WgmmaTile<F, down, kTokens>;
  using Size = Sizes<F>;
  static constexpr WeightKind kKind = F::kKind;
  static constexpr int kStages = Shape::kStages, kStageBytes = Shape::kStageBytes, kCodeStages = Shape::kCodeStages;
  static constexpr int kPanels = Shape::kPanels, kCodeStageBytes = Shape::kCodeStageBytes;
  static constexpr int kUnitBytes = 128 * Size::kBits;     // of a panel's codes
  static constexpr int kOwnPairs = (kTokens + 127) / 128;  // that a thread takes to shared memory
  static constexpr int kGroups = F::kGroups;  // scales of a row in a unit; nvfp4: those of this lane's columns
  // Panels whose scales are in registers: of formats with scales in each unit those in work.
  static constexpr int kHeld = kGroups == 2 && !Size::kRuntime ? 2 : kPanels;
  // Of 8 bits a code stage, and what is dequantized and multiplied at a time, is one panel's 64 columns instead of two
  // panels' 32: the layout has no smaller pieces.
  static constexpr bool kByPanel = Size::kBits == 8;
  static constexpr int kPieces = kByPanel ? kPanels : 1, kStagePanels = kPanels / kPieces;  // code stages of a unit
  // An even number of stages ahead: the piece copied after dequantizing one is of the same panel, known when compiled.
  static_assert(kPieces == 1 || (kPanels == 2 && kCodeStages % 2 == 1));
  const GemmParams& p;
  uint32_t full, empty, tokens_at;
  uint8_t* results;
  int group;                 // warpgroup 0 or 1
  int stage = 0, phase = 0;  // of the token ring
  uint32_t read;             // this lane's codes in the stage read next; of 8 bits, those of columns 0..31
  uint64_t once;
  // In shared memory: the unit in work, its tokens' pairs and router's weights.
  Work* now;
  int* pairs;
  float* weights;

  // The copying side: what this lane copies next, and where to. Addresses, not offsets into the ring: ptxas 13.0 makes
  // an illegal instruction of cp.async with a cache policy to register + uniform register.
  const uint8_t* codes;           // of the warp's first panel; the others are every fourth from there
  int left;                       // panels from there to the last
  const uint8_t *scales, *zeros;  // of rows lane % 8 and lane % 8 + 8 of panel lane / 8 of the warp's
  uint32_t ring, write;           // this lane's codes in the first stage; in the stage written next
  // Relative to its codes: the scales of rows g and g + 8 of the first panel; those it copies.
  int scales_from_codes, copy_scales_from_codes, lane;
  int copy_k = 0, copy_end = 0, lookahead;
  bool full_lookahead;  // the ring is full of copies; else all of a short K are under way
  bool scales_due;      // with the next copy: it is the first of a block or of the work

  __device__ const uint8_t* Expert(int expert) const { return p.weights.rows + expert * p.weights.row_bytes; }
  __device__ uint32_t NextStage(uint32_t at) const {
    return at == ring + (kCodeStages - 1) * kCodeStageBytes ? ring : at + kCodeStageBytes;
  }
  // Whether unit k of a row is the first of a block of scales.
  __device__ bool StartsBlock(int k) const { return (k & ((1u << p.weights.block_shift) - 1)) == 0; }
  __device__ bool TwoGroups() const { return Size::kRuntime ? p.weights.two_groups : kGroups == 2; }
  __device__ int ScaleLaneBytes() const { return Size::kRuntime ? p.weights.scale_bytes : Size::kScaleBytes; }
  // From the scales of a unit, in the stage of its first codes, to those of row g of panel b, and to the zero points.
  // With two panels half of the lanes copy nothing new.
  __device__ static constexpr int ScalesOf(int b) { return b * 8 * Size::kScaleBytes; }
  __device__ static constexpr int ZerosOf(int b) { return 32 * Size::kScaleBytes + b * 32; }
  // The same of a lane's first, `row` of the unit's 8 * kPanels.
  __device__ static int ZerosFromScales(int row) { return row * (4 - Size::kScaleBytes); }

  __device__ __forceinline__ void Seek(const Work& work) {
    const Weights& w = p.weights;
    const uint8_t* expert = Expert(work.expert);
    int thread = threadIdx.x % 128;
    asm volatile("" : "+r"(thread));
    const int lane = thread % 32, warp = thread / 32;
    copy_k = work.k_begin, copy_end = work.k_end, scales_due = true;
    const int panel = work.panel + warp;
    left = w.panels - panel;
    // Past the last panel any weights do, the results are not stored.
    const int row =
        (min(panel + lane / 8 % kPanels * 4, w.panels - 1) * w.blocks + (work.k_begin >> w.block_shift)) * 8 + lane % 8;
    codes = expert + (static_cast<int64_t>(panel) * w.units + copy_k) * kUnitBytes + Size::LaneAt(lane);
    scales = expert + w.scales_at + row * ScaleLaneBytes();
    if constexpr (Size::kZeroBytes > 0)
      zeros = expert + w.zeros_at + row / 8 * w.zero_bytes + (TwoGroups() ? 4 * (row % 8) : 2 * (row % 8) & ~3);
  }
  // The next code stage: `piece` of a unit. Scales come with the first columns of their block (or of the work).
  template <int piece>
  __device__ __forceinline__ void Copy() {
    if (copy_k < copy_end) {
      const bool starts = piece == 0 && scales_due;
      const uint32_t to_codes = kByPanel ? write & ~15 : write;
      const Weights& w = p.weights;
      const uint32_t code_step = 4 * kUnitBytes * w.units;
#pragma unroll
      for (int b = 0; b < kStagePanels; ++b)
#pragma unroll
        for (int i = 0; i < kUnitBytes; i += 512)
          CopyAsync16OnceIf(left, 4 * (piece + b), to_codes + b * 512 + i, codes + (piece + b) * code_step + i, once);
      if constexpr (piece == 0) {
        const uint32_t to_scales = write + copy_scales_from_codes;
        if (Size::kScaleBytes == 4 || (Size::kRuntime && w.scale_bytes == 4)) {
          CopyAsyncSmallIf<4>(starts, to_scales, scales);
        } else {
          CopyAsyncSmallIf<8>(starts, to_scales, scales);
        }
        if constexpr (Size::kZeroBytes > 0)
          CopyAsyncSmallIf<4>(starts, to_scales + ZerosOf(0) + ZerosFromScales(lane), zeros);
        if (starts) {
          scales += 8 * ScaleLaneBytes();
          if constexpr (Size::kZeroBytes > 0) zeros += w.zero_bytes;
        }
      }
      if constexpr (piece == kPieces - 1) codes += kUnitBytes, ++copy_k;
      if constexpr (piece == 0) scales_due = StartsBlock(copy_k + kPieces - 1);
      write = NextStage(write);
    }
    CopyAsyncCommit();
  }
  // Asks for the first codes of all.
  __device__ __forceinline__ void Begin(const Work& work) {
    write = ring;
    Seek(work);
#pragma unroll 1
    for (int i = 0; i < lookahead; i += kPieces) {
      Copy<0>();
      if constexpr (kPieces == 2) Copy<1>();
    }
  }

  // Scales that came with the stage read next, of panels from `panel` on, as what codes are multiplied by.
  __device__ __forceinline__ void ReadScales(int panel, uint32_t (&scale)[kHeld][kGroups][2],
                                             uint32_t (&zeros)[kHeld]) const {
    uint32_t raw[kHeld][2] = {};
#pragma unroll
    for (int b = 0; b < kHeld; ++b) {
#pragma unroll
      for (int i = 0; i < Size::kScaleBytes / 4; ++i)
        raw[b][i] = Load4(read + scales_from_codes + ScalesOf(panel + b) + 4 * i);
      if constexpr (Size::kZeroBytes > 0)  // {row g, row g + 8} of each half
        zeros[b] = __byte_perm(Load4(read + scales_from_codes + ZerosOf(panel + b) + ZerosFromScales(lane / 4)), 0,
                               TwoGroups() ? 0x3210
                               : lane & 4  ? 0x3232
                                           : 0x1010);
    }
    auto each = [&](auto factor) {  // factor(words, half, row)
#pragma unroll
      for (int b = 0; b < kHeld; ++b)
#pragma unroll
        for (int half = 0; half < kGroups; ++half)
#pragma unroll
          for (int row = 0; row < 2; ++row) scale[b][half][row] = factor(raw[b], half, row);
    };
    // 16-bit scales of type Scale; `groups` in a unit.
    auto halves = [&](auto type, int groups) {
      using Scale = decltype(type);
      each([&](const uint32_t* words, int half, int row) {
        const uint32_t first = words[0], second = words[1];  // no index that is known at run time only
        const uint32_t word = half && groups == 2 ? second : first;
        if constexpr (std::is_same_v<T, Scale> && kKind != WeightKind::kFp8)
          return Scaled(__byte_perm(word, 0, row ? 0x3232 : 0x1010));
        return Factor(row ? Half<Scale>::High(word) : Half<Scale>::Low(word));
      });
    };
    const Weights& w = p.weights;
    if constexpr (kKind == WeightKind::kInt4) {
      halves(typename F::Scale(), kGroups);
    } else if constexpr (kKind == WeightKind::kMxfp4) {
      each([](const uint32_t* words, int half, int row) { return Mxfp4Factor<T>(words[0], BytePair(2 * half + row)); });
    } else if constexpr (kKind == WeightKind::kNvfp4) {
      each([&](const uint32_t* words, int half, int row) {
        return Nvfp4Factor<T>(words[half], BytePair((lane & 2) + row));
      });
    } else {
      const int groups = 1 + TwoGroups();
      if (w.scale_type == 2) {
        halves(__nv_bfloat16(), groups);
      } else if (kKind == WeightKind::kInt4Zero || w.scale_type == 1) {
        halves(__half(), groups);
      } else if (kKind == WeightKind::kInt8 || kKind == WeightKind::kInt8Zero || w.scale_type == 0) {
        each([](const uint32_t* words, int, int row) { return Factor(__uint_as_float(words[row])); });
      } else {
        each([](const uint32_t* words, int half, int row) { return Factor(E8m0(words[0], 2 * half + row)); });
      }
    }
  }
  // A scale as what codes are multiplied by, twice in a word.
  static __device__ uint32_t Scaled(uint32_t twice) {
    if constexpr (kKind == WeightKind::kInt4 || kKind == WeightKind::kInt8) return Int4Scale<T>(twice);
    return twice;
  }
  static __device__ uint32_t Factor(float s) {
    if constexpr (kKind == WeightKind::kFp8) s *= 1 / (ProductFactor<T, F>() * kFp8Bits<T>);
    return Scaled(Half<T>::Pack(s, s));
  }

  // One panel and 64 columns, a[half][k16], or two from `panel` on and 32, a[panel][k16].
  template <int N>
  __device__ __forceinline__ void Products(float (&acc)[kPanels][kTokens / 2], int panel, uint64_t tokens,
                                           uint32_t (&a)[2][2][4], int count) {
    constexpr int kLess = N <= 16 ? N - 8 : N - 16;
    if constexpr (N > 8 && N != 24) {
      if (count <= kLess) return Products<kLess>(acc, panel, tokens, a, count);
    }
    WgmmaFence();
#pragma unroll
    for (int i = 0; i < 2; ++i)
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        if constexpr (kByPanel) {
          Wgmma<T, N>(acc[panel], a[i][j], tokens + 4 * i + 2 * j);
        } else {
          Wgmma<T, N>(acc[panel + j], a[j][i], tokens + 2 * i);
        }
      }
    WgmmaCommit();
  }
  template <int N>
  __device__ __forceinline__ void Multiply(float (&acc)[kPanels][N / 2], int count, int k_begin, int k_end,
                                           const Work& next) {
#pragma unroll
    for (int b = 0; b < kPanels; ++b)
#pragma unroll
      for (int i = 0; i < N / 2; ++i) acc[b][i] = 0.f;

    // Codes: [panel of two][step], of 8 bits [row g, row g + 8][step]. Scales of rows g and g + 8, as factors on codes,
    // twice in a word.
    uint32_t q[2][4], scale[kHeld][kGroups][2];
    uint32_t zeros[kHeld];
    // A operands as Products takes them: [buffer][panel or half][k16].
    constexpr int kBuffers = Shape::kBuffers;
    uint32_t a[kBuffers][2][2][4];
    // Half of the columns of two panels, or all of one.
    auto dequantize = [&](int panel, int half, uint32_t(&a)[2][2][4]) {
#pragma unroll
      for (int b = 0; b < 2; ++b) {
        if constexpr (kByPanel) half = b;
        const int from = (kByPanel ? panel : panel + b) % kHeld;
        const uint32_t(&factor)[2] = scale[from][kGroups == 2 ? half : 0];
        uint32_t low = 0, high = 0;
        if constexpr (Size::kZeroBytes > 0) {
          low = ZeroPoint<T, true>(zeros[from], BytePair(2 * half));
          high = ZeroPoint<T, true>(zeros[from], BytePair(2 * half + 1));
        }
#pragma unroll
        for (int step = 0; step < 2; ++step) {
          uint32_t(&to)[4] = a[b][step];
          const int s = 2 * half + step;
          if constexpr (kKind == WeightKind::kInt4) {
            DequantInt4Scaled<T>(q[b][s], factor, to);
          } else if constexpr (kKind == WeightKind::kInt8) {
            DequantInt8Scaled<T>(q[0][s], q[1][s], factor, to);
          } else {
            if constexpr (kKind == WeightKind::kInt4Zero) DequantInt4Zero<T>(q[b][s], low, high, to);
            if constexpr (kKind == WeightKind::kInt8Zero) DequantInt8<T>(q[0][s], q[1][s], low, high, to);
            if constexpr (kKind == WeightKind::kFp8) DequantFp8<T>(q[0][s], q[1][s], to);
            if constexpr (kKind == WeightKind::kMxfp4 || kKind == WeightKind::kNvfp4) DequantE2m1<T>(q[b][s], to);
            Times<T>(to, factor[0], factor[1]);
          }
        }
      }
    };
    auto load = [&](int panel) {
#pragma unroll
      for (int b = 0; b < 2; ++b) {
        if constexpr (kByPanel) {
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const uint2 v = Load8((read ^ 8 * half) + 512 * b);
            q[b][2 * half] = v.x, q[b][2 * half + 1] = v.y;
          }
        } else {
          const uint4 v = Load16(read + (panel + b) * 512);
          q[b][0] = v.x, q[b][1] = v.y, q[b][2] = v.z, q[b][3] = v.w;
        }
      }
    };
    auto arrive = [&] {  // codes of the stage read next, of its first panel or two
      if (!full_lookahead) CopyAsyncWait<0>();
      CopyAsyncWait<kCodeStages - 2>();
      __syncwarp();  // lanes read scales that others have copied, and have read those that are overwritten
      load(0);
    };
    auto refill = [&] {
      if (copy_k == copy_end && next.expert >= 0) Seek(next);
      Copy<0>();
    };
    auto advance = [&] {
      read = NextStage(read);
      arrive();
    };
    // Whether copies and loads are issued while products are in flight: measured, NOTES.md.
    constexpr bool kOverlap = kByPanel || (Shape::kSmall && kPanels == 2);
    int used = 0;  // token stage to give back
    arrive();
#pragma unroll 1
    for (int k = k_begin; k < k_end; ++k) {
      if (k == k_begin || StartsBlock(k)) ReadScales(0, scale, zeros);
      dequantize(0, 0, a[0]);
      if (!kOverlap) refill();
      BarrierWait(full + 8 * stage, phase);
      const uint64_t tokens = Descriptor(tokens_at + stage * kStageBytes);
#pragma unroll
      for (int pair = 0; pair < kPanels / 2; ++pair) {
        if (pair > 0) {
          if (kHeld < kPanels) ReadScales(2 * pair, scale, zeros);
          dequantize(2 * pair, 0, a[0]);
        }
        Products<kTokens>(acc, 2 * pair, tokens, a[0], count);
        if (kOverlap) refill();
        if constexpr (kByPanel) advance();
        WgmmaWait<kBuffers - 1>();  // the other buffer is free, and the stage it was multiplied with
        if (kBuffers == 2 && k > k_begin) Release(used);
        if constexpr (kByPanel) {
          dequantize(1, 0, a[kBuffers - 1]);
          Products<kTokens>(acc, 1, tokens, a[kBuffers - 1], count);
          Copy<1>();
        } else {
          dequantize(2 * pair, 1, a[kBuffers - 1]);
          Products<kTokens>(acc, 2 * pair, tokens + 4, a[kBuffers - 1], count);
        }
        if (pair < kPanels / 2 - 1) {
          load(2 * pair + 2);
        } else if (kOverlap) {
          advance();  // of the last unit: to the first of the next work
        }
        WgmmaWait<kBuffers - 1>();  // a[0] is free
      }
      if (kBuffers == 1) Release(stage);
      used = stage;
      if (++stage == kStages) stage = 0, phase ^= 1;
      if (!kOverlap) advance();
    }
    if (kBuffers == 1) return;
    WgmmaWait<0>();
    Release(used);
  }
  __device__ __forceinline__ void Release(int used) {
    if (OneLane()) BarrierArrive(empty + 8 * used);
  }

  // Results of this warpgroup, a row per token. Nothing here is kept in registers while the products are made: places
  // come from an opaque thread number, or the compiler computes them once, for every N, and wgmma lacks the registers.
  template <int N>
  __device__ __forceinline__ void Store(float (&acc)[kPanels][N / 2]) {
    const Weights& w = p.weights;
    int thread = threadIdx.x % 128;
    asm volatile("" : "+r"(thread));
    const int g = thread % 32 / 4, t = thread % 4, warp = thread / 32;
    uint8_t* stage = results + group * kTokens * Shape::kResultRowBytes;
    const Work work = *now;
    float bias[kPanels][2] = {};
    const float one_factor = ProductFactor<T, F>() * InputScale<F>(w, Expert(work.expert));
    float2 factor = make_float2(one_factor, one_factor);
    if constexpr (kKind == WeightKind::kNvfp4) {
      const float2 global = *reinterpret_cast<const float2*>(Expert(work.expert) + w.globals_at);
      factor.x *= global.x, factor.y *= global.y;
    }
    if (w.bias_at && work.k_begin == 0) {
#pragma unroll
      for (int b = 0; b < kPanels; ++b) {
        const int row = min(work.panel + 4 * b + warp, w.panels - 1) * 16 + g;
        const float* from = reinterpret_cast<const float*>(Expert(work.expert) + w.bias_at) + row;
        bias[b][0] = from[0], bias[b][1] = from[8];
      }
    }
#pragma unroll
    for (int i = 0; i < N / 4; ++i) {
      if (8 * (i / 2) >= work.count) break;
      const int token = 8 * (i / 2) + 2 * t + i % 2;
      const float weight = weights[token];  // of columns past the end: anything, they are not stored
      T* to = reinterpret_cast<T*>(stage + token * Shape::kResultRowBytes);
#pragma unroll
      for (int b = 0; b < kPanels; ++b) {
        const int local = 4 * b + warp;
        const float low = factor.x * acc[b][i / 2 * 4 + i % 2], high = factor.y * acc[b][i / 2 * 4 + 2 + i % 2];
        if constexpr (down) {
          to[local * 16 + g] = Half<T>::From(weight * (low + bias[b][0]));
          to[local * 16 + g + 8] = Half<T>::From(weight * (high + bias[b][1]));
        } else {
          // Panels past the end (padding of K for the next GEMM) are zero.
          const float h = Activate(p.activation, weight * low + bias[b][0], weight * high + bias[b][1]);
          to[StoredColumn(local * 8 + g)] = Half<T>::From(work.panel + local < w.panels ? h : 0.f);
        }
      }
    }
    NamedBarrier(1 + group, 128);
    // 16 bytes of a token a thread, always the same columns.
    constexpr int kRow = (down ? 64 : 32) * kPanels, kChunks = kRow / 8;
    const int c = thread % kChunks * 8, column = work.panel * (down ? 16 : 8) + c;
    if (column < p.out_columns) {
      T* out = static_cast<T*>(p.out) + column;
#pragma unroll Shape::kSmall ? 2 : 4
      for (int token = thread / kChunks; token < work.count; token += 128 / kChunks) {
        const int at = down ? pairs[token] * p.shape.warps_k + work.part : work.first + token;
        *reinterpret_cast<uint4*>(out + static_cast<int64_t>(at) * p.out_columns) =
            *reinterpret_cast<const uint4*>(stage + token * Shape::kResultRowBytes + c * 2);
      }
    }
    NamedBarrier(1 + group, 128);
  }

  // Codes are copied ahead, into the next work: its first are on their way while these results are stored.
  __device__ __forceinline__ void Run(int count, int k_begin, int k_end, const Work& next,
                                      const SortedPair (&own)[kOwnPairs]) {
    float acc[kPanels][kTokens / 2];
    Multiply<kTokens>(acc, count, k_begin, k_end, next);
    const int thread = threadIdx.x % 128;
#pragma unroll
    for (int i = 0; i < kOwnPairs; ++i)
      if (thread + 128 * i < count) {
        pairs[thread + 128 * i] = own[i].pair;
        weights[thread + 128 * i] = p.weight_here ? own[i].weight : 1.f;
      }
    NamedBarrier(1 + group, 128);  // pairs, weights and *now are there
    Store<kTokens>(acc);
  }
};

template <typename T, typename F, bool down, int kTokens>
__global__ void __launch_bounds__(kWgmmaThreads, WgmmaTile<F, down, kTokens>::kBlocks)
    MoeGemmWgmma(const __grid_constant__ GemmParams p) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using Shape = WgmmaTile<F, down, kTokens>;
  constexpr int kStages = Shape::kStages, kLag = Shape::kLag;
  extern __shared__ __align__(1024) uint8_t raw[];
  LaunchDependents();
  uint8_t* shared = raw + (1024 - SharedAddress(raw) % 1024) % 1024;
  __shared__ uint64_t barriers[2 * kStages];
  __shared__ Work now[2];
  __shared__ int pairs[2][kTokens];
  __shared__ float router_weights[2][kTokens];
  const uint32_t full = SharedAddress(barriers), empty = full + 8 * kStages;
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) {
      BarrierInit(full + 8 * i, 128);
      BarrierInit(empty + 8 * i, 8);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  WaitForPrevious();
  const int blocks = (p.weights.panels + Shape::kTilePanels - 1) / Shape::kTilePanels;
  const int parts = down ? p.shape.warps_k : 1;  // of K; MoeCombine adds them up
  const int units = p.tiles[p.max_tiles].count * blocks * parts;
  // The tiles of a group take turns with the same rows: the weights are then read from memory once for all of them.
  auto locate = [&](int unit, int group) {
    Work work{-1};
    if (unit >= units) return work;
    const int part = unit % parts;
    unit /= parts;
    const Tile any = p.tiles[unit / blocks];
    const int local = unit - any.group_first * blocks;
    const Tile tile = p.tiles[any.group_first + local % any.group_size];
    return Work{tile.expert,
                local / any.group_size * Shape::kTilePanels + group * (Shape::kTilePanels / 2),
                tile.first,
                tile.count,
                part * p.weights.units / parts,
                (part + 1) * p.weights.units / parts,
                part};
  };
  const int warpgroup = threadIdx.x / 128;
  if (warpgroup == 0) {
    if constexpr (Shape::kSmall) {
      asm volatile("setmaxnreg.dec.sync.aligned.u32 32;");
    } else {
      asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    }
    const int chunk = threadIdx.x % 8, first_row = threadIdx.x / 8;
    const uint32_t to = SharedAddress(shared) + first_row * 128 + ((chunk ^ (first_row & 7)) << 4);
    const T* x = static_cast<const T*>(p.x) + chunk * 8;
    constexpr int kRows = (kTokens + 15) / 16;  // that a thread copies
    int stage = 0, phase = 1, announced = 0, ahead = 0;
    for (int unit = blockIdx.x; unit < units; unit += gridDim.x) {
      const Work work = locate(unit, 0);
      const T* rows[kRows];
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        const int row = min(first_row + 16 * i, work.count - 1);  // rows past the end repeat the last
        const int at = down ? work.first + row : p.sorted_pairs[work.first + row].pair / p.x_divisor;
        rows[i] = x + static_cast<int64_t>(at) * p.x_columns;
      }
#pragma unroll 1
      for (int k = work.k_begin; k < work.k_end; ++k) {
        BarrierWait(empty + 8 * stage, phase);
#pragma unroll
        for (int i = 0; i < kRows; ++i)
          if (16 * i < work.count && (kTokens % 16 == 0 || first_row + 16 * i < kTokens))
            CopyAsync16(to + stage * Shape::kStageBytes + i * 2048, rows[i] + k * kUnit, true);
        CopyAsyncCommit();
        if (++stage == kStages) stage = 0, phase ^= 1;
        if (ahead == kLag) {
          CopyAsyncWait<kLag>();
          FenceAsyncProxy();
          BarrierArrive(full + 8 * announced);
          if (++announced == kStages) announced = 0;
        } else {
          ++ahead;
        }
      }
    }
    CopyAsyncWait<0>();
    FenceAsyncProxy();
    for (; ahead > 0; --ahead) {
      BarrierArrive(full + 8 * announced);
      if (++announced == kStages) announced = 0;
    }
  } else {
    if constexpr (Shape::kSmall) {
      asm volatile("setmaxnreg.inc.sync.aligned.u32 104;");
    } else {
      asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    }
    const int warp = threadIdx.x / 32 - 4;
    uint8_t* codes = shared + kStages * Shape::kStageBytes;
    WgmmaConsumer<T, F, down, kTokens> c{p};
    c.tokens_at = SharedAddress(shared);
    const int lane = threadIdx.x % 32, thread = threadIdx.x % 128;
    const int swapped = c.kByPanel ? Sizes<F>::LaneAt(lane) + lane % 2 * 8 - lane * 16 : 0;
    c.ring = SharedAddress(codes) + warp * c.kCodeStages * c.kCodeStageBytes + lane * 16 + swapped;
    const int scales_from_codes = c.kStagePanels * c.kUnitBytes - lane * 16 - swapped;
    c.scales_from_codes = scales_from_codes + lane / 4 * Sizes<F>::kScaleBytes;
    c.copy_scales_from_codes = scales_from_codes + lane * Sizes<F>::kScaleBytes;
    c.lane = lane;
    c.results = codes + 8 * c.kCodeStages * c.kCodeStageBytes;
    c.full = full, c.empty = empty;
    // Opaque from here on, or the compiler derives them from threadIdx again for every 64 columns.
    asm volatile("" : "+r"(c.ring), "+r"(c.scales_from_codes), "+r"(c.copy_scales_from_codes));
    asm volatile("" : "+r"(c.full), "+r"(c.empty));
    c.read = c.ring;
    c.lookahead = min(c.kCodeStages - 1, p.weights.units / parts * c.kPieces);
    // By a vote, or ptxas computes it from the parameters for every 64 columns.
    c.full_lookahead = __any_sync(~0u, c.lookahead == c.kCodeStages - 1);
    c.group = warpgroup - 1;
    c.now = now + c.group, c.pairs = pairs[c.group], c.weights = router_weights[c.group];
    c.once = EvictFirstPolicy();
    Work next = locate(blockIdx.x, c.group);
    if (next.expert >= 0) c.Begin(next);
    for (int unit = blockIdx.x; unit < units; unit += gridDim.x) {
      const int count = next.count, k_begin = next.k_begin, k_end = next.k_end;
      if (thread == 0) *c.now = next;
      SortedPair own[c.kOwnPairs] = {};  // asked for here, used after the products
#pragma unroll
      for (int i = 0; i < c.kOwnPairs; ++i)
        if (thread + 128 * i < count) own[i] = p.sorted_pairs[next.first + thread + 128 * i];
      next = locate(unit + gridDim.x, c.group);
      c.Run(count, k_begin, k_end, next, own);
    }
  }
#endif
}

}  // namespace quantmoe
