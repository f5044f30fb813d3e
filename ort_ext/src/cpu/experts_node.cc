#include "cpu/experts_node.h"

#include <algorithm>
#include <new>

#include "core/tensors.h"
#include "experts/per_session.h"

namespace quantmoe {

MoENode::MoENode(const Op& op, const OrtApi* api, const OrtKernelInfo* info, WeightSource weights, bool verify)
    : CpuNode(op, api, info, weights, verify) {
  read_attributes(info, &moe_);
  if (*op.experts != ExpertSettings{}) {
    const OrtLogger* logger;  // each session has one: it says which session this is
    check(api->KernelInfo_GetLogger(info, &logger), "the session's logger");
    experts_ = PerSession<Experts>::of(logger, *op.experts);
  }
  const bool disk = experts_ && experts_->disk();
  Shape shapes[2];
  for (const int i : {0, 1}) {
    const size_t input = i ? QuantMoE_w2 : QuantMoE_w13;
    const void* data = disk ? data_of(get_weight(info, input, shapes[i])) : read_packed(info, input, shapes[i]);
    weights_[i] = packed_tensor(data, shapes[i]);
  }
  const qm_shape packed[] = {weights_[0].shape, weights_[1].shape};
  validate(&moe_, packed);
  ExpertLayer layer{node_, shapes[0][0], {}};
  for (const int i : {0, 1}) {
    const size_t input = i ? QuantMoE_w2 : QuantMoE_w13;
    layer.tensors[i].row_bytes = shapes[i][1] * 4;
    if (disk) layer.tensors[i] = find(weights_[i].data, shapes[0][0], shapes[i][1] * 4);
    if (layer.tensors[i].file) {
      check_file(info, input, layer.tensors[i], verify);
      continue;
    }
    if (disk) weights_[i].data = const_cast<void*>(read_packed(info, input, shapes[i]));  // auto, and no file has them
    check_packed(info, input, weights_[i].data, shapes[i]);
  }
  if (experts_) layer_ = add(std::move(layer));
}

ExpertLayer::Tensor MoENode::find(const void* data, int64_t rows, int64_t row_bytes) const try {
  return experts_->find(data, rows, row_bytes);
} catch (const std::exception& error) {
  fail(error.what());
}

int MoENode::add(ExpertLayer layer) const try {
  return experts_->add(std::move(layer));
} catch (const std::exception& error) {
  fail(error.what());
}

// As check_packed, but of the file: nothing of the mapping is read.
void MoENode::check_file(const OrtKernelInfo* info, size_t input, const ExpertLayer::Tensor& tensor,
                         bool verify) const {
  constexpr int64_t kPage = DataFile::kPage;
  constexpr auto kAligned = static_cast<std::align_val_t>(kPage);
  const auto release = [](char* pages) { ::operator delete[](pages, kAligned); };
  std::unique_ptr<char, decltype(release)> buffer(nullptr, release);
  int64_t room = 0;
  try {
    check_identity(info, input, verify, [&](size_t from, size_t size) {
      const int64_t first = tensor.offset + static_cast<int64_t>(from), bytes = static_cast<int64_t>(size);
      const int64_t needed = align_up(first % kPage + bytes, kPage);
      if (needed > room) {
        room = std::max(needed, 2 * kPage);
        buffer.reset(static_cast<char*>(::operator new[](static_cast<size_t>(room), kAligned)));
      }
      tensor.file->read(first, bytes, buffer.get() + first % kPage);
      return buffer.get() + first % kPage;
    });
  } catch (const std::runtime_error& error) {
    throw std::runtime_error(node_ + ": " + op_.inputs.first[input].name + ": " + error.what());
  }
}

// Before a run: the experts' memory, which the first run of a session allocates, and the trace.
void MoENode::start_experts(OrtKernelContext* context, const Tensors& tensors) const {
  const qm_tensor& ids = tensors.inputs[QuantMoE_topk_ids];
  const int64_t tokens = rows_of(ids.shape), top_k = last_of(ids.shape);
  std::string said;
  try {
    said = experts_->start();
    if (ids.type == QM_INT64)
      experts_->trace(layer_, static_cast<const int64_t*>(ids.data), tokens, top_k);
    else
      experts_->trace(layer_, static_cast<const int32_t*>(ids.data), tokens, top_k);
  } catch (const std::runtime_error& error) {
    throw std::runtime_error(node_ + ": " + error.what());
  }
  if (said != "") log_info(context, said);
}

// The rows of a run's experts, where they are read from the file.
struct LeasedRows {
  Experts::Lease lease;
  std::string error;

  LeasedRows(Experts& experts, int layer) : lease(experts, layer) {}
  static int64_t read(void* self, const int64_t* begin, int64_t first, const void** w13, const void** w2, char* err) {
    auto& rows = *static_cast<LeasedRows*>(self);
    try {
      return rows.lease.read(begin, first, w13, w2);
    } catch (const std::exception& error) {
      rows.error = error.what();
      err[0] = 0;
      return -1;
    }
  }
};

void MoENode::run(OrtKernelContext* context) const {
  Tensors tensors =
      read_tensors(context, [&](const FreeSizes<int64_t>& sizes, const qm_tensor*) { check_ids(context, sizes); });
  if (rows_of(tensors.inputs[QuantMoE_topk_ids].shape) == 0) return;
  tensors.inputs[QuantMoE_w13] = weights_[0];
  tensors.inputs[QuantMoE_w2] = weights_[1];
  if (experts_) start_experts(context, tensors);
  if (!experts_ || experts_->mapped()) return call(context, &moe_, tensors);
  LeasedRows rows(*experts_, layer_);
  try {
    call(context, &moe_, tensors, LeasedRows::read, &rows);
  } catch (const std::invalid_argument&) {
    if (rows.error == "") throw;
    throw std::runtime_error(node_ + ": " + rows.error);
  }
}

}  // namespace quantmoe
