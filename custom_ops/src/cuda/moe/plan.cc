// The plan: the steps of a call and its workspace. Pure; runs without a GPU.
#include <algorithm>
#include <cstdint>

#include "cuda/common/experts_memory.h"
#include "cuda/common/layout.h"
#include "cuda/common/operators.h"
#include "cuda/moe/heuristics.h"
#include "cuda/moe/validate.h"

namespace quantmoe {
namespace {

// Whether moe_gemm_wgmma.cuh can address the rows: in pieces of 16 bytes, with 32 bits.
bool addresses(int64_t rows, int64_t columns) { return rows * ceil_div(columns, 64) <= UINT32_MAX / 8; }
// Whether that reads the weights.
bool on_wgmma(const qm_projection& w) { return kind_of(w) != WeightKind::kFloat; }
int32_t to_int(int64_t value) { return static_cast<int32_t>(value); }

// Hands out parts of the workspace.
struct Workspace {
  uint64_t end = 0;
  uint64_t take(uint64_t bytes) {
    const uint64_t at = end;
    end += (bytes + 255) / 256 * 256;
    return at;
  }
};

// Rows of activations between two steps; columns in 16 bits each.
struct StepRows {
  uint64_t at;
  int64_t count, columns;
};

// A step that reads x, which is then what it wrote.
void append(LayerPlan* plan, int kind, PlanStep step, StepRows* x, const StepRows& out) {
  step.kind = kind;
  step.cluster = std::max(step.cluster, 1);
  if (kind == kStepGateUp || kind == kStepDown || kind == kStepLinear) step.block = threads_of(plan->path, step.panels);
  step.grid_y = std::max(step.grid_y, 1);
  step.block_y = std::max(step.block_y, 1);
  step.in = x->at, step.in_rows = to_int(x->count), step.in_columns = to_int(x->columns);
  step.out = out.at, step.out_rows = to_int(out.count), step.out_columns = to_int(out.columns);
  // A kernel that reads the call's x before a product waits for what came before the call (launcher.h), and for all
  // copies of experts. Later kernels may then read them before they wait.
  const bool first = plan->step_count == 0 || plan->steps[plan->step_count - 1].kind == kStepFill;
  step.dependent = kind != kStepRound && kind != kStepGather && (kind != kStepRoute || !first);
  plan->steps[plan->step_count++] = step;
  *x = out;
}

// moe_round of rows of so many values. With few rows the block that is quickest with one, else as many rows as there
// can be at once.
PlanStep round_step(int64_t rows, int columns, int packed) {
  PlanStep step{};
  step.packed = packed;
  step.block = rows < 1024 ? std::min(kRoundThreads, (columns + 255) / 256 * 32) : 32;
  step.block_y = rows < 1024 ? 1 : kRoundThreads / 32;
  step.grid = to_int(ceil_div(rows, step.block_y));
  return step;
}
// Of 64 columns of packed activations.
int packed_columns(const qm_projection& weights, const MarlinRow& row) {
  return row.units * packed_unit_bytes(kind_of(weights)) / 2;
}

// moe_gather.
PlanStep gather_step(int64_t rows) {
  PlanStep step{};
  step.block = 256;
  step.grid = to_int(rows);
  return step;
}

// moe_quantize. With few rows 8 columns a thread, else up to 32, which it asks for at once.
PlanStep quantize_step(int64_t rows, int64_t columns) {
  PlanStep step{};
  step.block = 32;
  while (step.block < kQuantizeThreads && step.block * (rows < 1024 ? 8 : 32) < columns) step.block *= 2;
  step.block_y = kQuantizeThreads / step.block;
  step.grid = to_int(ceil_div(rows, step.block_y));
  return step;
}

// A layer's call.
struct PlannedLayer {
  const MoEProblem& problem;
  const qm_cuda_device& device;
  MarlinRow w13{}, w2{};
  int64_t pairs;
  int path;
  bool fp8, wgmma;  // fp8: on wgmma, too
  PlanStep gate_up, down;

