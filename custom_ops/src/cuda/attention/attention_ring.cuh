// Attend on wgmma (sm_90a), for many tiles of query rows. As many blocks as fit take tiles in turn. A producer
// warpgroup fills rings of stages of keys and of values; each consumer warpgroup has 64 rows of the tile. A consumer's
// scores of a stage are multiplied together with its sums over the stage before. The scores become weights while these
// sums are still in work. That goes on from one tile to the next. Consumers take turns: one multiplies while another
// one's scores become weights.
//
//               stages of kKeys slots, kRingStages of them ahead    consumer 0, 64 rows       consumer 1
//   producer    K0 V0 | K1 V1 | K2 V2 | ...                         S0                        -
//     tensor copies, 128-byte swizzle                               S1, acc += W0 V0          S0
//                                                                   W1 = weights of S1        S1, acc += W0 V0
//                                                                   S2, acc += W1 V1          W1 = weights of S1
#pragma once
#include "cuda/attention/attention_wgmma.cuh"

namespace quantmoe {

template <int DK, int DV, int kRows>
struct RingTile {
  static constexpr RingSizes kSizes = ring_sizes(kRows, DK, DV);
  static constexpr int kKeys = kSizes.keys, kConsumers = 2 * kRows;
  static constexpr int kTile = kKeys * 128;  // 64 columns of a stage
  static constexpr int kQueryBytes = kRows * DK * 2, kKeyBytes = kKeys * DK * 2, kValueBytes = kKeys * DV * 2;
  // Where they begin: buffers of queries, then the rings.
  static constexpr int kKeysAt = kSizes.query_buffers * kQueryBytes, kValuesAt = kKeysAt + kRingStages * kKeyBytes;
  static_assert(1024 + kValuesAt + kRingStages * kValueBytes == kSizes.shared_bytes);  // 1024: to align
};

// As find_largest and weigh, in shorter chains: two of a row each. One warp a scheduler waits for its own results.
template <int N>
__device__ inline void find_largest_of_row(const float (&s)[N][4], float (&largest)[2]) {
  float most[2][2] = {{largest[0], -INFINITY}, {largest[1], -INFINITY}};
#pragma unroll
  for (int n = 0; n < N; ++n)
#pragma unroll
    for (int h = 0; h < 2; ++h) most[h][n % 2] = fmaxf(most[h][n % 2], fmaxf(s[n][2 * h], s[n][2 * h + 1]));
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    largest[h] = fmaxf(most[h][0], most[h][1]);
    largest[h] = fmaxf(largest[h], __shfl_xor_sync(~0u, largest[h], 1));
    largest[h] = fmaxf(largest[h], __shfl_xor_sync(~0u, largest[h], 2));
  }
}
template <int N>
__device__ inline void weigh_row(float (&s)[N][4], const float (&largest)[2], float (&most)[2], float (&sum)[2],
                                 float (&factor)[2]) {
  float base[2], added[2][2] = {{0, 0}, {0, 0}};
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    base[h] = largest[h] == -INFINITY ? 0.f : largest[h];  // nothing seen yet
    factor[h] = fast_exp2(most[h] - base[h]);
    most[h] = largest[h];
  }
#pragma unroll
  for (int n = 0; n < N; ++n)
#pragma unroll
    for (int h = 0; h < 2; ++h)
#pragma unroll
      for (int i = 0; i < 2; ++i) added[h][i] += s[n][2 * h + i] = fast_exp2(s[n][2 * h + i] - base[h]);
#pragma unroll
  for (int h = 0; h < 2; ++h) sum[h] = fmaf(sum[h], factor[h], added[h][0] + added[h][1]);
}

