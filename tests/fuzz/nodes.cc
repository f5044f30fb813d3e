// libFuzzer target: one node of any operator but QuantMoE through the C ABI, from any bytes.
//
// The input chooses attributes (mostly valid ones, sometimes any), sizes and a seed. Checked:
//   - nothing is read or written outside the buffers: each ends, or begins, at an inaccessible page
//   - QuantLinear: all kernels, with any number of lanes, give the same bytes, those of each row alone
//   - MoERouting: ids are distinct experts, best first; weights are those of each token alone, and not negative where
//     the method makes them so
//   - CachedAttention: as QuantLinear; caches apart or in place, `rows` now and then with any numbers
//   - CausalConv, GatedDelta, StateSpace: as CachedAttention; the state in place is the one apart
//   - SparseIndexer: as CachedAttention; lists are ascending slots that the token sees, whole blocks of them, then -1
#include <set>
#include <vector>

#include "core/shapes.h"
#include "fuzz.h"

using namespace quantmoe;

namespace {

// Sets every attribute of an operator from the input: a few wild ones anything at all.
void set_any(FuzzedDataProvider& data, const char* op, void* node) {
  const qm_operator& known = *qm_find_operator(op);
  for (int n = data.ConsumeIntegralInRange(1, 3); n > 0; --n) {
    const qm_attribute& a = known.attributes[data.ConsumeIntegralInRange<size_t>(0, known.count - 1)];
    qm_value value{a.name, a.kind, 0, 0, nullptr};
    if (a.kind == 'i') value.integer = data.ConsumeIntegral<int64_t>();
    if (a.kind == 'f') value.number = data.ConsumeFloatingPoint<float>();
    if (a.kind == 's') value.text = data.PickValueInArray(kNames);
    set_attribute(op, node, value);
  }
  const std::string name = data.ConsumeRandomLengthString(600);
  set_attribute(op, node, {name.c_str(), 'i', 1, 0, nullptr});
}

void check_reason(const char* err) {
  CHECK(std::memchr(err, 0, QM_ERROR_SIZE) && err[0], "a refusal without a reason");
}

void linear(FuzzedDataProvider& data, bool wild) {
  char err[QM_ERROR_SIZE];
  qm_linear linear{};
  linear.op_version = 1;
  const int most = data.ConsumeIntegralInRange(0, 7) == 0 ? 300 : 60;
  linear.in_features = data.ConsumeIntegralInRange(1, most);
  linear.out_features = data.ConsumeIntegralInRange(1, most);
  qm_projection& p = linear.w;
  p.block_n = data.ConsumeIntegralInRange(0, 7) ? 1 : 16;
  p.layout_version = 1;
  p.format = any_value(data, "format");
  p.scale_type = any_value(data, "scale_type");
  p.group_size = std::array{-1, 16, 32, 64, 128}[data.ConsumeIntegralInRange(0, 4)];
  p.activation_format = any_value(data, "activation_format");
  p.zero_points = data.ConsumeBool();
  if (p.format >= k_format_q4_k && data.ConsumeIntegralInRange(0, 3)) set_two_levels(&p);
  p.bias = data.ConsumeBool();
  p.perm = data.ConsumeBool();
  p.pre_scale = data.ConsumeBool();
  if (wild) set_any(data, "QuantLinear", &linear);
  qm_row found{};
  (void)qm_row_of(&linear.w, linear.out_features, linear.in_features, 1, &found, err);
  const auto row = static_cast<size_t>(found.bytes);
  qm_shape packed{2, {1, found.bytes / 4}};
  if (wild && data.ConsumeBool()) packed.sizes[data.ConsumeBool()] = data.ConsumeIntegral<int64_t>();
  unsetenv("QUANTMOE_FORCE_KERNEL");
  if (qm_validate("QuantLinear", &linear, &packed, err)) return check_reason(err);
  if (linear.in_features > 1024 || linear.out_features > 1024 || row > Guarded::kBytes) return;

  static Guarded x_place, w_place, y_place, workspace_place;
  const bool at_end = data.ConsumeBool(), tame = data.ConsumeBool();
  const auto type = static_cast<qm_type>(data.ConsumeIntegralInRange(0, 2));
  const int64_t rows = data.ConsumeIntegralInRange(0, data.ConsumeIntegralInRange(0, 15) == 0 ? 70 : 6);
  Rng rng(data.ConsumeIntegral<uint32_t>());
  const int64_t element = type == QM_F32 ? 4 : 2, count = rows * linear.in_features, made = rows * linear.out_features;
  void* x = x_place.place(count * element, at_end);
  void* w = w_place.place(row, at_end);
  void* y = y_place.place(made * element, at_end);
  if (tame)
    fill(rng, type, -2, 2, x, count);
  else
    random_bytes(rng, x, count * element);
  random_bytes(rng, w, row);
  qm_tensor inputs[] = {{x, type, {2, {rows, linear.in_features}}}, {w, 0, packed}};
  qm_tensor output{y, type, {2, {rows, linear.out_features}}};
  qm_call call{inputs, &output, nullptr, 1, nullptr, nullptr, nullptr, nullptr};
  const auto run = [&] { return qm_run("QuantLinear", &linear, &call, err); };
  const Outcome first = every_kernel(data, "QuantLinear", &linear, call, y, made, workspace_place, at_end, run);
  if (first.status || !rows) return;
  // The last row alone, which in the batch may have been in a tile with others.
  inputs[0] = {
      static_cast<uint8_t*>(x) + (rows - 1) * linear.in_features * element, type, {2, {1, linear.in_features}}};
  call.workspace = workspace_place.place(qm_workspace("QuantLinear", &linear, &call), at_end);
  CHECK(run() == QM_OK, "%s", err);
  check_equal(type, y, first.bytes.data() + (rows - 1) * linear.out_features * element, linear.out_features, "one row",
              "the batch");
}

void routing(FuzzedDataProvider& data, bool wild) {
  char err[QM_ERROR_SIZE];
  qm_routing r{};
  r.op_version = 2;
  r.n_group = data.ConsumeIntegralInRange(1, 8);
  r.topk_group = data.ConsumeIntegralInRange(1, r.n_group);
  const int size = data.ConsumeIntegralInRange(1, 40);
  r.num_experts = r.n_group * size;
  r.top_k = data.ConsumeIntegralInRange(1, std::min(16, r.topk_group * size));
  r.method = any_value(data, "routing_method");
  r.renormalize = data.ConsumeBool();
  r.routed_scaling_factor = data.ConsumeBool() ? 1.0f : 2.5f;
  r.shared_experts = data.ConsumeIntegralInRange(0, 3);
  r.shared_gate = r.shared_experts > 0 && data.ConsumeBool();
  if (wild) set_any(data, "MoERouting", &r);
  if (qm_validate("MoERouting", &r, nullptr, err)) {
    CHECK(wild, "refused: %s", err);
    return check_reason(err);
  }
  if (r.num_experts > 4096 || r.n_group > 4096 || r.shared_experts > 4096) return;
  const int64_t columns = r.num_experts + r.shared_gate, slots = r.top_k + r.shared_experts;

  static Guarded logits_place, bias_place, ids_place, weights_place, workspace_place;
  const bool at_end = data.ConsumeBool(), tame = data.ConsumeBool();
  const auto type = static_cast<qm_type>(data.ConsumeIntegralInRange(0, 2));
  const int64_t tokens = data.ConsumeIntegralInRange(0, 70);
  Rng rng(data.ConsumeIntegral<uint32_t>());
  const int64_t element = type == QM_F32 ? 4 : 2, logits = tokens * columns, pairs = tokens * slots;
  void* values = logits_place.place(logits * element, at_end);
  float* bias = static_cast<float*>(bias_place.place(r.num_experts * 4, at_end));
  int32_t* ids = static_cast<int32_t*>(ids_place.place(pairs * 4, at_end));
  float* weights = static_cast<float*>(weights_place.place(pairs * 4, at_end));
  if (tame)
    fill(rng, type, -4, 4, values, logits);
  else
    random_bytes(rng, values, logits * element);
  if (tame || data.ConsumeBool())
    fill(rng, QM_F32, -1, 1, bias, r.num_experts);
  else
    random_bytes(rng, bias, r.num_experts * 4);
  qm_tensor inputs[] = {{values, type, {2, {tokens, columns}}}, {bias, QM_F32, {1, {r.num_experts}}}};
  qm_tensor outputs[] = {{ids, 0, {2, {tokens, slots}}}, {weights, QM_F32, {2, {tokens, slots}}}};
  qm_call call{inputs,  outputs, nullptr, data.ConsumeIntegralInRange(1, 3), one_after_another,
               nullptr, nullptr, nullptr};
  call.workspace = workspace_place.place(qm_workspace("MoERouting", &r, &call), at_end);
  CHECK(qm_run("MoERouting", &r, &call, err) == QM_OK, "%s", err);
  for (int64_t t = 0; t < tokens; ++t) {
    const int32_t* own = ids + t * slots;
    CHECK(std::set<int32_t>(own, own + r.top_k).size() == static_cast<size_t>(r.top_k), "token %lld repeats an expert",
          (long long)t);
    for (int j = 0; j < r.top_k; ++j) {
      CHECK(own[j] >= 0 && own[j] < r.num_experts, "token %lld has expert %d", (long long)t, own[j]);
      if (tame && r.method != k_routing_method_topk && !wild) {
        const float weight = weights[t * slots + j];
        CHECK(weight >= 0 && weight <= r.routed_scaling_factor * 1.00001f, "weight %g", weight);
      }
    }
    for (int64_t j = r.top_k; j < slots; ++j) {
      const float weight = weights[t * slots + j];
      CHECK(own[j] == r.num_experts + j - r.top_k, "token %lld has shared expert %d", (long long)t, own[j]);
      CHECK(r.shared_gate ? !(weight < 0 || weight > 1) : weight == 1, "shared weight %g", weight);
    }
  }
  if (!tokens) return;
  const int64_t last = tokens - 1;
  std::vector<int32_t> alone_ids(slots);
  std::vector<float> alone(slots);
  inputs[MoERouting_logits] = {static_cast<uint8_t*>(values) + last * columns * element, type, {2, {1, columns}}};
  outputs[MoERouting_topk_ids].data = alone_ids.data();
  outputs[MoERouting_topk_weights].data = alone.data();
  CHECK(qm_run("MoERouting", &r, &call, err) == QM_OK, "%s", err);
  CHECK(std::equal(alone_ids.begin(), alone_ids.end(), ids + last * slots), "other experts alone");
  check_equal(QM_F32, alone.data(), weights + last * slots, slots, "one token", "the batch");
}

// Fills a cache's rows; now and then with any numbers.
void fill_rows(FuzzedDataProvider& data, int64_t batch, int64_t tokens, int64_t past_slots, int64_t slots,
               int32_t* rows) {
  for (int64_t b = 0; b < batch; ++b) {
    rows[3 * b + 1] = data.ConsumeIntegralInRange<int32_t>(0, std::min(tokens, slots));
    rows[3 * b] = data.ConsumeIntegralInRange<int32_t>(0, tokens - rows[3 * b + 1]);
    rows[3 * b + 2] = data.ConsumeIntegralInRange<int32_t>(0, std::min(past_slots, slots - rows[3 * b + 1]));
  }
  if (batch && data.ConsumeIntegralInRange(0, 15) == 0)
    rows[data.ConsumeIntegralInRange<int64_t>(0, 3 * batch - 1)] = data.ConsumeIntegral<int32_t>();
}

// Arrays of a call of CachedAttention.
struct AttentionArrays {
  qm_type type, cache_type;
  int64_t batch, tokens, past_slots, slots;
  qm_tensor inputs[Slots(kInputs, "CachedAttention").most]{}, outputs[Slots(kOutputs, "CachedAttention").most]{};

