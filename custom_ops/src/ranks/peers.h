// Sums over the GPUs of one host, and gathers, by kernels that write to the other GPUs' memory. Nothing here knows NCCL
// or an engine.
#pragma once
#include <cuda_runtime_api.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "quantmoe/quant_moe_cuda.h"

namespace quantmoe {

class Peers {
 public:
  // Gives own cards of all ranks for this one's.
  using Exchange = std::function<std::vector<std::string>(const std::string& card)>;

  // On the current device; all ranks call it. Null in all ranks if one does not reach another's memory. Then they are
  // not on one host, their GPUs have no way to each other, NCCL_P2P_DISABLE is set, or there are too many.
  static std::unique_ptr<Peers> meet(int32_t rank, int32_t world, const Exchange& exchange);
  // On the same device, after all ranks' last call, when all others have parted.
  ~Peers();
  Peers(const Peers&) = delete;
  Peers& operator=(const Peers&) = delete;
  // Whether the ranks do these here; the same in all of them.
  static bool takes_sum(const qm_tensor& x) { return x.type != QM_F32; }
  static bool takes_norm(const qm_cuda_call& call);
  static bool takes_gather(const qm_tensor& x);
  // Enqueues AllReduce, AllReduceAddRMSNorm or AllGather. Throws std::runtime_error for CUDA's errors.
  void enqueue(const char* op, const void* node, qm_cuda_call call) const;
  // Ends calls of this rank that wait for others with an error; needs nothing that they may hold of the GPU.
  void give_up(cudaStream_t stream) const;
  // Leaves the others' memory, after this rank's last call.
  void part();

 private:
  Peers(int32_t rank, int32_t world) : peers_{rank, world, 0, {}} {}
  std::string offer();
  bool open(const std::vector<std::string>& cards);

  qm_cuda_peers peers_;
};

}  // namespace quantmoe