// As store_row, with places of 32 bits, and the gates' address once.
__device__ inline const uint32_t* gates_at(const AttentionParams& params, int64_t place) {
  if (!params.gates_size) return nullptr;
  const uint32_t head = static_cast<uint32_t>(place) % params.attention.num_heads,
                 token = static_cast<uint32_t>(place) / params.attention.num_heads;
  const int64_t at = static_cast<int64_t>(token) * params.row_size + head * params.attention.v_head_size;
  return static_cast<const uint32_t*>(params.qkv) + at / 2;
}
template <typename T, int M>
__device__ inline void store_place(const AttentionParams& params, const float (&acc)[M][4], int h, float most,
                                   float sum, int64_t place, int split) {
  const int t = threadIdx.x % 4;
  if (params.splits > 1) {
    const int64_t part = place * params.splits + split;
    if (t == 0) params.sums[part] = {most, sum};
#pragma unroll
    for (int n = 0; n < M; ++n)
      *reinterpret_cast<float2*>(params.partial + (part * M + n) * 8 + 2 * t) = {acc[n][2 * h], acc[n][2 * h + 1]};
    return;
  }
  const float sink = params.sinks[static_cast<uint32_t>(place) % params.attention.num_heads] * kLog2e;
  const float largest = fmaxf(most, sink), factor = fast_exp2(most - largest);
  const float inverse = factor / fmaf(sum, factor, fast_exp2(sink - largest)) * params.attention.v_scale;
  uint32_t* out = static_cast<uint32_t*>(params.output) + place * M * 4 + t;
  if (const uint32_t* gates = gates_at(params, place)) {
#pragma unroll
    for (int n = 0; n < M; ++n) {
      const uint32_t word = gates[n * 4 + t];
      const float2 gate{sigmoid(Half<T>::low(word)), sigmoid(Half<T>::high(word))};
      out[n * 4] = Half<T>::pack(acc[n][2 * h] * inverse * gate.x, acc[n][2 * h + 1] * inverse * gate.y);
    }
    return;
  }
#pragma unroll
  for (int n = 0; n < M; ++n) out[n * 4] = Half<T>::pack(acc[n][2 * h] * inverse, acc[n][2 * h + 1] * inverse);
}

// What a block does next: of a tile the stages [begin, end), a split.
struct RingWork {
  ManyTile tile;
  BatchRow batch;
  Span span;
  int rows, split, begin, end;  // rows: of the tile's head
};

// A ring's next stage, and the parity of its barriers.
struct RingPlace {
  int count = 0;
  __device__ int stage() const { return count % kRingStages; }
  __device__ int parity() const { return count / kRingStages % 2; }
};

