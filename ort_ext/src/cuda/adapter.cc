// The operators as ONNX Runtime custom operators on the CUDA execution provider: a thin adapter over the C ABI of
// quant_moe_cuda.h.
//
// It is a library of its own, so that the CPU's library has no CUDA inside. A session takes one of the two libraries,
// because ONNX Runtime refuses a second library for a domain. ONNX Runtime copies the packed weights, initializers of a
// CUDA node, to the device when a session is created. The kernels read them there. Checks that need no call run when a
// session is created.
#include "common/entries.h"
#include "common/registration.h"
#include "cuda/cuda_node.h"
#include "cuda/experts_node.h"
#if defined(__linux__)
#include "cuda/rank_nodes.h"
#endif

namespace quantmoe {
namespace {

class CudaLinear : public CudaNode {
 public:
  CudaLinear(const Op& op, const OrtApi* api, const OrtKernelInfo* info, bool verify) : CudaNode(op, api, info) {
    read_attributes(info, &problem_.linear);
    problem_.type = op.type();
    if (const int64_t rows = count_experts(info, QuantLinear_w, qm_cuda_linear_row_bytes(&problem_.linear)); rows != 1)
      fail("w has " + std::to_string(rows) + " rows, expected 1");
    query_device();
    qm_cuda_linear_problem probe = problem_;
    probe.rows = 1;
    qm_cuda_plan plan;
    char error[QM_ERROR_SIZE];
    if (qm_cuda_plan_linear(&probe, &device_, &plan, error)) fail(error);
    check_packed(info, QuantLinear_w, verify);
    Shape shape;
    const void* w = data_of(get_weight(info, QuantLinear_w, shape));
    if (problem_.linear.w.perm && qm_cuda_check_linear(&problem_, w, nullptr, error)) fail(error);
  }
  void run(OrtKernelContext* context) const override;

 private:
  qm_cuda_linear_problem problem_{};  // without rows
};

void CudaLinear::run(OrtKernelContext* context) const {
  const FreeSizes<int64_t> sizes = check_inputs(context);
  const OrtValue* x = get_input(context, QuantLinear_x);
  qm_cuda_linear_problem problem = problem_;
  problem.rows = elements(*sizes.rest());
  OrtValue* y = get_output(context, QuantLinear_y, sizes);
  if (problem.rows == 0) return;
  execute<qm_cuda_plan>(context, problem, qm_cuda_plan_linear,
                        [&](const qm_cuda_plan& plan, void* workspace, void* stream, char* error) {
                          const qm_cuda_linear_tensors tensors{data_of(x), data_of(get_input(context, QuantLinear_w)),
                                                               data_of(y), workspace};
                          return qm_cuda_launch_linear(&problem, &plan, &tensors, stream, error);
                        });
}

class CudaAttention : public CudaNode {
 public:
  CudaAttention(const Op& op, const OrtApi* api, const OrtKernelInfo* info, bool) : CudaNode(op, api, info) {
    read_attributes(info, &problem_.attention);
    if (has_input(CachedAttention_selected))
      fail("it has the input selected, which no CUDA kernel takes: export the model with --target cuda");
    problem_.type = op.type();
    query_device();
    qm_cuda_attention_plan plan;
    char error[QM_ERROR_SIZE];
    if (qm_cuda_plan_attention(&problem_, &device_, &plan, error)) fail(error);
    check_caches(problem_.attention);
  }
  void run(OrtKernelContext* context) const override;

