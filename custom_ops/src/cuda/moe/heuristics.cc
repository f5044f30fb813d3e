#include "cuda/moe/heuristics.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <iterator>
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

// The number of tiles of at most `tokens` for experts that get `mean` on average, as Poisson has it, at least one each.
// One expert gets just `mean`.
struct Tiles {
  double mean, deviation;
};
Tiles expected_tiles(int64_t experts, double mean, int tokens) {
  if (experts == 1) return {std::ceil(mean / tokens), 0};
  double tiles = mean / tokens + 0.5, squares = tiles * tiles + mean / tokens / tokens;
  if (mean < 512) {
    double chance = std::exp(-mean), more = 1 - chance;  // that an expert gets k tokens, more than k
    tiles = squares = 1;
    for (int k = 1; k < mean + 8 * std::sqrt(mean); ++k) {
      chance *= mean / k;
      more -= chance;
      if (k % tokens == 0) tiles += more, squares += (2 * (k / tokens) + 1) * more;
    }
  }
  const double of = static_cast<double>(experts);
  return {of * tiles, std::sqrt(of * (squares - tiles * tiles))};
}

int multiprocessors_of(const qm_cuda_device& device) { return std::max(device.multiprocessors, 1); }

// Warps that split K, each with at least `least` units.
int warps_of_k(int units, int least) {
  int warps = kWarps;
  while (warps > 1 && units < least * warps) warps /= 2;
  return warps;
}

// A product as it is being chosen: candidates are put into step, whose row of instances.inc says what a block takes.
struct Choice {
  ProductWeights weights;
  ProductLoad load;
  PlanStep step{};
  FormatSizes sizes{};
  bool decode, two;  // two: units of K that share their scales
  int sms, reserved;

  Choice(const ProductWeights& weights_, const ProductLoad& load_) : weights(weights_), load(load_) {
    const qm_cuda_device& device = weights.device;
    decode = load.path == kPathDecode;
    step.packed = load.path <= kPathStream && packs(device.sm, weights.w);
    sizes = sizes_of(weights.w, step.packed || load.path == kPathFp8);
    // Two units of K that share their scales are a stage of four panels: fewer instructions a byte.
    two = sizes.units == 2 && weights.row.block_shift > 0;
    // Measured: each change of panels costs a sum over the warps that split K, which decode, with few tiles, can
    // afford.
    step.warps_k = warps_of_k(weights.row.units, decode ? 2 : two ? 14 : 8);
    step.cluster = 1;
    step.stages = stages_of(1);
    sms = multiprocessors_of(device);
    reserved = kReserved + (decode ? kRoutingBytes : 0);
  }

  // Whether the tile has an instance, and a block the memory, which is put into it.
  bool fits(PlanStep& tile) const {
    const Instance row = instance_of(sizes, load.path, load.product, tile);
    if (row.there) tile.shared_bytes = shared_bytes_of(row, sizes);
    return row.there && tile.shared_bytes + reserved <= weights.device.shared_bytes;
  }
  bool take(int panels, int n_tiles) {
    // Not where decode's gate_up has little K: the sums over the ring make the warps wait once more a unit of work.
    const bool short_k = decode && load.product == Product::kGateUp && weights.row.units < 40;
    step.panels = panels;
    step.n_tiles = n_tiles;
    step.stages = stages_of(two && panels == 4 && !short_k ? 2 : 1);
    return fits(step);
  }
  // What was taken, with more stages; where these do not fit, as it was.
  bool deepen() {
    PlanStep deep = step;
    deep.stages = kDeepStages;
    if (!fits(deep)) return false;
    step = deep;
    return true;
  }
  // Blocks resident at once.
  int slots() const {
    const int blocks = weights.device.shared_bytes / (step.shared_bytes + reserved);
    return sms * std::clamp(blocks, 1, register_blocks(sizes.bits, step.panels, step.n_tiles));
  }
  // Pieces of work, which blocks take one after the other.
  int64_t units() const {
    return load.most_experts *
           ceil_div(weights.row.panels, static_cast<int64_t>(step.panels) * (kWarps / step.warps_k));
  }
};

// A shape of the wgmma kernels' blocks. cost: of a unit of work, which blocks of all multiprocessors do at the same
// time. Measured: of 4096 columns of int4 on an H100, about 97 us of one of 24 tokens and 512 rows.
struct BlockShape {
  int path, tokens, panels;
  double cost;
};
constexpr BlockShape kBlockShapes[] = {
    {kPathWgmma, 48, 16, 0.6},  {kPathWgmma, 24, 32, 1},     {kPathWgmma, 64, 32, 0.72}, {kPathWgmma, 80, 32, 0.77},
    {kPathWgmma, 96, 16, 0.45}, {kPathWgmma, 144, 16, 0.56}, {kPathFp8, 128, 16, 1}};