// One long function: with its producer and its consumers as functions ptxas gives both other registers.
//
//   begin      barriers; `locate` gives a tile and its stages
//   producer   one thread copies queries and keys, one values. Two warps look at values that not all rows see
//   consumers  scores of the first stage; then scores of a stage with the sums of the one before; the last sums
template <typename T, int DK, int DV, int kRows>
__global__ void __launch_bounds__(2 * kRows + 128, 1) attend_ring(const __grid_constant__ RingParams ring) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using Shape = RingTile<DK, DV, kRows>;
  constexpr RingSizes kSizes = Shape::kSizes;
  constexpr int kKeys = Shape::kKeys, kConsumers = Shape::kConsumers, kTile = Shape::kTile, NT = kKeys / 8;
  constexpr int kGroups = kRows / 64, kQueryBuffers = kSizes.query_buffers;
  constexpr int kMeeting = 1 + kGroups;  // barrier of all consumers
  const AttentionParams& params = ring.attention;
  extern __shared__ __align__(1024) uint8_t raw[];
  // Of each: full, then empty; of values then `seen`, by the warps that look through them.
  __shared__ uint64_t query_barriers[2 * kQueryBuffers], key_barriers[2 * kRingStages], value_barriers[3 * kRingStages];
  __shared__ __align__(16) int odd_values[kRingStages][4];  // a warp found some in a stage
  __shared__ RingWork works[kQueryBuffers];                 // of the queries; no stages: there is no more
  const uint32_t base = (shared_address(raw) + 1023) / 1024 * 1024;
  const uint32_t query_full = shared_address(query_barriers), query_empty = query_full + 8 * kQueryBuffers;
  const uint32_t key_full = shared_address(key_barriers), key_empty = key_full + 8 * kRingStages;
  const uint32_t value_full = shared_address(value_barriers), value_empty = value_full + 8 * kRingStages,
                 value_seen = value_empty + 8 * kRingStages;
  if (threadIdx.x == 0) {
    for (const CUtensorMap* map : {&ring.queries, &ring.keys, &ring.values}) prefetch_map(*map);
    for (int i = 0; i < kQueryBuffers; ++i)
      barrier_init(query_full + 8 * i, 1), barrier_init(query_empty + 8 * i, kConsumers);
    for (int i = 0; i < kRingStages; ++i) {
      for (uint32_t full : {key_full, value_full}) barrier_init(full + 8 * i, 1);
      for (uint32_t empty : {key_empty, value_empty}) barrier_init(empty + 8 * i, kConsumers);
      barrier_init(value_seen + 8 * i, 64);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  launch_dependents();
  __syncthreads();
  wait_for_previous();

  const int tiles = ring.tiles, units = tiles * params.splits;
  auto locate = [&](int unit) {
    RingWork work;
    work.split = unit / tiles;
    work.tile = many_tile(params, kRows, unit % tiles);
    work.batch = read_row(params, work.tile.batch_row);
    work.rows = is_mine(params, work.batch) && !has_lists(params, work.batch) ? work.batch.count * params.group : 0;
    work.begin = work.end = 0;
    if (work.tile.first_row >= work.rows) return work;
    work.span = span_of(params, work.batch, work.tile.first_row);
    if (work.split < work.span.splits)
      work.begin = work.span.begin(work.split), work.end = work.span.begin(work.split + 1);
    return work;
  };

  if (threadIdx.x >= kConsumers) {
    set_registers<false, kProducerRegisters>();
    const int thread = static_cast<int>(threadIdx.x) - kConsumers;
    if (thread < 64 && thread % 32) return;
    const uint64_t often = evict_normal_policy();
    int query_count = 0;
    RingPlace place;
    RingWork work, next{};
    // Tells the consumers of a tile. Returns the barrier of its queries.
    auto announce = [&](const RingWork& work) {
      const int buffer = query_count % kQueryBuffers;
      barrier_wait(query_empty + 8 * buffer, query_count / kQueryBuffers % 2 ^ 1);
      works[buffer] = work;
      return query_full + 8 * buffer;
    };
    auto copy_queries = [&] {
      const uint32_t full = announce(work), to = base + query_count % kQueryBuffers * Shape::kQueryBytes;
      barrier_arrive_expect(full, Shape::kQueryBytes);
      const int64_t row = queries_of(params, work.batch, work.tile.pair, work.tile.kv_head, 0) + work.tile.first_row;
#pragma unroll
      for (int d = 0; d < DK / 64; ++d)
        tensor_copy(to + d * kRows * 128, ring.queries, d * 64, static_cast<int>(row), full, often);
      ++query_count;
    };
    // Slots of a stage in a box of the map. Where the table names no block, they are past the end, which reads zeros.
    auto copy = [&](const CUtensorMap& map, int stage, auto width, uint32_t to, uint32_t full) {
      constexpr int D = decltype(width)::value;
      int second = stage * kKeys, third = work.tile.pair;
      if (params.block_table) {
        const int size = params.attention.block_size, slot = stage * kKeys;
        const int block = params.block_table[work.tile.batch_row * params.columns + slot / size];
        const bool there = static_cast<unsigned>(block) < static_cast<unsigned>(params.blocks);
        second = work.tile.kv_head, third = there ? block * size + slot % size : params.blocks * size;
      }
      barrier_arrive_expect(full, kKeys * D * 2);
#pragma unroll
      for (int d = 0; d < D / 64; ++d) tensor_copy(to + d * kTile, map, d * 64, second, third, full, often);
    };
    // Of a stage that not all rows see: those that all see are from `seen` to `mixed`; there is nothing from `slots`
    // on.
    auto rows_of = [&](int stage, int& seen, int& mixed, int& slots) {
      const int first = stage * kKeys;
      seen = min(max(work.span.full_low - first, 0), kKeys), mixed = max(work.span.first_slot + 1 - first, seen);
      slots = work.span.last_slot + 1 - first;
    };
    auto is_mixed = [&](int stage) { return is_masked(work.span, stage * kKeys, kKeys); };

    for (Turns turn; turn.unit < units || next.begin < next.end;) {
      if (next.begin == next.end) {  // the first, or one without stages
        next = locate(turn.unit), turn.next();
        continue;
      }
      work = next, next = RingWork{};
      auto look_ahead = [&] {
        if (turn.unit < units) next = locate(turn.unit), turn.next();
      };
      if (thread < 64) {  // keys and queries; values
        if (thread == 0) copy_queries();
#pragma unroll 1
        for (int stage = work.begin; stage < work.end; ++stage, ++place.count) {
          const int at = place.stage();
          if (thread == 0) {
            barrier_wait(key_empty + 8 * at, place.parity() ^ 1);
            copy(ring.keys, stage, Width<DK>{}, base + Shape::kKeysAt + at * Shape::kKeyBytes, key_full + 8 * at);
          } else {
            barrier_wait(value_empty + 8 * at, place.parity() ^ 1);
            copy(ring.values, stage, Width<DV>{}, base + Shape::kValuesAt + at * Shape::kValueBytes,
                 value_full + 8 * at);
          }
          if (stage == work.begin) look_ahead();
        }
      } else {
#pragma unroll 1
        for (int stage = work.begin; stage < work.end; ++stage, ++place.count) {
          const int at = place.stage();
          if (is_mixed(stage)) {
            int seen, mixed, slots;
            rows_of(stage, seen, mixed, slots);
            const uint32_t from = base + Shape::kValuesAt + at * Shape::kValueBytes;
            const int rows = seen + max(kKeys - mixed, 0);
            bool odd = false;
            barrier_wait(value_full + 8 * at, place.parity());
#pragma unroll 4
            for (int i = thread - 64; i < rows * (DV / 8); i += 64) {
              const int nth = i / (DV / 8), row = nth < seen ? nth : mixed + nth - seen;
              const uint32_t chunk = from + swizzled_tile<kKeys>(row, i % (DV / 8));
              if (row >= slots)
                store16(chunk, {0, 0, 0, 0});
              else
                odd |= is_odd(load16(chunk), kExponent<T>);
            }
            odd = __any_sync(~0u, odd);
            if (thread % 32 == 0) odd_values[at][thread / 32] = odd;
            fence_async_proxy();
          } else {
            barrier_wait(value_full + 8 * at, place.parity());
          }
          barrier_arrive(value_seen + 8 * at);
          if (stage == work.begin) look_ahead();
        }
      }
    }
    if (thread == 0) barrier_arrive(announce(RingWork{}));
    return;
  }

  set_registers<true, kSizes.registers>();
  const int group = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 128, 0);
  const int t = threadIdx.x % 4, row_of = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4;
  // Consumers multiply in turn.
  auto take_turn = [&] {
    if constexpr (kGroups > 1) named_barrier(1 + group, 256);
  };
  auto pass_turn = [&] {
    if constexpr (kGroups > 1) named_barrier_arrive(group == kGroups - 1 ? 1 : 2 + group, 256);
  };
  if (group == kGroups - 1) pass_turn();

  // The tile in work.
  int query_count = 0, stage, end, first_slot, full_low, split, slot_of[1][2];
  int place[2];  // -1: no row
  // Waits for a tile. False: there is none.
  auto open = [&] {
    const int buffer = query_count % kQueryBuffers;
    barrier_wait(query_full + 8 * buffer, query_count / kQueryBuffers % 2);
    const RingWork& work = works[buffer];
    stage = work.begin, end = work.end, split = work.split;
    first_slot = work.span.first_slot, full_low = work.span.full_low;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = work.tile.first_row + row_of + h * 8;
      slot_of[0][h] = work.batch.past + row / params.group;
      place[h] = row < work.rows
                     ? static_cast<int>(place_of(params, work.batch, work.tile.batch_row, work.tile.kv_head, row))
                     : -1;
    }
    return stage < end;
  };

  RingPlace key_place, value_place;
  using Scores = float[NT][4];

  // With two buffers of queries this loop goes round once. A tile's last sums are then asked for beside the next tile's
  // first scores.
  constexpr bool kBeside = kQueryBuffers > 1;
