// CachedAttention's plan to kernel launches.
#include <algorithm>

#include "cuda/attention.cuh"
#include "cuda/attention_wgmma.cuh"
#include "cuda/launcher.h"

namespace quantmoe {
namespace {

using AttendKernel = void (*)(AttendParams);

template <typename T, int D>
AttendKernel AttendOf(const qm_cuda_attention_plan& plan) {
  return plan.tile_rows == kFewRows ? Attend<T, D, 1, 1> : Attend<T, D, 2, 4>;
}
template <typename T>
AttendKernel WideOf(int head_size) {
  return head_size == 64 ? AttendWide<T, 64> : AttendWide<T, 128>;
}
template <typename T>
AttendKernel AttendOf(int head_size, const qm_cuda_attention_plan& plan) {
  return head_size == 64 ? AttendOf<T, 64>(plan) : head_size == 96 ? AttendOf<T, 96>(plan) : AttendOf<T, 128>(plan);
}

template <typename T>
int Launch(const qm_cuda_attention_problem& p, const qm_cuda_attention_plan& plan, const qm_cuda_attention_tensors& t,
           cudaStream_t stream, char* err) {
  const qm_attention& a = p.attention;
  const int batch = static_cast<int>(p.batch), tokens = static_cast<int>(p.tokens), slots = static_cast<int>(p.slots);
  const bool key_in_place = t.present_key == t.past_key, value_in_place = t.present_value == t.past_value;
  if (p.slots > p.past_slots && p.past_slots > 0 && (key_in_place || value_in_place)) {
    std::snprintf(err, QM_ERROR_SIZE, "present is past's memory, whose %lld slots are to become %lld",
                  static_cast<long long>(p.past_slots), static_cast<long long>(p.slots));
    return QM_INVALID;
  }
  uint8_t* workspace = static_cast<uint8_t*>(t.workspace);

  AppendParams append{};
  append.attention = a;
  append.batch = batch, append.tokens = tokens;
  append.past_slots = static_cast<int>(p.past_slots), append.slots = slots;
  append.qkv = t.qkv, append.past_key = t.past_key, append.past_value = t.past_value;
  append.rows = t.rows;
  append.cos = t.cos, append.sin = t.sin, append.q_norm = t.q_norm, append.k_norm = t.k_norm;
  append.queries = workspace + plan.queries, append.output = t.output;
  append.key = t.present_key, append.value = t.present_value;
  append.blocks_per_token = (a.num_heads + 2 * a.kv_num_heads + kAppendHeads - 1) / kAppendHeads;
  // Of many tokens a block has several, one after the other.
  const int blocks = batch * tokens / std::clamp(batch * tokens / 512, 1, 8);
  append.token_blocks = blocks * append.blocks_per_token;
  const int copies = key_in_place && value_in_place ? 0 : batch * a.kv_num_heads * ((slots + 63) / 64);
  Launcher launcher{stream};
  if (append.token_blocks + copies == 0) return QM_OK;
  launcher.Run(AttentionAppend<T>, append, dim3(append.token_blocks + copies), kAppendThreads, 0, true);
  if (batch * tokens == 0) return Report(launcher.error, err);

  AttendParams attend{};
  attend.queries = append.queries, attend.key = t.present_key, attend.value = t.present_value;
  attend.rows = t.rows, attend.sinks = t.sinks, attend.output = t.output;
  attend.sums = reinterpret_cast<float2*>(workspace + plan.sums);
  attend.partial = reinterpret_cast<float*>(workspace + plan.partial);
  attend.tokens = tokens, attend.kv_heads = a.kv_num_heads, attend.group = a.num_heads / a.kv_num_heads;
  attend.head_size = a.head_size;
  attend.past_slots = append.past_slots, attend.slots = slots;
  attend.window = a.sliding_window, attend.chunk = a.chunk_size;
  attend.splits = plan.splits;
  attend.in_place = key_in_place && value_in_place;
  attend.softcap = a.softcap;
  attend.tile_rows = plan.tile_rows, attend.tiles = (tokens * attend.group + plan.tile_rows - 1) / plan.tile_rows;
  attend.pairs = batch * a.kv_num_heads;
  const dim3 grid(attend.tiles * attend.pairs, plan.splits);
  if (plan.wgmma)
    launcher.Run(WideOf<T>(a.head_size), attend, grid, kWideThreads, WideSharedBytes(a.head_size), true);
  else
    launcher.Run(AttendOf<T>(a.head_size, plan), attend, grid, kAttendThreads,
                 AttendSharedBytes(plan.tile_rows, a.head_size), true);
  if (plan.splits > 1)
    launcher.Run(AttendMerge<T>, attend, dim3(batch * tokens * a.num_heads), kAttendThreads, 0, true);
  return Report(launcher.error, err);
}

}  // namespace
}  // namespace quantmoe

using namespace quantmoe;

extern "C" int qm_cuda_launch_attention(const qm_cuda_attention_problem* problem, const qm_cuda_attention_plan* plan,
                                        const qm_cuda_attention_tensors* tensors, void* stream, char* err) {
  cudaStream_t s = static_cast<cudaStream_t>(stream);
  return problem->type == QM_BF16 ? Launch<__nv_bfloat16>(*problem, *plan, *tensors, s, err)
                                  : Launch<__half>(*problem, *plan, *tensors, s, err);
}
