// Sums over the GPUs of a sliced model's ranks by NCCL, which is opened at run time. It is libnccl.so.2 of the process
// or of the library path, or the file that QUANTMOE_NCCL names. If the GPUs reach each other's memory, Peers adds up
// instead. Nothing here knows an engine.
#pragma once
#include <cuda_runtime_api.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "quantmoe/quant_moe.h"
#include "ranks/peers.h"
#include "ranks/place.h"
#include "ranks/watch.h"

namespace quantmoe {

// A rank, and the GPU that it is on.
struct DevicePlace {
  Place place;
  int device;
};

// A new group's name: an NCCL id in hex, which rank 0 makes. Throws std::runtime_error without NCCL.
std::string new_group();

// Whether what is enqueued on the stream becomes a CUDA graph's.
bool is_captured(cudaStream_t stream);

// A rank's NCCL communicator. A rank that goes while this one waits for it, also in a CUDA graph's replay, ends the
// run: the process has no CUDA after that.
class Communicator {
 public:
  // Meets the other ranks, which make theirs at the same time; the group's name is the NCCL id in hex. Throws
  // std::invalid_argument for what is no id, and std::runtime_error without NCCL, for its errors, and when the ranks
  // have not met in time.
  explicit Communicator(const DevicePlace& where);
  ~Communicator();
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;
  const Place& place() const { return place_; }
  // Enqueues y = the sum of all ranks' x. Throws std::runtime_error for an error of NCCL's, and when a rank is gone.
  void reduce(const void* x, void* y, int64_t count, qm_type type, cudaStream_t stream) const;
  // The same of AddRMSNorm of that sum; `sum` may get this rank's rows alone, as qm_cuda_launch_node says.
  void reduce(const qm_reduce_norm& node, const qm_cuda_call& call) const;
  // As reduce, for y = all ranks' x, [ranks, count]. With x [rows > 1, columns], y is [rows, ranks, columns], and
  // `parts` is memory of its size.
  void gather(const void* x, void* y, int64_t count, int64_t rows, qm_type type, void* parts,
              cudaStream_t stream) const;
  // The same of y = the rank's part of the sum of all ranks' x [ranks, count].
  void scatter(const void* x, void* y, int64_t count, qm_type type, cudaStream_t stream) const;
  // Nothing captured on the stream, which may go, runs any more.
  void forget(cudaStream_t stream) const;
  // Waits for all ranks; throws std::runtime_error in all of them unless they call it with one text.
  void expect_same(const std::string& node) const;
  // As expect_same, before a run's first node, if its shape differs from the run before. Ranks with different shapes
  // would wait without end, or add up values that do not belong together. Captured runs are not compared.
  void agree(const std::string& node, const std::string& shape, cudaStream_t stream) const;
  // Ends the runs of all ranks with an error: this one cannot have its part in them. The first reason counts.
  void fail_all(const std::string& why) const;

 private:
  std::vector<std::string> exchange(const std::string& card) const;
  void watch();
  void expect_all() const;
  void mark(cudaStream_t stream) const;
  void order(cudaStream_t stream) const;
  void give_up(const std::string& why);

  const Place place_;
  const int device_;
  void* comm_ = nullptr;
  mutable std::atomic<cudaStream_t> captured_{};  // of graphs
  mutable std::string first_, agreed_;            // a run's first node, and the shape that it had last
  std::atomic<bool> given_up_{false};
  cudaEvent_t done_ = nullptr;              // the last call outside graphs
  cudaStream_t end_ = nullptr;              // for launch_trap
  std::unique_ptr<Watch> watch_;            // null: there are no others
  std::shared_ptr<Peers> peers_;            // null: NCCL does it all
  std::atomic<const Peers*> waited_for_{};  // peers_, for the watch's thread
};

}  // namespace quantmoe
