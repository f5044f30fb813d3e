// Hadamard on the CPU. A task is some blocks of features, whatever their rows are.
#include "cpu/hadamard.h"

#include <algorithm>

#include "core/parallel.h"
#include "cpu/operators.h"
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wunused-function"
#include "cpu/elementwise.h"  // the conversions, compiled for any machine
#pragma GCC diagnostic pop

namespace quantmoe {
namespace {

constexpr int64_t kFeaturesPerTask = 4096;

int64_t task_features(const qm_hadamard& node) { return std::max<int64_t>(node.size, kFeaturesPerTask); }
int64_t features_of(const qm_hadamard& node, const qm_call& call) {
  return rows_of(call.inputs[Hadamard_x].shape) * node.features;
}
int64_t tasks_of(const qm_hadamard& node, const qm_call& call) {
  return ceil_div(features_of(node, call), task_features(node));
}
// No more than have something to do.
int lanes_of(const qm_hadamard& node, const qm_call& call) {
  const int64_t most = call.lanes > 1 ? call.lanes : 1;
  return static_cast<int>(std::clamp<int64_t>(tasks_of(node, call), 1, most));
}

size_t workspace(const qm_hadamard& node, const qm_call& call) {
  return static_cast<size_t>(lanes_of(node, call) * task_features(node)) * sizeof(float);
}

int run(const qm_hadamard& node, const qm_call& call, char*) {
  const TensorsOf<qm_hadamard> tensors{call.inputs, call.outputs};
  const auto type = static_cast<qm_type>(call.inputs[Hadamard_x].type);
  const int64_t element = type == QM_F32 ? 4 : 2, all = features_of(node, call), each = task_features(node);
  parallel(lanes_of(node, call), call.parallel_for, call.parallel_context, tasks_of(node, call),
           [&](int lane, int64_t task) {
             float* const x = static_cast<float*>(call.workspace) + lane * each;
             const int64_t first = task * each, count = std::min(each, all - first);
             to_float(type, static_cast<const uint8_t*>(tensors.x) + first * element, count, x);
             rotate(x, count, node.size);
             from_float(type, x, count, static_cast<uint8_t*>(tensors.y) + first * element);
           });
  return QM_OK;
}

}  // namespace

const CpuOperator cpu_hadamard = kCpuOperator<qm_hadamard, check_hadamard, workspace, run>;

}  // namespace quantmoe
