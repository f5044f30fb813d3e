// The plan of CachedAttention: tiles, splits, workspace. Pure; runs without a GPU.
#include <algorithm>

#include "core/attributes.h"
#include "cuda/attention.h"
#include "quantmoe/quant_moe_cuda.h"

namespace quantmoe {
namespace {

constexpr int kMostHeads = 4096;

int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

int ValidateAttributes(const qm_attention& a, char* err) {
  QM_TRY(check_attention(a, err));
  if (a.num_heads > kMostHeads)
    return fail(err, QM_UNSUPPORTED, "num_heads is %d, the CUDA kernels take up to %d", a.num_heads, kMostHeads);
  if (a.head_size != 64 && a.head_size != 96 && a.head_size != 128)
    return fail(err, QM_UNSUPPORTED, "head_size is %d, the CUDA kernels take 64, 96 and 128", a.head_size);
  if (a.v_head_size != a.head_size)
    return fail(err, QM_UNSUPPORTED, "v_head_size is %d, the CUDA kernels take head_size %d", a.v_head_size,
                a.head_size);
  return QM_OK;
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
int Splits(const qm_cuda_attention_problem& p, int multiprocessors, int tile_rows, int64_t tiles) {
  const int64_t most = CeilDiv(p.slots, (tile_rows == kFewRows ? kLeastOfFew : kLeastOfMany) * kAttendKeys);
  const int64_t wanted = multiprocessors / std::max<int64_t>(1, tiles);
  return static_cast<int>(std::max<int64_t>(1, std::min({wanted, most, int64_t{kMostSplits}})));
}

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
  *plan = qm_cuda_attention_plan{};
  plan->tile_rows = rows <= kFewRows ? kFewRows : kManyRows;
  plan->wgmma = device->sm == 90 && plan->tile_rows == kManyRows && p.attention.head_size % 64 == 0;
  plan->splits = Splits(p, device->multiprocessors ? device->multiprocessors : kMostMultiprocessors, plan->tile_rows,
                        CeilDiv(rows, plan->tile_rows) * p.batch * p.attention.kv_num_heads);
  auto take = [&](int64_t bytes) {
    const uint64_t at = plan->workspace_bytes;
    plan->workspace_bytes += static_cast<uint64_t>(CeilDiv(bytes, 256) * 256);
    return at;
  };
  plan->queries = take(heads * p.attention.head_size * 2);
  if (plan->splits > 1) {
    plan->sums = take(heads * plan->splits * 8);
    plan->partial = take(heads * plan->splits * p.attention.head_size * 4);
  }
  return QM_OK;
}