// The shape and the parts of K that are expected to be done first. Where units are few, down's K is cut into parts that
// fill the multiprocessors best. A part costs a pass of combine.
// tiles: of each shape.
using ShapeTiles = std::array<Tiles, std::size(kBlockShapes)>;
PlanStep choose_wgmma_of(const Choice& choice, const ShapeTiles& tiles, int sms) {
  const MarlinRow& row = choice.weights.row;
  PlanStep step = choice.step;
  double best = INFINITY;
  for (size_t i = 0; i < tiles.size(); ++i) {
    const BlockShape& shape = kBlockShapes[i];
    PlanStep tile = choice.step;
    tile.panels = shape.panels, tile.n_tiles = shape.tokens / 8, tile.warps_k = 1;
    const Instance instance = instance_of(choice.sizes, choice.load.path, choice.load.product, tile);
    if (shape.path != choice.load.path || !instance.there) continue;
    tile.grid = small_tile(shape.tokens) ? 2 * sms : sms;
    tile.shared_bytes = shared_bytes_of(instance, choice.sizes);
    for (int parts : {1, 2, 4}) {
      if (parts > 1 && (choice.load.product != Product::kDown || row.units / parts < 16)) continue;
      const auto rounds = [&](double of) {
        const double units = std::floor(of) * static_cast<double>(ceil_div(row.panels, shape.panels));
        return std::ceil(units * parts / tile.grid) / parts / (1 - 0.02 * parts);
      };
      // A round more or less may be a tile's chance.
      const double cost = shape.cost * (rounds(tiles[i].mean) + rounds(tiles[i].mean + tiles[i].deviation)) / 2;
      if (cost >= best) continue;
      best = cost;
      step = tile;
      step.warps_k = parts;
    }
  }
  return step;
}
PlanStep choose_wgmma(const Choice& choice) {
  ShapeTiles tiles;
  for (size_t i = 0; i < tiles.size(); ++i)
    tiles[i] = expected_tiles(choice.load.most_experts, choice.load.mean, kBlockShapes[i].tokens);
  PlanStep most = choose_wgmma_of(choice, tiles, choice.sms);
  if (!choice.weights.device.multiprocessors)
    for (int sms = 2; sms <= kMostMultiprocessors; ++sms) {
      const PlanStep other = choose_wgmma_of(choice, tiles, sms);
      most.n_tiles = std::min(most.n_tiles, other.n_tiles), most.warps_k = std::max(most.warps_k, other.warps_k);
    }
  return most;
}

// Measured: where the blocks, two a multiprocessor, have about as many panels each.
std::optional<PlanStep> span_of(const Choice& choice) {
  const int panels = choice.sizes.span_panels, bytes = choice.sizes.span_bytes;
  if (panels == 0 || !(choice.decode || choice.load.mean <= 5)) return {};
  const int64_t spans = choice.load.most_experts * ceil_div(choice.weights.row.panels, panels);
  if (2 * (bytes + choice.reserved) > choice.weights.device.shared_bytes || fill(spans, 2 * choice.sms) < 0.8)
    return {};
  PlanStep step = choice.step;
  step.panels = panels;
  step.stages = kSpanStages;
  step.n_tiles = 1;
  step.warps_k = 0;
  step.shared_bytes = bytes;
  step.grid = static_cast<int32_t>(std::min<int64_t>(spans, 2 * choice.sms));
  return step;
}

// Down of decode, whose output tiles no second pass adds up in f32.
PlanStep choose_down_decode(Choice choice) {
  // Measured: two blocks share an output tile best, if that loads the multiprocessors evenly.
  // Bigger clusters leave multiprocessors empty, three or six blocks most.
  // One block a multiprocessor is enough if its ring is deep. That holds for two panels always. A ring of four panels
  // leaves no memory to the kernels before and after, so it needs warps that take many turns.
  const int64_t list = choice.load.most_experts * choice.weights.row.units;
  const bool clusters = choice.weights.device.sm >= 90;
  struct Candidate {
    int panels, cluster;
  };
  static constexpr Candidate kOfCodes[] = {{4, 1}, {4, 2}, {2, 2}, {2, 4}, {4, 4}, {2, 1}};
  static constexpr Candidate kOfFloats[] = {{1, 1}, {1, 2}, {1, 4}};
  const auto choose_of = [&](const auto& candidates) {
    for (const Candidate& candidate : candidates) {
      if (!choice.take(candidate.panels, 1) || (candidate.cluster > 1 && !clusters)) continue;
      choice.step.cluster = candidate.cluster;
      choice.step.grid =
          static_cast<int32_t>(ceil_div(choice.weights.row.panels, candidate.panels) * candidate.cluster);
      const bool four = candidate.panels == 4, many_turns = list >= 16 * candidate.cluster * kWarps;
      const bool large = (clusters && choice.slots() == choice.sms) || (candidate.cluster == 1 && list > 4 * kWarps);
      const bool deep = choice.step.grid <= choice.sms && (!four || many_turns) && choice.deepen();
      if (four && large && !deep) continue;
      if (fill(choice.step.grid, choice.sms) >= (four && deep ? 0.65 : 0.8)) break;
    }
  };
  choice.sizes.bits == 16 ? choose_of(kOfFloats) : choose_of(kOfCodes);
  return choice.step;
}

