#include "cuda/experts_node.h"

#include <optional>
#include <string>
#include <vector>

#include "core/tensors.h"
#include "experts/per_session.h"

namespace quantmoe {

CudaMoE::CudaMoE(const Op& op, const OrtApi* api, const OrtKernelInfo* info, bool verify) : CudaNode(op, api, info) {
  read_attributes(info, &moe_);
  constants_ = read_constants(info);
  std::vector<qm_tensor> probe = constants_;
  probe[QuantMoE_hidden_states].type = op.type();
  probe[QuantMoE_topk_ids] = {nullptr, op.type_of(Type::I), {2, {1, 1}}};
  check_node(info, &moe_, probe, verify);
  const int64_t experts = constants_[QuantMoE_w13].shape.sizes[0];
  const OrtLogger* logger;  // each session has one: it says which session this is
  check(api->KernelInfo_GetLogger(info, &logger), "the session's logger");
  try {
    if (op.experts->trace != "") {
      ExpertSettings settings;
      settings.trace = op.experts->trace;
      trace_ = PerSession<Experts>::of(logger, settings);
      ExpertLayer layer{node_, experts, {}};
      for (const int i : {0, 1})
        layer.tensors[i].row_bytes = constants_[i ? QuantMoE_w2 : QuantMoE_w13].shape.sizes[1] * 4;
      traced_layer_ = trace_->add(std::move(layer));
    }
#if defined(__linux__)  // elsewhere check_cuda() refuses them
    if (!op.experts->host()) return;
    experts_ = PerSession<DeviceExperts>::of(logger, *op.experts);
    layer_ = experts_->add(node_, moe_, experts, constants_[QuantMoE_w13].data, constants_[QuantMoE_w2].data);
#endif
  } catch (const std::exception& e) {
    fail(e.what());
  }
}

// Waits for the device: ids are there, and the file is the host's.
void CudaMoE::trace(const qm_tensor& topk_ids, cudaStream_t stream) const try {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  const auto must = [](cudaError_t error) {
    if (error != cudaSuccess)
      throw std::runtime_error(std::string("quantmoe.trace: CUDA: ") + cudaGetErrorString(error));
  };
  must(cudaStreamIsCapturing(stream, &status));
  if (status != cudaStreamCaptureStatusNone)
    throw std::runtime_error("quantmoe.trace: a CUDA graph is captured, whose replays nothing sees; run without one");
  const int64_t tokens = rows_of(topk_ids.shape), top_k = last_of(topk_ids.shape);
  std::vector<char> ids(static_cast<size_t>(tokens * top_k * op_.id_bytes()));
  must(cudaMemcpyAsync(ids.data(), topk_ids.data, ids.size(), cudaMemcpyDeviceToHost, stream));
  must(cudaStreamSynchronize(stream));
  trace_->start();
  if (op_.id_bytes() == 8)
    trace_->trace(traced_layer_, reinterpret_cast<const int64_t*>(ids.data()), tokens, top_k);
  else
    trace_->trace(traced_layer_, reinterpret_cast<const int32_t*>(ids.data()), tokens, top_k);
} catch (const std::runtime_error& error) {
  throw std::runtime_error(node_ + ": " + error.what());
}

void CudaMoE::run(OrtKernelContext* context) const {
  Tensors tensors =
      read_tensors(context, [&](const FreeSizes<int64_t>& sizes, const qm_tensor*) { check_ids(context, sizes); });
  const qm_tensor& ids = tensors.inputs[QuantMoE_topk_ids];
  if (rows_of(ids.shape) == 0) return;
  for (const size_t input : {QuantMoE_w13, QuantMoE_w2}) tensors.inputs[input] = constants_[input];
  const auto stream = static_cast<cudaStream_t>(stream_of(context));
  if (trace_) trace(ids, stream);
  qm_cuda_call call{tensors.inputs.data(), tensors.outputs.data(), nullptr, nullptr, nullptr, nullptr};
  if (!experts_) {
    for (const size_t input : {QuantMoE_w13, QuantMoE_w2})
      tensors.inputs[input].data = data_of(get_input(context, input));
    return launch(context, &moe_, call);
  }
#if defined(__linux__)
  qm_cuda_experts experts{};
  std::string said;
  std::optional<DeviceExperts::Turn> turn;
  try {
    turn.emplace(*experts_, stream, last_of(ids.shape), &said);
    turn->place(layer_, tensors.inputs.data(), &experts);
  } catch (const std::runtime_error& error) {
    throw std::runtime_error(node_ + ": " + error.what());
  }
  if (said != "") log_info(context, said);
  call.experts = &experts;
  launch(context, &moe_, call);
#endif
}

}  // namespace quantmoe
