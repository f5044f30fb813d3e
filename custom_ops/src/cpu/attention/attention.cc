// CachedAttention on the CPU: new keys and values go into the cache, then tiles of queries over it.
//
// If there are enough tiles for all lanes, one lane does a tile, block after block of the cache. Otherwise, as in
// decode, a few blocks are a task, and the lane that finishes a tile's last block merges them in order. Both give the
// same bytes, because blocks begin at the same slots. With a nope_size, rows of few new tokens are absorbed, as many at
// a time as fit some memory. Then they are tiles as above. Of the other rows a head's tokens are a task, which expands
// what it needs of the cache.
#include <algorithm>
#include <cstring>
#include <utility>

#include "core/parallel.h"
#include "cpu/attention/call_rows.h"
#include "cpu/kernel.h"
#include "cpu/operators.h"

namespace quantmoe {
namespace {

constexpr int64_t kMaxPartBytes = int64_t{64} << 20;
constexpr int64_t kTasksPerLane = 8;   // of blocks: a task prepares its queries
constexpr int64_t kTokensPerTask = 8;  // of the section that stores keys and values

struct AttentionPlan {
  int64_t tiles;                                     // of a row and group, with all tokens counting
  int64_t blocks;                                    // most of a tile
  bool split;                                        // a tile's blocks may be several tasks
  int64_t counters_at, parts_at, scratch_at, bytes;  // q_scales are at 0
};

bool in_place(const AttentionCall& call, const void* past, const void* present) {
  return past && past == present && call.past_slots;
}

// The slots of a list, which are before the numbers below 0.
int64_t listed(const int32_t* list, int64_t size) {
  return std::partition_point(list, list + size, [](int32_t slot) { return slot >= 0; }) - list;
}

AttentionPlan plan_of(const AttentionContext& context) {
  AttentionPlan plan{};
  const int64_t lanes = lanes_of(context.call), groups = context.call.batch * context.node.kv_num_heads;
  plan.tiles = ceil_div(context.call.tokens, context.tile_tokens());
  const int64_t limit = context.node.sliding_window ? context.node.sliding_window + context.tile_tokens()
                        : context.node.chunk_size   ? context.node.chunk_size + context.tile_tokens()
                        : context.call.selected     ? context.call.selected_size
                                                    : context.call.slots;
  plan.blocks = std::min(ceil_div(context.call.slots, kAttentionBlock), ceil_div(limit, kAttentionBlock) + 1);
  if (context.node.compress_rate) plan.blocks = ceil_div(context.most_entries(), kAttentionBlock);
  const int64_t rows = context.heads() * std::min(context.tile_tokens(), context.call.tokens);
  const int64_t parts = groups * plan.tiles * plan.blocks * rows * context.part_floats() * 4;
  plan.split = lanes > 1 && groups * plan.tiles < 2 * lanes && parts <= kMaxPartBytes;
  plan.counters_at =
      context.node.qk_norm == k_qk_norm_row ? align_up(context.call.batch * context.call.tokens * 4, 64) : 0;
  plan.parts_at = plan.counters_at + (plan.split ? align_up(groups * plan.tiles * 4, 64) : 0);
  plan.scratch_at = plan.parts_at + (plan.split ? parts : 0);
  plan.bytes = plan.scratch_at + lanes * context.scratch_floats() * 4;
  return plan;
}

// One call.
class AttentionRun {
 public:
  AttentionRun(const qm_attention& node, const AttentionCall& call, const AttentionFunctions& kernel,
               bool every_row_selects = false)
      : base_(static_cast<uint8_t*>(call.workspace)),
        a_{node, call, reinterpret_cast<float*>(base_), every_row_selects},
        plan_(plan_of(a_)),
        kernel_(kernel) {}

  void store() const;
  void attend() const;

