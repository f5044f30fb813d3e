#include "cuda/experts_node.h"

#include <optional>
#include <string>
#include <vector>

#include "experts/per_session.h"

namespace quantmoe {

CudaMoE::CudaMoE(const Op& op, const OrtApi* api, const OrtKernelInfo* info, bool verify) : CudaNode(op, api, info) {
  read_attributes(info, &problem_.moe);
  problem_.type = op.type();
  problem_.id_bytes = op.id_bytes();
  problem_.local_experts = count_experts(info, QuantMoE_w13, qm_cuda_row_bytes(&problem_.moe, 13));
  if (const int64_t experts = count_experts(info, QuantMoE_w2, qm_cuda_row_bytes(&problem_.moe, 2));
      experts != problem_.local_experts)
    fail("w13 has " + std::to_string(problem_.local_experts) + " experts and w2 " + std::to_string(experts) +
         ", expected the same number");
  query_device();
  qm_cuda_problem probe = problem_;
  probe.tokens = probe.top_k = 1;
  qm_cuda_plan plan;
  char error[QM_ERROR_SIZE];
  if (qm_cuda_plan_moe(&probe, &device_, &plan, error)) fail(error);
  check_packed(info, QuantMoE_w13, verify);
  check_packed(info, QuantMoE_w2, verify);
  Shape shape;
  const void* w13 = data_of(get_weight(info, QuantMoE_w13, shape));
  if (problem_.moe.w13.perm && qm_cuda_check_moe(&problem_, w13, nullptr, error)) fail(error);
  const OrtLogger* logger;  // each session has one: it says which session this is
  check(api->KernelInfo_GetLogger(info, &logger), "the session's logger");
  try {
    if (op.experts->trace != "") {
      ExpertSettings settings;
      settings.trace = op.experts->trace;
      trace_ = PerSession<Experts>::of(logger, settings);
      ExpertLayer layer{node_, problem_.local_experts, {}};
      for (const int i : {0, 1})
        layer.tensors[i].row_bytes = static_cast<int64_t>(qm_cuda_row_bytes(&problem_.moe, i ? 2 : 13));
      traced_layer_ = trace_->add(std::move(layer));
    }
#if defined(__linux__)  // elsewhere check_cuda() refuses them
    if (!op.experts->host()) return;
    experts_ = PerSession<DeviceExperts>::of(logger, *op.experts);
    layer_ = experts_->add(node_, problem_, w13, data_of(get_weight(info, QuantMoE_w2, shape)));
#endif
  } catch (const std::exception& e) {
    fail(e.what());
  }
}

// Waits for the device: ids are there, and the file is the host's.
void CudaMoE::trace(const qm_cuda_problem& problem, const void* topk_ids, cudaStream_t stream) const try {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  const auto must = [](cudaError_t error) {
    if (error != cudaSuccess)
      throw std::runtime_error(std::string("quantmoe.trace: CUDA: ") + cudaGetErrorString(error));
  };
  must(cudaStreamIsCapturing(stream, &status));
  if (status != cudaStreamCaptureStatusNone)
    throw std::runtime_error("quantmoe.trace: a CUDA graph is captured, whose replays nothing sees; run without one");
  std::vector<char> ids(static_cast<size_t>(problem.tokens * problem.top_k * problem.id_bytes));
  must(cudaMemcpyAsync(ids.data(), topk_ids, ids.size(), cudaMemcpyDeviceToHost, stream));
  must(cudaStreamSynchronize(stream));
  trace_->start();
  if (problem.id_bytes == 8)
    trace_->trace(traced_layer_, reinterpret_cast<const int64_t*>(ids.data()), problem.tokens, problem.top_k);
  else
    trace_->trace(traced_layer_, reinterpret_cast<const int32_t*>(ids.data()), problem.tokens, problem.top_k);
} catch (const std::runtime_error& error) {
  throw std::runtime_error(node_ + ": " + error.what());
}

void CudaMoE::run(OrtKernelContext* context) const {
  const FreeSizes<int64_t> sizes = check_tokens(context);
  OrtValue* output = get_output(context, QuantMoE_output, sizes);
  qm_cuda_problem problem = problem_;
  problem.tokens = elements(*sizes.rest());
  problem.top_k = sizes.at('K');
  if (problem.tokens == 0) return;
  qm_cuda_tensors tensors{};
  tensors.hidden_states = data_of(get_input(context, QuantMoE_hidden_states));
  tensors.topk_ids = data_of(get_input(context, QuantMoE_topk_ids));
  tensors.topk_weights = static_cast<const float*>(data_of(get_input(context, QuantMoE_topk_weights)));
  if (trace_) trace(problem, tensors.topk_ids, static_cast<cudaStream_t>(stream_of(context)));
  std::string said;
#if defined(__linux__)
  std::optional<DeviceExperts::Turn> turn;
  if (experts_) {
    try {
      turn.emplace(*experts_, static_cast<cudaStream_t>(stream_of(context)), problem.top_k, &said);
      turn->place(layer_, &problem, &tensors);
    } catch (const std::runtime_error& error) {
      throw std::runtime_error(node_ + ": " + error.what());
    }
  } else
#endif
  {
    tensors.w13 = data_of(get_input(context, QuantMoE_w13));
    tensors.w2 = data_of(get_input(context, QuantMoE_w2));
  }
  if (said != "") log_info(context, said);
  execute<qm_cuda_plan>(context, problem, qm_cuda_plan_moe,
                        [&](const qm_cuda_plan& plan, void* workspace, void* stream, char* error) {
                          tensors.output = data_of(output);
                          tensors.workspace = workspace;
                          return qm_cuda_launch(&problem, &plan, &tensors, stream, error);
                        });
}

}  // namespace quantmoe
