// The operators as ONNX Runtime custom operators on the CUDA execution provider: a thin adapter over the C ABI of
// quant_moe_cuda.h.
//
// A library of its own, so that the CPU's has no CUDA inside; a session takes one of them (ONNX Runtime refuses a
// second library for a domain). ONNX Runtime copies the packed weights, initializers of a CUDA node, to the device
// once, when the session is created; the kernels read them there. What can be checked is checked when a session is
// created.
#include "common/entries.h"
#include "common/registration.h"
#include "cuda/cuda_node.h"
#include "cuda/experts_node.h"
#include "cuda/rank_nodes.h"

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
  qm_cuda_linear_problem problem_{};  // but for rows
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

class CudaRouting : public CudaNode {
 public:
  CudaRouting(const Op& op, const OrtApi* api, const OrtKernelInfo* info, bool) : CudaNode(op, api, info) {
    read_attributes(info, &problem_.routing);
    problem_.type = op.type();
    char error[QM_ERROR_SIZE];
    if (qm_cuda_validate_routing(&problem_, error)) fail(error);
  }
  void run(OrtKernelContext* context) const override;

 private:
  qm_cuda_routing_problem problem_{};  // but for tokens
};

void CudaRouting::run(OrtKernelContext* context) const {
  const FreeSizes<int64_t> sizes = check_inputs(context);
  qm_cuda_routing_problem problem = problem_;
  problem.tokens = elements(*sizes.rest());
  qm_cuda_routing_tensors tensors{};
#define QM_ONLY "ops/moe_routing.def"
#include "common/tensors.inc"
  char error[QM_ERROR_SIZE];
  if (qm_cuda_launch_routing(&problem, &tensors, stream_of(context), error))
    throw std::runtime_error(node_ + ": " + error);
}

class CudaRouter : public CudaNode {
 public:
  CudaRouter(const Op& op, const OrtApi* api, const OrtKernelInfo* info, bool) : CudaNode(op, api, info) {
    read_attributes(info, &problem_.router);
    problem_.type = op.type();
    query_device();
    qm_cuda_router_plan plan;
    char error[QM_ERROR_SIZE];
    if (qm_cuda_plan_router(&problem_, &device_, &plan, error)) fail(error);
    const qm_router& router = problem_.router;
    const Shape wanted{router.num_experts + router.shared_gate, router.hidden_size};
    if (const Shape found = shape_of(get_constant(info, MoERouter_weight)); found != wanted)
      fail("weight has shape " + text_of(found) + ", expected [num_experts + shared_gate, hidden_size] " +
           text_of(wanted));
  }
  void run(OrtKernelContext* context) const override;

 private:
  qm_cuda_router_problem problem_{};  // but for tokens
};

void CudaRouter::run(OrtKernelContext* context) const {
  const FreeSizes<int64_t> sizes = check_inputs(context);
  qm_cuda_router_problem problem = problem_;
  problem.tokens = elements(*sizes.rest());
  qm_cuda_router_tensors tensors{};
#define QM_ONLY "ops/moe_router.def"
#include "common/tensors.inc"
  execute<qm_cuda_router_plan>(context, problem, qm_cuda_plan_router,
                               [&](const qm_cuda_router_plan& plan, void* workspace, void* stream, char* error) {
                                 tensors.workspace = workspace;
                                 return qm_cuda_launch_router(&problem, &plan, &tensors, stream, error);
                               });
}

class CudaNorm : public CudaNode {
 public:
  CudaNorm(const Op& op, const OrtApi* api, const OrtKernelInfo* info, bool) : CudaNode(op, api, info) {
    qm_norm norm;
    read_attributes(info, &norm);
    problem_ = read_norm(info, norm);
  }
  void run(OrtKernelContext* context) const override {
    qm_cuda_norm_problem problem = problem_;
    const qm_cuda_norm_tensors tensors = norm_tensors(context, &problem);
    char error[QM_ERROR_SIZE];
    if (qm_cuda_launch_norm(&problem, &tensors, stream_of(context), error))
      throw std::runtime_error(node_ + ": " + error);
  }

 private:
  qm_cuda_norm_problem problem_{};  // but for rows
};

class CudaRows : public CudaNode {
 public:
  CudaRows(const Op& op, const OrtApi* api, const OrtKernelInfo* info, bool) : CudaNode(op, api, info) {
    read_attributes(info, &problem_.node);
    char error[QM_ERROR_SIZE];
    if (qm_cuda_validate_rows(&problem_, error)) fail(error);
  }
  void run(OrtKernelContext* context) const override;

 private:
  qm_cuda_rows_problem problem_{};  // but for the sizes
};

void CudaRows::run(OrtKernelContext* context) const {
  const FreeSizes<int64_t> sizes = check_inputs(context);
  qm_cuda_rows_problem problem = problem_;
  problem.batch = sizes.at('B');
  problem.tokens = sizes.at('S');
  problem.past_slots = sizes.at('P');
  problem.length = sizes.at('L');
  const qm_cuda_rows_tensors tensors{static_cast<const int64_t*>(data_of(get_input(context, TokenRows_attention_mask))),
                                     static_cast<int32_t*>(data_of(get_output(context, TokenRows_rows, sizes))),
                                     static_cast<int64_t*>(data_of(get_output(context, TokenRows_last, sizes)))};
  char error[QM_ERROR_SIZE];
  if (qm_cuda_launch_rows(&problem, &tensors, stream_of(context), error))
    throw std::runtime_error(node_ + ": " + error);
}

