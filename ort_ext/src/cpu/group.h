// The ranks of a sliced model whose sessions are in one process, each run by its own thread. They add up and join on
// the CPU, for AllReduce, ReduceScatter and AllGather. Nothing here knows ONNX Runtime.
#pragma once
#include <cstdint>
#include <memory>
#include <string>

#include "quantmoe/quant_moe.h"
#include "ranks/place.h"

namespace quantmoe {

// What a rank has of a sum, or of rows.
struct Piece {
  const void* x;
  int64_t count;
  qm_type type;
  std::string node;        // which of the model's nodes this is
  int64_t row = 0;         // elements of a row, each followed by the next rank's; 0: of a sum
  bool scattered = false;  // of the sum each rank has its part alone
};

class Group;

// A session's membership, from its first node on to its end.
class Member {
 public:
  // Joins, or makes the group. Throws std::invalid_argument for a rank that it has already, and for another world.
  explicit Member(const Place& place);
  ~Member();
  Member(const Member&) = delete;
  Member& operator=(const Member&) = delete;
  const Place& place() const { return place_; }
  // Writes the sum of all ranks' parts, or their rows, when the last of them has called. Throws std::runtime_error,
  // naming the ranks, when some do not call in time, and in all ranks when their parts are not of one node.
  void meet(Piece part, void* y) const;

 private:
  const Place place_;
  const std::chrono::seconds patience_;
  const std::shared_ptr<Group> group_;
};

}  // namespace quantmoe
