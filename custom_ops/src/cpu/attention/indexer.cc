// SparseIndexer on the CPU: new keys go into the cache, then a few tokens at a time get their scores and are selected.
//
// Scores are tasks of a tile and some blocks of keys, selections are tasks of a list. A token that sees no more slots
// than its list has needs no scores.
#include <algorithm>
#include <cstring>
#include <utility>

#include "core/parallel.h"
#include "cpu/attention/call_rows.h"
#include "cpu/kernel.h"
#include "cpu/operators.h"

namespace quantmoe {
namespace {

constexpr int64_t kMostScores = int64_t{4} << 20;  // of the tokens that are scored at a time, unless one has more
constexpr int64_t kMostTokens = 128;
constexpr int64_t kTasksPerLane = 8;  // of scores: a task prepares its queries
constexpr int kDigits = 2048;         // counters of a lane, for 11 bits

bool in_place(const IndexerContext& indexer) {
  return indexer.call.past_keys && indexer.call.past_keys == indexer.call.present_keys && indexer.past_slots;
}

// A score's place in the order of unsigned integers: 0 has one, NaN is above all.
uint32_t place_of(float score) {
  if (score != score) return UINT32_MAX;
  const float number = score + 0.0f;  // -0 is 0
  uint32_t bits;
  std::memcpy(&bits, &number, 4);
  return bits >> 31 ? ~bits : bits | 0x80000000u;
}

// The `wanted` largest of blocks of scores, which are overwritten, to `out` as ascending slots; of equal ones the lower
// blocks. A block has the largest of `each` scores and is `size` slots. wanted <= blocks. Returns the end of the list.
int32_t* select(float* scores, int64_t each, int64_t blocks, int64_t wanted, int64_t size, int32_t* counters,
                int32_t* out) {
  auto* const places = reinterpret_cast<uint32_t*>(scores);
  for (int64_t i = 0; i < blocks; ++i) {
    uint32_t place = 0;
    for (int64_t j = 0; j < each; ++j) place = std::max(place, place_of(scores[i * each + j]));
    std::memcpy(places + i, &place, 4);
  }
  // The digits of the least place that is selected, and how many slots with it are.
  uint32_t least = 0;
  int64_t left = wanted;
  for (const auto& [shift, bits] : {std::pair{21, 11}, std::pair{10, 11}, std::pair{0, 10}}) {
    std::fill_n(counters, kDigits, 0);
    const uint32_t known = shift + bits == 32 ? 0 : ~uint32_t{0} << (shift + bits), mask = (1u << bits) - 1;
    for (int64_t i = 0; i < blocks; ++i) counters[places[i] >> shift & mask] += (places[i] & known) == least;
    uint32_t digit = mask;
    for (; counters[digit] < left; --digit) left -= counters[digit];
    least |= digit << shift;
  }
  for (int64_t i = 0; i < blocks; ++i) {
    const bool equal = places[i] == least;
    if (places[i] > least || (equal && left > 0))
      for (int64_t j = 0; j < size; ++j) *out++ = static_cast<int32_t>(i * size + j);
    left -= equal;
  }
  return out;
}

struct IndexerPlan {
  int64_t stride, tokens;  // of a list's scores; tokens that are scored at a time
  int64_t scratch_at, counters_at, bytes;
};

IndexerContext context_of(const qm_indexer& node, const IndexerCall& made) {
  const qm_shape& past = made.of_inputs[SparseIndexer_past_keys].shape;
  return {node, made, static_cast<qm_type>(made.of_inputs[SparseIndexer_past_keys].type), past.sizes[2],
          made.of_outputs[SparseIndexer_present_keys].shape.sizes[2]};
}

IndexerPlan plan_of(const IndexerContext& indexer, int lanes) {
  IndexerPlan plan{};
  const int64_t groups = indexer.node.num_groups;
  plan.stride = align_up(std::max<int64_t>(indexer.slots / indexer.step(), 1), kAttentionBlock);
  plan.tokens =
      std::clamp<int64_t>(kMostScores / (plan.stride * groups), 1, std::min(kMostTokens, indexer.call.tokens + 1));
  plan.scratch_at = plan.tokens * groups * plan.stride * 4;
  plan.counters_at = plan.scratch_at + lanes * indexer.scratch_floats() * 4;
  plan.bytes = plan.counters_at + lanes * int64_t{kDigits} * 4;
  return plan;
}

// One call.
class IndexerRun {
 public:
  IndexerRun(const IndexerContext& indexer, const qm_call& call, const CpuKernel& kernel)
      : indexer_(indexer),
        plan_(plan_of(indexer, lanes_of(call))),
        call_(call),
        kernel_(kernel),
        base_(static_cast<uint8_t*>(call.workspace)) {}
  void store() const;
  void select_all() const;

