// Experts that stay in the data file: whole experts are read on demand into slots of memory. All layers of a session
// share the slots, and so do sessions of the same files (docs/reference/expert-offloading.md). Nothing here knows an
// engine.
//
// Invariants. A slot has one expert, or none. Only the reads of its expert write it. Runs that pinned it read it, after
// the last of these reads has succeeded. A pinned slot is never given away, and a read pins its slot. A run with pinned
// slots waits only for reads, never for a slot, so runs cannot wait for one another in a circle. A session that ends
// waits for the runs that pinned its slots. One mutex of the cache protects everything except the slots' bytes.
#pragma once
#include <condition_variable>
#include <cstdint>
#include <cstdio>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace quantmoe {

constexpr int64_t kReserve = int64_t{512} << 20;  // bytes of RAM that auto leaves beside what is known

// What is asked for, as it was given; "": not given.
struct ExpertSettings {
  std::string experts, ram, reserve, trace, gpu_memory, misses, threads, warm;
  bool of_environment = false;  // how they were given

  // A setting's name: quantmoe.ram, say, of a session, or QUANTMOE_RAM.
  std::string key(const char* setting) const;

  // The CPU library: they may be read from the file. auto is disk unless all of them fit.
  bool disk() const { return experts == "disk" || experts == "auto"; }
  // The CUDA library: they are inputs in host memory, and disk reads them from the file. auto is host, which copies
  // them once if all of them fit, or disk where RAM has no room for the file.
  bool host() const { return experts == "host" || disk(); }
  bool operator==(const ExpertSettings&) const = default;
  // Throws std::invalid_argument for values that are none, and for entries that have no use together.
  void check() const;
  // The same for GPUs, where experts are on the device (gpu, the default), in host memory or in the file.
  void check_cuda() const;
  // Bytes; -1: the default, or auto. Throw std::invalid_argument for what is neither.
  int64_t ram_bytes() const { return bytes_of("ram", ram, true); }
  int64_t gpu_memory_bytes() const { return bytes_of("gpu_memory", gpu_memory, true); }
  int64_t reserve_bytes() const { return bytes_of("reserve", reserve, false); }
  // The CPU's share of 256 experts that miss: 0 for copy, 256 for cpu, and 256 for auto in the layers that the CPU
  // takes. One number for all layers, or one for each if misses is a list (24*copy,24*cpu).
  std::vector<int32_t> host_shares() const;
  bool misses_by_layer() const { return misses.find('*') != std::string::npos; }

 private:
  int64_t bytes_of(const char* setting, const std::string& text, bool automatic) const;
  [[noreturn]] void refuse(const std::string& why) const;
};

// Bytes that the process may still allocate: what the machine has available, or less where a control group limits it;
// page cache counts as available.
int64_t available_memory();

// A file that memory was mapped from, read past the page cache where the file system can (O_DIRECT), otherwise out of
// it again.
class DataFile {
 public:
  // Of the mapping's line in /proc/self/maps: its path, and "device inode". Throws unless the path still is that file.
  DataFile(const std::string& path, std::string identity);
  ~DataFile();
  DataFile(const DataFile&) = delete;
  DataFile& operator=(const DataFile&) = delete;
  const std::string& path() const { return path_; }
  const std::string& identity() const { return identity_; }
  int64_t bytes() const { return bytes_; }
  // Whether both are one file, which nobody wrote to between their openings.
  bool operator==(const DataFile& other) const;
  // Reads bytes [at, at + size) to `to`, which is as far from a multiple of kPage as `at`. Bytes around them, to
  // multiples of kPage, may be written too. Throws for fewer bytes, and for a file that was changed.
  void read(int64_t offset, int64_t size, char* out) const;
  static constexpr int64_t kPage = 4096;

 private:
  void check_unchanged() const;
  void read_buffered(int64_t at, int64_t size, char* to) const;