  PlannedLayer(const MoEProblem& problem_, const qm_cuda_device& device_) : problem(problem_), device(device_) {
    marlin_row_of(problem.moe, 13, &w13);
    marlin_row_of(problem.moe, 2, &w2);
    pairs = problem.tokens * problem.top_k;
    const bool decode = problem.tokens <= kDecodeTokens && pairs <= kDecodePairs &&
                        decode_fits({device, problem.moe.w13, w13}) && decode_fits({device, problem.moe.w2, w2});
    const bool many = !decode && device.sm == 90 && mean() > 5 && on_wgmma(problem.moe.w13) && on_wgmma(problem.moe.w2);
    fp8 = many && problem.moe.gated && takes_fp8(problem.moe.w13) && takes_fp8(problem.moe.w2);
    wgmma = many && (fp8 || addresses(pairs, std::max(w13.columns, problem.moe.intermediate_size)));
    path = decode ? kPathDecode : fp8 ? kPathFp8 : wgmma ? kPathWgmma : kPathStream;
    choose_products();
  }

  // Tokens an expert gets on average decide the tile; of a slice, others have their share of the pairs.
  double mean() const {
    return static_cast<double>(pairs) / static_cast<double>(std::max<int64_t>(1, problem.moe.num_experts));
  }
  bool decodes() const { return path == kPathDecode; }
  // Rounded x is stored as wgmma reads it.
  bool rounds_stored() const { return path == kPathWgmma && !problem.moe.w13.perm; }
  int64_t sorted_rows() const { return fp8 ? fp8_rows(pairs, problem.local_experts) : pairs; }
  int64_t hidden_columns() const {
    return fp8 ? fp8_groups(w2.units) * 128 : wgmma ? w2.units * 64 : w13.panels * (problem.moe.gated ? 8 : 16);
  }

