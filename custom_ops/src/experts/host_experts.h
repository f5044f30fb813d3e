// The host's part of the experts of a CUDA session (quantmoe.misses, docs/reference/expert-offloading.md). Threads
// multiply what the device asks for (qm_cuda_host), with the kernels of the CPU, from rows in their layout. No function
// of CUDA is called here.
//
// Invariants. The device writes a request, and no other one before the answer. So one thread serves, and what it reads
// does not change. Every request is answered, with NaN if the kernels fail.
#pragma once
#include <array>
#include <atomic>
#include <condition_variable>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "cuda/common/experts_memory.h"

namespace quantmoe {

// Threads that look for the next call for some time before they sleep: a layer's calls are tens of microseconds apart.
class HotPool {
 public:
  explicit HotPool(int lanes);  // the caller's thread is one
  ~HotPool();
  int lanes() const { return static_cast<int>(threads_.size()) + 1; }
  // As qm_parallel_for; of one thread at a time. Lanes that nobody has begun when the caller's own is done are its own.
  static void parallel_for(void* self, qm_task task, void* arg, size_t count);

 private:
  // A cache line for each thread, which only this thread and the caller write. It is twice the number of the last call
  // that the thread did, or that the caller did in its place. It is one more while the call runs.
  struct alignas(64) Lane {
    std::atomic<uint64_t> state{0};
  };
  static bool take(Lane& lane, uint64_t call, uint64_t state);
  void work(size_t lane);

  alignas(64) std::atomic<uint64_t> call_{0};  // its number and, in the low 16 bits, its lanes
  qm_task task_ = nullptr;
  void* arg_ = nullptr;
  std::vector<Lane> lanes_;
  std::atomic<uint32_t> sleeping_{0};
  std::atomic<bool> stopping_{false};
  std::mutex mutex_;
  std::condition_variable wanted_;
  std::vector<std::thread> threads_;
};

class HostExperts {
 public:
  explicit HostExperts(int threads) : pool_(threads) {}
  ~HostExperts();

  // While a session is created: a layer whose packed rows are in layout marlin, by its number. Throws
  // std::invalid_argument where the kernels of the CPU do not take such weights.
  int add(const qm_moe& moe, int64_t experts);
  // Of a layer's rows that pack() makes.
  int64_t bytes(int layer) const;
  int lanes() const { return pool_.lanes(); }
  // Makes a layer's rows of those at w13 and w2. Throws std::runtime_error: no memory, or an act-order that is none.
  void pack(int layer, const void* w13, const void* w2);
  // From now on a thread answers the requests at `host`, which stays where it is.
  void serve(qm_cuda_host* host);
  // Seconds of an expert, from a request for one token and `at_once` experts to its answer. This is the median of
  // requests for the layer's first `experts` in turn, with rows made for it. Infinity: the last answer is no number.
  // Meanwhile the device must ask nothing.
  double measure(int layer, const void* w13, const void* w2, int64_t experts, int64_t at_once);

 private:
  struct Layer {
    qm_moe moe, packed;  // as the kernels of the CPU see it, and as it was packed
    int64_t experts;
    std::array<int64_t, 2> row_bytes;
    char* rows[2];  // mapped; null before pack()
  };
  void pack_first(Layer& layer, const void* w13, const void* w2, int64_t experts);
  static void release(Layer& layer);
  bool multiply(const Layer& layer, int64_t tokens, int64_t top_k, const HostPlaces& host);
  void answer_until_stopped();

  HotPool pool_;
  std::vector<Layer> layers_;
  std::vector<char> workspace_;
  qm_cuda_host* host_ = nullptr;
  std::atomic<bool> stopping_{false};
  std::thread server_;
};

}  // namespace quantmoe
