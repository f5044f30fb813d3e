#include "ranks/nccl.h"

#include <dlfcn.h>

#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <thread>
#include <vector>

#include "core/attributes.h"
#include "core/tensors.h"
#include "ranks/hex.h"
#include "ranks/trap.h"

namespace quantmoe {
namespace {

// What is used of nccl.h, whose ABI NCCL 2 keeps.
struct UniqueId {
  char bytes[128];
};
constexpr int kSuccess = 0, kInProgress = 7, kSum = 0, kInt8 = 0, kFloat16 = 6, kFloat32 = 7, kBfloat16 = 9;

struct Nccl {
  int (*get_unique_id)(UniqueId* id);
  int (*comm_init_rank)(void** comm, int ranks, UniqueId id, int rank);
  int (*comm_destroy)(void* comm);
  int (*all_reduce)(const void* x, void* y, size_t count, int type, int op, void* comm, cudaStream_t stream);
  int (*all_gather)(const void* x, void* y, size_t count, int type, void* comm, cudaStream_t stream);
  int (*reduce_scatter)(const void* x, void* y, size_t count, int type, int op, void* comm, cudaStream_t stream);
  int (*get_async_error)(void* comm, int* error);
  const char* (*get_error_string)(int result);
  const char* (*get_last_error)(void* comm);

  static const Nccl& get() {
    static const Nccl one;
    return one;
  }
  void check(int result, const char* what) const {
    if (result != kSuccess)
      throw std::runtime_error(std::string("NCCL: ") + what + ": " + get_error_string(result) + ": " +
                               get_last_error(nullptr));
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
      if (!function) throw std::runtime_error(path + " has no " + name + ": expected NCCL 2.13 or newer");
    };
    find(get_unique_id, "ncclGetUniqueId");
    find(comm_init_rank, "ncclCommInitRank");
    find(comm_destroy, "ncclCommDestroy");
    find(all_reduce, "ncclAllReduce");
    find(all_gather, "ncclAllGather");
    find(reduce_scatter, "ncclReduceScatter");
    find(get_async_error, "ncclCommGetAsyncError");
    find(get_error_string, "ncclGetErrorString");
    find(get_last_error, "ncclGetLastError");
  }
};

void must(cudaError_t error) {
  if (error != cudaSuccess) throw std::runtime_error(std::string("CUDA: ") + cudaGetErrorString(error));
}

int type_of(qm_type type) { return type == QM_F32 ? kFloat32 : type == QM_F16 ? kFloat16 : kBfloat16; }

UniqueId id_of(const GroupSettings& group) {
  const std::string& hex = group.name;
  UniqueId id{};
  if (hex.size() != 2 * sizeof(id.bytes) || hex.find_first_not_of("0123456789abcdefABCDEF") != std::string::npos)
    throw std::invalid_argument(std::string(group.name_key) + " has " + std::to_string(hex.size()) +
                                " characters, expected the " + std::to_string(2 * sizeof(id.bytes)) +
                                " hex digits of rank 0's ncclGetUniqueId");
  from_hex(hex, id.bytes, sizeof(id.bytes));
  return id;
}

// A call that needs the other ranks, and may never end. It is left to its thread then. False: it has not ended in time.
bool in_time(std::chrono::seconds patience, const std::function<void()>& call) {
  struct State {
    std::mutex mutex;
    std::condition_variable changed;
    bool done = false;
  };
  const auto state = std::make_shared<State>();
  std::thread([state, call] {
    call();
    const std::lock_guard lock(state->mutex);
    state->done = true;
    state->changed.notify_all();
  }).detach();
  std::unique_lock lock(state->mutex);
  return state->changed.wait_for(lock, patience, [&] { return state->done; });
}

}  // namespace

bool is_captured(cudaStream_t stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  must(cudaStreamIsCapturing(stream, &status));
  return status != cudaStreamCaptureStatusNone;
}

std::string new_group() {
  const Nccl& nccl = Nccl::get();
  UniqueId id;
  nccl.check(nccl.get_unique_id(&id), "ncclGetUniqueId");
  return to_hex(id.bytes, sizeof(id.bytes));
}

