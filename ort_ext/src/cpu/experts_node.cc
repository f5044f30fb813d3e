#include "cpu/experts_node.h"

#include <algorithm>
#include <new>
#include <optional>

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
    weights_[i] = disk ? data_of(get_weight(info, input, shapes[i])) : read_packed(info, input, shapes[i]);
  }
  local_experts_ = shapes[0][0];
  char error[QM_ERROR_SIZE];
  if (qm_moe_validate(&moe_, shapes[0].data(), shapes[1].data(), error)) fail(error);
  ExpertLayer layer{node_, local_experts_, {}};
  for (const int i : {0, 1}) {
    const size_t input = i ? QuantMoE_w2 : QuantMoE_w13;
    layer.tensors[i].row_bytes = shapes[i][1] * 4;
    if (disk) layer.tensors[i] = find(weights_[i], local_experts_, shapes[i][1] * 4);
    if (layer.tensors[i].file) {
      check_file(info, input, layer.tensors[i], verify);
      continue;
    }
    if (disk) weights_[i] = read_packed(info, input, shapes[i]);  // auto, and no file has them
    check_packed(info, input, weights_[i], shapes[i]);
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
void MoENode::start_experts(OrtKernelContext* context, const qm_moe_call& call) const {
  std::string said;
  try {
    said = experts_->start();
    if (call.id_bytes == 8)
      experts_->trace(layer_, static_cast<const int64_t*>(call.topk_ids), call.tokens, call.top_k);
    else
      experts_->trace(layer_, static_cast<const int32_t*>(call.topk_ids), call.tokens, call.top_k);
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
  const FreeSizes<int64_t> sizes = check_tokens(context);
  OrtValue* output = get_output(context, QuantMoE_output, sizes);
  qm_moe_call call{};
  call.tokens = elements(*sizes.rest());
  if (call.tokens == 0) return;
  call.type = op_.type();
  call.id_bytes = op_.id_bytes();
  call.top_k = sizes.at('K');
  call.local_experts = local_experts_;
  call.hidden_states = data_of(get_input(context, QuantMoE_hidden_states));
  call.topk_ids = data_of(get_input(context, QuantMoE_topk_ids));
  call.topk_weights = static_cast<const float*>(data_of(get_input(context, QuantMoE_topk_weights)));
  call.w13 = weights_[0];
  call.w2 = weights_[1];
  call.output = data_of(output);
  if (experts_) start_experts(context, call);
  std::optional<LeasedRows> rows;
  qm_expert_rows experts{nullptr, LeasedRows::read};
  if (experts_ && !experts_->mapped()) {
    experts.context = &rows.emplace(*experts_, layer_);
    call.experts = &experts;
  }
  with_pool(
      context, call, [&] { return qm_moe_workspace(&moe_, &call); },
      [&](char* error) {
        const int status = qm_moe_run(&moe_, &call, error);
        if (rows && rows->error != "") throw std::runtime_error(node_ + ": " + rows->error);
        return status;
      });
}

}  // namespace quantmoe
