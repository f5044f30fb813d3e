// The plan: which kernels and workspace for a problem on a device. Pure; runs without a GPU.
#include <algorithm>
#include <cstdint>

#include "cuda/heuristics.h"
#include "cuda/layout.h"
#include "cuda/validate.h"
#include "quantmoe/quant_moe_cuda.h"

namespace quantmoe {
namespace {

constexpr int kSpanDownTokens = 2;  // decode: from here on a pass that adds up the experts is no loss

// Whether moe_gemm_wgmma.cuh can address the rows: in pieces of 16 bytes, with 32 bits.
bool Addresses(int64_t rows, int64_t columns) { return rows * CeilDiv(columns, 64) <= UINT32_MAX / 8; }
uint64_t Align(uint64_t a) { return (a + 255) / 256 * 256; }

// Hands out parts of the workspace.
struct Workspace {
  uint64_t end = 0;
  uint64_t Take(uint64_t bytes) {
    const uint64_t at = end;
    end += Align(bytes);
    return at;
  }
};

}  // namespace

}  // namespace quantmoe

using namespace quantmoe;

extern "C" size_t qm_cuda_row_bytes(const qm_moe* moe, int projection) {
  MarlinRow row{};
  return MarlinRowOf(*moe, projection, &row) ? row.bytes : 0;
}

extern "C" int qm_cuda_plan_moe(const qm_cuda_problem* problem, const qm_cuda_device* device, qm_cuda_plan* plan,
                                char* err) {
  const qm_cuda_problem& p = *problem;
  QM_TRY(ValidateMoe(p, *device, err));
  *plan = qm_cuda_plan{};
  MarlinRow w13{}, w2{};
  MarlinRowOf(p.moe, 13, &w13);
  MarlinRowOf(p.moe, 2, &w2);
  const ProductWeights gate_up{*device, p.moe.w13, w13}, down{*device, p.moe.w2, w2};
  const int64_t pairs = p.tokens * p.top_k;
  const bool decode = p.tokens <= kDecodeTokens && pairs <= kDecodePairs && DecodeFits(gate_up) && DecodeFits(down);
  const int64_t most_experts = std::min<int64_t>(pairs, p.local_experts);
  // Tokens an expert gets on average decide the tile; of a slice, others have their share of the pairs.
  const double mean = static_cast<double>(pairs) / static_cast<double>(std::max<int64_t>(1, p.moe.num_experts));

  const bool many = !decode && device->sm == 90 && p.moe.gated && mean > 5;
  const bool fp8 = many && TakesFp8(p.moe.w13) && TakesFp8(p.moe.w2);
  const bool wgmma = many && (fp8 || Addresses(pairs, std::max(w13.columns, p.moe.intermediate_size)));
  plan->path = decode ? QM_CUDA_DECODE : fp8 ? QM_CUDA_FP8 : wgmma ? QM_CUDA_WGMMA : QM_CUDA_STREAM;

  ProductLoad load{plan->path, Product::kGateUp, most_experts, mean, 4};
  ProductLoad down_load{plan->path, Product::kDown, most_experts, mean, 4};
  plan->w13 = ChooseGemm(gate_up, load);
  down_load.most_tiles = plan->w13.n_tiles;
  plan->w2 = ChooseGemm(down, down_load);
  if (decode && p.tokens >= kSpanDownTokens)
    if (const qm_cuda_gemm span = ChooseSpan(down, down_load); span.warps_k == 0) plan->w2 = span;
  const bool combine = !decode || plan->w2.warps_k == 0;
  if (plan->w2.n_tiles < plan->w13.n_tiles && plan->path == QM_CUDA_STREAM) {  // both take the same list of tiles
    load.most_tiles = plan->w2.n_tiles;
    plan->w13 = ChooseGemm(gate_up, load);
  }

  Workspace workspace;
  auto take = [&](uint64_t bytes) { return workspace.Take(bytes); };
  const uint64_t rows = static_cast<uint64_t>(fp8 ? Fp8Rows(pairs, p.local_experts) : pairs);
  const uint64_t hidden_columns = fp8     ? static_cast<uint64_t>(Fp8Groups(w2.units)) * 128
                                  : wgmma ? static_cast<uint64_t>(w2.units) * 64
                                          : static_cast<uint64_t>(w13.panels) * (p.moe.gated ? 8 : 16);
  plan->hidden = take(rows * hidden_columns * 2);
  if (Rounds(p.moe.w13) && (p.moe.w13.perm || !wgmma))
    plan->rounded = take(static_cast<uint64_t>(RoundsPairs(p.moe) ? pairs : p.tokens) *
                         (plan->w13.packed ? w13.units * PackedUnitBytes(KindOf(p.moe.w13)) : p.moe.hidden_size * 2));
  if (plan->w2.packed)
    plan->packed_hidden = take(static_cast<uint64_t>(pairs) * w2.units * PackedUnitBytes(KindOf(p.moe.w2)));
  if (p.moe.w13.perm) plan->gathered = take(static_cast<uint64_t>(pairs) * w13.columns * 2);
  if (combine)
    plan->partial = take(static_cast<uint64_t>(pairs) * p.moe.hidden_size * (wgmma ? 2 * plan->w2.warps_k : 4));
  if (!decode) {
    plan->max_tiles = MostTiles(pairs, p.local_experts, plan->w13.n_tiles);
    uint64_t tiles = plan->max_tiles + 1ull;
    if (plan->w2.n_tiles != plan->w13.n_tiles || !device->multiprocessors)
      tiles += MostTiles(pairs, p.local_experts, plan->w2.n_tiles) + 1ull;
    plan->tiles = take(16 * tiles);
    plan->sorted_pairs = take(8 * rows);
    const bool by_pair = p.moe.w13.perm || (Rounds(p.moe.w13) && RoundsPairs(p.moe));
    if (fp8) plan->positions = take(4 * static_cast<uint64_t>(pairs));
    if (fp8)  // codes and scales of x, then of h
      plan->prepared = take(132 * rows * static_cast<uint64_t>(std::max(Fp8Groups(w13.units), Fp8Groups(w2.units))));
    else if (wgmma)
      plan->prepared = take(static_cast<uint64_t>(by_pair ? pairs : p.tokens) * w13.units * 128);
  }
  plan->workspace_bytes = workspace.end;
  return QM_OK;
}

