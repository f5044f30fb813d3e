// libFuzzer target: one QuantMoE layer through the C ABI, from any bytes.
//
// The input chooses attributes (mostly valid ones, sometimes any), shapes and a seed. What qm_validate accepts is
// run by every kernel of this machine, on packed tensors that are either random bytes or packed from random codes.
// Checked:
//   - nothing is read or written outside the buffers: each ends, or begins, at an inaccessible page (memory operands of
//     inline assembly are seen by nothing else), besides AddressSanitizer and UndefinedBehaviorSanitizer
//   - all kernels, with any number of lanes, give one status and the same bytes
//   - for packed codes, the result is the float64 one within the error analysed in Reference
#include <array>
#include <string>
#include <vector>

#include "fuzz.h"

using namespace quantmoe;

namespace {

// One matrix in the packer's form, and what it stands for.
struct SourceMatrix {
  int64_t n, k, group, groups;
  int bits, scale_type;
  std::vector<uint8_t> codes, scales;
  std::vector<float> bias;
  std::vector<int32_t> perm;

  SourceMatrix(const qm_projection& p, int64_t n, int64_t k, Rng& rng)
      : n(n),
        k(k),
        group(p.group_size == -1 ? k : p.group_size),
        bits(p.format == k_format_int4 ? 4 : 8),
        scale_type(p.scale_type) {
    groups = ceil_div(k, group);
    codes.resize(n * k);
    for (uint8_t& code : codes) code = static_cast<uint8_t>(rng() >> 7 & ((1 << bits) - 1));
    scales.resize(n * groups * scale_size(scale_type));
    const double size = 1.0 / ((1 << (bits - 1)) * std::sqrt(static_cast<double>(k)));
    fill(rng, scale_type, -size, 2 * size, scales.data(), n * groups);
    if (p.bias) {
      bias.resize(n);
      fill(rng, QM_F32, -1, 1, bias.data(), n);
    }
  }
  double weight(int64_t row, int64_t j) const {
    return (codes[row * k + j] - (1 << (bits - 1))) * value_at(scale_type, scales.data(), row * groups + j / group);
  }
  void pack(const qm_projection& p, void* to, int step) const {
    const PanelSource source{.format = p.format,
                             .group_size = p.group_size,
                             .scale_type = p.scale_type,
                             .n = n,
                             .k = k,
                             .codes = codes.data(),
                             .scales = scales.data(),
                             .zero_points = nullptr,
                             .block_n = 1,
                             .global_scale = 1.0f,
                             .bias = bias.empty() ? nullptr : bias.data(),
                             .row_order = nullptr,
                             .panel_step = step};
    char err[QM_ERROR_SIZE];
    CHECK(pack_panels(source, to, err) == QM_OK, "%s", err);
  }
};

struct Bounded {
  double value = 0, error = 0;  // |kernel's - value| <= error
};

// The layer in float64 with a bound of what the kernels' f32 arithmetic may differ by.
class Reference {
 public:
  explicit Reference(const qm_moe& moe) : moe_(moe) {}
  struct Expert {
    std::vector<SourceMatrix> up;  // gate, up; or up
    std::vector<SourceMatrix> down;
  };
  std::vector<Expert> experts;

  // y = matrix * x: an f32 sum of K products errs by at most (K + few) 2^-24 of the sum of magnitudes; q and zero point
  // are summed apart, so that their magnitudes count apart.
  std::vector<Bounded> product(const SourceMatrix& m, const std::vector<Bounded>& x,
                               const std::vector<double>& magnitude) const {
    std::vector<Bounded> y(m.n);
    for (int64_t row = 0; row < m.n; ++row) {
      double sum = 0, error = 0, size = 0;
      for (int64_t j = 0; j < m.k; ++j) {
        const int64_t from = m.perm.empty() ? j : m.perm[j];
        const double w = m.weight(row, j);
        sum += w * x[from].value;
        error += std::abs(w) * x[from].error;
        size += std::abs(w) * magnitude[from];
      }
      const double bias = m.bias.empty() ? 0 : m.bias[row];
      y[row] = {sum + bias, error + (m.k + 32) * 0x1p-24 * (size + error + std::abs(bias)) + 1e-37};
    }
    return y;
  }

