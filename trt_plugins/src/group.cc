#include "group.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstring>
#include <fstream>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>

#include "environment.h"

namespace quantmoe {
namespace {

constexpr const char* kGroup = "QUANTMOE_GROUP";
constexpr const char* kGroupFile = "QUANTMOE_GROUP_FILE";
constexpr const char* kTimeout = "QUANTMOE_TIMEOUT";

[[noreturn]] void refuse(const std::string& what) { throw std::invalid_argument(what); }

// torchrun and launchers like it say which process this is.
void check_launcher(const Place& place) {
  const auto differs = [](const char* name, int32_t own) {
    const std::string said = environment(name);
    return said != "" && said != std::to_string(own);
  };
  if (differs("RANK", place.rank) || differs("WORLD_SIZE", place.world))
    refuse("the engine is " + rank_of(place) + ", the launcher's process rank " + environment("RANK") + " of " +
           environment("WORLD_SIZE") + " (RANK, WORLD_SIZE)");
}

// The file with the group's name, which rank 0 writes and the others wait for. It appears with its whole content. Rank
// 0 removes it when the ranks have met. A file that is there before is another run's.
class GroupFile {
 public:
  explicit GroupFile(const std::string& path) : path_(path) {}
  ~GroupFile() {
    if (written_) unlink(path_.c_str());
  }
  GroupFile(const GroupFile&) = delete;
  GroupFile& operator=(const GroupFile&) = delete;

  void write(const std::string& name) {
    const std::string fresh = path_ + "." + std::to_string(getpid());
    const int file = open(fresh.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    const bool whole = file >= 0 && ::write(file, name.data(), name.size()) == static_cast<ssize_t>(name.size());
    if (file >= 0) close(file);
    written_ = whole && link(fresh.c_str(), path_.c_str()) == 0;
    const int error = errno;
    unlink(fresh.c_str());
    if (!written_ && error == EEXIST) refuse(describe() + " exists: remove it, an earlier run has left it");
    if (!written_) refuse(describe() + " cannot be written: " + std::strerror(error));
  }
  std::string read(std::chrono::seconds patience) const {
    const auto end = std::chrono::steady_clock::now() + patience;
    for (std::string name; std::chrono::steady_clock::now() < end;) {
      if (std::ifstream(path_) >> name) return name;
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
    throw std::runtime_error(describe() + " has not come from rank 0 in " + std::to_string(patience.count()) + " s");
  }

 private:
  std::string describe() const { return std::string(kGroupFile) + " " + path_; }
  const std::string path_;
  bool written_ = false;
};

std::unique_ptr<Communicator> meet(Place place) {
  place.group = {environment(kGroup), environment(kTimeout), kGroup, kTimeout};
  check_launcher(place);
  GroupFile file(environment(kGroupFile));
  const bool by_file = environment(kGroupFile) != "";
  if (by_file == (place.group.name != ""))
    refuse("the engine is " + rank_of(place) + " of a sliced model: set " + kGroup +
           " to rank 0's NCCL id in hex, or " + kGroupFile + " to a file that rank 0 writes it to" +
           (by_file ? ", not both" : ""));
  if (by_file) {
    place.group.name_key = kGroupFile;
    if (place.rank == 0) file.write(place.group.name = new_group());
    if (place.rank != 0) place.group.name = file.read(place.group.patience());
  }
  int device = 0;
  if (const cudaError_t error = cudaGetDevice(&device))
    throw std::runtime_error(std::string("CUDA: ") + cudaGetErrorString(error));
  return std::make_unique<Communicator>(DevicePlace{place, device});
}

// Never destroyed: TensorRT's objects may outlive the library's exit handlers.
struct Met {
  std::mutex mutex;
  std::unique_ptr<Communicator> communicator;
  std::string failure;
};

}  // namespace

const Communicator& communicator_of(const Place& place) {
  static auto& met = *new Met;
  const std::lock_guard lock(met.mutex);
  if (met.failure != "") throw std::runtime_error(met.failure);
  if (!met.communicator) try {
      met.communicator = meet(place);
    } catch (const std::exception& error) {
      met.failure = error.what();
      throw;
    }
  const Place& own = met.communicator->place();
  std::string differs;
  if (own.rank != place.rank || own.world != place.world)
    differs = "the engine is " + rank_of(place) + ", the process " + rank_of(own);
  else if (own.export_id != place.export_id)
    differs = "the engine is of " + export_of(place.export_id) + ", the ranks have met with engines of " +
              export_of(own.export_id);
  if (differs != "") {
    met.communicator->fail_all(differs);
    refuse(differs);
  }
  return *met.communicator;
}

}  // namespace quantmoe