  void choose_products() {
    const int64_t most_experts = std::min<int64_t>(pairs, problem.local_experts);
    const ProductWeights of_gate_up{device, problem.moe.w13, w13}, of_down{device, problem.moe.w2, w2};
    ProductLoad gate_up_load{path, first_product(path, problem.moe.gated), most_experts, mean(), 4};
    gate_up = choose_gemm(of_gate_up, gate_up_load);
    const ProductLoad down_load{path, Product::kDown, most_experts, mean(), gate_up.n_tiles};
    down = choose_gemm(of_down, down_load);
    if (down.n_tiles < gate_up.n_tiles && path == kPathStream) {  // both take the same list of tiles
      gate_up_load.most_tiles = down.n_tiles;
      gate_up = choose_gemm(of_gate_up, gate_up_load);
    }
  }
};

// Parts of the workspace that hold activations.
struct Buffers {
  uint64_t hidden, rounded, packed_hidden, gathered, partial, prepared;
};
Buffers allocate(const PlannedLayer& layer, LayerPlan* plan) {
  const qm_moe& moe = layer.problem.moe;
  const uint64_t pairs = layer.pairs, rows = layer.sorted_rows();
  Workspace workspace;
  Buffers buffers{};
  buffers.hidden = workspace.take(rows * layer.hidden_columns() * 2);
  if (rounds_input(moe.w13) && (moe.w13.perm || !layer.wgmma))
    buffers.rounded = workspace.take((rounds_pairs(moe) ? pairs : layer.problem.tokens) *
                                     (layer.gate_up.packed ? packed_columns(moe.w13, layer.w13) : moe.hidden_size) * 2);
  if (layer.down.packed) buffers.packed_hidden = workspace.take(pairs * packed_columns(moe.w2, layer.w2) * 2);
  if (moe.w13.perm) buffers.gathered = workspace.take(pairs * layer.w13.columns * 2);
  if (!layer.decodes()) {
    buffers.partial = workspace.take(pairs * moe.hidden_size * (layer.wgmma ? 2 * layer.down.warps_k : 4));
    const bool shared = layer.down.n_tiles == layer.gate_up.n_tiles;
    plan->max_tiles = most_tiles(layer.pairs, layer.problem.local_experts, layer.gate_up.n_tiles);
    plan->down_max_tiles = most_tiles(layer.pairs, layer.problem.local_experts, layer.down.n_tiles);
    uint64_t tiles = plan->max_tiles + 1ull;
    if (!shared || !layer.device.multiprocessors) tiles += plan->down_max_tiles + 1ull;
    plan->tiles = workspace.take(kTileBytes * tiles);
    plan->down_tiles = shared ? plan->tiles : plan->tiles + kTileBytes * (plan->max_tiles + 1ull);
    plan->sorted_pairs = workspace.take(8 * rows);
    if (layer.fp8) plan->positions = workspace.take(4 * pairs);
    const bool by_pair = moe.w13.perm || (rounds_input(moe.w13) && rounds_pairs(moe));
    if (layer.fp8)  // codes and scales of x, then of h
      buffers.prepared = workspace.take(132 * rows * std::max(fp8_groups(layer.w13.units), fp8_groups(layer.w2.units)));
    else if (layer.wgmma)
      buffers.prepared = workspace.take((by_pair ? pairs : layer.problem.tokens) * layer.w13.units * 128);
  }
  if (layer.problem.slots) {
    plan->where = workspace.take(16 * layer.problem.local_experts);
    plan->copies = workspace.take(kCopyBytes * (layer.problem.local_experts + 1));
    if (layer.problem.host_share) plan->kept = workspace.take(kKeptIds + 4 * pairs);
  }
  plan->workspace_bytes = workspace.end;
  return buffers;
}

// resolve_experts and fill_experts. The first product waits before it lets down start, so down finds all copies, too.
void append_cache(const PlannedLayer& layer, StepRows* x, LayerPlan* plan) {
  PlanStep resolve{}, fill{};
  resolve.grid = 1;
  resolve.block = kRouteThreads;
  resolve.shared_bytes = to_int(4 * (layer.problem.local_experts + layer.problem.slots));
  append(plan, kStepResolve, resolve, x, *x);
  fill.grid = std::max(layer.device.multiprocessors, 1);
  fill.block = kFillThreads;
  append(plan, kStepFill, fill, x, *x);
}

// moe_route, whose blocks after the first cluster bring x into the order in which wgmma reads it, unless it is.
void append_route(const PlannedLayer& layer, const Buffers& buffers, StepRows* x, LayerPlan* plan) {
  PlanStep step{};
  const bool on_wgmma = layer.fp8 || layer.path == kPathWgmma;  // sm_90a, which has clusters
  const bool ordered = layer.gate_up.warps_k == 0 || layer.down.warps_k == 0;
  step.cluster = on_wgmma && layer.pairs > kRouteThreads ? 8 : 1;
  step.block = kRouteThreads;
  step.shared_bytes = to_int(layer.problem.local_experts * 12 + (ordered ? layer.pairs * 4 : 0));
  StepRows out = *x;
  int64_t prepare_blocks = 0;
  if (layer.path == kPathWgmma && x->at != buffers.prepared) {
    out = {buffers.prepared, x->count, layer.w13.units * 64};
    prepare_blocks = ceil_div(ceil_div(out.count * out.columns / 32, kRouteThreads), step.cluster) * step.cluster;
  }
  step.grid = step.cluster + to_int(prepare_blocks);
  step.ordered = ordered;
  append(plan, kStepRoute, step, x, out);
}

// h, as gate_up wrote it, to what down multiplies.
void append_hidden(const PlannedLayer& layer, const Buffers& buffers, StepRows* hidden, LayerPlan* plan) {
  const qm_projection& weights = layer.problem.moe.w2;
  if (layer.fp8) {
    // Where a block of gate_up has all it takes to know the scales, it has quantized h.
    if (weights.activation_format == k_activation_format_fp8_token)
      append(plan, kStepQuantizeHidden, quantize_step(hidden->count, hidden->columns), hidden,
             {buffers.prepared, hidden->count, hidden->columns});
  } else if (rounds_input(weights)) {
    const bool packed = layer.down.packed;
    append(plan, kStepRoundHidden,
           round_step(layer.pairs, packed ? layer.w2.units * 64 : to_int(hidden->columns), packed), hidden,
           packed ? StepRows{buffers.packed_hidden, layer.pairs, packed_columns(weights, layer.w2)} : *hidden);
  }
}

void append_steps(const PlannedLayer& layer, const Buffers& buffers, LayerPlan* plan) {
  const qm_moe& moe = layer.problem.moe;
  const int64_t tokens = layer.problem.tokens;
  StepRows x{kCallers, tokens, moe.hidden_size};
  if (layer.problem.slots) append_cache(layer, &x, plan);
  if (rounds_input(moe.w13) && !layer.fp8) {
    const bool stored = layer.rounds_stored(), packed = layer.gate_up.packed;
    const int values = stored || packed ? layer.w13.units * 64 : moe.hidden_size;
    const StepRows out{stored ? buffers.prepared : buffers.rounded, rounds_pairs(moe) ? layer.pairs : tokens,
                       packed ? packed_columns(moe.w13, layer.w13) : values};
    append(plan, kStepRound, round_step(out.count, values, packed), &x, out);
  }
  if (moe.w13.perm)
    append(plan, kStepGather, gather_step(layer.pairs), &x, {buffers.gathered, layer.pairs, layer.w13.columns});
  if (!layer.decodes()) append_route(layer, buffers, &x, plan);
  if (layer.fp8)
    append(plan, kStepQuantize, quantize_step(tokens, x.columns), &x,
           {buffers.prepared, layer.sorted_rows(), x.columns});
  append(plan, kStepGateUp, layer.gate_up, &x, {buffers.hidden, layer.sorted_rows(), layer.hidden_columns()});
  append_hidden(layer, buffers, &x, plan);
  const bool combines = !layer.decodes();
  append(plan, kStepDown, layer.down, &x,
         {combines ? buffers.partial : kCallers, combines ? layer.pairs : tokens, moe.hidden_size});
  if (combines) {
    PlanStep step{};
    step.block = kCombineThreads;
    step.grid = to_int(tokens);
    step.grid_y = to_int(ceil_div(moe.hidden_size, 8 * kCombineThreads));
    step.warps_k = layer.wgmma ? layer.down.warps_k : 1;
    append(plan, kStepCombine, step, &x, {kCallers, tokens, moe.hidden_size});
  }
  if (layer.problem.host_share) {
    PlanStep step{};
    step.block = kAddThreads;
    step.grid = to_int(tokens);
    step.grid_y = to_int(ceil_div(moe.hidden_size, 8 * kAddThreads));
    append(plan, kStepAddHost, step, &x, x);
  }
  // The router's weight multiplies x when it is first written or read, or what down has.
  for (PlanStep* step = plan->steps; step < plan->steps + plan->step_count; ++step) {
    step->weighted = moe.apply_router_weight_on_input
                         ? step->kind == kStepRound || step->kind == kStepQuantize || step->kind == kStepGateUp
                         : step->kind == kStepDown;
    if (step->weighted) break;
  }
}

// Words of a row, where they are known.
int check_words(const char* name, const qm_shape& shape, const MarlinRow& row, char* err) {
  const int64_t words = static_cast<int64_t>(row.bytes / 4);
  if (shape.rank == 2 && (shape.sizes[1] < 0 || shape.sizes[1] == words)) return QM_OK;
  return fail(err, QM_INVALID, "%s has shape [%lld, %lld], expected [experts, %lld int32 words] for these attributes",
              name, static_cast<long long>(shape.sizes[0]), static_cast<long long>(shape.sizes[1]),
              static_cast<long long>(words));
}

// The instance of a linear's kernel.
PlanStep choose_linear(const ProductWeights& weights, int path, int64_t rows) {
  const bool floats = kind_of(weights.w) == WeightKind::kFloat;
  if (path == kPathDense) return choose_dense(weights, rows);
  if (path == kPathDecode && !packs(weights.device.sm, weights.w))
    if (const PlanStep step = choose_linear_decode(weights); step.shared_bytes) return step;
  if (path == kPathStream && floats) return choose_float_stream(weights, rows);
  return choose_gemm(weights, {path, Product::kDown, 1, static_cast<double>(rows), 4});
}

}  // namespace

int plan_moe(const void* node, const qm_cuda_call& call, const qm_cuda_device& device, qm_cuda_node_plan& made,
             char* err) {
  const qm_tensor* const inputs = call.inputs;
  const MoEProblem problem(*static_cast<const qm_moe*>(node), call);
  QM_TRY(validate_moe(problem, device, err));
  const PlannedLayer layer(problem, device);
  QM_TRY(check_words("w13", inputs[QuantMoE_w13].shape, layer.w13, err));
  QM_TRY(check_words("w2", inputs[QuantMoE_w2].shape, layer.w2, err));
  if (const int64_t others = inputs[QuantMoE_w2].shape.sizes[0]; others != problem.local_experts)
    return fail(err, QM_INVALID, "w13 has %lld experts and w2 %lld, expected the same number",
                static_cast<long long>(problem.local_experts), static_cast<long long>(others));
  LayerPlan& plan = make_plan<LayerPlan>(made);
  plan.path = layer.path;
  append_steps(layer, allocate(layer, &plan), &plan);
  made.workspace_bytes = plan.workspace_bytes;
  made.slot_bytes = slot_bytes(layer.w13, layer.w2);
  made.state_bytes = cache_state_bytes(problem.local_experts, problem.slots);
  return QM_OK;
}

int plan_linear(const void* node, const qm_cuda_call& call, const qm_cuda_device& device, qm_cuda_node_plan& made,
                char* err) {
  const qm_tensor* const inputs = call.inputs;
  const LinearProblem problem(*static_cast<const qm_linear*>(node), inputs);
  const qm_linear& linear = problem.linear;
  QM_TRY(validate_linear(problem, device, err));
  LayerPlan* const plan = &make_plan<LayerPlan>(made);
  MarlinRow row{};
  marlin_row_of(moe_of(linear), 2, &row);
  QM_TRY(check_words("w", inputs[QuantLinear_w].shape, row, err));
  if (const int64_t count = inputs[QuantLinear_w].shape.sizes[0]; count != 1)
    return fail(err, QM_INVALID, "w has %lld rows, expected 1", static_cast<long long>(count));
  const ProductWeights weights{device, linear.w, row};
  const int64_t rows = problem.rows;
  const bool floats = kind_of(linear.w) == WeightKind::kFloat;
  const bool decode =
      rows <= kDecodeTokens && (floats ? choose_linear_decode(weights).shared_bytes > 0 : decode_fits(weights));
  const bool dense = !decode && device.sm == 90 && (!packs(device.sm, linear.w) || rows > 64);
  plan->path = decode ? kPathDecode : dense ? kPathDense : kPathStream;
  const PlanStep product = choose_linear(weights, plan->path, rows);
  if (plan->path == kPathStream) plan->max_tiles = to_int(ceil_div(rows, 8 * product.n_tiles));

  Workspace workspace;
  StepRows x{kCallers, rows, linear.in_features};
  if (rounds_input(linear.w)) {
    const int columns = product.packed ? packed_columns(linear.w, row) : linear.in_features;
    append(plan, kStepRound, round_step(rows, product.packed ? row.units * 64 : linear.in_features, product.packed), &x,
           {workspace.take(static_cast<uint64_t>(rows) * columns * 2), rows, columns});
  }
  if (linear.w.perm)
    append(plan, kStepGather, gather_step(rows), &x,
           {workspace.take(static_cast<uint64_t>(rows) * linear.in_features * 2), rows, row.columns});
  append(plan, kStepLinear, product, &x, {kCallers, rows, linear.out_features});
  made.workspace_bytes = workspace.end;
  return QM_OK;
}

}  // namespace quantmoe