Communicator::Communicator(const DevicePlace& where) : place_(where.place), device_(where.device) {
  const Nccl& nccl = Nccl::get();
  const UniqueId id = id_of(place_.group);
  struct Found {
    int result = kSuccess;
    cudaError_t error = cudaSuccess;
    void* comm = nullptr;
  };
  const auto found = std::make_shared<Found>();
  const std::chrono::seconds patience = place_.group.patience();
  if (!in_time(patience, [found, &nccl, id, place = place_, device = device_] {
        found->error = cudaSetDevice(device);
        if (found->error == cudaSuccess) found->result = nccl.comm_init_rank(&found->comm, place.world, id, place.rank);
      }))
    throw std::runtime_error("rank " + std::to_string(place_.rank) + " waited " + std::to_string(patience.count()) +
                             " s for the other " + std::to_string(place_.world - 1) +
                             " ranks to begin, with the same " + place_.group.name_key + " and of as many ranks");
  must(found->error);
  nccl.check(found->result, "ncclCommInitRank");
  comm_ = found->comm;
  if (place_.world > 1) watch();
}

// NCCL waits for all ranks to destroy theirs, which those that are gone do not, and others later.
Communicator::~Communicator() {
  watch_.reset();
  if (given_up_) {
    new auto(std::move(peers_));  // kept: its kernels may not have ended
    return;
  }
  if (end_) cudaStreamDestroy(end_);
  if (done_) cudaEventDestroy(done_);
  constexpr std::chrono::seconds kParting{3};
  in_time(kParting, [comm = comm_, device = device_, peers = std::move(peers_)] {
    if (cudaSetDevice(device) != cudaSuccess) return;
    if (peers) peers->part();
    Nccl::get().comm_destroy(comm);  // when all have parted; what others reach of this rank's memory goes after it
  });
}