  // Filled; in place where present has past's slots and the input says so.
  void place(FuzzedDataProvider& data, const qm_attention& a, bool at_end);
};

void AttentionArrays::place(FuzzedDataProvider& data, const qm_attention& a, bool at_end) {
  static Guarded places[15];
  Rng rng(data.ConsumeIntegral<uint32_t>());
  const bool tame = data.ConsumeBool(), in_place = slots == past_slots && data.ConsumeBool();
  int next = 0;
  const auto take = [&](qm_type of, const qm_shape& shape, bool codes = false) {
    int64_t count = 1;
    for (int i = 0; i < shape.rank; ++i) count *= shape.sizes[i];
    const int64_t bytes = count * (codes ? 1 : of == QM_F32 ? 4 : 2);
    void* const at = places[next++].place(bytes, at_end);
    if (tame && !codes)
      fill(rng, of, -2, 2, at, count);
    else
      random_bytes(rng, at, bytes);
    return qm_tensor{at, of, shape};
  };
  const auto floats = [&](int64_t count) { return take(QM_F32, {1, {count}}); };
  const int64_t heads = a.num_heads, groups = a.kv_num_heads, d = a.head_size, v = a.v_head_size;
  const auto cache = [&](int64_t count, int64_t width) {
    return take(cache_type, {4, {batch, groups, count, width + cache_tail(a)}}, a.cache_format != k_cache_format_none);
  };
  const auto weights = [&](int64_t of) {
    return floats(a.qk_norm == k_qk_norm_none ? 0 : a.qk_norm == k_qk_norm_head ? d : of * d);
  };
  const int64_t key_width = a.key_split ? a.key_split : d, value_width = a.key_split ? d - a.key_split : v;
  const qm_shape angles{3, {batch, tokens, a.rotary_size / 2}};
  inputs[CachedAttention_qkv] = take(type, {3, {batch, tokens, qkv_size(a)}});
  inputs[CachedAttention_past_key] = cache(past_slots, key_width);
  inputs[CachedAttention_past_value] = cache(past_slots, value_width);
  inputs[CachedAttention_attention_mask] = {nullptr, 0, {2, {batch, slots}}};
  inputs[CachedAttention_cos] = take(QM_F32, angles);
  inputs[CachedAttention_sin] = take(QM_F32, angles);
  inputs[CachedAttention_q_norm] = weights(heads);
  inputs[CachedAttention_k_norm] = weights(groups);
  inputs[CachedAttention_sinks] = floats(heads);
  inputs[CachedAttention_k_up] = take(type, {3, {heads, a.nope_size, v}});
  inputs[CachedAttention_v_up] = take(type, {3, {heads, v, a.out_size}});
  outputs[CachedAttention_output] = take(type, {3, {batch, tokens, heads * output_size(a)}});
  const qm_tensor key = cache(slots, key_width), value = cache(slots, value_width);
  outputs[CachedAttention_present_key] = in_place ? inputs[CachedAttention_past_key] : key;
  outputs[CachedAttention_present_value] = in_place ? inputs[CachedAttention_past_value] : value;
  auto* const rows = static_cast<int32_t*>(places[next].place(batch * 12, at_end));
  inputs[CachedAttention_rows] = {rows, 0, {2, {batch, 3}}};
  fill_rows(data, batch, tokens, past_slots, slots, rows);
}

void attention(FuzzedDataProvider& data, bool wild) {
  char err[QM_ERROR_SIZE];
  qm_attention a{};
  a.op_version = 7;
  a.kv_num_heads = data.ConsumeIntegralInRange(1, 3);
  a.num_heads = a.kv_num_heads * data.ConsumeIntegralInRange(1, 10);
  a.head_size = data.ConsumeIntegralInRange(1, 40);
  a.v_head_size = data.ConsumeIntegralInRange(1, 40);
  a.scale = 0.25f;
  a.sliding_window = data.ConsumeBool() ? data.ConsumeIntegralInRange(0, 300) : 0;
  a.chunk_size = data.ConsumeBool() ? data.ConsumeIntegralInRange(0, 300) : 0;
  a.softcap = data.ConsumeBool() ? 3.0f : 0.0f;
  a.rotary_size = 2 * data.ConsumeIntegralInRange(0, a.head_size / 2);
  a.rotary_interleaved = data.ConsumeBool();
  a.qk_norm = any_value(data, "qk_norm");
  a.norm_epsilon = 1e-6f;
  a.cache_format = any_value(data, "cache_format");
  a.k_scale = has_cache_scales(a) ? 0.02f : 1.0f;
  a.v_scale = a.k_scale;
  if (a.cache_format == k_cache_format_none &&
      data.ConsumeIntegralInRange(0, 3) == 0) {  // latent: values are the ends of keys
    a.key_split = data.ConsumeIntegralInRange(0, a.head_size - 1);
    a.v_head_size = std::min(a.v_head_size, a.head_size);
    if (a.key_split && data.ConsumeBool()) {
      a.nope_size = data.ConsumeIntegralInRange(1, 20);
      a.out_size = data.ConsumeIntegralInRange(1, 40);
      a.qk_norm = k_qk_norm_none;
      a.rotary_size = std::min(a.rotary_size, (a.head_size - a.v_head_size) / 2 * 2);
    }
  }
  if (a.cache_format == k_cache_format_none && !a.key_split && data.ConsumeIntegralInRange(0, 3) == 0) {
    a.compress_rate = data.ConsumeIntegralInRange(1, 50);
    a.v_head_size = a.head_size;
    a.chunk_size = 0;
  }
  a.gated = !a.key_split && data.ConsumeBool();
  if (wild) set_any(data, "CachedAttention", &a);
  if (a.block_size > 0) return;  // whose calls have other shapes
  if (qm_validate("CachedAttention", &a, nullptr, err)) {
    CHECK(wild, "refused: %s", err);
    return check_reason(err);
  }
  const int64_t features = int64_t{a.head_size} + a.v_head_size + a.nope_size + a.out_size;
  if (a.num_heads * features > 4096 || a.kv_num_heads * features > 1500) return;

  static Guarded workspace_place;
  const bool at_end = data.ConsumeBool();
  AttentionArrays arrays;
  arrays.type = static_cast<qm_type>(data.ConsumeIntegralInRange(0, 2));
  arrays.cache_type = data.ConsumeBool() ? QM_F32 : QM_F16;
  arrays.batch = data.ConsumeIntegralInRange(0, 3);
  arrays.tokens = data.ConsumeIntegralInRange(0, data.ConsumeIntegralInRange(0, 7) ? 6 : 40);
  arrays.past_slots = data.ConsumeIntegralInRange(0, data.ConsumeIntegralInRange(0, 3) ? 40 : 300);
  arrays.slots = arrays.past_slots + (data.ConsumeBool() ? 0 : data.ConsumeIntegralInRange(0, 40));
  arrays.place(data, a, at_end);
  qm_call call{arrays.inputs, arrays.outputs, nullptr, 1, nullptr, nullptr, nullptr, nullptr};
  const int64_t width = int64_t{a.num_heads} * output_size(a), element = arrays.type == QM_F32 ? 4 : 2;
  void* const output = arrays.outputs[CachedAttention_output].data;
  const auto run = [&] { return qm_run("CachedAttention", &a, &call, err); };
  const Outcome first = every_kernel(data, "CachedAttention", &a, call, output, arrays.batch * arrays.tokens * width,
                                     workspace_place, at_end, run);
  if (first.status) return check_reason(err);
  if (!arrays.batch) return;
  // The first row without the others, and with one lane.
  for (qm_tensor& input : arrays.inputs)
    if (input.shape.sizes[0] == arrays.batch) input.shape.sizes[0] = 1;
  call.lanes = 1;
  call.workspace = workspace_place.place(qm_workspace("CachedAttention", &a, &call), at_end);
  std::memset(output, 0xa5, arrays.tokens * width * element);
  CHECK(run() == QM_OK, "%s", err);
  check_equal(arrays.type, output, first.bytes.data(), arrays.tokens * width, "one row", "the batch");
}

int64_t elements(const qm_tensor& tensor) {
  int64_t count = 1;
  for (int32_t i = 0; i < tensor.shape.rank; ++i) count *= tensor.shape.sizes[i];
  return count;
}

// Places arrays of a call, filled.
class Arrays {
 public:
  Arrays(FuzzedDataProvider& data, bool at_end)
      : rng_(data.ConsumeIntegral<uint32_t>()), tame_(data.ConsumeBool()), at_end_(at_end) {}
  void* take(qm_type type, int64_t count) {
    static Guarded places[12];
    const int64_t bytes = count * (type == QM_F32 ? 4 : 2);
    void* const at = places[next_++].place(bytes, at_end_);
    if (tame_)
      fill(rng_, type, -2, 2, at, count);
    else
      random_bytes(rng_, at, bytes);
    return at;
  }
  int32_t* rows(FuzzedDataProvider& data, int64_t batch, int64_t tokens) {
    int32_t* const rows = static_cast<int32_t*>(take(QM_F32, 3 * batch));
    for (int64_t b = 0; b < batch; ++b) {
      rows[3 * b + 1] = data.ConsumeIntegralInRange<int32_t>(0, tokens);
      rows[3 * b] = data.ConsumeIntegralInRange<int32_t>(0, tokens - rows[3 * b + 1]);
      rows[3 * b + 2] = data.ConsumeIntegralInRange<int32_t>(0, 3);
    }
    if (batch && data.ConsumeIntegralInRange(0, 15) == 0)
      rows[data.ConsumeIntegralInRange<int64_t>(0, 3 * batch - 1)] = data.ConsumeIntegral<int32_t>();
    return rows;
  }

