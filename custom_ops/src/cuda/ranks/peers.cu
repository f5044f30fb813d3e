// Sums and gathers over GPUs of one host: call to kernel launches.
#include <algorithm>

#include "core/attributes.h"
#include "cuda/common/launcher.h"
#include "cuda/common/operators.h"
#include "cuda/ranks/peers.cuh"

namespace quantmoe {
namespace {

// Bytes up to which each rank is sent all parts: of two ranks as much as the other way sends, without its second wait.
constexpr int64_t few_bytes(int world) { return 16 * kFewWords * 2 / world; }

template <typename T>
int launch_sum(const SumParams& params, cudaStream_t stream, char* err) {
  const int64_t words = (params.count + 7) / 8;
  const qm_cuda_peers& peers = params.peers;
  Launcher launcher{stream};
  if (16 * words <= few_bytes(peers.world))
    launcher.run(exchange_few<T>, params, blocks_for(words, kFewThreads), kFewThreads, 0, true);
  else
    launcher.run(sum_many<T>, params,
                 std::min<unsigned>(peers.blocks, blocks_for(words, int64_t{peers.world} * kPartWords)), kPartThreads,
                 0, true);
  return report(launcher.error, err);
}

template <typename T>
int launch_sum_norm(const SumNormParams& params, cudaStream_t stream, char* err) {
  const qm_cuda_peers& peers = params.peers;
  const int words = params.norm.columns / 8;
  Launcher launcher{stream};
  if (const int each = blocks_for(words, kFewThreads);
      params.rows * each * kFewThreads * 16 <= few_bytes(peers.world)) {
    launcher.run(add_norm_few<T>, params, static_cast<unsigned>(params.rows), each * kFewThreads, 0, true);
  } else {
    const unsigned of = blocks_for(words, kPartWords);
    launcher.run(add_norm_many<T>, params,
                 std::min<unsigned>(std::max<unsigned>(peers.blocks / of, 1), blocks_for(params.rows, peers.world)),
                 of * kPartThreads, 0, true);
  }
  return report(launcher.error, err);
}

int check(const qm_cuda_peers& peers, int32_t type, char* err) {
  if (peers.world < 2 || peers.world > QM_CUDA_PEERS || peers.rank < 0 || peers.rank >= peers.world ||
      peers.blocks < 1 || peers.blocks > QM_CUDA_MOST_BLOCKS)
    return fail(err, QM_INVALID, "rank %d of %d with %d blocks, expected 2 to %d ranks and 1 to %d blocks", peers.rank,
                peers.world, peers.blocks, QM_CUDA_PEERS, QM_CUDA_MOST_BLOCKS);
  if (type == QM_F16 || type == QM_BF16) return QM_OK;
  return fail(err, QM_UNSUPPORTED, "x is of type %d, expected float16 or bfloat16", type);
}

}  // namespace
}  // namespace quantmoe

using namespace quantmoe;

int qm_cuda_clear_box(int32_t world, void* box, void* stream, char* err) {
  const auto queue = static_cast<cudaStream_t>(stream);
  cudaError_t error = cudaMemsetAsync(box, 0, box_bytes(world), queue);
  if (error == cudaSuccess)
    error = cudaMemsetAsync(static_cast<char*>(box) + few_at(), 0xff, parts_at(world) - few_at(), queue);
  return report(error, err);
}

int qm_cuda_launch_sum(const qm_cuda_peers* peers, const qm_cuda_sum* sum, void* stream, char* err) {
  if (const int status = check(*peers, sum->type, err)) return status;
  if (sum->count == 0) return QM_OK;
  const SumParams params{*peers, static_cast<const uint16_t*>(sum->x), static_cast<uint16_t*>(sum->y), sum->count, 0,
                         0};
  const auto queue = static_cast<cudaStream_t>(stream);
  return sum->type == QM_F16 ? launch_sum<half>(params, queue, err) : launch_sum<nv_bfloat16>(params, queue, err);
}

int qm_cuda_launch_sum_norm(const qm_cuda_peers* peers, const qm_norm* norm, const qm_cuda_call* call, char* err) {
  const qm_tensor& x = call->inputs[AddRMSNorm_x];
  if (const int status = check(*peers, x.type, err)) return status;
  qm_cuda_node_plan plan;
  if (const int status = plan_norm(norm, call->inputs, {}, plan, err)) return status;
  const SumNormParams params{*peers, norm_params(*norm, *call), rows_of(x.shape)};
  if (params.norm.columns % 8 || params.norm.columns > QM_CUDA_SUM_COLUMNS)
    return fail(err, QM_UNSUPPORTED, "x has %d columns, expected a multiple of 8 up to %d", params.norm.columns,
                QM_CUDA_SUM_COLUMNS);
  if (params.rows == 0) return QM_OK;
  const auto queue = static_cast<cudaStream_t>(call->stream);
  return x.type == QM_F16 ? launch_sum_norm<half>(params, queue, err)
                          : launch_sum_norm<nv_bfloat16>(params, queue, err);
}

int qm_cuda_launch_gather(const qm_cuda_peers* peers, const qm_cuda_gather* gather, void* stream, char* err) {
  if (const int status = check(*peers, gather->type, err)) return status;
  SumParams params{*peers,
                   static_cast<const uint16_t*>(gather->x),
                   static_cast<uint16_t*>(gather->y),
                   gather->rows * gather->columns,
                   gather->columns,
                   0};
  Launcher launcher{static_cast<cudaStream_t>(stream)};
  for (const int64_t words = (params.count + 7) / 8; params.first < words; params.first += kFewWords)
    launcher.run(exchange_few<void>, params,
                 blocks_for(std::min<int64_t>(words - params.first, kFewWords), kFewThreads), kFewThreads, 0, true);
  return report(launcher.error, err);
}