// Four panels a warp cost fewer instructions a byte than two, but share out less evenly. Floats have one.
void take_of_decode(Choice& choice) {
  if (choice.take(1, 1)) return;
  double best = 0;
  for (int panels : {4, 2}) {
    if (!choice.take(panels, 1)) continue;
    double worth =
        choice.units() > choice.slots() ? fill(choice.units(), choice.slots()) : fill(choice.units(), choice.sms);
    worth *= panels == 2 ? 0.9 : choice.slots() > choice.sms ? 1.0 : 0.6;  // one block alone cannot hide its waits
    if (worth < best) {
      choice.take(4, 1);
      break;
    }
    best = worth;
  }
}
void take_of_stream(Choice& choice) {
  const int panels = choice.sizes.bits == 16 ? 1 : 2;
  (choice.load.mean > 12 && choice.load.most_tiles >= 4 && choice.take(panels, 4)) ||
      (choice.load.mean > 5 && choice.load.most_tiles >= 2 && choice.take(panels, 2)) ||
      (choice.take(4, 1) && choice.slots() > choice.sms) || choice.take(panels, 1);
}

}  // namespace

bool decode_fits(const ProductWeights& weights) {
  Choice choice(weights, {kPathDecode, Product::kDown, 1, 1, 1});
  return choice.take(2, 1) || choice.take(1, 1);
}

PlanStep choose_gemm(const ProductWeights& weights, const ProductLoad& load) {
  Choice choice(weights, load);
  if (load.path == kPathWgmma || load.path == kPathFp8) return choose_wgmma(choice);
  if (choice.decode && load.product == Product::kDown) return choose_down_decode(choice);
  if (const auto span = span_of(choice)) return *span;
  choice.decode ? take_of_decode(choice) : take_of_stream(choice);
  choice.step.grid = static_cast<int32_t>(std::clamp<int64_t>(choice.units(), 1, choice.slots()));
  return choice.step;
}

PlanStep choose_linear_decode(const ProductWeights& weights) {
  const auto& [device, projection, row] = weights;
  const FormatSizes sizes = sizes_of(projection, false);
  // Measured, 4 bits: a panel a block if that is at most one round. Two panels if four would leave multiprocessors with
  // one block or none. Formats that pair units also take two panels for more than two rounds of four. Otherwise four. 8
  // bits: a panel, or two if a warp's part of a row is long. Few stages if a warp's part has few, which leaves room for
  // more blocks.
  const bool pairs = sizes.units == 2, short_k = row.units <= 4 * kWarps;
  const int64_t fours = ceil_div(row.panels, 4), multiprocessors = device.multiprocessors;
  PlanStep step{};
  step.n_tiles = step.warps_k = step.cluster = 1;
  const auto shared_bytes = [&] {
    const int bytes = shared_bytes_of(instance_of(sizes, kPathDecode, Product::kLinear, step), sizes);
    return bytes + kReserved <= device.shared_bytes ? bytes : 0;
  };
  if (sizes.bits == 16) {
    // Where there are few panels of a short row, all of a warp's part is asked for before the wait.
    const bool deep = row.panels <= multiprocessors && row.units <= (kDeepStages - 1) * kWarps;
    step.panels = 1, step.stages = deep ? kDeepStages : stages_of(1);
    if (shared_bytes() == 0) step.stages = stages_of(1);
  } else if (sizes.bits > 4) {
    step.panels = row.units < 24 * kWarps ? 1 : 2;
    step.stages = step.panels == 2 ? 5 : short_k ? 3 : 6;
  } else if (row.panels <= multiprocessors) {
    step.panels = 1, step.stages = 4;
  } else {
    const bool few = fours <= multiprocessors && !(pairs && short_k);
    const bool two = few || (pairs && (row.block_shift == 0 || fours > 2 * multiprocessors));
    step.panels = two ? 2 : 4;
    step.stages = two && !short_k ? 5 : 3;
  }
  step.shared_bytes = shared_bytes();
  // Blocks that are there at once take one group of panels after the other.
  const int64_t blocks = step.shared_bytes ? device.shared_bytes / (step.shared_bytes + kReserved) : 1;
  const int64_t slots = multiprocessors * std::clamp<int64_t>(blocks, 1, linear_blocks(sizes.bits, step.panels));
  step.grid =
      static_cast<int32_t>(std::clamp<int64_t>(ceil_div(row.panels, step.panels), 1, std::max<int64_t>(slots, 1)));
  return step;
}