 private:
  template <class Body>
  void each_task(int64_t count, const Body& body) const {
    parallel(lanes_of(a_.call), a_.call.parallel_for, a_.call.parallel_context, count, [&](int lane, int64_t index) {
      body(reinterpret_cast<float*>(base_ + plan_.scratch_at) + lane * a_.scratch_floats(), index);
    });
  }
  int64_t count_of(int64_t b) const { return a_.call.rows[3 * b + 1]; }
  void copy(const void* past, void* present, int64_t width, int64_t task) const;
  void copy_block(const void* past, void* present, int64_t width, int64_t block) const;
  void append_tokens(int64_t batch_row, int64_t first, float* scratch) const;
  AttentionTile tile_at(int64_t index, float* scratch) const;
  void whole(const AttentionTile& tile, float* scratch) const;
  void blocks(const AttentionTile& tile, int64_t index, int64_t block, int64_t span, float* scratch) const;
  int64_t first_block(const AttentionTile& tile) const {
    return tile.count ? 0 : a_.first_slot(a_.slot(tile.b, tile.token)) / kAttentionBlock;
  }
  int64_t block_count(const AttentionTile& tile) const {
    return tile.tokens ? a_.last_block(tile) - first_block(tile) + 1 : 0;
  }

  uint8_t* const base_;
  const AttentionContext a_;
  const AttentionPlan plan_;
  const AttentionFunctions& kernel_;
};

// One group's slots of a cache that is not in place: what was in it, and zeros after the new tokens.
void AttentionRun::copy(const void* past, void* present, int64_t width, int64_t task) const {
  const int64_t batch_row = task / a_.node.kv_num_heads, before = a_.slot(batch_row, 0),
                used = before + count_of(batch_row);
  const int64_t slot = a_.slot_bytes(width);
  uint8_t* const to = static_cast<uint8_t*>(present) + task * a_.call.slots * slot;
  if (before)
    std::memcpy(to, static_cast<const uint8_t*>(past) + task * a_.call.past_slots * slot,
                static_cast<size_t>(before * slot));
  std::memset(to + used * slot, 0, static_cast<size_t>((a_.call.slots - used) * slot));
}

// A block of a cache that is not in place.
void AttentionRun::copy_block(const void* past, void* present, int64_t width, int64_t block) const {
  const int64_t bytes = int64_t{a_.node.block_size} * a_.node.kv_num_heads * a_.slot_bytes(width);
  std::memcpy(static_cast<uint8_t*>(present) + block * bytes, static_cast<const uint8_t*>(past) + block * bytes,
              static_cast<size_t>(bytes));
}

// New tokens first .. of row b into the cache; zeros are the output of those that do not count. Without padding, where
// caches are in blocks, they are other requests' tokens.
void AttentionRun::append_tokens(int64_t batch_row, int64_t first, float* scratch) const {
  const int64_t width = int64_t{a_.node.num_heads} * output_size(a_.node) * a_.element();
  for (int64_t index = first; index < std::min(first + kTokensPerTask, a_.call.tokens); ++index) {
    const int64_t token = index - a_.call.rows[3 * batch_row];
    if (token >= 0 && token < count_of(batch_row))
      kernel_.append(a_, batch_row, token, scratch);
    else if (!a_.node.block_size)
      std::memset(static_cast<uint8_t*>(a_.call.output) + (batch_row * a_.call.tokens + index) * width, 0,
                  static_cast<size_t>(width));
  }
}

void AttentionRun::store() const {
  const AttentionCall& call = a_.call;
  const int64_t groups = call.batch * a_.node.kv_num_heads, pieces = ceil_div(call.tokens, kTokensPerTask);
  int64_t keys = in_place(call, call.past_key, call.present_key) ? 0 : groups;
  int64_t values = in_place(call, call.past_value, call.present_value) ? 0 : groups;
  if (a_.node.block_size) {
    each_task(call.blocks, [&](float*, int64_t block) {
      if (keys) copy_block(call.past_key, call.present_key, a_.key_width(), block);
      if (values) copy_block(call.past_value, call.present_value, a_.value_width(), block);
    });
    keys = values = 0;
  }
  each_task(keys + values + call.batch * pieces, [&](float* scratch, int64_t task) {
    if (task < keys) return copy(call.past_key, call.present_key, a_.key_width(), task);
    task -= keys;
    if (task < values) return copy(call.past_value, call.present_value, a_.value_width(), task);
    task -= values;
    append_tokens(task / pieces, task % pieces * kTokensPerTask, scratch);
  });
}

// The last tiles of a row first: they take longest. No tokens: there is none of that index. scratch: gets what the list
// of a tile has where keys are compressed; null: nothing.
AttentionTile AttentionRun::tile_at(int64_t index, float* scratch) const {
  const int64_t of = index / plan_.tiles, b = of / a_.node.kv_num_heads;
  const int64_t token = (plan_.tiles - 1 - index % plan_.tiles) * a_.tile_tokens();
  AttentionTile tile{b, of % a_.node.kv_num_heads, token,
                     std::clamp<int64_t>(count_of(b) - token, 0, a_.tile_tokens())};
  if (tile.tokens && a_.node.compress_rate) {
    int32_t* const slots = scratch ? reinterpret_cast<int32_t*>(scratch + a_.entries_at()) : nullptr;
    tile.slots = slots;
    tile.count = a_.entries(b, token, tile.group, slots);
  } else if (tile.tokens && a_.selects(b)) {
    tile.slots = a_.list(b, token, tile.group);
    tile.count = listed(tile.slots, a_.call.selected_size);
  }
  return tile;
}

void AttentionRun::whole(const AttentionTile& tile, float* scratch) const {
  float* const parts = scratch + a_.parts_at();
  float* const sum = parts + a_.tile_rows() * a_.part_floats();
  kernel_.queries(a_, tile, scratch);
  kernel_.begin(a_, tile, sum);
  for (int64_t i = 0, first = first_block(tile); i < block_count(tile); ++i) {
    kernel_.block(a_, tile, first + i, scratch, parts);
    kernel_.merge(a_, tile, first + i, parts, sum);
  }
  kernel_.finish(a_, tile, sum);
}

// `span` blocks of the tile of that index, from its block-th on.
void AttentionRun::blocks(const AttentionTile& tile, int64_t index, int64_t block, int64_t span, float* scratch) const {
  const int64_t first = first_block(tile), count = block_count(tile), mine = std::min(span, count - block);
  if (mine <= 0) return;
  const int64_t floats = a_.heads() * std::min(a_.tile_tokens(), a_.call.tokens) * a_.part_floats();
  float* const parts = reinterpret_cast<float*>(base_ + plan_.parts_at) + index * plan_.blocks * floats;
  kernel_.queries(a_, tile, scratch);
  for (int64_t i = block; i < block + mine; ++i) kernel_.block(a_, tile, first + i, scratch, parts + i * floats);
  int32_t* const done = reinterpret_cast<int32_t*>(base_ + plan_.counters_at) + index;
  if (__atomic_add_fetch(done, static_cast<int32_t>(mine), __ATOMIC_ACQ_REL) < count) return;
  float* const sum = scratch + a_.parts_at();
  kernel_.begin(a_, tile, sum);
  for (int64_t i = 0; i < count; ++i) kernel_.merge(a_, tile, first + i, parts + i * floats, sum);
  kernel_.finish(a_, tile, sum);
}

void AttentionRun::attend() const {
  const int64_t tiles = a_.call.batch * a_.node.kv_num_heads * plan_.tiles;
  if (!plan_.split) {
    return each_task(tiles, [&](float* scratch, int64_t index) {
      if (const AttentionTile tile = tile_at(index, scratch); tile.tokens) whole(tile, scratch);
    });
  }
  int64_t all = 0, most = 0;
  for (int64_t i = 0; i < tiles; ++i) {
    const int64_t count = block_count(tile_at(i, nullptr));
    all += count;
    most = std::max(most, count);
  }
  const int64_t span = std::max<int64_t>(1, all / (kTasksPerLane * lanes_of(a_.call))), pieces = ceil_div(most, span);
  std::fill_n(reinterpret_cast<int32_t*>(base_ + plan_.counters_at), tiles, 0);
  each_task(tiles * pieces, [&](float* scratch, int64_t task) {
    blocks(tile_at(task / pieces, scratch), task / pieces, task % pieces * span, span, scratch);
  });
}

// What the rows that are absorbed at a time attend as: their queries and outputs are in the workspace.
struct AbsorbedCall {
  qm_attention node;
  AttentionCall call;

