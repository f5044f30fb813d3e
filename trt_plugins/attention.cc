// CachedAttention.
#include "planned.h"

namespace quantmoe {
namespace {

// A cache stays in place if past and present are bound to one memory. past is an input of the network, present an
// output, and TensorRT copies neither. TensorRT is not told (getAliasedInput of IPluginV3OneBuildV2): if the cache
// grows, present is larger than past.
class Attention final : public Planned<qm_cuda_attention_problem, qm_cuda_attention_plan, qm_cuda_plan_attention> {
 public:
  Attention(SharedLayer layer, const qm_attention& attention)
      : Planned("CachedAttention", std::move(layer), &attention), attention_(attention) {}

 private:
  IPluginV3* make_copy() const override { return new Attention(layer_, attention_); }
  qm_cuda_attention_problem problem_of(const Inputs& in) const override {
    const Dims& qkv = in.dims[CachedAttention_qkv];
    qm_cuda_attention_problem problem{};
    problem.attention = attention_;
    problem.type = qm_type(in.types[CachedAttention_qkv]);
    problem.batch = qkv.d[0];
    problem.tokens = qkv.d[1];
    problem.past_slots = in.dims[CachedAttention_past_key].d[2];
    problem.slots = std::max(problem.past_slots, in.dims[CachedAttention_attention_mask].d[1]);
    return problem;
  }
  int launch(const void* const* inputs, void* const* outputs, void* workspace, cudaStream_t stream,
             char* error) override {
    const auto floats = [&](int32_t input) { return static_cast<const float*>(inputs[input]); };
    qm_cuda_attention_tensors tensors{};
    tensors.qkv = inputs[CachedAttention_qkv];
    tensors.past_key = inputs[CachedAttention_past_key];
    tensors.past_value = inputs[CachedAttention_past_value];
    tensors.rows = static_cast<const int32_t*>(inputs[CachedAttention_rows]);
    tensors.cos = floats(CachedAttention_cos);
    tensors.sin = floats(CachedAttention_sin);
    tensors.q_norm = floats(CachedAttention_q_norm);
    tensors.k_norm = floats(CachedAttention_k_norm);
    tensors.sinks = floats(CachedAttention_sinks);
    tensors.output = outputs[0];
    tensors.present_key = outputs[1];
    tensors.present_value = outputs[2];
    tensors.workspace = workspace;
    return qm_cuda_launch_attention(&problem_, &plan_, &tensors, stream, error);
  }

  qm_attention attention_;
};

}  // namespace

IPluginV3* make_plugin(const SharedLayer& layer, const qm_attention& node, char* error) {
  if (node.cache_format != k_cache_format_none) {
    fail(error, QM_INVALID,
         "cache_format is \"%s\", the plug-in's caches have qkv's type: export with --cache bf16 (or f16, as --dtype)",
         enum_name("cache_format", node.cache_format));
    return nullptr;
  }
  if (node.block_size) {
    fail(error, QM_INVALID, "block_size is %d, the plug-in's caches are not in blocks: export without --paged",
         node.block_size);
    return nullptr;
  }
  const qm_cuda_attention_problem problem{node, QM_F16, 1, 1, 0, 1};
  return Attention::takes(problem, error) ? new Attention(layer, node) : nullptr;
}

}  // namespace quantmoe