#pragma unroll 1
  while (open()) {
    float acc[DV / 8][4], most[2] = {-INFINITY, -INFINITY}, sum[2] = {0, 0}, factor[2];
    uint32_t weights[NT / 2][4];
    auto clear = [&] {
#pragma unroll
      for (int n = 0; n < DV / 8; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) acc[n][i] = 0;
    };
    auto wait_keys = [&] { barrier_wait(key_full + 8 * key_place.stage(), key_place.parity()); };
    auto wait_values = [&] {
      barrier_wait(value_full + 8 * value_place.stage(), value_place.parity());
      barrier_wait(value_seen + 8 * value_place.stage(), value_place.parity());
    };
    auto values_at = [&] { return base + Shape::kValuesAt + value_place.stage() * Shape::kValueBytes; };
    auto ask_scores = [&](Scores& s) {
      const uint32_t q_at = base + query_count % kQueryBuffers * Shape::kQueryBytes + group * 64 * 128;
      const uint32_t k_at = base + Shape::kKeysAt + key_place.stage() * Shape::kKeyBytes;
#pragma unroll
      for (int d = 0; d < DK / 16; ++d)
        wgmma_shared<T, kKeys>(s[0], wgmma_descriptor(descriptor_low(q_at + d / 4 * kRows * 128 + d % 4 * 32)),
                               wgmma_descriptor(descriptor_low(k_at + d / 4 * kTile + d % 4 * 32)), d > 0);
      wgmma_commit();
    };
    auto ask_sums = [&] {
      const uint32_t v_at = values_at();
#pragma unroll
      for (int k = 0; k < NT / 2; ++k) add_values<T, DV>(acc[0], weights[k], v_at + k * 2048, kTile);
      wgmma_commit();
    };
    auto give_keys_back = [&] { barrier_arrive(key_empty + 8 * key_place.stage()), ++key_place.count; };
    auto give_values_back = [&] { barrier_arrive(value_empty + 8 * value_place.stage()), ++value_place.count; };
    // Scores of a stage become weights. masked: some row does not see one of its slots.
    auto weigh_stage = [&](Scores& s, bool masked) {
      softcap_scores(params, s);
      if (masked) mask_scores(params, s, slot_of[0], stage * kKeys);
      float largest[2] = {most[0], most[1]};
      find_largest_of_row(s, largest);
      weigh_row(s, largest, most, sum, factor);
    };
    auto pack = [&](const Scores& s) {
#pragma unroll
      for (int k = 0; k < NT / 2; ++k) pack_weights<T>(weights[k], s, 2 * k);
    };
    auto is_mixed = [&] { return stage * kKeys < full_low || (stage + 1) * kKeys - 1 > first_slot; };
    // Of a stage that not all rows see: values that are not finite are taken out.
    auto look_at_values = [&] {
      wait_values();
      const uint32_t flags = shared_address(odd_values[value_place.stage()]);
      const uint4 odd = load16(flags);
      if (odd.z | odd.w)
        take_out<T, kKeys, DV / 8, kConsumers, Shape::kValueBytes>(values_at(), values_at(),
                                                                   SlotsBefore<1>{params, slot_of, stage * kKeys}, t,
                                                                   acc, [] { named_barrier(kMeeting, kConsumers); });
    };
    auto store = [&](const int(&place)[2], const float(&most)[2], float(&sum)[2], int split) {
      add_quads(sum);
      if (place[0] >= 0) store_place<T>(params, acc, 0, most[0], sum[0], place[0], split);
      if (place[1] >= 0) store_place<T>(params, acc, 1, most[1], sum[1], place[1], split);
    };

    auto give_queries_back = [&](int count) { barrier_arrive(query_empty + 8 * (count % kQueryBuffers)); };
    auto begin_sums = [&] { most[0] = most[1] = -INFINITY, sum[0] = sum[1] = 0; };

    clear();
    begin_sums();
    wait_keys();
    Scores s;
    take_turn();
    wgmma_fence();
    ask_scores(s);
    pass_turn();
    wgmma_wait<0>();
    keep_registers(s);
    give_keys_back();
    bool masked = is_mixed();
    weigh_stage(s, masked);
    pack(s);
    if (masked) look_at_values();
    bool more = false;
#pragma unroll 1
    for (;;) {
      const bool last = stage + 1 == end;
      const int own_place[2] = {place[0], place[1]}, own_split = split;
      const float own_most[2] = {most[0], most[1]};
      float own_sum[2] = {sum[0], sum[1]};
      ++stage;
      if (last) {
        if (!kBeside) break;
        ++query_count;
        more = open();
        if (!more) {
          place[0] = own_place[0], place[1] = own_place[1], split = own_split;
          break;
        }
        give_queries_back(query_count - 1);
        begin_sums();
      }
      wait_keys();
      wait_values();
      Scores s;
      take_turn();
      wgmma_fence();
      ask_scores(s);
      ask_sums();
      pass_turn();
      wgmma_wait<1>();
      keep_registers(s);
      give_keys_back();
      masked = is_mixed();
      weigh_stage(s, masked);
      if constexpr (kBeside) wait_after(sum[0] + sum[1]);  // else ptxas has too few registers, and serializes
      wgmma_wait<0>();
      keep_registers(acc);
      keep_registers(weights);
      give_values_back();
      if (kBeside && last) {
        store(own_place, own_most, own_sum, own_split);
        clear();
      } else if (__any_sync(~0u, factor[0] != 1 || factor[1] != 1)) {
        rescale(acc, factor);
      }
      pack(s);
      if (masked) look_at_values();
    }
    if (!kBeside) give_queries_back(query_count++);
    wait_values();
    wgmma_fence();
    ask_sums();
    wgmma_wait<0>();
    keep_registers(acc);
    keep_registers(weights);
    give_values_back();
    store(place, most, sum, split);
    if (kBeside) break;
  }
#else
  __trap();  // the plan is of sm_90a, this library was compiled without it
#endif
}

}  // namespace quantmoe
