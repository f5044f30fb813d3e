// HyperConnection on the CPU: a task is some tokens, which are a page of additions each beside few exponentials.
#include <algorithm>

#include "core/attributes.h"
#include "core/parallel.h"
#include "cpu/operators.h"
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wunused-function"
#include "cpu/elementwise.h"  // exp and the conversions, compiled for any machine
#pragma GCC diagnostic pop

namespace quantmoe {
namespace {

constexpr int64_t kTokensPerTask = 8;

void softmax(float* x, int n) {
  const float top = *std::max_element(x, x + n);
  float sum = 0.0f;
  for (int i = 0; i < n; ++i) sum += x[i] = exp_f32(x[i] - top);
  for (int i = 0; i < n; ++i) x[i] /= sum;
}

// comb [n, n]: each number over the sum of its row or column.
void divide_by_rows(float* comb, int n, float epsilon) {
  for (float* row = comb; row < comb + n * n; row += n) {
    float sum = row[0];
    for (int j = 1; j < n; ++j) sum += row[j];
    sum += epsilon;
    for (int j = 0; j < n; ++j) row[j] /= sum;
  }
}
void divide_by_columns(float* comb, int n, float epsilon) {
  float sums[kMaxStreams];
  std::copy_n(comb, n, sums);
  for (const float* row = comb + n; row < comb + n * n; row += n)
    for (int j = 0; j < n; ++j) sums[j] += row[j];
  for (int j = 0; j < n; ++j) sums[j] += epsilon;
  for (float* row = comb; row < comb + n * n; row += n)
    for (int j = 0; j < n; ++j) row[j] /= sums[j];
}

// z [n (2 + n)] becomes pre, post and comb.
void connect(const qm_hyper_connection& node, float* z) {
  const int n = node.num_streams;
  float* const comb = z + 2 * n;
  for (int i = 0; i < n; ++i) z[i] = sigmoid_f32(z[i]) + node.epsilon;
  for (int i = n; i < 2 * n; ++i) z[i] = 2.0f * sigmoid_f32(z[i]);
  for (int i = 0; i < n; ++i) softmax(comb + i * n, n);
  for (int i = 0; i < n * n; ++i) comb[i] += node.epsilon;
  divide_by_columns(comb, n, node.epsilon);
  for (int i = 1; i < node.iterations; ++i) {
    divide_by_rows(comb, n, node.epsilon);
    divide_by_columns(comb, n, node.epsilon);
  }
}

int64_t tokens_of(const qm_call& call) { return rows_of(call.inputs[HyperConnection_mixes].shape); }
int64_t tasks_of(const qm_call& call) { return ceil_div(tokens_of(call), kTokensPerTask); }
// No more than have something to do.
int lanes_of(const qm_call& call) {
  return call.lanes > 1 ? static_cast<int>(std::clamp<int64_t>(tasks_of(call), 1, call.lanes)) : 1;
}

size_t workspace(const qm_hyper_connection& node, const qm_call& call) {
  return static_cast<size_t>(lanes_of(call)) * 2 * node.hidden_size * sizeof(float);
}

int run(const qm_hyper_connection& node, const qm_call& call, char*) {
  const TensorsOf<qm_hyper_connection> tensors{call.inputs, call.outputs};
  const auto type = static_cast<qm_type>(call.inputs[HyperConnection_streams].type);
  const int64_t tokens = tokens_of(call), n = node.num_streams, size = node.hidden_size;
  const int64_t bytes = size * (type == QM_F32 ? 4 : 2);
  parallel(lanes_of(call), call.parallel_for, call.parallel_context, tasks_of(call), [&](int lane, int64_t task) {
    float* const sum = static_cast<float*>(call.workspace) + lane * 2 * size;
    float* const wide = sum + size;  // a stream in f32
    for (int64_t t = task * kTokensPerTask; t < std::min(tokens, (task + 1) * kTokensPerTask); ++t) {
      float z[kMaxStreams * (2 + kMaxStreams)];
      const float* const mixes = tensors.mixes + t * n * (2 + n);
      for (int64_t k = 0; k < n * (2 + n); ++k)
        z[k] = mixes[k] * tensors.scale[std::min<int64_t>(k / n, 2)] + tensors.base[k];
      connect(node, z);
      from_float(QM_F32, z + n, n, tensors.post + t * n);
      from_float(QM_F32, z + 2 * n, n * n, tensors.comb + t * n * n);
      const uint8_t* stream = static_cast<const uint8_t*>(tensors.streams) + t * n * bytes;
      for (int64_t i = 0; i < n; ++i, stream += bytes) {
        if (type != QM_F32) to_float(type, stream, size, wide);
        const float* const x = type == QM_F32 ? reinterpret_cast<const float*>(stream) : wide;
        if (i == 0)
          for (int64_t d = 0; d < size; ++d) sum[d] = z[i] * x[d];
        else
          for (int64_t d = 0; d < size; ++d) sum[d] += z[i] * x[d];
      }
      from_float(type, sum, size, static_cast<uint8_t*>(tensors.collapsed) + t * bytes);
    }
  });
  return QM_OK;
}

}  // namespace

const CpuOperator cpu_hyper_connection = kCpuOperator<qm_hyper_connection, check_hyper_connection, workspace, run>;

}  // namespace quantmoe
