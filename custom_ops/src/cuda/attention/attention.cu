// CachedAttention's plan to kernel launches.
#include <algorithm>
#include <tuple>

#include "cuda/attention/attention_append.cuh"
#include "cuda/attention/attention_call.h"
#include "cuda/attention/attention_kernels.h"
#include "cuda/common/launcher.h"
#include "cuda/common/operators.h"
#include "cuda/common/tensor_map.h"

namespace quantmoe {
namespace {

// What all of its kernels are told.
AttentionParams params_of(const AttentionProblem& problem, const AttentionPlan& plan, const AttentionTensors& tensors) {
  const qm_attention& node = problem.attention;
  const int width = node.head_size, value_width = node.v_head_size;
  const bool codes = node.cache_format != k_cache_format_none;
  uint8_t* workspace = static_cast<uint8_t*>(tensors.workspace);

  AttentionParams params{};
  params.attention = node;
  params.batch = static_cast<int>(problem.batch), params.tokens = static_cast<int>(problem.tokens);
  params.past_slots = static_cast<int>(problem.past_slots), params.slots = static_cast<int>(problem.slots);
  params.group = node.num_heads / node.kv_num_heads;
  params.qkv = tensors.qkv, params.past_key = tensors.past_key, params.past_value = tensors.past_value;
  params.row_size = static_cast<int>(qkv_size(node)), params.gates_size = static_cast<int>(gates_size(node));
  params.rows = tensors.rows;
  const bool paged = node.block_size > 0;
  params.block_table = paged ? tensors.block_table : nullptr;
  params.columns = paged ? params.slots / node.block_size : 0;
  params.blocks = static_cast<int>(problem.blocks),
  params.positions = node.rotary_size ? static_cast<int>(problem.positions) : INT32_MAX;
  params.all_tokens = paged ? params.tokens : params.batch * params.tokens;
  params.row_tokens = params.tokens;
  params.cos = tensors.cos, params.sin = tensors.sin, params.q_norm = tensors.q_norm, params.k_norm = tensors.k_norm,
  params.sinks = tensors.sinks;
  params.score_factor = node.scale * node.k_scale * (node.softcap != 0 ? 1.f : kLog2e);
  params.output = tensors.output, params.key = tensors.present_key, params.value = tensors.present_value;
  params.queries = workspace + plan.queries;
  params.entries = reinterpret_cast<int*>(workspace + plan.entries);
  params.partial = reinterpret_cast<float*>(workspace + plan.partial);
  params.sums = reinterpret_cast<float2*>(workspace + plan.sums);
  params.tile_rows = plan.tile_rows;
  params.tiles = paged ? params.tokens * params.group / plan.tile_rows + params.batch
                       : (params.tokens * params.group + plan.tile_rows - 1) / plan.tile_rows;
  params.pairs = params.batch * node.kv_num_heads;
  params.splits = plan.splits, params.cluster = plan.cluster > 1;
  params.stage_log = plan.wgmma ? kWideStageLog : is_wide(width, value_width) ? 5 : 6;
  if (plan.tile_rows == kFewRows && codes) ++params.stage_log;
  params.deep = plan.stages == kDeepStages;
  params.key_width = node.key_split ? node.key_split : width;
  params.value_width = node.key_split ? width - node.key_split : value_width;
  params.least_log = least_of(plan.tile_rows, params.cluster);
  if (plan.ring && ring_sizes(plan.tile_rows, width, value_width).keys == 128)
    ++params.stage_log, --params.least_log;  // as many slots
  return params;
}

// Lists, where a row may read them. Sizes of rows, splits and stages are of attention without lists.
void add_lists(const AttentionTensors& tensors, AttentionParams* params) {
  const qm_shape& lists = tensors.of_inputs[CachedAttention_selected].shape;
  if (lists.rank < 0 || params->slots <= lists.sizes[3] || params->tokens == 0) return;
  params->selected = tensors.selected;
  params->lists = static_cast<int>(lists.sizes[2]), params->list_size = static_cast<int>(lists.sizes[3]);
  params->gathers = params->attention.key_split || params->tile_rows == kFewRows;
}

// Keys that are their values; `copies` blocks copy past.
void launch_equal(Launcher& launcher, const AttentionProblem& problem, const AttentionPlan& plan,
                  AttentionParams& params, int copies) {
  const qm_attention& node = problem.attention;
  constexpr int kHeads = kAppendThreads / 32;
  params.equal = true, params.window = node.sliding_window, params.attention.sliding_window = 0;
  params.stage_log = plan.wgmma ? 6 : 5;
  params.least_log = 0;
  params.tiles_per_token = (params.group + plan.tile_rows - 1) / plan.tile_rows;
  params.tiles = params.tokens * params.tiles_per_token;
  const int heads = node.num_heads + node.kv_num_heads * (node.key_split ? 1 : 2);
  params.blocks_per_token = (heads + kHeads - 1) / kHeads;
  params.token_blocks = params.all_tokens * params.blocks_per_token;
  const int lists = params.selected && node.compress_rate ? params.all_tokens * params.lists : 0;
  if (const int blocks = params.token_blocks + lists + copies)
    launcher.run(equal_append_kernel(problem.type), params, dim3(blocks), kAppendThreads, 0, true);
  if (const int blocks = params.tiles * params.pairs * plan.splits)
    launcher.run(plan.wgmma ? equal_wide_kernel(problem.type) : equal_kernel(problem.type, plan.stages), params,
                 dim3(blocks), kLatentThreads,
                 plan.wgmma ? latent_wide_shared_bytes(kEqualKeys) : latent_shared_bytes(kEqualKeys, plan.stages),
                 true);
}

// Rows of few tokens; `copies` blocks copy past.
void launch_few(Launcher& launcher, const AttentionProblem& problem, const AttentionPlan& plan,
                const AttentionParams& params, int copies) {
  const int keys = problem.attention.head_size, values = problem.attention.v_head_size;
  const bool codes = problem.attention.cache_format != k_cache_format_none;
  const bool lists = params.selected;
  const int blocks = params.pairs * (lists ? params.tokens : 1) + (copies + plan.splits - 1) / plan.splits;
  const auto kernel = lists   ? few_lists_kernel(problem.type, keys, codes)
                      : codes ? few_codes_kernel(problem.type, keys, values)
                              : few_kernel(problem.type, keys, values);
  launcher.run(kernel, params, dim3(blocks * plan.splits), kFewThreads,
               few_shared_bytes(keys, values, plan.stages, params.cluster), true, plan.cluster);
}

// Tiles of many rows; lists: of rows that read lists, else of the other rows.
void launch_tiles(Launcher& launcher, const AttentionProblem& problem, const AttentionPlan& plan,
                  AttentionParams params, bool lists) {
  const int keys = problem.attention.head_size, values = problem.attention.v_head_size, type = problem.type;
  const bool codes = problem.attention.cache_format != k_cache_format_none;
  if (lists && plan.wgmma) {
    params.tile_rows = kWideListRows, params.stage_log = kWideStageLog;
    params.tiles = static_cast<int>(ceil_div(problem.tokens * params.group, int64_t{kWideListRows}));
  }
  const int rows = params.tile_rows;
  const dim3 grid(params.tiles * (params.block_table ? problem.attention.kv_num_heads : params.pairs), plan.splits);
  if (plan.wgmma) {
    const auto kernel = lists   ? wide_lists_kernel(type, keys, codes)
                        : codes ? wide_codes_kernel(type, keys, values, rows)
                                : wide_kernel(type, keys, values, rows);
    const int window = lists ? list_window_bytes(kWideMaskWords) : 0;
    launcher.run(kernel, params, grid, 2 * rows, wide_shared_bytes(rows, keys, values, codes) + window, true);
  } else {
    const auto kernel = lists   ? many_lists_kernel(type, keys, codes)
                        : codes ? many_codes_kernel(type, keys, values)
                                : many_kernel(type, keys, values);
    const int window = lists ? list_window_bytes(kManyMaskWords) : 0;
    launcher.run(kernel, params, grid, kAttendThreads, many_shared_bytes(keys, values, codes) + window, true);
  }
}

// Many tiles on wgmma. Returns QM_OK, or QM_INVALID with the reason in err.
int launch_ring(Launcher& launcher, const AttentionProblem& problem, const AttentionPlan& plan,
                const AttentionParams& params, char* err) {
  const qm_attention& node = problem.attention;
  const bool paged = node.block_size > 0;
  const cuuint64_t keys = node.head_size, values = node.v_head_size;
  const RingSizes sizes = ring_sizes(plan.tile_rows, node.head_size, node.v_head_size);
  RingParams ring{params, params.tiles * (paged ? node.kv_num_heads : params.pairs), {}, {}, {}};
  QM_TRY(make_tensor_map(&ring.queries, params.queries, 2,
                         {keys, static_cast<cuuint64_t>(params.all_tokens) * node.num_heads}, {2 * keys},
                         {64, static_cast<cuuint32_t>(plan.tile_rows)}, true, err));
  // A box has a head's slots: rows of its own, or one of kv_num_heads in each slot of the blocks.
  const cuuint64_t second = paged ? node.kv_num_heads : params.slots,
                   third = paged ? std::max<int64_t>(1, problem.blocks * node.block_size) : params.pairs;
  const auto slots = static_cast<cuuint32_t>(sizes.keys);
  for (const auto& [map, cache, width] :
       {std::tuple{&ring.keys, params.key, keys}, std::tuple{&ring.values, params.value, values}})
    QM_TRY(make_tensor_map(map, cache, 2, {width, second, third}, {2 * width, second * width * 2},
                           {64, paged ? 1 : slots, paged ? slots : 1}, true, err));
  launcher.run(ring_kernel(problem.type, node.head_size, node.v_head_size), ring,
               dim3(std::min(ring.tiles * params.splits, plan.ring)), 2 * plan.tile_rows + 128, sizes.shared_bytes,
               true);
  return QM_OK;
}

// Rows of many tokens: new keys and values, then the softmax. Returns as launch_ring.
template <typename T>
int launch_many(Launcher& launcher, const AttentionProblem& problem, const AttentionPlan& plan, AttentionParams params,
                int copies, char* err) {
  const qm_attention& node = problem.attention;
  const int keys = node.head_size, values = node.v_head_size;
  const bool codes = node.cache_format != k_cache_format_none;
  constexpr int kNarrow = 16, kBroad = 32;  // lanes of a head
  const int lanes = is_wide(keys, values) ? kBroad : kNarrow, heads = kAppendThreads / lanes;
  const int all_heads = node.num_heads + 2 * node.kv_num_heads;
  params.blocks_per_token = (all_heads + heads - 1) / heads;
  params.heads_per_block = (all_heads + params.blocks_per_token - 1) / params.blocks_per_token;
  // Of many tokens a block has several, one after the other.
  params.token_blocks = params.all_tokens / std::clamp(params.all_tokens / 512, 1, 8) * params.blocks_per_token;
  const auto append =
      codes ? (lanes == kBroad ? attention_append<T, kBroad, true> : attention_append<T, kNarrow, true>)
            : (lanes == kBroad ? attention_append<T, kBroad, false> : attention_append<T, kNarrow, false>);
  const int threads = (params.heads_per_block * lanes + 31) / 32 * 32;
  launcher.run(append, params, dim3(params.token_blocks + copies), threads, 0, true);
  if (!plan.ring) launch_tiles(launcher, problem, plan, params, false);
  if (plan.ring) QM_TRY(launch_ring(launcher, problem, plan, params, err));
  if (params.selected) launch_tiles(launcher, problem, plan, params, true);
  return QM_OK;
}

// Adds up splits that are no cluster.
template <typename T>
void launch_merge(Launcher& launcher, const AttentionParams& params) {
  if (params.splits > 1 && !params.cluster && params.all_tokens)
    launcher.run(params.splits > kMostSplits ? attend_merge<T, kMostLatentSplits> : attend_merge<T, kMostSplits>,
                 params,
                 dim3(params.all_tokens * params.attention.num_heads, (params.attention.v_head_size + 127) / 128),
                 kAttendThreads, 0, true);
}

// Caches in blocks: requests of few tokens, then the others. Returns as launch_ring.
template <typename T>
int launch_paged(Launcher& launcher, const AttentionProblem& problem, const AttentionPlan& plan,
                 const AttentionTensors& tensors, char* err) {
  if (plan.few_tokens) {
    AttentionPlan few = plan;
    few.wgmma = few.ring = 0;
    AttentionParams params = params_of(problem, few, tensors);
    params.row_tokens = plan.few_tokens;
    launch_few(launcher, problem, few, params, 0);
    launch_merge<T>(launcher, params);
  }
  if (plan.many_rows) {
    AttentionPlan many = plan;
    many.tile_rows = plan.many_rows, many.splits = many.cluster = 1;
    AttentionParams params = params_of(problem, many, tensors);
    params.least_tokens = plan.few_tokens + 1;
    QM_TRY(launch_many<T>(launcher, problem, many, params, 0, err));
  }
  return QM_OK;
}

// Of caches in blocks: makes present what past is. Returns CUDA's status.
cudaError_t copy_blocks(const AttentionProblem& problem, const void* past, void* present, int width,
                        cudaStream_t stream) {
  const qm_attention& node = problem.attention;
  const int64_t element = node.cache_format != k_cache_format_none ? 1 : 2;
  const int64_t bytes = problem.blocks * node.block_size * node.kv_num_heads * width * element;
  if (past == present || bytes == 0) return cudaSuccess;
  return cudaMemcpyAsync(present, past, static_cast<size_t>(bytes), cudaMemcpyDeviceToDevice, stream);
}

template <typename T>
int launch(const AttentionProblem& problem, const AttentionPlan& plan, const AttentionTensors& tensors,
           cudaStream_t stream, char* err) {
  const qm_attention& node = problem.attention;
  if (node.block_size) {
    Launcher launcher{stream};
    if (cudaError_t error = copy_blocks(problem, tensors.past_key, tensors.present_key, node.head_size, stream))
      return report(error, err);
    if (cudaError_t error = copy_blocks(problem, tensors.past_value, tensors.present_value, node.v_head_size, stream))
      return report(error, err);
    AttentionTensors in_place = tensors;
    in_place.past_key = tensors.present_key, in_place.past_value = tensors.present_value;
    if (problem.tokens) QM_TRY(launch_paged<T>(launcher, problem, plan, in_place, err));
    return report(launcher.error, err);
  }
  const bool in_place = tensors.present_key == tensors.past_key && tensors.present_value == tensors.past_value;
  if (problem.slots > problem.past_slots && problem.past_slots > 0 &&
      (tensors.present_key == tensors.past_key || tensors.present_value == tensors.past_value)) {
    std::snprintf(err, QM_ERROR_SIZE, "present is past's memory, whose %lld slots are to become %lld",
                  static_cast<long long>(problem.past_slots), static_cast<long long>(problem.slots));
    return QM_INVALID;
  }
  AttentionParams params = params_of(problem, plan, tensors);
  add_lists(tensors, &params);
  const int all = params.all_tokens, copies = in_place ? 0 : params.pairs * ((params.slots + 63) / 64);
  Launcher launcher{stream};

  if (is_equal(node)) {
    launch_equal(launcher, problem, plan, params, copies);
  } else if (node.key_split) {
    const int slots = plan.wgmma ? kLatentWideSlots : kLatentSlots;
    params.stage_log = slots == 64 ? 6 : 5;
    params.least_log = 0;
    params.token_blocks = all;
    params.appended = params.tokens > kFewLatentTokens;
    if (params.selected) {
      params.tiles_per_token = (params.group + plan.tile_rows - 1) / plan.tile_rows;
      params.tiles = params.tokens * params.tiles_per_token;  // at least as many as rows without lists have
    }
    if (all + copies == 0) return QM_OK;
    if (params.appended)
      launcher.run(latent_append_kernel(problem.type), params, dim3(all + copies), kLatentThreads, 0, true);
    const int blocks = params.tiles * params.pairs * plan.splits + (params.appended ? 0 : all + copies);
    const bool lists = params.selected;
    launcher.run(plan.wgmma ? latent_wide_kernel(problem.type, lists) : latent_kernel(problem.type, plan.stages, lists),
                 params, dim3(blocks), kLatentThreads,
                 plan.wgmma ? latent_wide_shared_bytes(kLatentKeys) : latent_shared_bytes(kLatentKeys, plan.stages),
                 true);
  } else if (plan.tile_rows == kFewRows) {
    if (!all) params.pairs = 0;
    if (params.pairs + copies == 0) return QM_OK;
    launch_few(launcher, problem, plan, params, copies);
  } else {
    QM_TRY(launch_many<T>(launcher, problem, plan, params, copies, err));
  }
  launch_merge<T>(launcher, params);
  return report(launcher.error, err);
}

}  // namespace

int launch_attention(const void* node, const qm_cuda_node_plan& plan, const qm_cuda_call& call, char* err) {
  const AttentionProblem problem(*static_cast<const qm_attention*>(node), call.inputs);
  const AttentionTensors tensors{{call.inputs, call.outputs}, call.workspace};
  const auto& own = plan_in<AttentionPlan>(plan);
  const auto stream = static_cast<cudaStream_t>(call.stream);
  return problem.type == QM_BF16 ? launch<__nv_bfloat16>(problem, own, tensors, stream, err)
                                 : launch<__half>(problem, own, tensors, stream, err);
}

}  // namespace quantmoe
