// Plan to kernel launches: a loop over its steps.
#include <algorithm>
#include <cstdio>
#include <exception>
#include <vector>

#include "cuda/common/fp8_activations.cuh"
#include "cuda/common/launcher.h"
#include "cuda/common/layout.h"
#include "cuda/common/operators.h"
#include "cuda/common/rounded_activations.cuh"
#include "cuda/common/tensor_map.h"
#include "cuda/gemm/gemm_kernels.h"
#include "cuda/moe/expert_cache.cuh"
#include "cuda/moe/expert_sort.cuh"

namespace quantmoe {
namespace {

// A projection's weights.
struct WeightMatrix {
  const qm_projection& w;
  MarlinRow row;
  Weights weights;
};
WeightMatrix matrix_of(const qm_moe& moe, int projection, const void* rows, const uint8_t* const* where = nullptr) {
  WeightMatrix out{projection == 13 ? moe.w13 : moe.w2, {}, {}};
  MarlinRow& row = out.row;
  marlin_row_of(moe, projection, &row);
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
  const LayerPlan& plan;
  WeightMatrix first, second;
  RoutedPairs routing;
  Activation activation;
  const void* x;
  void* y;
  uint8_t* workspace;
  CacheParams cache;

  const void* input(const PlanStep& step) const { return step.in == kCallers ? x : workspace + step.in; }
  void* output(const PlanStep& step) const { return step.out == kCallers ? y : workspace + step.out; }
  template <typename T>
  T* at(uint64_t offset) const {
    return reinterpret_cast<T*>(workspace + offset);
  }
  bool on_wgmma() const { return plan.path == kPathWgmma || plan.path == kPathFp8; }
  // The row of x of pair p is p divided by this.
  int divisor(const PlanStep& step) const { return step.in_rows == routing.tokens ? routing.top_k : 1; }
};

template <typename Params>
void run(Launcher& launcher, void (*kernel)(Params), const Params& params, const PlanStep& step) {
  launcher.run(kernel, params, dim3(step.grid, step.grid_y), dim3(step.block, step.block_y), step.shared_bytes,
               step.dependent, step.cluster);
}

// The kernel of a layer's product; null: none is compiled that is what the plan says.
template <typename T>
GemmKernel kernel_of(Product product, const qm_projection& weights, int path, const PlanStep& step) {
  const bool down = product == Product::kDown;
  if (kind_of(weights) == WeightKind::kFloat) return step.packed ? nullptr : float_kernel<T>(product, path, step);
  switch (path) {
    case kPathDecode:
    case kPathStream:
      return step.packed ? packed_kernel<T>(product, path, weights, step)
             : down      ? down_kernel<T>(path, weights, step)
                         : gate_up_kernel<T>(path, weights, step);
    case kPathWgmma:
      return step.packed ? nullptr : wgmma_kernel<T>(product, weights, step);
    case kPathFp8:
      return step.packed ? nullptr : fp8_kernel<T>(product, weights, step);
    default:
      return nullptr;
  }
}
// For a linear, except kPathDense.
template <typename T>
GemmKernel linear_gemm(const qm_projection& weights, int path, const PlanStep& step) {
  if (kind_of(weights) == WeightKind::kFloat)
    return step.packed ? nullptr : float_kernel<T>(path == kPathDecode ? Product::kLinear : Product::kDown, path, step);
  if (path == kPathDecode && !step.packed)
    if (const GemmKernel kernel = linear_decode_kernel<T>(weights, step)) return kernel;
  return path == kPathDecode || path == kPathStream ? kernel_of<T>(Product::kDown, weights, path, step) : nullptr;
}
template <typename T>
bool is_compiled(const qm_projection& weights, bool gated, int path, const PlanStep& step) {
  const bool product = step.kind == kStepGateUp || step.kind == kStepDown || step.kind == kStepLinear;
  if (product && step.block != threads_of(path, step.panels)) return false;
  switch (step.kind) {
    case kStepGateUp:
      return kernel_of<T>(first_product(path, gated), weights, path, step);
    case kStepDown:
      return kernel_of<T>(Product::kDown, weights, path, step);
    case kStepLinear:
      return path == kPathDense ? dense_kernel<T>(weights, step) != nullptr
                                : linear_gemm<T>(weights, path, step) != nullptr;
    default:
      return true;
  }
}
// A layer's w13 and w2 are its projections. A linear has one projection for both.
template <typename T>
int check_plan(const qm_projection& w13, const qm_projection& w2, bool gated, const LayerPlan& plan, char* err) {
  for (int i = 0; i < plan.step_count; ++i) {
    const PlanStep& step = plan.steps[i];
    if (is_compiled<T>(step.kind == kStepGateUp ? w13 : w2, gated, plan.path, step)) continue;
    std::snprintf(err, QM_ERROR_SIZE,
                  "the plan names a kernel that is not compiled: %s of path %d with %d panels, %d n_tiles, %d stages, "
                  "packed %d",
                  step.kind == kStepGateUp ? "w13"
                  : step.kind == kStepDown ? "w2"
                                           : "w",
                  plan.path, step.panels, step.n_tiles, step.stages, step.packed);
    return QM_INVALID;
  }
  return QM_OK;
}

// Whether the orders that launches gather by have each of `features` once.
int check_orders(const void* rows, const MarlinRow& row, int64_t experts, int features, const char* name,
                 cudaStream_t stream, char* err) try {
  if (!rows || !row.orders) return QM_OK;
  std::vector<int> order(features);
  for (int64_t i = 0; i < experts * row.orders; ++i) {
    const int64_t expert = i / row.orders;
    const auto* from =
        static_cast<const uint8_t*>(rows) + expert * row.bytes + row.perm_at + i % row.orders * row.order_bytes;
    cudaError_t error = cudaMemcpyAsync(order.data(), from, 4ull * features, cudaMemcpyDefault, stream);
    if (error == cudaSuccess) error = cudaStreamSynchronize(stream);
    if (int status = report(error, err)) return status;
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
void launch_round(Launcher& launcher, const Call& call, const WeightMatrix& matrix, const PlanStep& step) {
  const bool hidden = step.kind == kStepRoundHidden, wgmma = call.plan.path == kPathWgmma;
  RoundParams round{};
  round.routing = call.routing;
  round.format = matrix.w.activation_format;
  // Rows of foreign experts were not written in h.
  round.by_expert = hidden || !call.routing.topk_ids || rounds_by_expert(matrix.w) || step.weighted;
  round.weight_here = step.weighted;
  round.rows = matrix.weights.rows;
  round.input_at = matrix.weights.input_at;
  round.pre_at = matrix.w.pre_scale ? static_cast<uint32_t>(matrix.row.pre_at) : 0;
  round.with_input_scale = with_facts(kind_of(matrix.w), [](auto f) { return f.kRoundsScaled; });
  round.packed = step.packed ? packed_unit_bytes(kind_of(matrix.w)) : 0;
  round.x = call.input(step);
  round.out = call.output(step);
  round.x_divisor = !hidden && round.by_expert ? call.routing.top_k : 1;
  round.x_columns = step.in_columns;
  round.out_rows = step.out_rows;
  round.columns = step.packed ? matrix.row.units * kUnit : step.out_columns;
  round.features = hidden ? matrix.row.columns : step.in_columns;
  round.x_stored = wgmma && hidden;
  round.out_stored = wgmma && (hidden || !matrix.w.perm);
  if (round.x_stored) {
    round.sorted_pairs = call.at<SortedPair>(call.plan.sorted_pairs);
    round.tiles = call.at<Tile>(call.plan.tiles);
    round.max_tiles = call.plan.max_tiles;
  }
  run(launcher, moe_round<T>, round, step);
}

// x in act-order, a row a pair.
void launch_gather(Launcher& launcher, const Call& call, const WeightMatrix& matrix, const PlanStep& step) {
  GatherParams gather{};
  gather.routing = call.routing;
  gather.x_divisor = call.divisor(step);
  gather.rows = matrix.weights.rows;
  gather.perm_at = static_cast<uint32_t>(matrix.row.perm_at);
  gather.x = static_cast<const uint16_t*>(call.input(step));
  gather.out = static_cast<uint16_t*>(call.output(step));
  gather.columns = step.in_columns;
  gather.out_columns = step.out_columns;
  gather.half = step.out_columns / matrix.row.orders;
  gather.order_words = static_cast<int>(matrix.row.order_bytes / 4);
  run(launcher, moe_gather, gather, step);
}

// Makes the list of tiles, a second list if down's tiles differ, and a copy of x as wgmma reads it if x is none.
void launch_route(Launcher& launcher, const Call& call, const PlanStep& step) {
  const LayerPlan& plan = call.plan;
  const bool fp8 = plan.path == kPathFp8;
  RouteParams route{};
  route.routing = call.routing;
  route.cluster = step.cluster;
  route.by_size = call.on_wgmma();
  route.ordered = step.ordered;
  for (const PlanStep* product = plan.steps; product < plan.steps + plan.step_count; ++product) {
    const bool down = product->kind == kStepDown;
    // wgmma's M, which fp8 has tokens as, is 64.
    if (product->kind == kStepGateUp || (down && plan.down_tiles != plan.tiles))
      route.lists[route.list_count++] = {call.at<Tile>(down ? plan.down_tiles : plan.tiles),
                                         down ? plan.down_max_tiles : plan.max_tiles, 8 * product->n_tiles,
                                         fp8 ? 64 : 8};
  }
  if (step.out != step.in) {
    route.prepare.x = static_cast<const uint16_t*>(call.input(step));
    route.prepare.out = static_cast<uint16_t*>(call.output(step));
    route.prepare.rows = step.in_rows;
    route.prepare.columns = step.in_columns;
    route.prepare.out_columns = step.out_columns;
  }
  route.sorted_pairs = call.at<SortedPair>(plan.sorted_pairs);
  route.align = fp8 ? 8 : 1;
  if (fp8) route.positions = call.at<int>(plan.positions);
  run(launcher, moe_route, route, step);
}

// x of a product as e4m3 codes [groups, rows, 128], then scales; h: in the order of sorted pairs already.
const float* scales_of(const void* codes, const WeightMatrix& matrix, int rows) {
  const int64_t bytes = static_cast<int64_t>(rows) * fp8_groups(matrix.row.units) * 128;
  return reinterpret_cast<const float*>(static_cast<const uint8_t*>(codes) + bytes);
}
template <typename T>
void launch_quantize(Launcher& launcher, const Call& call, const WeightMatrix& matrix, const PlanStep& step) {
  QuantizeParams quantize{};
  quantize.routing = call.routing;
  quantize.x = call.input(step);
  quantize.codes = static_cast<uint8_t*>(call.output(step));
  quantize.columns = step.in_columns;
  quantize.groups = fp8_groups(matrix.row.units);
  quantize.x_rows = step.out_rows;
  quantize.scales = const_cast<float*>(scales_of(quantize.codes, matrix, step.out_rows));
  quantize.positions = step.kind == kStepQuantizeHidden ? nullptr : call.at<int>(call.plan.positions);
  quantize.weight_here = step.weighted;
  quantize.rows = matrix.weights.rows;
  quantize.input_at = matrix.weights.input_at;
  quantize.sorted_pairs = call.at<SortedPair>(call.plan.sorted_pairs);
  quantize.tiles = call.at<Tile>(call.plan.tiles);
  quantize.max_tiles = call.plan.max_tiles;
  quantize.from_rows = step.in_rows;
  const bool grouped = matrix.w.activation_format == k_activation_format_fp8_group128;
  run(launcher, grouped ? moe_quantize<T, true> : moe_quantize<T, false>, quantize, step);
}

// What a product of a layer and of a linear have alike.
GemmParams gemm_of(const Call& call, const WeightMatrix& matrix, const PlanStep& step) {
  GemmParams gemm{};
  gemm.weights = matrix.weights;
  gemm.routing = call.routing;
  gemm.activation = call.activation;
  gemm.x = call.input(step);
  gemm.x_columns = step.in_columns;
  gemm.x_divisor = call.divisor(step);
  gemm.out = call.output(step);
  gemm.out_columns = step.out_columns;
  gemm.weight_here = step.weighted;
  gemm.warps_k = step.warps_k;
  gemm.cluster = step.cluster;
  return gemm;
}

template <typename T>
void multiply(Launcher& launcher, const Call& call, const WeightMatrix& matrix, const PlanStep& step) {
  const LayerPlan& plan = call.plan;
  const bool down = step.kind == kStepDown;
  GemmParams gemm = gemm_of(call, matrix, step);
  gemm.tiles = call.at<Tile>(down ? plan.down_tiles : plan.tiles);
  gemm.max_tiles = down ? plan.down_max_tiles : plan.max_tiles;
  gemm.sorted_pairs = call.at<SortedPair>(plan.sorted_pairs);
  gemm.out_float = down && !call.on_wgmma();
  if (plan.path == kPathFp8) {
    gemm.x_rows = step.in_rows;
    gemm.x_scales = scales_of(gemm.x, matrix, step.in_rows);
    gemm.x_grouped = matrix.w.activation_format == k_activation_format_fp8_group128;
    const WeightMatrix& next = call.second;
    // Where a block has all it takes to know the scales. Codes and scales of h take less than h in 16 bits.
    if (!down && next.w.activation_format != k_activation_format_fp8_token) {
      gemm.h_scales = const_cast<float*>(scales_of(gemm.out, next, step.out_rows));
      gemm.h_rows = next.weights.rows;
      gemm.h_input_at = next.weights.input_at;
    }
  }
  const Product product = down ? Product::kDown : first_product(plan.path, call.activation.gated);
  run(launcher, kernel_of<T>(product, matrix.w, plan.path, step), gemm, step);
}

template <typename T>
void launch_combine(Launcher& launcher, const Call& call, const PlanStep& step) {
  CombineParams combine{};
  combine.routing = call.routing;
  combine.partial = call.input(step);
  combine.out = call.output(step);
  combine.columns = step.out_columns;
  combine.parts = step.warps_k;
  run(launcher, call.on_wgmma() ? moe_combine<T, T> : moe_combine<T, float>, combine, step);
}

// Multiplies x, rows of in_columns values, on wgmma.
template <typename T>
int multiply_dense(Launcher& launcher, const Call& call, const WeightMatrix& matrix, const PlanStep& step, char* err) {
  LinearParams params{};
  params.weights = matrix.weights;
  params.out = call.output(step);
  params.rows = call.routing.tokens;
  params.out_columns = step.out_columns;
  params.width = 8 * step.n_tiles;
  params.parts = step.cluster;
  params.row_tiles = (params.weights.panels + step.panels - 1) / step.panels;
  params.tiles = params.row_tiles * ((params.rows + params.width - 1) / params.width);
  const uint8_t* rows = params.weights.rows.first;
  const WeightKind kind = kind_of(matrix.w);
  const uint32_t box = step.panels, width = params.width, lines = bits_of(kind);  // 128 bytes of a unit's codes
  const uint32_t scales = 8 * params.weights.scale_bytes, zeros = params.weights.zero_bytes;
  const uint32_t line = two_levels(kind) ? kLevelLine : scales, line_box = two_levels(kind) ? 2 : 1;
  const uint64_t columns = step.in_columns, x_rows = params.rows, panels = params.weights.panels,
                 units = params.weights.units, blocks = params.weights.blocks;
  int status =
      make_tensor_map(&params.tokens, call.input(step), 2, {columns, x_rows}, {2 * columns}, {kUnit, width}, true, err);
  if (!status)  // codes of 8 bits are swizzled already
    status = make_tensor_map(&params.codes, rows, 1, {128, units * lines, panels}, {128, units * lines * 128},
                             {128, lines, box}, lines != 8, err);
  if (!status && kind != WeightKind::kFloat)
    status = make_tensor_map(&params.scales, rows + params.weights.scales_at, 1, {line, blocks * scales / line, panels},
                             {line, blocks * scales}, {line, line_box, box}, false, err);
  if (!status && params.weights.zeros_at)
    status = make_tensor_map(&params.zeros, rows + params.weights.zeros_at, 1, {zeros, blocks, panels},
                             {zeros, blocks * zeros}, {zeros, 1, box}, false, err);
  if (!status) run(launcher, dense_kernel<T>(matrix.w, step), params, step);
  return status;
}
template <typename T>
int multiply_linear(Launcher& launcher, const Call& call, const WeightMatrix& matrix, const PlanStep& step, char* err) {
  if (call.plan.path == kPathDense) return multiply_dense<T>(launcher, call, matrix, step, err);
  GemmParams gemm = gemm_of(call, matrix, step);
  gemm.max_tiles = call.plan.max_tiles;
  gemm.tile_pairs = 8 * step.n_tiles;
  run(launcher, linear_gemm<T>(matrix.w, call.plan.path, step), gemm, step);
  return QM_OK;
}

template <typename T>
int launch(const Call& call, cudaStream_t stream, char* err) {
  if (int status = check_plan<T>(call.first.w, call.second.w, call.activation.gated, call.plan, err)) return status;
  Launcher launcher{stream};
  for (int i = 0; i < call.plan.step_count; ++i) {
    const PlanStep& step = call.plan.steps[i];
    int status = QM_OK;
    switch (static_cast<StepKind>(step.kind)) {
      case kStepResolve:
        run(launcher, resolve_experts, call.cache, step);
        break;
      case kStepFill:
        run(launcher, fill_experts, call.cache, step);
        break;
      case kStepAddHost:
        run(launcher, add_host<T>, AddParams{call.cache.asked, call.cache.host, call.y, step.out_columns}, step);
        break;
      case kStepRound:
        launch_round<T>(launcher, call, call.first, step);
        break;
      case kStepGather:
        launch_gather(launcher, call, call.first, step);
        break;
      case kStepRoute:
        launch_route(launcher, call, step);
        break;
      case kStepQuantize:
        launch_quantize<T>(launcher, call, call.first, step);
        break;
      case kStepGateUp:
        multiply<T>(launcher, call, call.first, step);
        break;
      case kStepRoundHidden:
        launch_round<T>(launcher, call, call.second, step);
        break;
      case kStepQuantizeHidden:
        launch_quantize<T>(launcher, call, call.second, step);
        break;
      case kStepDown:
        multiply<T>(launcher, call, call.second, step);
        break;
      case kStepCombine:
        launch_combine<T>(launcher, call, step);
        break;
      case kStepLinear:
        status = multiply_linear<T>(launcher, call, call.second, step, err);
        break;
    }
    if (status) return status;
  }
  return report(launcher.error, err);
}

Call call_of(const MoEProblem& problem, const LayerPlan& plan, const qm_cuda_call& given) {
  const qm_moe& moe = problem.moe;
  const TensorsOf<qm_moe> tensors{given.inputs, given.outputs};
  auto* const workspace = static_cast<uint8_t*>(given.workspace);
  // Of w13, then of w2.
  auto* const where = problem.slots ? reinterpret_cast<const uint8_t**>(workspace + plan.where) : nullptr;
  Call call{plan, matrix_of(moe, 13, tensors.w13, where),
            matrix_of(moe, 2, tensors.w2, where ? where + problem.local_experts : nullptr)};
  call.routing.topk_ids = tensors.topk_ids;
  call.routing.topk_weights = tensors.topk_weights;
  call.routing.id_bytes = problem.id_bytes;
  call.routing.tokens = static_cast<int>(problem.tokens);
  call.routing.top_k = static_cast<int>(problem.top_k);
  call.routing.expert_offset = moe.expert_offset;
  call.routing.local_experts = static_cast<int>(problem.local_experts);
  call.activation = Activation{moe.activation, moe.gated, moe.swiglu_alpha, moe.swiglu_limit};
  call.x = tensors.hidden_states;
  call.y = tensors.output;
  call.workspace = workspace;
  if (!problem.slots) return call;
  CacheParams& cache = call.cache;
  cache.routing = call.routing;
  for (int i = 0; i < 2; ++i) {
    const ExpertRows& rows = (i ? call.second : call.first).weights.rows;
    cache.rows[i] = rows.first;
    cache.row_bytes[i] = rows.bytes;
    cache.where[i] = where + i * problem.local_experts;
  }
  const qm_cuda_experts& experts = *given.experts;
  cache.each = experts.rows;
  cache.second_at = second_at(call.first.row);
  cache.slot_bytes = slot_bytes(call.first.row, call.second.row);
  cache.slots = static_cast<uint8_t*>(experts.slot_memory);
  cache.staging = static_cast<uint8_t*>(experts.staging_memory);
  cache.slot_count = problem.slots;
  cache.staging_count = problem.staging;
  cache.state = static_cast<CacheState*>(experts.cache_state);
  cache.copy_count = reinterpret_cast<int*>(workspace + plan.copies);
  cache.copies = reinterpret_cast<ExpertCopy*>(workspace + plan.copies + kCopyBytes);
  if (!problem.host_share) return call;
  cache.host_share = problem.host_share;
  cache.host_layer = problem.host_layer;
  cache.host = host_places(experts.host, moe.hidden_size);
  cache.asked = reinterpret_cast<uint64_t*>(workspace + plan.kept);
  cache.kept_ids = reinterpret_cast<int32_t*>(workspace + plan.kept + kKeptIds);
  cache.x = static_cast<const uint16_t*>(tensors.hidden_states);
  cache.columns = moe.hidden_size;
  cache.is_bf16 = problem.type == QM_BF16;
  call.routing.topk_ids = cache.kept_ids;
  call.routing.id_bytes = 4;
  return call;
}
Call call_of(const LinearProblem& problem, const qm_moe& moe, const LayerPlan& plan, const qm_cuda_call& given) {
  const TensorsOf<qm_linear> tensors{given.inputs, given.outputs};
  Call call{plan, matrix_of(moe, 2, tensors.w), matrix_of(moe, 2, tensors.w)};
  call.routing.tokens = static_cast<int>(problem.rows);
  call.routing.top_k = call.routing.local_experts = 1;
  call.x = tensors.x;
  call.y = tensors.y;
  call.workspace = static_cast<uint8_t*>(given.workspace);
  return call;
}

int check_plan(int32_t type, const qm_projection& w13, const qm_projection& w2, bool gated,
               const qm_cuda_node_plan& made, char* err) {
  const LayerPlan& plan = plan_in<LayerPlan>(made);
  return type == QM_BF16 ? check_plan<__nv_bfloat16>(w13, w2, gated, plan, err)
                         : check_plan<__half>(w13, w2, gated, plan, err);
}

}  // namespace

int launch_moe(const void* node, const qm_cuda_node_plan& plan, const qm_cuda_call& given, char* err) {
  const MoEProblem problem(*static_cast<const qm_moe*>(node), given);
  if (problem.tokens == 0) return QM_OK;
  const auto stream = static_cast<cudaStream_t>(given.stream);
  const Call call = call_of(problem, plan_in<LayerPlan>(plan), given);
  return problem.type == QM_BF16 ? launch<__nv_bfloat16>(call, stream, err) : launch<__half>(call, stream, err);
}

int launch_linear(const void* node, const qm_cuda_node_plan& plan, const qm_cuda_call& given, char* err) {
  const LinearProblem problem(*static_cast<const qm_linear*>(node), given.inputs);
  if (problem.rows == 0) return QM_OK;
  const auto stream = static_cast<cudaStream_t>(given.stream);
  const qm_moe moe = moe_of(problem.linear);
  const Call call = call_of(problem, moe, plan_in<LayerPlan>(plan), given);
  return problem.type == QM_BF16 ? launch<__nv_bfloat16>(call, stream, err) : launch<__half>(call, stream, err);
}

int check_moe_call(const void* node, const qm_cuda_node_plan& plan, const qm_cuda_call& given, char* err) {
  const qm_moe& moe = *static_cast<const qm_moe*>(node);
  QM_TRY(check_plan(given.inputs->type, moe.w13, moe.w2, moe.gated, plan, err));
  const qm_tensor& w13 = given.inputs[QuantMoE_w13];
  MarlinRow row{};
  marlin_row_of(moe, 13, &row);
  return check_orders(w13.data, row, w13.shape.sizes[0], moe.hidden_size, "w13",
                      static_cast<cudaStream_t>(given.stream), err);
}

int check_linear_call(const void* node, const qm_cuda_node_plan& plan, const qm_cuda_call& given, char* err) {
  const qm_linear& linear = *static_cast<const qm_linear*>(node);
  QM_TRY(check_plan(given.inputs->type, linear.w, linear.w, false, plan, err));
  MarlinRow row{};
  marlin_row_of(moe_of(linear), 2, &row);
  return check_orders(given.inputs[QuantLinear_w].data, row, 1, linear.in_features, "w",
                      static_cast<cudaStream_t>(given.stream), err);
}

}  // namespace quantmoe

using namespace quantmoe;

extern "C" int qm_cuda_query(int ordinal, qm_cuda_device* device, char* err) {
  int major = 0, minor = 0;
  cudaError_t error = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, ordinal);
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, ordinal);
  if (error == cudaSuccess)
    error = cudaDeviceGetAttribute(&device->multiprocessors, cudaDevAttrMultiProcessorCount, ordinal);
  if (error == cudaSuccess)
    error = cudaDeviceGetAttribute(&device->shared_bytes, cudaDevAttrMaxSharedMemoryPerMultiprocessor, ordinal);
  if (error != cudaSuccess) {
    std::snprintf(err, QM_ERROR_SIZE, "CUDA device %d: %s", ordinal, cudaGetErrorString(error));
    return QM_UNSUPPORTED;
  }
  device->sm = major * 10 + minor;
  return QM_OK;
}
