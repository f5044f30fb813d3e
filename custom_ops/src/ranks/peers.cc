#include "ranks/peers.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <sstream>
#include <stdexcept>
#include <utility>

#include "core/tensors.h"
#include "cuda/ranks/peers.h"
#include "ranks/hex.h"

namespace quantmoe {
namespace {

constexpr const char* kNone = "-";
// A rank's bytes of a gather up to which this takes less time than NCCL's.
constexpr int64_t kMostGathered = int64_t{6} << 20;

// The same for all processes of a host, also in containers.
std::string host() {
  std::string id;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> id;
  return id;
}

bool is_disabled() {
  const char* said = std::getenv("NCCL_P2P_DISABLE");
  return said && *said && std::strcmp(said, "0") != 0;
}

}  // namespace

// A box of this rank's, and what the others need to reach it; kNone: they cannot.
std::string Peers::offer() {
  int device = 0, multiprocessors = 0;
  void*& box = peers_.boxes[peers_.rank];
  char error[QM_ERROR_SIZE];
  cudaIpcMemHandle_t handle{};
  const bool made = cudaGetDevice(&device) == cudaSuccess &&
                    cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device) == cudaSuccess &&
                    qm_cuda_allocate_box(peers_.world, &box, error) == QM_OK &&
                    cudaIpcGetMemHandle(&handle, box) == cudaSuccess;
  (void)cudaGetLastError();
  if (!made) return kNone;
  return host() + " " + std::to_string(std::min(2 * multiprocessors, QM_CUDA_MOST_BLOCKS)) + " " +
         to_hex(&handle, sizeof(handle));
}

bool Peers::open(const std::vector<std::string>& cards) {
  peers_.blocks = QM_CUDA_MOST_BLOCKS;
  for (int32_t other = 0; other < peers_.world; ++other) {
    std::istringstream words(cards[static_cast<size_t>(other)]);
    std::string where, digits;
    int32_t blocks = 0;
    if (!(words >> where >> blocks >> digits) || where != host()) return false;
    peers_.blocks = std::min(peers_.blocks, blocks);
    cudaIpcMemHandle_t handle;
    from_hex(digits, &handle, sizeof(handle));
    if (other != peers_.rank &&
        cudaIpcOpenMemHandle(&peers_.boxes[other], handle, cudaIpcMemLazyEnablePeerAccess) != cudaSuccess) {
      (void)cudaGetLastError();
      peers_.boxes[other] = nullptr;
      return false;
    }
  }
  return true;
}

std::unique_ptr<Peers> Peers::meet(int32_t rank, int32_t world, const Exchange& exchange) {
  if (world < 2 || world > QM_CUDA_PEERS) return nullptr;
  std::unique_ptr<Peers> peers(new Peers(rank, world));
  const std::vector<std::string> cards = exchange(is_disabled() ? kNone : peers->offer());
  const std::string own = peers->open(cards) ? "reached" : kNone;
  for (const std::string& said : exchange(own))
    if (said != "reached") return nullptr;
  return peers;
}

Peers::~Peers() {
  part();
  if (void* box = peers_.boxes[peers_.rank]) cudaFree(box);
}

void Peers::part() {
  for (int32_t other = 0; other < peers_.world; ++other)
    if (other != peers_.rank && peers_.boxes[other]) cudaIpcCloseMemHandle(std::exchange(peers_.boxes[other], nullptr));
}

void Peers::give_up(cudaStream_t stream) const {
  const uint32_t yes = 1;
  (void)cudaMemcpyAsync(&static_cast<Box*>(peers_.boxes[peers_.rank])->given_up, &yes, sizeof(yes),
                        cudaMemcpyHostToDevice, stream);
}

bool Peers::takes_gather(const qm_tensor& x) {
  return x.type != QM_F32 && 2 * rows_of(x.shape) * last_of(x.shape) <= kMostGathered;
}

bool Peers::takes_norm(const qm_cuda_call& call) {
  const int64_t columns = call.inputs[AddRMSNorm_weight].shape.sizes[0];
  return columns % 8 == 0 && columns <= QM_CUDA_SUM_COLUMNS;
}

void Peers::enqueue(const char* op, const void* node, qm_cuda_call call) const {
  call.peers = &peers_;
  constexpr qm_cuda_node_plan kNone{};
  char error[QM_ERROR_SIZE];
  if (qm_cuda_launch_node(op, node, &kNone, &call, error) != QM_OK) throw std::runtime_error(error);
}

}  // namespace quantmoe
