// The operators that need the other ranks of a sliced model, on the CPU.
#pragma once
#include <algorithm>
#include <memory>
#include <utility>

#include "common/node.h"
#include "cpu/cpu_node.h"
#include "cpu/group.h"
#include "experts/per_session.h"

namespace quantmoe {

// A node that needs the other ranks.
class RankNode : public Node {
 public:
  using Node::Node;

 protected:
  template <class Attributes>
  void join(const OrtKernelInfo* info, const Attributes& node);
  void meet(Piece part, void* y) const;

 private:
  std::shared_ptr<Member> member_;
};

template <class Attributes>
void RankNode::join(const OrtKernelInfo* info, const Attributes& node) {
  const Place place = place_in_group(node, "to one name in the sessions of all ranks, in this process");
  const OrtLogger* logger;  // each session has one: it says which session this is
  check(api_->KernelInfo_GetLogger(info, &logger), "the session's logger");
  try {
    member_ = PerSession<Member>::of(logger, place);
  } catch (const std::invalid_argument& error) {
    fail(error.what());
  }
  check_place(member_->place(), place);
}

inline void RankNode::meet(Piece part, void* y) const {
  try {
    member_->meet(std::move(part), y);
  } catch (const std::runtime_error& error) {
    throw std::runtime_error(node_ + ": " + error.what());
  }
}

class ReduceNode : public RankNode {
 public:
  ReduceNode(const Op& op, const OrtApi* api, const OrtKernelInfo* info, WeightSource, bool) : RankNode(op, api, info) {
    const auto reduce = read_checked<qm_reduce>(info, check_reduce);
    join(info, reduce);
  }
  void run(OrtKernelContext* context) const override {
    const OrtValue* x = get_input(context, AllReduce_x);
    const Shape shape = shape_of(x);
    meet({data_of(x), elements(shape), op_.type(), node_}, data_of(get_output(context, 0, shape)));
  }
};

class GatherNode : public RankNode {
 public:
  GatherNode(const Op& op, const OrtApi* api, const OrtKernelInfo* info, WeightSource, bool) : RankNode(op, api, info) {
    gather_ = read_checked<qm_gather>(info, check_gather);
    join(info, gather_);
  }
  void run(OrtKernelContext* context) const override {
    const OrtValue* x = get_input(context, AllGather_x);
    const FreeSizes<int64_t> sizes = check_inputs(context);
    OrtValue* y = get_output(context, AllGather_y, sizes);
    const int64_t count = elements(shape_of(x)), row = gather_.axis < 0 ? sizes.at('N') : count;
    meet({data_of(x), count, op_.type(), node_, std::max(row, int64_t{1})}, data_of(y));
  }

 private:
  qm_gather gather_{};
};

class ScatterNode : public RankNode {
 public:
  ScatterNode(const Op& op, const OrtApi* api, const OrtKernelInfo* info, WeightSource, bool)
      : RankNode(op, api, info) {
    scatter_ = read_checked<qm_scatter>(info, check_scatter);
    join(info, scatter_);
  }
  void run(OrtKernelContext* context) const override {
    const OrtValue* x = get_input(context, ReduceScatter_x);
    OrtValue* y = get_output(context, ReduceScatter_y, check_inputs(context));
    meet({.x = data_of(x), .count = elements(shape_of(x)), .type = op_.type(), .node = node_, .scattered = true},
         data_of(y));
  }

 private:
  qm_scatter scatter_{};
};

}  // namespace quantmoe
