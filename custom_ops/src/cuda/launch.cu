// Plan to kernel launches: a loop over its steps.
#include <algorithm>
#include <cstdio>
#include <exception>
#include <vector>

#include "cuda/expert_cache.cuh"
#include "cuda/launcher.h"
#include "cuda/layout.h"
#include "cuda/products.h"
#include "cuda/quantize.cuh"
#include "cuda/round.cuh"
#include "cuda/route.cuh"
#include "cuda/select_experts.cuh"
#include "cuda/tensor_map.h"

namespace quantmoe {
namespace {

// A projection's weights.
struct WeightMatrix {
  const qm_projection& w;
  MarlinRow row;
  Weights weights;
};
WeightMatrix matrix_of(const qm_moe& m, int projection, const void* rows, const uint8_t* const* where = nullptr) {
  WeightMatrix out{projection == 13 ? m.w13 : m.w2, {}, {}};
  MarlinRow& row = out.row;
  marlin_row_of(m, projection, &row);
  Weights& weights = out.weights;
  weights.rows = {static_cast<const uint8_t*>(rows), row.bytes, where};
  weights.scales_at = static_cast<uint32_t>(row.scales_at);
  weights.zeros_at = out.w.zero_points ? static_cast<uint32_t>(row.zeros_at) : 0;
  weights.globals_at = static_cast<uint32_t>(row.globals_at);
  weights.bias_at = out.w.bias ? static_cast<uint32_t>(row.bias_at) : 0;
  weights.input_at = has_input_scales(out.w) ? static_cast<uint32_t>(row.input_at) : 0;
  weights.panels = row.panels;
  weights.units = row.units;
  weights.blocks = row.blocks;
  weights.block_shift = row.block_shift;
  weights.scale_type = out.w.scale_type;
  weights.scale_bytes = row.scale_bytes;
  weights.zero_bytes = 16 * row.per_block;
  weights.two_groups = row.per_block == 2;
  return out;
}

// A call of a layer, or of a linear, whose matrix is both.
struct Call {
  const qm_cuda_plan& plan;
  WeightMatrix first, second;
  RoutedPairs routing;
  Activation activation;
  const void* x;
  void* y;
  uint8_t* workspace;
  CacheParams cache;

