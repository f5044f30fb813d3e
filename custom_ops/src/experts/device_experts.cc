#include "experts/device_experts.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <list>
#include <stdexcept>

#include "core/numbers.h"
#include "core/parallel.h"
#include "core/tensors.h"
#include "cuda/common/experts_memory.h"
#include "cuda/common/layout.h"
#include "experts/per_session.h"
#include "experts/row_bytes.h"
#include "files/mapping.h"

#if defined(__linux__)
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#endif

namespace quantmoe {
namespace {

void check(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  (void)cudaGetLastError();  // the next call is not to find it
  throw std::runtime_error(std::string("experts: ") + what + ": CUDA: " + cudaGetErrorString(error));
}

// Maps the file's pages behind memory at `data` again, shared. The driver locks shared pages without a copy, but not
// ONNX Runtime's private ones. Null: that is not possible.
void* map_again(const Mapping& mapping, size_t* bytes) {
#if defined(__linux__)
  const int file = mapping.path.empty() ? -1 : open(mapping.path.c_str(), O_RDONLY | O_CLOEXEC);
  if (file < 0) return nullptr;
  struct stat info;
  void* memory = MAP_FAILED;
  if (fstat(file, &info) == 0) {
    *bytes = static_cast<size_t>(info.st_size);
    memory = mmap(nullptr, *bytes, PROT_READ, MAP_SHARED, file, 0);
  }
  close(file);
  if (memory == MAP_FAILED) return nullptr;
  if (Mapping(memory).identity == mapping.identity) return memory;
  munmap(memory, *bytes);  // renamed over since
#endif
  return nullptr;
}

size_t file_bytes(const Mapping& mapping) {
#if defined(__linux__)
  struct stat info;
  if (!mapping.path.empty() && stat(mapping.path.c_str(), &info) == 0) return static_cast<size_t>(info.st_size);
#endif
  return 0;
}

// For as long as it measures.
struct Event {
  cudaEvent_t event = nullptr;
  Event() { check(cudaEventCreateWithFlags(&event, cudaEventDefault), "an event"); }
  ~Event() { (void)cudaEventDestroy(event); }
};

std::string microseconds(double seconds) { return std::to_string(std::llround(1e6 * seconds)) + " us"; }

std::string packed(const HostExperts& host, int64_t bytes, double seconds) {
  return ", in " + std::to_string(host.lanes()) + " threads (" + std::to_string(bytes) + " bytes, packed in " +
         std::to_string(static_cast<int>(seconds * 1000)) + " ms)";
}

double seconds_since(std::chrono::steady_clock::time_point begin) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

// With one decimal.
std::string tenths(double number) {
  const int64_t all = std::llround(10 * number);
  return std::to_string(all / 10) + "." + std::to_string(all % 10);
}

// Calls whose misses the CPU may take; others copy.
bool are_few(int64_t tokens, int64_t top_k) {
  return tokens <= QM_CUDA_HOST_TOKENS && tokens * top_k <= QM_CUDA_HOST_PAIRS;
}

struct Missed {
  int64_t experts = 0, calls = 0, tokens = 0;

