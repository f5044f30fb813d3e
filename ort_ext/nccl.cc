#include "nccl.h"

#include <dlfcn.h>

#include <condition_variable>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <thread>

namespace quantmoe {
namespace {

// What is used of nccl.h, whose ABI NCCL 2 keeps.
struct UniqueId {
  char bytes[128];
};
constexpr int kSuccess = 0, kSum = 0, kFloat16 = 6, kFloat32 = 7, kBfloat16 = 9;

struct Nccl {
  int (*comm_init_rank)(void** comm, int ranks, UniqueId id, int rank);
  int (*comm_destroy)(void* comm);
  int (*all_reduce)(const void* x, void* y, size_t count, int type, int op, void* comm, cudaStream_t stream);
  const char* (*get_error_string)(int result);

  static const Nccl& get() {
    static const Nccl one;
    return one;
  }
  void check(int result, const char* what) const {
    if (result != kSuccess) throw std::runtime_error(std::string("NCCL: ") + what + ": " + get_error_string(result));
  }

 private:
  Nccl() {
    const char* named = std::getenv("QUANTMOE_NCCL");
    const std::string path = named && *named ? named : "libnccl.so.2";
    void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (!library)
      throw std::runtime_error("NCCL cannot be opened (" + std::string(dlerror()) +
                               "); install it (pip install nvidia-nccl-cu13) and name its libnccl.so.2 in "
                               "QUANTMOE_NCCL, or in LD_LIBRARY_PATH "
                               "its folder");
    const auto find = [&](auto& function, const char* name) {
      function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(dlsym(library, name));
      if (!function) throw std::runtime_error(path + " has no " + name + ": expected NCCL 2");
    };
    find(comm_init_rank, "ncclCommInitRank");
    find(comm_destroy, "ncclCommDestroy");
    find(all_reduce, "ncclAllReduce");
    find(get_error_string, "ncclGetErrorString");
  }
};

UniqueId id_of(const std::string& hex) {
  UniqueId id{};
  if (hex.size() != 2 * sizeof(id.bytes) || hex.find_first_not_of("0123456789abcdefABCDEF") != std::string::npos)
    throw std::invalid_argument("quantmoe.group has " + std::to_string(hex.size()) + " characters, expected the " +
                                std::to_string(2 * sizeof(id.bytes)) + " hex digits of rank 0's ncclGetUniqueId");
  for (size_t i = 0; i < sizeof(id.bytes); ++i)
    id.bytes[i] = static_cast<char>(std::stoi(hex.substr(2 * i, 2), nullptr, 16));
  return id;
}

// A meeting of ranks, which may never end: NCCL waits for all of them. It is left to its thread then.
struct Meeting {
  std::mutex mutex;
  std::condition_variable changed;
  bool done = false;
  int result = kSuccess;
  cudaError_t error = cudaSuccess;
  void* comm = nullptr;
};

}  // namespace

Communicator::Communicator(const DevicePlace& where) : place_(where.place) {
  const Nccl& nccl = Nccl::get();
  const UniqueId id = id_of(place_.group.name);
  const auto meeting = std::make_shared<Meeting>();
  std::thread([meeting, &nccl, id, place = place_, device = where.device] {
    void* comm = nullptr;
    int result = kSuccess;
    const cudaError_t error = cudaSetDevice(device);
    if (error == cudaSuccess) result = nccl.comm_init_rank(&comm, place.world, id, place.rank);
    const std::lock_guard lock(meeting->mutex);
    meeting->done = true;
    meeting->result = result;
    meeting->error = error;
    meeting->comm = comm;
    meeting->changed.notify_all();
  }).detach();
  const std::chrono::seconds patience = place_.group.patience();
  std::unique_lock lock(meeting->mutex);
  if (!meeting->changed.wait_for(lock, patience, [&] { return meeting->done; }))
    throw std::runtime_error("rank " + std::to_string(place_.rank) + " waited " + std::to_string(patience.count()) +
                             " s for the other " + std::to_string(place_.world - 1) +
                             " ranks to make their sessions, with the same quantmoe.group and of as many ranks");
  if (meeting->error != cudaSuccess)
    throw std::runtime_error(std::string("CUDA: ") + cudaGetErrorString(meeting->error));
  nccl.check(meeting->result, "ncclCommInitRank");
  comm_ = meeting->comm;
}

Communicator::~Communicator() { Nccl::get().comm_destroy(comm_); }

void Communicator::reduce(const void* x, void* y, int64_t count, qm_type type, cudaStream_t stream) const {
  const int of = type == QM_F32 ? kFloat32 : type == QM_F16 ? kFloat16 : kBfloat16;
  const Nccl& nccl = Nccl::get();
  nccl.check(nccl.all_reduce(x, y, static_cast<size_t>(count), of, kSum, comm_, stream), "ncclAllReduce");
}

}  // namespace quantmoe
