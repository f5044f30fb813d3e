// The plan of SparseIndexer: what the kernels take, and how many tokens have scores at a time. Pure; runs without a
// GPU.
#include "core/attributes.h"
#include "cuda/common/operators.h"
#include "cuda/indexer/indexer_call.h"

namespace quantmoe {

int plan_indexer(const void* own, const qm_cuda_call& made, const qm_cuda_device& device, qm_cuda_node_plan& plan,
                 char* err) {
  const qm_indexer& node = *static_cast<const qm_indexer*>(own);
  QM_TRY(check_indexer(node, err));
  const IndexerProblem call(node, made.inputs);
  if (call.type != QM_F16 && call.type != QM_BF16)
    return fail(err, QM_UNSUPPORTED, "query is of type %d, the CUDA kernels take float16 (1) and bfloat16 (2)",
                call.type);
  if (const int32_t cache = made.inputs[SparseIndexer_past_keys].type; cache != call.type)
    return fail(err, QM_UNSUPPORTED, "past_keys is of type %d and query of %d, the CUDA kernels take one type", cache,
                call.type);
  if (device.sm < 80)
    return fail(err, QM_UNSUPPORTED, "compute capability %d.%d, the kernels need 8.0 or later", device.sm / 10,
                device.sm % 10);
  if (node.head_size != 64 && node.head_size != 128)
    return fail(err, QM_UNSUPPORTED, "head_size is %d, the CUDA kernels take 64 and 128", node.head_size);
  if (call.columns() > kMostIndexHeads)
    return fail(err, QM_UNSUPPORTED,
                "num_heads is %d and num_groups %d, the CUDA kernels take up to %d heads, and as many in groups that "
                "are filled up to multiples of %d",
                node.num_heads, node.num_groups, kMostIndexHeads, kIndexColumns);
  constexpr int64_t kMost = INT32_MAX / 4;  // blocks and places of a list are counted in 32 bits
  if (call.batch < 0 || call.tokens < 0 || call.past_slots < 0 || call.slots > kMost || call.batch > kMost ||
      call.tokens > kMost || call.batch * call.tokens > kMost / (kMostSelectCluster * node.num_groups) ||
      call.batch * (call.slots / 64 + 1) > kMost)
    return fail(err, QM_UNSUPPORTED,
                "a batch of %lld with %lld tokens and %lld slots each, the CUDA kernels take up to %lld tokens, and 64 "
                "times as many slots, in all",
                static_cast<long long>(call.batch), static_cast<long long>(call.tokens),
                static_cast<long long>(call.slots),
                static_cast<long long>(kMost / (kMostSelectCluster * node.num_groups)));
  auto& chosen = make_plan<IndexerPlan>(plan);
  const int64_t runs = std::max<int64_t>(1, call.runs());
  chosen.runs = static_cast<int32_t>(
      call.scores_any() ? std::clamp<int64_t>(kMostIndexScores / call.scores_of_run(), 1, runs) : runs);
  chosen.cluster = 1;
  if (!call.scores_any()) return QM_OK;
  plan.workspace_bytes = static_cast<uint64_t>(chosen.runs * call.scores_of_run() * 4);
  // A block reads up to kScoresOfBlock scores about as fast alone.
  constexpr int64_t kScoresOfBlock = 4096;
  const int64_t lists = chosen.runs * int64_t{call.run()} * node.num_groups;
  while (device.sm >= 90 && chosen.cluster < kMostSelectCluster &&
         chosen.cluster * 2 * lists <= device.multiprocessors && call.stride() > kScoresOfBlock * chosen.cluster)
    chosen.cluster *= 2;
  return QM_OK;
}

}  // namespace quantmoe
