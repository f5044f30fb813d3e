// QuantMoE on the CPU: the steps of layer.h, once a slice.
#include "cpu/hadamard.h"
#include "cpu/moe/down.h"
#include "cpu/moe/gate_up.h"
#include "cpu/operators.h"

namespace quantmoe {
namespace {

struct MoERun {
  const qm_moe& moe;
  const MoECall& call;
  LayerCall layer;
  ActivationRows rows;
  GateUp gate_up;
  Hidden hidden{};
  Down down;
  RowScratch scratch;
  int scratch_lanes;

  MoERun(const qm_moe& moe, const MoECall& call, const CpuKernel& kernel)
      : moe(moe),
        call(call),
        layer(kernel, call, call.tokens, call.top_k, call.local_experts),
        rows{moe.apply_router_weight_on_input ? call.top_k : 1},
        gate_up(layer, moe, call),
        down(layer, moe.w2, w2_matrix(moe), w2_parts(moe), call.w2,
             moe.apply_router_weight_on_input ? nullptr : call.topk_weights, call.output) {
    down.w2.rotated = moe.w2_hadamard > 0;
    Arena tokens{nullptr};
    lay_out_tokens(tokens);
    layer.divide(tokens.used);
    gate_up.plan();
    down.plan();
    // Lanes beyond the tasks of the widest step would have nothing to do.
    const int64_t row_tasks = ceil_div(layer.tokens * rows.each, kRowsPerTask), pack_tasks = serial() ? 1 : experts();
    layer.lanes = static_cast<int>(
        std::min(layer.most_lanes, std::max({row_tasks, gate_up.most_tasks(), pack_tasks, down.most_tasks()})));
    scratch.rows = layer.tile_rows;
    scratch.fit(down.w2.panel);
    scratch_lanes = static_cast<int>(std::min<int64_t>(layer.lanes, pack_tasks));
    if (gate_up.prepares_rows()) {
      scratch.fit(gate_up.w13.panel);
      scratch_lanes = layer.lanes;
    }
  }
  int64_t experts() const { return layer.local_experts; }
  bool serial() const { return layer.tokens < kSerialRows; }
  void lay_out_tokens(Arena& arena) {
    layer.lay_out_tokens(arena);
    rows.lay_out(arena, layer.tokens, gate_up.w13);
    hidden.lay_out(arena, layer.pairs(), moe.intermediate_size);
    down.lay_out_tokens(arena);
  }
  size_t lay_out(void* workspace) {
    Arena arena{static_cast<uint8_t*>(workspace)};
    lay_out_tokens(arena);
    layer.lay_out(arena);
    gate_up.lay_out(arena);
    down.lay_out(arena);
    scratch.lay_out(arena, scratch_lanes);
    gate_up.w13.read = arena.take<const void*>(call.read_experts ? experts() : 0);
    down.w2.read = arena.take<const void*>(call.read_experts ? experts() : 0);
    if (!call.read_experts) gate_up.w13.read = down.w2.read = nullptr;
    return arena.used;
  }