  std::string path_, identity_;
  int buffered_ = -1, direct_ = -1;
  int64_t bytes_ = 0, changed_[2] = {};  // seconds and nanoseconds
};

// The packed experts of a node: one row each in two tensors.
struct ExpertLayer {
  std::string node;
  int64_t experts = 0;
  struct Tensor {
    std::shared_ptr<const DataFile> file;  // null unless experts are read
    int64_t offset = 0, row_bytes = 0;
  } tensors[2];
};

// What quantmoe.trace wrote of these layers (docs/reference/expert-offloading.md), by layer.
struct Trace {
  // Of a node: ids [tokens, top_k] of local experts, those that are none left out.
  struct Run {
    int64_t tokens, top_k;
    std::vector<uint16_t> ids;
  };
  std::vector<std::vector<Run>> runs;
  // Layer and expert of those that tokens went to most, at most so many, the most used last. layer: one; -1: all. half:
  // in the first half of its runs.
  std::vector<std::pair<int, int64_t>> most_used(size_t most, int layer = -1, bool half = false) const;
};

// Slots of memory of one size, the experts in them, and threads that read experts. A session has them, or all sessions
// of the process that read equal files into slots of this size.
class ExpertCache {
 public:
  using Files = std::vector<std::shared_ptr<const DataFile>>;
  using Lock = std::unique_lock<std::mutex>;
  // How far the rows of w13 and w2 reach in a slot, of the largest layer.
  struct Regions {
    int64_t bytes[2] = {};
    int64_t slot_bytes() const { return bytes[0] + bytes[1]; }
    bool operator==(const Regions&) const = default;
  };
  struct Slot {
    char* memory = nullptr;
    int32_t layer = -1, expert = -1;
    int32_t pins = 0;   // of runs, and one while it is read
    int32_t reads = 0;  // that are not done
    Slot *before = nullptr, *after = nullptr;
    bool failed = false;
    bool leaving = false;  // its session ends
    std::string error;
  };
  // What a session brings.
  struct Share {
    char* memory = nullptr;
    std::vector<Slot> slots;
  };
  // Of a session.
  struct Counts {
    int64_t hits = 0, misses = 0, bytes_read = 0, rounds = 0;
  };

  // The cache of the sessions that are there, or a new one.
  static std::shared_ptr<ExpertCache> of(const Files& files, const Regions& regions);

  ExpertCache(const Files& files, const Regions& regions);
  ~ExpertCache();

  Lock lock() { return Lock(mutex_); }
  // A layer's number here.
  int add(const ExpertLayer& layer);
  // Adds so many slots, which are the first to be given away; how many there are then. Throws where there is no memory.
  size_t join(Share& share, int64_t slots);
  // Takes them away, with what is in them, when no run has any of them pinned.
  void leave(Share& share);

  // These under the lock. The slot of an expert, which is being read where it has none yet; null where no slot is free.
  Slot* pin(int layer, int64_t expert, Counts& counts);
  void unpin(Slot& slot);
  // Makes the oldest read, or waits for what others do.
  void progress(Lock& lock);
  const void* row_of(const Slot& slot, int tensor) const;

 private:
  struct Read {
    Slot* slot;
    const DataFile* file;
    int64_t at, size;
    char* to;
  };
  char* memory_of(const Slot& slot, int tensor) const;
  void link(Slot& slot, bool last);
  void unlink(Slot& slot);
  void forget(const Slot& slot);
  bool read_one(Lock& lock);
  void read_until_stopped();

  const Files files_;
  const Regions regions_;
  std::mutex mutex_;
  std::condition_variable wanted_, done_;  // a read is; a read or a slot is
  bool stopping_ = false;
  std::vector<ExpertLayer> layers_;
  std::vector<std::vector<Slot*>> map_;         // [layer][expert]: its slot, or null
  Slot *oldest_ = nullptr, *newest_ = nullptr;  // of those that are not pinned
  size_t slots_ = 0;
  std::deque<Read> reads_;
  std::vector<std::thread> readers_;
};