  AbsorbedCall(const LatentContext& latent, int64_t batch, int64_t tokens) : node(latent.node), call(latent.call) {
    node.nope_size = node.out_size = node.rotary_size = 0;
    call.type = QM_F32;
    call.batch = batch;
    call.tokens = tokens;
  }
};

struct LatentPlan {
  int64_t rows, tokens;                                           // that are absorbed at a time, of a row
  int64_t queries_at, outputs_at, attends_at, scratch_at, bytes;  // AbsorbedRows::rows are at 0
};

// The tokens that are absorbed at a time of a row that selects.
int64_t piece_of(const AttentionCall& call) { return call.selected ? kAbsorbedTokens : 0; }

LatentPlan plan_of(const LatentContext& latent) {
  LatentPlan plan{};
  const qm_attention& node = latent.node;
  plan.tokens = std::min(latent.call.tokens, std::max(latent.most_absorbed(), piece_of(latent.call)));
  plan.rows = std::min(std::max<int64_t>(kAbsorbedTokens / std::max<int64_t>(plan.tokens, 1), 1), latent.call.batch);
  const int64_t heads = plan.rows * plan.tokens * 4;  // bytes, for a feature of a head
  plan.queries_at = align_up(3 * plan.rows * 4, 64);
  plan.outputs_at = plan.queries_at + align_up(heads * (node.num_heads + node.kv_num_heads) * node.head_size, 64);
  plan.attends_at = plan.outputs_at + align_up(heads * node.num_heads * node.v_head_size, 64);
  const AbsorbedCall inner(latent, plan.rows, plan.tokens);
  plan.scratch_at = plan.attends_at + align_up(plan_of(AttentionContext{inner.node, inner.call, nullptr}).bytes, 64);
  plan.bytes = plan.scratch_at + lanes_of(latent.call) * latent.scratch_floats() * 4;
  return plan;
}

// A call with a nope_size, whose keys and values are stored.
class LatentRun {
 public:
  LatentRun(const qm_attention& node, const AttentionCall& call, const AttentionFunctions& kernel)
      : latent_{node, call}, plan_(plan_of(latent_)), base_(static_cast<uint8_t*>(call.workspace)), kernel_(kernel) {}

