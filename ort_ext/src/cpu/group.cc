#include "cpu/group.h"

#include <algorithm>
#include <condition_variable>
#include <cstring>
#include <map>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <vector>

#include "cpu/scalar.h"

namespace quantmoe {
namespace {

// By name. Never destroyed: sessions may outlive the library's exit handlers.
std::mutex& groups_mutex() {
  static auto& one = *new std::mutex;
  return one;
}
std::map<std::string, std::weak_ptr<Group>>& groups() {
  static auto& map = *new std::map<std::string, std::weak_ptr<Group>>;
  return map;
}

}  // namespace

// A meeting has two phases. First the ranks arrive with their parts. When the last one has arrived, all of them read
// all parts (leaving_ > 0). None returns before the last one has read, because its part may be freed then. Then the
// next meeting begins. When a rank has waited too long, all that have arrived give up.
class Group {
 public:
  static std::shared_ptr<Group> join(const Place& place);
  void leave(int32_t rank);
  void meet(const Place& place, Piece part, void* y, std::chrono::seconds patience);

 private:
  std::string difference(const Place& place) const;
  void refuse(const Place& place, const std::string& why);
  void give_up(const std::string& why);
  std::string missing() const;
  std::string difference() const;
  void finish();
  template <class Load, class Store>
  void add(int64_t begin, int64_t end, const Load& load, const Store& store) const;
  void add(int32_t rank, void* y) const;
  void join(void* y) const;