// The experts of a session's layers: its share of a cache, and the trace of what is routed to them.
class Experts {
 public:
  // Of all that are alive, a line of JSON each.
  static std::string report();

  // shares: its cache with other sessions. Without, its slots are in memory() alone.
  explicit Experts(const ExpertSettings& settings, bool shares = true);
  ~Experts();

  // While a session is created: finds the tensor that is mapped at `data`; adds a layer and returns its number. If no
  // file is mapped, `disk` throws std::invalid_argument. `auto` then returns a tensor without a file, and all of the
  // session's experts stay in memory. Also throws if the tensor is not at a multiple of 64 bytes in its file. It
  // throws, too, if the budget has no room for one expert.
  ExpertLayer::Tensor find(const void* data, int64_t rows, int64_t row_bytes);
  int add(ExpertLayer layer);
  bool disk() const { return settings_.disk(); }
  // After start(): runs read them where they are mapped.
  bool mapped() const { return mapped_; }
  // After start(): the memory of its slots, how many there are, and the bytes that it read.
  char* memory() const { return share_.memory; }
  int64_t slots() const { return static_cast<int64_t>(share_.slots.size()); }
  int64_t slot_bytes() const { return regions_.slot_bytes(); }
  int64_t bytes_read() const;

  // Before a run: decides where they are and allocates the slots, once. A sentence about them the first time, otherwise
  // "". warm: what read_warm() has read already, or null.
  std::string start(const Trace* warm = nullptr);
  // Ids of a layer's tokens, -1 for none, when a trace is wanted.
  template <class Id>
  void trace(int layer, const Id* ids, int64_t tokens, int64_t top_k);
  // The file of quantmoe.warm, when all layers are there. Throws std::runtime_error, naming it, for one that is not of
  // these layers, with the first difference, or ends within a record.
  Trace read_warm() const;

  // What a run has of a layer.
  class Lease {
   public:
    Lease(Experts& all, int layer) : all_(all), cache_(*all.cache_), layer_(layer) {}
    ~Lease();
    // As qm_read_experts. Throws for a read that failed, naming the expert.
    int64_t read(const int64_t* begin, int64_t first, const void** w13, const void** w2);
    // The rows of these experts, all of them, as long as the lease lives. No other lease has any, of other sessions
    // neither, and there are as many slots. Throws as read does.
    void read_all(const std::vector<int64_t>& experts, const void** w13, const void** w2);

   private:
    // Waits for some of the pins, tells their rows, and returns how many: `enough` or more.
    size_t wait(ExpertCache::Lock& lock, size_t enough, const void** w13, const void** w2);
    ExpertCache::Slot* pin(int64_t expert);

    struct Pin {
      int64_t expert;
      ExpertCache::Slot* slot;
    };
    Experts& all_;
    ExpertCache& cache_;
    const int layer_;
    std::vector<Pin> pins_;  // by expert; those before first_ are given back
    size_t first_ = 0;
    int64_t reach_ = 0;  // experts before it are pinned, or were
  };

 private:
  std::string header() const;
  void write_header();
  void warm_up(const std::vector<std::pair<int, int64_t>>& experts);

  const ExpertSettings settings_;
  const bool shares_;
  ExpertCache::Files files_;
  std::vector<ExpertLayer> layers_;
  ExpertCache::Regions regions_;

  mutable std::mutex mutex_;  // of start() and what is before it; the cache's is taken after it
  bool started_ = false, mapped_ = true;
  std::shared_ptr<ExpertCache> cache_;  // null: none is read
  std::vector<int> numbers_;            // of the layers, in the cache
  ExpertCache::Share share_;
  ExpertCache::Counts counts_;  // under the cache's lock

  std::mutex trace_mutex_;
  std::FILE* trace_ = nullptr;
};

}  // namespace quantmoe
