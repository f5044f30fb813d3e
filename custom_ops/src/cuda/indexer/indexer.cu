// SparseIndexer's plan to kernel launches.
#include "cuda/common/launcher.h"
#include "cuda/common/operators.h"
#include "cuda/indexer/indexer.cuh"

namespace quantmoe {
namespace {

template <typename T>
auto scores_kernel(int head_size, bool one_head) {
  if (one_head) return head_size == 64 ? index_scores<T, 64, true> : index_scores<T, 128, true>;
  return head_size == 64 ? index_scores<T, 64, false> : index_scores<T, 128, false>;
}

IndexerParams params_of(const IndexerProblem& problem, const IndexerPlan& plan, const qm_cuda_call& call) {
  const TensorsOf<qm_indexer> tensors{call.inputs, call.outputs};
  const qm_indexer& node = problem.node;
  IndexerParams params{};
  params.query = tensors.query, params.key = tensors.key, params.past_keys = tensors.past_keys;
  params.head_weights = tensors.head_weights, params.rows = tensors.rows;
  params.selected = tensors.selected, params.present_keys = tensors.present_keys;
  params.scores = static_cast<float*>(call.workspace), params.stride = problem.stride();
  params.batch = static_cast<int>(problem.batch), params.tokens = static_cast<int>(problem.tokens);
  params.past_slots = static_cast<int>(problem.past_slots), params.slots = static_cast<int>(problem.slots);
  params.heads = node.num_heads, params.groups = node.num_groups;
  params.group_heads = node.num_heads / node.num_groups, params.group_columns = problem.group_columns();
  params.columns = problem.columns();
  params.step = problem.step(), params.unit = problem.unit(), params.size = node.block_size;
  params.top_blocks = node.top_k / node.block_size, params.local_blocks = node.local_blocks;
  params.list_size = problem.list_size();
  params.run = problem.run(), params.runs_of_row = static_cast<int>(problem.runs_of_row());
  params.relu = node.relu, params.in_place = tensors.past_keys == tensors.present_keys && problem.past_slots > 0;
  params.copy_blocks = static_cast<int>(ceil_div(params.in_place ? problem.tokens : problem.slots, int64_t{64}));
  params.cluster = plan.cluster;
  return params;
}

}  // namespace

int launch_indexer(const void* own, const qm_cuda_node_plan& made, const qm_cuda_call& call, char* err) {
  const IndexerProblem problem(*static_cast<const qm_indexer*>(own), call.inputs);
  const auto& plan = plan_in<IndexerPlan>(made);
  IndexerParams params = params_of(problem, plan, call);
  if (params.in_place && problem.slots > problem.past_slots) {
    std::snprintf(err, QM_ERROR_SIZE, "present_keys is past_keys' memory, whose %lld slots are to become %lld",
                  static_cast<long long>(problem.past_slots), static_cast<long long>(problem.slots));
    return QM_INVALID;
  }
  const int size = problem.node.head_size;
  const bool one_head = problem.one_head();
  const auto scores =
      problem.type == QM_BF16 ? scores_kernel<__nv_bfloat16>(size, one_head) : scores_kernel<__half>(size, one_head);
  const int shared_bytes = 2 * params.columns * (size * 2 + 4);
  if (problem.scores_any())
    params.key_blocks = static_cast<int>(ceil_div(problem.slots / params.step, int64_t{kIndexKeys}));
  int copies = params.batch * params.copy_blocks;
  Launcher launcher{static_cast<cudaStream_t>(call.stream)};
  const int64_t runs = problem.runs();
  for (int64_t first = 0; first < runs || copies; first += plan.runs) {
    const int some = static_cast<int>(std::clamp<int64_t>(runs - first, 0, plan.runs));
    params.first_run = static_cast<int>(first), params.score_blocks = some * params.key_blocks;
    if (const int blocks = params.score_blocks + copies; blocks)
      launcher.run(scores, params, dim3(blocks), kIndexThreads, shared_bytes, true);
    copies = 0;
    if (some)
      launcher.run(select_slots, params, dim3(some * params.run * params.groups * params.cluster), kSelectThreads, 0,
                   true, params.cluster);
  }
  return report(launcher.error, err);
}

}  // namespace quantmoe
