// AllReduce, AllReduceAddRMSNorm, AllGather and ReduceScatter over NCCL.
#include <string>

#include "group.h"
#include "plugin.h"

namespace quantmoe {
namespace {

int64_t elements(const Dims& dims) {
  int64_t count = 1;
  for (int32_t i = 0; i < dims.nbDims; ++i) count *= dims.d[i];
  return count;
}
constexpr int64_t kTypeBytes = 2;  // float16 and bfloat16

// A node that needs the other ranks.
template <class Node>
class OfRanks : public Plugin {
 public:
  OfRanks(const char* op, SharedLayer layer, const Node& node) : Plugin(op, std::move(layer), &node), node_(node) {}
  // A context's goes with it, and so do its graphs.
  ~OfRanks() override {
    if (all_) all_->forget(stream_);
  }
  OfRanks(const OfRanks&) = delete;
  OfRanks& operator=(const OfRanks&) = delete;
  // A context of an engine that runs is made in all ranks at the same time: they meet here.
  IPluginV3* attachToContext(IPluginResourceContext*) noexcept override {
    return attempt<IPluginV3*>(nullptr, [&] {
      const Communicator* all = layer_->runs ? &communicator_of(place_of({}, node_)) : nullptr;
      auto* copy = static_cast<OfRanks*>(make_copy());
      copy->all_ = all;
      return copy;
    });
  }
  // The others wait for a part that is not sent.
  int32_t enqueue(const PluginTensorDesc* inputs, const PluginTensorDesc* outputs, const void* const* x, void* const* y,
                  void* workspace, cudaStream_t stream) noexcept override {
    const int32_t status = Plugin::enqueue(inputs, outputs, x, y, workspace, stream);
    if (status && all_) attempt(0, [&] { return all_->fail_all(layer_->name + " has failed"), 0; });
    return status;
  }

 protected:
  bool configure(const Inputs&) override { return true; }
  bool prepare(const Inputs& in) override {
    x_ = in.dims[0];
    type_ = static_cast<::qm_type>(qm_type(in.types[0]));
    return true;
  }
  virtual int64_t outputs_of(int64_t count) const = 0;  // elements of y for `count` elements of x
  virtual void run(const void* const* inputs, void* const* outputs, void* workspace, cudaStream_t stream) const = 0;
  int launch(const void* const* inputs, void* const* outputs, void* workspace, cudaStream_t stream,
             char* error) override {
    const int64_t count = elements(x_);
    if (count == 0) return QM_OK;
    if (all_) {
      agree(stream);
      stream_ = stream;
      run(inputs, outputs, workspace, stream);
      return QM_OK;
    }
    for (int32_t i = 0; i < outputs_.count; ++i)  // a builder has no other ranks
      if (write_zeros(outputs[i], static_cast<size_t>(outputs_of(count) * kTypeBytes), stream, error))
        return QM_INVALID;
    return QM_OK;
  }

  const Node node_;
  const Communicator* all_ = nullptr;  // null: a builder's
  Dims x_{};
  ::qm_type type_{};

 private:
  // Before the first call of a context that is not captured: a rank with another file would wait without end.
  void agree(cudaStream_t stream) {
    if (agreed_ || is_captured(stream)) return;
    all_->expect_same(layer_->name + " x " + to_text(x_));
    agreed_ = true;
  }
  bool agreed_ = false;
  cudaStream_t stream_ = nullptr;  // of the last call
};

class Reduce final : public OfRanks<qm_reduce> {
 public:
  Reduce(SharedLayer layer, const qm_reduce& node) : OfRanks("AllReduce", std::move(layer), node) {}

 private:
  IPluginV3* make_copy() const override { return new Reduce(layer_, node_); }
  int64_t outputs_of(int64_t count) const override { return count; }
  void run(const void* const* in, void* const* out, void*, cudaStream_t stream) const override {
    all_->reduce(in[0], out[0], elements(x_), type_, stream);
  }
};

class ReduceNorm final : public OfRanks<qm_reduce_norm> {
 public:
  ReduceNorm(SharedLayer layer, const qm_reduce_norm& node) : OfRanks("AllReduceAddRMSNorm", std::move(layer), node) {}

 private:
  IPluginV3* make_copy() const override { return new ReduceNorm(layer_, node_); }
  bool prepare(const Inputs& in) override {
    for (int32_t i = 0; i < inputs_.count; ++i) {
      tensors_[i] = {nullptr, qm_type(in.types[i]), {in.dims[i].nbDims, {}}};
      std::copy_n(in.dims[i].d, in.dims[i].nbDims, tensors_[i].shape.sizes);
    }
    return OfRanks::prepare(in);
  }
  int64_t outputs_of(int64_t count) const override { return count; }
  void run(const void* const* in, void* const* out, void*, cudaStream_t stream) const override {
    qm_tensor inputs[kMostInputs], outputs[kMostOutputs]{};
    std::copy(std::begin(tensors_), std::end(tensors_), inputs);
    for (int32_t i = 0; i < inputs_.count; ++i) inputs[i].data = const_cast<void*>(in[i]);
    for (int32_t i = 0; i < outputs_.count; ++i) outputs[i].data = out[i];
    all_->reduce(node_, {inputs, outputs, nullptr, stream, nullptr, nullptr});
  }

  qm_tensor tensors_[kMostInputs]{};  // without data
};

class Gather final : public OfRanks<qm_gather> {
 public:
  Gather(SharedLayer layer, const qm_gather& node) : OfRanks("AllGather", std::move(layer), node) {}
  size_t getWorkspaceSize(const DynamicPluginTensorDesc* inputs, int32_t, const DynamicPluginTensorDesc*,
                          int32_t) const noexcept override {
    const Dims& most = inputs[0].max;
    return rows(most) > 1 ? static_cast<size_t>(outputs_of(elements(most)) * kTypeBytes) : 0;
  }

 private:
  IPluginV3* make_copy() const override { return new Gather(layer_, node_); }
  int64_t rows(const Dims& dims) const { return node_.axis < 0 ? rows_of(dims) : 1; }
  int64_t outputs_of(int64_t count) const override { return count * node_.world; }
  void run(const void* const* in, void* const* out, void* workspace, cudaStream_t stream) const override {
    all_->gather(in[0], out[0], elements(x_), rows(x_), type_, workspace, stream);
  }
};

class Scatter final : public OfRanks<qm_scatter> {
 public:
  Scatter(SharedLayer layer, const qm_scatter& node) : OfRanks("ReduceScatter", std::move(layer), node) {}

 private:
  IPluginV3* make_copy() const override { return new Scatter(layer_, node_); }
  int64_t outputs_of(int64_t count) const override { return count / node_.world; }
  void run(const void* const* in, void* const* out, void*, cudaStream_t stream) const override {
    all_->scatter(in[0], out[0], outputs_of(elements(x_)), type_, stream);
  }
};

}  // namespace

IPluginV3* make_plugin(const SharedLayer& layer, const qm_reduce& node, char* error) {
  return check_reduce(node, error) ? nullptr : new Reduce(layer, node);
}
IPluginV3* make_plugin(const SharedLayer& layer, const qm_reduce_norm& node, char* error) {
  return check_reduce_norm(node, error) ? nullptr : new ReduceNorm(layer, node);
}
IPluginV3* make_plugin(const SharedLayer& layer, const qm_gather& node, char* error) {
  return check_gather(node, error) ? nullptr : new Gather(layer, node);
}
IPluginV3* make_plugin(const SharedLayer& layer, const qm_scatter& node, char* error) {
  return check_scatter(node, error) ? nullptr : new Scatter(layer, node);
}

}  // namespace quantmoe
