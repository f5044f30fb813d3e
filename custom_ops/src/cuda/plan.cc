// The plan: which kernels, tiles and workspace for a problem on a device. Pure; runs without a GPU.
#include <algorithm>
#include <cmath>
#include <cstdint>

#include "cuda/layout.h"
#include "cuda/validate.h"
#include "quantmoe/quant_moe_cuda.h"

namespace quantmoe {
namespace {

int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }
// Whether moe_gemm_wgmma.cuh can address the rows: in pieces of 16 bytes, with 32 bits.
bool Addresses(int64_t rows, int64_t columns) { return rows * CeilDiv(columns, 64) <= UINT32_MAX / 8; }
// Share of the last round that is used when `count` equal pieces go to `slots` at a time.
double Fill(int64_t count, int64_t slots) {
  return static_cast<double>(count) / static_cast<double>(std::max<int64_t>(1, CeilDiv(count, slots)) * slots);
}
uint64_t Align(uint64_t a) { return (a + 255) / 256 * 256; }

constexpr int kSpanDownTokens = 2;         // decode: from here on a pass that adds up the experts is no loss
constexpr int kMostMultiprocessors = 144;  // of a GPU of sm_90
// Blocks on a multiprocessor that the kernels' registers allow.
int RegisterBlocks(WeightKind kind, int panels, int n_tiles) {
  return n_tiles > 2 ? 1 : panels == 2 && n_tiles == 1 && BitsOf(kind) == 4 ? 3 : 2;
}
constexpr int kRoutingBytes = 4 * 1024;  // static DecodeRouting, rounded up
// As in moe_gemm_mma.cuh: rings and sums, which lie over the ring where a stage has two units of K.
int MmaSharedBytes(int panels, int n_tiles, int bits, int lane_bytes, int units = 1, int stages = 0) {
  const int sums = units == 2 ? 0 : panels * n_tiles * 512;
  return kWarps * ((stages ? stages : StagesOf(units)) * StageBytes(panels, n_tiles, bits, lane_bytes, units) + sums);
}
int LaneBytes(WeightKind kind, const MarlinRow& w) { return ScaleBytes(kind, w.per_block) + ZeroBytes(kind); }
// Whether two units of K may be a stage: groups of 64 and more.
bool PairsUnits(WeightKind kind, const MarlinRow& w) {
  return w.per_block == 1 && WithFacts(kind, [](auto f) { return f.kPairsUnits; });
}
// Not int8 with zero points where a multiprocessor has 100 KiB: those take stream.
bool DecodeFits(const qm_cuda_device& device, const qm_projection& weights, const MarlinRow& w) {
  const WeightKind kind = KindOf(weights);
  return MmaSharedBytes(2, 1, BitsOf(kind), LaneBytes(kind, w)) + 1024 + kRoutingBytes <= device.shared_bytes;
}

// Tiles of at most `tokens` of experts that get `mean` on average, as Poisson has it, each at least one; one expert
// gets just that.
double Tiles(int64_t experts, double mean, int tokens) {
  if (experts == 1) return std::ceil(mean / tokens);
  double tiles = mean / tokens + 0.5;
  if (mean < 512) {
    double p = std::exp(-mean), more = 1 - p;  // that an expert gets k tokens, more than k
    tiles = 1;
    for (int k = 1; k < mean + 8 * std::sqrt(mean); ++k) {
      p *= mean / k;
      more -= p;
      if (k % tokens == 0) tiles += more;
    }
  }
  return std::floor(static_cast<double>(experts) * tiles);
}

// What the plan of a product depends on besides its weights.
struct Work {
  const qm_cuda_device& device;
  bool decode, wgmma, fp8;
  int64_t most_experts;
  double mean;     // tokens an expert gets on average: decides the tile
  int most_tiles;  // of 8 tokens, in the stream path
};

// direct: down, whose output tiles no second pass adds up in f32.
qm_cuda_gemm PlanGemm(const Work& work, const qm_projection& weights, const MarlinRow& w, bool direct) {
  qm_cuda_gemm g{};
  const auto& [device, decode, wgmma, fp8, most_experts, mean, most_tiles] = work;
  const int sms = std::max(device.multiprocessors, 1);
  const WeightKind kind = KindOf(weights);
  const int lane_bytes = LaneBytes(kind, w);
  const bool pairs = PairsUnits(kind, w);
  // Two units of K that share their scales are a stage of four panels: fewer instructions a byte.
  const bool two = pairs && w.block_shift > 0;
  g.warps_k = 8;
  // Measured: each change of panels costs a sum over the warps that split K, which decode, with few tiles, can
  // afford.
  const int least = decode ? 2 : two ? 14 : 8;
  while (g.warps_k > 1 && w.units < least * g.warps_k) g.warps_k /= 2;
  g.cluster = 1;
  g.packed = !wgmma && Packs(device.sm, weights);
  g.stages = StagesOf(1);
  if (wgmma) {
    const int few = 24, tokens = fp8 ? 128 : mean <= 48 ? 48 : 144;
    const double few_tiles = Tiles(most_experts, mean, few), tiles = Tiles(most_experts, mean, tokens);
    auto shape = [&, g](int sms) mutable {
      struct Shape {
        int tokens, panels, grid, parts;
        double cost;
      };
      // Of `cost` a unit of work (measured: one of 48 tokens and 256 rows takes 0.6 of one of 24 and 512). Few units:
      // down's K is cut, into parts that fill the multiprocessors best. A part costs a pass of combine.
      auto shape_of = [&](double tiles, int tokens, int panels, double cost) {
        Shape best{tokens, panels, tokens >= 128 ? sms : 2 * sms, 1, INFINITY};
        const double units = tiles * static_cast<double>(CeilDiv(w.panels, panels));
        for (int parts : {1, 2, 4}) {
          if (parts > 1 && (!direct || w.units / parts < 16)) continue;
          const double rounds = std::ceil(units * parts / best.grid) / parts / (1 - 0.02 * parts);
          if (cost * rounds < best.cost) best.parts = parts, best.cost = cost * rounds;
        }
        return best;
      };
      Shape s = shape_of(tiles, tokens, 16, 0.6);
      // 512 rows cost fewer instructions a byte than 256, 24 tokens more tiles.
      if (tokens == 48 && BitsOf(kind) == 4)
        if (const Shape wide = shape_of(few_tiles, few, 32, 1); wide.cost < s.cost) s = wide;
      g.n_tiles = s.tokens / 8;
      g.panels = s.panels;  // of a block
      g.grid = s.grid;
      g.warps_k = s.parts;
      g.shared_bytes = fp8 ? kFp8SharedBytes : WgmmaSizesOf(s.tokens, BitsOf(kind), lane_bytes, direct).shared_bytes;
      return g;
    };
    qm_cuda_gemm most = shape(sms);
    if (!device.multiprocessors)
      for (int i = 2; i <= kMostMultiprocessors; ++i) {
        const qm_cuda_gemm other = shape(i);
        most.n_tiles = std::min(most.n_tiles, other.n_tiles), most.warps_k = std::max(most.warps_k, other.warps_k);
      }
    return most;
  }
  const int reserved = 1024 + (decode ? kRoutingBytes : 0);
  auto fits = [&](int panels, int n_tiles) {
    g.panels = panels;
    g.n_tiles = n_tiles;
    // Not where decode's gate_up has little K: the sums over the ring make the warps wait once more a unit of work.
    const bool gate_up = decode && !direct;
    const int units = two && panels == 4 && !(gate_up && w.units < 40) ? 2 : 1;
    g.stages = StagesOf(units);
    g.shared_bytes = MmaSharedBytes(panels, n_tiles, BitsOf(kind), lane_bytes, units);
    // What gate_up.cu, down.cu and their *_any.cu instantiate.
    const bool instantiated = panels == 2 || (BitsOf(kind) == 4 && (!pairs || units == 2 || gate_up));
    return instantiated && g.shared_bytes <= device.shared_bytes - reserved;
  };
  auto slots = [&] {  // blocks resident at once
    return sms *
           std::clamp(device.shared_bytes / (g.shared_bytes + reserved), 1, RegisterBlocks(kind, g.panels, g.n_tiles));
  };
  if (const int panels = WithFacts(kind, [](auto f) { return f.kSpanPanels; });
      panels > 0 && !direct && (decode || mean <= 5)) {
    // Measured: where the blocks, two a multiprocessor, have about as many panels each.
    const int64_t spans = most_experts * CeilDiv(w.panels, panels);
    const int bytes = WithFacts(kind, [](auto f) { return SpanSharedBytes<f.kSpanPanels, f.ScaleBytes(2)>(); });
    if (2 * (bytes + reserved) <= device.shared_bytes && Fill(spans, 2 * sms) >= 0.8) {
      g.panels = panels;
      g.stages = kSpanStages;
      g.n_tiles = 1;
      g.warps_k = 0;
      g.shared_bytes = bytes;
      g.grid = static_cast<int32_t>(std::min<int64_t>(spans, 2 * sms));
      return g;
    }
  }
  if (direct) {
    // Measured (README.md): an output tile is best shared by two blocks, if that loads the multiprocessors evenly.
    // Bigger clusters leave multiprocessors empty, three or six blocks worst.
    const int64_t list = most_experts * w.units;
    struct {
      int panels, cluster;
    } const candidates[] = {{4, 1}, {4, 2}, {2, 2}, {2, 4}, {4, 4}, {2, 1}};
    for (const auto& c : candidates) {
      if (!fits(c.panels, 1) || (c.cluster > 1 && device.sm < 90)) continue;
      if (c.panels == 4 && slots() == sms && device.sm >= 90) continue;
      if (c.panels == 4 && c.cluster == 1 && list > 4 * kWarps) continue;
      g.cluster = c.cluster;
      g.grid = static_cast<int32_t>(CeilDiv(w.panels, c.panels) * c.cluster);
      if (Fill(g.grid, sms) >= 0.8) break;
    }
    return g;
  }
  auto units = [&] { return most_experts * CeilDiv(w.panels, static_cast<int64_t>(g.panels) * (kWarps / g.warps_k)); };
  if (decode) {
    // Four panels a warp cost fewer instructions a byte than two, but share out less evenly.
    double best = 0;
    for (int panels : {4, 2}) {
      if (!fits(panels, 1)) continue;
      double worth = units() > slots() ? Fill(units(), slots()) : Fill(units(), sms);
      worth *= panels == 2 ? 0.9 : slots() > sms ? 1.0 : 0.6;  // one block alone cannot hide its waits
      if (worth < best) {
        fits(4, 1);
        break;
      }
      best = worth;
    }
  } else {
    (mean > 12 && most_tiles >= 4 && fits(2, 4)) || (mean > 5 && most_tiles >= 2 && fits(2, 2)) ||
        (fits(4, 1) && slots() > sms) || fits(2, 1);
  }
  g.grid = static_cast<int32_t>(std::clamp<int64_t>(units(), 1, slots()));
  return g;
}

// A linear of a few rows; shared_bytes 0: the GPU has too little for the kernels that keep many stages in flight.
qm_cuda_gemm PlanLinearDecode(const qm_cuda_device& device, const qm_projection& weights, const MarlinRow& w) {
  const WeightKind kind = KindOf(weights);
  if (kind == WeightKind::kFloat) {
    qm_cuda_gemm g{};
    g.panels = g.n_tiles = g.warps_k = g.cluster = 1;
    g.stages = StagesOf(1);
    const int bytes = kWarps * g.stages * StageBytes(1, 1, 16, 0, 1);  // sums lie over the ring: three blocks
    if (bytes + 1024 <= device.shared_bytes) g.shared_bytes = bytes;
    g.grid = w.panels;
    return g;
  }
  // Measured: warps of four panels, and two blocks for them where that still is one round, but of formats that pair
  // units not for more rounds; one panel of 8-bit codes, of which three blocks are there where warps have four units,
  // or two where a warp's part of a row is long.
  const bool pairs = PairsUnits(kind, w), bytes = BitsOf(kind) == 8;
  const int64_t fours = CeilDiv(w.panels, 4);
  const bool four = !bytes && !(pairs && w.block_shift == 0) && (fours <= 2 * device.multiprocessors || !pairs);
  qm_cuda_gemm g{};
  g.panels = four ? 4 : bytes && w.units < 24 * kWarps ? 1 : 2;
  g.stages = four ? 3 : g.panels > 1 ? 5 : w.units <= 4 * kWarps ? 4 : 6;
  g.n_tiles = g.warps_k = 1;
  g.cluster = four && device.sm >= 90 && 2 * fours <= device.multiprocessors ? 2 : 1;
  const int bytes_shared =
      MmaSharedBytes(g.panels, 1, BitsOf(kind), LaneBytes(kind, w), four && pairs ? 2 : 1, g.stages);
  if (bytes_shared + 1024 <= device.shared_bytes) g.shared_bytes = bytes_shared;
  g.grid = static_cast<int32_t>(CeilDiv(w.panels, g.panels) * g.cluster);
  return g;
}

// A linear of floats on mma.sync: the largest tile that fits.
qm_cuda_gemm PlanFloatStream(const qm_cuda_device& device, const MarlinRow& w, int64_t rows) {
  qm_cuda_gemm g{};
  g.panels = g.cluster = 1;
  g.stages = StagesOf(1);
  g.warps_k = kWarps;
  while (g.warps_k > 1 && w.units < 8 * g.warps_k) g.warps_k /= 2;
  for (int n_tiles : {4, 2, 1}) {
    g.n_tiles = n_tiles;
    g.shared_bytes = MmaSharedBytes(1, n_tiles, 16, 0);
    if (g.shared_bytes + 1024 <= device.shared_bytes && (n_tiles == 1 || rows > 4 * n_tiles)) break;
  }
  const int slots = std::max(device.multiprocessors, 1) * std::clamp(device.shared_bytes / (g.shared_bytes + 1024), 1,
                                                                     RegisterBlocks(WeightKind::kFloat, 1, g.n_tiles));
  const int64_t units = CeilDiv(rows, 8 * g.n_tiles) * CeilDiv(w.panels, kWarps / g.warps_k);
  g.grid = static_cast<int32_t>(std::clamp<int64_t>(units, 1, slots));
  return g;
}

// A linear of more rows on wgmma: the tile and the parts of K that take the least time, by what was measured (H200;
// us).
qm_cuda_gemm PlanDense(const qm_cuda_device& device, WeightKind kind, const MarlinRow& w, int64_t rows) {
  // Clusters of 1 to 8 blocks that 132 multiprocessors hold at a time (cudaOccupancyMaxActiveClusters).
  static constexpr int kClusters[] = {132, 66, 39, 30, 22, 17, 15, 15};
  static constexpr struct {
    int tokens;
    double least, unit, token;  // of a unit of K: at least, and as the tokens make it
    double bytes, tile;         // 8-bit codes' factor; of a tile
  } kCosts[] = {{64, .38, .30, .0025, 1.3, 1.2}, {128, .58, .54, .0014, 1.27, 2.1}, {256, .46, .01, .0023, 1.2, 1.2}};
  const int multiprocessors = std::max(device.multiprocessors, 1);
  qm_cuda_gemm g{};
  double best = INFINITY;
  for (const auto& c : kCosts) {
    const LinearSizes sizes = LinearSizesOf(c.tokens, BitsOf(kind), ZeroBytes(kind));
    const double bytes = BitsOf(kind) > 4 ? c.bytes : 1;
    for (int width = LinearLeast(c.tokens); width <= c.tokens; width += 16)
      for (int parts = 1; parts <= std::min(8, w.units); ++parts) {
        if (width == 240) continue;  // measured: slower than 256
        const int64_t tiles = CeilDiv(w.panels, sizes.panels) * CeilDiv(rows, width);
        const int64_t slots =
            std::max<int64_t>(1, int64_t{multiprocessors} * sizes.blocks * kClusters[parts - 1] / 132);
        // A round that is not full takes a little less: memory and power are shared by fewer.
        const double full = static_cast<double>(tiles) / static_cast<double>(slots);
        const double rounds = full > 1 ? .95 * std::ceil(full) + .05 * full : 1;
        double unit = std::max(c.least * bytes, c.unit * bytes + c.token * width);
        if (sizes.blocks == 2)  // that share a multiprocessor
          unit *= 1 + .5 * std::clamp(static_cast<double>(tiles * parts) / rounds / multiprocessors - 1, 0., 1.);
        double cost = static_cast<double>(CeilDiv(w.units, parts)) * unit + c.tile + .006 * width;
        if (parts > 1) cost += .8 + .0015 * width * sizes.panels + .05 * parts;
        cost *= rounds;
        if (cost >= best) continue;
        best = cost;
        g.panels = sizes.panels;
        g.n_tiles = width / 8;
        g.warps_k = g.cluster = parts;
        g.stages = sizes.stages;
        g.shared_bytes = sizes.shared_bytes;
        g.grid = static_cast<int32_t>(parts > 1 ? tiles * parts : std::min(tiles, slots));
      }
  }
  return g;
}

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
  const int64_t pairs = p.tokens * p.top_k;
  const bool decode = p.tokens <= kDecodeTokens && pairs <= kDecodePairs && DecodeFits(*device, p.moe.w13, w13) &&
                      DecodeFits(*device, p.moe.w2, w2);
  const int64_t most_experts = std::min<int64_t>(pairs, p.local_experts);
  // Tokens an expert gets on average decide the tile; of a slice, others have their share of the pairs.
  const double mean = static_cast<double>(pairs) / static_cast<double>(std::max<int64_t>(1, p.moe.num_experts));

