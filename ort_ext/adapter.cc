// The operators as ONNX Runtime custom operators on the CPU: a thin adapter over the C ABI of quant_moe.h. What can be
// checked is checked when a session is created.
#if defined(__linux__)
#include <sys/mman.h>
#elif defined(_WIN32)
#define NOMINMAX
#include <windows.h>
#elif defined(__APPLE__)
#include <dlfcn.h>
#endif

#include <cstdlib>
#include <cstring>
#include <new>
#include <optional>

#include "adapter.h"
#include "experts/per_session.h"
#include "group.h"
#include "pool.h"

namespace quantmoe {
namespace {

// What a session does with the packed weights when it is created: they stay in the file, mapped by ONNX Runtime, or are
// read in there, or copied to memory that no change of the file reaches.
enum class WeightSource { kMapped, kPrefaulted, kCopied };

constexpr uintptr_t kPage = 4096;

// Asks the system to read mapped bytes ahead, in one piece where it can. An advice: nothing depends on it.
void will_need([[maybe_unused]] const void* data, [[maybe_unused]] size_t bytes) {
#if defined(__linux__)
  const uintptr_t begin = reinterpret_cast<uintptr_t>(data) / kPage * kPage;
  (void)madvise(reinterpret_cast<void*>(begin), reinterpret_cast<uintptr_t>(data) + bytes - begin, MADV_WILLNEED);
#elif defined(_WIN32)
  WIN32_MEMORY_RANGE_ENTRY range{const_cast<void*>(data), bytes};
  (void)PrefetchVirtualMemory(GetCurrentProcess(), 1, &range, 0);
#endif
}

// Reads the mapped pages in now instead of at first use. The kernel populates the page table too (Linux 5.14);
// elsewhere a byte of each page is touched.
void prefault(const void* data, size_t bytes) {
#if defined(__linux__)
  constexpr int kPopulateRead = 22;  // MADV_POPULATE_READ, newer than some headers
  const uintptr_t begin = reinterpret_cast<uintptr_t>(data) / kPage * kPage;
  if (madvise(reinterpret_cast<void*>(begin), reinterpret_cast<uintptr_t>(data) + bytes - begin, kPopulateRead) == 0)
    return;
#else
  will_need(data, bytes);
#endif
  for (size_t at = 0; at < bytes; at += kPage) (void)static_cast<const volatile char*>(data)[at];
}

// A node on the session's threads.
class CpuNode : public Kernel {
 public:
  ~CpuNode() override { api_->ReleaseMemoryInfo(memory_); }

 protected:
  CpuNode(const Op& op, const OrtApi* api, const OrtKernelInfo* info, WeightSource weights, bool verify)
      : Kernel(op, api, info), weights_(weights), verify_(verify) {
    check(api->CreateCpuMemoryInfo(OrtArenaAllocator, OrtMemTypeDefault, &memory_));
  }
  const void* read_packed(const OrtKernelInfo* info, size_t input, Shape& shape);
  void check_packed(const OrtKernelInfo* info, size_t input, const void* data, const Shape& shape) const;
  template <class Call, class Size, class Body>
  void with_pool(OrtKernelContext* context, Call& call, const Size& workspace, const Body& run) const;