  // What the product sees of x. An element whose rounding the errors may flip, or that is clamped, may be a step away.
  std::vector<Bounded> quantized(const std::vector<Bounded>& x, int32_t format, std::vector<double>& magnitude) const {
    magnitude.resize(x.size());
    std::vector<Bounded> out = x;
    if (format == k_activation_format_none) {
      for (size_t i = 0; i < x.size(); ++i) magnitude[i] = std::abs(x[i].value) + x[i].error;
      return out;
    }
    float low = 0, high = 0;
    double worst = 0;
    for (const Bounded& v : x) {
      low = std::min(low, static_cast<float>(v.value));
      high = std::max(high, static_cast<float>(v.value));
      worst = std::max(worst, v.error);
    }
    double step, zero = 0, range;
    if (format == k_activation_format_int8_token) {
      range = std::max(-low, high);
      step = range / 127.5;
    } else {
      range = high - low;
      step = range / 255;
      if (range > 0) {
        const double a = low / step, b = high / step;
        zero = std::nearbyint(std::clamp(-128 + a + 127 + b > 0 ? -128 - a : 127 - b, -128.0, 127.0));
      }
    }
    const bool lost = 64 * worst >= range || range < 1e-35;  // the range itself is not known well
    // An all-zero row has q = zero point = 127 and step 1, whose products cancel but for their rounding.
    const bool zeros = format == k_activation_format_int8_token_asym &&
                       std::all_of(x.begin(), x.end(), [](const Bounded& v) { return std::abs(v.value) <= v.error; });
    for (size_t i = 0; i < x.size(); ++i) {
      const double t = lost ? 0 : x[i].value / step, rounded = std::nearbyint(t);
      const double q = std::clamp(rounded + zero, -128.0, 127.0);
      const double slack = lost ? 1 : 2 * x[i].error / step + 512 * (2 * worst / range + 0x1p-20);
      const bool sure = !lost && std::abs(std::abs(t - rounded) - 0.5) > slack && std::abs(rounded + zero) < 127;
      if (lost) {
        out[i] = {x[i].value, x[i].error + 4 * (range + 2 * worst) / 127};
      } else {
        const double seen = (q - zero) * step;
        out[i] = {seen, std::abs(seen) * (4 * worst / range + 0x1p-20) + (sure ? 0 : 1.5 * step)};
      }
      // q is summed apart from the zero point
      magnitude[i] = std::abs(out[i].value) + out[i].error + 2 * std::abs(zero) * step + 2 * step + (zeros ? 254 : 0);
    }
    return out;
  }

  Bounded activated(const Bounded* gate, const Bounded& up) const {
    const Bounded& z = gate ? *gate : up;
    const double u = gate ? up.value : 1, du = gate ? up.error : 0, g = z.value, limit = moe_.swiglu_limit;
    const auto silu = [](double v) { return v / (1 + std::exp(-v)); };
    double h, slope = 1.2, size = std::abs(g);
    switch (moe_.activation) {
      case k_activation_silu:
        h = silu(g) * u;
        break;
      case k_activation_gelu:
        h = g / 2 * (1 + std::erf(g / std::sqrt(2.0))) * u;
        break;
      case k_activation_gelu_tanh:
        h = g / 2 * (1 + std::tanh(0.7978845608028654 * (g + 0.044715 * g * g * g))) * u;
        break;
      case k_activation_relu2:
        h = std::max(g, 0.0) * std::max(g, 0.0) * u;
        slope = 2 * (size + z.error);
        size *= size;
        break;
      case k_activation_swiglu_oai: {
        const double c = std::min(g, limit);
        h = c / (1 + std::exp(-moe_.swiglu_alpha * c)) * (std::clamp(u, -limit, limit) + 1);
        slope = 1.2;
        break;
      }
      case k_activation_swiglu_clamp:
        h = silu(std::min(g, limit)) * std::clamp(u, -limit, limit);
        break;
      case k_activation_swiglu_tanh: {
        const double cap = moe_.swiglu_alpha;
        h = cap * std::tanh(g / cap) / (1 + std::exp(-g)) * limit * std::tanh(u / limit);
        break;
      }
      default:
        h = std::min(silu(g), limit) * std::clamp(u, -limit, limit);
    }
    const double other = std::abs(u) + du + 1;  // swiglu_oai adds one
    return {h, slope * z.error * other + (size + slope * z.error) * du + 0x1p-18 * size * other + 1e-37};
  }

  // Adds weight * expert(x) to y.
  void add(const Expert& e, const std::vector<Bounded>& x, double weight, std::vector<Bounded>& y) const {
    std::vector<double> magnitude;
    const std::vector<Bounded> seen = quantized(x, moe_.w13.activation_format, magnitude);
    const std::vector<Bounded> up = product(e.up.back(), seen, magnitude);
    std::vector<Bounded> gate, h(up.size());
    if (moe_.gated) gate = product(e.up[0], seen, magnitude);
    for (size_t i = 0; i < h.size(); ++i) h[i] = activated(moe_.gated ? &gate[i] : nullptr, up[i]);
    const std::vector<Bounded> h_seen = quantized(h, moe_.w2.activation_format, magnitude);
    const std::vector<Bounded> out = product(e.down[0], h_seen, magnitude);
    for (size_t i = 0; i < y.size(); ++i) {
      y[i].value += weight * out[i].value;
      y[i].error += std::abs(weight) * (out[i].error + 0x1p-20 * std::abs(out[i].value));
    }
  }

