// Sums over the GPUs of a sliced model's ranks by NCCL, which is opened at run time: libnccl.so.2 of the process, of
// the library path, or the file that QUANTMOE_NCCL names. Nothing here knows ONNX Runtime.
#pragma once
#include <cuda_runtime_api.h>

#include <atomic>
#include <cstdint>
#include <memory>

#include "group.h"
#include "watch.h"

namespace quantmoe {

// A rank, and the GPU that it is on.
struct DevicePlace {
  Place place;
  int device;
};

// A session's NCCL communicator, from its first node on to its end. A rank that goes while this one waits for
// it, also in a CUDA graph's replay, ends the run: the process has no CUDA after that.
class Communicator {
 public:
  // Meets the other ranks, whose sessions are made at the same time; the group's name is the NCCL id in hex. Throws
  // std::invalid_argument for what is no id, and std::runtime_error without NCCL, for its errors, and when the ranks
  // have not met in time.
  explicit Communicator(const DevicePlace& where);
  ~Communicator();
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;
  const Place& place() const { return place_; }
  // Enqueues y = the sum of all ranks' x. Throws std::runtime_error for an error of NCCL's, and when a rank is gone.
  void reduce(const void* x, void* y, int64_t count, qm_type type, cudaStream_t stream) const;
  // The same of y = all ranks' x, [ranks, count].
  void gather(const void* x, void* y, int64_t count, qm_type type, cudaStream_t stream) const;
  // The same of y = the rank's part of the sum of all ranks' x [ranks, count].
  void scatter(const void* x, void* y, int64_t count, qm_type type, cudaStream_t stream) const;

 private:
  std::vector<std::string> exchange(const std::string& card) const;
  void watch();
  void expect_all() const;
  void mark(cudaStream_t stream) const;
  void give_up(const std::string& why);

  const Place place_;
  const int device_;
  void* comm_ = nullptr;
  mutable std::atomic<cudaStream_t> captured_{};  // of the session's graphs
  std::atomic<bool> given_up_{false};
  cudaEvent_t done_ = nullptr;    // the session's last call outside graphs
  cudaStream_t end_ = nullptr;    // for launch_trap
  std::unique_ptr<Watch> watch_;  // null: there are no others
};

}  // namespace quantmoe
