// QuantLinear on the CPU: the last step of a layer with one expert, whose h are the rows of x.
#include "cpu/moe/down.h"
#include "cpu/operators.h"

namespace quantmoe {
namespace {

struct LinearRun {
  const qm_linear& linear;
  const LinearCall& call;
  LayerCall layer;
  Hidden x{};  // [rows, K] in the order of the packed columns
  Down down;
  RowScratch scratch;

  LinearRun(const qm_linear& linear, const LinearCall& call, const CpuKernel& kernel)
      : LinearRun(linear, call, kernel, panel_matrix(linear.w, linear.out_features, linear.in_features)) {}
  LinearRun(const qm_linear& linear, const LinearCall& call, const CpuKernel& kernel, const PanelMatrix& panel)
      : linear(linear),
        call(call),
        layer(kernel, call, call.rows, 1, 1),
        down(layer, linear.w, panel, row_parts(linear.w, panel.panels * panel.stride, panel.k), call.w, nullptr,
             call.y) {
    Arena tokens{nullptr};
    lay_out_tokens(tokens);
    layer.divide(tokens.used);
    down.plan();
    const int64_t rows = layer.tokens;
    const int64_t row_tasks = rows < kSerialRows ? 1 : std::max(ceil_div(rows, kRowsPerTask), layer.tile_count(rows));
    layer.lanes = static_cast<int>(std::min(layer.most_lanes, std::max(row_tasks, down.most_tasks())));
    scratch.rows = layer.tile_rows;
    scratch.fit(panel);
    scratch_lanes = static_cast<int>(std::min<int64_t>(layer.lanes, row_tasks));
  }
  int scratch_lanes;

  void lay_out_tokens(Arena& arena) {
    layer.lay_out_tokens(arena);
    x.lay_out(arena, layer.tokens, reads_in_place() ? 0 : linear.in_features);
    down.lay_out_tokens(arena);
  }
  size_t lay_out(void* workspace) {
    Arena arena{static_cast<uint8_t*>(workspace)};
    lay_out_tokens(arena);
    layer.lay_out(arena);
    down.lay_out(arena);
    scratch.lay_out(arena, scratch_lanes);
    return arena.used;
  }
  // Whether the rows of x are h as they are.
  bool reads_in_place() const { return layer.type == QM_F32 && !linear.w.perm; }
  const int32_t* column_order() const {
    return linear.w.perm ? reinterpret_cast<const int32_t*>(down.w2.row(0) + down.w2.parts.perms) : nullptr;
  }
  // Rows of the slice to f32, as gate_up leaves h.
  void load(int64_t slice) {
    layer.take_slice(slice);
    std::fill(x.bad, x.bad + layer.tokens, uint8_t{0});
    layer.routes.begin[0] = 0;
    layer.routes.begin[1] = layer.tokens;
    const int64_t k = linear.in_features;
    const int32_t* const perm = column_order();
    const bool in_place = reads_in_place();
    if (in_place) x.h = static_cast<float*>(const_cast<void*>(call.x)) + layer.first_token * k;
    layer.for_rows(layer.tokens, [&](int lane, int64_t first, int64_t count) {
      float* const stored = scratch.at(lane, 0).x;
      for (int64_t r = first; r < first + count; ++r) {
        const auto* source = static_cast<const uint8_t*>(call.x) + (layer.first_token + r) * k * layer.element();
        float* const row = x.h + r * k;
        layer.routes.order[r] = {static_cast<int32_t>(r), 0};
        if (in_place) continue;
        layer.kernel.to_float(layer.type, source, k, perm ? stored : row);
        for (int64_t i = 0; perm && i < k; ++i) row[i] = stored[perm[i]];
      }
    });
  }
  void pack() {
    const int64_t tiles = layer.tile_count(layer.tokens);
    if (layer.tokens < kSerialRows) return down.pack(0, 0, 0, tiles, x, scratch, layer.bad);
    layer.for_each(tiles, [&](int lane, int64_t t) { down.pack(lane, 0, t, t + 1, x, scratch, layer.bad); });
  }
  void find_largest_x() {
    find_largest(layer, down.w2, [&](int64_t position) { return x.h + position * linear.in_features; });
  }
  int run(char* err) {
    clear_largest(layer, down.w2);
    if (const int32_t* perm = column_order(); perm && !down.w2.check_perm(perm, 0))
      return fail(err, QM_INVALID, "w's act-order has a column outside 0 to %d", linear.in_features - 1);
    const bool sliced = layer.slices > 1;
    if (sliced && finds_scales(layer, down.w2))
      for (int64_t slice = 0; slice < layer.slices; ++slice) {
        load(slice);
        find_largest_x();
      }
    for (int64_t slice = 0; slice < layer.slices; ++slice) {
      load(slice);
      if (!sliced) find_largest_x();
      pack();
      down.multiply();
    }
    return QM_OK;
  }
};

size_t workspace(const qm_linear& linear, const qm_call& call) {
  const LinearCall made(linear, call);
  char err[QM_ERROR_SIZE];
  const CpuKernel* kernel = made.rows ? select_kernel(err) : nullptr;
  return kernel ? LinearRun(linear, made, *kernel).lay_out(nullptr) : 0;
}

int run(const qm_linear& linear, const qm_call& call, char* err) {
  const LinearCall made(linear, call);
  if (made.rows == 0) return QM_OK;
  const CpuKernel* kernel = select_kernel(err);
  if (!kernel) return QM_UNSUPPORTED;
  LinearRun layer(linear, made, *kernel);
  layer.lay_out(made.workspace);
  return layer.run(err);
}

}  // namespace

const CpuOperator cpu_linear =
    with_packed<qm_linear, check_packed>(kCpuOperator<qm_linear, check_linear, workspace, run>);

}  // namespace quantmoe
