// The operators with a QM_CUDA line in op.def.
#include "experts/row_bytes.h"
#include "planned.h"

namespace quantmoe {
namespace {

// A state stays where it is as a cache does: past and present are bound to one memory. past is an input of the network,
// present an output, and TensorRT copies neither. TensorRT is not told (getAliasedInput of IPluginV3OneBuildV2): if the
// cache grows, present is larger than past.
class Plain final : public Planned {
 public:
  using Planned::Planned;
  size_t getWorkspaceSize(const DynamicPluginTensorDesc* inputs, int32_t count, const DynamicPluginTensorDesc* outputs,
                          int32_t made) const noexcept override {
    const bool none = attempt(false, [&] {
      const NodeProblem most = problem_of(Inputs(inputs, inputs_.count));
      return op_ != std::string_view("CachedAttention") &&
             std::all_of(std::begin(kDevices), std::end(kDevices), [&](const qm_cuda_device& device) {
               char error[QM_ERROR_SIZE];
               qm_cuda_node_plan plan;
               return !plan_node(most, device, &plan, error) && !plan.workspace_bytes;
             });
    });
    return none ? 0 : Planned::getWorkspaceSize(inputs, count, outputs, made);
  }

 private:
  IPluginV3* make_copy() const override { return new Plain(layer_, own_); }
  bool takes_float() const override {
    NodeProblem problem = own_;
    for (qm_tensor& input : problem.inputs) input.type = QM_F32;
    char error[QM_ERROR_SIZE];
    return takes(problem, error);
  }
};

class Linear final : public Planned {
 public:
  using Planned::Planned;

 private:
  const qm_linear& node() const { return *reinterpret_cast<const qm_linear*>(own_.node); }
  IPluginV3* make_copy() const override { return new Linear(layer_, own_); }
  bool check_packed(const Dims* in) const override {
    char error[QM_ERROR_SIZE];
    qm_row row;
    if (qm_row_of(&node().w, node().out_features, node().in_features, 1, &row, error)) return wrong(error);
    return Plugin::check_packed("w", in[QuantLinear_w], 1, static_cast<size_t>(row.bytes));
  }
  Ordered ordered(const void* const* inputs) const override {
    return {QuantLinear_w, node().w.perm ? inputs[QuantLinear_w] : nullptr};
  }
};

template <class Node>
bool is_taken(const Node&, char*) {
  return true;
}
bool is_taken(const qm_attention& node, char* error) {
  if (node.cache_format != k_cache_format_none) {
    fail(error, QM_INVALID,
         "cache_format is \"%s\", the plug-in's caches have qkv's type: export with --cache bf16 (or f16, as --dtype)",
         enum_name("cache_format", node.cache_format));
    return false;
  }
  if (node.block_size)
    fail(error, QM_INVALID, "block_size is %d, the plug-in's caches are not in blocks: export without --paged",
         node.block_size);
  return !node.block_size;
}
bool is_taken(const qm_indexer&, char* error) {
  fail(error, QM_UNSUPPORTED, "the plug-in has no attention to selected tokens: run the model in ONNX Runtime");
  return false;
}

template <class Node>
IPluginV3* make_planned(const SharedLayer& layer, const char* op, const Node& node, char* error) {
  NodeProblem problem(op, node);
  if constexpr (std::is_same_v<Node, qm_linear>) {
    problem.inputs[QuantLinear_x].type = type_beside(node.w);
    problem.inputs[QuantLinear_w].shape.sizes[1] = -1;
    return Planned::takes(problem, error) ? new Linear(layer, problem) : nullptr;
  }
  return is_taken(node, error) && Planned::takes(problem, error) ? new Plain(layer, problem) : nullptr;
}

}  // namespace

#define QM_CUDA(op, name)                                                                \
  IPluginV3* make_plugin(const SharedLayer& layer, const qm_##name& node, char* error) { \
    return make_planned(layer, #op, node, error);                                        \
  }
#include "op.def"

}  // namespace quantmoe