 private:
  const qm_moe& moe_;
};

// Sets every attribute; one in 16 inputs has values that nothing promises.
void set_attributes(FuzzedDataProvider& data, qm_moe* moe, bool wild, bool exotic) {
  std::memset(moe, 0, sizeof *moe);
  const qm_operator& known = *qm_find_operator("QuantMoE");
  for (size_t i = 0; i < known.count; ++i) {
    const qm_attribute& a = known.attributes[i];
    qm_value value{a.name, a.kind, 0, 0, nullptr};
    std::string any;
    if (a.kind == 'i' && wild) value.integer = data.ConsumeIntegral<int64_t>();
    if (a.kind == 'f') value.number = data.ConsumeFloatingPoint<float>();
    if (a.kind == 's') {
      any = data.ConsumeRandomLengthString(8);
      value.text = wild ? any.c_str() : data.PickValueInArray(kNames);
    }
    set_attribute("QuantMoE", moe, value);
  }
  if (wild) {
    const std::string name = data.ConsumeRandomLengthString(600);
    set_attribute("QuantMoE", moe, {name.c_str(), 'i', 1, 0, nullptr});
  }
  moe->op_version = 1;
  moe->num_experts = data.ConsumeIntegralInRange(1, 6);
  moe->expert_offset = data.ConsumeIntegralInRange(0, moe->num_experts - 1);
  // Small, for executions a second; the portable kernel is slow under sanitizers.
  const int most = data.ConsumeIntegralInRange(0, 7) == 0 ? 200 : 40;
  moe->hidden_size = data.ConsumeIntegralInRange(1, most);
  moe->intermediate_size = data.ConsumeIntegralInRange(1, most);
  moe->activation = any_value(data, "activation");
  moe->gated = moe->activation >= k_activation_swiglu_oai || data.ConsumeBool();
  if (moe->activation == k_activation_swiglu_tanh)
    for (float* cap : {&moe->swiglu_alpha, &moe->swiglu_limit}) *cap = data.ConsumeFloatingPointInRange(0.01f, 50.0f);
  moe->apply_router_weight_on_input = data.ConsumeBool();
  for (qm_projection* p : {&moe->w13, &moe->w2}) {
    p->format = data.ConsumeIntegralInRange(0, k_format_int8);
    p->group_size = data.ConsumeIntegralInRange(0, 2) == 0 ? -1 : 32 * data.ConsumeIntegralInRange(1, 4);
    p->block_n = p->layout_version = 1;
    p->scale_type = data.ConsumeIntegralInRange(0, k_scale_type_bf16);
    p->bias = data.ConsumeBool();
    p->perm = data.ConsumeIntegralInRange(0, p == &moe->w13 ? 1 + moe->gated : 1);
    p->activation_format = data.ConsumeIntegralInRange(0, k_activation_format_int8_token_asym);
    p->layout = p->zero_points = p->pre_scale = 0;
  }
  if (exotic)  // every format, as the layouts would combine them or not
    for (qm_projection* p : {&moe->w13, &moe->w2}) {
      p->format = any_value(data, "format");
      p->scale_type = any_value(data, "scale_type");
      p->group_size = std::array{-1, 16, 32, 64}[data.ConsumeIntegralInRange(0, 3)];
      p->block_n = data.ConsumeIntegralInRange(0, 3) ? 1 : 16;
      p->activation_format = any_value(data, "activation_format");
      p->zero_points = data.ConsumeBool();
      if (p->format >= k_format_q4_k && data.ConsumeIntegralInRange(0, 3)) set_two_levels(p);
      p->pre_scale = data.ConsumeIntegralInRange(0, p == &moe->w13 ? 1 + moe->gated : 1);
    }
  if (wild)  // any value in any place
    for (int n = data.ConsumeIntegralInRange(1, 3); n > 0; --n) {
      const qm_attribute& a = known.attributes[data.ConsumeIntegralInRange<size_t>(0, known.count - 1)];
      if (a.kind == 'i') set_attribute("QuantMoE", moe, {a.name, 'i', data.ConsumeIntegral<int32_t>(), 0, nullptr});
      if (a.kind == 's') set_attribute("QuantMoE", moe, {a.name, 's', 0, 0, data.PickValueInArray(kNames)});
    }
}

void set_perm(int32_t* perm, const std::vector<int32_t>& order) { std::copy(order.begin(), order.end(), perm); }

}  // namespace