  void attend() const {
    for (int64_t batch_row = 0; batch_row < latent_.call.batch; batch_row += plan_.rows)
      absorbed(batch_row, std::min(plan_.rows, latent_.call.batch - batch_row));
    for (int64_t batch_row = 0; batch_row < latent_.call.batch; ++batch_row) {
      if (expands(batch_row)) expanded(batch_row);
      if (!selects(batch_row)) continue;
      for (int64_t token = 0; token < count_of(batch_row); token += plan_.tokens) selecting(batch_row, token);
    }
  }

 private:
  template <class Body>
  void each_task(int64_t count, const Body& body) const {
    parallel(lanes_of(latent_.call), latent_.call.parallel_for, latent_.call.parallel_context, count,
             [&](int lane, int64_t index) {
               body(reinterpret_cast<float*>(base_ + plan_.scratch_at) + lane * latent_.scratch_floats(), index);
             });
  }
  int64_t count_of(int64_t batch_row) const { return latent_.call.rows[3 * batch_row + 1]; }
  bool selects(int64_t batch_row) const {
    return AttentionContext{latent_.node, latent_.call, nullptr}.selects(batch_row);
  }
  bool expands(int64_t batch_row) const { return !selects(batch_row) && latent_.expands(count_of(batch_row)); }
  int32_t* rows() const { return reinterpret_cast<int32_t*>(base_); }
  void absorbed(int64_t first, int64_t count) const;
  void selecting(int64_t batch_row, int64_t token) const;
  void absorb_rows(int64_t first, int64_t token, int64_t count, bool select) const;
  void expanded(int64_t batch_row) const;