 private:
  struct alignas(64) Line {
    char bytes[64];
  };
  WeightSource weights_;
  bool verify_;
  std::vector<std::unique_ptr<Line[]>> copies_;
  OrtMemoryInfo* memory_ = nullptr;
};

// The packed tensor, for the life of the session: ONNX Runtime's memory-mapped external data, or a copy of it.
const void* CpuNode::read_packed(const OrtKernelInfo* info, size_t input, Shape& shape) {
  const void* data = data_of(get_weight(info, input, shape));
  const std::string name = op_.inputs.first[input].name;
  const size_t bytes = static_cast<size_t>(shape[0] * shape[1]) * 4;
  if (weights_ == WeightSource::kCopied) {
    try {
      copies_.emplace_back(new Line[(bytes + sizeof(Line) - 1) / sizeof(Line)]);  // not initialized
    } catch (const std::bad_alloc&) {
      fail("no memory for a copy of " + name + ", " + std::to_string(bytes) + " bytes");
    }
    return std::memcpy(copies_.back().get(), data, bytes);
  }
  if (reinterpret_cast<uintptr_t>(data) % 64)
    fail(name +
         " is not 64-byte aligned in memory, expected external data at a multiple of 64 in its file and buffers of "
         "yours at such an address; with others, as .ort bytes used in place, set the session entry "
         "quantmoe.prefault to copy");
  if (weights_ == WeightSource::kPrefaulted) prefault(data, bytes);
  return data;
}

// What can be checked of a packed tensor whose shape is right.
void CpuNode::check_packed(const OrtKernelInfo* info, size_t input, const void* data, const Shape& shape) const {
  // The pages of the samples at once, and only these: one after the other each would wait for the disk, and for the
  // pages around it.
  for (const size_t at : samples_of(static_cast<size_t>(shape[0] * shape[1]) * 4))
    will_need(static_cast<const char*>(data) + at, 1);
  check_identity(info, input, verify_, [data](size_t at, size_t) { return static_cast<const char*>(data) + at; });
}

// Completes a call with the session's threads and a workspace of workspace() bytes, and makes it.
template <class Call, class Size, class Body>
void CpuNode::with_pool(OrtKernelContext* context, Call& call, const Size& workspace, const Body& run) const {
  try {
    quantmoe::with_pool(api_, context, memory_, call, workspace, run);
  } catch (const std::invalid_argument& error) {
    fail(error.what());
  }
}

class MoENode : public CpuNode {
 public:
  MoENode(const Op& op, const OrtApi* api, const OrtKernelInfo* info, WeightSource weights, bool verify)
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
  void run(OrtKernelContext* context) const override;

 private:
  ExpertLayer::Tensor find(const void* data, int64_t rows, int64_t row_bytes) const;
  int add(ExpertLayer layer) const;
  void check_file(const OrtKernelInfo* info, size_t input, const ExpertLayer::Tensor& tensor, bool verify) const;
  void start_experts(OrtKernelContext* context, const qm_moe_call& call) const;

  qm_moe moe_{};
  const void* weights_[2];  // w13, w2
  int64_t local_experts_;
  std::shared_ptr<Experts> experts_;  // null: nothing is asked of it
  int layer_ = 0;
};

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

class LinearNode : public CpuNode {
 public:
  LinearNode(const Op& op, const OrtApi* api, const OrtKernelInfo* info, WeightSource weights, bool verify)
      : CpuNode(op, api, info, weights, verify) {
    read_attributes(info, &linear_);
    Shape shape;
    w_ = read_packed(info, QuantLinear_w, shape);
    char error[QM_ERROR_SIZE];
    if (qm_linear_validate(&linear_, shape.data(), error)) fail(error);
    check_packed(info, QuantLinear_w, w_, shape);
  }
  void run(OrtKernelContext* context) const override;

 private:
  qm_linear linear_{};
  const void* w_;
};

void LinearNode::run(OrtKernelContext* context) const {
  const FreeSizes<int64_t> sizes = check_inputs(context);
  qm_linear_call call{};
  call.rows = elements(*sizes.rest());
  OrtValue* y = get_output(context, QuantLinear_y, sizes);
  if (call.rows == 0) return;
  call.type = op_.type();
  call.x = data_of(get_input(context, QuantLinear_x));
  call.w = w_;
  call.y = data_of(y);
  with_pool(
      context, call, [&] { return qm_linear_workspace(&linear_, &call); },
      [&](char* error) { return qm_linear_run(&linear_, &call, error); });
}

class RoutingNode : public CpuNode {
 public:
  RoutingNode(const Op& op, const OrtApi* api, const OrtKernelInfo* info, WeightSource weights, bool verify)
      : CpuNode(op, api, info, weights, verify) {
    read_attributes(info, &routing_);
    char error[QM_ERROR_SIZE];
    if (qm_routing_validate(&routing_, error)) fail(error);
  }
  void run(OrtKernelContext* context) const override;