  Missed& operator+=(const Missed& other) {
    experts += other.experts, calls += other.calls, tokens += other.tokens;
    return *this;
  }
  double per_token() const { return static_cast<double>(experts) / static_cast<double>(std::max<int64_t>(1, tokens)); }
};

// The misses of a layer's slots in a trace's calls of a few tokens (cuda/moe/expert_cache.cuh), with copies or with a
// CPU that multiplies. The slots begin with the experts that the first half of the calls used most. The second half is
// counted: in the first half these experts hit more than in other calls, and the CPU would seem better.
Missed count_missed(const Trace& trace, int layer, int64_t experts, int64_t slots, bool copies) {
  std::list<int64_t> held;  // the one that was used least recently first
  std::vector<std::list<int64_t>::iterator> at(static_cast<size_t>(experts), held.end());
  std::vector<size_t> last(static_cast<size_t>(experts));  // the number of the last call that asked for it
  for (const auto& [of, expert] : trace.most_used(static_cast<size_t>(slots), layer, true))
    at[static_cast<size_t>(expert)] = held.insert(held.end(), expert);
  Missed found;
  const auto& calls = trace.runs[static_cast<size_t>(layer)];
  for (size_t call = calls.size() / 2; call < calls.size(); ++call) {
    std::vector<int64_t> missing;
    for (const uint16_t expert : calls[call].ids) {
      if (last[expert] == call + 1) continue;
      last[expert] = call + 1;
      if (at[expert] == held.end())
        missing.push_back(expert);
      else
        held.splice(held.end(), held, at[expert]);
    }
    const bool few = are_few(calls[call].tokens, calls[call].top_k);
    if (few) found += {static_cast<int64_t>(missing.size()), 1, calls[call].tokens};
    for (const int64_t expert : missing) {
      if (static_cast<int64_t>(held.size()) == slots) {
        const auto oldest = static_cast<size_t>(held.front());
        if ((few && !copies) || last[oldest] == call + 1) break;
        held.pop_front();
        at[oldest] = held.end();
      }
      at[static_cast<size_t>(expert)] = held.insert(held.end(), expert);
    }
  }
  return found;
}

// "0-3, 7"
std::string ranges(const std::vector<size_t>& numbers) {
  std::string text;
  for (size_t i = 0, last; i < numbers.size(); i = last + 1) {
    for (last = i; last + 1 < numbers.size() && numbers[last + 1] == numbers[last] + 1;) ++last;
    text.append(i ? ", " : "").append(std::to_string(numbers[i]));
    if (last > i) text.append("-").append(std::to_string(numbers[last]));
  }
  return text;
}

// Whose the misses of each layer are, as a value of misses: "6*cpu,42*copy".
template <class Layers>
std::string by_layer(const Layers& layers) {
  std::string text;
  for (auto first = layers.begin(), last = first; first != layers.end(); first = last) {
    last = std::find_if(first, layers.end(), [&](const auto& of) { return !of.host_share != !first->host_share; });
    text += (text == "" ? "" : ",") + std::to_string(last - first) + (first->host_share ? "*cpu" : "*copy");
  }
  return text;
}

}  // namespace

// A copied expert stays in a slot and may hit there. An expert that the CPU multiplies leaves the slots unchanged. If
// tokens ask for recent experts, a layer therefore misses more with the CPU than with copies. An eighth of the experts,
// the most recent ones, then gets 67 of 100 requests, and a quarter gets 81 (docs/lab/expert-offloading.md, local
// routes). With uniform routes there is no difference. The routes are not known, so the choice has the smaller worst
// ratio of times.
bool cpu_takes(const MissTimes& took, int64_t slots, int64_t experts) {
  constexpr double kHeld[] = {0, 0.125, 0.25, 1}, kHits[] = {0, 0.67, 0.81, 1};
  const double held = static_cast<double>(slots) / static_cast<double>(experts);
  size_t i = 1;
  while (i < 3 && held > kHeld[i]) ++i;
  const double hits = kHits[i] - (kHits[i] - kHits[i - 1]) * (kHeld[i] - held) / (kHeld[i] - kHeld[i - 1]);
  // The CPU's time over the copies', of uniform routes times of local ones, is less than 1.
  return (1 - held) * took.compute * took.compute < (1 - hits) * took.copy * took.copy;
}

DeviceExperts::DeviceExperts(const ExpertSettings& settings)
    : settings_(settings), where_(settings.experts), host_shares_(settings.host_shares()) {
  // One CPU is left for the program's own thread, which waits for the device.
  if (std::ranges::any_of(host_shares_, [](int32_t share) { return share > 0; }))
    host_ =
        std::make_unique<HostExperts>(settings.threads != "" ? std::stoi(settings.threads) : std::max(1, cpus() - 1));
  if (settings.experts == "disk") read_from_file();
  if (settings.warm == "" || ram_) return;
  ExpertSettings of;
  of.warm = settings.warm;
  traced_ = std::make_unique<Experts>(of);
}

void DeviceExperts::read_from_file() {
  ExpertSettings below;
  below.experts = "disk";
  below.ram = settings_.ram;
  below.warm = settings_.warm;
  if (settings_.ram_bytes() < 0) below.reserve = std::to_string(kReserve);  // the file's other weights are not in RAM
  below.of_environment = settings_.of_environment;
  ram_ = std::make_unique<Experts>(below, false);  // its memory is locked, and its rows stay between launches
}

void DeviceExperts::free_memory() {
  for (void* memory : memory_) (void)cudaFree(memory);  // waits for what runs
  memory_.clear();
}

DeviceExperts::~DeviceExperts() {
  free_memory();
  if (done_) (void)cudaEventDestroy(done_);
  host_.reset();
  if (exchange_) (void)cudaFreeHost(exchange_);
  lease_.reset();
  if (rows_) (void)cudaFreeHost(rows_);
  if (ram_device_) (void)cudaHostUnregister(ram_->memory());
  unlock_rows();
}

void DeviceExperts::unlock_rows() {
  for (const Locked& locked : locked_) {
    if (locked.identity == "") {
      (void)cudaFreeHost(locked.host);
    } else {
      (void)cudaHostUnregister(locked.host);
      munmap(locked.host, locked.bytes);
    }
  }
  locked_.clear();
}

// What RAM lacks for `bytes` more that stay in it; "": nothing. A file's pages count as available, locked ones too: the
// driver pins them in the page cache.
std::string DeviceExperts::lacking_ram(size_t bytes) const {
  for (const Locked& locked : locked_)
    if (locked.identity != "") bytes += locked.bytes;
  const int64_t given = settings_.ram_bytes(), room = given < 0 ? available_memory() : given;
  if (static_cast<int64_t>(bytes) <= room) return "";
  return std::to_string(bytes) + " bytes in RAM, " +
         (given < 0 ? std::to_string(room) + " are available" : settings_.key("ram") + " is " + std::to_string(room));
}

// Where the host and the device read `bytes` at `data`.
DeviceExperts::Rows DeviceExperts::lock_rows(const void* data, size_t bytes) {
  const Mapping mapping(data);
  const auto address = reinterpret_cast<uintptr_t>(data);
  const size_t offset = static_cast<size_t>(mapping.offset) + (address - mapping.begin);
  const auto check_ram = [&](size_t more) {
    if (const std::string lacking = lacking_ram(more); lacking != "")
      throw std::runtime_error(settings_.key("experts") + " = " + settings_.experts + ": experts take " + lacking +
                               "; with " + settings_.key("experts") + " = disk they are read from the file");
  };
  if (!mapping.path.empty() && address + bytes <= mapping.end) {
    for (const Locked& locked : locked_)
      if (locked.identity == mapping.identity) return {locked.host + offset, locked.device + offset};
    check_ram(file_bytes(mapping));
    size_t size = 0;
    if (auto* const host = static_cast<char*>(map_again(mapping, &size))) {
      void* device = nullptr;
      cudaError_t error = offset + bytes > size
                              ? cudaErrorInvalidValue
                              : cudaHostRegister(host, size, cudaHostRegisterMapped | cudaHostRegisterReadOnly);
      if (error == cudaSuccess) error = cudaHostGetDevicePointer(&device, host, 0);
      if (error == cudaSuccess) {
        locked_.push_back({mapping.identity, host, size, static_cast<const char*>(device)});
        return {host + offset, locked_.back().device + offset};
      }
      (void)cudaGetLastError();  // a driver that does not lock files: a copy does
      munmap(host, size);
    }
  }
  check_ram(bytes);
  void *host = nullptr, *device = nullptr;
  check(cudaHostAlloc(&host, bytes, cudaHostAllocMapped), "page-locked memory for a layer's experts");
  Locked& locked = locked_.emplace_back("", static_cast<char*>(host), bytes, nullptr);
  std::memcpy(host, data, bytes);
  check(cudaHostGetDevicePointer(&device, host, 0), "page-locked memory");
  locked.device = static_cast<const char*>(device);
  return {locked.host, locked.device};
}

int DeviceExperts::add(const std::string& node, const qm_moe& moe, int64_t experts, const void* w13, const void* w2) {
  const std::lock_guard lock(mutex_);
  if (started_) throw std::runtime_error("a layer came after the first run of others, expected all layers before it");
  Layer layer{};
  layer.experts = experts;
  layer.moe = moe;
  MarlinRow w13_row{}, w2_row{};
  if (!marlin_row_of(moe, 13, &w13_row) || !marlin_row_of(moe, 2, &w2_row))
    throw std::invalid_argument("attributes of packed experts are not valid");
  layer.slot_bytes = slot_bytes(w13_row, w2_row);
  const std::array row_bytes = row_bytes_of(moe);
  const bool chooses = settings_.misses == "auto";
  if (settings_.experts == "auto" && layers_.empty() && !ram_ && (!host_ || chooses))
    if (const std::string lacking = lacking_ram(file_bytes(Mapping(w13))); lacking != "") {
      host_.reset();  // it multiplies what is in RAM
      read_from_file();
      where_ = "auto, which is disk here (they take " + lacking + ")";
    }
  ExpertLayer in_file{node, layer.experts, {}};
  for (const int i : {0, 1}) {
    const void* const data = i ? w2 : w13;
    layer.row_bytes[i] = static_cast<size_t>(row_bytes[static_cast<size_t>(i)]);
    in_file.tensors[i].row_bytes = static_cast<int64_t>(layer.row_bytes[i]);
    if (ram_) {
      in_file.tensors[i] = ram_->find(data, layer.experts, static_cast<int64_t>(layer.row_bytes[i]));
      layer.host[i] = static_cast<const char*>(data);
    } else {
      const Rows rows = lock_rows(data, layer.row_bytes[i] * static_cast<size_t>(layer.experts));
      layer.host[i] = rows.host;
      layer.device[i] = rows.device;
    }
  }
  if (Experts* const all = ram_ ? ram_.get() : traced_.get()) all->add(std::move(in_file));  // the same number
  if (host_) {
    try {
      layer.host_layer = host_->add(moe, experts);
    } catch (const std::invalid_argument& error) {
      if (!chooses && host_share(layers_.size())) throw;
      layer.host_refusal = error.what();
    }
  }
  layers_.push_back(layer);
  return static_cast<int>(layers_.size()) - 1;
}

void DeviceExperts::allocate(size_t bytes, const char* what, void** memory) {
  check(cudaMalloc(memory, std::max<size_t>(bytes, 1)),
        (std::to_string(bytes) + " bytes of the device's memory for " + what).c_str());
  memory_.push_back(*memory);
}

// How much of the device's memory there is for experts, and why.
std::pair<size_t, std::string> DeviceExperts::find_budget(size_t least) const {
  int64_t given = settings_.gpu_memory_bytes();
  std::string source = settings_.key("gpu_memory");
  if (given < 0) {
    const int64_t wanted = settings_.reserve_bytes();
    const int64_t reserve = wanted < 0 ? int64_t{1} << 30 : wanted;
    size_t free = 0, total = 0;
    check(cudaMemGetInfo(&free, &total), "the device's free memory");
    source = std::to_string(free) + " bytes free less " + std::to_string(reserve);
    given = std::max<int64_t>(0, static_cast<int64_t>(free) - reserve);
  }
  const auto budget = static_cast<size_t>(given);
  if (budget < least)
    throw std::runtime_error(settings_.key("experts") + " = " + where_ + ": " + source + " is " +
                             std::to_string(budget) + ", expected at least the " + std::to_string(least) +
                             " bytes of one expert of each layer; see " + settings_.key("gpu_memory") + " and " +
                             settings_.key("reserve"));
  return {budget, source};
}

std::string DeviceExperts::start(int64_t top_k) try {
  if (settings_.misses_by_layer() && host_shares_.size() != layers_.size())
    throw std::runtime_error(settings_.key("misses") + " = " + settings_.misses + " is of " +
                             std::to_string(host_shares_.size()) + " layers, this model has " +
                             std::to_string(layers_.size()));
  size_t all = 0, one = 0, largest = 0, experts = 0;
  for (const Layer& layer : layers_) {
    const size_t bytes = static_cast<size_t>(layer.experts) * layer.slot_bytes;
    all += bytes;
    one += layer.slot_bytes;
    largest = std::max(largest, bytes);
    experts += static_cast<size_t>(layer.experts);
  }
  const auto [budget, source] =
      settings_.experts == "gpu" ? std::pair(all, settings_.key("experts") + " = gpu") : find_budget(one);
  resident_ = budget >= all;
  if (resident_) {
    for (Layer& layer : layers_) {
      const size_t first = layer.row_bytes[0] * static_cast<size_t>(layer.experts);
      const size_t second = align_up(first, size_t{256});
      const size_t bytes = layer.row_bytes[1] * static_cast<size_t>(layer.experts);
      allocate(second + bytes, "a layer's experts", &layer.memory);
      auto* const memory = static_cast<char*>(layer.memory);
      check(cudaMemcpy(memory, layer.host[0], first, cudaMemcpyDefault), "copying experts");
      check(cudaMemcpy(memory + second, layer.host[1], bytes, cudaMemcpyDefault), "copying experts");
    }
    unlock_rows();  // nothing reads them from now on
    host_.reset();
    started_ = true;
    return "experts = " + where_ + ": all " + std::to_string(experts) + " experts are in the device's memory (" +
           std::to_string(all) + " bytes; " + source + ")";
  }
  std::optional<Trace> trace;
  if (settings_.warm != "") trace = (ram_ ? ram_ : traced_)->read_warm();
  if (ram_) lock_ram(trace ? &*trace : nullptr);
  // A prompt asks for all experts of a layer: a sixteenth is for what it copies for itself (measured:
  // docs/lab/expert-offloading.md).
  const size_t staging = std::min({budget / 16, largest, budget - one});
  allocate(staging, "experts of one layer's call", &staging_);
  size_t slots = 0;
  for (Layer& layer : layers_) {
    const double share = static_cast<double>(budget - staging) / static_cast<double>(all);
    layer.slots = static_cast<int32_t>(
        std::clamp<int64_t>(static_cast<int64_t>(share * static_cast<double>(layer.experts)), 1, layer.experts));
    layer.staging = static_cast<int32_t>(staging / layer.slot_bytes);
    allocate(static_cast<size_t>(layer.slots) * layer.slot_bytes, "a layer's slots", &layer.memory);
    const size_t state = cache_state_bytes(layer.experts, layer.slots);
    allocate(state, "a cache's state", &layer.state);
    check(cudaMemset(layer.state, 0, state), "a cache's state");
    slots += static_cast<size_t>(layer.slots);
  }
  check(cudaDeviceSynchronize(), "a cache's state");  // other streams read it
  if (!done_) check(cudaEventCreateWithFlags(&done_, cudaEventDisableTiming), "an event");
  const std::string shared = settings_.misses == "auto" ? choose_misses(top_k, trace ? &*trace : nullptr)
                             : host_                    ? start_host()
                                                        : "";
  const std::string filled = trace ? fill_slots(*trace) : "";
  started_ = true;
  return "experts = " + where_ + ": device memory for " + std::to_string(slots) + " of " + std::to_string(experts) +
         " experts, and " + std::to_string(staging) + " bytes for what a call copies for itself (" + source + ")" +
         (ram_ ? "; page-locked memory for " + std::to_string(ram_->slots()) : "") + filled + shared;
} catch (...) {
  free_memory();  // for a run after this one
  throw;
}

// Copies the experts that a trace used most to the slots, the most used to the last slots: new slots are evicted in
// order.
std::string DeviceExperts::fill_slots(const Trace& trace) {
  size_t count = 0;
  for (size_t i = 0; i < layers_.size(); ++i) {
    const Layer& layer = layers_[i];
    const auto most_used = trace.most_used(static_cast<size_t>(layer.slots), static_cast<int>(i));
    std::optional<Experts::Lease> lease;
    if (ram_) {
      std::vector<int64_t> experts;
      for (const auto& [of, expert] : most_used) experts.push_back(expert);
      lease.emplace(*ram_, static_cast<int>(i)).read_all(experts, rows_, rows_ + layer.experts);
    }
    std::vector<int32_t> table(static_cast<size_t>(layer.experts + layer.slots));  // slot_of, expert_of
    auto* slot = static_cast<char*>(layer.memory);
    for (size_t at = 0; at < most_used.size(); ++at, slot += layer.slot_bytes) {
      const auto expert = static_cast<size_t>(most_used[at].second);
      table[expert] = static_cast<int32_t>(at) + 1;
      table[static_cast<size_t>(layer.experts) + at] = static_cast<int32_t>(expert) + 1;
      for (const size_t j : {0, 1})
        check(cudaMemcpyAsync(slot + (j ? align_up(layer.row_bytes[0], kSlotAlignment) : 0),
                              ram_ ? rows_[j * static_cast<size_t>(layer.experts) + expert]
                                   : layer.host[j] + expert * layer.row_bytes[j],
                              layer.row_bytes[j], cudaMemcpyHostToDevice, nullptr),
              "copying an expert");
    }
    check(cudaMemcpyAsync(static_cast<char*>(layer.state) + sizeof(CacheState), table.data(), 4 * table.size(),
                          cudaMemcpyHostToDevice, nullptr),
          "a cache's state");
    check(cudaDeviceSynchronize(), "copying experts");  // before their rows in RAM, and the table, are others'
    count += most_used.size();
  }
  return "; slots have " + std::to_string(count) + " experts at first, as " + settings_.key("warm") + " says";
}

void DeviceExperts::open_exchange() {
  if (host_at_) return;  // a start that failed later
  int64_t hidden = 0;
  for (const Layer& layer : layers_) hidden = std::max<int64_t>(hidden, layer.moe.hidden_size);
  const size_t rows = sizeof(float) * QM_CUDA_HOST_TOKENS * static_cast<size_t>(hidden);
  void* device = nullptr;
  if (!exchange_)
    check(cudaHostAlloc(&exchange_, sizeof(qm_cuda_host) + 2 * rows, cudaHostAllocMapped),
          "page-locked memory for what the CPU multiplies");
  std::memset(exchange_, 0, sizeof(qm_cuda_host));
  check(cudaHostGetDevicePointer(&device, exchange_, 0), "page-locked memory");
  host_->serve(static_cast<qm_cuda_host*>(exchange_));
  host_at_ = static_cast<qm_cuda_host*>(device);
}

// The CPU's share of 256 experts that a layer misses. A list that is too short is an error of the first run.
int32_t DeviceExperts::host_share(size_t layer) const {
  if (!settings_.misses_by_layer()) return host_shares_[0];
  return layer < host_shares_.size() ? host_shares_[layer] : 0;
}

// Packs the experts whose misses the CPU takes, and lets its threads wait for requests.
std::string DeviceExperts::start_host() {
  const auto begin = std::chrono::steady_clock::now();
  int64_t bytes = 0;
  for (size_t i = 0; i < layers_.size(); ++i)
    if (host_share(i)) bytes += host_->bytes(layers_[i].host_layer);
  if (const std::string lacking = lacking_ram(static_cast<size_t>(bytes)); lacking != "")
    throw std::runtime_error(settings_.key("misses") + " = " + settings_.misses +
                             ": the CPU's copy of the experts, and what is locked, take " + lacking);
  for (size_t i = 0; i < layers_.size(); ++i) {
    Layer& layer = layers_[i];
    layer.host_share = host_share(i);
    if (layer.host_share) host_->pack(layer.host_layer, layer.host[0], layer.host[1]);
  }
  const std::string text = packed(*host_, bytes, seconds_since(begin));
  open_exchange();
  return (settings_.misses_by_layer() ? "; misses = " + settings_.misses
                                      : "; the CPU multiplies " + std::to_string((host_shares_[0] * 100 + 128) / 256) +
                                            "% of the experts that miss") +
         text;
}

// What an expert of a layer that misses takes, of `experts` of them: the CPU is asked for so many at once.
MissTimes DeviceExperts::measure(const Layer& layer, int64_t experts, int64_t at_once) {
  MissTimes took{INFINITY, 0};
  auto* const slot = static_cast<char*>(layer.memory);  // has nothing yet
  const Event begin, end;
  for (int pass = 0; pass < 3; ++pass) {  // a bus that was idle begins slowly
    check(cudaEventRecord(begin.event, nullptr), "an event");
    for (int64_t expert = 0; expert < experts; ++expert)
      for (const int i : {0, 1})
        check(cudaMemcpyAsync(slot + (i ? layer.row_bytes[0] : 0),
                              layer.host[i] + static_cast<size_t>(expert) * layer.row_bytes[i], layer.row_bytes[i],
                              cudaMemcpyHostToDevice, nullptr),
              "copying an expert");
    check(cudaEventRecord(end.event, nullptr), "an event");
    check(cudaEventSynchronize(end.event), "copying an expert");
    float milliseconds = 0;
    check(cudaEventElapsedTime(&milliseconds, begin.event, end.event), "the time of a copy");
    took.copy = std::min(took.copy, 1e-3 * milliseconds / static_cast<double>(experts));
  }
  took.compute = host_->measure(layer.host_layer, layer.host[0], layer.host[1], experts, at_once);
  return took;
}

// misses = auto: decides who takes each layer's misses. Layers with equal attributes share one measurement. Packs what
// the CPU takes, as far as RAM goes. trace: of the model's tokens, or null.
std::string DeviceExperts::choose_misses(int64_t top_k, const Trace* trace) {
  if (ram_) return "; misses = auto: copy, as experts are read from the file";
  open_exchange();
  std::vector<std::vector<size_t>> kinds;  // of layers
  std::vector<Missed> missed[2];           // of each layer: with copies, and where the CPU multiplies
  for (size_t i = 0; i < layers_.size(); ++i) {
    Layer& layer = layers_[i];
    layer.host_share = 0;  // of a start that failed later
    auto kind = std::find_if(kinds.begin(), kinds.end(), [&](const auto& alike) {
      const Layer& first = layers_[alike[0]];
      return first.experts == layer.experts && !std::memcmp(&first.moe, &layer.moe, sizeof layer.moe);
    });
    if (kind == kinds.end()) kind = kinds.emplace(kind);
    kind->push_back(i);
    for (const bool copies : {true, false})
      missed[!copies].push_back(trace ? count_missed(*trace, static_cast<int>(i), layer.experts, layer.slots, copies)
                                      : Missed{});
  }
  const auto sum = [&](const std::vector<size_t>& layers, bool computed) {
    Missed all;
    for (const size_t i : layers) all += missed[computed][i];
    return all;
  };
  std::string text;
  int64_t bytes = 0;
  double seconds = 0;
  const auto has_room = [&](int64_t more) {
    // What is packed is not available any more, but it is of quantmoe.ram.
    return lacking_ram(static_cast<size_t>(more + (settings_.ram_bytes() < 0 ? kReserve : bytes))) == "";
  };
  for (const auto& kind : kinds) {
    const Layer& first = layers_[kind[0]];
    MissTimes took{0, INFINITY};  // not measured: copies
    std::string why;
    // More than most CPUs' caches hold, if the layer has as many.
    constexpr int64_t kLeast = 16, kBytes = int64_t{256} << 20;
    const int64_t some = std::min(first.experts, std::max(kLeast, kBytes / static_cast<int64_t>(first.slot_bytes)));
    if (first.host_refusal != "") {
      why = first.host_refusal;
    } else if (!has_room(host_->bytes(first.host_layer) / first.experts * some)) {
      why = "RAM has no room to measure the CPU";
    } else {
      // What a call misses by the trace, or a token if all are as likely; more of them at once take the CPU less each.
      const Missed all = sum(kind, true);
      const double asked = all.calls
                               ? static_cast<double>(all.experts) / static_cast<double>(all.calls)
                               : static_cast<double>(top_k * (first.experts - first.slots)) / first.moe.num_experts;
      const int64_t at_once = std::clamp<int64_t>(std::llround(asked), 1, std::min<int64_t>(some, QM_CUDA_HOST_PAIRS));
      took = measure(first, some, at_once);
      why = std::isinf(took.compute)
                ? "the CPU's answer is no number"
                : "with slots for " + std::to_string(first.slots) + " of " + std::to_string(first.experts) +
                      " experts a miss takes the bus " + microseconds(took.copy) + ", the CPU " +
                      microseconds(took.compute) + ", " + std::to_string(at_once) + " at once";
    }
    enum { kComputed, kCopied, kLacking };  // RAM for the CPU's copy
    std::vector<size_t> chosen[3];
    for (const size_t i : kind) {
      Layer& layer = layers_[i];
      const bool is_cpu = missed[true][i].calls
                              ? missed[true][i].per_token() * took.compute < missed[false][i].per_token() * took.copy
                              : cpu_takes(took, layer.slots, layer.experts);
      const bool packs = is_cpu && has_room(host_->bytes(layer.host_layer));
      chosen[packs ? kComputed : is_cpu ? kLacking : kCopied].push_back(i);
      if (!packs) continue;
      const auto begin = std::chrono::steady_clock::now();
      host_->pack(layer.host_layer, layer.host[0], layer.host[1]);
      seconds += seconds_since(begin);
      bytes += host_->bytes(layer.host_layer);
      layer.host_share = host_shares_[0];
    }
    for (const auto how : {kComputed, kCopied, kLacking}) {
      const auto& layers = chosen[how];
      if (layers.empty()) continue;
      text += std::string(text == "" ? "; misses = auto: " : ", ") + (how == kComputed ? "cpu" : "copy") +
              " in layers " + ranges(layers) + " (" + why;
      if (const Missed all = sum(layers, true); all.calls && !std::isinf(took.compute))
        text += "; by " + settings_.key("warm") + " a token misses " + tenths(sum(layers, false).per_token()) +
                " with copies, " + tenths(all.per_token()) + " with the CPU";
      text += how == kLacking ? "; RAM has no room for the CPU's copy)" : ")";
    }
  }
  const std::string fixed = "; " + settings_.key("misses") + " = " + by_layer(layers_) + " fixes it";
  if (bytes) return text + packed(*host_, bytes, seconds) + fixed;
  host_.reset();
  return text + fixed;
}

// The memory between the file and the device, for at least one layer's experts: a prompt asks for all of them.
void DeviceExperts::lock_ram(const Trace* warm) {
  if (rows_) return;  // a start that failed later
  (void)ram_->start(warm);
  int64_t most = 0;
  for (const Layer& layer : layers_) most = std::max(most, layer.experts);
  if (ram_->slots() < most)
    throw std::runtime_error(settings_.key("experts") + " = " + where_ + ": " + settings_.key("ram") +
                             " has room for " + std::to_string(ram_->slots()) + " experts, expected at least the " +
                             std::to_string(most) + " of one layer, " + std::to_string(most * ram_->slot_bytes()) +
                             " bytes");
  void* device = nullptr;
  if (!ram_device_) {
    const auto bytes = static_cast<size_t>(ram_->slots() * ram_->slot_bytes());
    check(cudaHostRegister(ram_->memory(), bytes, cudaHostRegisterMapped), "page-locked memory for experts");
    check(cudaHostGetDevicePointer(&device, ram_->memory(), 0), "page-locked memory");
    ram_device_ = static_cast<char*>(device);
  }
  void* rows = nullptr;
  check(cudaHostAlloc(&rows, 2 * sizeof(void*) * static_cast<size_t>(most), cudaHostAllocMapped), "a table of experts");
  rows_ = static_cast<const void**>(rows);
}

// Reads the experts that tokens ask for and the device does not have, and tells where they are.
void DeviceExperts::read_missing(int layer, const qm_tensor& ids, cudaStream_t stream) {
  const Layer& own = layers_[static_cast<size_t>(layer)];
  const auto pairs = static_cast<size_t>(rows_of(ids.shape) * last_of(ids.shape));
  const size_t width = ids.type == QM_INT64 ? 8 : 4;
  std::vector<char> asked(pairs * width);
  std::vector<int32_t> slot_of(static_cast<size_t>(own.experts));
  check(cudaMemcpyAsync(asked.data(), ids.data, asked.size(), cudaMemcpyDeviceToHost, stream), "ids");
  check(cudaMemcpyAsync(slot_of.data(), static_cast<const char*>(own.state) + sizeof(CacheState), 4 * slot_of.size(),
                        cudaMemcpyDeviceToHost, stream),
        "a cache's state");
  check(cudaStreamSynchronize(stream), "the launches before");
  lease_.reset();  // nothing reads them from now on
  std::vector<bool> wanted(slot_of.size());
  for (size_t i = 0; i < pairs; ++i) {
    int64_t id = 0;
    if (width == 8) {
      std::memcpy(&id, &asked[8 * i], 8);
    } else {
      int32_t narrow;
      std::memcpy(&narrow, &asked[4 * i], 4);
      id = narrow;
    }
    id -= own.moe.expert_offset;
    if (id >= 0 && id < own.experts && !slot_of[static_cast<size_t>(id)]) wanted[static_cast<size_t>(id)] = true;
  }
  std::vector<int64_t> missing;
  for (size_t e = 0; e < wanted.size(); ++e)
    if (wanted[e]) missing.push_back(static_cast<int64_t>(e));
  lease_.emplace(*ram_, layer);
  lease_->read_all(missing, rows_, rows_ + own.experts);
  for (const int64_t e : missing)
    for (const void** const row : {rows_ + e, rows_ + own.experts + e})
      *row = ram_device_ + (static_cast<const char*>(*row) - ram_->memory());
}

DeviceExperts::Turn::Turn(DeviceExperts& all, cudaStream_t stream, int64_t top_k, std::string* said)
    : all_(all), lock_(all.mutex_), stream_(stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  check(cudaStreamIsCapturing(stream, &status), "the stream");
  captured_ = status != cudaStreamCaptureStatusNone;
  if (!all.started_) {
    if (captured_)
      throw std::runtime_error(all.settings_.key("experts") + " = " + all.where_ +
                               ": the first run is captured, expected a run before it");
    *said = all.start(top_k);
  }
  if (captured_ && all.rows_)
    throw std::runtime_error(all.settings_.key("experts") + " = " + all.where_ +
                             ": a CUDA graph is captured, whose replays read no file; run without one");
  if (all.done_ && !captured_ && all.last_ != stream)
    check(cudaStreamWaitEvent(stream, all.done_, 0), "waiting for another stream");
}

DeviceExperts::Turn::~Turn() {
  if (!all_.done_ || captured_) return;
  (void)cudaEventRecord(all_.done_, stream_);
  all_.last_ = stream_;
}

void DeviceExperts::Turn::place(int layer, qm_tensor* inputs, qm_cuda_experts* experts) const {
  const Layer& own = all_.layers_[static_cast<size_t>(layer)];
  const auto set_rows = [&](const char* w13, const char* w2) {
    inputs[QuantMoE_w13].data = const_cast<char*>(w13);
    inputs[QuantMoE_w2].data = const_cast<char*>(w2);
  };
  if (all_.resident_) {
    const char* const memory = static_cast<const char*>(own.memory);
    return set_rows(memory, memory + align_up(own.row_bytes[0] * static_cast<size_t>(own.experts), size_t{256}));
  }
  const qm_tensor& ids = inputs[QuantMoE_topk_ids];
  experts->slots = own.slots;
  experts->staging = own.staging;
  experts->slot_memory = own.memory;
  experts->staging_memory = all_.staging_;
  experts->cache_state = own.state;
  if (own.host_share && are_few(rows_of(ids.shape), last_of(ids.shape))) {
    experts->host_share = own.host_share;
    experts->host_layer = own.host_layer;
    experts->host = all_.host_at_;
  }
  if (!all_.ram_) return set_rows(own.device[0], own.device[1]);
  set_rows(nullptr, nullptr);
  all_.read_missing(layer, ids, stream_);
  experts->rows = all_.rows_;
}

std::string DeviceExperts::report() {
  std::string text;
  for (const auto& experts : PerSession<DeviceExperts>::alive()) {
    const std::lock_guard lock(experts->mutex_);
    CacheCounts sums{};
    uint64_t slots = 0, missed_bytes = 0;
    for (const Layer& layer : experts->layers_) {
      slots += static_cast<uint64_t>(layer.slots);
      if (!layer.state) continue;
      CacheCounts counts{};
      check(cudaMemcpy(&counts, layer.state, sizeof counts, cudaMemcpyDefault), "a cache's counts");
      sums.hits += counts.hits;
      sums.misses += counts.misses;
      sums.staged += counts.staged;
      sums.not_copied += counts.not_copied;
      sums.computed += counts.computed;
      missed_bytes += counts.misses * layer.slot_bytes;
    }
    text += json_line({{"layers", experts->layers_.size()},
                       {"slots", slots},
                       {"hits", sums.hits},
                       {"misses", sums.misses},
                       {"staged", sums.staged},
                       {"not_copied", sums.not_copied},
                       {"computed", sums.computed},
                       {"missed_bytes", missed_bytes},
                       {"bytes_read", experts->ram_ ? static_cast<uint64_t>(experts->ram_->bytes_read()) : 0}});
  }
  return text;
}

}  // namespace quantmoe

// A line of JSON for each DeviceExperts, cut at `size` with its NUL; returns the bytes of all. Waits for what runs on
// the device.
extern "C" QM_API size_t qm_experts_report(char* text, size_t size) {
  std::string all;
  try {
    all = quantmoe::DeviceExperts::report();
  } catch (const std::exception&) {  // the device is lost
  }
  if (size) text[all.copy(text, size - 1)] = 0;
  return all.size() + 1;
}
