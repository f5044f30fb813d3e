// What every engine refuses of an operator's attributes, written once.
#include <algorithm>
#include <limits>
#include <utility>

#include "core/attributes.h"

namespace quantmoe {

int check_activation(const qm_moe& m, char* err) {
  const auto ungated = [](int32_t activation) {
    return activation != k_activation_swiglu_oai && activation != k_activation_swiglu_step;
  };
  if (m.gated || ungated(m.activation)) return QM_OK;
  return fail(err, QM_INVALID, "activation is %s with gated = 0, expected %s, or gated = 1",
              enum_name("activation", m.activation), enum_names("activation", ungated).c_str());
}

int check_marlin_layer(const qm_projection& w13, const qm_projection& w2, char* err) {
  if (!w2.perm) return QM_OK;
  if (w13.block_n != 1)  // FORMAT.md 3.3: the rows of a block have one scale
    return fail(
        err, QM_UNSUPPORTED,
        "w2_perm is 1 with w13_block_n %d; rows of w13 that share a scale cannot take the order of w2's columns",
        w13.block_n);
  const int32_t a = w2.activation_format;  // FORMAT.md 3.4: h comes in packed order, its groups are of the original one
  if (a == k_activation_format_fp8_group128 || a == k_activation_format_nvfp4 || a == k_activation_format_mxfp8 ||
      a == k_activation_format_mxfp4)
    return fail(err, QM_UNSUPPORTED,
                "w2_perm is 1 with w2_activation_format %s, whose groups are of the features before the act-order, "
                "which the CUDA kernels do not apply to w2: export with --activations float",
                enum_name("activation_format", a));
  return QM_OK;
}

int check_routing(const qm_routing& r, const RoutingLimits& limits, char* err) {
  QM_TRY(check_node("MoERouting", &r, err));
  const auto within = [&](const char* name, int32_t value, int32_t low, int32_t high) -> int {
    if (value >= low && value <= high) return QM_OK;
    return fail(err, QM_INVALID, "%s is %d, %s %d to %d", name, value, limits.takes, low, high);
  };
  QM_TRY(within("num_experts", r.num_experts, 1, limits.experts));
  QM_TRY(within("renormalize", r.renormalize, 0, 1));
  QM_TRY(within("n_group", r.n_group, 1, r.num_experts));
  if (r.num_experts % r.n_group)
    return fail(err, QM_INVALID, "n_group is %d, expected a divisor of num_experts %d", r.n_group, r.num_experts);
  QM_TRY(within("topk_group", r.topk_group, 1, r.n_group));
  QM_TRY(within("top_k", r.top_k, 1, r.num_experts / r.n_group * r.topk_group));
  const int32_t most_shared = limits.together ? limits.experts - r.num_experts : limits.experts;
  QM_TRY(within("shared_experts", r.shared_experts, 0, most_shared));
  return within("shared_gate", r.shared_gate, 0, std::min(1, r.shared_experts));
}

int check_attention(const qm_attention& a, char* err) {
  constexpr int32_t kMaxSize = 1 << 16, kMaxSlots = std::numeric_limits<int32_t>::max();
  QM_TRY(check_node("CachedAttention", &a, err));
  QM_TRY(check_range("num_heads", a.num_heads, 1, kMaxSize, err));
  QM_TRY(check_range("kv_num_heads", a.kv_num_heads, 1, a.num_heads, err));
  if (a.num_heads % a.kv_num_heads)
    return fail(err, QM_INVALID, "kv_num_heads is %d, expected a divisor of num_heads %d", a.kv_num_heads, a.num_heads);
  QM_TRY(check_range("head_size", a.head_size, 1, kMaxSize, err));
  QM_TRY(check_range("v_head_size", a.v_head_size, 1, kMaxSize, err));
  QM_TRY(check_range("sliding_window", a.sliding_window, 0, kMaxSlots, err));
  QM_TRY(check_range("chunk_size", a.chunk_size, 0, kMaxSlots, err));
  QM_TRY(check_range("rotary_size", a.rotary_size, 0, a.head_size, err));
  if (a.rotary_size % 2) return fail(err, QM_INVALID, "rotary_size is %d, expected an even number", a.rotary_size);
  QM_TRY(check_range("rotary_interleaved", a.rotary_interleaved, 0, 1, err));
  QM_TRY(check_range("key_split", a.key_split, 0, a.head_size - 1, err));
  if (a.key_split && a.cache_format != k_cache_format_none)
    return fail(err, QM_INVALID, "key_split is %d, expected 0 where cache_format is %s", a.key_split,
                enum_name("cache_format", a.cache_format));
  if (a.key_split && a.v_head_size > a.head_size)
    return fail(err, QM_INVALID, "v_head_size is %d, expected at most head_size %d with a key_split", a.v_head_size,
                a.head_size);
  QM_TRY(check_not_negative("softcap", a.softcap, err));
  QM_TRY(check_not_negative("norm_epsilon", a.norm_epsilon, err));
  QM_TRY(check_finite("scale", a.scale, err));
  for (const auto& [name, value] : {std::pair{"k_scale", a.k_scale}, std::pair{"v_scale", a.v_scale}}) {
    if (!(value >= 0x1p-64f && value <= 0x1p64f))
      return fail(err, QM_INVALID, "%s is %g, expected a number from 2^-64 to 2^64", name, value);
    if (value != 1.0f && !has_cache_scales(a))
      return fail(err, QM_INVALID, "%s is %g, expected 1 where cache_format is %s", name, value,
                  enum_name("cache_format", a.cache_format));
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

int check_conv(const qm_conv& c, char* err) {
  QM_TRY(check_node("CausalConv", &c, err));
  QM_TRY(check_range("channels", c.channels, 1, 1 << 24, err));
  QM_TRY(check_range("width", c.width, 2, kMaxConvWidth, err));
  QM_TRY(check_state_window(c.state_window, err));
  return check_part("x", c.x_size, 0, c.channels, err);
}

int check_delta(const qm_delta& d, char* err) {
  constexpr int32_t kMaxHeads = 1 << 16, kMaxSize = 1024;  // the CPU has a head's state in a lane's workspace
  QM_TRY(check_node("GatedDelta", &d, err));
  QM_TRY(check_range("num_k_heads", d.num_k_heads, 1, kMaxHeads, err));
  QM_TRY(check_range("num_v_heads", d.num_v_heads, 1, kMaxHeads, err));
  if (d.num_v_heads % d.num_k_heads)
    return fail(err, QM_INVALID, "num_v_heads is %d, expected a multiple of num_k_heads %d", d.num_v_heads,
                d.num_k_heads);
  QM_TRY(check_range("k_head_size", d.k_head_size, 1, kMaxSize, err));
  QM_TRY(check_range("v_head_size", d.v_head_size, 1, kMaxSize, err));
  QM_TRY(check_range("decay_per_key", d.decay_per_key, 0, 1, err));
  QM_TRY(check_not_negative("l2_epsilon", d.l2_epsilon, err));
  QM_TRY(check_not_negative("norm_epsilon", d.norm_epsilon, err));
  QM_TRY(check_finite("scale", d.scale, err));
  QM_TRY(check_finite("beta_scale", d.beta_scale, err));
  const int64_t heads = d.num_v_heads;
  QM_TRY(check_part("a", d.a_size, d.a_offset, heads * (d.decay_per_key ? d.k_head_size : 1), err));
  QM_TRY(check_part("b", d.b_size, d.b_offset, heads, err));
  QM_TRY(check_part("z", d.z_size, d.z_offset, heads * d.v_head_size, err));
  return check_state_window(d.state_window, err);
}

template <class Node>
static int check_ranks(const char* op, const Node& node, char* err) {
  constexpr int32_t kMaxRanks = 1 << 16;
  QM_TRY(check_node(op, &node, err));
  QM_TRY(check_range("world", node.world, 1, kMaxRanks, err));
  return check_range("rank", node.rank, 0, node.world - 1, err);
}

int check_reduce(const qm_reduce& r, char* err) { return check_ranks("AllReduce", r, err); }
int check_scatter(const qm_scatter& s, char* err) { return check_ranks("ReduceScatter", s, err); }
int check_gather(const qm_gather& g, char* err) {
  QM_TRY(check_ranks("AllGather", g, err));
  return check_range("axis", g.axis, -1, 0, err);
}

}  // namespace quantmoe
