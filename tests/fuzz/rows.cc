// libFuzzer target: rows of weights, packed and back (qm_pack, qm_unpack), and qm_check_marlin_layer, from any bytes.
// The input chooses attributes, mostly valid ones, and a
// seed. Checked:
//   - nothing is read or written outside the buffers: each ends, or begins, at an inaccessible page
//   - a refusal has a reason, and packing refuses what the size of a row does
//   - unpack(pack(x)) is x, also as qm_row_of and the validation of a node see the same attributes
//   - any bytes unpack, or are refused for the order of their columns
#include <array>
#include <memory>
#include <numeric>
#include <vector>

#include "core/numbers.h"
#include "fuzz.h"

using namespace quantmoe;

namespace {

void check_reason(const char* err) {
  CHECK(std::memchr(err, 0, QM_ERROR_SIZE) && err[0], "a refusal without a reason");
}

// The arrays of a matrix [n, k], each between inaccessible pages, with numbers that a checkpoint may have.
class Buffers {
 public:
  Buffers(FuzzedDataProvider& data, Rng& rng, const qm_projection& w, int64_t n, int64_t k, bool at_end) {
    static std::array<std::array<Guarded, 6>, 6> places;
    static size_t next = 0;
    std::array<Guarded, 6>& own = places[next++ % places.size()];
    const int64_t rows = ceil_div(n, w.block_n), groups = w.group_size == -1 ? 1 : ceil_div(k, w.group_size);
    const int bits = code_bits(w.format);
    sizes_ = {
        n * k * (bits == 16 ? 2 : 1), rows * groups * scale_size(w.scale_type), rows * groups, n * 4, k * 4, k * 4};
    for (size_t i = 0; i < sizes_.size(); ++i) {
      at_[i] = static_cast<uint8_t*>(own[i].place(static_cast<size_t>(sizes_[i]), at_end));
      random_bytes(rng, at_[i], static_cast<size_t>(sizes_[i]));
    }
    if (bits < 8)
      for (const size_t i : {0, 2})  // zero points are codes, too
        for (int64_t j = 0; j < sizes_[i]; ++j) at_[i][j] &= static_cast<uint8_t>((1 << bits) - 1);
    if (bits == 16 && w.scale_type == k_scale_type_f32)
      std::fill_n(reinterpret_cast<float*>(at_[1]), rows * groups, 1.0f);
    else if (w.scale_type <= k_scale_type_bf16)
      fill(rng, w.scale_type, 0.01, 2, at_[1], rows * groups);
    else if (w.scale_type == k_scale_type_e8m0 || w.scale_type == k_scale_type_e4m3)  // no NaN, now and then a sign
      for (int64_t j = 0; j < sizes_[1]; ++j)
        at_[1][j] = static_cast<uint8_t>(at_[1][j] % 100 + 20 + (sign_at(data, j) ? 128 : 0));
    fill(rng, QM_F32, -1, 1, at_[3], n);
    fill(rng, QM_F32, 0.5, 2, at_[4], k);
    int32_t* const order = reinterpret_cast<int32_t*>(at_[5]);
    std::iota(order, order + k, 0);
    std::shuffle(order, order + k, rng);
    if (data.ConsumeIntegralInRange(0, 15) == 0) order[rng() % k] = data.ConsumeIntegral<int32_t>();
  }
  qm_matrix matrix(const qm_projection& w) const {
    const auto floats = [&](size_t i) { return reinterpret_cast<float*>(at_[i]); };
    return {.codes = at_[0],
            .scales = at_[1],
            .zero_points = w.zero_points ? at_[2] : nullptr,
            .bias = w.bias ? floats(3) : nullptr,
            .pre_scale = w.pre_scale ? floats(4) : nullptr,
            .perm = w.perm ? reinterpret_cast<int32_t*>(at_[5]) : nullptr,
            .global_scale = 1.0f,
            .input_scale = 0.0f};
  }
  // What the attributes name is the same bytes. shared: of gate and up, which may have one order and one pre-scale.
  void check_equal(const Buffers& other, const qm_projection& w, bool shared) const {
    const bool named[] = {true, true, w.zero_points != 0, w.bias != 0, w.pre_scale && !shared, w.perm && !shared};
    static const char* const names[] = {"codes", "scales", "zero points", "biases", "pre-scales", "order"};
    for (size_t i = 0; i < sizes_.size(); ++i)
      CHECK(!named[i] || !std::memcmp(at_[i], other.at_[i], static_cast<size_t>(sizes_[i])), "%s do not come back",
            names[i]);
  }

 private:
  static bool sign_at(FuzzedDataProvider& data, int64_t j) { return j == 0 && data.ConsumeIntegralInRange(0, 63) == 0; }

