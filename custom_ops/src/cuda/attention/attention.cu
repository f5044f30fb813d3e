// CachedAttention's plan to kernel launches.
#include <algorithm>

#include "cuda/attention/attention_append.cuh"
#include "cuda/attention/attention_kernels.h"
#include "cuda/common/launcher.h"

namespace quantmoe {
namespace {

// What all of its kernels are told.
AttentionParams params_of(const qm_cuda_attention_problem& problem, const qm_cuda_attention_plan& plan,
                          const qm_cuda_attention_tensors& tensors) {
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
  params.cos = tensors.cos, params.sin = tensors.sin, params.q_norm = tensors.q_norm, params.k_norm = tensors.k_norm,
  params.sinks = tensors.sinks;
  params.score_factor = node.scale * node.k_scale * (node.softcap != 0 ? 1.f : kLog2e);
  params.output = tensors.output, params.key = tensors.present_key, params.value = tensors.present_value;
  params.queries = workspace + plan.queries;
  params.partial = reinterpret_cast<float*>(workspace + plan.partial);
  params.sums = reinterpret_cast<float2*>(workspace + plan.sums);
  params.tile_rows = plan.tile_rows;
  params.tiles = (params.tokens * params.group + plan.tile_rows - 1) / plan.tile_rows;
  params.pairs = params.batch * node.kv_num_heads;
  params.splits = plan.splits, params.cluster = plan.cluster > 1;
  params.stage_log = plan.wgmma || !is_wide(width, value_width) ? 6 : 5;
  if (plan.tile_rows == kFewRows && codes) ++params.stage_log;
  params.deep = plan.stages == kDeepStages;
  params.key_width = node.key_split ? node.key_split : width;
  params.value_width = node.key_split ? width - node.key_split : value_width;
  params.least_log = least_of(plan.tile_rows, params.cluster);
  return params;
}

template <typename T>
int launch(const qm_cuda_attention_problem& problem, const qm_cuda_attention_plan& plan,
           const qm_cuda_attention_tensors& tensors, cudaStream_t stream, char* err) {
  const qm_attention& node = problem.attention;
  const bool in_place = tensors.present_key == tensors.past_key && tensors.present_value == tensors.past_value;
  if (problem.slots > problem.past_slots && problem.past_slots > 0 &&
      (tensors.present_key == tensors.past_key || tensors.present_value == tensors.past_value)) {
    std::snprintf(err, QM_ERROR_SIZE, "present is past's memory, whose %lld slots are to become %lld",
                  static_cast<long long>(problem.past_slots), static_cast<long long>(problem.slots));
    return QM_INVALID;
  }
  const int width = node.head_size, value_width = node.v_head_size;
  const bool codes = node.cache_format != k_cache_format_none;
  AttentionParams params = params_of(problem, plan, tensors);
  const int all = params.batch * params.tokens, copies = in_place ? 0 : params.pairs * ((params.slots + 63) / 64);
  Launcher launcher{stream};

  if (node.key_split) {
    const int slots = plan.wgmma ? kLatentWideSlots : kLatentSlots;
    params.stage_log = slots == 64 ? 6 : 5;
    params.least_log = 0;
    params.token_blocks = all;
    params.appended = params.tokens > kFewLatentTokens;
    if (all + copies == 0) return QM_OK;
    if (params.appended)
      launcher.run(latent_append_kernel(problem.type), params, dim3(all + copies), kLatentThreads, 0, true);
    const int blocks = params.tiles * params.pairs * plan.splits + (params.appended ? 0 : all + copies);
    launcher.run(plan.wgmma ? latent_wide_kernel(problem.type) : latent_kernel(problem.type, plan.stages), params,
                 dim3(blocks), kLatentThreads, plan.wgmma ? kLatentWideSharedBytes : latent_shared_bytes(plan.stages),
                 true);
  } else if (plan.tile_rows == kFewRows) {
    const int blocks = (all ? params.pairs : 0) + (copies + plan.splits - 1) / plan.splits;
    if (blocks == 0) return QM_OK;
    if (!all) params.pairs = 0;
    launcher.run((codes ? few_codes_kernel : few_kernel)(problem.type, width, value_width), params,
                 dim3(blocks * plan.splits), kFewThreads,
                 few_shared_bytes(width, value_width, plan.stages, params.cluster), true, plan.cluster);
  } else {
    constexpr int kNarrow = 16, kBroad = 32;  // lanes of a head
    const int lanes = is_wide(width, value_width) ? kBroad : kNarrow, heads = kAppendThreads / lanes;
    const int all_heads = node.num_heads + 2 * node.kv_num_heads;
    params.blocks_per_token = (all_heads + heads - 1) / heads;
    params.heads_per_block = (all_heads + params.blocks_per_token - 1) / params.blocks_per_token;
    // Of many tokens a block has several, one after the other.
    params.token_blocks = all / std::clamp(all / 512, 1, 8) * params.blocks_per_token;
    const auto append =
        codes ? (lanes == kBroad ? attention_append<T, kBroad, true> : attention_append<T, kNarrow, true>)
              : (lanes == kBroad ? attention_append<T, kBroad, false> : attention_append<T, kNarrow, false>);
    const int threads = (params.heads_per_block * lanes + 31) / 32 * 32;
    launcher.run(append, params, dim3(params.token_blocks + copies), threads, 0, true);
    const dim3 grid(params.tiles * params.pairs, plan.splits);
    if (plan.wgmma)
      launcher.run((codes ? wide_codes_kernel : wide_kernel)(problem.type, width, value_width, plan.tile_rows), params,
                   grid, 2 * plan.tile_rows, wide_shared_bytes(plan.tile_rows, width, value_width, codes), true);
    else
      launcher.run((codes ? many_codes_kernel : many_kernel)(problem.type, width, value_width), params, grid,
                   kAttendThreads, many_shared_bytes(width, value_width, codes), true);
  }
  if (plan.splits > 1 && !params.cluster && all)
    launcher.run(plan.splits > kMostSplits ? attend_merge<T, kMostLatentSplits> : attend_merge<T, kMostSplits>, params,
                 dim3(all * node.num_heads, (value_width + 127) / 128), kAttendThreads, 0, true);
  return report(launcher.error, err);
}

}  // namespace
}  // namespace quantmoe

using namespace quantmoe;

extern "C" int qm_cuda_launch_attention(const qm_cuda_attention_problem* problem, const qm_cuda_attention_plan* plan,
                                        const qm_cuda_attention_tensors* tensors, void* stream, char* err) {
  cudaStream_t s = static_cast<cudaStream_t>(stream);
  return problem->type == QM_BF16 ? launch<__nv_bfloat16>(*problem, *plan, *tensors, s, err)
                                  : launch<__half>(*problem, *plan, *tensors, s, err);
}