// Own cards of all ranks for this one's, which has no NUL.
std::vector<std::string> Communicator::exchange(const std::string& card) const {
  const size_t all = Watch::kCardSize * static_cast<size_t>(place_.world);
  std::vector<char> cards(all);
  char* const own = cards.data() + Watch::kCardSize * static_cast<size_t>(place_.rank);
  card.copy(own, Watch::kCardSize - 1);
  cudaStream_t stream = nullptr;
  must(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  std::unique_ptr<CUstream_st, cudaError_t (*)(cudaStream_t)> own_stream(stream, cudaStreamDestroy);
  void* device = nullptr;
  must(cudaMalloc(&device, all));
  std::unique_ptr<void, cudaError_t (*)(void*)> owned(device, cudaFree);
  order(stream);
  must(cudaMemcpyAsync(device, cards.data(), all, cudaMemcpyHostToDevice, stream));
  const char* const sent = static_cast<const char*>(device) + (own - cards.data());
  const Nccl& nccl = Nccl::get();
  nccl.check(nccl.all_gather(sent, device, Watch::kCardSize, kInt8, comm_, stream), "ncclAllGather");
  must(cudaMemcpyAsync(cards.data(), device, all, cudaMemcpyDeviceToHost, stream));
  const auto end = std::chrono::steady_clock::now() + place_.group.patience();
  cudaError_t state;
  const auto gone = [this] { return watch_ ? watch_->failure() : ""; };
  while ((state = cudaStreamQuery(stream)) == cudaErrorNotReady && std::chrono::steady_clock::now() < end &&
         gone().empty())
    std::this_thread::sleep_for(std::chrono::microseconds(50));
  if (state == cudaErrorNotReady) {
    (void)owned.release();  // freeing it would wait
    (void)own_stream.release();
    expect_all();
    throw std::runtime_error("rank " + std::to_string(place_.rank) + " waited " +
                             std::to_string(place_.group.patience().count()) + " s for the other ranks' words");
  }
  must(state);
  std::vector<std::string> found;
  for (size_t rank = 0; rank < static_cast<size_t>(place_.world); ++rank)
    found.emplace_back(cards.data() + Watch::kCardSize * rank);
  return found;
}

void Communicator::watch() {
  int before = 0;
  must(cudaGetDevice(&before));
  must(cudaSetDevice(device_));
  must(cudaStreamCreateWithFlags(&end_, cudaStreamNonBlocking));
  must(cudaEventCreateWithFlags(&done_, cudaEventDisableTiming));
  must(launch_trap(false, end_));  // loaded now: it could not be while a kernel waits for a rank
  must(cudaStreamSynchronize(end_));
  const Watched watched{
      [this] {
        int error = kSuccess;
        const Nccl& nccl = Nccl::get();
        const int result = nccl.get_async_error(comm_, &error);
        const int found = result != kSuccess ? result : error;
        return found == kSuccess || found == kInProgress ? "" : std::string("NCCL: ") + nccl.get_error_string(found);
      },
      [this] {
        const cudaStream_t stream = captured_;
        return cudaEventQuery(done_) == cudaErrorNotReady || (stream && cudaStreamQuery(stream) == cudaErrorNotReady);
      },
      [this](const std::string& why) { give_up(why); }};
  watch_ = std::make_unique<Watch>(
      place_.rank, place_.world, "quantmoe " QM_RELEASE ", " + export_of(place_.export_id), place_.group.patience(),
      [this](const std::string& card) { return exchange(card); }, watched);
  peers_ = Peers::meet(place_.rank, place_.world, [this](const std::string& card) { return exchange(card); });
  waited_for_ = peers_.get();
  must(cudaSetDevice(before));
}

// Only this ends a kernel that waits, and makes its run fail. An aborted communicator's kernels end as if nothing were
// wrong.
void Communicator::give_up(const std::string& why) {
  given_up_ = true;
  std::fprintf(stderr,
               "quantmoe: rank %d: %s, and this rank waits for it: its run is ended, and CUDA in this process\n",
               static_cast<int>(place_.rank), why.c_str());
  if (cudaSetDevice(device_) != cudaSuccess) return;
  if (const Peers* peers = waited_for_) peers->give_up(end_);
  if (launch_trap(true, end_) == cudaSuccess) (void)cudaStreamSynchronize(end_);
}

void Communicator::expect_all() const {
  if (const std::string failure = watch_ ? watch_->failure() : ""; !failure.empty()) throw std::runtime_error(failure);
}

// The event that the watch asks whether work has ended. ONNX Runtime destroys the stream of a run before the kernels.
// It destroys the stream of captured graphs after them, and their replays record no event of ours. TensorRT's user says
// nothing, see forget.
void Communicator::mark(cudaStream_t stream) const {
  if (!done_) return;
  if (is_captured(stream))
    captured_ = stream;
  else
    must(cudaEventRecord(done_, stream));
}

// One call after the other, whatever their streams. Kernels that wait for other ranks beside each other could take each
// other's place on a GPU. The user orders captured calls.
void Communicator::order(cudaStream_t stream) const {
  if (done_ && !is_captured(stream)) must(cudaStreamWaitEvent(stream, done_, 0));
}

void Communicator::forget(cudaStream_t stream) const { captured_.compare_exchange_strong(stream, nullptr); }

void Communicator::reduce(const void* x, void* y, int64_t count, qm_type type, cudaStream_t stream) const {
  expect_all();
  order(stream);
  const qm_tensor from{const_cast<void*>(x), type, {1, {count}}}, to{y, type, {1, {count}}};
  if (peers_ && Peers::takes_sum(from)) {
    constexpr qm_reduce kNode{};
    peers_->enqueue("AllReduce", &kNode, {&from, &to, nullptr, stream, nullptr, nullptr});
  } else {
    const Nccl& nccl = Nccl::get();
    nccl.check(nccl.all_reduce(x, y, static_cast<size_t>(count), type_of(type), kSum, comm_, stream), "ncclAllReduce");
  }
  mark(stream);
}

void Communicator::reduce(const qm_reduce_norm& node, const qm_cuda_call& call) const {
  const auto stream = static_cast<cudaStream_t>(call.stream);
  if (peers_ && Peers::takes_norm(call)) {
    expect_all();
    order(stream);
    peers_->enqueue("AllReduceAddRMSNorm", &node, call);
    mark(stream);
    return;
  }
  const qm_tensor& weight = call.inputs[AddRMSNorm_weight];
  qm_tensor x = call.inputs[AddRMSNorm_x];
  void* const y = call.outputs[AddRMSNorm_y].data;
  reduce(x.data, y, rows_of(x.shape) * weight.shape.sizes[0], static_cast<qm_type>(x.type), stream);
  x.data = y;  // each thread writes what it has read
  const qm_tensor inputs[] = {x, call.inputs[AddRMSNorm_residual], weight};
  const qm_cuda_call summed{inputs, call.outputs, nullptr, stream, nullptr, nullptr};
  const qm_norm norm = norm_of(node);
  constexpr qm_cuda_node_plan plan{};
  char error[QM_ERROR_SIZE];
  if (qm_cuda_launch_node("AddRMSNorm", &norm, &plan, &summed, error) != QM_OK) throw std::runtime_error(error);
}

void Communicator::gather(const void* x, void* y, int64_t count, int64_t rows, qm_type type, void* parts,
                          cudaStream_t stream) const {
  expect_all();
  order(stream);
  const qm_shape shape{2, {rows, count / rows}};
  const qm_tensor from{const_cast<void*>(x), type, shape}, all{y, type, shape};
  if (peers_ && Peers::takes_gather(from)) {
    qm_gather last{};
    last.axis = -1;
    peers_->enqueue("AllGather", &last, {&from, &all, nullptr, stream, nullptr, nullptr});
    mark(stream);
    return;
  }
  const Nccl& nccl = Nccl::get();
  void* const to = rows > 1 ? parts : y;  // NCCL gives rank after rank
  nccl.check(nccl.all_gather(x, to, static_cast<size_t>(count), type_of(type), comm_, stream), "ncclAllGather");
  mark(stream);
  const auto ranks = static_cast<size_t>(place_.world), part = static_cast<size_t>(count) * (type == QM_F32 ? 4 : 2);
  const size_t row = part / static_cast<size_t>(rows);
  for (size_t rank = 0; rows > 1 && rank < ranks; ++rank)
    must(cudaMemcpy2DAsync(static_cast<char*>(y) + rank * row, ranks * row, static_cast<char*>(parts) + rank * part,
                           row, row, static_cast<size_t>(rows), cudaMemcpyDeviceToDevice, stream));
}

void Communicator::scatter(const void* x, void* y, int64_t count, qm_type type, cudaStream_t stream) const {
  expect_all();
  order(stream);
  const Nccl& nccl = Nccl::get();
  const auto size = static_cast<size_t>(count);
  nccl.check(nccl.reduce_scatter(x, y, size, type_of(type), kSum, comm_, stream), "ncclReduceScatter");
  mark(stream);
}

void Communicator::expect_same(const std::string& node) const {
  if (place_.world == 1) return;
  expect_all();
  const std::string own = node.substr(0, Watch::kCardSize - 1);
  const std::vector<std::string> all = exchange(own);
  for (size_t rank = 0; rank < all.size(); ++rank)
    if (all[rank] != own)
      throw std::runtime_error("rank " + std::to_string(rank) + " is at " + all[rank] + ", rank " +
                               std::to_string(place_.rank) + " at " + own +
                               ": expected files of one export, and runs in one order, of inputs of one shape");
}

void Communicator::agree(const std::string& node, const std::string& shape, cudaStream_t stream) const {
  if (first_.empty()) first_ = node;
  if (node != first_ || shape == agreed_ || is_captured(stream)) return;
  expect_same(node + " x " + shape);
  agreed_ = shape;
}

void Communicator::fail_all(const std::string& why) const {
  if (watch_) watch_->fail_all(why);
}

}  // namespace quantmoe