extern "C" size_t qm_cuda_linear_row_bytes(const qm_linear* linear) {
  const qm_moe moe = MoeOf(*linear);
  return qm_cuda_row_bytes(&moe, 2);
}

extern "C" int qm_cuda_plan_linear(const qm_cuda_linear_problem* problem, const qm_cuda_device* device,
                                   qm_cuda_plan* plan, char* err) {
  const qm_linear& l = problem->linear;
  QM_TRY(ValidateLinear(*problem, *device, err));
  *plan = qm_cuda_plan{};
  MarlinRow w{};
  MarlinRowOf(MoeOf(l), 2, &w);
  const ProductWeights weights{*device, l.w, w};
  const bool floats = KindOf(l.w) == WeightKind::kFloat;
  const int64_t rows = problem->rows;
  const bool decode =
                 rows <= kDecodeTokens && (floats ? ChooseLinearDecode(weights).shared_bytes > 0 : DecodeFits(weights)),
             packs = Packs(device->sm, l.w);
  const bool dense = !decode && device->sm == 90 && (!packs || rows > 64);
  plan->path = decode ? QM_CUDA_DECODE : dense ? QM_CUDA_DENSE : QM_CUDA_STREAM;
  if (dense) {
    plan->w2 = ChooseDense(weights, rows);
  } else {
    if (decode && !packs) plan->w2 = ChooseLinearDecode(weights);
    if (floats && !decode) plan->w2 = ChooseFloatStream(weights, rows);
    if (!plan->w2.shared_bytes)
      plan->w2 = ChooseGemm(weights, {plan->path, Product::kDown, 1, static_cast<double>(rows), 4});
    if (!decode) plan->max_tiles = static_cast<int32_t>(CeilDiv(rows, 8 * plan->w2.n_tiles));
  }

  Workspace workspace;
  if (Rounds(l.w))
    plan->rounded = workspace.Take(static_cast<uint64_t>(rows) *
                                   (plan->w2.packed ? w.units * PackedUnitBytes(KindOf(l.w)) : l.in_features * 2));
  if (l.w.perm) plan->gathered = workspace.Take(static_cast<uint64_t>(rows) * l.in_features * 2);
  plan->workspace_bytes = workspace.end;
  return QM_OK;
}