  const void* input(const qm_cuda_step& s) const { return s.in == QM_CUDA_CALLERS ? x : workspace + s.in; }
  void* output(const qm_cuda_step& s) const { return s.out == QM_CUDA_CALLERS ? y : workspace + s.out; }
  template <typename T>
  T* at(uint64_t offset) const {
    return reinterpret_cast<T*>(workspace + offset);
  }
  bool on_wgmma() const { return plan.path == QM_CUDA_WGMMA || plan.path == QM_CUDA_FP8; }
  // The row of x of pair p is p divided by this.
  int divisor(const qm_cuda_step& s) const { return s.in_rows == routing.tokens ? routing.top_k : 1; }
};

template <typename Params>
void run(Launcher& launcher, void (*kernel)(Params), const Params& params, const qm_cuda_step& s) {
  launcher.run(kernel, params, dim3(s.grid, s.grid_y), dim3(s.block, s.block_y), s.shared_bytes, s.dependent,
               s.cluster);
}

// The kernel of a layer's product; null: none is compiled that is what the plan says.
template <typename T>
GemmKernel kernel_of(Product product, const qm_projection& w, int path, const qm_cuda_step& s) {
  const bool down = product == Product::kDown;
  if (kind_of(w) == WeightKind::kFloat) return s.packed ? nullptr : float_kernel<T>(product, path, s);
  switch (path) {
    case QM_CUDA_DECODE:
    case QM_CUDA_STREAM:
      return s.packed ? packed_kernel<T>(product, path, w, s)
             : down   ? down_kernel<T>(path, w, s)
                      : gate_up_kernel<T>(path, w, s);
    case QM_CUDA_WGMMA:
      return s.packed ? nullptr : wgmma_kernel<T>(product, w, s);
    case QM_CUDA_FP8:
      return s.packed ? nullptr : fp8_kernel<T>(product, w, s);
    default:
      return nullptr;
  }
}
// Of a linear, but for QM_CUDA_DENSE.
template <typename T>
GemmKernel linear_gemm(const qm_projection& w, int path, const qm_cuda_step& s) {
  if (kind_of(w) == WeightKind::kFloat)
    return s.packed ? nullptr : float_kernel<T>(path == QM_CUDA_DECODE ? Product::kLinear : Product::kDown, path, s);
  if (path == QM_CUDA_DECODE && !s.packed)
    if (const GemmKernel kernel = linear_decode_kernel<T>(w, s)) return kernel;
  return path == QM_CUDA_DECODE || path == QM_CUDA_STREAM ? kernel_of<T>(Product::kDown, w, path, s) : nullptr;
}
template <typename T>
bool is_compiled(const qm_projection& w, int path, const qm_cuda_step& s) {
  const bool product = s.kind == QM_CUDA_GATE_UP || s.kind == QM_CUDA_DOWN || s.kind == QM_CUDA_LINEAR;
  if (product && s.block != threads_of(path, s.panels)) return false;
  switch (s.kind) {
    case QM_CUDA_GATE_UP:
      return kernel_of<T>(Product::kGateUp, w, path, s);
    case QM_CUDA_DOWN:
      return kernel_of<T>(Product::kDown, w, path, s);
    case QM_CUDA_LINEAR:
      return path == QM_CUDA_DENSE ? dense_kernel<T>(w, s) != nullptr : linear_gemm<T>(w, path, s) != nullptr;
    default:
      return true;
  }
}
// Of a layer w13 and w2 are its projections, of a linear the same.
template <typename T>
int check_plan(const qm_projection& w13, const qm_projection& w2, const qm_cuda_plan& plan, char* err) {
  for (int i = 0; i < plan.step_count; ++i) {
    const qm_cuda_step& s = plan.steps[i];
    if (is_compiled<T>(s.kind == QM_CUDA_GATE_UP ? w13 : w2, plan.path, s)) continue;
    std::snprintf(err, QM_ERROR_SIZE,
                  "the plan names a kernel that is not compiled: %s of path %d with %d panels, %d n_tiles, %d stages, "
                  "packed %d",
                  s.kind == QM_CUDA_GATE_UP ? "w13"
                  : s.kind == QM_CUDA_DOWN  ? "w2"
                                            : "w",
                  plan.path, s.panels, s.n_tiles, s.stages, s.packed);
    return QM_INVALID;
  }
  return QM_OK;
}

// Whether the orders that launches gather by have each of `features` once.
int check_orders(const void* rows, const MarlinRow& row, int64_t experts, int features, const char* name,
                 cudaStream_t stream, char* err) try {
  std::vector<int> order(features);
  for (int64_t i = 0; i < experts * row.orders; ++i) {
    const int64_t expert = i / row.orders;
    const auto* from =
        static_cast<const uint8_t*>(rows) + expert * row.bytes + row.perm_at + i % row.orders * row.order_bytes;
    cudaError_t e = cudaMemcpyAsync(order.data(), from, 4ull * features, cudaMemcpyDefault, stream);
    if (e == cudaSuccess) e = cudaStreamSynchronize(stream);
    if (int status = report(e, err)) return status;
    std::vector<bool> seen(features);
    for (int feature : order) {
      const bool there = feature >= 0 && feature < features;
      if (there && !seen[feature]) {
        seen[feature] = true;
        continue;
      }
      std::snprintf(err, QM_ERROR_SIZE,
                    "%s of expert %lld has an act-order with feature %d %s, expected each of %d once", name,
                    static_cast<long long>(expert), feature, there ? "twice" : "in it", features);
      return QM_INVALID;
    }
  }
  return QM_OK;
} catch (const std::exception& error) {
  std::snprintf(err, QM_ERROR_SIZE, "%s: %s", name, error.what());
  return QM_INVALID;
}

// Activations in the values of the matrix's activation format, or packed as codes.
template <typename T>
void launch_round(Launcher& launcher, const Call& c, const WeightMatrix& matrix, const qm_cuda_step& s) {
  const bool hidden = s.kind == QM_CUDA_ROUND_HIDDEN, wgmma = c.plan.path == QM_CUDA_WGMMA;
  RoundParams round{};
  round.routing = c.routing;
  round.format = matrix.w.activation_format;
  // Rows of foreign experts were not written in h.
  round.by_expert = hidden || !c.routing.topk_ids || rounds_by_expert(matrix.w) || s.weighted;
  round.weight_here = s.weighted;
  round.rows = matrix.weights.rows;
  round.input_at = matrix.weights.input_at;
  round.pre_at = matrix.w.pre_scale ? static_cast<uint32_t>(matrix.row.pre_at) : 0;
  round.with_input_scale = with_facts(kind_of(matrix.w), [](auto f) { return f.kRoundsScaled; });
  round.packed = s.packed ? packed_unit_bytes(kind_of(matrix.w)) : 0;
  round.x = c.input(s);
  round.out = c.output(s);
  round.x_divisor = !hidden && round.by_expert ? c.routing.top_k : 1;
  round.x_columns = s.in_columns;
  round.out_rows = s.out_rows;
  round.columns = s.packed ? matrix.row.units * kUnit : s.out_columns;
  round.features = hidden ? matrix.row.columns : s.in_columns;
  round.x_stored = wgmma && hidden;
  round.out_stored = wgmma && (hidden || !matrix.w.perm);
  if (round.x_stored) {
    round.sorted_pairs = c.at<SortedPair>(c.plan.sorted_pairs);
    round.tiles = c.at<Tile>(c.plan.tiles);
    round.max_tiles = c.plan.max_tiles;
  }
  run(launcher, moe_round<T>, round, s);
}

// x in act-order, a row a pair.
void launch_gather(Launcher& launcher, const Call& c, const WeightMatrix& matrix, const qm_cuda_step& s) {
  GatherParams gather{};
  gather.routing = c.routing;
  gather.x_divisor = c.divisor(s);
  gather.rows = matrix.weights.rows;
  gather.perm_at = static_cast<uint32_t>(matrix.row.perm_at);
  gather.x = static_cast<const uint16_t*>(c.input(s));
  gather.out = static_cast<uint16_t*>(c.output(s));
  gather.columns = s.in_columns;
  gather.out_columns = s.out_columns;
  gather.half = s.out_columns / matrix.row.orders;
  gather.order_words = static_cast<int>(matrix.row.order_bytes / 4);
  run(launcher, moe_gather, gather, s);
}

// Makes the list of tiles, another for down if its tiles differ, and a copy of x as wgmma reads it if x is not one.
void launch_route(Launcher& launcher, const Call& c, const qm_cuda_step& s) {
  const qm_cuda_plan& plan = c.plan;
  const bool fp8 = plan.path == QM_CUDA_FP8;
  RouteParams route{};
  route.routing = c.routing;
  route.cluster = s.cluster;
  route.by_size = c.on_wgmma();
  route.ordered = s.ordered;
  for (const qm_cuda_step* product = plan.steps; product < plan.steps + plan.step_count; ++product) {
    const bool down = product->kind == QM_CUDA_DOWN;
    // wgmma's M, which fp8 has tokens as, is 64.
    if (product->kind == QM_CUDA_GATE_UP || (down && plan.down_tiles != plan.tiles))
      route.lists[route.list_count++] = {c.at<Tile>(down ? plan.down_tiles : plan.tiles),
                                         down ? plan.down_max_tiles : plan.max_tiles, 8 * product->n_tiles,
                                         fp8 ? 64 : 8};
  }
  if (s.out != s.in) {
    route.prepare.x = static_cast<const uint16_t*>(c.input(s));
    route.prepare.out = static_cast<uint16_t*>(c.output(s));
    route.prepare.rows = s.in_rows;
    route.prepare.columns = s.in_columns;
    route.prepare.out_columns = s.out_columns;
  }
  route.sorted_pairs = c.at<SortedPair>(plan.sorted_pairs);
  route.align = fp8 ? 8 : 1;
  if (fp8) route.positions = c.at<int>(plan.positions);
  run(launcher, moe_route, route, s);
}

// x of a product as e4m3 codes [groups, rows, 128], then scales; h: in the order of sorted pairs already.
const float* scales_of(const void* codes, const WeightMatrix& matrix, int rows) {
  const int64_t bytes = static_cast<int64_t>(rows) * fp8_groups(matrix.row.units) * 128;
  return reinterpret_cast<const float*>(static_cast<const uint8_t*>(codes) + bytes);
}
template <typename T>
void launch_quantize(Launcher& launcher, const Call& c, const WeightMatrix& matrix, const qm_cuda_step& s) {
  QuantizeParams quantize{};
  quantize.routing = c.routing;
  quantize.x = c.input(s);
  quantize.codes = static_cast<uint8_t*>(c.output(s));
  quantize.columns = s.in_columns;
  quantize.groups = fp8_groups(matrix.row.units);
  quantize.x_rows = s.out_rows;
  quantize.scales = const_cast<float*>(scales_of(quantize.codes, matrix, s.out_rows));
  quantize.positions = s.kind == QM_CUDA_QUANTIZE_HIDDEN ? nullptr : c.at<int>(c.plan.positions);
  quantize.weight_here = s.weighted;
  quantize.rows = matrix.weights.rows;
  quantize.input_at = matrix.weights.input_at;
  quantize.sorted_pairs = c.at<SortedPair>(c.plan.sorted_pairs);
  quantize.tiles = c.at<Tile>(c.plan.tiles);
  quantize.max_tiles = c.plan.max_tiles;
  quantize.from_rows = s.in_rows;
  const bool grouped = matrix.w.activation_format == k_activation_format_fp8_group128;
  run(launcher, grouped ? moe_quantize<T, true> : moe_quantize<T, false>, quantize, s);
}

// What a product of a layer and of a linear have alike.
GemmParams gemm_of(const Call& c, const WeightMatrix& matrix, const qm_cuda_step& s) {
  GemmParams gemm{};
  gemm.weights = matrix.weights;
  gemm.routing = c.routing;
  gemm.activation = c.activation;
  gemm.x = c.input(s);
  gemm.x_columns = s.in_columns;
  gemm.x_divisor = c.divisor(s);
  gemm.out = c.output(s);
  gemm.out_columns = s.out_columns;
  gemm.weight_here = s.weighted;
  gemm.warps_k = s.warps_k;
  gemm.cluster = s.cluster;
  return gemm;
}

template <typename T>
void multiply(Launcher& launcher, const Call& c, const WeightMatrix& matrix, const qm_cuda_step& s) {
  const qm_cuda_plan& plan = c.plan;
  const bool down = s.kind == QM_CUDA_DOWN;
  GemmParams gemm = gemm_of(c, matrix, s);
  gemm.tiles = c.at<Tile>(down ? plan.down_tiles : plan.tiles);
  gemm.max_tiles = down ? plan.down_max_tiles : plan.max_tiles;
  gemm.sorted_pairs = c.at<SortedPair>(plan.sorted_pairs);
  gemm.out_float = down && !c.on_wgmma();
  if (plan.path == QM_CUDA_FP8) {
    gemm.x_rows = s.in_rows;
    gemm.x_scales = scales_of(gemm.x, matrix, s.in_rows);
    gemm.x_grouped = matrix.w.activation_format == k_activation_format_fp8_group128;
    const WeightMatrix& next = c.second;
    // Where a block has all it takes to know the scales. Codes and scales of h take less than h in 16 bits.
    if (!down && next.w.activation_format != k_activation_format_fp8_token) {
      gemm.h_scales = const_cast<float*>(scales_of(gemm.out, next, s.out_rows));
      gemm.h_rows = next.weights.rows;
      gemm.h_input_at = next.weights.input_at;
    }
  }
  run(launcher, kernel_of<T>(down ? Product::kDown : Product::kGateUp, matrix.w, plan.path, s), gemm, s);
}

template <typename T>
void launch_combine(Launcher& launcher, const Call& c, const qm_cuda_step& s) {
  CombineParams combine{};
  combine.routing = c.routing;
  combine.partial = c.input(s);
  combine.out = c.output(s);
  combine.columns = s.out_columns;
  combine.parts = s.warps_k;
  run(launcher, c.on_wgmma() ? moe_combine<T, T> : moe_combine<T, float>, combine, s);
}

// Multiplies x, rows of in_columns values, on wgmma.
template <typename T>
int multiply_dense(Launcher& launcher, const Call& c, const WeightMatrix& matrix, const qm_cuda_step& s, char* err) {
  LinearParams p{};
  p.weights = matrix.weights;
  p.out = c.output(s);
  p.rows = c.routing.tokens;
  p.out_columns = s.out_columns;
  p.width = 8 * s.n_tiles;
  p.parts = s.cluster;
  p.row_tiles = (p.weights.panels + s.panels - 1) / s.panels;
  p.tiles = p.row_tiles * ((p.rows + p.width - 1) / p.width);
  const uint8_t* rows = p.weights.rows.first;
  const WeightKind kind = kind_of(matrix.w);
  const uint32_t box = s.panels, width = p.width, lines = bits_of(kind);  // 128 bytes of a unit's codes
  const uint32_t scales = 8 * p.weights.scale_bytes, zeros = p.weights.zero_bytes;
  const uint64_t columns = s.in_columns, x_rows = p.rows, panels = p.weights.panels, units = p.weights.units,
                 blocks = p.weights.blocks;
  int status = make_tensor_map(&p.tokens, c.input(s), 2, {columns, x_rows}, {2 * columns}, {kUnit, width}, true, err);
  if (!status)  // codes of 8 bits are swizzled already
    status = make_tensor_map(&p.codes, rows, 1, {128, units * lines, panels}, {128, units * lines * 128},
                             {128, lines, box}, lines != 8, err);
  if (!status && kind != WeightKind::kFloat)
    status = make_tensor_map(&p.scales, rows + p.weights.scales_at, 1, {scales, blocks, panels},
                             {scales, blocks * scales}, {scales, 1, box}, false, err);
  if (!status && p.weights.zeros_at)
    status = make_tensor_map(&p.zeros, rows + p.weights.zeros_at, 1, {zeros, blocks, panels}, {zeros, blocks * zeros},
                             {zeros, 1, box}, false, err);
  if (!status) run(launcher, dense_kernel<T>(matrix.w, s), p, s);
  return status;
}
template <typename T>
int multiply_linear(Launcher& launcher, const Call& c, const WeightMatrix& matrix, const qm_cuda_step& s, char* err) {
  if (c.plan.path == QM_CUDA_DENSE) return multiply_dense<T>(launcher, c, matrix, s, err);
  GemmParams gemm = gemm_of(c, matrix, s);
  gemm.max_tiles = c.plan.max_tiles;
  gemm.tile_pairs = 8 * s.n_tiles;
  run(launcher, linear_gemm<T>(matrix.w, c.plan.path, s), gemm, s);
  return QM_OK;
}

template <typename T>
int launch(const Call& c, cudaStream_t stream, char* err) {
  if (int status = check_plan<T>(c.first.w, c.second.w, c.plan, err)) return status;
  Launcher launcher{stream};
  for (int i = 0; i < c.plan.step_count; ++i) {
    const qm_cuda_step& s = c.plan.steps[i];
    int status = QM_OK;
    switch (static_cast<qm_cuda_step_kind>(s.kind)) {
      case QM_CUDA_RESOLVE:
        run(launcher, resolve_experts, c.cache, s);
        break;
      case QM_CUDA_FILL:
        run(launcher, fill_experts, c.cache, s);
        break;
      case QM_CUDA_ROUND:
        launch_round<T>(launcher, c, c.first, s);
        break;
      case QM_CUDA_GATHER:
        launch_gather(launcher, c, c.first, s);
        break;
      case QM_CUDA_ROUTE:
        launch_route(launcher, c, s);
        break;
      case QM_CUDA_QUANTIZE:
        launch_quantize<T>(launcher, c, c.first, s);
        break;
      case QM_CUDA_GATE_UP:
        multiply<T>(launcher, c, c.first, s);
        break;
      case QM_CUDA_ROUND_HIDDEN:
        launch_round<T>(launcher, c, c.second, s);
        break;
      case QM_CUDA_QUANTIZE_HIDDEN:
        launch_quantize<T>(launcher, c, c.second, s);
        break;
      case QM_CUDA_DOWN:
        multiply<T>(launcher, c, c.second, s);
        break;
      case QM_CUDA_COMBINE:
        launch_combine<T>(launcher, c, s);
        break;
      case QM_CUDA_LINEAR:
        status = multiply_linear<T>(launcher, c, c.second, s, err);
        break;
    }
    if (status) return status;
  }
  return report(launcher.error, err);
}

Call call_of(const qm_cuda_problem& p, const qm_cuda_plan& plan, const qm_cuda_tensors& t) {
  const qm_moe& m = p.moe;
  auto* const workspace = static_cast<uint8_t*>(t.workspace);
  // Of w13, then of w2.
  auto* const where = p.slots ? reinterpret_cast<const uint8_t**>(workspace + plan.where) : nullptr;
  Call c{plan, matrix_of(m, 13, t.w13, where), matrix_of(m, 2, t.w2, where ? where + p.local_experts : nullptr)};
  c.routing.topk_ids = t.topk_ids;
  c.routing.topk_weights = t.topk_weights;
  c.routing.id_bytes = p.id_bytes;
  c.routing.tokens = static_cast<int>(p.tokens);
  c.routing.top_k = static_cast<int>(p.top_k);
  c.routing.expert_offset = m.expert_offset;
  c.routing.local_experts = static_cast<int>(p.local_experts);
  c.activation = Activation{m.activation, m.gated, m.swiglu_alpha, m.swiglu_limit};
  c.x = t.hidden_states;
  c.y = t.output;
  c.workspace = workspace;
  if (!p.slots) return c;
  CacheParams& cache = c.cache;
  cache.routing = c.routing;
  for (int i = 0; i < 2; ++i) {
    const ExpertRows& rows = (i ? c.second : c.first).weights.rows;
    cache.rows[i] = rows.first;
    cache.row_bytes[i] = rows.bytes;
    cache.where[i] = where + i * p.local_experts;
  }
  cache.each = t.rows;
  cache.second_at = second_at(c.first.row);
  cache.slot_bytes = qm_cuda_slot_bytes(&m);
  cache.slots = static_cast<uint8_t*>(t.slots);
  cache.staging = static_cast<uint8_t*>(t.staging);
  cache.slot_count = p.slots;
  cache.staging_count = p.staging;
  cache.state = static_cast<CacheState*>(t.cache_state);
  cache.copy_count = reinterpret_cast<int*>(workspace + plan.copies);
  cache.copies = reinterpret_cast<ExpertCopy*>(workspace + plan.copies + kCopyBytes);
  return c;
}
Call call_of(const qm_cuda_linear_problem& p, const qm_moe& moe, const qm_cuda_plan& plan,
             const qm_cuda_linear_tensors& t) {
  Call c{plan, matrix_of(moe, 2, t.w), matrix_of(moe, 2, t.w)};
  c.routing.tokens = static_cast<int>(p.rows);
  c.routing.top_k = c.routing.local_experts = 1;
  c.x = t.x;
  c.y = t.y;
  c.workspace = static_cast<uint8_t*>(t.workspace);
  return c;
}

}  // namespace

}  // namespace quantmoe

