// The operators that need the other ranks of a sliced model, on CUDA devices.
#pragma once
#include <cuda_runtime_api.h>

#include <memory>

#include "core/tensors.h"
#include "cuda/cuda_node.h"
#include "experts/per_session.h"
#include "ranks/nccl.h"

namespace quantmoe {

// A node that needs the other ranks.
class CudaRank : public CudaNode {
 protected:
  using CudaNode::CudaNode;
  template <class Attributes>
  void join(const OrtKernelInfo* info, const Attributes& node);
  template <class Call>
  void enqueue(const Shape& x, cudaStream_t stream, const Call& call) const;

 private:
  std::shared_ptr<Communicator> communicator_;
};

template <class Attributes>
void CudaRank::join(const OrtKernelInfo* info, const Attributes& node) {
  const OrtLogger* logger;  // each session has one: it says which session this is
  check(api_->KernelInfo_GetLogger(info, &logger), "the session's logger");
  const Place place = place_in_group(node, "to rank 0's NCCL id in hex");
  try {
    communicator_ = PerSession<Communicator>::of(logger, DevicePlace{place, device_ordinal()});
  } catch (const std::exception& e) {
    fail(e.what());
  }
  check_place(communicator_->place(), place);
}

template <class Call>
void CudaRank::enqueue(const Shape& x, cudaStream_t stream, const Call& call) const {
  try {
    communicator_->agree(node_, text_of(x), stream);
    call(*communicator_);
  } catch (const std::runtime_error& error) {
    communicator_->fail_all(node_ + ": " + error.what());
    throw std::runtime_error(node_ + ": " + error.what());
  }
}

class CudaReduce : public CudaRank {
 public:
  CudaReduce(const Op& op, const OrtApi* api, const OrtKernelInfo* info, bool) : CudaRank(op, api, info) {
    const auto reduce = read_checked<qm_reduce>(info, check_reduce);
    join(info, reduce);
  }
  void run(OrtKernelContext* context) const override {
    const OrtValue* x = get_input(context, AllReduce_x);
    const Shape shape = shape_of(x);
    OrtValue* y = get_output(context, 0, shape);
    if (elements(shape) == 0) return;
    const auto stream = static_cast<cudaStream_t>(stream_of(context));
    enqueue(shape, stream,
            [&](const Communicator& all) { all.reduce(data_of(x), data_of(y), elements(shape), op_.type(), stream); });
  }
};

static_assert(AllReduceAddRMSNorm_x == AddRMSNorm_x && AllReduceAddRMSNorm_residual == AddRMSNorm_residual &&
              AllReduceAddRMSNorm_weight == AddRMSNorm_weight && AllReduceAddRMSNorm_y == AddRMSNorm_y &&
              AllReduceAddRMSNorm_sum == AddRMSNorm_sum);

class CudaReduceNorm : public CudaRank {
 public:
  CudaReduceNorm(const Op& op, const OrtApi* api, const OrtKernelInfo* info, bool) : CudaRank(op, api, info) {
    attributes_ = read_checked<qm_reduce_norm>(info, check_reduce_norm);
    const qm_norm norm = norm_of(attributes_);
    const std::vector<qm_tensor> constants = read_constants(info);
    (void)plan_of(&norm, {constants.data(), nullptr, nullptr, nullptr, nullptr, nullptr}, "AddRMSNorm");
    join(info, attributes_);
  }
  void run(OrtKernelContext* context) const override {
    const Tensors tensors = read_tensors(context);
    const int64_t rows = rows_of(tensors.inputs[AllReduceAddRMSNorm_x].shape);
    if (rows == 0) return;
    const qm_cuda_call call{
        tensors.inputs.data(), tensors.outputs.data(), nullptr, stream_of(context), nullptr, nullptr};
    const Shape shape{rows, tensors.inputs[AllReduceAddRMSNorm_weight].shape.sizes[0]};
    enqueue(shape, static_cast<cudaStream_t>(call.stream),
            [&](const Communicator& all) { all.reduce(attributes_, call); });
  }

 private:
  qm_reduce_norm attributes_{};
};

class CudaGather : public CudaRank {
 public:
  CudaGather(const Op& op, const OrtApi* api, const OrtKernelInfo* info, bool) : CudaRank(op, api, info) {
    gather_ = read_checked<qm_gather>(info, check_gather);
    join(info, gather_);
  }
  void run(OrtKernelContext* context) const override;

 private:
  qm_gather gather_{};
};

inline void CudaGather::run(OrtKernelContext* context) const {
  const OrtValue* x = get_input(context, AllGather_x);
  OrtValue* y = get_output(context, AllGather_y, check_inputs(context));
  const Shape shape = shape_of(x);
  const int64_t count = elements(shape);
  if (count == 0) return;
  const auto stream = static_cast<cudaStream_t>(stream_of(context));
  const int64_t rows = gather_.axis < 0 ? count / shape.back() : 1;
  const size_t size = op_.type() == QM_F32 ? 4 : 2, all_bytes = size * static_cast<size_t>(count * gather_.world);
  const Scratch scratch = scratch_of(context, rows > 1 ? all_bytes : 0);
  enqueue(shape, stream, [&](const Communicator& all) {
    all.gather(data_of(x), data_of(y), count, rows, op_.type(), scratch.get(), stream);
  });
}

class CudaScatter : public CudaRank {
 public:
  CudaScatter(const Op& op, const OrtApi* api, const OrtKernelInfo* info, bool) : CudaRank(op, api, info) {
    scatter_ = read_checked<qm_scatter>(info, check_scatter);
    join(info, scatter_);
  }
  void run(OrtKernelContext* context) const override {
    const OrtValue* x = get_input(context, ReduceScatter_x);
    OrtValue* y = get_output(context, ReduceScatter_y, check_inputs(context));
    const int64_t own = elements(shape_of(x)) / scatter_.world;
    if (own == 0) return;
    const auto stream = static_cast<cudaStream_t>(stream_of(context));
    enqueue(shape_of(x), stream,
            [&](const Communicator& all) { all.scatter(data_of(x), data_of(y), own, op_.type(), stream); });
  }

 private:
  qm_scatter scatter_{};
};

}  // namespace quantmoe