  const bool many = !decode && device->sm == 90 && p.moe.gated && mean > 5;
  const bool fp8 = many && TakesFp8(p.moe.w13) && TakesFp8(p.moe.w2);
  const bool wgmma = many && (fp8 || Addresses(pairs, std::max(w13.columns, p.moe.intermediate_size)));
  plan->path = decode ? QM_CUDA_DECODE : fp8 ? QM_CUDA_FP8 : wgmma ? QM_CUDA_WGMMA : QM_CUDA_STREAM;

  Work work{*device, decode, wgmma, fp8, most_experts, mean, 4};
  plan->w13 = PlanGemm(work, p.moe.w13, w13, false);
  work.most_tiles = plan->w13.n_tiles;
  plan->w2 = PlanGemm(work, p.moe.w2, w2, decode || wgmma);
  if (decode && p.tokens >= kSpanDownTokens)
    if (const qm_cuda_gemm spans = PlanGemm(work, p.moe.w2, w2, false); spans.warps_k == 0) plan->w2 = spans;
  const bool combine = !decode || plan->w2.warps_k == 0;
  if (plan->w2.n_tiles < plan->w13.n_tiles && plan->path == QM_CUDA_STREAM) {  // both take the same list of tiles
    work.most_tiles = plan->w2.n_tiles;
    plan->w13 = PlanGemm(work, p.moe.w13, w13, false);
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
  const bool floats = KindOf(l.w) == WeightKind::kFloat;
  const int64_t rows = problem->rows;
  const bool decode = rows <= kDecodeTokens &&
                      (floats ? PlanLinearDecode(*device, l.w, w).shared_bytes > 0 : DecodeFits(*device, l.w, w)),
             packs = Packs(device->sm, l.w);
  const bool dense = !decode && device->sm == 90 && (!packs || rows > 64);
  plan->path = decode ? QM_CUDA_DECODE : dense ? QM_CUDA_DENSE : QM_CUDA_STREAM;
  if (dense) {
    plan->w2 = PlanDense(*device, KindOf(l.w), w, rows);
  } else {
    if (decode && !packs) plan->w2 = PlanLinearDecode(*device, l.w, w);
    if (floats && !decode) plan->w2 = PlanFloatStream(*device, w, rows);
    if (!plan->w2.shared_bytes)
      plan->w2 = PlanGemm({*device, decode, false, false, 1, static_cast<double>(rows), 4}, l.w, w, decode);
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