using namespace quantmoe;

extern "C" int qm_cuda_query(int ordinal, qm_cuda_device* device, char* err) {
  int major = 0, minor = 0;
  cudaError_t e = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, ordinal);
  if (e == cudaSuccess) e = cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, ordinal);
  if (e == cudaSuccess) e = cudaDeviceGetAttribute(&device->multiprocessors, cudaDevAttrMultiProcessorCount, ordinal);
  if (e == cudaSuccess)
    e = cudaDeviceGetAttribute(&device->shared_bytes, cudaDevAttrMaxSharedMemoryPerMultiprocessor, ordinal);
  if (e != cudaSuccess) {
    std::snprintf(err, QM_ERROR_SIZE, "CUDA device %d: %s", ordinal, cudaGetErrorString(e));
    return QM_UNSUPPORTED;
  }
  device->sm = major * 10 + minor;
  return QM_OK;
}

extern "C" int qm_cuda_check_plan(const qm_cuda_problem* problem, const qm_cuda_plan* plan, char* err) {
  const qm_moe& m = problem->moe;
  return problem->type == QM_BF16 ? check_plan<__nv_bfloat16>(m.w13, m.w2, *plan, err)
                                  : check_plan<__half>(m.w13, m.w2, *plan, err);
}

extern "C" int qm_cuda_check_moe(const qm_cuda_problem* problem, const void* w13, void* stream, char* err) {
  MarlinRow row{};
  marlin_row_of(problem->moe, 13, &row);
  return check_orders(w13, row, problem->local_experts, problem->moe.hidden_size, "w13",
                      static_cast<cudaStream_t>(stream), err);
}

