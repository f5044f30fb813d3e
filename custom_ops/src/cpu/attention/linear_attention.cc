// CausalConv, GatedDelta and StateSpace on the CPU. A task is all tokens of a row and some channels, or of a row and a
// head: it alone reads and writes its part of the state, which may be in place.
#include <algorithm>

#include "core/parallel.h"
#include "cpu/attention/call_rows.h"
#include "cpu/kernel.h"
#include "cpu/operators.h"

namespace quantmoe {
namespace {

template <class Call>
int check_rows(const Call& call, char* err) {
  for (int64_t b = 0; b < call.batch; ++b) QM_TRY(CallRow(call.rows, b).check_tokens(call.tokens, err));
  return QM_OK;
}

// Runs body(b, i, scratch) for each row b and i < count; of the workspace lanes have `floats` each from `at` on.
template <class Body>
void each(const qm_call& call, int64_t batch, int64_t count, int64_t floats, const Body& body, int64_t at = 0) {
  parallel(lanes_of(call), call.parallel_for, call.parallel_context, batch * count, [&](int lane, int64_t task) {
    body(task / count, task % count, static_cast<float*>(call.workspace) + at + lane * floats);
  });
}

// The state that the lane of this one probably takes next.
const float* state_after(const StateContext& states, int64_t b, int64_t head, int lanes) {
  const int64_t next = std::min(b * states.heads + head + lanes, states.batch * states.heads - 1);
  return states.past_state + states.live() + next * states.head_state();
}

size_t conv_workspace(const qm_conv& node, const qm_call& call) {
  const ConvCall made{call.inputs, call.outputs};
  return static_cast<size_t>(lanes_of(call) * ConvContext{node, made}.scratch_floats() * 4);
}

int run_conv(const qm_conv& node, const qm_call& call, char* err) {
  const CpuKernel* kernel = select_kernel(err);
  if (!kernel) return QM_UNSUPPORTED;
  const ConvCall made{call.inputs, call.outputs};
  QM_TRY(check_rows(made, err));
  const ConvContext conv{node, made};
  each(call, made.batch, ceil_div(node.channels, kConvChannels), conv.scratch_floats(),
       [&](int64_t b, int64_t i, float* scratch) {
         kernel->linear_attention->conv(conv, b, i * kConvChannels, scratch);
       });
  return QM_OK;
}

size_t delta_workspace(const qm_delta& node, const qm_call& call) {
  const DeltaCall made{call.inputs, call.outputs};
  return static_cast<size_t>(lanes_of(call) * DeltaContext{node, made}.scratch_floats() * 4);
}

int run_delta(const qm_delta& node, const qm_call& call, char* err) {
  const CpuKernel* kernel = select_kernel(err);
  if (!kernel) return QM_UNSUPPORTED;
  const DeltaCall made{call.inputs, call.outputs};
  QM_TRY(check_rows(made, err));
  const DeltaContext delta{node, made};
  each(call, delta.batch, delta.heads, delta.scratch_floats(), [&](int64_t b, int64_t head, float* scratch) {
    kernel->linear_attention->delta(delta, b, head, state_after(delta, b, head, lanes_of(call)), scratch);
  });
  return QM_OK;
}

size_t space_workspace(const qm_space& node, const qm_call& call) {
  const SpaceCall made{call.inputs, call.outputs};
  const SpaceContext space{node, made, nullptr};
  return static_cast<size_t>(space.output_floats() + lanes_of(call) * space.scratch_floats()) * 4;
}

int run_space(const qm_space& node, const qm_call& call, char* err) {
  const CpuKernel* kernel = select_kernel(err);
  if (!kernel) return QM_UNSUPPORTED;
  const SpaceCall made{call.inputs, call.outputs};
  QM_TRY(check_rows(made, err));
  const SpaceContext space{node, made, call.workspace};
  const LinearAttentionFunctions& run = *kernel->linear_attention;
  const int64_t floats = space.scratch_floats(), at = space.output_floats();
  each(
      call, space.batch, space.heads, floats,
      [&](int64_t b, int64_t head, float* scratch) {
        run.space(space, b, head, state_after(space, b, head, lanes_of(call)), scratch);
      },
      at);
  each(
      call, space.batch, space.tokens, floats,
      [&](int64_t b, int64_t token, float* scratch) { run.space_norm(space, b, token, scratch); }, at);
  return QM_OK;
}

}  // namespace

const CpuOperator cpu_conv = kCpuOperator<qm_conv, check_conv, conv_workspace, run_conv>;
const CpuOperator cpu_delta = kCpuOperator<qm_delta, check_delta, delta_workspace, run_delta>;
const CpuOperator cpu_space = kCpuOperator<qm_space, check_space, space_workspace, run_space>;

}  // namespace quantmoe
