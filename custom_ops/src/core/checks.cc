// What every engine refuses of an operator's attributes, written once.
#include <algorithm>
#include <limits>
#include <utility>

#include "core/attributes.h"

namespace quantmoe {

int check_activation(const qm_moe& moe, char* err) {
  const auto ungated = [](int32_t activation) {
    return activation != k_activation_swiglu_oai && activation != k_activation_swiglu_step &&
           activation != k_activation_swiglu_clamp && activation != k_activation_swiglu_tanh;
  };
  if (!moe.gated && !ungated(moe.activation))
    return fail(err, QM_INVALID, "activation is %s with gated = 0, expected %s, or gated = 1",
                enum_name("activation", moe.activation), enum_names("activation", ungated).c_str());
  if (moe.activation != k_activation_swiglu_tanh) return QM_OK;
  QM_TRY(check_positive("swiglu_alpha", moe.swiglu_alpha, err));
  return check_positive("swiglu_limit", moe.swiglu_limit, err);
}

int check_marlin_layer(const qm_projection& w13, const qm_projection& w2, char* err) {
  if (!w2.perm) return QM_OK;
  if (w13.block_n != 1)  // FORMAT.md 3.3: the rows of a block have one scale
    return fail(
        err, QM_UNSUPPORTED,
        "w2_perm is 1 with w13_block_n %d; rows of w13 that share a scale cannot take the order of w2's columns",
        w13.block_n);
  // FORMAT.md 3.4: h comes in packed order, its groups are of the original one
  const int32_t rounding = w2.activation_format;
  if (rounding == k_activation_format_fp8_group128 || rounding == k_activation_format_nvfp4 ||
      rounding == k_activation_format_mxfp8 || rounding == k_activation_format_mxfp4)
    return fail(err, QM_UNSUPPORTED,
                "w2_perm is 1 with w2_activation_format %s, whose groups are of the features before the act-order, "
                "which the CUDA kernels do not apply to w2: export with --activations float",
                enum_name("activation_format", rounding));
  return QM_OK;
}

int check_routing(const qm_routing& routing, const RoutingLimits& limits, char* err) {
  QM_TRY(check_node("MoERouting", &routing, err));
  const auto within = [&](const char* name, int32_t value, int32_t low, int32_t high) -> int {
    if (value >= low && value <= high) return QM_OK;
    return fail(err, QM_INVALID, "%s is %d, %s %d to %d", name, value, limits.takes, low, high);
  };
  QM_TRY(within("num_experts", routing.num_experts, 1, limits.experts));
  QM_TRY(within("renormalize", routing.renormalize, 0, 1));
  QM_TRY(within("n_group", routing.n_group, 1, routing.num_experts));
  if (routing.num_experts % routing.n_group)
    return fail(err, QM_INVALID, "n_group is %d, expected a divisor of num_experts %d", routing.n_group,
                routing.num_experts);
  QM_TRY(within("topk_group", routing.topk_group, 1, routing.n_group));
  QM_TRY(within("top_k", routing.top_k, 1, routing.num_experts / routing.n_group * routing.topk_group));
  const int32_t most_shared = limits.together ? limits.experts - routing.num_experts : limits.experts;
  QM_TRY(within("shared_experts", routing.shared_experts, 0, most_shared));
  return within("shared_gate", routing.shared_gate, 0, std::min(1, routing.shared_experts));
}

int check_attention(const qm_attention& attention, char* err) {
  constexpr int32_t kMaxSize = 1 << 16, kMaxSlots = std::numeric_limits<int32_t>::max();
  QM_TRY(check_node("CachedAttention", &attention, err));
  QM_TRY(check_range("num_heads", attention.num_heads, 1, kMaxSize, err));
  QM_TRY(check_range("kv_num_heads", attention.kv_num_heads, 1, attention.num_heads, err));
  if (attention.num_heads % attention.kv_num_heads)
    return fail(err, QM_INVALID, "kv_num_heads is %d, expected a divisor of num_heads %d", attention.kv_num_heads,
                attention.num_heads);
  QM_TRY(check_range("head_size", attention.head_size, 1, kMaxSize, err));
  QM_TRY(check_range("v_head_size", attention.v_head_size, 1, kMaxSize, err));
  QM_TRY(check_range("sliding_window", attention.sliding_window, 0, kMaxSlots, err));
  QM_TRY(check_range("chunk_size", attention.chunk_size, 0, kMaxSlots, err));
  QM_TRY(check_range("rotary_size", attention.rotary_size, 0, attention.head_size, err));
  if (attention.rotary_size % 2)
    return fail(err, QM_INVALID, "rotary_size is %d, expected an even number", attention.rotary_size);
  QM_TRY(check_range("rotary_interleaved", attention.rotary_interleaved, 0, 1, err));
  QM_TRY(check_range("key_split", attention.key_split, 0, attention.head_size - 1, err));
  if (attention.key_split && attention.cache_format != k_cache_format_none)
    return fail(err, QM_INVALID, "key_split is %d, expected 0 where cache_format is %s", attention.key_split,
                enum_name("cache_format", attention.cache_format));
  if (attention.key_split && attention.v_head_size > attention.head_size)
    return fail(err, QM_INVALID, "v_head_size is %d, expected at most head_size %d with a key_split",
                attention.v_head_size, attention.head_size);
  if (attention.nope_size && !attention.key_split)
    return fail(err, QM_INVALID, "nope_size is %d, expected 0 without a key_split", attention.nope_size);
  QM_TRY(check_range("nope_size", attention.nope_size, 0, kMaxSize, err));
  QM_TRY(check_range("out_size", attention.out_size, attention.nope_size ? 1 : 0, attention.nope_size ? kMaxSize : 0,
                     err));
  QM_TRY(check_range("gated", attention.gated, 0, 1, err));
  QM_TRY(check_range("block_size", attention.block_size, 0, kMaxSize, err));
  if (attention.block_size % 256)
    return fail(err, QM_INVALID, "block_size is %d, expected a multiple of 256", attention.block_size);
  if (attention.block_size && attention.nope_size)
    return fail(err, QM_INVALID, "block_size is %d, expected 0 with a nope_size", attention.block_size);
  QM_TRY(check_range("compress_rate", attention.compress_rate, 0, kMaxSlots, err));
  if (attention.compress_rate) {
    for (const auto& [name, value] :
         {std::pair{"chunk_size", attention.chunk_size}, std::pair{"key_split", attention.key_split},
          std::pair{"block_size", attention.block_size}})
      if (value) return fail(err, QM_INVALID, "%s is %d, expected 0 with a compress_rate", name, value);
    if (attention.v_head_size != attention.head_size)
      return fail(err, QM_INVALID, "v_head_size is %d, expected head_size %d with a compress_rate",
                  attention.v_head_size, attention.head_size);
    if (attention.cache_format != k_cache_format_none)
      return fail(err, QM_INVALID, "compress_rate is %d, expected 0 where cache_format is %s", attention.compress_rate,
                  enum_name("cache_format", attention.cache_format));
  }
  if (attention.gated && attention.key_split) return fail(err, QM_INVALID, "gated is 1, expected 0 with a key_split");
  if (attention.nope_size && attention.qk_norm != k_qk_norm_none)
    return fail(err, QM_INVALID, "qk_norm is %s, expected none with a nope_size",
                enum_name("qk_norm", attention.qk_norm));
  if (attention.nope_size)
    QM_TRY(check_range("rotary_size", attention.rotary_size, 0, attention.head_size - attention.v_head_size, err));
  QM_TRY(check_not_negative("softcap", attention.softcap, err));
  QM_TRY(check_not_negative("norm_epsilon", attention.norm_epsilon, err));
  QM_TRY(check_finite("scale", attention.scale, err));
  for (const auto& [name, value] : {std::pair{"k_scale", attention.k_scale}, std::pair{"v_scale", attention.v_scale}}) {
    if (!(value >= 0x1p-64f && value <= 0x1p64f))
      return fail(err, QM_INVALID, "%s is %g, expected a number from 2^-64 to 2^64", name, value);
    if (value != 1.0f && !has_cache_scales(attention))
      return fail(err, QM_INVALID, "%s is %g, expected 1 where cache_format is %s", name, value,
                  enum_name("cache_format", attention.cache_format));
  }
  return QM_OK;
}

static int check_state_window(int32_t window, char* err) { return check_range("state_window", window, 1, 64, err); }

// Refuses a wider tensor that the input is not in. name: the attribute's before _size and _offset.
static int check_part(const char* name, int32_t size, int32_t offset, int64_t own, char* err) {
  if (size == 0 && offset == 0) return QM_OK;
  if (offset >= 0 && size - int64_t{offset} >= own) return QM_OK;
  return fail(err, QM_INVALID, "%s_size is %d and %s_offset %d, expected room for %lld features", name, size, name,
              offset, (long long)own);
}

int check_rotation(const char* name, int32_t size, const char* of, int32_t features, char* err) {
  if (size > 0 && (size & (size - 1)) == 0 && features % size == 0) return QM_OK;
  return fail(err, QM_INVALID, "%s is %d, expected a power of two that divides %s %d", name, size, of, features);
}

int check_w2_rotation(const qm_moe& moe, char* err) {
  if (!moe.w2_hadamard) return QM_OK;
  QM_TRY(check_rotation("w2_hadamard", moe.w2_hadamard, "intermediate_size", moe.intermediate_size, err));
  if (!moe.w2.perm) return QM_OK;
  return fail(err, QM_INVALID, "w2_hadamard is %d with w2_perm %d, expected w2_perm 0", moe.w2_hadamard, moe.w2.perm);
}

int check_hadamard(const qm_hadamard& node, char* err) {
  QM_TRY(check_node("Hadamard", &node, err));
  QM_TRY(check_range("features", node.features, 1, 1 << 24, err));
  return check_rotation("size", node.size, "features", node.features, err);
}

int check_hyper_connection(const qm_hyper_connection& node, char* err) {
  QM_TRY(check_node("HyperConnection", &node, err));
  QM_TRY(check_range("num_streams", node.num_streams, 1, kMaxStreams, err));
  QM_TRY(check_range("hidden_size", node.hidden_size, 1, 1 << 24, err));
  QM_TRY(check_range("iterations", node.iterations, 1, 1 << 10, err));
  return check_not_negative("epsilon", node.epsilon, err);
}

int check_conv(const qm_conv& conv, char* err) {
  QM_TRY(check_node("CausalConv", &conv, err));
  QM_TRY(check_range("channels", conv.channels, 1, 1 << 24, err));
  QM_TRY(check_range("width", conv.width, 2, kMaxConvWidth, err));
  QM_TRY(check_state_window(conv.state_window, err));
  return check_part("x", conv.x_size, conv.x_offset, conv.channels, err);
}

int check_delta(const qm_delta& delta, char* err) {
  constexpr int32_t kMaxHeads = 1 << 16, kMaxSize = 1024;  // the CPU has a head's state in a lane's workspace
  QM_TRY(check_node("GatedDelta", &delta, err));
  QM_TRY(check_range("num_k_heads", delta.num_k_heads, 1, kMaxHeads, err));
  QM_TRY(check_range("num_v_heads", delta.num_v_heads, 1, kMaxHeads, err));
  if (delta.num_v_heads % delta.num_k_heads)
    return fail(err, QM_INVALID, "num_v_heads is %d, expected a multiple of num_k_heads %d", delta.num_v_heads,
                delta.num_k_heads);
  QM_TRY(check_range("k_head_size", delta.k_head_size, 1, kMaxSize, err));
  QM_TRY(check_range("v_head_size", delta.v_head_size, 1, kMaxSize, err));
  QM_TRY(check_range("decay_per_key", delta.decay_per_key, 0, 1, err));
  QM_TRY(check_not_negative("l2_epsilon", delta.l2_epsilon, err));
  QM_TRY(check_not_negative("norm_epsilon", delta.norm_epsilon, err));
  QM_TRY(check_finite("scale", delta.scale, err));
  QM_TRY(check_finite("beta_scale", delta.beta_scale, err));
  const int64_t heads = delta.num_v_heads;
  QM_TRY(check_part("a", delta.a_size, delta.a_offset, heads * (delta.decay_per_key ? delta.k_head_size : 1), err));
  QM_TRY(check_part("b", delta.b_size, delta.b_offset, heads, err));
  QM_TRY(check_part("z", delta.z_size, delta.z_offset, heads * delta.v_head_size, err));
  return check_state_window(delta.state_window, err);
}

int check_space(const qm_space& space, char* err) {
  constexpr int32_t kMaxHeads = 1 << 16, kMaxSize = 1024;  // as check_delta's
  QM_TRY(check_node("StateSpace", &space, err));
  QM_TRY(check_range("num_groups", space.num_groups, 1, kMaxHeads, err));
  QM_TRY(check_range("num_heads", space.num_heads, 1, kMaxHeads, err));
  if (space.num_heads % space.num_groups)
    return fail(err, QM_INVALID, "num_heads is %d, expected a multiple of num_groups %d", space.num_heads,
                space.num_groups);
  QM_TRY(check_range("state_size", space.state_size, 1, kMaxSize, err));
  QM_TRY(check_range("head_size", space.head_size, 1, kMaxSize, err));
  const int64_t width = width_of(space);
  if (space.norm_size < 1 || space.norm_size % space.head_size || width % space.norm_size)
    return fail(err, QM_INVALID, "norm_size is %d, expected whole heads of %d, and a divisor of all heads' %lld",
                space.norm_size, space.head_size, (long long)width);
  QM_TRY(check_not_negative("norm_epsilon", space.norm_epsilon, err));
  QM_TRY(check_part("dt", space.dt_size, space.dt_offset, space.num_heads, err));
  QM_TRY(check_part("z", space.z_size, space.z_offset, width, err));
  return check_state_window(space.state_window, err);
}

int check_indexer(const qm_indexer& indexer, char* err) {
  constexpr int32_t kMaxSize = 1 << 16;
  QM_TRY(check_node("SparseIndexer", &indexer, err));
  QM_TRY(check_range("num_heads", indexer.num_heads, 1, kMaxSize, err));
  QM_TRY(check_range("head_size", indexer.head_size, 1, kMaxSize, err));
  QM_TRY(check_range("top_k", indexer.top_k, 1, kMaxSize, err));
  QM_TRY(check_range("num_groups", indexer.num_groups, 1, indexer.num_heads, err));
  if (indexer.num_heads % indexer.num_groups)
    return fail(err, QM_INVALID, "num_groups is %d, expected a divisor of num_heads, %d", indexer.num_groups,
                indexer.num_heads);
  QM_TRY(check_range("relu", indexer.relu, 0, 1, err));
  QM_TRY(check_range("block_size", indexer.block_size, 1, kMaxSize, err));
  if (indexer.top_k % indexer.block_size)
    return fail(err, QM_INVALID, "top_k is %d, expected a multiple of block_size, %d", indexer.top_k,
                indexer.block_size);
  QM_TRY(check_range("best_slot", indexer.best_slot, 0, 1, err));
  return check_range("local_blocks", indexer.local_blocks, indexer.best_slot && indexer.block_size > 1,
                     indexer.best_slot ? indexer.top_k / indexer.block_size : 0, err);
}

template <class Node>
static int check_ranks(const char* op, const Node& node, char* err) {
  constexpr int32_t kMaxRanks = 1 << 16;
  QM_TRY(check_node(op, &node, err));
  QM_TRY(check_range("world", node.world, 1, kMaxRanks, err));
  QM_TRY(check_range("rank", node.rank, 0, node.world - 1, err));
  return check_range("export_id", node.export_id, 0, INT32_MAX, err);
}

int check_reduce(const qm_reduce& reduce, char* err) { return check_ranks("AllReduce", reduce, err); }
int check_reduce_norm(const qm_reduce_norm& node, char* err) {
  QM_TRY(check_ranks("AllReduceAddRMSNorm", node, err));
  return check_not_negative("norm_epsilon", node.norm_epsilon, err);
}
int check_scatter(const qm_scatter& scatter, char* err) { return check_ranks("ReduceScatter", scatter, err); }
int check_gather(const qm_gather& gather, char* err) {
  QM_TRY(check_ranks("AllGather", gather, err));
  return check_range("axis", gather.axis, -1, 0, err);
}

}  // namespace quantmoe