extern "C" int qm_cuda_check_linear(const qm_cuda_linear_problem* problem, const void* w, void* stream, char* err) {
  MarlinRow row{};
  marlin_row_of(moe_of(problem->linear), 2, &row);
  return check_orders(w, row, 1, problem->linear.in_features, "w", static_cast<cudaStream_t>(stream), err);
}

extern "C" int qm_cuda_launch(const qm_cuda_problem* problem, const qm_cuda_plan* plan, const qm_cuda_tensors* tensors,
                              void* stream, char* err) {
  if (problem->tokens == 0) return QM_OK;
  cudaStream_t s = static_cast<cudaStream_t>(stream);
  const Call call = call_of(*problem, *plan, *tensors);
  return problem->type == QM_BF16 ? launch<__nv_bfloat16>(call, s, err) : launch<__half>(call, s, err);
}

extern "C" int qm_cuda_check_plan_linear(const qm_cuda_linear_problem* problem, const qm_cuda_plan* plan, char* err) {
  const qm_projection& w = problem->linear.w;
  return problem->type == QM_BF16 ? check_plan<__nv_bfloat16>(w, w, *plan, err) : check_plan<__half>(w, w, *plan, err);
}

extern "C" int qm_cuda_launch_linear(const qm_cuda_linear_problem* problem, const qm_cuda_plan* plan,
                                     const qm_cuda_linear_tensors* tensors, void* stream, char* err) {
  if (problem->rows == 0) return QM_OK;
  cudaStream_t s = static_cast<cudaStream_t>(stream);
  const qm_moe moe = moe_of(problem->linear);
  const Call call = call_of(*problem, moe, *plan, *tensors);
  return problem->type == QM_BF16 ? launch<__nv_bfloat16>(call, s, err) : launch<__half>(call, s, err);
}

extern "C" int qm_cuda_launch_routing(const qm_cuda_routing_problem* problem, const qm_cuda_routing_tensors* tensors,
                                      void* stream, char* err) {
  if (int status = qm_cuda_validate_routing(problem, err)) return status;
  if (problem->tokens == 0) return QM_OK;
  const qm_routing& r = problem->routing;
  const SelectParams params{tensors->logits, tensors->correction_bias, tensors->topk_ids, tensors->topk_weights, r};
  Launcher launcher{static_cast<cudaStream_t>(stream)};
  launcher.run(problem->type == QM_F32    ? moe_select<float>
               : problem->type == QM_BF16 ? moe_select<__nv_bfloat16>
                                          : moe_select<__half>,
               params, dim3(static_cast<unsigned>(problem->tokens)), 32, 4 * select_words(r), true);
  return report(launcher.error, err);
}
