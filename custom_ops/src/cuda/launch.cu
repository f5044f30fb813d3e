// Plan to kernel launches.
#include <algorithm>
#include <cstdio>
#include <exception>
#include <vector>

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

Weights WeightsOf(const void* rows, const MarlinRow& row, const qm_projection& w) {
  Weights out{};
  out.rows = static_cast<const uint8_t*>(rows);
  out.row_bytes = row.bytes;
  out.scales_at = static_cast<uint32_t>(row.scales_at);
  out.zeros_at = w.zero_points ? static_cast<uint32_t>(row.zeros_at) : 0;
  out.globals_at = static_cast<uint32_t>(row.globals_at);
  out.bias_at = w.bias ? static_cast<uint32_t>(row.bias_at) : 0;
  out.input_at = HasInputScale(w) ? static_cast<uint32_t>(row.input_at) : 0;
  out.panels = row.panels;
  out.units = row.units;
  out.blocks = row.blocks;
  out.block_shift = row.block_shift;
  out.scale_type = w.scale_type;
  out.scale_bytes = row.scale_bytes;
  out.zero_bytes = 16 * row.per_block;
  out.two_groups = row.per_block == 2;
  return out;
}

// The products of a plan; null: none is compiled that is what it says.
struct Products {
  GemmKernel gate_up, down;
};
template <typename T>
GemmKernel KernelOf(Product product, const qm_projection& w, int path, const qm_cuda_gemm& g) {
  const bool down = product == Product::kDown;
  switch (path) {
    case QM_CUDA_DECODE:
    case QM_CUDA_STREAM:
      return g.packed ? PackedKernel<T>(product, path, w, g)
             : down   ? DownKernel<T>(path, w, g)
                      : GateUpKernel<T>(path, w, g);
    case QM_CUDA_WGMMA: return g.packed ? nullptr : WgmmaKernel<T>(product, w, g);
    case QM_CUDA_FP8: return g.packed ? nullptr : Fp8Kernel<T>(product, w, g);
    default: return nullptr;
  }
}
// But for QM_CUDA_DENSE.
template <typename T>
GemmKernel LinearGemm(const qm_projection& w, const qm_cuda_plan& plan) {
  if (KindOf(w) == WeightKind::kFloat) return FloatKernel<T>(plan.path, plan.w2);
  if (plan.path == QM_CUDA_DECODE && !plan.w2.packed)
    if (const GemmKernel kernel = LinearDecodeKernel<T>(w, plan.w2)) return kernel;
  return plan.path <= QM_CUDA_STREAM ? KernelOf<T>(Product::kDown, w, plan.path, plan.w2) : nullptr;
}
template <typename T>
Products ProductsOf(const qm_moe& m, const qm_cuda_plan& plan) {
  return {KernelOf<T>(Product::kGateUp, m.w13, plan.path, plan.w13),
          KernelOf<T>(Product::kDown, m.w2, plan.path, plan.w2)};
}
// As an error of a launch.
int Check(bool kernel, const char* name, const qm_cuda_plan& plan, const qm_cuda_gemm& g, char* err) {
  if (kernel) return QM_OK;
  std::snprintf(err, QM_ERROR_SIZE,
                "the plan names a kernel that is not compiled: %s of path %d with %d panels, %d n_tiles, %d stages, "
                "packed %d",
                name, plan.path, g.panels, g.n_tiles, g.stages, g.packed);
  return QM_INVALID;
}
int Check(const Products& products, const qm_cuda_plan& plan, char* err) {
  const int status = Check(products.gate_up, "w13", plan, plan.w13, err);
  return status ? status : Check(products.down, "w2", plan, plan.w2, err);
}

