// What the nodes of both libraries have in common: reading attributes and tensors, and errors.
//
// Failures are exceptions in here; guard turns them into an OrtStatus, so that none leaves the library.
#pragma once
#include <algorithm>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "common/operator.h"
#include "core/numbers.h"
#include "core/shapes.h"
#include "hashes/identity.h"

namespace quantmoe {

inline int64_t elements(const Shape& shape) {
  return std::accumulate(shape.begin(), shape.end(), int64_t{1}, std::multiplies<>());
}

// What a node of any of the operators does; a subclass each.
class Node {
 public:
  virtual ~Node() = default;
  virtual void run(OrtKernelContext* context) const = 0;
  const OrtApi* api() const { return api_; }

 protected:
  Node(const Op& op, const OrtApi* api, const OrtKernelInfo* info);
  [[noreturn]] void fail(const std::string& what) const { throw std::invalid_argument(node_ + ": " + what); }
  void check(OrtStatus* status, const std::string& what = "ONNX Runtime") const;
  Shape shape_of(const OrtValue* value) const;
  void* data_of(const OrtValue* value) const;
  const OrtValue* get_input(const OrtKernelContext* context, size_t index) const;
  OrtValue* get_output(OrtKernelContext* context, size_t index, const Shape& shape) const;
  void read_attributes(const OrtKernelInfo* info, void* attributes);
  std::optional<std::string> find_string(const OrtKernelInfo* info, const std::string& attribute) const;
  const OrtValue* get_constant(const OrtKernelInfo* info, size_t input) const;
  const OrtValue* get_weight(const OrtKernelInfo* info, size_t input, Shape& shape) const;
  template <class Read>
  void check_identity(const OrtKernelInfo* info, size_t input, bool verify, const Read& read) const;

  // A line of ONNX Runtime's log, severity INFO.
  void log_info(const OrtKernelContext* context, const std::string& said) const {
    const OrtLogger* logger;
    check(api_->KernelContext_GetLogger(context, &logger));
    check(api_->Logger_LogMessage(logger, ORT_LOGGING_LEVEL_INFO, ("quantmoe: " + said).c_str(), ORT_FILE, __LINE__,
                                  __func__));
  }

  // The sizes of a run, as its inputs have them; throws unless their shapes are op.def's. tensors: null, or filled.
  FreeSizes<int64_t> check_inputs(const OrtKernelContext* context, std::vector<qm_tensor>* tensors = nullptr) const;
  // The tensors of a run, checked, in op.def's order.
  struct Tensors {
    std::vector<qm_tensor> inputs, outputs;
  };
  Tensors read_tensors(OrtKernelContext* context) const {
    return read_tensors(context, [](const FreeSizes<int64_t>&, const qm_tensor*) {});
  }
  // check(sizes, inputs) runs before ONNX Runtime allocates the outputs.
  template <class Check>
  Tensors read_tensors(OrtKernelContext* context, const Check& check) const {
    const qm_tensor none{nullptr, op_.type(), {-1, {}}};
    Tensors tensors{std::vector(static_cast<size_t>(op_.inputs.most), none), {}};
    const FreeSizes<int64_t> sizes = check_inputs(context, &tensors.inputs);
    check(sizes, tensors.inputs.data());
    add_outputs(context, sizes, tensors);
    return tensors;
  }
  static qm_tensor packed_tensor(const void* data, const Shape& shape) {
    return {const_cast<void*>(data), 0, {2, {shape[0], shape[1]}}};
  }
  // The inputs before a run: packed ones, and initializers with a QM_CONSTANT line, whose shapes are checked. The
  // others have rank 0, or -1 where the node lacks them.
  std::vector<qm_tensor> read_constants(const OrtKernelInfo* info) const;
  size_t input_count() const { return input_names_.size(); }
  bool has_input(size_t index) const { return index < input_names_.size() && !input_names_[index].empty(); }
  bool is_packed(size_t input) const { return shapes_.input(input).packed; }
  // An output of the shape that op.def states.
  OrtValue* get_output(OrtKernelContext* context, size_t index, const FreeSizes<int64_t>& sizes) const {
    return get_output(context, index, shapes_.output(index, sizes, MakeNumbers{}));
  }

