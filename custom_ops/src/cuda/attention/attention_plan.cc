// The plan of CachedAttention: tiles, splits, workspace. Pure; runs without a GPU.
#include <algorithm>

#include "core/attributes.h"
#include "core/numbers.h"
#include "cuda/attention/attention_call.h"
#include "cuda/common/operators.h"

namespace quantmoe {
namespace {

constexpr int kMostHeads = 4096;

int validate_equal(const qm_attention& attention, char* err) {
  if (attention.head_size != kEqualKeys || (attention.key_split && attention.key_split != kEqualSplit))
    return fail(err, QM_UNSUPPORTED,
                "head_size is %d and key_split %d, of keys that are their values the CUDA kernels take %d and 0 or %d",
                attention.head_size, attention.key_split, kEqualKeys, kEqualSplit);
  if (attention.qk_norm == k_qk_norm_row)
    return fail(err, QM_UNSUPPORTED,
                "qk_norm is \"row\", of keys that are their values the CUDA kernels take none and head");
  if (attention.chunk_size)
    return fail(err, QM_UNSUPPORTED, "chunk_size is %d, of keys that are their values the CUDA kernels take 0",
                attention.chunk_size);
  return QM_OK;
}

int validate_latent(const qm_attention& attention, char* err) {
  if (attention.head_size != kLatentKeys || attention.v_head_size != kLatentValues ||
      attention.key_split != kLatentSplit)
    return fail(
        err, QM_UNSUPPORTED,
        "head_size is %d, v_head_size %d and key_split %d, of latent attention the CUDA kernels take %d, %d and %d",
        attention.head_size, attention.v_head_size, attention.key_split, kLatentKeys, kLatentValues, kLatentSplit);
  if (attention.rotary_size % 16)
    return fail(err, QM_UNSUPPORTED, "rotary_size is %d, of latent attention the CUDA kernels take multiples of 16",
                attention.rotary_size);
  if (attention.qk_norm != k_qk_norm_none)
    return fail(err, QM_UNSUPPORTED, "qk_norm is \"%s\", of latent attention the CUDA kernels take none",
                enum_name("qk_norm", attention.qk_norm));
  return QM_OK;
}

int validate_attributes(const qm_attention& attention, char* err) {
  QM_TRY(check_attention(attention, err));
  if (attention.cache_format == k_cache_format_int8_token)
    return fail(err, QM_UNSUPPORTED, "cache_format is \"int8_token\", the CUDA kernels take none, int8 and fp8_e4m3");
  if (attention.num_heads > kMostHeads)
    return fail(err, QM_UNSUPPORTED, "num_heads is %d, the CUDA kernels take up to %d", attention.num_heads,
                kMostHeads);
  if (attention.nope_size)
    return fail(err, QM_UNSUPPORTED, "nope_size is %d, the CUDA kernels take queries of latents (0)",
                attention.nope_size);
  if (attention.block_size && attention.key_split)
    return fail(err, QM_UNSUPPORTED, "block_size is %d, of latent attention the CUDA kernels take 0",
                attention.block_size);
  if (is_equal(attention)) return validate_equal(attention, err);
  if (attention.key_split) return validate_latent(attention, err);
#define QM_SIZES(keys, values) \
  if (attention.head_size == keys && attention.v_head_size == values) return QM_OK;
  QM_ATTENTION_SIZES(QM_SIZES)
#undef QM_SIZES
  return fail(
      err, QM_UNSUPPORTED,
      "head_size is %d and v_head_size %d, the CUDA kernels take 64, 96, 128, 192 and 256 of both, or 192 and 128",
      attention.head_size, attention.v_head_size);
}

// selected: its shape; of rank -1 without it, of rank 0 if it is not known yet.
int validate_lists(const qm_attention& attention, const qm_shape& selected, char* err) {
  if (selected.rank < 0) return QM_OK;
#define QM_SIZES(keys, values) || (attention.head_size == keys && attention.v_head_size == values)
  if (!(attention.key_split || attention.compress_rate QM_ATTENTION_LIST_SIZES(QM_SIZES)))
    return fail(err, QM_UNSUPPORTED,
                "head_size is %d and v_head_size %d, with the input selected the CUDA kernels take 128 and 256 of both",
                attention.head_size, attention.v_head_size);
#undef QM_SIZES
  const bool window = attention.sliding_window && !attention.compress_rate;
  if (window || attention.chunk_size || attention.block_size)
    return fail(err, QM_INVALID,
                "sliding_window is %d, chunk_size %d and block_size %d, expected 0 with the input selected",
                attention.sliding_window, attention.chunk_size, attention.block_size);
  const int64_t lists = selected.sizes[2];
  if (selected.rank && lists != 1 && lists != attention.kv_num_heads)
    return fail(err, QM_UNSUPPORTED,
                "selected has %lld lists of a token, the CUDA kernels take one, or one for each of %d heads of keys",
                static_cast<long long>(lists), attention.kv_num_heads);
  return QM_OK;
}

// Of caches in blocks: tokens are of all requests.
int validate_blocks(const AttentionProblem& problem, char* err) {
  const int64_t most = INT32_MAX / 4, heads = problem.attention.num_heads;
  if (problem.tokens < problem.batch)
    return fail(err, QM_INVALID, "%lld requests have %lld tokens, expected at least one for each",
                static_cast<long long>(problem.batch), static_cast<long long>(problem.tokens));
  if (problem.tokens && problem.attention.rotary_size && problem.positions < 1)
    return fail(err, QM_INVALID, "cos and sin have %lld slots, expected those of the longest request",
                static_cast<long long>(problem.positions));
  if (problem.blocks < 0 || problem.blocks > INT32_MAX || problem.positions < 0 || problem.positions > INT32_MAX ||
      problem.tokens > most / heads || problem.batch < 0 || problem.batch * (problem.slots / 64 + 1) > most / heads)
    return fail(err, QM_UNSUPPORTED,
                "%lld requests with %lld tokens and %lld slots each, the CUDA kernels take up to %lld tokens, and 64 "
                "times as many slots, in all",
                static_cast<long long>(problem.batch), static_cast<long long>(problem.tokens),
                static_cast<long long>(problem.slots), static_cast<long long>(most / heads));
  return QM_OK;
}

int validate_shapes(const AttentionProblem& problem, char* err) {
  if (problem.attention.block_size) return validate_blocks(problem, err);
  const int64_t most = INT32_MAX / 4, heads = problem.attention.num_heads;
  if (problem.past_slots < 0 || problem.slots > most)
    return fail(err, QM_INVALID, "the cache has %lld slots, expected up to %lld", static_cast<long long>(problem.slots),
                static_cast<long long>(most));
  // Blocks are counted in 32 bits.
  if (problem.batch < 0 || problem.tokens < 0 || problem.batch > most || problem.tokens > most ||
      problem.batch * problem.tokens > most / heads || problem.batch * (problem.slots / 64 + 1) > most / heads)
    return fail(err, QM_UNSUPPORTED,
                "a batch of %lld with %lld tokens and %lld slots each, the CUDA kernels take up to %lld tokens, and 64 "
                "times as many slots, in all",
                static_cast<long long>(problem.batch), static_cast<long long>(problem.tokens),
                static_cast<long long>(problem.slots), static_cast<long long>(most / heads));
  return QM_OK;
}

// Blocks that share a tile's slots: where tiles leave multiprocessors empty.
int splits_of(const AttentionProblem& problem, int multiprocessors, int least_log, int stage, int64_t tiles,
              int64_t at_most = kMostSplits) {
  const int64_t most = ceil_div(problem.slots, static_cast<int64_t>(stage) << least_log);
  const int64_t wanted = multiprocessors / std::max<int64_t>(1, tiles);
  return static_cast<int>(std::max<int64_t>(1, std::min({wanted, most, at_most})));
}

bool has_codes(const qm_attention& attention) { return attention.cache_format != k_cache_format_none; }

// Whether a block has the shared memory; kReserved bytes of a multiprocessor's are the system's.
bool fits(const qm_cuda_device& device, int bytes) {
  constexpr int kReserved = 1024;
  return bytes + kReserved <= device.shared_bytes;
}
// Of a block of few rows.
bool fits(const qm_cuda_device& device, const qm_attention& attention, int stages, bool cluster) {
  return fits(device, few_shared_bytes(attention.head_size, attention.v_head_size, stages, cluster));
}

// Blocks of a cluster that share what a row of few queries sees; 1: none. The rules were measured on an H200. Clusters
// of more than two blocks with a multiprocessor each, and clusters of 8 and more, fill at most half of the
// multiprocessors. Clusters that are no power of two leave some multiprocessors empty. One block reads up to three
// stages faster alone.
int cluster_of(const qm_cuda_device& device, const qm_attention& attention, int multiprocessors, int64_t pairs,
               int64_t stages) {
  if (device.sm < 90 || !fits(device, attention, kFewStages, true) || stages <= 3) return 1;
  const bool large = device.sm == 90 || device.sm == 100 || device.sm == 103;  // GPUs whose clusters may have 16
  const int most = is_wide(attention.head_size, attention.v_head_size) ? 2 : 4;
  for (int blocks = large ? kMostCluster : 8; blocks > 1; blocks /= 2)
    if (blocks <= stages && blocks * pairs <= (blocks <= most ? multiprocessors : multiprocessors / 2)) return blocks;
  return 1;
}

void plan_few(const AttentionProblem& problem, const qm_cuda_device& device, int multiprocessors, AttentionPlan* plan) {
  const qm_attention& attention = problem.attention;
  const int stage = few_keys(attention.head_size, attention.v_head_size, has_codes(attention));
  const int64_t pairs = problem.batch * attention.kv_num_heads;
  const int64_t seen = attention.sliding_window
                           ? std::min(problem.slots, attention.sliding_window + problem.tokens - 1 + stage)
                           : problem.slots;
  const int64_t stages = ceil_div(seen, stage);
  // A plan for any number of multiprocessors has the largest workspace: the one without a cluster.
  const int cluster = device.multiprocessors ? cluster_of(device, attention, multiprocessors, pairs, stages) : 1;
  plan->tile_rows = kFewRows;
  plan->splits = stages <= 3 ? 1 : splits_of(problem, multiprocessors, kLeastOfFew, stage, pairs);
  // Where a block of a cluster would read more than kMostOfBlock, more splits are quicker, though another kernel adds
  // them up.
  constexpr int64_t kMostOfBlock = 256 * 1024;
  const int64_t bytes =
      pairs * seen * (attention.head_size + attention.v_head_size) * 2;  // of numbers; codes are no quicker
  if (cluster > 1 && (plan->splits <= cluster || bytes <= pairs * cluster * kMostOfBlock))
    plan->splits = plan->cluster = cluster;
  const int64_t blocks = pairs * plan->splits;
  const bool alone = blocks <= (plan->cluster <= 2 ? multiprocessors : multiprocessors / 2);
  const bool deep = alone && stages > plan->splits * 4 && fits(device, attention, kDeepStages, plan->cluster > 1);
  plan->stages = deep ? kDeepStages : kFewStages;
}

// Rows of a tile of many queries, whose heads have `rows` of them, `pairs` times. On wgmma tiles that do not fill the
// multiprocessors are smaller, except of heads of 64. plan->ring: where many tiles follow each other.
int rows_of_many(const AttentionProblem& problem, int multiprocessors, int64_t rows, int64_t pairs,
                 AttentionPlan* plan) {
  const qm_attention& attention = problem.attention;
  const int keys = attention.head_size, values = attention.v_head_size;
  if (!plan->wgmma) return many_rows(keys, values);
  const int64_t tiles = ceil_div(rows, ring_rows(keys)) * pairs;
  if (!has_codes(attention) && tiles > (keys == 64 ? 2 : 1) * multiprocessors) {
    plan->ring = multiprocessors;
    return ring_rows(keys);
  }
  return keys > 64 && ceil_div(rows, 128) * pairs <= multiprocessors ? 64 : 128;
}

// Caches in blocks: a request's tokens are few or many. How many it has is on the device, except where each has one.
void plan_paged(const AttentionProblem& problem, const qm_cuda_device& device, int multiprocessors,
                AttentionPlan* plan) {
  const qm_attention& attention = problem.attention;
  const int group = attention.num_heads / attention.kv_num_heads;
  const bool one_each = problem.tokens == problem.batch;
  plan->few_tokens = one_each ? std::min(1, kFewRows / group) : kFewRows / group;
  if (plan->few_tokens) {
    AttentionProblem few = problem;
    few.tokens = plan->few_tokens;
    plan_few(few, device, multiprocessors, plan);
  }
  if (one_each && plan->few_tokens) return;
  plan->wgmma = device.sm == 90 && attention.head_size % 64 == 0;
  plan->many_rows = rows_of_many(problem, multiprocessors, problem.tokens * group, attention.kv_num_heads, plan);
}

// On wgmma beyond 16 rows: products are of 64, but reading a stage takes as long. `rows` rows share a key, `times` for
// each head of keys of a batch row.
void plan_latent(const AttentionProblem& problem, const qm_cuda_device& device, int multiprocessors, int64_t rows,
                 int64_t times, AttentionPlan* plan) {
  const int64_t pairs = problem.batch * problem.attention.kv_num_heads * times;
  plan->wgmma = device.sm == 90 && rows > kFewRows;
  plan->tile_rows = plan->wgmma ? kLatentWideRows : kFewRows;
  plan->stages = plan->wgmma                                                                     ? kLatentWideStages
                 : fits(device, latent_shared_bytes(problem.attention.head_size, kLatentStages)) ? kLatentStages
                                                                                                 : kFewLatentStages;
  // One multiprocessor is for the blocks that store new keys.
  plan->splits = splits_of(problem, multiprocessors - 1, 0, plan->wgmma ? kLatentWideSlots : kLatentSlots,
                           ceil_div(rows, plan->tile_rows) * pairs, kMostLatentSplits);
}

// Of keys that are their values: a tile has heads of one token. Splits are of what a token of the last slot sees.
void plan_equal(const AttentionProblem& problem, const qm_cuda_device& device, int multiprocessors,
                AttentionPlan* plan) {
  const qm_attention& node = problem.attention;
  AttentionProblem seen = problem;
  if (node.sliding_window) seen.slots = std::min<int64_t>(seen.slots, node.sliding_window);
  if (node.compress_rate) seen.slots += problem.slots / node.compress_rate;
  plan_latent(seen, device, multiprocessors, node.num_heads / node.kv_num_heads, problem.tokens, plan);
}

}  // namespace

int plan_attention(const void* node, const qm_cuda_call& call, const qm_cuda_device& device, qm_cuda_node_plan& made,
                   char* err) {
  const AttentionProblem asked(*static_cast<const qm_attention*>(node), call.inputs);
  QM_TRY(validate_attributes(asked.attention, err));
  QM_TRY(validate_lists(asked.attention, call.inputs[CachedAttention_selected].shape, err));
  if (asked.type != QM_F16 && asked.type != QM_BF16)
    return fail(err, QM_UNSUPPORTED, "qkv is of type %d, the CUDA kernels take float16 (1) and bfloat16 (2)",
                asked.type);
  if (device.sm < 80)
    return fail(err, QM_UNSUPPORTED, "compute capability %d.%d, the kernels need 8.0 or later", device.sm / 10,
                device.sm % 10);
  if (device.sm < 90 && asked.attention.cache_format == k_cache_format_fp8_e4m3)
    return fail(err, QM_UNSUPPORTED,
                "cache_format is \"fp8_e4m3\", which needs compute capability 9.0 or later, found %d.%d",
                device.sm / 10, device.sm % 10);
  QM_TRY(validate_shapes(asked, err));
  const int64_t rows = asked.tokens * (asked.attention.num_heads / asked.attention.kv_num_heads);
  const int64_t all_tokens = asked.attention.block_size ? asked.tokens : asked.batch * asked.tokens;
  const int64_t heads = all_tokens * asked.attention.num_heads;
  constexpr int kMostMultiprocessors = 192;
  const int multiprocessors = device.multiprocessors ? device.multiprocessors : kMostMultiprocessors;
  const int64_t pairs = asked.batch * asked.attention.kv_num_heads;
  const int keys = asked.attention.head_size, values = asked.attention.v_head_size;
  AttentionPlan* const plan = &make_plan<AttentionPlan>(made);
  plan->cluster = 1;
  if (asked.attention.block_size) {
    plan_paged(asked, device, multiprocessors, plan);
  } else if (is_equal(asked.attention)) {
    plan_equal(asked, device, multiprocessors, plan);
  } else if (asked.attention.key_split) {
    plan_latent(asked, device, multiprocessors, rows, 1, plan);
  } else if (rows <= kFewRows) {
    plan_few(asked, device, multiprocessors, plan);
  } else {
    plan->wgmma = device.sm == 90 && keys % 64 == 0;
    plan->tile_rows = rows_of_many(asked, multiprocessors, rows, pairs, plan);
    plan->splits = splits_of(asked, multiprocessors, kLeastOfMany, plan->wgmma ? kWideKeys : attend_keys(keys, values),
                             ceil_div(rows, plan->tile_rows) * pairs);
  }
  auto take = [&](int64_t bytes) {
    const uint64_t at = made.workspace_bytes;
    made.workspace_bytes += static_cast<uint64_t>(ceil_div(bytes, 256) * 256);
    return at;
  };
  if (is_equal(asked.attention) || ((plan->many_rows || plan->tile_rows != kFewRows) && !asked.attention.key_split))
    plan->queries = take(heads * keys * 2);
  if (const qm_shape& lists = call.inputs[CachedAttention_selected].shape;
      lists.rank > 0 && asked.attention.compress_rate)
    plan->entries = take(all_tokens * lists.sizes[2] * (lists.sizes[3] + 1) * 4);
  if (plan->splits > 1 && plan->cluster == 1) {
    plan->sums = take(heads * plan->splits * 8);
    plan->partial = take(heads * plan->splits * values * 4);
  }
  return QM_OK;
}

}  // namespace quantmoe