  std::array<int64_t, 6> sizes_;
  std::array<uint8_t*, 6> at_;
};

qm_projection projection(FuzzedDataProvider& data) {
  qm_projection p{};
  p.layout_version = data.ConsumeIntegralInRange(0, 15) ? 1 : data.ConsumeIntegral<int32_t>();
  p.layout = any_value(data, "layout");
  if (p.layout == k_layout_marlin && data.ConsumeBool()) p.layout_version = 2;
  p.format = any_value(data, "format");
  p.scale_type = any_value(data, "scale_type");
  p.group_size = std::array{-1, 16, 32, 64, 128}[data.ConsumeIntegralInRange(0, 4)];
  p.block_n = data.ConsumeIntegralInRange(0, 7) ? 1 : 16;
  p.activation_format = data.ConsumeBool() ? 0 : any_value(data, "activation_format");
  p.zero_points = data.ConsumeBool();
  if (p.format >= k_format_q4_k && data.ConsumeIntegralInRange(0, 3)) set_two_levels(&p);
  p.bias = data.ConsumeBool();
  p.perm = data.ConsumeIntegralInRange(0, 2);
  p.pre_scale = data.ConsumeIntegralInRange(0, 2);
  return p;
}

void linear(FuzzedDataProvider& data) {
  char err[QM_ERROR_SIZE] = {};
  qm_linear node{};
  node.op_version = 1;
  const int most = data.ConsumeIntegralInRange(0, 7) == 0 ? 300 : 80;
  node.in_features = data.ConsumeIntegralInRange(1, most);
  node.out_features = data.ConsumeIntegralInRange(1, most);
  node.w = projection(data);
  if (node.w.perm > 1) node.w.perm = 1;
  if (node.w.pre_scale > 1) node.w.pre_scale = 1;
  const bool at_end = data.ConsumeBool();
  Rng rng(data.ConsumeIntegral<uint32_t>());
  static Guarded row_place;
  qm_row row{};
  if (qm_row_of(&node.w, node.out_features, node.in_features, 1, &row, err)) return check_reason(err);
  if (row.bytes > static_cast<int64_t>(Guarded::kBytes)) return;
  const Buffers source(data, rng, node.w, node.out_features, node.in_features, at_end);
  const Buffers target(data, rng, node.w, node.out_features, node.in_features, at_end);
  void* const packed = row_place.place(static_cast<size_t>(row.bytes), at_end);
  const qm_matrix from = source.matrix(node.w);
  qm_matrix to = target.matrix(node.w);
  const int lanes = data.ConsumeIntegralInRange(1, 3);
  const auto unpack = [&] {
    return qm_unpack("QuantLinear", &node, &packed, &to, lanes, one_after_another, nullptr, err);
  };
  if (data.ConsumeBool()) {
    random_bytes(rng, packed, static_cast<size_t>(row.bytes));
    if (unpack()) check_reason(err);
    return;
  }
  if (qm_pack("QuantLinear", &node, &from, &packed, lanes, one_after_another, nullptr, err)) return check_reason(err);
  CHECK(unpack() == QM_OK, "%s", err);
  source.check_equal(target, node.w, false);
}

void expert(FuzzedDataProvider& data) {
  char err[QM_ERROR_SIZE] = {};
  qm_moe node{};
  node.op_version = node.num_experts = 1;
  const int most = data.ConsumeIntegralInRange(0, 7) == 0 ? 300 : 80;
  node.hidden_size = data.ConsumeIntegralInRange(1, most);
  node.intermediate_size = data.ConsumeIntegralInRange(1, most);
  node.gated = data.ConsumeBool();
  node.w13 = projection(data);
  node.w2 = data.ConsumeBool() ? node.w13 : projection(data);
  for (qm_projection* p : {&node.w13, &node.w2}) {
    const int32_t limit = p == &node.w13 ? 1 + node.gated : 1;
    p->perm = std::min(p->perm, limit);
    p->pre_scale = std::min(p->pre_scale, limit);
  }
  if (qm_check_marlin_layer(&node.w13, &node.w2, err)) check_reason(err);
  const bool at_end = data.ConsumeBool();
  Rng rng(data.ConsumeIntegral<uint32_t>());
  static Guarded w13_place, w2_place;
  qm_row row13{}, row2{};
  const int halves = 1 + node.gated;
  if (qm_row_of(&node.w13, node.intermediate_size, node.hidden_size, halves, &row13, err) ||
      qm_row_of(&node.w2, node.hidden_size, node.intermediate_size, 1, &row2, err))
    return check_reason(err);
  if (std::max(row13.bytes, row2.bytes) > static_cast<int64_t>(Guarded::kBytes)) return;
  const auto buffers = [&](const qm_projection& w, int64_t n, int64_t k) {
    return std::make_unique<Buffers>(data, rng, w, n, k, at_end);
  };
  const int64_t n = node.intermediate_size, k = node.hidden_size;
  const auto gate = buffers(node.w13, n, k), up = buffers(node.w13, n, k), down = buffers(node.w2, k, n);
  const auto gate2 = buffers(node.w13, n, k), up2 = buffers(node.w13, n, k), down2 = buffers(node.w2, k, n);
  qm_matrix from[] = {gate->matrix(node.w13), up->matrix(node.w13), down->matrix(node.w2)};
  qm_matrix to[] = {gate2->matrix(node.w13), up2->matrix(node.w13), down2->matrix(node.w2)};
  void* const w13 = w13_place.place(static_cast<size_t>(row13.bytes), at_end);
  void* const w2 = w2_place.place(static_cast<size_t>(row2.bytes), at_end);
  void* const rows[] = {w13, w2};
  const int lanes = data.ConsumeIntegralInRange(1, 3), first = node.gated ? 0 : 1;
  const auto unpack = [&] {
    return qm_unpack("QuantMoE", &node, rows, to + first, lanes, one_after_another, nullptr, err);
  };
  if (data.ConsumeIntegralInRange(0, 2) == 0) {
    random_bytes(rng, w13, static_cast<size_t>(row13.bytes));
    random_bytes(rng, w2, static_cast<size_t>(row2.bytes));
    if (unpack()) check_reason(err);
    return;
  }
  if (qm_pack("QuantMoE", &node, from + first, rows, lanes, one_after_another, nullptr, err)) return check_reason(err);
  CHECK(unpack() == QM_OK, "%s", err);
  down->check_equal(*down2, node.w2, false);
  up->check_equal(*up2, node.w13, node.gated);  // gate and up may share an order and pre-scales: the first one's
  if (node.gated) gate->check_equal(*gate2, node.w13, false);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* bytes, size_t size) {
  FuzzedDataProvider data(bytes, size);
  (data.ConsumeBool() ? linear : expert)(data);
  return 0;
}