 private:
  template <class Body>
  void each_task(int64_t count, const Body& body) const {
    parallel(lanes_of(call_), call_.parallel_for, call_.parallel_context, count, body);
  }
  float* scratch(int lane) const {
    return reinterpret_cast<float*>(base_ + plan_.scratch_at) + lane * indexer_.scratch_floats();
  }
  int32_t* list(int64_t position) const {
    return indexer_.call.selected + position * indexer_.node.num_groups * indexer_.list_size();
  }
  void select_some(int64_t b, int64_t first, int64_t tokens) const;
  void select_blocks(int64_t slot, float* scores, int lane, int32_t* list) const;

  const IndexerContext& indexer_;
  const IndexerPlan plan_;
  const qm_call& call_;
  const CpuKernel& kernel_;
  uint8_t* const base_;
};

void IndexerRun::store() const {
  const IndexerCall& made = indexer_.call;
  const int64_t slot = indexer_.slot_bytes(), size = indexer_.node.head_size, element = made.type == QM_F32 ? 4 : 2;
  each_task(made.batch, [&](int lane, int64_t b) {
    const int64_t count = made.rows[3 * b + 1], past = made.rows[3 * b + 2];
    if (!in_place(indexer_)) {
      const auto* const before = static_cast<const uint8_t*>(made.past_keys) + b * indexer_.past_slots * slot;
      if (past) std::memcpy(indexer_.keys(b, 0), before, static_cast<size_t>(past * slot));
      std::memset(indexer_.keys(b, past + count), 0, static_cast<size_t>((indexer_.slots - past - count) * slot));
    }
    for (int64_t token = 0; token < count; ++token) {
      const auto* const key = static_cast<const uint8_t*>(made.key) + indexer_.position(b, token) * size * element;
      kernel_.to_float(made.type, key, size, scratch(lane));
      kernel_.from_float(indexer_.cache_type, scratch(lane), size, indexer_.keys(b, past + token));
    }
  });
}

void IndexerRun::select_all() const {
  const IndexerCall& made = indexer_.call;
  const int64_t most = indexer_.list_size(), groups = indexer_.node.num_groups;
  each_task(made.batch * made.tokens, [&](int, int64_t position) {  // without those that are scored
    const int64_t b = position / made.tokens, token = position % made.tokens - made.rows[3 * b];
    const bool counts = token >= 0 && token < made.rows[3 * b + 1];
    const int64_t seen = counts ? std::min(indexer_.slot(b, token) + 1, most) : 0;
    for (int64_t i = 0; i < groups * most; ++i)
      list(position)[i] = i % most < seen ? static_cast<int32_t>(i % most) : -1;
  });
  for (int64_t b = 0; b < made.batch; ++b) {
    const int64_t count = made.rows[3 * b + 1];
    for (int64_t token = std::max<int64_t>(0, most - made.rows[3 * b + 2]); token < count; token += plan_.tokens)
      select_some(b, token, std::min(plan_.tokens, count - token));
  }
}

// A row's tokens first .., which all see more slots than their lists have.
void IndexerRun::select_some(int64_t b, int64_t first, int64_t tokens) const {
  float* const scores = reinterpret_cast<float*>(base_);
  const int64_t each = indexer_.tile_tokens(), tiles = ceil_div(tokens, each), groups = indexer_.node.num_groups;
  const auto blocks_of = [&](int64_t token) {
    return ceil_div(indexer_.scored(indexer_.slot(b, token)), kAttentionBlock);
  };
  const int64_t blocks = blocks_of(first + tokens - 1);
  const int64_t span = std::max<int64_t>(1, tiles * blocks / (kTasksPerLane * lanes_of(call_))),
                pieces = ceil_div(blocks, span);
  each_task(tiles * pieces, [&](int lane, int64_t task) {
    const int64_t at = task / pieces * each, block = task % pieces * span;
    const IndexerTile tile{b, first + at, std::min(each, tokens - at)};
    const int64_t seen = blocks_of(tile.token + tile.tokens - 1);
    if (const int64_t mine = std::min(span, seen - block); mine > 0)
      kernel_.attention->index(indexer_, tile, block, mine, scratch(lane), scores + at * groups * plan_.stride,
                               plan_.stride);
  });
  each_task(tokens * groups, [&](int lane, int64_t i) {
    const int64_t token = first + i / groups;
    select_blocks(indexer_.slot(b, token), scores + i * plan_.stride, lane,
                  list(indexer_.position(b, token)) + i % groups * indexer_.list_size());
  });
}

// A list of a token in `slot`: the best blocks, then the slots from there on that are always selected.
void IndexerRun::select_blocks(int64_t slot, float* scores, int lane, int32_t* list) const {
  const qm_indexer& node = indexer_.node;
  const int64_t size = node.block_size, local = node.local_blocks;
  const int64_t blocks = local ? slot / size + 1 - local : (slot + 1) / size;
  int32_t* const end = list + indexer_.list_size();
  list = select(scores, size / indexer_.step(), blocks, node.top_k / size - local, size,
                reinterpret_cast<int32_t*>(base_ + plan_.counters_at) + lane * kDigits, list);
  for (int64_t i = blocks * size; i <= slot; ++i) *list++ = static_cast<int32_t>(i);
  std::fill(list, end, -1);
}

int check_rows(const IndexerContext& indexer, char* err) {
  for (int64_t b = 0; b < indexer.call.batch; ++b) {
    const CallRow row(indexer.call.rows, b);
    QM_TRY(row.check_tokens(indexer.call.tokens, err));
    QM_TRY(row.check_slots(indexer.past_slots, indexer.slots, err));
  }
  return QM_OK;
}

size_t indexer_workspace(const qm_indexer& node, const qm_call& call) {
  const IndexerCall made{call.inputs, call.outputs};
  return static_cast<size_t>(plan_of(context_of(node, made), lanes_of(call)).bytes);
}

int run_indexer(const qm_indexer& node, const qm_call& call, char* err) {
  const CpuKernel* kernel = select_kernel(err);
  if (!kernel) return QM_UNSUPPORTED;
  const IndexerCall made{call.inputs, call.outputs};
  const IndexerContext indexer = context_of(node, made);
  if (indexer.cache_type != QM_F32 && indexer.cache_type != QM_F16)
    return fail(err, QM_UNSUPPORTED, "past_keys is neither float nor float16, which the CPU kernels take");
  QM_TRY(check_rows(indexer, err));
  if (in_place(indexer) && indexer.slots != indexer.past_slots)
    return fail(err, QM_INVALID, "present_keys is past_keys' memory, which has %lld slots, and is to have %lld",
                (long long)indexer.past_slots, (long long)indexer.slots);
  const IndexerRun run(indexer, call, *kernel);
  run.store();
  run.select_all();
  return QM_OK;
}

}  // namespace

const CpuOperator cpu_indexer = kCpuOperator<qm_indexer, check_indexer, indexer_workspace, run_indexer>;

}  // namespace quantmoe
