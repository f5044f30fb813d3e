// The plan of CachedAttention: tiles, splits, workspace. Pure; runs without a GPU.
#include <algorithm>

#include "core/attributes.h"
#include "cuda/attention.h"
#include "quantmoe/quant_moe_cuda.h"

namespace quantmoe {
namespace {

constexpr int kMostHeads = 4096;
constexpr int kBlocksOfCluster = 1;         // of clusters, that a multiprocessor is to have
constexpr int kMostSlotsOfCluster = 16384;  // more have more splits than a cluster, where these are to be had

int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

int ValidateAttributes(const qm_attention& a, char* err) {
  QM_TRY(check_attention(a, err));
  if (a.num_heads > kMostHeads)
    return fail(err, QM_UNSUPPORTED, "num_heads is %d, the CUDA kernels take up to %d", a.num_heads, kMostHeads);
#define QM_SIZES(keys, values) \
  if (a.head_size == keys && a.v_head_size == values) return QM_OK;
  QM_ATTENTION_SIZES(QM_SIZES)
#undef QM_SIZES
  return fail(
      err, QM_UNSUPPORTED,
      "head_size is %d and v_head_size %d, the CUDA kernels take 64, 96, 128, 192 and 256 of both, or 192 and 128",
      a.head_size, a.v_head_size);
}

int ValidateShapes(const qm_cuda_attention_problem& p, char* err) {
  const int64_t most = INT32_MAX / 4, heads = p.attention.num_heads;
  if (p.past_slots < 0 || p.slots < p.past_slots || p.slots > most)
    return fail(err, QM_INVALID,
                "the cache has %lld slots before and %lld after, expected at least as many, up to %lld",
                static_cast<long long>(p.past_slots), static_cast<long long>(p.slots), static_cast<long long>(most));
  // Blocks are counted in 32 bits.
  if (p.batch < 0 || p.tokens < 0 || p.batch > most || p.tokens > most || p.batch * p.tokens > most / heads ||
      p.batch * (p.slots / 64 + 1) > most / heads)
    return fail(err, QM_UNSUPPORTED,
                "a batch of %lld with %lld tokens and %lld slots each, the CUDA kernels take up to %lld tokens, and 64 "
                "times as many slots, in all",
                static_cast<long long>(p.batch), static_cast<long long>(p.tokens), static_cast<long long>(p.slots),
                static_cast<long long>(most / heads));
  return QM_OK;
}

// Blocks that share a tile's slots: where tiles leave multiprocessors empty.
int Splits(const qm_cuda_attention_problem& p, int multiprocessors, int least, int stage, int64_t tiles) {
  const int64_t most = CeilDiv(p.slots, least * stage), wanted = multiprocessors / std::max<int64_t>(1, tiles);
  return static_cast<int>(std::max<int64_t>(1, std::min({wanted, most, int64_t{kMostSplits}})));
}

// Blocks that a cluster may have, if all of a GPU's multiprocessors are to have some.
int MostOfCluster(int sm) { return sm == 90 || sm == 100 || sm == 103 ? kMostCluster : sm >= 90 ? 8 : 1; }

}  // namespace
}  // namespace quantmoe

using namespace quantmoe;

extern "C" int qm_cuda_plan_attention(const qm_cuda_attention_problem* problem, const qm_cuda_device* device,
                                      qm_cuda_attention_plan* plan, char* err) {
  const qm_cuda_attention_problem& p = *problem;
  QM_TRY(ValidateAttributes(p.attention, err));
  if (p.type != QM_F16 && p.type != QM_BF16)
    return fail(err, QM_UNSUPPORTED, "qkv is of type %d, the CUDA kernels take float16 (1) and bfloat16 (2)", p.type);
  if (device->sm < 80)
    return fail(err, QM_UNSUPPORTED, "compute capability %d.%d, the kernels need 8.0 or later", device->sm / 10,
                device->sm % 10);
  QM_TRY(ValidateShapes(p, err));
  const int64_t rows = p.tokens * (p.attention.num_heads / p.attention.kv_num_heads);
  const int64_t heads = p.batch * p.tokens * p.attention.num_heads;
  constexpr int kMostMultiprocessors = 192;
  const int multiprocessors = device->multiprocessors ? device->multiprocessors : kMostMultiprocessors;
  const int64_t pairs = p.batch * p.attention.kv_num_heads;
  const int keys = p.attention.head_size, values = p.attention.v_head_size;
  *plan = qm_cuda_attention_plan{};
  plan->cluster = 1;
  if (rows <= kFewRows) {
    const int stage = AttendKeys(keys, values), most = MostOfCluster(device->sm);
    plan->tile_rows = kFewRows;
    plan->splits = Splits(p, multiprocessors, kLeastOfFew, stage, pairs);
    if (most > 1 && (plan->splits <= most || p.slots <= kMostSlotsOfCluster)) {
      const int splits = std::min(most, Splits(p, kBlocksOfCluster * multiprocessors, kLeastOfCluster, stage, pairs));
      for (plan->splits = 1; 2 * plan->splits <= splits;) plan->splits *= 2;  // others leave multiprocessors empty
      plan->cluster = plan->splits;
    }
  } else {
    plan->wgmma = device->sm == 90 && keys % 64 == 0;
    plan->tile_rows = plan->wgmma ? kWideRows : ManyRows(keys, values);
    plan->splits = Splits(p, multiprocessors, kLeastOfMany, plan->wgmma ? kWideKeys : AttendKeys(keys, values),
                          CeilDiv(rows, plan->tile_rows) * pairs);
  }
  auto take = [&](int64_t bytes) {
    const uint64_t at = plan->workspace_bytes;
    plan->workspace_bytes += static_cast<uint64_t>(CeilDiv(bytes, 256) * 256);
    return at;
  };
  if (plan->tile_rows != kFewRows) plan->queries = take(heads * keys * 2);
  if (plan->splits > 1 && plan->cluster == 1) {
    plan->sums = take(heads * plan->splits * 8);
    plan->partial = take(heads * plan->splits * values * 4);
  }
  return QM_OK;
}
