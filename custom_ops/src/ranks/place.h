// Which of a sliced model's ranks this is, and how it meets the others. Nothing here knows an engine.
#pragma once
#include <chrono>
#include <cstdint>
#include <string>

namespace quantmoe {

// As they were given; "": not given.
struct GroupSettings {
  std::string name, timeout;
  // What they are called where they are given, for messages.
  const char* name_key = "quantmoe.group";
  const char* timeout_key = "quantmoe.timeout";

  bool operator==(const GroupSettings&) const = default;
  // How long a rank waits for the others; 30 s unless it is given. Throws std::invalid_argument for what is no number
  // of seconds from 1 to 86400.
  std::chrono::seconds patience() const;
};

// A rank's place in a group.
struct Place {
  GroupSettings group;
  int32_t rank, world;
  int32_t export_id;  // of the file; 0: not known
};

// A node's, of AllReduce, AllGather or ReduceScatter.
template <class Node>
Place place_of(const GroupSettings& group, const Node& node) {
  return {group, node.rank, node.world, node.export_id};
}
inline std::string rank_of(const Place& place) {
  return "rank " + std::to_string(place.rank) + " of " + std::to_string(place.world);
}
// "export 1a2b3c4d", for messages.
std::string export_of(int32_t export_id);

}  // namespace quantmoe
