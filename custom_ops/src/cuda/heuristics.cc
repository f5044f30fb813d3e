#include "cuda/heuristics.h"

#include <algorithm>
#include <cmath>
#include <optional>

namespace quantmoe {
namespace {

constexpr int kMostMultiprocessors = 144;  // of a GPU of sm_90
constexpr int kReserved = 1024;            // of a block, the system's
constexpr int kRoutingBytes = 4 * 1024;    // static DecodeRouting, rounded up

// Share of the last round that is used when `count` equal pieces go to `slots` at a time.
double fill(int64_t count, int64_t slots) {
  return static_cast<double>(count) / static_cast<double>(std::max<int64_t>(1, ceil_div(count, slots)) * slots);
}

// Tiles of at most `tokens` of experts that get `mean` on average, as Poisson has it, each at least one; one expert
// gets just that.
double expected_tiles(int64_t experts, double mean, int tokens) {
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

int multiprocessors_of(const qm_cuda_device& device) { return std::max(device.multiprocessors, 1); }

// Warps that split K, each with at least `least` units.
int warps_of_k(int units, int least) {
  int warps = kWarps;
  while (warps > 1 && units < least * warps) warps /= 2;
  return warps;
}

// A product as it is being chosen: candidates are put into g, whose row of instances.inc says what a block takes.
struct Choice {
  ProductWeights weights;
  ProductLoad load;
  qm_cuda_step g{};
  FormatSizes sizes{};
  bool decode, two;  // two: units of K that share their scales
  int sms, reserved;

  Choice(const ProductWeights& weights_, const ProductLoad& load_) : weights(weights_), load(load_) {
    const qm_cuda_device& device = weights.device;
    decode = load.path == QM_CUDA_DECODE;
    g.packed = load.path <= QM_CUDA_STREAM && packs(device.sm, weights.w);
    sizes = sizes_of(weights.w, g.packed || load.path == QM_CUDA_FP8);
    // Two units of K that share their scales are a stage of four panels: fewer instructions a byte.
    two = sizes.units == 2 && weights.row.block_shift > 0;
    // Measured: each change of panels costs a sum over the warps that split K, which decode, with few tiles, can
    // afford.
    g.warps_k = warps_of_k(weights.row.units, decode ? 2 : two ? 14 : 8);
    g.cluster = 1;
    g.stages = stages_of(1);
    sms = multiprocessors_of(device);
    reserved = kReserved + (decode ? kRoutingBytes : 0);
  }

  // Whether the tile has an instance, and a block the memory.
  bool take(int panels, int n_tiles) {
    // Not where decode's gate_up has little K: the sums over the ring make the warps wait once more a unit of work.
    const bool short_k = decode && load.product == Product::kGateUp && weights.row.units < 40;
    g.panels = panels;
    g.n_tiles = n_tiles;
    g.stages = stages_of(two && panels == 4 && !short_k ? 2 : 1);
    const Instance row = instance_of(sizes, load.path, load.product, g);
    if (row.there) g.shared_bytes = shared_bytes_of(row, sizes);
    return row.there && g.shared_bytes + reserved <= weights.device.shared_bytes;
  }
  // Blocks resident at once.
  int slots() const {
    const int blocks = weights.device.shared_bytes / (g.shared_bytes + reserved);
    return sms * std::clamp(blocks, 1, register_blocks(sizes.bits, g.panels, g.n_tiles));
  }
  // Pieces of work, which blocks take one after the other.
  int64_t units() const {
    return load.most_experts * ceil_div(weights.row.panels, static_cast<int64_t>(g.panels) * (kWarps / g.warps_k));
  }
};

// A shape of the wgmma kernels' blocks, whose units of work take `cost` each.
struct BlockShape {
  int tokens, panels, grid, parts;
  double cost;
};
// Few units: down's K is cut, into parts that fill the multiprocessors best. A part costs a pass of combine.
BlockShape wgmma_shape(const Choice& c, int sms, int tokens, int panels, double unit_cost) {
  const MarlinRow& row = c.weights.row;
  BlockShape best{tokens, panels, tokens >= 128 ? sms : 2 * sms, 1, INFINITY};
  const double units =
      expected_tiles(c.load.most_experts, c.load.mean, tokens) * static_cast<double>(ceil_div(row.panels, panels));
  for (int parts : {1, 2, 4}) {
    if (parts > 1 && (c.load.product != Product::kDown || row.units / parts < 16)) continue;
    const double rounds = std::ceil(units * parts / best.grid) / parts / (1 - 0.02 * parts);
    if (unit_cost * rounds < best.cost) best.parts = parts, best.cost = unit_cost * rounds;
  }
  return best;
}

qm_cuda_step choose_wgmma_of(const Choice& c, int sms) {
  qm_cuda_step g = c.g;
  const int tokens = c.load.path == QM_CUDA_FP8 ? 128 : c.load.mean <= 48 ? 48 : 144;
  // Measured: a unit of 48 tokens and 256 rows takes 0.6 of one of 24 and 512.
  BlockShape shape = wgmma_shape(c, sms, tokens, 16, 0.6);
  // 512 rows cost fewer instructions a byte than 256, 24 tokens more tiles.
  const BlockShape wide = wgmma_shape(c, sms, 24, 32, 1);
  qm_cuda_step few{};
  few.panels = wide.panels, few.n_tiles = wide.tokens / 8, few.warps_k = 1;
  if (tokens == 48 && wide.cost < shape.cost && instance_of(c.sizes, c.load.path, c.load.product, few).there)
    shape = wide;
  g.n_tiles = shape.tokens / 8;
  g.panels = shape.panels;
  g.grid = shape.grid;
  g.warps_k = shape.parts;
  g.shared_bytes = shared_bytes_of(instance_of(c.sizes, c.load.path, c.load.product, g), c.sizes);
  return g;
}
qm_cuda_step choose_wgmma(const Choice& c) {
  qm_cuda_step most = choose_wgmma_of(c, c.sms);
  if (!c.weights.device.multiprocessors)
    for (int sms = 2; sms <= kMostMultiprocessors; ++sms) {
      const qm_cuda_step other = choose_wgmma_of(c, sms);
      most.n_tiles = std::min(most.n_tiles, other.n_tiles), most.warps_k = std::max(most.warps_k, other.warps_k);
    }
  return most;
}

// Measured: where the blocks, two a multiprocessor, have about as many panels each.
std::optional<qm_cuda_step> span_of(const Choice& c) {
  const int panels = c.sizes.span_panels, bytes = c.sizes.span_bytes;
  if (panels == 0 || !(c.decode || c.load.mean <= 5)) return {};
  const int64_t spans = c.load.most_experts * ceil_div(c.weights.row.panels, panels);
  if (2 * (bytes + c.reserved) > c.weights.device.shared_bytes || fill(spans, 2 * c.sms) < 0.8) return {};
  qm_cuda_step g = c.g;
  g.panels = panels;
  g.stages = kSpanStages;
  g.n_tiles = 1;
  g.warps_k = 0;
  g.shared_bytes = bytes;
  g.grid = static_cast<int32_t>(std::min<int64_t>(spans, 2 * c.sms));
  return g;
}

// Down of decode, whose output tiles no second pass adds up in f32.
qm_cuda_step choose_down_decode(Choice c) {
  // Measured (README.md): an output tile is best shared by two blocks, if that loads the multiprocessors evenly.
  // Bigger clusters leave multiprocessors empty, three or six blocks worst.
  const int64_t list = c.load.most_experts * c.weights.row.units;
  const bool clusters = c.weights.device.sm >= 90;
  struct Candidate {
    int panels, cluster;
  };
  static constexpr Candidate kOfCodes[] = {{4, 1}, {4, 2}, {2, 2}, {2, 4}, {4, 4}, {2, 1}};
  static constexpr Candidate kOfFloats[] = {{1, 1}, {1, 2}, {1, 4}};
  const auto choose_of = [&](const auto& candidates) {
    for (const Candidate& candidate : candidates) {
      if (!c.take(candidate.panels, 1) || (candidate.cluster > 1 && !clusters)) continue;
      if (candidate.panels == 4 && c.slots() == c.sms && clusters) continue;
      if (candidate.panels == 4 && candidate.cluster == 1 && list > 4 * kWarps) continue;
      c.g.cluster = candidate.cluster;
      c.g.grid = static_cast<int32_t>(ceil_div(c.weights.row.panels, candidate.panels) * candidate.cluster);
      if (fill(c.g.grid, c.sms) >= 0.8) break;
    }
  };
  c.sizes.bits == 16 ? choose_of(kOfFloats) : choose_of(kOfCodes);
  return c.g;
}

// Four panels a warp cost fewer instructions a byte than two, but share out less evenly. Floats have one.
void take_of_decode(Choice& c) {
  if (c.take(1, 1)) return;
  double best = 0;
  for (int panels : {4, 2}) {
    if (!c.take(panels, 1)) continue;
    double worth = c.units() > c.slots() ? fill(c.units(), c.slots()) : fill(c.units(), c.sms);
    worth *= panels == 2 ? 0.9 : c.slots() > c.sms ? 1.0 : 0.6;  // one block alone cannot hide its waits
    if (worth < best) {
      c.take(4, 1);
      break;
    }
    best = worth;
  }
}
void take_of_stream(Choice& c) {
  const int panels = c.sizes.bits == 16 ? 1 : 2;
  (c.load.mean > 12 && c.load.most_tiles >= 4 && c.take(panels, 4)) ||
      (c.load.mean > 5 && c.load.most_tiles >= 2 && c.take(panels, 2)) || (c.take(4, 1) && c.slots() > c.sms) ||
      c.take(panels, 1);
}

}  // namespace

bool decode_fits(const ProductWeights& weights) {
  Choice c(weights, {QM_CUDA_DECODE, Product::kDown, 1, 1, 1});
  return c.take(2, 1) || c.take(1, 1);
}

qm_cuda_step choose_span(const ProductWeights& weights, const ProductLoad& load) {
  qm_cuda_step none{};
  none.warps_k = 1;
  return span_of({weights, load}).value_or(none);
}

qm_cuda_step choose_gemm(const ProductWeights& weights, const ProductLoad& load) {
  Choice c(weights, load);
  if (load.path == QM_CUDA_WGMMA || load.path == QM_CUDA_FP8) return choose_wgmma(c);
  if (c.decode && load.product == Product::kDown) return choose_down_decode(c);
  if (const auto span = span_of(c)) return *span;
  c.decode ? take_of_decode(c) : take_of_stream(c);
  c.g.grid = static_cast<int32_t>(std::clamp<int64_t>(c.units(), 1, c.slots()));
  return c.g;
}

qm_cuda_step choose_linear_decode(const ProductWeights& weights) {
  const auto& [device, projection, w] = weights;
  const FormatSizes sizes = sizes_of(projection, false);
  // Measured: warps of four panels, and two blocks for them where that still is one round, but of formats that pair
  // units not for more rounds; one panel of 8-bit codes, of which three blocks are there where warps have four units,
  // or two where a warp's part of a row is long.
  const bool pairs = sizes.units == 2, bytes = sizes.bits == 8, floats = sizes.bits == 16;
  const int64_t fours = ceil_div(w.panels, 4);
  const bool four =
      sizes.bits == 4 && !(pairs && w.block_shift == 0) && (fours <= 2 * device.multiprocessors || !pairs);
  qm_cuda_step g{};
  g.panels = floats ? 1 : four ? 4 : bytes && w.units < 24 * kWarps ? 1 : 2;
  g.stages = floats ? stages_of(1) : four ? 3 : g.panels > 1 ? 5 : w.units <= 4 * kWarps ? 4 : 6;
  g.n_tiles = g.warps_k = 1;
  g.cluster = four && device.sm >= 90 && 2 * fours <= device.multiprocessors ? 2 : 1;
  const int shared_bytes = shared_bytes_of(instance_of(sizes, QM_CUDA_DECODE, Product::kLinear, g), sizes);
  if (shared_bytes + kReserved <= device.shared_bytes) g.shared_bytes = shared_bytes;
  g.grid = static_cast<int32_t>(ceil_div(w.panels, g.panels) * g.cluster);
  return g;
}

// The largest tile that fits.
qm_cuda_step choose_float_stream(const ProductWeights& weights, int64_t rows) {
  const auto& [device, projection, w] = weights;
  const FormatSizes sizes = sizes_of(projection, false);
  qm_cuda_step g{};
  g.panels = g.cluster = 1;
  g.stages = stages_of(1);
  g.warps_k = warps_of_k(w.units, 8);
  for (int n_tiles : {4, 2, 1}) {
    g.n_tiles = n_tiles;
    g.shared_bytes = shared_bytes_of(instance_of(sizes, QM_CUDA_STREAM, Product::kDown, g), sizes);
    if (g.shared_bytes + kReserved <= device.shared_bytes && (n_tiles == 1 || rows > 4 * n_tiles)) break;
  }
  const int blocks = device.shared_bytes / (g.shared_bytes + kReserved);
  const int slots =
      multiprocessors_of(device) * std::clamp(blocks, 1, register_blocks(sizes.bits, g.panels, g.n_tiles));
  const int64_t units = ceil_div(rows, 8 * g.n_tiles) * ceil_div(w.panels, kWarps / g.warps_k);
  g.grid = static_cast<int32_t>(std::clamp<int64_t>(units, 1, slots));
  return g;
}

// The tile and the parts of K that take the least time, by what was measured (H200; us).
qm_cuda_step choose_dense(const ProductWeights& weights, int64_t rows) {
  // Clusters of 1 to 8 blocks that 132 multiprocessors hold at a time (cudaOccupancyMaxActiveClusters).
  static constexpr int kClusters[] = {132, 66, 39, 30, 22, 17, 15, 15};
  static constexpr struct {
    int tokens;
    double least, unit, token;  // of a unit of K: at least, and as the tokens make it
    double bytes, tile;         // 8-bit codes' factor; of a tile
  } kCosts[] = {{64, .38, .30, .0025, 1.3, 1.2}, {128, .58, .54, .0014, 1.27, 2.1}, {256, .46, .01, .0023, 1.2, 1.2}};
  const auto& [device, projection, w] = weights;
  const FormatSizes format = sizes_of(projection, false);
  const int multiprocessors = multiprocessors_of(device);
  qm_cuda_step g{};
  double best = INFINITY;
  for (const auto& c : kCosts) {
    const LinearSizes sizes = linear_sizes_of(c.tokens, format.bits, format.zero_bytes);
    const double bytes = format.bits > 4 ? c.bytes : 1;
    for (int width = linear_least(c.tokens); width <= c.tokens; width += 16)
      for (int parts = 1; parts <= std::min(8, w.units); ++parts) {
        if (width == 240) continue;  // measured: slower than 256
        const int64_t tiles = ceil_div(w.panels, sizes.panels) * ceil_div(rows, width);
        const int64_t slots =
            std::max<int64_t>(1, int64_t{multiprocessors} * sizes.blocks * kClusters[parts - 1] / 132);
        // A round that is not full takes a little less: memory and power are shared by fewer.
        const double full = static_cast<double>(tiles) / static_cast<double>(slots);
        const double rounds = full > 1 ? .95 * std::ceil(full) + .05 * full : 1;
        double unit = std::max(c.least * bytes, c.unit * bytes + c.token * width);
        if (sizes.blocks == 2)  // that share a multiprocessor
          unit *= 1 + .5 * std::clamp(static_cast<double>(tiles * parts) / rounds / multiprocessors - 1, 0., 1.);
        double cost = static_cast<double>(ceil_div(w.units, parts)) * unit + c.tile + .006 * width;
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

}  // namespace quantmoe