  // Of QuantMoE: throws if a token has no id.
  void check_ids(const OrtKernelContext* context, const FreeSizes<int64_t>& sizes) const {
    if (sizes.at('K') < 1)
      fail("topk_ids has shape " + text_of(shape_of(get_input(context, QuantMoE_topk_ids))) +
           ", expected one id or more");
  }
  // A cache with the new tokens; throws where a cache with fewer slots is bound to it.
  OrtValue* get_present(OrtKernelContext* context, size_t index, const FreeSizes<int64_t>& sizes) const;
  // Throws: a run needs so many slots of a cache that has fewer.
  [[noreturn]] void fail_slots(const FreeSizes<int64_t>& sizes, int64_t needed) const;
  // Throws where a node with a block_size lacks its block_table.
  void check_table(const qm_attention& node) const {
    if (size_t count = CachedAttention_block_table + 1; node.block_size && input_count() < count)
      fail("it has " + std::to_string(input_count()) + " inputs, expected " + std::to_string(count) +
           ", block_table too, where block_size is " + std::to_string(node.block_size));
  }
  // Throws unless the caches have the type of cache_format.
  void check_caches(const qm_attention& attention) const;

  // A node's attributes; throws what `check` has against them.
  template <class Attributes>
  Attributes read_checked(const OrtKernelInfo* info, int (*check)(const Attributes&, char*)) {
    Attributes node{};
    read_attributes(info, &node);
    char error[QM_ERROR_SIZE];
    if (check(node, error)) fail(error);
    return node;
  }
  // The place of a node's rank in the group of the session entry, which `how` says how to set; throws without one.
  template <class Attributes>
  Place place_in_group(const Attributes& node, const std::string& how) const {
    const Place place = place_of(*op_.group, node);
    if (place.group.name == "")
      fail("this file is " + rank_of(place) + " of a sliced model: set the session entry quantmoe.group " + how);
    return place;
  }
  // Throws unless a node is of the rank that the file's first such node is of.
  void check_place(const Place& first, const Place& own) const;

  const Op& op_;
  const OrtApi* api_;
  std::string node_;  // the operator and the node's name, the beginning of every message

 private:
  std::string input_name(size_t index) const {
    return index < input_names_.size() ? input_names_[index] : op_.inputs.first[index].name;
  }

  int64_t host_size(const OrtKernelContext* context, size_t index) const;
  void match(size_t index, const Shape& found, FreeSizes<int64_t>& sizes) const;  // throws unless it is op.def's
  void add_outputs(OrtKernelContext* context, const FreeSizes<int64_t>& sizes, Tensors& tensors) const;
  qm_tensor tensor_of(const TensorSlot& slot, const OrtValue* value, const Shape& shape, bool or_none) const;
  std::vector<std::string> input_names_;  // the graph's
  ShapeRules shapes_;                     // from read_attributes on
};

// Compares a packed tensor with what the node says of it, where it does. read: as check_identity's.
template <class Read>
void Node::check_identity(const OrtKernelInfo* info, size_t input, bool verify, const Read& read) const {
  const std::string name = op_.inputs.first[input].name, attribute = name + "_identity";
  const std::optional<std::string> wanted = find_string(info, attribute);
  if (!wanted) return;  // an export before there were any
  Shape shape;
  get_weight(info, input, shape);
  try {
    quantmoe::check_identity(name, *wanted, static_cast<size_t>(shape[0] * shape[1]) * 4, verify, read);
  } catch (const std::invalid_argument& error) {
    fail(error.what());
  }
}

}  // namespace quantmoe