 private:
  qm_routing routing_{};
};

void RoutingNode::run(OrtKernelContext* context) const {
  const FreeSizes<int64_t> sizes = check_inputs(context);
  qm_routing_call call{};
  call.tokens = elements(*sizes.rest());
  if (call.tokens == 0) {
    for (const int32_t i : {MoERouting_topk_ids, MoERouting_topk_weights}) get_output(context, i, sizes);
    return;
  }
  call.type = op_.type();
  qm_routing_call& tensors = call;
#define QM_ONLY "ops/moe_routing.def"
#include "tensors.inc"
  with_pool(
      context, call, [&] { return qm_routing_workspace(&routing_, &call); },
      [&](char* error) { return qm_routing_run(&routing_, &call, error); });
}

class AttentionNode : public CpuNode {
 public:
  AttentionNode(const Op& op, const OrtApi* api, const OrtKernelInfo* info, WeightSource weights, bool verify)
      : CpuNode(op, api, info, weights, verify) {
    read_attributes(info, &attention_);
    char error[QM_ERROR_SIZE];
    if (qm_attention_validate(&attention_, error)) fail(error);
    check_caches(attention_);
  }
  void run(OrtKernelContext* context) const override;

 private:
  qm_attention attention_{};
};

void AttentionNode::run(OrtKernelContext* context) const {
  if (size_t count = op_.inputs.most; attention_.nope_size && input_count() != count)
    fail("it has " + std::to_string(input_count()) + " inputs, expected " + std::to_string(count) +
         ", k_up and v_up too, where nope_size is " + std::to_string(attention_.nope_size));
  const FreeSizes<int64_t> sizes = check_inputs(context);
  const auto input = [&](int32_t index) { return data_of(get_input(context, static_cast<size_t>(index))); };
  qm_attention_call call{};
  call.type = op_.type();
  call.cache_type = op_.cache_type();
  call.batch = sizes.at('B');
  call.tokens = sizes.at('S');
  call.past_slots = sizes.at('P');
  call.slots = std::max(call.past_slots, sizes.at('L'));
  call.qkv = input(CachedAttention_qkv);
  call.past_key = input(CachedAttention_past_key);
  call.past_value = input(CachedAttention_past_value);
  call.rows = static_cast<const int32_t*>(input(CachedAttention_rows));
  call.cos = static_cast<const float*>(input(CachedAttention_cos));
  call.sin = static_cast<const float*>(input(CachedAttention_sin));
  call.q_norm = static_cast<const float*>(input(CachedAttention_q_norm));
  call.k_norm = static_cast<const float*>(input(CachedAttention_k_norm));
  call.sinks = static_cast<const float*>(input(CachedAttention_sinks));
  if (attention_.nope_size) {
    call.k_up = input(CachedAttention_k_up);
    call.v_up = input(CachedAttention_v_up);
  }
  for (int64_t b = 0; b < call.batch; ++b) {
    const int64_t count = call.rows[3 * b + 1], before = call.rows[3 * b + 2];
    if (before >= 0 && before + count > call.slots) fail_slots(sizes, before + count);
  }
  call.output = data_of(get_output(context, CachedAttention_output, sizes));
  call.present_key = data_of(get_present(context, CachedAttention_present_key, sizes));
  call.present_value = data_of(get_present(context, CachedAttention_present_value, sizes));
  with_pool(
      context, call, [&] { return qm_attention_workspace(&attention_, &call); },
      [&](char* error) { return qm_attention_run(&attention_, &call, error); });
}

// CausalConv, GatedDelta or StateSpace: a node with a state.
template <class Node, class Call, int (*kValidate)(const Node*, char*), size_t (*kWorkspace)(const Node*, const Call*),
          int (*kRun)(const Node*, const Call*, char*)>
class StatefulNode : public CpuNode {
 public:
  StatefulNode(const Op& op, const OrtApi* api, const OrtKernelInfo* info, WeightSource weights, bool verify)
      : CpuNode(op, api, info, weights, verify) {
    read_attributes(info, &attributes_);
    char error[QM_ERROR_SIZE];
    if (kValidate(&attributes_, error)) fail(error);
  }
  void run(OrtKernelContext* context) const override {
    Call call{};
    call.type = op_.type();
    read_stateful(context, attributes_, call, call);
    with_pool(
        context, call, [&] { return kWorkspace(&attributes_, &call); },
        [&](char* error) { return kRun(&attributes_, &call, error); });
  }

