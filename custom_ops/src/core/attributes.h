// Enums of op.def as C++ constants and a table, checks that follow from it, and the one way to fail.
#pragma once
#include <string>
#include <string_view>

#include "quantmoe/quant_moe.h"

namespace quantmoe {

#define QM_VALUE(kind, name, code) constexpr int32_t k_##kind##_##name = code;
#include "op.def"

struct EnumValue {
  const char* kind;
  const char* name;
  int32_t code;
};
constexpr EnumValue kEnumValues[] = {
#define QM_VALUE(kind, name, code) {#kind, #name, code},
#include "op.def"
};
// How many values an enum has: for a switch over all of them, which a new one must not compile past.
constexpr int count_values(std::string_view kind) {
  int count = 0;
  for (const EnumValue& value : kEnumValues) count += kind == value.kind;
  return count;
}

// Name of an enum's code in op.def, "?" for a code it does not have.
const char* enum_name(const char* kind, int32_t code);
// The names of an enum's codes that are taken.
template <class Taken>
std::string enum_names(std::string_view kind, const Taken& taken) {
  std::string names;
  for (const EnumValue& value : kEnumValues)
    if (value.kind == kind && taken(value.code)) names += (names.empty() ? "" : ", ") + std::string(value.name);
  return names;
}

// Refuses an op_version that this library does not know, and codes that op.def's enums do not have.
int check_node(const char* op, const void* node, char* err);

// Refuses a number outside low to high.
int check_range(const char* name, int32_t value, int32_t low, int32_t high, char* err);

// Refuses a number below 0, an infinity, NaN.
int check_not_negative(const char* name, float value, char* err);
int check_positive(const char* name, float value, char* err);
int check_finite(const char* name, float value, char* err);  // the same of an infinity and NaN alone

// Refuses an activation that multiplies by a gate where there is none.
int check_activation(const qm_moe& moe, char* err);
// Refuses blocks of h that w2 cannot have.
int check_w2_rotation(const qm_moe& moe, char* err);
// Refuses two projections that a layer in layout marlin cannot have together. The rows of w13, or the groups that w2's
// activations are rounded in, cannot follow w2's order of columns.
int check_marlin_layer(const qm_projection& w13, const qm_projection& w2, char* err);

// What an engine's MoERouting takes, and how its refusals say that: "expected", say.
struct RoutingLimits {
  int32_t experts;
  bool together;  // shared experts count with the others; else they may be as many
  const char* takes;
};
int check_routing(const qm_routing& routing, const RoutingLimits& limits, char* err);

// Refuses what no engine's CachedAttention takes, or CausalConv, GatedDelta, StateSpace, Hadamard, HyperConnection,
// AllReduce, AllReduceAddRMSNorm, AllGather, ReduceScatter.
int check_attention(const qm_attention& attention, char* err);
constexpr int32_t kMaxConvWidth = 128;
int check_conv(const qm_conv& conv, char* err);
int check_reduce(const qm_reduce& reduce, char* err);
int check_reduce_norm(const qm_reduce_norm& node, char* err);
// Their inputs and outputs are alike.
inline qm_norm norm_of(const qm_reduce_norm& node) { return {node.op_version, node.norm_epsilon}; }
int check_gather(const qm_gather& gather, char* err);
int check_scatter(const qm_scatter& scatter, char* err);
int check_delta(const qm_delta& delta, char* err);
int check_space(const qm_space& space, char* err);
int check_indexer(const qm_indexer& indexer, char* err);
int check_hadamard(const qm_hadamard& node, char* err);
constexpr int32_t kMaxStreams = 16;
int check_hyper_connection(const qm_hyper_connection& node, char* err);
// Refuses a block that is no power of two, or does not divide so many features.
int check_rotation(const char* name, int32_t size, const char* of, int32_t features, char* err);
// Of CachedAttention's caches: whether k_scale and v_scale multiply their codes; bytes after the codes of a token and
// head.
inline bool has_cache_scales(const qm_attention& attention) {
  return attention.cache_format == k_cache_format_int8 || attention.cache_format == k_cache_format_fp8_e4m3;
}
inline int32_t cache_tail(const qm_attention& attention) {
  return attention.cache_format == k_cache_format_int8_token ? 4 : 0;
}
// Features of a head's query in qkv, and of its output.
inline int32_t query_size(const qm_attention& attention) {
  return attention.nope_size ? attention.nope_size + attention.head_size - attention.v_head_size : attention.head_size;
}
inline int32_t output_size(const qm_attention& attention) {
  return attention.nope_size ? attention.out_size : attention.v_head_size;
}
// Gates that a token's qkv begins with, and all that it has.
inline int64_t gates_size(const qm_attention& attention) {
  return attention.gated ? int64_t{attention.num_heads} * attention.v_head_size : 0;
}
inline int64_t qkv_size(const qm_attention& attention) {
  return gates_size(attention) + int64_t{attention.num_heads} * query_size(attention) +
         int64_t{attention.kv_num_heads} * (attention.head_size + (attention.key_split ? 0 : attention.v_head_size));
}

// Where an operator's input is in the rows of a tensor that may be wider.
struct Part {
  int64_t size, offset;
};
inline Part part_of(int32_t size, int32_t offset, int64_t own) { return {size ? size : own, offset}; }
inline Part x_of(const qm_conv& conv) { return part_of(conv.x_size, conv.x_offset, conv.channels); }
inline Part a_of(const qm_delta& delta) {
  return part_of(delta.a_size, delta.a_offset,
                 int64_t{delta.num_v_heads} * (delta.decay_per_key ? delta.k_head_size : 1));
}
inline Part b_of(const qm_delta& delta) { return part_of(delta.b_size, delta.b_offset, delta.num_v_heads); }
inline Part z_of(const qm_delta& delta) {
  return part_of(delta.z_size, delta.z_offset, int64_t{delta.num_v_heads} * delta.v_head_size);
}
inline int64_t width_of(const qm_space& space) { return int64_t{space.num_heads} * space.head_size; }  // of x, z and y
inline Part dt_of(const qm_space& space) { return part_of(space.dt_size, space.dt_offset, space.num_heads); }
inline Part z_of(const qm_space& space) { return part_of(space.z_size, space.z_offset, width_of(space)); }
// Writes the sentence to err (QM_ERROR_SIZE bytes) and returns status.
[[gnu::format(printf, 3, 4)]] int fail(char* err, int status, const char* format, ...);

#define QM_TRY(expression) \
  if (int status = (expression)) return status

}  // namespace quantmoe
