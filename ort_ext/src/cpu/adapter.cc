// The operators as ONNX Runtime custom operators on the CPU: a thin adapter over the C ABI of quant_moe.h. What can be
// checked is checked when a session is created.
#if !defined(_WIN32)  // where an earlier declaration without dllexport is an error
#include <quantmoe/register_custom_ops.h>
#endif

#include <cstdlib>

#include "common/entries.h"
#include "common/registration.h"
#include "cpu/cpu_node.h"
#include "cpu/experts_node.h"
#include "cpu/rank_nodes.h"

namespace quantmoe {
namespace {

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
  if (size_t count = CachedAttention_v_up + 1; attention_.nope_size && input_count() < count)
    fail("it has " + std::to_string(input_count()) + " inputs, expected " + std::to_string(count) +
         ", k_up and v_up too, where nope_size is " + std::to_string(attention_.nope_size));
  check_table(attention_);
  const FreeSizes<int64_t> sizes = check_inputs(context);
  const auto input = [&](int32_t index) { return data_of(get_input(context, static_cast<size_t>(index))); };
  qm_attention_call call{};
  call.type = op_.type();
  call.cache_type = op_.cache_type();
  read_attention(sizes, attention_, call);
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
  if (attention_.block_size) call.block_table = static_cast<const int32_t*>(input(CachedAttention_block_table));
  if (has_input(CachedAttention_selected)) {
    call.selected = static_cast<const int32_t*>(input(CachedAttention_selected));
    call.selected_lists = sizes.at('G');
    call.selected_size = sizes.at('E');
  }
  for (int64_t b = 0; b < call.batch; ++b) {
    const int64_t count = call.rows[3 * b + 1], before = call.rows[3 * b + 2];
    if (!attention_.block_size && before >= 0 && before + count > call.slots) fail_slots(sizes, before + count);
  }
  call.output = data_of(get_output(context, CachedAttention_output, sizes));
  call.present_key = data_of(get_present(context, CachedAttention_present_key, sizes));
  call.present_value = data_of(get_present(context, CachedAttention_present_value, sizes));
  with_pool(
      context, call, [&] { return qm_attention_workspace(&attention_, &call); },
      [&](char* error) { return qm_attention_run(&attention_, &call, error); });
}

// An operator that runs by its name.
class PlainNode : public CpuNode {
 public:
  PlainNode(const Op& op, const OrtApi* api, const OrtKernelInfo* info, WeightSource weights, bool verify)
      : CpuNode(op, api, info, weights, verify), attributes_(qm_node_size(op.name) / sizeof(int32_t)) {
    read_attributes(info, attributes_.data());
    char error[QM_ERROR_SIZE];
    if (qm_validate(op.name, attributes_.data(), error)) fail(error);
  }
  void run(OrtKernelContext* context) const override {
    const Tensors tensors = read_tensors(context);
    qm_call call{};
    call.inputs = tensors.inputs.data();
    call.outputs = tensors.outputs.data();
    with_pool(
        context, call, [&] { return qm_workspace(op_.name, attributes_.data(), &call); },
        [&](char* error) { return qm_run(op_.name, attributes_.data(), &call, error); });
  }

 private:
  std::vector<int32_t> attributes_;  // the operator's struct
};

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

// Whether op.def says that the kernels of the CPU run an operator by its name.
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
    add("QuantMoE", make_node<MoENode, weights, verify>);
    add("QuantLinear", make_node<LinearNode, weights, verify>);
    add("CachedAttention", make_node<AttentionNode, weights, verify>);
    add("AllReduce", make_node<ReduceNode, weights, verify>);
    add("AllGather", make_node<GatherNode, weights, verify>);
    add("ReduceScatter", make_node<ScatterNode, weights, verify>);
#define QM_CPU(op, name) add(#op, make_node<PlainNode, weights, verify>);
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
  return quantmoe::register_ops(options, base, "CPU", quantmoe::choose_operators);
}