 private:
  Node attributes_{};
};
using ConvNode = StatefulNode<qm_conv, qm_conv_call, qm_conv_validate, qm_conv_workspace, qm_conv_run>;
using DeltaNode = StatefulNode<qm_delta, qm_delta_call, qm_delta_validate, qm_delta_workspace, qm_delta_run>;
using SpaceNode = StatefulNode<qm_space, qm_space_call, qm_space_validate, qm_space_workspace, qm_space_run>;

// A node that needs the other ranks.
class RankNode : public Kernel {
 public:
  using Kernel::Kernel;

 protected:
  template <class Node>
  void join(const OrtKernelInfo* info, const Node& node);
  void meet(Piece part, void* y) const;

 private:
  std::shared_ptr<Member> member_;
};

template <class Node>
void RankNode::join(const OrtKernelInfo* info, const Node& node) {
  const Place place = place_in_group(node, "to one name in the sessions of all ranks, in this process");
  const OrtLogger* logger;  // each session has one: it says which session this is
  check(api_->KernelInfo_GetLogger(info, &logger), "the session's logger");
  try {
    member_ = PerSession<Member>::of(logger, place);
  } catch (const std::invalid_argument& error) {
    fail(error.what());
  }
  check_place(member_->place(), place);
}

void RankNode::meet(Piece part, void* y) const {
  try {
    member_->meet(std::move(part), y);
  } catch (const std::runtime_error& error) {
    throw std::runtime_error(node_ + ": " + error.what());
  }
}

class ReduceNode : public RankNode {
 public:
  ReduceNode(const Op& op, const OrtApi* api, const OrtKernelInfo* info, WeightSource, bool) : RankNode(op, api, info) {
    const auto reduce = read_checked<qm_reduce>(info, check_reduce);
    join(info, reduce);
  }
  void run(OrtKernelContext* context) const override {
    const OrtValue* x = get_input(context, AllReduce_x);
    const Shape shape = shape_of(x);
    meet({data_of(x), elements(shape), op_.type(), node_}, data_of(get_output(context, 0, shape)));
  }
};

class GatherNode : public RankNode {
 public:
  GatherNode(const Op& op, const OrtApi* api, const OrtKernelInfo* info, WeightSource, bool) : RankNode(op, api, info) {
    gather_ = read_checked<qm_gather>(info, check_gather);
    join(info, gather_);
  }
  void run(OrtKernelContext* context) const override {
    const OrtValue* x = get_input(context, AllGather_x);
    const FreeSizes<int64_t> sizes = check_inputs(context);
    OrtValue* y = get_output(context, AllGather_y, sizes);
    const int64_t count = elements(shape_of(x)), row = gather_.axis < 0 ? sizes.at('N') : count;
    meet({data_of(x), count, op_.type(), node_, std::max(row, int64_t{1})}, data_of(y));
  }

 private:
  qm_gather gather_{};
};

class ScatterNode : public RankNode {
 public:
  ScatterNode(const Op& op, const OrtApi* api, const OrtKernelInfo* info, WeightSource, bool)
      : RankNode(op, api, info) {
    scatter_ = read_checked<qm_scatter>(info, check_scatter);
    join(info, scatter_);
  }
  void run(OrtKernelContext* context) const override {
    const OrtValue* x = get_input(context, ReduceScatter_x);
    OrtValue* y = get_output(context, ReduceScatter_y, check_inputs(context));
    meet({.x = data_of(x), .count = elements(shape_of(x)), .type = op_.type(), .node = node_, .scattered = true},
         data_of(y));
  }