// The largest tile that fits.
PlanStep choose_float_stream(const ProductWeights& weights, int64_t rows) {
  const auto& [device, projection, row] = weights;
  const FormatSizes sizes = sizes_of(projection, false);
  PlanStep step{};
  step.panels = step.cluster = 1;
  step.stages = stages_of(1);
  step.warps_k = warps_of_k(row.units, 8);
  for (int n_tiles : {4, 2, 1}) {
    step.n_tiles = n_tiles;
    step.shared_bytes = shared_bytes_of(instance_of(sizes, kPathStream, Product::kDown, step), sizes);
    if (step.shared_bytes + kReserved <= device.shared_bytes && (n_tiles == 1 || rows > 4 * n_tiles)) break;
  }
  const int blocks = device.shared_bytes / (step.shared_bytes + kReserved);
  const int slots =
      multiprocessors_of(device) * std::clamp(blocks, 1, register_blocks(sizes.bits, step.panels, step.n_tiles));
  const int64_t units = ceil_div(rows, 8 * step.n_tiles) * ceil_div(row.panels, kWarps / step.warps_k);
  step.grid = static_cast<int32_t>(std::clamp<int64_t>(units, 1, slots));
  return step;
}

// The tile and the parts of K that take the least time, by what was measured (H200; us).
PlanStep choose_dense(const ProductWeights& weights, int64_t rows) {
  // Clusters of 1 to 8 blocks that 132 multiprocessors hold at a time (cudaOccupancyMaxActiveClusters).
  static constexpr int kClusters[] = {132, 66, 39, 30, 22, 17, 15, 15};
  static constexpr struct {
    int tokens;
    double least, unit, token;  // of a unit of K: at least, and as the tokens make it
    double bytes, tile;         // 8-bit codes' factor; of a tile
  } kCosts[] = {{64, .38, .30, .0025, 1.3, 1.2}, {128, .58, .54, .0014, 1.27, 2.1}, {256, .46, .01, .0023, 1.2, 1.2}};
  const auto& [device, projection, row] = weights;
  const FormatSizes format = sizes_of(projection, false);
  const int multiprocessors = multiprocessors_of(device);
  PlanStep step{};
  double best = INFINITY;
  for (const auto& costs : kCosts) {
    const LinearSizes sizes = linear_sizes_of(costs.tokens, format.bits, format.two_levels, format.zero_bytes);
    const double bytes = format.bits > 4 || format.two_levels ? costs.bytes : 1;
    for (int width = linear_least(costs.tokens); width <= costs.tokens; width += 16)
      for (int parts = 1; parts <= std::min(8, row.units); ++parts) {
        if (width == 240) continue;  // measured: slower than 256
        const int64_t tiles = ceil_div(row.panels, sizes.panels) * ceil_div(rows, width);
        const int64_t slots =
            std::max<int64_t>(1, int64_t{multiprocessors} * sizes.blocks * kClusters[parts - 1] / 132);
        // A round that is not full takes a little less: memory and power are shared by fewer.
        const double full = static_cast<double>(tiles) / static_cast<double>(slots);
        const double rounds = full > 1 ? .95 * std::ceil(full) + .05 * full : 1;
        double unit = std::max(costs.least * bytes, costs.unit * bytes + costs.token * width);
        if (sizes.blocks == 2)  // that share a multiprocessor
          unit *= 1 + .5 * std::clamp(static_cast<double>(tiles * parts) / rounds / multiprocessors - 1, 0., 1.);
        double cost = static_cast<double>(ceil_div(row.units, parts)) * unit + costs.tile + .006 * width;
        if (parts > 1) cost += .8 + .0015 * width * sizes.panels + .05 * parts;
        cost *= rounds;
        if (cost >= best) continue;
        best = cost;
        step.panels = sizes.panels;
        step.n_tiles = width / 8;
        step.warps_k = step.cluster = parts;
        step.stages = sizes.stages;
        step.shared_bytes = sizes.shared_bytes;
        step.grid = static_cast<int32_t>(parts > 1 ? tiles * parts : std::min(tiles, slots));
      }
  }
  return step;
}

}  // namespace quantmoe