 private:
  Rng rng_;
  bool tame_, at_end_;
  int next_ = 0;
};

// A node with a state, of op.def's shapes: with every kernel, then in place.
void stateful(FuzzedDataProvider& data, const char* op, const void* node, int64_t window, int64_t most_tokens) {
  static Guarded workspace_place;
  char err[QM_ERROR_SIZE] = {};
  const bool at_end = data.ConsumeBool();
  const auto type = static_cast<qm_type>(data.ConsumeIntegralInRange(0, 2));
  FreeSizes<int64_t> sizes;
  sizes.set('B', data.ConsumeIntegralInRange(0, 3));
  sizes.set('S', data.ConsumeIntegralInRange<int64_t>(0, most_tokens));
  Arrays arrays(data, at_end);
  const ShapeRules rules(op, node);
  const auto place = [&](const TensorSlot& slot, const std::vector<int64_t>& shape) {
    qm_tensor tensor{nullptr, slot.type == Type::T ? type : QM_F32, {static_cast<int32_t>(shape.size()), {}}};
    std::copy(shape.begin(), shape.end(), tensor.shape.sizes);
    tensor.data = slot.type == Type::int32 ? arrays.rows(data, sizes.at('B'), sizes.at('S'))
                                           : arrays.take(static_cast<qm_type>(tensor.type), elements(tensor));
    return tensor;
  };
  std::vector<qm_tensor> inputs, outputs;
  const Slots given(kInputs, op), made(kOutputs, op);
  for (int32_t i = 0; i < given.count; ++i) {
    std::vector<int64_t> shape;
    for (const Dimension& d : rules.input(static_cast<size_t>(i)).dimensions)
      shape.push_back(d.kind == Dimension::kNumber ? d.number : sizes.at(d.name));
    inputs.push_back(place(given.first[i], shape));
    if (rules.input(static_cast<size_t>(i)).or_none && data.ConsumeBool()) inputs.back() = {nullptr, QM_F32, {1, {0}}};
  }
  for (int32_t i = 0; i < made.count; ++i)
    outputs.push_back(place(made.first[i], rules.output(static_cast<size_t>(i), sizes, MakeNumbers{})));
  qm_tensor &past = inputs[inputs.size() - 2], &y = outputs[0], &present = outputs[1];
  const int64_t bytes = elements(present) * (present.type == QM_F32 ? 4 : 2);
  std::memset(past.data, 0, static_cast<size_t>(bytes / window * (window - 1)));  // as those slots are apart
  qm_call call{inputs.data(), outputs.data(), nullptr, 1, nullptr, nullptr, nullptr, nullptr};
  const auto run = [&] { return qm_run(op, node, &call, err); };
  const Outcome first = every_kernel(data, op, node, call, y.data, elements(y), workspace_place, at_end, run);
  if (first.status) return check_reason(err);
  const uint8_t* const after = static_cast<const uint8_t*>(present.data);
  const std::vector<uint8_t> apart(after, after + bytes);
  std::memcpy(present.data, past.data, static_cast<size_t>(bytes));
  past.data = present.data;
  CHECK(run() == QM_OK, "%s", err);
  check_equal(type, y.data, first.bytes.data(), elements(y), "in place", "apart");
  check_equal(present.type, present.data, apart.data(), elements(present), "the state in place", "apart");
}

void convolution(FuzzedDataProvider& data, bool wild) {
  char err[QM_ERROR_SIZE];
  qm_conv c{};
  c.op_version = 4;
  c.channels = data.ConsumeIntegralInRange(1, 300);
  c.width = data.ConsumeIntegralInRange(2, 8);
  c.activation = data.ConsumeBool();
  c.state_window = data.ConsumeBool() ? 1 : data.ConsumeIntegralInRange(2, 5);
  if (data.ConsumeBool()) {
    c.x_offset = data.ConsumeIntegralInRange(0, 5);
    c.x_size = c.x_offset + c.channels + data.ConsumeIntegralInRange(0, 5);
  }
  if (wild) set_any(data, "CausalConv", &c);
  if (qm_validate("CausalConv", &c, nullptr, err)) {
    CHECK(wild, "refused: %s", err);
    return check_reason(err);
  }
  if (c.channels > 4096 || c.x_size > 8192) return;
  stateful(data, "CausalConv", &c, c.state_window, 12);
}

void delta(FuzzedDataProvider& data, bool wild) {
  char err[QM_ERROR_SIZE];
  qm_delta d{};
  d.op_version = 3;
  d.num_k_heads = data.ConsumeIntegralInRange(1, 3);
  d.num_v_heads = d.num_k_heads * data.ConsumeIntegralInRange(1, 3);
  d.k_head_size = data.ConsumeIntegralInRange(1, 40);
  d.v_head_size = data.ConsumeBool() ? 16 * data.ConsumeIntegralInRange(1, 9) : data.ConsumeIntegralInRange(1, 90);
  d.scale = 0.25f;
  d.l2_epsilon = d.norm_epsilon = 1e-6f;
  d.decay_per_key = data.ConsumeBool();
  d.beta_scale = data.ConsumeBool() ? 1.0f : 2.0f;
  d.gate = data.ConsumeBool();
  d.state_window = data.ConsumeBool() ? 1 : data.ConsumeIntegralInRange(2, 5);
  if (data.ConsumeBool()) {
    d.a_offset = data.ConsumeIntegralInRange(0, 5);
    d.a_size = d.a_offset + d.num_v_heads * (d.decay_per_key ? d.k_head_size : 1) + data.ConsumeIntegralInRange(0, 3);
    d.z_offset = data.ConsumeIntegralInRange(0, 5);
    d.z_size = d.z_offset + d.num_v_heads * d.v_head_size;
    d.b_size = d.num_v_heads + data.ConsumeIntegralInRange(0, 3);
  }
  if (wild) set_any(data, "GatedDelta", &d);
  if (qm_validate("GatedDelta", &d, nullptr, err)) {
    CHECK(wild, "refused: %s", err);
    return check_reason(err);
  }
  const int64_t heads = d.num_v_heads, k = d.k_head_size, v = d.v_head_size;
  if (heads * k * v * d.state_window > 1 << 17 || std::max({d.a_size, d.b_size, d.z_size}) > 1 << 13) return;
  stateful(data, "GatedDelta", &d, d.state_window, data.ConsumeIntegralInRange(0, 7) ? 10 : 40);
}

void space(FuzzedDataProvider& data, bool wild) {
  char err[QM_ERROR_SIZE];
  qm_space p{};
  p.op_version = 1;
  p.num_groups = data.ConsumeIntegralInRange(1, 3);
  const int each = data.ConsumeIntegralInRange(1, 3);
  p.num_heads = p.num_groups * each;
  p.state_size = data.ConsumeIntegralInRange(1, 40);
  p.head_size = data.ConsumeBool() ? 16 * data.ConsumeIntegralInRange(1, 5) : data.ConsumeIntegralInRange(1, 90);
  p.norm_size = p.head_size * data.PickValueInArray({1, each, p.num_heads});
  p.norm_epsilon = 1e-6f;
  p.state_window = data.ConsumeBool() ? 1 : data.ConsumeIntegralInRange(2, 5);
  if (data.ConsumeBool()) {
    p.dt_offset = data.ConsumeIntegralInRange(0, 5);
    p.dt_size = p.dt_offset + p.num_heads + data.ConsumeIntegralInRange(0, 3);
    p.z_offset = data.ConsumeIntegralInRange(0, 5);
    p.z_size = p.z_offset + p.num_heads * p.head_size;
  }
  if (wild) set_any(data, "StateSpace", &p);
  if (qm_validate("StateSpace", &p, nullptr, err)) {
    CHECK(wild, "refused: %s", err);
    return check_reason(err);
  }
  const int64_t heads = p.num_heads, n = p.state_size, width = heads * p.head_size;
  if (width * n * p.state_window > 1 << 17 || std::max(p.dt_size, p.z_size) > 1 << 13) return;
  stateful(data, "StateSpace", &p, p.state_window, data.ConsumeIntegralInRange(0, 7) ? 10 : 40);
}

// A list of a token in `slot`.
void check_list(const qm_indexer& node, const int32_t* list, int64_t size, int64_t slot) {
  int64_t count = 0;
  while (count < size && list[count] >= 0) ++count;
  CHECK(count > 0 && list[count - 1] <= slot, "slot %lld has a list of %lld", (long long)slot, (long long)count);
  CHECK(count == std::min(size, slot + 1) || node.block_size > 1, "%lld slots", (long long)count);
  CHECK(std::all_of(list + count, list + size, [](int32_t i) { return i == -1; }), "slots after -1");
  for (int64_t i = 1; i < count; ++i) {
    CHECK(list[i] > list[i - 1], "slot %d after %d", list[i], list[i - 1]);
    CHECK(list[i] == list[i - 1] + 1 || list[i] % node.block_size == 0, "a block begins at %d", list[i]);
  }
}

void indexing(FuzzedDataProvider& data, bool wild) {
  static Guarded workspace_place;
  char err[QM_ERROR_SIZE] = {};
  qm_indexer node{};
  node.op_version = 2;
  node.num_groups = data.ConsumeIntegralInRange(1, 3);
  node.num_heads = node.num_groups * data.ConsumeIntegralInRange(1, 20);
  node.head_size = data.ConsumeIntegralInRange(1, 40);
  node.block_size = data.ConsumeBool() ? 1 : data.ConsumeIntegralInRange(2, 20);
  const int blocks = data.ConsumeIntegralInRange(1, 9);
  node.top_k = blocks * node.block_size;
  node.best_slot = data.ConsumeBool();
  node.local_blocks = node.best_slot ? data.ConsumeIntegralInRange<int>(node.block_size > 1, blocks) : 0;
  node.relu = data.ConsumeBool();
  if (wild) set_any(data, "SparseIndexer", &node);
  if (qm_validate("SparseIndexer", &node, nullptr, err)) {
    CHECK(wild, "refused: %s", err);
    return check_reason(err);
  }
  const int64_t width = int64_t{node.num_heads} * node.head_size, groups = node.num_groups,
                size = node.top_k + (node.best_slot ? 0 : node.block_size - 1);
  if (width > 4096 || size * groups > 4096) return;
  const bool at_end = data.ConsumeBool();
  const auto type = static_cast<qm_type>(data.ConsumeIntegralInRange(0, 2)),
             cache = data.ConsumeBool() ? QM_F32 : QM_F16;
  int64_t batch = data.ConsumeIntegralInRange(0, 3);
  const int64_t tokens = data.ConsumeIntegralInRange(0, data.ConsumeIntegralInRange(0, 7) ? 6 : 40);
  const int64_t past_slots = data.ConsumeIntegralInRange(0, 300),
                length = data.ConsumeBool() ? 0 : past_slots + data.ConsumeIntegralInRange(0, 40),
                slots = std::max(past_slots, length), features = node.head_size;
  Arrays arrays(data, at_end);
  auto* const rows = static_cast<int32_t*>(arrays.take(QM_F32, 3 * batch));
  fill_rows(data, batch, tokens, past_slots, slots, rows);
  qm_tensor inputs[] = {
      {arrays.take(type, batch * tokens * width), type, {3, {batch, tokens, width}}},
      {arrays.take(type, batch * tokens * features), type, {3, {batch, tokens, features}}},
      {arrays.take(QM_F32, batch * tokens * node.num_heads), QM_F32, {3, {batch, tokens, node.num_heads}}},
      {arrays.take(cache, batch * past_slots * features), cache, {4, {batch, 1, past_slots, features}}},
      {rows, 0, {2, {batch, 3}}},
      {nullptr, 0, {2, {batch, length}}}};
  auto* const lists = static_cast<int32_t*>(arrays.take(QM_F32, batch * tokens * groups * size));
  qm_tensor outputs[] = {{lists, 0, {4, {batch, tokens, groups, size}}},
                         {arrays.take(cache, batch * slots * features), cache, {4, {batch, 1, slots, features}}}};
  qm_call call{inputs, outputs, nullptr, 1, nullptr, nullptr, nullptr, nullptr};
  const auto run = [&] { return qm_run("SparseIndexer", &node, &call, err); };
  const int64_t of_lists = batch * tokens * groups * size * (type == QM_F32 ? 1 : 2);  // compared as the input's type
  const Outcome first = every_kernel(data, "SparseIndexer", &node, call, lists, of_lists, workspace_place, at_end, run);
  if (first.status) return check_reason(err);
  for (int64_t b = 0; b < batch; ++b)
    for (int64_t i = 0; i < rows[3 * b + 1] * groups; ++i)
      check_list(node, lists + ((b * tokens + rows[3 * b]) * groups + i) * size, size, rows[3 * b + 2] + i / groups);
  if (!batch) return;
  for (qm_tensor& tensor : inputs) tensor.shape.sizes[0] = 1;
  for (qm_tensor& tensor : outputs) tensor.shape.sizes[0] = 1;
  call.workspace = workspace_place.place(qm_workspace("SparseIndexer", &node, &call), at_end);
  CHECK(run() == QM_OK, "%s", err);
  check_equal(type, lists, first.bytes.data(), of_lists / batch, "one row", "the batch");
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* bytes, size_t size) {
  FuzzedDataProvider data(bytes, size);
  const bool wild = data.ConsumeIntegralInRange(0, 15) == 0;
  data.PickValueInArray({linear, linear, routing, attention, convolution, delta, space, indexing})(data, wild);
  return 0;
}