  void load(int64_t slice) {
    const ExpertIds ids{moe, call, layer};
    layer.take_slice(slice);
    std::fill(hidden.bad, hidden.bad + layer.pairs(), uint8_t{0});
    route(ids, layer.routes);
    rows.load(ids, gate_up.w13, layer.bad);
  }
  int run_gate_up(char* err) {
    QM_TRY(gate_up.run(rows, scratch, hidden, layer.bad, err));
    if (down.w2.rotated) rotate_h();
    return QM_OK;
  }
  // Of the round's experts: h times w2's pre-scales, in blocks times Hadamard's matrix.
  void rotate_h() {
    const int64_t* const begin = layer.routes.begin;
    const int64_t from = begin[layer.first_expert], width = moe.intermediate_size;
    layer.for_rows(begin[layer.end_expert] - from, [&](int, int64_t first, int64_t count) {
      int64_t expert = layer.first_expert;
      for (int64_t position = from + first; position < from + first + count; ++position) {
        while (position >= begin[expert + 1]) ++expert;
        const float* const pre_scales = down.w2.pre_scales(expert, 0);
        float* const h = hidden.h + position * width;
        for (int64_t i = 0; pre_scales && i < width; ++i) h[i] *= pre_scales[i];
        rotate(h, width, moe.w2_hadamard);
      }
    });
  }
  int pack(char* err) {
    const auto expert = [&](int lane, int64_t e) {
      down.pack(lane, e, 0, layer.tile_count(layer.routes.rows(e)), hidden, scratch, layer.bad);
    };
    const int64_t first = layer.first_expert, end = layer.end_expert;
    if (serial())
      for (int64_t e = first; e < end; ++e) expert(0, e);
    else
      layer.for_each(end - first, [&](int lane, int64_t i) { expert(lane, first + i); });
    return down.w2.check_perms("w2", moe.expert_offset, err);
  }
  void find_largest_x() {
    find_largest(layer, gate_up.w13, [&](int64_t position) {
      return rows.x + rows.index(layer.routes.order[position]) * gate_up.w13.panel.kp;
    });
  }
  void find_largest_h() {
    find_largest(layer, down.w2, [&](int64_t position) {
      return hidden.bad[position] ? nullptr : hidden.h + position * moe.intermediate_size;
    });
  }
  // body() for each round of the experts.
  template <class Body>
  int for_experts(const Body& body, char* err) {
    for (layer.end_expert = 0; layer.end_expert < experts();) {
      layer.first_expert = layer.end_expert;
      layer.end_expert = experts();
      if (call.read_experts)
        layer.end_expert = call.read_experts(call.experts_context, layer.routes.begin, layer.first_expert,
                                             gate_up.w13.read, down.w2.read, err);
      if (layer.end_expert < 0) return QM_INVALID;
      QM_TRY(body());
    }
    return QM_OK;
  }
  int run(char* err) {
    const ExpertIds ids{moe, call, layer};
    QM_TRY(check_ids(ids, err));
    clear_largest(layer, gate_up.w13);
    clear_largest(layer, down.w2);
    const bool sliced = layer.slices > 1;
    if (sliced && finds_scales(layer, gate_up.w13))
      for (int64_t slice = 0; slice < layer.slices; ++slice) {
        load(slice);
        const auto find = [&]() -> int { return find_largest_x(), QM_OK; };
        QM_TRY(for_experts(find, err));
      }
    if (sliced && finds_scales(layer, down.w2))
      for (int64_t slice = 0; slice < layer.slices; ++slice) {
        load(slice);
        const auto find = [&]() -> int {
          QM_TRY(run_gate_up(err));
          return find_largest_h(), QM_OK;
        };
        QM_TRY(for_experts(find, err));
      }
    for (int64_t slice = 0; slice < layer.slices; ++slice) {
      load(slice);
      const auto compute = [&]() -> int {
        if (!sliced) find_largest_x();
        QM_TRY(run_gate_up(err));
        if (!sliced) find_largest_h();
        QM_TRY(pack(err));
        return down.multiply(), QM_OK;
      };
      QM_TRY(for_experts(compute, err));
    }
    return QM_OK;
  }
};

size_t workspace(const qm_moe& moe, const qm_call& call) {
  const MoECall made(moe, call);
  char err[QM_ERROR_SIZE];
  const CpuKernel* kernel = made.tokens ? select_kernel(err) : nullptr;
  return kernel ? MoERun(moe, made, *kernel).lay_out(nullptr) : 0;
}

int run(const qm_moe& moe, const qm_call& call, char* err) {
  const MoECall made(moe, call);
  if (made.tokens == 0) return QM_OK;
  if (made.tokens < 0 || made.top_k < 1 || made.tokens > INT32_MAX / made.top_k)
    return fail(err, QM_INVALID, "%lld tokens of %lld experts each, expected fewer than 2^31 pairs",
                (long long)made.tokens, (long long)made.top_k);
  const CpuKernel* kernel = select_kernel(err);
  if (!kernel) return QM_UNSUPPORTED;
  MoERun layer(moe, made, *kernel);
  layer.lay_out(made.workspace);
  return layer.run(err);
}

}  // namespace

const CpuOperator cpu_moe = with_packed<qm_moe, check_packed>(kCpuOperator<qm_moe, check_moe, workspace, run>);

}  // namespace quantmoe