class CudaAttention : public CudaNode {
 public:
  CudaAttention(const Op& op, const OrtApi* api, const OrtKernelInfo* info, bool) : CudaNode(op, api, info) {
    read_attributes(info, &problem_.attention);
    problem_.type = op.type();
    query_device();
    qm_cuda_attention_plan plan;
    char error[QM_ERROR_SIZE];
    if (qm_cuda_plan_attention(&problem_, &device_, &plan, error)) fail(error);
    check_caches(problem_.attention);
  }
  void run(OrtKernelContext* context) const override;

 private:
  qm_cuda_attention_problem problem_{};  // but for the shapes
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
    const std::vector<qm_tensor> empty(static_cast<size_t>(op.inputs.most), qm_tensor{nullptr, op.type(), {}});
    (void)plan_of(empty.data());
  }
  void run(OrtKernelContext* context) const override {
    const Tensors tensors = read_tensors(context);
    const qm_cuda_node_plan plan = plan_of(tensors.inputs.data());
    const Scratch workspace = scratch_of(context, plan.workspace_bytes);
    const qm_cuda_call call{tensors.inputs.data(), tensors.outputs.data(), workspace.get(), stream_of(context)};
    char error[QM_ERROR_SIZE];
    if (qm_cuda_launch_node(op_.name, attributes_.data(), &plan, &call, error))
      throw std::runtime_error(node_ + ": " + error);
  }

 private:
  qm_cuda_node_plan plan_of(const qm_tensor* inputs) const {
    qm_cuda_node_plan plan;
    char error[QM_ERROR_SIZE];
    if (qm_cuda_plan_node(op_.name, attributes_.data(), inputs, &device_, &plan, error)) fail(error);
    return plan;
  }
  std::vector<int32_t> attributes_;  // the operator's struct
};

template <class T, bool verify>
Node* make_node(const Op& op, const OrtApi* api, const OrtKernelInfo* info) {
  return new T(op, api, info, verify);
}

template <bool verify>
void add_operators(const OrtApi* api, std::deque<Op>& ops) {
  constexpr auto kId32 = ONNX_TENSOR_ELEMENT_DATA_TYPE_INT32, kId64 = ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64;
  constexpr auto kFloat = ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT;
  constexpr const char* kProvider = "CUDAExecutionProvider";
  for (auto type : {ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16, ONNX_TENSOR_ELEMENT_DATA_TYPE_BFLOAT16}) {
    for (auto id_type : {kId32, kId64})
      ops.emplace_back(api, kProvider, "QuantMoE", type, id_type, make_node<CudaMoE, verify>);
    ops.emplace_back(api, kProvider, "QuantLinear", type, kId32, make_node<CudaLinear, verify>);
    ops.emplace_back(api, kProvider, "MoERouting", type, kId32, make_node<CudaRouting, verify>);
    ops.emplace_back(api, kProvider, "MoERouter", type, kId32, make_node<CudaRouter, verify>);
    ops.emplace_back(api, kProvider, "AddRMSNorm", type, kId32, make_node<CudaNorm, verify>);
    for (auto cache : {type, ONNX_TENSOR_ELEMENT_DATA_TYPE_INT8, ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT8}) {
      ops.emplace_back(api, kProvider, "TokenRows", type, cache, make_node<CudaRows, verify>);
      ops.emplace_back(api, kProvider, "CachedAttention", type, cache, make_node<CudaAttention, verify>);
    }
    ops.emplace_back(api, kProvider, "AllReduce", type, kId32, make_node<CudaReduce, verify>);
    ops.emplace_back(api, kProvider, "AllReduceAddRMSNorm", type, kId32, make_node<CudaReduceNorm, verify>);
    ops.emplace_back(api, kProvider, "AllGather", type, kId32, make_node<CudaGather, verify>);
    ops.emplace_back(api, kProvider, "ReduceScatter", type, kId32, make_node<CudaScatter, verify>);
#define QM_CUDA(op, name) ops.emplace_back(api, kProvider, #op, type, kId32, make_node<CudaPlain, verify>);
#include "op.def"
  }
  ops.emplace_back(api, kProvider, "MoERouting", kFloat, kId32, make_node<CudaRouting, verify>);
}

}  // namespace
}  // namespace quantmoe

extern "C" QM_API OrtStatus* ORT_API_CALL RegisterCustomOps(OrtSessionOptions* options, const OrtApiBase* base) {
  return quantmoe::register_ops(
      options, base, "CUDA provider", [](const OrtApi* api, const OrtSessionOptions* options) {
        return quantmoe::wants_verify(api, options) ? quantmoe::add_operators<true> : quantmoe::add_operators<false>;
      });
}
