// The plan of CachedAttention: tiles, splits, workspace. Pure; runs without a GPU.
#include <algorithm>
#include <cmath>
#include <utility>

#include "core/attributes.h"
#include "cuda/attention.h"
#include "quantmoe/quant_moe_cuda.h"

namespace quantmoe {
namespace {

int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

int ValidateAttributes(const qm_attention& a, char* err) {
  if (int status = check_node("CachedAttention", &a, err)) return status;
  const struct {
    const char* name;
    int value, least, most;
  } ranges[] = {{"num_heads", a.num_heads, 1, 4096},
                {"kv_num_heads", a.kv_num_heads, 1, a.num_heads},
                {"sliding_window", a.sliding_window, 0, INT32_MAX},
                {"chunk_size", a.chunk_size, 0, INT32_MAX},
                {"rotary_size", a.rotary_size, 0, a.head_size},
                {"rotary_interleaved", a.rotary_interleaved, 0, 1}};
  for (const auto& range : ranges)
    if (range.value < range.least || range.value > range.most)
      return fail(err, QM_INVALID, "%s is %d, expected %d to %d", range.name, range.value, range.least, range.most);
  if (a.num_heads % a.kv_num_heads)
    return fail(err, QM_INVALID, "kv_num_heads is %d, expected a divisor of num_heads %d", a.kv_num_heads, a.num_heads);
  if (a.rotary_size % 2) return fail(err, QM_INVALID, "rotary_size is %d, expected an even number", a.rotary_size);
  for (const auto& [name, value] : {std::pair{"softcap", a.softcap}, {"norm_epsilon", a.norm_epsilon}})
    if (!(value >= 0) || std::isinf(value))
      return fail(err, QM_INVALID, "%s is %g, expected 0 or a positive number", name, value);
  if (!std::isfinite(a.scale)) return fail(err, QM_INVALID, "scale is %g, expected a number", a.scale);
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
  if (int status = ValidateAttributes(p.attention, err)) return status;
  if (p.type != QM_F16 && p.type != QM_BF16)
    return fail(err, QM_UNSUPPORTED, "qkv is of type %d, the CUDA kernels take float16 (1) and bfloat16 (2)", p.type);
  if (device->sm < 80)
    return fail(err, QM_UNSUPPORTED, "compute capability %d.%d, the kernels need 8.0 or later", device->sm / 10,
                device->sm % 10);
  if (int status = ValidateShapes(p, err)) return status;
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