  const LatentContext latent_;
  const LatentPlan plan_;
  uint8_t* const base_;
  const AttentionFunctions& kernel_;
};

// Rows first .. without those that expand or select.
void LatentRun::absorbed(int64_t first, int64_t count) const {
  int64_t all = 0;
  for (int64_t i = 0; i < plan_.rows; ++i) {
    const int64_t b = first + i;
    const bool mine = i < count && !expands(b) && !selects(b);
    rows()[3 * i] = 0;
    rows()[3 * i + 1] = mine ? latent_.call.rows[3 * b + 1] : 0;
    rows()[3 * i + 2] = i < count ? latent_.call.rows[3 * b + 2] : 0;
    all += rows()[3 * i + 1];
  }
  if (all) absorb_rows(first, 0, count, false);
}

// A row's tokens token .. that are absorbed at a time.
void LatentRun::selecting(int64_t batch_row, int64_t token) const {
  std::fill_n(rows(), 3 * plan_.rows, 0);
  rows()[1] = static_cast<int32_t>(std::min(plan_.tokens, count_of(batch_row) - token));
  rows()[2] = static_cast<int32_t>(latent_.call.rows[3 * batch_row + 2] + token);
  absorb_rows(batch_row, token, 1, true);
}

// What rows() says of the call's rows first .., from `token` on.
void LatentRun::absorb_rows(int64_t first, int64_t token, int64_t count, bool select) const {
  const AbsorbedRows absorbed{first,
                              token,
                              count,
                              plan_.tokens,
                              rows(),
                              reinterpret_cast<float*>(base_ + plan_.queries_at),
                              reinterpret_cast<float*>(base_ + plan_.outputs_at)};
  each_task(latent_.node.num_heads,
            [&](float* scratch, int64_t head) { kernel_.absorb(latent_, absorbed, head, scratch); });
  AbsorbedCall inner(latent_, plan_.rows, plan_.tokens);
  const AttentionContext context{inner.node, inner.call, nullptr};
  const int64_t groups = first * latent_.node.kv_num_heads * latent_.call.slots;
  inner.call.rows = rows();
  inner.call.qkv = absorbed.queries;
  inner.call.output = absorbed.outputs;
  inner.call.present_key =
      static_cast<uint8_t*>(latent_.call.present_key) + groups * context.slot_bytes(context.key_width());
  inner.call.present_value =
      static_cast<uint8_t*>(latent_.call.present_value) + groups * context.slot_bytes(context.value_width());
  inner.call.workspace = base_ + plan_.attends_at;
  if (select) inner.call.selected = AttentionContext{latent_.node, latent_.call, nullptr}.list(first, token, 0);
  AttentionRun(inner.node, inner.call, kernel_, select).attend();
  each_task(latent_.node.num_heads,
            [&](float* scratch, int64_t head) { kernel_.release(latent_, absorbed, head, scratch); });
}

// If there are fewer heads than lanes, a head's tokens are several tasks, too. Each of them expands again what it sees.
// The last tokens come first: they take longest.
void LatentRun::expanded(int64_t batch_row) const {
  const int64_t tokens = latent_.call.rows[3 * batch_row + 1], heads = latent_.node.num_heads;
  const int64_t for_lanes = std::min(ceil_div(lanes_of(latent_.call), heads), ceil_div(tokens, kTileQueries));
  const int64_t parts = std::max(ceil_div(tokens, kExpandedTokens), for_lanes);
  each_task(heads * parts, [&](float* scratch, int64_t task) {
    const int64_t part = parts - 1 - task / heads, first = tokens * part / parts;
    kernel_.expand(latent_, batch_row, task % heads, first, tokens * (part + 1) / parts - first, scratch);
  });
}

// Of a row's slots that are used, whether their blocks are there.
int check_blocks(const qm_attention& node, const AttentionCall& call, int64_t batch_row, int64_t used, char* err) {
  const int64_t columns = call.slots / node.block_size;
  for (int64_t i = 0; i < ceil_div(used, int64_t{node.block_size}); ++i)
    if (const int32_t block = call.block_table[batch_row * columns + i]; block < 0 || block >= call.blocks)
      return fail(err, QM_INVALID, "block_table[%lld][%lld] is %d: the caches have %lld blocks", (long long)batch_row,
                  (long long)i, block, (long long)call.blocks);
  return QM_OK;
}

int check_rows(const qm_attention& node, const AttentionCall& call, char* err) {
  int64_t first = 0;
  for (int64_t batch_row = 0; batch_row < call.batch; ++batch_row) {
    const CallRow row(call.rows, batch_row);
    QM_TRY(row.check_tokens(call.tokens, err));
    QM_TRY(row.check_slots(call.past_slots, call.slots, err));
    if (!node.block_size) continue;
    const int64_t slots = row.past + row.count;
    if (row.begin != first) return row.refuse("expected as the first token", first, err);
    if (!row.count) return row.refuse("expected tokens of at least", 1, err);
    if (node.rotary_size && slots > call.positions) return row.refuse("cos and sin have slots", call.positions, err);
    QM_TRY(check_blocks(node, call, batch_row, slots, err));
    first += row.count;
  }
  if (node.block_size && first != call.tokens)
    return fail(err, QM_INVALID, "rows have %lld tokens: the call's tokens are %lld", (long long)first,
                (long long)call.tokens);
  return QM_OK;
}

int check_selected(const qm_attention& node, const AttentionCall& call, char* err) {
  if (call.selected_lists != 1 && call.selected_lists != node.kv_num_heads)
    return fail(err, QM_INVALID, "selected has %lld lists a token, expected 1, or kv_num_heads %d",
                (long long)call.selected_lists, node.kv_num_heads);
  for (const auto& [name, value] : {std::pair{"sliding_window", node.sliding_window},
                                    std::pair{"chunk_size", node.chunk_size}, std::pair{"block_size", node.block_size}})
    if (value && !node.compress_rate) return fail(err, QM_INVALID, "%s is %d, expected 0 with `selected`", name, value);
  const AttentionContext context{node, call, nullptr};
  for (int64_t b = 0; b < call.batch; ++b) {
    if (!context.selects(b)) continue;
    for (int64_t token = 0; token < call.rows[3 * b + 1]; ++token) {
      for (int64_t i = 0; i < call.selected_lists; ++i) {
        const int32_t* const list = context.list(b, token, i);
        const int64_t count = listed(list, call.selected_size), own = context.slot(b, token);
        bool good = count > 0 && list[count - 1] <= own;
        for (int64_t at = 1; at < count; ++at) good &= list[at - 1] < list[at];
        if (!good)
          return fail(err, QM_INVALID, "selected[%lld, %lld, %lld]: expected ascending slots from 0 to %lld, then -1",
                      (long long)b, (long long)(call.rows[3 * b] + token), (long long)i, (long long)own);
      }
    }
  }
  return QM_OK;
}

int64_t workspace_of(const qm_attention& node, const AttentionCall& call) {
  const int64_t stores = plan_of(AttentionContext{node, call, nullptr}).bytes;
  return node.nope_size ? std::max(stores, plan_of(LatentContext{node, call}).bytes) : stores;
}

// A call with `selected` whose rows all have few tokens runs as one without it.
size_t workspace(const qm_attention& node, const qm_call& given) {
  const AttentionCall call(node, given);
  AttentionCall dense = call;
  dense.selected = nullptr;
  return static_cast<size_t>(std::max(workspace_of(node, call), workspace_of(node, dense)));
}

int run(const qm_attention& node, const qm_call& given, char* err) {
  AttentionCall call(node, given);
  const CpuKernel* kernel = select_kernel(err);
  if (!kernel) return QM_UNSUPPORTED;
  if (node.cache_format == k_cache_format_none && call.cache_type != QM_F32 && call.cache_type != QM_F16)
    return fail(err, QM_UNSUPPORTED, "the cache's type is bfloat16, the CPU kernels take float and float16");
  QM_TRY(check_rows(node, call, err));
  const bool appends =
      in_place(call, call.past_key, call.present_key) || in_place(call, call.past_value, call.present_value);
  if (appends && call.slots != call.past_slots)
    return fail(err, QM_INVALID, "present is past's memory, which has %lld slots, and is to have %lld",
                (long long)call.past_slots, (long long)call.slots);
  if (call.selected) {
    QM_TRY(check_selected(node, call, err));
    const AttentionContext context{node, call, nullptr};
    bool any = false;
    for (int64_t b = 0; b < call.batch; ++b) any |= context.selects(b);
    if (!any) call.selected = nullptr;
  }
  const AttentionRun run(node, call, *kernel->attention);
  run.store();
  if (node.nope_size)
    LatentRun(node, call, *kernel->attention).attend();
  else
    run.attend();
  return QM_OK;
}

}  // namespace

const CpuOperator cpu_attention = kCpuOperator<qm_attention, check_attention, workspace, run>;

}  // namespace quantmoe
