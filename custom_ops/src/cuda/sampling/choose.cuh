// Chooses the next token of each row from its logits: penalties, then temperature, top-k, top-p and min-p, as
// ort_ext/runtime/choosing/sampling.py does it. Probabilities are f64, and integers when they are added up. So the order of the
// additions changes nothing, and equal logits and an equal number give an equal token.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cmath>

#include "quantmoe/quant_moe_cuda.h"

namespace quantmoe {

constexpr int kChoiceThreads = 512, kChoiceWarps = kChoiceThreads / 32;
constexpr int kListed = 2048;     // the likeliest tokens, which one block looks at alone
constexpr int kMostWanted = 384;  // of so many there are nearly always less than kListed that may be among them
constexpr int kSure = 256;        // tokens that nearly always have top_p of the probability
constexpr int kOneWarp = 128;     // listed tokens that one warp looks at, which has no barriers
constexpr int kIdBits = 22;       // of a token at most
constexpr int kMostSums = 48;     // that a row's blocks add up together
constexpr int kMostBlocks = 32;   // of a row
constexpr double kUnit = 1.0 * (uint64_t{1} << (62 - kIdBits));  // the likeliest token's weight; all fit into 62 bits

// What the blocks of a row share, 0 when they begin.
struct ChoiceRow {
  unsigned long long best;  // largest of key << 32 | ~token: the likeliest, of equal ones the first
  uint32_t arrived, listed, few, not_finite;
  unsigned long long sums[kMostSums][8];
  unsigned long long found, parts[kMostBlocks];
};

struct ChoiceParams {
  qm_cuda_choice_problem problem;
  qm_cuda_choice_tensors tensors;
  ChoiceRow* rows;   // [batch]
  uint32_t* maxima;  // [batch, kChoiceThreads]
  uint64_t* listed;  // [batch, kListed]: key << 32 | token
  float* scores;     // [batch, vocabulary]: logits with penalties; NULL where there are none
  int id_bits;       // of a token, a multiple of 3
};

__device__ inline float to_f32(float x) { return x; }
__device__ inline float to_f32(half x) { return __half2float(x); }
__device__ inline float to_f32(nv_bfloat16 x) { return __bfloat162float(x); }

// Bits at the end of a key that are all alike.
template <typename T>
constexpr int kSpare = 0;
template <>
constexpr int kSpare<half> = 13;
template <>
constexpr int kSpare<nv_bfloat16> = 16;

// Keys have the order of the numbers that they are of, both zeros being one.
__device__ inline uint32_t key_of(float x) {
  const uint32_t bits = __float_as_uint(x + 0.f);
  return bits ^ (bits >> 31 ? 0xffffffffu : 0x80000000u);
}
__device__ inline float number_of(uint32_t key) {
  return __uint_as_float(key ^ (key >> 31 ? 0x80000000u : 0xffffffffu));
}

// Blocks: parts of a row's vocabulary, rows. Several blocks of a row all run at once, and `meet` is their barrier.
//
//   scores       bias, penalties, allowed tokens, repeated n-grams; without these, the logits are the scores
//   best         the likeliest token, and the largest key of each of kChoiceThreads groups of tokens.
//                Greedy rows end here, and rows with NaN, infinities or no allowed token
//   list         tau is the wanted-th largest of the groups' keys, so at least `wanted` tokens reach it. If few do, and
//                top_k and top_p can choose no other token, block 0 goes on with them alone (small)
//   top_k, top_p `least`, the rank from which on tokens are kept. `search` finds it from its highest digit on, three
//                bits a pass; `each` passes over the tokens, `together` adds up what the threads found
//   draw         uniform * (the kept weight) lies in the share of one block, which searches for the token by number
//   finish       the token, and the ids, position and mask of the next step
//
// One long function: its parts share registers, and how many threads take part changes on the way.
template <typename T>
__global__ void __launch_bounds__(kChoiceThreads, 2) choose(const ChoiceParams params) {
  __shared__ uint64_t listed[kListed], partial[kChoiceWarps][8], sums[8];
  __shared__ __align__(16) uint32_t maxima[kChoiceThreads];
  __shared__ unsigned long long block_best;
  __shared__ uint32_t tau;
  __shared__ double uniform;
  __shared__ int text;
  const qm_cuda_choice_problem& problem = params.problem;
  const qm_cuda_choice_tensors& tensors = params.tensors;
  const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32, blocks = gridDim.x, number = blockIdx.y;
  const int vocabulary = problem.vocabulary, each_block = (vocabulary + blocks - 1) / blocks;
  const int begin = blockIdx.x * each_block, end = min(begin + each_block, vocabulary);
  ChoiceRow& row = params.rows[number];
  if (thread == 0) {  // from the host's memory, once a block
    text = tensors.past[number];
    uniform = tensors.uniform[number];
    block_best = 0;
  }
  __syncthreads();
  const int past = text;
  int64_t* const mask = tensors.mask ? tensors.mask + number * problem.capacity : nullptr;
  if (past < 0) {
    if (blockIdx.x == 0 && thread == 0 && mask) mask[problem.column] = 0;
    return;
  }

  unsigned met = 0;
  const auto meet = [&] {  // all blocks of the row, which all run
    __syncthreads();
    if (blocks == 1) return;
    if (thread == 0) {
      __threadfence();
      atomicAdd(&row.arrived, 1);
      met += blocks;
      while (*static_cast<volatile uint32_t*>(&row.arrived) < met) {
      }
      __threadfence();
    }
    __syncthreads();
  };
  const auto finish = [&](int token) {
    if (thread) return;
    tensors.chosen[number] = token;
    if (token < 0) return;
    if (tensors.counts) {
      int32_t& count = tensors.counts[int64_t{number} * vocabulary + token];
      count = (count | 1) + 2;
    }
    if (tensors.history) tensors.history[number * problem.longest + past] = token;
    if (!mask) return;
    tensors.ids[number] = token, tensors.positions[number] = past;
    if (problem.column_before >= 0) mask[problem.column_before] = 0;
    if (past) mask[past - 1] = 1;
    mask[problem.column] = 1;
  };

  const T* const logits = static_cast<const T*>(tensors.logits) + int64_t{number} * vocabulary;
  float* const scores = params.scores ? params.scores + int64_t{number} * vocabulary : nullptr;
  bool finite = true;
  if (scores) {
    const int32_t* const counts = tensors.counts ? tensors.counts + int64_t{number} * vocabulary : nullptr;
    const uint32_t* const allowed =
        tensors.allowed ? tensors.allowed + int64_t{number} * ((vocabulary + 31) / 32) : nullptr;
    for (int i = begin + thread; i < end; i += kChoiceThreads) {
      const float x = to_f32(logits[i]);
      finite &= isfinite(x);
      double score = x;
      if (tensors.bias) score += tensors.bias[i];
      const int count = counts ? counts[i] : 0;
      if (count && problem.repetition != 1) score = score < 0 ? score * problem.repetition : score / problem.repetition;
      if (count > 1) score -= problem.presence + problem.frequency * (count >> 1);
      if (allowed && !(allowed[i / 32] >> i % 32 & 1)) score = -INFINITY;
      scores[i] = static_cast<float>(score);
    }
    if (tensors.history) {  // what followed the text's last tokens before
      __syncthreads();
      const int32_t* const history = tensors.history + number * problem.longest;
      const int size = problem.ngram;
      for (int i = thread; i + size <= past; i += kChoiceThreads) {
        bool same = true;
        for (int j = 0; same && j < size - 1; ++j) same = history[i + j] == history[past - size + 1 + j];
        const int next = history[i + size - 1];
        if (same && begin <= next && next < end) scores[next] = -INFINITY;
      }
    }
    __syncthreads();
  }
  const auto key_at = [&](int i) { return key_of(scores ? scores[i] : to_f32(logits[i])); };

  // The likeliest token, and the largest key of each of kChoiceThreads groups.
  unsigned long long best = 0;
#pragma unroll 4
  for (int i = begin + thread; i < end; i += kChoiceThreads) {
    const uint32_t key = key_at(i);
    if (!scores) finite &= isfinite(number_of(key));
    best = max(best, (static_cast<unsigned long long>(key) << 32) | ~static_cast<uint32_t>(i));
  }
  if (!finite) row.not_finite = 1;
  uint32_t group = best >> 32;
  for (int other = 1; other < blocks; other *= 2) group = max(group, __shfl_xor_sync(~0u, group, other));
  if (thread % blocks == 0)
    params.maxima[int64_t{number} * kChoiceThreads + (blockIdx.x * kChoiceThreads + thread) / blocks] = group;
  for (int other = 16; other; other /= 2) best = max(best, __shfl_xor_sync(~0u, best, other));
  if (lane == 0) atomicMax(&block_best, best);
  __syncthreads();
  if (thread == 0) atomicMax(&row.best, block_best);
  meet();
  best = __ldcg(&row.best);
  const bool not_finite = __ldcg(&row.not_finite), none = best >> 32 <= key_of(-INFINITY);
  if (not_finite || none || problem.temperature == 0) {
    if (blockIdx.x == 0) finish(not_finite ? -1 : none ? -2 : static_cast<int>(~static_cast<uint32_t>(best)));
    return;
  }

  int warps = kChoiceWarps, added = 0;
  bool small = false, alone = blocks == 1;      // one block looks at what is listed, each at its own tokens
  const auto together = [&](uint64_t(&v)[8]) {  // sums over all threads that look at the row
#pragma unroll
    for (int half = 4, other = 16; half; half /= 2, other /= 2) {
#pragma unroll
      for (int k = 0; k < half; ++k) {
        const bool upper = lane & other;
        const uint64_t given = upper ? v[k] : v[k + half], kept = upper ? v[k + half] : v[k];
        v[k] = kept + __shfl_xor_sync(~0u, given, other);
      }
    }
    v[0] += __shfl_xor_sync(~0u, v[0], 2);
    v[0] += __shfl_xor_sync(~0u, v[0], 1);  // of what lane / 4 says
    if (warps == 1) {
      const uint64_t own = v[0];
#pragma unroll
      for (int k = 0; k < 8; ++k) v[k] = __shfl_sync(~0u, own, 4 * k);
      return;
    }
    if (lane % 4 == 0) partial[warp][lane / 4] = v[0];
    __syncthreads();
    if (thread < 8 * kChoiceWarps) {
      const int which = thread / kChoiceWarps, from = thread % kChoiceWarps;
      uint64_t sum = partial[from][which];
      for (int other = kChoiceWarps / 2; other; other /= 2) sum += __shfl_xor_sync(~0u, sum, other);
      if (from == 0) {
        if (alone)
          sums[which] = sum;
        else if (sum)
          atomicAdd(&row.sums[added][which], static_cast<unsigned long long>(sum));
      }
    }
    if (alone) {
      __syncthreads();
    } else {
      meet();
      if (thread < 8) sums[thread] = __ldcg(&row.sums[added][thread]);
      __syncthreads();
      ++added;
    }
#pragma unroll
    for (int k = 0; k < 8; ++k) v[k] = sums[k];
  };
  const auto probability = [&](uint32_t key) {  // divided by the likeliest token's
    return exp((static_cast<double>(number_of(key)) - number_of(best >> 32)) / problem.temperature);
  };
  const auto weight = [&](uint32_t key) { return __double2ull_rn(probability(key) * kUnit); };
  const auto wanted_of = [&](uint64_t total) {  // what must be left of it: all but less than 1 - top_p
    const auto removed = static_cast<uint64_t>((1 - problem.top_p) * static_cast<double>(total));
    return removed < total ? total - removed : 1;
  };

  // The likeliest tokens are listed: all from tau on, the wanted-th largest of the groups' maxima.
  const int wanted = problem.top_k ? problem.top_k : problem.top_p < 1 ? kSure : 0;
  const bool listing = wanted && wanted <= kMostWanted;
  uint64_t found[8] = {};  // the weight of all tokens, and of those that are listed
  uint64_t* const list = params.listed + int64_t{number} * kListed;
  int count = 0;
  if (listing) {
    maxima[thread] = __ldcg(&params.maxima[int64_t{number} * kChoiceThreads + thread]);
    __syncthreads();
    int before = 0;
    for (int i = 0; i < kChoiceThreads; i += 4) {
      const uint4 four = *reinterpret_cast<const uint4*>(&maxima[i]);
      const uint32_t own = maxima[thread];
      before += (four.x > own || (four.x == own && i < thread)) + (four.y > own || (four.y == own && i + 1 < thread)) +
                (four.z > own || (four.z == own && i + 2 < thread)) +
                (four.w > own || (four.w == own && i + 3 < thread));
    }
    if (before == wanted - 1) tau = maxima[thread];
    __syncthreads();
    for (int i = begin + thread; i < end; i += kChoiceThreads) {
      const uint32_t key = key_at(i);
      const uint64_t own = problem.top_k ? 0 : weight(key);
      found[0] += own;
      if (key < tau) continue;
      found[1] += own;
      const uint32_t at = atomicAdd(&row.listed, 1);
      if (at < kListed) list[at] = (static_cast<uint64_t>(key) << 32) | i;
    }
    together(found);
    count = __ldcg(&row.listed);
    small = count <= kListed && (problem.top_k || found[1] >= wanted_of(found[0]));
    if (small) {
      if (blockIdx.x) return;
      alone = true;
      warps = count <= kOneWarp ? 1 : kChoiceWarps;
      if (warp >= warps) return;
      for (int i = thread; i < count; i += 32 * warps) listed[i] = __ldcg(&list[i]);
      if (warps > 1)
        __syncthreads();
      else
        __syncwarp();
    }
  }
  const auto each = [&](auto look) {  // at every token that may be chosen: its key, and its number
    if (small) {
      for (int i = thread; i < count; i += 32 * warps)
        look(static_cast<uint32_t>(listed[i] >> 32), static_cast<uint32_t>(listed[i]));
    } else {
#pragma unroll 2
      for (int i = begin + thread; i < end; i += kChoiceThreads) look(key_at(i), static_cast<uint32_t>(i));
    }
  };
  // The largest code of so many bits, a multiple of 3, from which on weights sum to `target`. When few tokens are left
  // between what it may be at least and at most, one block goes on alone.
  const auto search = [&](int bits, uint64_t target, auto code, auto weigh) {
    uint64_t from = 0, above = 0;  // above: the weight of codes that are too large
    bool leads = false, follows = false;
    for (int shift = bits - 3; shift >= 0 && !follows; shift -= 3) {
      uint64_t v[8] = {};  // how many may be it, and the weight from each of seven codes on
      each([&](uint32_t key, uint32_t id) {
        const uint64_t own = code(key, id);
        if (own < from) return;
        const uint64_t digit = (own - from) >> shift;
        v[0] += digit < 8;
        const uint64_t of = digit ? weigh(key, id) : 0;
#pragma unroll
        for (int k = 1; k < 8; ++k) v[k] += digit >= k ? of : 0;
      });
      together(v);
      if (!alone && v[0] <= kListed && shift > 6) {
        each([&](uint32_t key, uint32_t id) {
          const uint64_t own = code(key, id);
          if (own >= from && (own - from) >> shift < 8)
            list[atomicAdd(&row.few, 1)] = (static_cast<uint64_t>(key) << 32) | id;
        });
        meet();
        if (blockIdx.x) {
          follows = true;
        } else {
          count = v[0];
          for (int i = thread; i < count; i += kChoiceThreads) listed[i] = __ldcg(&list[i]);
          __syncthreads();
          if (thread == 0) row.few = 0;
          leads = small = alone = true;
          target -= above, above = 0, shift += 3;
        }
        continue;
      }
      int digit = 0;
#pragma unroll
      for (int k = 1; k < 8; ++k) {
        if (v[k] < target) {
          above = v[k];
          break;
        }
        digit = k;
      }
      from += static_cast<uint64_t>(digit) << shift;
    }
    if (leads) {
      if (thread == 0) row.found = from;
      small = alone = false;
    }
    if (leads || follows) {
      meet();
      from = __ldcg(&row.found);
    }
    return from;
  };
  const int spare = scores ? 0 : kSpare<T>, id_bits = params.id_bits, key_bits = (32 - spare + 2) / 3 * 3;
  const auto rank = [&](uint32_t key, uint32_t id) { return (static_cast<uint64_t>(key >> spare) << id_bits) | id; };
  uint64_t least = 0;  // the rank from which on tokens are kept
  const auto weigh = [&](uint32_t key, uint32_t id) { return rank(key, id) < least ? 0 : weight(key); };
  const auto kept = [&](uint32_t key, uint32_t id) {
    if (rank(key, id) < least) return uint64_t{0};
    const double own = probability(key);
    return own < problem.min_p ? uint64_t{0} : static_cast<uint64_t>(__double2ull_rn(own * kUnit));
  };
  const auto total = [&](auto weigh_one) {
    uint64_t v[8] = {};
    each([&](uint32_t key, uint32_t id) { v[0] += weigh_one(key, id); });
    together(v);
    return v[0];
  };
  if (problem.top_k)
    least = search(
                key_bits, problem.top_k, [&](uint32_t key, uint32_t) { return uint64_t{key >> spare}; },
                [](uint32_t, uint32_t) { return uint64_t{1}; })
            << id_bits;
  if (problem.top_p < 1)
    least = search(key_bits + id_bits, wanted_of(problem.top_k ? total(weigh) : found[0]), rank, weigh);
  // The uniform number says in whose share of the weight, first tokens first, the chosen one is.
  const bool shared = !alone;
  alone = true;
  const uint64_t own = total(kept);
  uint64_t all = own, before = 0;
  if (shared) {
    if (thread == 0) row.parts[blockIdx.x] = own;
    meet();
    all = 0;
    for (int i = 0; i < blocks; ++i) {
      if (i == blockIdx.x) before = all;
      all += __ldcg(&row.parts[i]);
    }
  }
  const auto at = min(static_cast<uint64_t>(uniform * static_cast<double>(all)), all - 1);
  if (at < before || at - before >= own) return;
  const uint32_t most = (1u << id_bits) - 1;
  const uint64_t code =
      search(id_bits, at - before + 1, [&](uint32_t, uint32_t id) { return uint64_t{most - id}; }, kept);
  finish(most - static_cast<uint32_t>(code));
}

}  // namespace quantmoe
