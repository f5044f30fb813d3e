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

class CudaPlain : public CudaNode {
 public:
  CudaPlain(const Op& op, const OrtApi* api, const OrtKernelInfo* info, bool verify)
      : CudaNode(op, api, info), attributes_(qm_find_operator(op.name)->count) {
    read_attributes(info, attributes_.data());
    constants_ = read_constants(info);
    check_node(info, attributes_.data(), constants_, verify);
  }
  void run(OrtKernelContext* context) const override {
    Tensors tensors = read_tensors(context);
    for (size_t i = 0; i < tensors.inputs.size(); ++i) {
      if (!is_packed(i)) continue;
      tensors.inputs[i] = constants_[i];
      tensors.inputs[i].data = data_of(get_input(context, i));
    }
    launch(context, attributes_.data(),
           {tensors.inputs.data(), tensors.outputs.data(), nullptr, nullptr, nullptr, nullptr});
  }

 protected:
  std::vector<int32_t> attributes_;  // the operator's struct

 private:
  std::vector<qm_tensor> constants_;
};

class CudaAttention : public CudaPlain {
 public:
  CudaAttention(const Op& op, const OrtApi* api, const OrtKernelInfo* info, bool verify)
      : CudaPlain(op, api, info, verify) {
    check_caches(attention());
  }
  void run(OrtKernelContext* context) const override {
    check_table(attention());
    CudaPlain::run(context);
  }

 private:
  const qm_attention& attention() const { return *reinterpret_cast<const qm_attention*>(attributes_.data()); }
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

template <class Attributes>
using ClassOf =
    std::conditional_t<std::is_same_v<Attributes, qm_moe>, CudaMoE,
                       std::conditional_t<std::is_same_v<Attributes, qm_attention>, CudaAttention, CudaPlain>>;

template <bool verify>
void add_operators(const OrtApi* api, std::deque<Op>& ops) {
  constexpr auto kFloat = ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT;
  for (auto type : {ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16, ONNX_TENSOR_ELEMENT_DATA_TYPE_BFLOAT16}) {
    const auto add = [&](const char* op, Op::Make make) {
      const auto caches = {type, ONNX_TENSOR_ELEMENT_DATA_TYPE_INT8, ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT8};
      for (auto other : other_types(op, caches)) ops.emplace_back(api, kProvider, op, type, other, make);
    };
    add("AllReduce", make_node<CudaReduce, verify>);
    add("AllReduceAddRMSNorm", make_node<CudaReduceNorm, verify>);
    add("AllGather", make_node<CudaGather, verify>);
    add("ReduceScatter", make_node<CudaScatter, verify>);
#define QM_CUDA(op, name) add(#op, make_node<ClassOf<qm_##name>, verify>);
#include "op.def"
  }
  ops.emplace_back(api, kProvider, "MoERouting", kFloat, kFloat, make_node<CudaPlain, verify>);
  // a sum of what float16 has not the range for
  ops.emplace_back(api, kProvider, "CausalConv", kFloat, ONNX_TENSOR_ELEMENT_DATA_TYPE_INT32,
                   make_node<ClassOf<qm_conv>, verify>);
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
        return quantmoe::is_on(api, options, "quantmoe.verify") ? quantmoe::add_operators<true>
                                                                : quantmoe::add_operators<false>;
      });
}