 private:
  qm_scatter scatter_{};
};

// A node of a file for NVIDIA GPUs.
class OfAnotherTarget : public Kernel {
 public:
  OfAnotherTarget(const Op& op, const OrtApi* api, const OrtKernelInfo* info, WeightSource, bool)
      : Kernel(op, api, info) {
    fail("the model is exported for NVIDIA GPUs: register libquantmoe_ort_cuda.so, or export it with --target cpu");
  }
  void run(OrtKernelContext*) const override {}
};

template <class T, WeightSource weights, bool verify>
Kernel* make_node(const Op& op, const OrtApi* api, const OrtKernelInfo* info) {
  return new T(op, api, info, weights, verify);
}

template <WeightSource weights, bool verify>
void add_operators(const OrtApi* api, std::deque<Op>& ops) {
  constexpr auto kId32 = ONNX_TENSOR_ELEMENT_DATA_TYPE_INT32, kId64 = ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64;
  for (auto type : {ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT, ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16,
                    ONNX_TENSOR_ELEMENT_DATA_TYPE_BFLOAT16}) {
    for (auto id_type : {kId32, kId64})
      ops.emplace_back(api, nullptr, "QuantMoE", type, id_type, make_node<MoENode, weights, verify>);
    ops.emplace_back(api, nullptr, "QuantLinear", type, kId32, make_node<LinearNode, weights, verify>);
    ops.emplace_back(api, nullptr, "MoERouting", type, kId32, make_node<RoutingNode, weights, verify>);
    for (auto cache : {ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT, ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16,
                       ONNX_TENSOR_ELEMENT_DATA_TYPE_INT8, ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT8})
      ops.emplace_back(api, nullptr, "CachedAttention", type, cache, make_node<AttentionNode, weights, verify>);
    ops.emplace_back(api, nullptr, "AllReduce", type, kId32, make_node<ReduceNode, weights, verify>);
    ops.emplace_back(api, nullptr, "AllGather", type, kId32, make_node<GatherNode, weights, verify>);
    ops.emplace_back(api, nullptr, "ReduceScatter", type, kId32, make_node<ScatterNode, weights, verify>);
    for (const char* other : {"MoERouter", "AddRMSNorm", "AllReduceAddRMSNorm", "TokenRows"})
      ops.emplace_back(api, nullptr, other, type, type, make_node<OfAnotherTarget, weights, verify>);
    ops.emplace_back(api, nullptr, "CausalConv", type, kId32, make_node<ConvNode, weights, verify>);
    ops.emplace_back(api, nullptr, "GatedDelta", type, kId32, make_node<DeltaNode, weights, verify>);
    ops.emplace_back(api, nullptr, "StateSpace", type, kId32, make_node<SpaceNode, weights, verify>);
  }
}

template <WeightSource weights>
Fill add_operators(bool verify) {
  return verify ? add_operators<weights, true> : add_operators<weights, false>;
}

// What the session's configuration entry quantmoe.prefault says, which is made before the library is registered, or for
// all sessions QUANTMOE_PREFAULT in the environment.
Fill choose_operators(const OrtApi* api, const OrtSessionOptions* options) {
  constexpr const char* kEntry = "quantmoe.prefault";
  std::string wanted = session_entry(api, options, kEntry);
  const char* environment = std::getenv("QUANTMOE_PREFAULT");
  if (wanted == "" && environment) wanted = environment;
  const bool verify = wants_verify(api, options);
  expert_settings(api, options).check();
  if (wanted == "" || wanted == "0") return add_operators<WeightSource::kMapped>(verify);
  if (wanted == "1") return add_operators<WeightSource::kPrefaulted>(verify);
  if (wanted == "copy") return add_operators<WeightSource::kCopied>(verify);
  throw std::invalid_argument(std::string("quantmoe: ") + kEntry + " (or QUANTMOE_PREFAULT) is \"" + wanted +
                              "\", expected 0, 1 or copy");
}

}  // namespace
}  // namespace quantmoe

// A line of JSON for each session whose experts are read or traced, cut at `size` with its NUL; returns the bytes of
// all.
extern "C" QM_API size_t qm_experts_report(char* text, size_t size) {
  const std::string all = quantmoe::Experts::report();
  if (size) text[all.copy(text, size - 1)] = 0;
  return all.size() + 1;
}

extern "C" QM_API OrtStatus* ORT_API_CALL RegisterCustomOps(OrtSessionOptions* options, const OrtApiBase* base) {
#if defined(_WIN32)  // stays when ONNX Runtime unloads it (CMakeLists.txt)
  HMODULE self;
  (void)GetModuleHandleExW(GET_MODULE_HANDLE_EX_FLAG_PIN | GET_MODULE_HANDLE_EX_FLAG_FROM_ADDRESS,
                           reinterpret_cast<LPCWSTR>(&RegisterCustomOps), &self);
#elif defined(__APPLE__)
  if (Dl_info self; dladdr(reinterpret_cast<const void*>(&RegisterCustomOps), &self))
    (void)dlopen(self.dli_fname, RTLD_NOW | RTLD_NODELETE);
#endif
  return quantmoe::register_ops(options, base, "CPU", quantmoe::choose_operators);
}
