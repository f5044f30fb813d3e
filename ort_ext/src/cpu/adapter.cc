// The operators as ONNX Runtime custom operators on the CPU: a thin adapter over the C ABI of quant_moe.h. What can be
// checked is checked when a session is created.
#if !defined(_WIN32)  // where an earlier declaration without dllexport is an error
#include <quantmoe/register_custom_ops.h>
#endif

#include <cstdlib>

#include "common/entries.h"
#include "common/registration.h"
#include "core/tensors.h"
#include "cpu/cpu_node.h"
#include "cpu/experts_node.h"
#include "cpu/rank_nodes.h"

namespace quantmoe {
namespace {

// An operator without packed weights.
class PlainNode : public CpuNode {
 public:
  PlainNode(const Op& op, const OrtApi* api, const OrtKernelInfo* info, WeightSource weights, bool verify)
      : CpuNode(op, api, info, weights, verify), attributes_(qm_find_operator(op.name)->count) {
    read_attributes(info, attributes_.data());
    validate(attributes_.data());
  }
  void run(OrtKernelContext* context) const override { call(context, attributes_.data(), read_tensors(context)); }

 private:
  std::vector<int32_t> attributes_;  // the operator's struct
};

class LinearNode : public CpuNode {
 public:
  LinearNode(const Op& op, const OrtApi* api, const OrtKernelInfo* info, WeightSource weights, bool verify)
      : CpuNode(op, api, info, weights, verify) {
    read_attributes(info, &linear_);
    Shape shape;
    const void* const w = read_packed(info, QuantLinear_w, shape);
    w_ = packed_tensor(w, shape);
    validate(&linear_, &w_.shape);
    check_packed(info, QuantLinear_w, w, shape);
  }
  void run(OrtKernelContext* context) const override {
    Tensors tensors = read_tensors(context);
    tensors.inputs[QuantLinear_w] = w_;
    if (rows_of(tensors.inputs[QuantLinear_x].shape)) call(context, &linear_, tensors);
  }

 private:
  qm_linear linear_{};
  qm_tensor w_;
};

class AttentionNode : public CpuNode {
 public:
  AttentionNode(const Op& op, const OrtApi* api, const OrtKernelInfo* info, WeightSource weights, bool verify)
      : CpuNode(op, api, info, weights, verify) {
    read_attributes(info, &attention_);
    validate(&attention_);
    check_caches(attention_);
  }
  void run(OrtKernelContext* context) const override;

 private:
  qm_attention attention_{};
};

void AttentionNode::run(OrtKernelContext* context) const {
  if (size_t count = CachedAttention_v_up + 1; attention_.nope_size && input_count() < count)
    fail("it has " + std::to_string(input_count()) + " inputs, expected " + std::to_string(count) +
         ", k_up and v_up too, where nope_size is " + std::to_string(attention_.nope_size));
  check_table(attention_);
  const Tensors tensors = read_tensors(context, [this](const FreeSizes<int64_t>& sizes, const qm_tensor* inputs) {
    if (attention_.block_size) return;
    const int64_t slots = AttentionSlots(attention_, inputs).all;
    const auto* rows = static_cast<const int32_t*>(inputs[CachedAttention_rows].data);
    for (int64_t b = 0; b < sizes.at('B'); ++b) {
      const int64_t count = rows[3 * b + 1], before = rows[3 * b + 2];
      if (before >= 0 && before + count > slots) fail_slots(sizes, before + count);
    }
  });
  call(context, &attention_, tensors);
}

// A node of a file for NVIDIA GPUs.
class OfAnotherTarget : public Node {
 public:
  OfAnotherTarget(const Op& op, const OrtApi* api, const OrtKernelInfo* info, WeightSource, bool)
      : Node(op, api, info) {
    fail("the model is exported for NVIDIA GPUs: register libquantmoe_ort_cuda.so, or export it with --target cpu");
  }
  void run(OrtKernelContext*) const override {}
};

template <class T, WeightSource weights, bool verify>
Node* make_node(const Op& op, const OrtApi* api, const OrtKernelInfo* info) {
  return new T(op, api, info, weights, verify);
}

template <class Attributes>
using ClassOf = std::conditional_t<
    std::is_same_v<Attributes, qm_moe>, MoENode,
    std::conditional_t<std::is_same_v<Attributes, qm_linear>, LinearNode,
                       std::conditional_t<std::is_same_v<Attributes, qm_attention>, AttentionNode, PlainNode>>>;

// Whether op.def says that the kernels of the CPU run an operator.
constexpr bool runs_here(std::string_view wanted) {
#define QM_CPU(op, name) \
  if (wanted == #op) return true;
#include "op.def"
  return false;
}

template <WeightSource weights, bool verify>
void add_operators(const OrtApi* api, std::deque<Op>& ops) {
  constexpr auto kFloat = ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT, kFloat16 = ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16;
  for (auto type : {kFloat, kFloat16, ONNX_TENSOR_ELEMENT_DATA_TYPE_BFLOAT16}) {
    const auto add = [&](const char* op, Op::Make make) {
      const auto caches = {kFloat, kFloat16, ONNX_TENSOR_ELEMENT_DATA_TYPE_INT8, ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT8};
      for (auto other : other_types(op, caches)) ops.emplace_back(api, nullptr, op, type, other, make);
    };
    add("AllReduce", make_node<ReduceNode, weights, verify>);
    add("AllGather", make_node<GatherNode, weights, verify>);
    add("ReduceScatter", make_node<ScatterNode, weights, verify>);
#define QM_CPU(op, name) add(#op, make_node<ClassOf<qm_##name>, weights, verify>);
    const auto refuse = [&](const char* op) {
      ops.emplace_back(api, nullptr, op, type, type, make_node<OfAnotherTarget, weights, verify>);
    };
    refuse("AllReduceAddRMSNorm");
#define QM_CUDA(op, name) \
  if (!runs_here(#op)) refuse(#op);
#include "op.def"
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
  const bool verify = is_on(api, options, "quantmoe.verify");
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
  return quantmoe::register_ops(options, base, "CPU", quantmoe::choose_operators);
}