 private:
  qm_cuda_attention_problem problem_{};  // without the shapes
};

void CudaAttention::run(OrtKernelContext* context) const {
  check_table(problem_.attention);
  const FreeSizes<int64_t> sizes = check_inputs(context);
  const auto input = [&](int32_t index) { return data_of(get_input(context, static_cast<size_t>(index))); };
  const auto floats = [&](int32_t index) { return static_cast<const float*>(input(index)); };
  qm_cuda_attention_problem problem = problem_;
  read_attention(sizes, problem.attention, problem);
  qm_cuda_attention_tensors tensors{};
  tensors.qkv = input(CachedAttention_qkv);
  tensors.past_key = input(CachedAttention_past_key);
  tensors.past_value = input(CachedAttention_past_value);
  tensors.rows = static_cast<const int32_t*>(input(CachedAttention_rows));
  tensors.cos = floats(CachedAttention_cos);
  tensors.sin = floats(CachedAttention_sin);
  tensors.q_norm = floats(CachedAttention_q_norm);
  tensors.k_norm = floats(CachedAttention_k_norm);
  tensors.sinks = floats(CachedAttention_sinks);
  if (problem.attention.block_size)
    tensors.block_table = static_cast<const int32_t*>(input(CachedAttention_block_table));
  tensors.output = data_of(get_output(context, CachedAttention_output, sizes));
  tensors.present_key = data_of(get_present(context, CachedAttention_present_key, sizes));
  tensors.present_value = data_of(get_present(context, CachedAttention_present_value, sizes));
  execute<qm_cuda_attention_plan>(context, problem, qm_cuda_plan_attention,
                                  [&](const qm_cuda_attention_plan& plan, void* workspace, void* stream, char* error) {
                                    tensors.workspace = workspace;
                                    return qm_cuda_launch_attention(&problem, &plan, &tensors, stream, error);
                                  });
}

// An operator that runs by its name.
class CudaPlain : public CudaNode {
 public:
  CudaPlain(const Op& op, const OrtApi* api, const OrtKernelInfo* info, bool)
      : CudaNode(op, api, info), attributes_(qm_node_size(op.name) / sizeof(int32_t)) {
    read_attributes(info, attributes_.data());
    query_device();
    (void)plan_of(op.name, attributes_.data(), read_constants(info).data());
  }
  void run(OrtKernelContext* context) const override {
    const Tensors tensors = read_tensors(context);
    const qm_cuda_node_plan plan = plan_of(op_.name, attributes_.data(), tensors.inputs.data());
    const Scratch workspace = scratch_of(context, plan.workspace_bytes);
    const qm_cuda_call call{tensors.inputs.data(), tensors.outputs.data(), workspace.get(), stream_of(context)};
    char error[QM_ERROR_SIZE];
    if (qm_cuda_launch_node(op_.name, attributes_.data(), &plan, &call, error))
      throw std::runtime_error(node_ + ": " + error);
  }

 private:
  std::vector<int32_t> attributes_;  // the operator's struct
};

#if !defined(__linux__)
class RankNode : public CudaNode {
 public:
  RankNode(const Op& op, const OrtApi* api, const OrtKernelInfo* info, bool) : CudaNode(op, api, info) {
    fail("the folder is a slice of a model for several GPUs, which need Linux; export without --tensor-parallel");
  }
  void run(OrtKernelContext*) const override {}
};
using CudaReduce = RankNode;
using CudaReduceNorm = RankNode;
using CudaGather = RankNode;
using CudaScatter = RankNode;
#endif

constexpr const char* kProvider = "CUDAExecutionProvider";

template <class T, bool verify>
Node* make_node(const Op& op, const OrtApi* api, const OrtKernelInfo* info) {
  return new T(op, api, info, verify);
}

template <bool verify>
void add_operators(const OrtApi* api, std::deque<Op>& ops) {
  constexpr auto kFloat = ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT;
  for (auto type : {ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16, ONNX_TENSOR_ELEMENT_DATA_TYPE_BFLOAT16}) {
    const auto add = [&](const char* op, Op::Make make) {
      const auto caches = {type, ONNX_TENSOR_ELEMENT_DATA_TYPE_INT8, ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT8};
      for (auto other : other_types(op, caches)) ops.emplace_back(api, kProvider, op, type, other, make);
    };
    add("QuantMoE", make_node<CudaMoE, verify>);
    add("QuantLinear", make_node<CudaLinear, verify>);
    add("CachedAttention", make_node<CudaAttention, verify>);
    add("AllReduce", make_node<CudaReduce, verify>);
    add("AllReduceAddRMSNorm", make_node<CudaReduceNorm, verify>);
    add("AllGather", make_node<CudaGather, verify>);
    add("ReduceScatter", make_node<CudaScatter, verify>);
#define QM_CUDA(op, name) add(#op, make_node<CudaPlain, verify>);
#include "op.def"
  }
  ops.emplace_back(api, kProvider, "MoERouting", kFloat, kFloat, make_node<CudaPlain, verify>);
}

}  // namespace
}  // namespace quantmoe

#if !defined(__linux__)  // device_experts.cc has it
extern "C" QM_API size_t qm_experts_report(char* text, size_t size) {
  if (size) *text = 0;
  return 1;
}
#endif

extern "C" QM_API OrtStatus* ORT_API_CALL RegisterCustomOps(OrtSessionOptions* options, const OrtApiBase* base) {
  return quantmoe::register_ops(
      options, base, "CUDA provider", [](const OrtApi* api, const OrtSessionOptions* options) {
        return quantmoe::wants_verify(api, options) ? quantmoe::add_operators<true> : quantmoe::add_operators<false>;
      });
}