  std::mutex mutex_;
  std::condition_variable changed_;
  int32_t export_id_ = 0;                    // of the files
  std::vector<bool> joined_;                 // by rank
  std::vector<std::optional<Piece>> parts_;  // of ranks that have arrived
  int32_t arrived_ = 0, leaving_ = 0;
  int64_t attempt_ = 0;  // meetings that were given up
  std::string failure_;  // why the last of those was
  std::string refused_;  // why the last session that came has not joined; "": it has
};

std::shared_ptr<Group> Group::join(const Place& place) {
  const std::lock_guard lock(groups_mutex());
  std::erase_if(groups(), [](const auto& entry) { return entry.second.expired(); });
  auto& entry = groups()[place.group.name];
  std::shared_ptr<Group> found = entry.lock();
  if (!found) {
    entry = found = std::make_shared<Group>();
    found->export_id_ = place.export_id;
    found->joined_.resize(static_cast<size_t>(place.world));
    found->parts_.resize(static_cast<size_t>(place.world));
  }
  const std::lock_guard own(found->mutex_);
  if (const std::string why = found->difference(place); !why.empty()) found->refuse(place, why);
  if (found->joined_[static_cast<size_t>(place.rank)])
    throw std::invalid_argument("the group \"" + place.group.name + "\" has a session of rank " +
                                std::to_string(place.rank) + " already");
  found->refused_ = "";
  found->joined_[static_cast<size_t>(place.rank)] = true;
  return found;
}

// Between a file and those that have joined; "": none.
std::string Group::difference(const Place& place) const {
  const std::string own = "this file is rank " + std::to_string(place.rank) + " of ",
                    group = ", the group \"" + place.group.name + "\" has sessions of ";
  if (joined_.size() != static_cast<size_t>(place.world))
    return own + std::to_string(place.world) + group + std::to_string(joined_.size()) + " ranks";
  if (export_id_ != place.export_id) return own + export_of(place.export_id) + group + export_of(export_id_);
  return "";
}

// The ranks that wait for this one hear it, and those that meet before another one has come.
void Group::refuse(const Place& place, const std::string& why) {
  refused_ = "rank " + std::to_string(place.rank) + "'s session was refused: " + why;
  if (arrived_ > 0 && leaving_ == 0) give_up(refused_);
  throw std::invalid_argument(why);
}

void Group::leave(int32_t rank) {
  const std::lock_guard lock(mutex_);
  joined_[static_cast<size_t>(rank)] = false;
}

std::string Group::missing() const {
  std::string text;
  for (size_t rank = 0; rank < parts_.size(); ++rank)
    if (!parts_[rank])
      text += (text.empty() ? "rank " : ", rank ") + std::to_string(rank) + (joined_[rank] ? "" : " (no session)");
  return text;
}

// What differs between the parts of a sum; "": nothing.
std::string Group::difference() const {
  const Piece& first = *parts_[0];
  for (size_t rank = 1; rank < parts_.size(); ++rank) {
    const Piece& part = *parts_[rank];
    const std::string who = "rank " + std::to_string(rank) + " is at ";
    if (part.node != first.node)
      return who + part.node + ", rank 0 at " + first.node + ": expected files of one export, and runs in one order";
    if (part.count != first.count || part.type != first.type || part.row != first.row)
      return who + std::to_string(part.count) + " elements, rank 0 at " + std::to_string(first.count) +
             ": expected the same inputs in all ranks";
  }
  return "";
}

template <class Load, class Store>
void Group::add(int64_t begin, int64_t end, const Load& load, const Store& store) const {
  for (int64_t i = begin; i < end; ++i) {
    float sum = load(parts_[0]->x, i);
    for (size_t rank = 1; rank < parts_.size(); ++rank) sum += load(parts_[rank]->x, i);
    store(i - begin, sum);
  }
}

void Group::add(int32_t rank, void* y) const {
  const int64_t own = parts_[0]->count / (parts_[0]->scattered ? static_cast<int64_t>(parts_.size()) : 1);
  const int64_t begin = parts_[0]->scattered ? rank * own : 0, end = begin + own;
  const auto half = [](const void* x, int64_t i) { return static_cast<const uint16_t*>(x)[i]; };
  auto* const sums = static_cast<uint16_t*>(y);
  switch (parts_[0]->type) {
    case QM_F32:
      return add(
          begin, end, [](const void* x, int64_t i) { return static_cast<const float*>(x)[i]; },
          [y](int64_t i, float sum) { static_cast<float*>(y)[i] = sum; });
    case QM_F16:
      return add(
          begin, end, [half](const void* x, int64_t i) { return half_to_float(half(x, i)); },
          [sums](int64_t i, float sum) { sums[i] = float_to_half(sum); });
    case QM_BF16:
      return add(
          begin, end, [half](const void* x, int64_t i) { return bfloat_to_float(half(x, i)); },
          [sums](int64_t i, float sum) { sums[i] = float_to_bfloat(sum); });
  }
}

void Group::join(void* y) const {
  const Piece& first = *parts_[0];
  const auto bytes = static_cast<size_t>(first.row) * (first.type == QM_F32 ? 4 : 2);
  auto* to = static_cast<char*>(y);
  for (int64_t row = 0; row < first.count / first.row; ++row)
    for (const auto& part : parts_) {
      std::memcpy(to, static_cast<const char*>(part->x) + static_cast<size_t>(row) * bytes, bytes);
      to += bytes;
    }
}

void Group::finish() {
  for (auto& one : parts_) one.reset();
  arrived_ = 0;
  changed_.notify_all();
}

void Group::give_up(const std::string& why) {
  failure_ = why;
  ++attempt_;
  finish();
}

void Group::meet(const Place& place, Piece part, void* y, std::chrono::seconds patience) {
  const std::string rank = "rank " + std::to_string(place.rank);
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return leaving_ == 0; });
  if (!refused_.empty()) throw std::runtime_error(refused_);
  const bool rows = part.row > 0;
  auto& own = parts_[static_cast<size_t>(place.rank)];
  if (own) throw std::runtime_error(rank + " is in two runs at a time, expected one after the other");
  own = std::move(part);
  const int64_t attempt = attempt_;
  if (++arrived_ == place.world) {
    leaving_ = place.world;
    changed_.notify_all();
  } else if (!changed_.wait_for(lock, patience, [&] { return leaving_ > 0 || attempt_ != attempt; })) {
    give_up("the group \"" + place.group.name + "\" of " + std::to_string(place.world) + " ranks waited " +
            std::to_string(patience.count()) + " s for " + missing());
  }
  if (attempt_ != attempt) throw std::runtime_error(failure_);
  lock.unlock();
  const std::string problem = difference();
  if (problem.empty()) rows ? join(y) : add(place.rank, y);
  lock.lock();
  if (--leaving_ == 0)
    finish();
  else
    changed_.wait(lock, [this] { return leaving_ == 0; });
  if (!problem.empty()) throw std::runtime_error(problem);
}

Member::Member(const Place& place) : place_(place), patience_(place.group.patience()), group_(Group::join(place)) {}

Member::~Member() { group_->leave(place_.rank); }

void Member::meet(Piece part, void* y) const { group_->meet(place_, std::move(part), y, patience_); }

}  // namespace quantmoe
