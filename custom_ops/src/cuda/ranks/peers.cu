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

int check(const qm_cuda_call& call, int32_t type, char* err) {
  if (!call.peers) return fail(err, QM_INVALID, "the call has no peers, which operators of ranks need");
  const qm_cuda_peers& peers = *call.peers;
  if (peers.world < 2 || peers.world > QM_CUDA_PEERS || peers.rank < 0 || peers.rank >= peers.world ||
      peers.blocks < 1 || peers.blocks > QM_CUDA_MOST_BLOCKS)
    return fail(err, QM_INVALID, "rank %d of %d with %d blocks, expected 2 to %d ranks and 1 to %d blocks", peers.rank,
                peers.world, peers.blocks, QM_CUDA_PEERS, QM_CUDA_MOST_BLOCKS);
  if (type == QM_F16 || type == QM_BF16) return QM_OK;
  return fail(err, QM_UNSUPPORTED, "x is of type %d, expected float16 or bfloat16", type);
}

}  // namespace

int launch_reduce(const void*, const qm_cuda_node_plan&, const qm_cuda_call& call, char* err) {
  const qm_tensor& x = call.inputs[AllReduce_x];
  QM_TRY(check(call, x.type, err));
  const int64_t count = rows_of(x.shape) * last_of(x.shape);
  if (count == 0) return QM_OK;
  auto* const y = static_cast<uint16_t*>(call.outputs[AllReduce_y].data);
  const SumParams params{*call.peers, static_cast<const uint16_t*>(x.data), y, count, 0, 0};
  const auto stream = static_cast<cudaStream_t>(call.stream);
  return x.type == QM_F16 ? launch_sum<half>(params, stream, err) : launch_sum<nv_bfloat16>(params, stream, err);
}

int launch_reduce_norm(const void* node, const qm_cuda_node_plan&, const qm_cuda_call& call, char* err) {
  const qm_tensor& x = call.inputs[AddRMSNorm_x];
  QM_TRY(check(call, x.type, err));
  const qm_norm norm = norm_of(*static_cast<const qm_reduce_norm*>(node));
  qm_cuda_node_plan plan;
  QM_TRY(plan_norm(&norm, call, {}, plan, err));
  const SumNormParams params{*call.peers, norm_params(norm, call), rows_of(x.shape)};
  if (params.norm.columns % 8 || params.norm.columns > QM_CUDA_SUM_COLUMNS)
    return fail(err, QM_UNSUPPORTED, "x has %d columns, expected a multiple of 8 up to %d", params.norm.columns,
                QM_CUDA_SUM_COLUMNS);
  if (params.rows == 0) return QM_OK;
  const auto stream = static_cast<cudaStream_t>(call.stream);
  return x.type == QM_F16 ? launch_sum_norm<half>(params, stream, err)
                          : launch_sum_norm<nv_bfloat16>(params, stream, err);
}

int launch_gather(const void* node, const qm_cuda_node_plan&, const qm_cuda_call& call, char* err) {
  const qm_tensor& x = call.inputs[AllGather_x];
  QM_TRY(check(call, x.type, err));
  const int64_t count = rows_of(x.shape) * last_of(x.shape);
  SumParams params{*call.peers,
                   static_cast<const uint16_t*>(x.data),
                   static_cast<uint16_t*>(call.outputs[AllGather_y].data),
                   count,
                   static_cast<const qm_gather*>(node)->axis < 0 ? last_of(x.shape) : count,
                   0};
  Launcher launcher{static_cast<cudaStream_t>(call.stream)};
  for (const int64_t words = (params.count + 7) / 8; params.first < words; params.first += kFewWords)
    launcher.run(exchange_few<void>, params,
                 blocks_for(std::min<int64_t>(words - params.first, kFewWords), kFewThreads), kFewThreads, 0, true);
  return report(launcher.error, err);
}

}  // namespace quantmoe

using namespace quantmoe;

int qm_cuda_allocate_box(int32_t world, void** box, char* err) {
  QM_TRY(qm_cuda_allocate(box_bytes(world), box, err));
  cudaError_t error = cudaMemsetAsync(*box, 0, box_bytes(world), nullptr);
  if (error == cudaSuccess)
    error = cudaMemsetAsync(static_cast<char*>(*box) + few_at(), 0xff, parts_at(world) - few_at(), nullptr);
  if (error == cudaSuccess) error = cudaStreamSynchronize(nullptr);
  return report(error, err);
}
