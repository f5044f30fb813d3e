// Lists of slots in tiles of many rows, whose tokens have lists of their own. A tile has the stages of all slots,
// so tokens read together what they select together. A list is a mask of each stage, and a stage that no token of the
// tile selects is passed over. So a tile never reads more than without lists. Rows that read no list are another
// kernel's, which nodes without `selected` have.
//
//   stages of a window   0   1   2   3  ..
//   token 0              x       x             a bit for each slot
//   token 1              x
//   visited              x       x             the others are not read
#pragma once
#include "cuda/attention/attention.cuh"

namespace quantmoe {

// A lane's rows, and a bit for each slot of a stage that they see.
template <int MT, int kKeys>
struct SlotsOfLists {
  uint32_t bits[MT][2][kKeys / 32];

  template <int N>
  __device__ void mask(int m, float (&s)[N][4]) const {
    static_assert(N * 8 == kKeys, "all of a stage");
#pragma unroll
    for (int h = 0; h < 2; ++h)
#pragma unroll
      for (int n = 0; n < N; ++n)
#pragma unroll
        for (int i = 0; i < 2; ++i)
          if (!(bits[m][h][n / 4] >> (n % 4 * 8 + threadIdx.x % 4 * 2 + i) & 1)) s[n][2 * h + i] = -INFINITY;
  }
  __device__ bool sees(int m, int h, int key) const {
    const uint32_t word = key < 32 ? bits[m][h][0] : bits[m][h][kKeys / 32 - 1];
    return word >> key % 32 & 1;
  }
};

// The masks of a window of stages, of all tokens of a tile. All of it is in shared memory, as registers are short.
// kWords: room for masks. `at` has list_window_bytes(kWords).
template <int kKeys, int kWords, int kThreads>
struct ListWindow {
  static constexpr int kOfStage = kKeys / 32;
  const AttentionParams& params;
  const BatchRow& batch;
  int batch_row, kv_head, first_row, rows;  // rows: of the tile
  uint32_t at;  // [visited of 32 stages, of the next 32, first stage, stages], places, masks

  // Of each list the first place whose slot is not before a stage.
  __device__ void begin(int stage) const {
    if (const int token = threadIdx.x; token < tokens()) {
      const auto* list = reinterpret_cast<const uint32_t*>(list_at(token));
      int low = 0, high = params.list_size;
      while (stage && low < high) {
        const int middle = (low + high) / 2;
        if (list[middle] < static_cast<uint32_t>(stage * kKeys))
          low = middle + 1;
        else
          high = middle;
      }
      store4(place_at(token), low);
    }
    if (threadIdx.x == 0) store16(at, {0, 0, static_cast<uint32_t>(stage), 0});
    __syncthreads();
  }
  // The first stage from `stage` on that a token sees, or `end`. All threads call it, and have read earlier masks.
  __device__ int find(int stage, int end) const {
    uint4 window = load16(at);
    while (stage < end) {
      const int first = static_cast<int>(window.z), stages = static_cast<int>(window.w);
      if (stage >= first + stages) {
        window = fill(stage, end);
        continue;
      }
      const uint64_t left = (window.x | static_cast<uint64_t>(window.y) << 32) >> (stage - first);
      if (left) return stage + __ffsll(static_cast<long long>(left)) - 1;
      stage = first + stages;
    }
    return end;
  }
  // What a lane's rows, row, row + 8, .. of all rows, see of a stage that `find` found.
  template <int MT>
  __device__ SlotsOfLists<MT, kKeys> read(int stage, int row) const {
    const uint2 window = load8(at + 8);
    SlotsOfLists<MT, kKeys> found;
#pragma unroll
    for (int i = 0; i < 2 * MT; ++i) {
      const int token = min((row + 8 * i) / params.group - first_token(), tokens() - 1);
      const int word = (token * static_cast<int>(window.y) + stage - static_cast<int>(window.x)) * kOfStage;
#pragma unroll
      for (int w = 0; w < kOfStage; ++w) found.bits[i / 2][i % 2][w] = load4(mask_at(word + w));
    }
    return found;
  }

 private:
  __device__ int first_token() const { return first_row / params.group; }
  __device__ int tokens() const { return (first_row + rows - 1) / params.group + 1 - first_token(); }
  __device__ const int* list_at(int token) const {
    return list_of(params, batch, batch_row, kv_head, first_token() + token);
  }
  __device__ uint32_t place_at(int token) const { return at + 16 + token * 4; }
  __device__ uint32_t mask_at(int word) const { return at + 16 + kMostListTokens * 4 + word * 4; }

  // The window from `stage` on, as it is at `at`.
  __device__ uint4 fill(int stage, int end) const {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, tokens = this->tokens();
    const int stages = min(min(64, kWords / (tokens * kOfStage)), end - stage);
    __syncthreads();  // the last window is read
    for (int i = threadIdx.x; i < tokens * stages * kOfStage; i += kThreads) store4(mask_at(i), 0);
    __syncthreads();
    for (int token = warp; token < tokens; token += kThreads / 32)
      add_list(token, token * stages * kOfStage, stage * kKeys, stages * kKeys);
    __syncthreads();
    uint32_t visited[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int own = half * 32 + lane;
      uint32_t any = 0;
#pragma unroll 1
      for (int token = 0; own < stages && token < tokens; ++token)
#pragma unroll
        for (int w = 0; w < kOfStage; ++w) any |= load4(mask_at((token * stages + own) * kOfStage + w));
      visited[half] = __ballot_sync(~0u, any != 0);
    }
    const uint4 window = {visited[0], visited[1], static_cast<uint32_t>(stage), static_cast<uint32_t>(stages)};
    if (threadIdx.x == 0) store16(at, window);
    return window;
  }
  // A warp's: sets the bits of a token's next slots, up to `slots` slots from `first` on. Bits of one word are added up
  // first.
  __device__ void add_list(int token, int first_word, int first, int slots) const {
    constexpr int kAtOnce = 4;
    const int* list = list_at(token);
    const int lane = threadIdx.x % 32;
    int place = static_cast<int>(load4(place_at(token)));
#pragma unroll 1
    for (bool more = true; more;) {
      uint32_t found[kAtOnce];
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        const int own = place + 32 * j + lane;
        found[j] = own < params.list_size ? list[own] : -1;
      }
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        const uint32_t slot = found[j] - static_cast<uint32_t>(first);
        const bool in = more && slot < static_cast<uint32_t>(slots);
        const uint32_t word = in ? slot / 32 : ~0u, before = __shfl_up_sync(~0u, word, 1);
        uint32_t bits = in ? 1u << slot % 32 : 0;
#pragma unroll
        for (int d = 1; d < 32; d *= 2) {
          const uint32_t others = __shfl_down_sync(~0u, bits, d), other = __shfl_down_sync(~0u, word, d);
          if (lane + d < 32 && other == word) bits |= others;
        }
        if (in && (lane == 0 || before != word)) or_shared(mask_at(first_word + static_cast<int>(word)), bits);
        const int count = __popc(__ballot_sync(~0u, in));
        place += count, more = count == 32;
      }
    }
    if (lane == 0) store4(place_at(token), place);
  }
};

}  // namespace quantmoe
