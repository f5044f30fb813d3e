// Experts that stay in host memory or in the data file, for GPUs (docs/reference/expert-offloading.md). This has the
// page-locked rows, and the device memory of layers that share a budget. These are the layers of an ONNX Runtime
// session, or of a folder's engines. The device decides what is in its memory (cuda/moe/expert_cache.cuh). Nothing here
// knows an engine.
//
// With experts in the file (disk), the host works before each launch. It looks at what the call asks for and at what
// the device has. It reads the rest into page-locked memory, where other experts then make room (experts.h). The launch
// copies from there. What it may read stays until the next launch, which waits for this one.
//
// With misses = cpu or a share, threads of the host multiply a part of the misses (host_experts.h). They read a copy of
// the rows, in the layout of the CPU's kernels. With auto, the first run measures what a miss costs the bus and the
// CPU, for each kind of layer. Only layers whose misses the CPU takes have such a copy.
//
// With a trace (warm), the first run fills the slots with the experts that the trace used most, and auto counts its
// misses.
#pragma once
#include <cuda_runtime_api.h>

#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "experts/experts.h"
#include "experts/host_experts.h"
#include "quantmoe/quant_moe_cuda.h"

namespace quantmoe {

// Seconds of one expert that misses: to copy it, and for the CPU to multiply it for one token. The CPU's time is
// measured among as many experts as a token misses.
struct MissTimes {
  double copy = 0, compute = 0;
};
// Whether a layer's misses are the CPU's, with misses = auto and no trace.
bool cpu_takes(const MissTimes& took, int64_t slots, int64_t experts);

class DeviceExperts {
 public:
  // Of all that are alive, a line of JSON each.
  static std::string report();

  explicit DeviceExperts(const ExpertSettings& settings);
  ~DeviceExperts();

  // Before the first launch: adds a layer, and returns its number. w13 and w2: its rows, mapped from a file.
  // Throws std::runtime_error if the memory cannot be page-locked, or is larger than RAM. With auto, experts are then
  // read from the file, which is decided at the first layer. Throws std::invalid_argument if experts must be read from
  // a file and none is mapped. It also does so if the CPU's kernels do not take what the CPU must multiply; with misses
  // = auto the layer copies.
  int add(const std::string& node, const qm_moe& moe, int64_t experts, const void* w13, const void* w2);

  // A launch of a layer: launches come one after the other, on whatever streams.
  class Turn {
   public:
    // The first call allocates the slots, and `said` tells it. Throws std::runtime_error if there is no memory for
    // them. Also throws in a captured graph, if there was no run before it or if experts are read. top_k: of the
    // launch; misses = auto takes the first launch's for all layers.
    Turn(DeviceExperts& all, cudaStream_t stream, int64_t top_k, std::string* said);
    ~Turn();
    // Where a layer's experts are: w13 and w2 of the inputs, and what is beside them. Reads those that tokens ask for
    // (topk_ids). Throws std::runtime_error for a read that failed, naming expert and file.
    void place(int layer, qm_tensor* inputs, qm_cuda_experts* experts) const;

   private:
    DeviceExperts& all_;
    const std::lock_guard<std::mutex> lock_;
    const cudaStream_t stream_;
    bool captured_ = false;
  };

 private:
  struct Layer {
    int64_t experts;
    size_t row_bytes[2], slot_bytes;
    const char *host[2], *device[2];  // the rows, as the host and the device read them
    qm_moe moe;
    int32_t slots = 0, staging = 0;
    int32_t host_share = 0, host_layer = 0;    // host_layer: its number in host_
    std::string host_refusal;                  // "", or why the CPU's kernels do not take it
    void *memory = nullptr, *state = nullptr;  // slots; where all are there, the rows of w13, then of w2
  };
  // Page-locked: a mapping of a whole data file, or a copy of a tensor.
  struct Locked {
    std::string identity;  // "": a copy
    char* host;
    size_t bytes;
    const char* device;
  };
  struct Rows {
    const char *host, *device;
  };
  void read_missing(int layer, const qm_tensor& ids, cudaStream_t stream);
  void read_from_file();
  void lock_ram(const Trace* warm);
  std::string lacking_ram(size_t bytes) const;
  Rows lock_rows(const void* data, size_t bytes);
  void unlock_rows();
  std::pair<size_t, std::string> find_budget(size_t least) const;
  std::string start(int64_t top_k);
  void open_exchange();
  int32_t host_share(size_t layer) const;
  std::string start_host();
  std::string choose_misses(int64_t top_k, const Trace* trace);
  std::string fill_slots(const Trace& trace);
  MissTimes measure(const Layer& layer, int64_t experts, int64_t at_once);
  void allocate(size_t bytes, const char* what, void** memory);
  void free_memory();

  const ExpertSettings settings_;
  std::string where_;  // settings_.experts, or what became of auto
  const std::vector<int32_t> host_shares_;
  mutable std::mutex mutex_;
  std::vector<Layer> layers_;
  std::vector<Locked> locked_;
  std::vector<void*> memory_;
  void* staging_ = nullptr;
  // With disk: the experts in RAM, which the device reads from ram_device_ on. Then what the last launch may read, and
  // its addresses, as qm_cuda_experts::rows.
  std::unique_ptr<Experts> ram_;
  std::optional<Experts::Lease> lease_;
  std::unique_ptr<Experts> traced_;  // the layers that a trace is of, where ram_ does not have them; null: none is read
  char* ram_device_ = nullptr;
  const void** rows_ = nullptr;
  // Of misses = cpu, auto or a share; what the device asks it is in exchange_, which the device has at host_at_.
  std::unique_ptr<HostExperts> host_;
  void* exchange_ = nullptr;
  qm_cuda_host* host_at_ = nullptr;
  bool started_ = false, resident_ = false;
  cudaStream_t last_ = nullptr;
  cudaEvent_t done_ = nullptr;  // the last launch that was not captured
};

}  // namespace quantmoe