// Whether the orders that launches gather by have each of `features` once.
int CheckOrders(const void* rows, const MarlinRow& row, int64_t experts, int features, const char* name,
                cudaStream_t stream, char* err) try {
  std::vector<int> order(features);
  for (int64_t i = 0; i < experts * row.orders; ++i) {
    const int64_t expert = i / row.orders;
    const auto* from =
        static_cast<const uint8_t*>(rows) + expert * row.bytes + row.perm_at + i % row.orders * row.order_bytes;
    cudaError_t e = cudaMemcpyAsync(order.data(), from, 4ull * features, cudaMemcpyDefault, stream);
    if (e == cudaSuccess) e = cudaStreamSynchronize(stream);
    if (int status = Report(e, err)) return status;
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

// Rounds activations of `rows` rows for w; p has what depends on whose they are.
template <typename T>
void Round(Launcher& launcher, RoundParams p, const Weights& weights, const qm_projection& w, const MarlinRow& row,
           int rows, bool dependent) {
  p.out_rows = rows;
  p.format = w.activation_format;
  p.rows = weights.rows;
  p.row_bytes = weights.row_bytes;
  p.input_at = weights.input_at;
  p.with_input_scale = WithFacts(KindOf(w), [](auto f) { return f.kRoundsScaled; });
  p.pre_at = w.pre_scale ? static_cast<uint32_t>(row.pre_at) : 0;
  // With few rows the block that is quickest with one, else as many rows as there can be at once.
  const dim3 threads =
      rows < 1024 ? dim3(std::min(kRoundThreads, (p.columns + 255) / 256 * 32)) : dim3(32, kRoundThreads / 32);
  launcher.Run(MoeRound<T>, p, dim3((rows + threads.y - 1) / threads.y), threads, 0, dependent);
}

// The call's x rounded for the first product; by_expert: a row a pair.
template <typename T>
void RoundX(Launcher& launcher, const qm_cuda_plan& plan, bool packed, uint8_t* workspace, const qm_projection& w,
            const MarlinRow& row, bool by_expert, GemmParams* gemm) {
  RoundParams round{};
  round.routing = gemm->routing;
  round.by_expert = by_expert;
  round.weight_here = gemm->weight_here;
  round.x = gemm->x;
  round.out_stored = plan.path == QM_CUDA_WGMMA && !w.perm;
  round.out = workspace + (round.out_stored ? plan.prepared : plan.rounded);
  round.x_divisor = by_expert ? gemm->routing.top_k : 1;
  round.x_columns = round.features = gemm->x_columns;
  round.packed = packed ? PackedUnitBytes(KindOf(w)) : 0;
  round.columns = round.out_stored || packed ? row.units * kUnit : gemm->x_columns;
  Round<T>(launcher, round, gemm->weights, w, row, gemm->routing.tokens * round.x_divisor, false);
  gemm->x = round.out;
  gemm->x_columns = packed ? row.units * round.packed / 2 : round.columns;
  gemm->weight_here = false;
  if (by_expert) gemm->x_divisor = 1;
}

// x in act-order, a row a pair.
void GatherX(Launcher& launcher, const qm_cuda_plan& plan, uint8_t* workspace, const MarlinRow& row, GemmParams* gemm) {
  GatherParams gather{};
  gather.routing = gemm->routing;
  gather.x_divisor = gemm->x_divisor;
  gather.rows = gemm->weights.rows;
  gather.row_bytes = gemm->weights.row_bytes;
  gather.perm_at = static_cast<uint32_t>(row.perm_at);
  gather.x = static_cast<const uint16_t*>(gemm->x);
  gather.out = reinterpret_cast<uint16_t*>(workspace + plan.gathered);
  gather.columns = gemm->x_columns;
  gather.out_columns = row.columns;
  gather.half = row.columns / row.orders;
  gather.order_words = static_cast<int>(row.order_bytes / 4);
  launcher.Run(MoeGather, gather, dim3(gemm->routing.tokens * gemm->routing.top_k), 256, 0, false);
  gemm->x = gather.out;
  gemm->x_columns = row.columns;
  gemm->x_divisor = 1;
}

// Makes the list of tiles, another for down if it is given and its tiles differ, and, for wgmma, a copy of x as it is
// read there (rows of x_columns values) if x is not one.
void Route(Launcher& launcher, const qm_cuda_plan& plan, uint8_t* workspace, int tile_pairs, int rows, int x_columns,
           bool dependent, GemmParams* gemm, GemmParams* down = nullptr) {
  const bool wgmma = plan.path == QM_CUDA_WGMMA;
  RouteParams route{};
  route.routing = gemm->routing;
  Tile* tiles = reinterpret_cast<Tile*>(workspace + plan.tiles);
  // wgmma's M, which fp8 has tokens as, is 64.
  const int multiple = plan.path == QM_CUDA_FP8 ? 64 : 8;
  route.lists[0] = {tiles, plan.max_tiles, tile_pairs, multiple};
  route.list_count = 1;
  route.by_size = plan.path >= QM_CUDA_WGMMA;
  route.ordered = plan.w13.warps_k == 0 || plan.w2.warps_k == 0;
  if (down && plan.w2.n_tiles != plan.w13.n_tiles) {
    down->tiles = tiles += plan.max_tiles + 1;
    down->max_tiles = MostTiles(static_cast<int64_t>(gemm->routing.tokens) * gemm->routing.top_k,
                                gemm->routing.local_experts, plan.w2.n_tiles);
    route.lists[route.list_count++] = {tiles, down->max_tiles, 8 * plan.w2.n_tiles, multiple};
  }
  int prepare_blocks = 0;
  if (wgmma && gemm->x != workspace + plan.prepared) {
    PrepareParams& prepare = route.prepare;
    prepare.x = static_cast<const uint16_t*>(gemm->x);
    prepare.out = reinterpret_cast<uint16_t*>(workspace + plan.prepared);
    prepare.rows = rows;
    prepare.columns = x_columns;
    prepare.out_columns = gemm->weights.units * kUnit;
    gemm->x = prepare.out;
    gemm->x_columns = prepare.out_columns;
    prepare_blocks = static_cast<int>(
        (static_cast<int64_t>(prepare.rows) * prepare.out_columns / 32 + kRouteThreads - 1) / kRouteThreads);
  }
  route.sorted_pairs = reinterpret_cast<SortedPair*>(workspace + plan.sorted_pairs);
  route.align = plan.path == QM_CUDA_FP8 ? 8 : 1;
  if (plan.path == QM_CUDA_FP8) route.positions = reinterpret_cast<int*>(workspace + plan.positions);
  // sm_90a, which has clusters
  route.cluster = plan.path >= QM_CUDA_WGMMA && route.routing.tokens * route.routing.top_k > kRouteThreads ? 8 : 1;
  prepare_blocks = (prepare_blocks + route.cluster - 1) / route.cluster * route.cluster;
  const int pairs = route.ordered ? route.routing.tokens * route.routing.top_k : 0;
  launcher.Run(MoeRoute, route, dim3(route.cluster + prepare_blocks), kRouteThreads,
               route.routing.local_experts * 12 + pairs * 4, dependent, route.cluster);
}

// x of the product as e4m3 codes, then scales, in plan.prepared; h: in the order of sorted pairs already.
template <typename T>
void Quantize(Launcher& launcher, const qm_cuda_plan& plan, uint8_t* workspace, const qm_projection& w, bool h,
              GemmParams* gemm) {
  const bool grouped = w.activation_format == k_activation_format_fp8_group128;
  QuantizeParams quantize{};
  quantize.routing = gemm->routing;
  quantize.x = gemm->x;
  quantize.codes = workspace + plan.prepared;
  quantize.columns = gemm->x_columns;
  quantize.groups = Fp8Groups(gemm->weights.units);
  quantize.x_rows = gemm->x_rows;
  quantize.scales =
      reinterpret_cast<float*>(quantize.codes + static_cast<int64_t>(gemm->x_rows) * quantize.groups * 128);
  quantize.positions = h ? nullptr : reinterpret_cast<const int*>(workspace + plan.positions);
  quantize.weight_here = gemm->weight_here && !h;
  quantize.rows = gemm->weights.rows;
  quantize.row_bytes = gemm->weights.row_bytes;
  quantize.input_at = gemm->weights.input_at;
  quantize.sorted_pairs = gemm->sorted_pairs;
  quantize.tiles = gemm->tiles;
  quantize.max_tiles = gemm->max_tiles;
  quantize.from_rows = h ? gemm->x_rows : gemm->routing.tokens;
  // With few rows 8 columns a thread, else up to 32, which it asks for at once.
  int of_row = 32;
  while (of_row < kQuantizeThreads && of_row * (quantize.from_rows < 1024 ? 8 : 32) < quantize.columns) of_row *= 2;
  const dim3 threads(of_row, kQuantizeThreads / of_row);
  launcher.Run(grouped ? MoeQuantize<T, true> : MoeQuantize<T, false>, quantize,
               dim3((quantize.from_rows + threads.y - 1) / threads.y), threads, 0, true);
  gemm->x = quantize.codes;
  gemm->x_scales = quantize.scales;
  gemm->x_grouped = grouped;
  if (quantize.weight_here) gemm->weight_here = false;
}

template <typename T>
void Combine(Launcher& launcher, const Routing& routing, const void* partial, int parts, bool in_float, int columns,
             void* out) {
  CombineParams combine{};
  combine.routing = routing;
  combine.partial = partial;
  combine.out = out;
  combine.columns = columns;
  combine.parts = parts;
  launcher.Run(in_float ? MoeCombine<T, float> : MoeCombine<T, T>, combine,
               dim3(routing.tokens, (columns + 8 * kCombineThreads - 1) / (8 * kCombineThreads)), kCombineThreads, 0,
               true);
}

template <typename T>
int Launch(const qm_cuda_problem& p, const qm_cuda_plan& plan, const qm_cuda_tensors& t, cudaStream_t stream,
           char* err) {
  const qm_moe& m = p.moe;
  const Products products = ProductsOf<T>(m, plan);
  if (int status = Check(products, plan, err)) return status;
  MarlinRow row13{}, row2{};
  MarlinRowOf(m, 13, &row13);
  MarlinRowOf(m, 2, &row2);
  Launcher launcher{stream};
  uint8_t* workspace = static_cast<uint8_t*>(t.workspace);
  const bool decode = plan.path == QM_CUDA_DECODE, fp8 = plan.path == QM_CUDA_FP8;
  const bool wgmma = plan.path == QM_CUDA_WGMMA || fp8;
  const int pairs = static_cast<int>(p.tokens * p.top_k);

  Routing routing{};
  routing.topk_ids = t.topk_ids;
  routing.topk_weights = t.topk_weights;
  routing.id_bytes = p.id_bytes;
  routing.tokens = static_cast<int>(p.tokens);
  routing.top_k = static_cast<int>(p.top_k);
  routing.expert_offset = m.expert_offset;
  routing.local_experts = static_cast<int>(p.local_experts);

  GemmParams gate_up{};
  gate_up.weights = WeightsOf(t.w13, row13, m.w13);
  gate_up.routing = routing;
  gate_up.activation = Activation{m.activation, m.gated, m.swiglu_alpha, m.swiglu_limit};
  gate_up.x = t.hidden_states;
  gate_up.x_columns = m.hidden_size;
  gate_up.x_divisor = routing.top_k;
  gate_up.out = workspace + plan.hidden;
  gate_up.out_columns = fp8     ? Fp8Groups(row2.units) * 128
                        : wgmma ? row2.units * kUnit
                                : row13.panels * (m.gated ? 8 : 16);
  gate_up.weight_here = m.apply_router_weight_on_input;
  gate_up.tiles = reinterpret_cast<const Tile*>(workspace + plan.tiles);
  gate_up.max_tiles = plan.max_tiles;
  gate_up.sorted_pairs = reinterpret_cast<const SortedPair*>(workspace + plan.sorted_pairs);
  gate_up.shape = plan.w13;
  gate_up.x_rows = static_cast<int>(Fp8Rows(pairs, routing.local_experts));
  // Where a block has all it takes to know the scales. Codes and scales of h take less than h in 16 bits.
  if (fp8 && m.w2.activation_format != k_activation_format_fp8_token) {
    gate_up.h_scales =
        reinterpret_cast<float*>(workspace + plan.hidden + static_cast<int64_t>(gate_up.x_rows) * gate_up.out_columns);
    if (HasInputScale(m.w2)) gate_up.h_stored = static_cast<const uint8_t*>(t.w2) + row2.input_at;
    gate_up.h_row_bytes = row2.bytes;
  }

  GemmParams down = gate_up;
  down.weights = WeightsOf(t.w2, row2, m.w2);
  down.x = gate_up.out;
  down.x_columns = gate_up.out_columns;
  down.x_divisor = 1;
  const bool combine = !decode || plan.w2.warps_k == 0;
  down.out = combine ? workspace + plan.partial : t.output;
  down.out_float = !wgmma;
  down.out_columns = m.hidden_size;
  down.weight_here = !m.apply_router_weight_on_input;
  down.shape = plan.w2;

  bool first = true;  // these do not overlap what came before the call
  if (Rounds(m.w13) && !fp8) {
    RoundX<T>(launcher, plan, plan.w13.packed, workspace, m.w13, row13, RoundsPairs(m), &gate_up);
    first = false;
  }
  if (m.w13.perm) {
    GatherX(launcher, plan, workspace, row13, &gate_up);
    first = false;
  }
  if (!decode) {
    Route(launcher, plan, workspace, 8 * plan.w13.n_tiles, gate_up.x_divisor == 1 ? pairs : routing.tokens,
          gate_up.x_columns, !first, &gate_up, &down);
  }
  if (fp8) Quantize<T>(launcher, plan, workspace, m.w13, false, &gate_up);
  const int threads = wgmma ? kWgmmaThreads : kThreads;
  launcher.Run(products.gate_up, gate_up, dim3(plan.w13.grid), threads, plan.w13.shared_bytes, true);
  if (gate_up.h_scales) {
    down.x_scales = gate_up.h_scales;
    down.x_grouped = !gate_up.h_stored;
  } else if (fp8) {
    Quantize<T>(launcher, plan, workspace, m.w2, true, &down);
  } else if (Rounds(m.w2)) {
    RoundParams round{};
    round.routing = routing;
    round.by_expert = true;  // rows of foreign experts were not written
    round.x = round.out = gate_up.out;
    round.x_divisor = 1;
    round.x_columns = round.columns = gate_up.out_columns;
    if (plan.w2.packed) {
      round.packed = PackedUnitBytes(KindOf(m.w2));
      down.x = round.out = workspace + plan.packed_hidden;
      round.columns = row2.units * kUnit;
      down.x_columns = row2.units * round.packed / 2;
    }
    round.features = m.intermediate_size;
    round.x_stored = round.out_stored = wgmma;
    if (wgmma) {
      round.sorted_pairs = gate_up.sorted_pairs;
      round.tiles = gate_up.tiles;
      round.max_tiles = plan.max_tiles;
    }
    Round<T>(launcher, round, down.weights, m.w2, row2, pairs, true);
  }
  launcher.Run(products.down, down, dim3(plan.w2.grid), threads, plan.w2.shared_bytes, true, plan.w2.cluster);
  if (combine) Combine<T>(launcher, routing, down.out, wgmma ? plan.w2.warps_k : 1, !wgmma, m.hidden_size, t.output);
  return Report(launcher.error, err);
}

template <typename T>
int CheckLinear(const qm_projection& w, const qm_cuda_plan& plan, char* err) {
  const bool there =
      plan.path == QM_CUDA_DENSE ? DenseKernel<T>(w, plan.w2) != nullptr : LinearGemm<T>(w, plan) != nullptr;
  return Check(there, "w", plan, plan.w2, err);
}

// Multiplies x, rows of x_columns values, on wgmma.
template <typename T>
int RunDense(Launcher& launcher, const GemmParams& gemm, const qm_projection& w, char* err) {
  const qm_cuda_gemm& shape = gemm.shape;
  LinearParams p{};
  p.weights = gemm.weights;
  p.out = gemm.out;
  p.rows = gemm.routing.tokens;
  p.out_columns = gemm.out_columns;
  p.width = 8 * shape.n_tiles;
  p.parts = shape.cluster;
  p.row_tiles = (p.weights.panels + shape.panels - 1) / shape.panels;
  p.tiles = p.row_tiles * ((p.rows + p.width - 1) / p.width);
  const uint8_t* rows = p.weights.rows;
  const uint32_t box = shape.panels, width = p.width, lines = BitsOf(KindOf(w));  // 128 bytes of a unit's codes
  const uint32_t scales = 8 * p.weights.scale_bytes, zeros = p.weights.zero_bytes;
  const uint64_t columns = gemm.x_columns, x_rows = p.rows, panels = p.weights.panels, units = p.weights.units,
                 blocks = p.weights.blocks;
  int status = MakeTensorMap(&p.tokens, gemm.x, 2, {columns, x_rows}, {2 * columns}, {kUnit, width}, true, err);
  if (!status)  // codes of 8 bits are swizzled already
    status = MakeTensorMap(&p.codes, rows, 1, {128, units * lines, panels}, {128, units * lines * 128},
                           {128, lines, box}, lines != 8, err);
  if (!status && KindOf(w) != WeightKind::kFloat)
    status = MakeTensorMap(&p.scales, rows + p.weights.scales_at, 1, {scales, blocks, panels},
                           {scales, blocks * scales}, {scales, 1, box}, false, err);
  if (!status && p.weights.zeros_at)
    status = MakeTensorMap(&p.zeros, rows + p.weights.zeros_at, 1, {zeros, blocks, panels}, {zeros, blocks * zeros},
                           {zeros, 1, box}, false, err);
  if (!status)
    launcher.Run(DenseKernel<T>(w, shape), p, dim3(shape.grid), LinearThreads(shape.panels), shape.shared_bytes, true,
                 shape.cluster);
  return status;
}

template <typename T>
int LaunchLinear(const qm_cuda_linear_problem& p, const qm_cuda_plan& plan, const qm_cuda_linear_tensors& t,
                 cudaStream_t stream, char* err) {
  const qm_linear& l = p.linear;
  if (int status = CheckLinear<T>(l.w, plan, err)) return status;
  MarlinRow row{};
  MarlinRowOf(MoeOf(l), 2, &row);
  Launcher launcher{stream};
  uint8_t* workspace = static_cast<uint8_t*>(t.workspace);

  GemmParams gemm{};
  gemm.weights = WeightsOf(t.w, row, l.w);
  gemm.routing.tokens = static_cast<int>(p.rows);
  gemm.routing.top_k = gemm.routing.local_experts = 1;
  gemm.x = t.x;
  gemm.x_columns = l.in_features;
  gemm.x_divisor = 1;
  gemm.out = t.y;
  gemm.out_columns = l.out_features;
  gemm.max_tiles = plan.max_tiles;
  gemm.tile_pairs = 8 * plan.w2.n_tiles;
  gemm.shape = plan.w2;

  if (Rounds(l.w)) RoundX<T>(launcher, plan, plan.w2.packed, workspace, l.w, row, true, &gemm);
  if (l.w.perm) GatherX(launcher, plan, workspace, row, &gemm);
  if (plan.path == QM_CUDA_DENSE) {
    if (int status = RunDense<T>(launcher, gemm, l.w, err)) return status;
  } else {
    launcher.Run(LinearGemm<T>(l.w, plan), gemm, dim3(plan.w2.grid), kThreads, plan.w2.shared_bytes, true,
                 plan.w2.cluster);
  }
  return Report(launcher.error, err);
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
  const Products products = problem->type == QM_BF16 ? ProductsOf<__nv_bfloat16>(problem->moe, *plan)
                                                     : ProductsOf<__half>(problem->moe, *plan);
  return Check(products, *plan, err);
}

extern "C" int qm_cuda_check_moe(const qm_cuda_problem* problem, const void* w13, void* stream, char* err) {
  MarlinRow row{};
  MarlinRowOf(problem->moe, 13, &row);
  return CheckOrders(w13, row, problem->local_experts, problem->moe.hidden_size, "w13",
                     static_cast<cudaStream_t>(stream), err);
}

extern "C" int qm_cuda_check_linear(const qm_cuda_linear_problem* problem, const void* w, void* stream, char* err) {
  MarlinRow row{};
  MarlinRowOf(MoeOf(problem->linear), 2, &row);
  return CheckOrders(w, row, 1, problem->linear.in_features, "w", static_cast<cudaStream_t>(stream), err);
}

extern "C" int qm_cuda_launch(const qm_cuda_problem* problem, const qm_cuda_plan* plan, const qm_cuda_tensors* tensors,
                              void* stream, char* err) {
  if (problem->tokens == 0) return QM_OK;
  cudaStream_t s = static_cast<cudaStream_t>(stream);
  return problem->type == QM_BF16 ? Launch<__nv_bfloat16>(*problem, *plan, *tensors, s, err)
                                  : Launch<__half>(*problem, *plan, *tensors, s, err);
}

extern "C" int qm_cuda_check_plan_linear(const qm_cuda_linear_problem* problem, const qm_cuda_plan* plan, char* err) {
  const qm_projection& w = problem->linear.w;
  return problem->type == QM_BF16 ? CheckLinear<__nv_bfloat16>(w, *plan, err) : CheckLinear<__half>(w, *plan, err);
}

extern "C" int qm_cuda_launch_linear(const qm_cuda_linear_problem* problem, const qm_cuda_plan* plan,
                                     const qm_cuda_linear_tensors* tensors, void* stream, char* err) {
  if (problem->rows == 0) return QM_OK;
  cudaStream_t s = static_cast<cudaStream_t>(stream);
  return problem->type == QM_BF16 ? LaunchLinear<__nv_bfloat16>(*problem, *plan, *tensors, s, err)
                                  : LaunchLinear<__half>(*problem, *plan, *tensors, s, err);
}

extern "C" int qm_cuda_launch_routing(const qm_cuda_routing_problem* problem, const qm_cuda_routing_tensors* tensors,
                                      void* stream, char* err) {
  if (int status = qm_cuda_validate_routing(problem, err)) return status;
  if (problem->tokens == 0) return QM_OK;
  const qm_routing& r = problem->routing;
  const SelectParams params{tensors->logits, tensors->correction_bias, tensors->topk_ids, tensors->topk_weights, r};
  Launcher launcher{static_cast<cudaStream_t>(stream)};
  launcher.Run(problem->type == QM_F32    ? MoeSelect<float>
               : problem->type == QM_BF16 ? MoeSelect<__nv_bfloat16>
                                          : MoeSelect<__half>,
               params, dim3(static_cast<unsigned>(problem->tokens)), 32, 4 * SelectWords(r), true);
  return Report(launcher.error, err);
}