// One long function: what the bytes of an input mean is the order in which it asks for them.
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* bytes, size_t size) {
  FuzzedDataProvider data(bytes, size);
  char err[QM_ERROR_SIZE];
  qm_moe moe;
  const bool wild = data.ConsumeIntegralInRange(0, 15) == 0;
  const bool exotic = data.ConsumeIntegralInRange(0, 2) == 0;
  set_attributes(data, &moe, wild, exotic);
  const int64_t experts =
      data.ConsumeIntegralInRange(1, moe.num_experts > 0 && moe.num_experts < 7 ? moe.num_experts : 1);
  qm_row rows[2]{};
  (void)qm_row_of(&moe.w13, moe.intermediate_size, moe.hidden_size, halves(moe), &rows[0], err);
  (void)qm_row_of(&moe.w2, moe.hidden_size, moe.intermediate_size, 1, &rows[1], err);
  const auto row13 = static_cast<size_t>(rows[0].bytes), row2 = static_cast<size_t>(rows[1].bytes);
  qm_shape packed_shapes[] = {{2, {experts, rows[0].bytes / 4}}, {2, {experts, rows[1].bytes / 4}}};
  if (wild && data.ConsumeBool())
    for (qm_shape& shape : packed_shapes) shape.sizes[data.ConsumeBool()] = data.ConsumeIntegral<int64_t>();
  unsetenv("QUANTMOE_FORCE_KERNEL");
  if (qm_validate("QuantMoE", &moe, packed_shapes, err)) {
    CHECK(std::memchr(err, 0, sizeof err) && err[0], "a refusal without a reason");
    CHECK(wild || exotic || moe.expert_offset + experts > moe.num_experts, "refused: %s", err);
    return 0;
  }
  const size_t most = Guarded::kBytes / 8;
  if (moe.hidden_size > 1024 || moe.intermediate_size > 1024 || row13 * experts > most || row2 * experts > most)
    return 0;

  static Guarded hidden_place, ids_place, weights_place, w13_place, w2_place, output_place, workspace_place;
  const bool at_end = data.ConsumeBool(), packed = !exotic && !wild && data.ConsumeBool();
  const auto type = static_cast<qm_type>(data.ConsumeIntegralInRange(0, 2));
  const int id_bytes = data.ConsumeBool() ? 8 : 4;
  const int64_t tokens = data.ConsumeIntegralInRange(0, data.ConsumeIntegralInRange(0, 15) == 0 ? 120 : 6);
  const int64_t top_k = data.ConsumeIntegralInRange(1, 4);
  Rng rng(data.ConsumeIntegral<uint32_t>());
  const bool tame = packed || data.ConsumeBool();               // activations and weights that are ordinary numbers
  const bool all_ids = data.ConsumeIntegralInRange(0, 7) == 0;  // also ids that are refused
  const int64_t pairs = tokens * top_k, element = type == QM_F32 ? 4 : 2, elements = tokens * moe.hidden_size;

  void* hidden = hidden_place.place(elements * element, at_end);
  void* ids = ids_place.place(pairs * id_bytes, at_end);
  float* weights = static_cast<float*>(weights_place.place(pairs * 4, at_end));
  uint8_t* w13 = static_cast<uint8_t*>(w13_place.place(experts * row13, at_end));
  uint8_t* w2 = static_cast<uint8_t*>(w2_place.place(experts * row2, at_end));
  void* output = output_place.place(elements * element, at_end);
  if (tame) {
    fill(rng, type, -2, 2, hidden, elements);
    fill(rng, QM_F32, -1, 1, weights, pairs);
  } else {
    random_bytes(rng, hidden, elements * element);
    random_bytes(rng, weights, pairs * 4);
  }
  bool refused = false;
  std::vector<int64_t> expert_of(pairs);
  for (int64_t i = 0; i < pairs; ++i) {
    const int64_t id = static_cast<int64_t>(rng() % (moe.num_experts + 1)) - 1 - (all_ids && rng() % 50 == 0 ? 2 : 0);
    refused |= id < -1;
    expert_of[i] = id;
    if (id_bytes == 8)
      static_cast<int64_t*>(ids)[i] = id;
    else
      static_cast<int32_t*>(ids)[i] = static_cast<int32_t>(id);
  }

  Reference reference(moe);
  if (packed) {
    std::memset(w13, 0, experts * row13);
    std::memset(w2, 0, experts * row2);
    const int64_t perm13 = align_up(4LL * moe.hidden_size, kRowAlignment),
                  perm2 = align_up(4LL * moe.intermediate_size, kRowAlignment);
    const auto order = [&](int64_t k) {
      std::vector<int32_t> out(k);
      for (int64_t i = 0; i < k; ++i) out[i] = static_cast<int32_t>(i);
      std::shuffle(out.begin(), out.end(), rng);
      return out;
    };
    for (int64_t e = 0; e < experts; ++e) {
      Reference::Expert expert;
      for (int half = 0; half < halves(moe); ++half) {
        SourceMatrix m(moe.w13, moe.intermediate_size, moe.hidden_size, rng);
        m.pack(moe.w13, w13 + e * row13 + half * w13_matrix(moe).stride, halves(moe));
        if (moe.w13.perm) m.perm = half && moe.w13.perm == 1 ? expert.up[0].perm : order(moe.hidden_size);
        if (half < moe.w13.perm)
          set_perm(reinterpret_cast<int32_t*>(w13 + (e + 1) * row13 - (moe.w13.perm - half) * perm13), m.perm);
        expert.up.push_back(std::move(m));
      }
      expert.down.emplace_back(moe.w2, moe.hidden_size, moe.intermediate_size, rng);
      expert.down[0].pack(moe.w2, w2 + e * row2, 1);
      if (moe.w2.perm) set_perm(reinterpret_cast<int32_t*>(w2 + (e + 1) * row2 - perm2), order(moe.intermediate_size));
      reference.experts.push_back(std::move(expert));
    }
  } else {
    random_bytes(rng, w13, experts * row13);
    random_bytes(rng, w2, experts * row2);
  }

  const qm_shape routes{2, {tokens, top_k}};
  const qm_tensor inputs[] = {{hidden, type, {2, {tokens, moe.hidden_size}}},
                              {ids, id_bytes == 8 ? QM_INT64 : QM_INT32, routes},
                              {weights, QM_F32, routes},
                              {w13, 0, packed_shapes[0]},
                              {w2, 0, packed_shapes[1]}};
  const qm_tensor made{output, type, {2, {tokens, moe.hidden_size}}};
  qm_call call{inputs, &made, nullptr, 1, nullptr, nullptr, nullptr, nullptr};
  const Outcome first = every_kernel(data, "QuantMoE", &moe, call, output, elements, workspace_place, at_end, [&] {
    const int status = qm_run("QuantMoE", &moe, &call, err);
    CHECK(packed ? status == (refused ? QM_INVALID : QM_OK) : !refused || status, "%s", status ? err : "no refusal");
    return status;
  });
  if (!packed || first.status ||
      (moe.activation >= k_activation_swiglu_oai &&
       !(moe.swiglu_limit >= 0 && moe.swiglu_limit < 1e6 && std::abs(moe.swiglu_alpha) < 1e3)))
    return 0;

  for (int64_t t = 0; t < std::min<int64_t>(tokens, 2); ++t) {
    std::vector<Bounded> want(moe.hidden_size);
    for (int64_t slot = 0; slot < top_k; ++slot) {
      const int64_t local = expert_of[t * top_k + slot] - moe.expert_offset;
      if (expert_of[t * top_k + slot] < 0 || local < 0 || local >= experts) continue;
      const float weight = weights[t * top_k + slot];
      std::vector<Bounded> x(moe.hidden_size);
      for (int64_t i = 0; i < moe.hidden_size; ++i) {
        const float value = static_cast<float>(value_at(type, hidden, t * moe.hidden_size + i));
        x[i].value = moe.apply_router_weight_on_input ? value * weight : value;
      }
      reference.add(reference.experts[local], x, moe.apply_router_weight_on_input ? 1.0 : weight, want);
    }
    for (int64_t i = 0; i < moe.hidden_size; ++i) {
      if (std::abs(want[i].value) + want[i].error > (type == QM_F16 ? 6e4 : 1e30)) continue;
      const double got = value_at(type, output, t * moe.hidden_size + i);
      const double rounding = type == QM_F32 ? 0x1p-23 : type == QM_F16 ? 0x1p-11 : 0x1p-8;
      const double bound = want[i].error * (1 + rounding) + std::abs(want[i].value) * rounding + 0x1p-24;
      CHECK(std::abs(got - want[i].value) <= bound, "token %lld feature %lld is %g, float64 %g +- %g (%s)",
            (long long)t, (long long)i, got, want[i].value, bound, first.kernel.c_str());
    }
  }
  return 0;
}
