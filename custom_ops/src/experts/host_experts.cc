#include "experts/host_experts.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstddef>
#include <cstring>
#include <memory>
#include <stdexcept>

#include "core/numbers.h"
#include "core/parallel.h"
#include "experts/row_bytes.h"

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace quantmoe {
namespace {

static_assert(offsetof(qm_cuda_host, answered) == 64, "another cache line: the device and the host write one each");

using Clock = std::chrono::steady_clock;
// Between two tokens a program samples, and writes: longer than that and the threads sleep.
constexpr auto kHot = std::chrono::milliseconds(10);
constexpr auto kNap = std::chrono::microseconds(50);  // of the thread that looks for requests, when they are rare
constexpr int kLooks = 64;                            // before other threads get the core, if any wait for one

void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Whether `found` was true within kHot. Who only looks must not keep the core from who works: a thread that is
// preempted with a lane holds up the call for milliseconds.
template <class Found>
bool spin(const Found& found) {
  for (const auto begin = Clock::now();;) {
    for (int i = 0; i < kLooks; ++i, pause())
      if (found()) return true;
    std::this_thread::yield();
    if (Clock::now() - begin > kHot) return false;
  }
}

constexpr uint64_t number_of(uint64_t call) { return call >> 16; }
constexpr size_t lanes_of(uint64_t call) { return call & 0xffff; }

// A matrix's arrays, which the packed row's attributes ask for.
struct Matrix {
  std::vector<char> codes, scales;
  std::vector<uint8_t> zero_points;
  std::vector<float> bias, pre_scale;
  std::vector<int32_t> perm;
  qm_matrix of{};

  Matrix(const qm_projection& w, int64_t n, int64_t k) {
    const auto size = [](int64_t count) { return static_cast<size_t>(count); };
    const int64_t groups = ceil_div(n, w.block_n) * (w.group_size == -1 ? 1 : ceil_div(k, w.group_size));
    codes.resize(size(n * k * (code_bits(w.format) > 8 ? 2 : 1)));
    scales.resize(size(groups * scale_size(w.scale_type)));
    zero_points.resize(size(w.zero_points ? groups : 0));
    bias.resize(size(w.bias ? n : 0));
    pre_scale.resize(size(w.pre_scale ? k : 0));
    perm.resize(size(w.perm ? k : 0));
    const auto at = [](auto& array) { return array.empty() ? nullptr : array.data(); };
    of = {at(codes), at(scales), at(zero_points), at(bias), at(pre_scale), at(perm), 1, 0};
  }
};

char* map_memory(size_t bytes) {
#if defined(__linux__)
  void* const memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED)
    throw std::runtime_error("quantmoe.misses: no memory for " + std::to_string(bytes) + " bytes of experts");
  (void)madvise(memory, bytes, MADV_HUGEPAGE);
  return static_cast<char*>(memory);
#else
  throw std::runtime_error("quantmoe.misses needs Linux, for " + std::to_string(bytes) + " bytes of experts");
#endif
}

}  // namespace

HotPool::HotPool(int lanes) : lanes_(static_cast<size_t>(lanes)) {
  try {
    for (size_t i = 1; i < lanes_.size(); ++i) threads_.emplace_back([this, i] { work(i); });
  } catch (const std::system_error&) {  // those that there are do the work
  }
}

HotPool::~HotPool() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  wanted_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

// Whether a lane that was at `state` is the caller's of this function: no other has begun it.
bool HotPool::take(Lane& lane, uint64_t call, uint64_t state) {
  return state < 2 * call && lane.state.compare_exchange_strong(state, 2 * call + 1, std::memory_order_acq_rel);
}

void HotPool::work(size_t i) {
  Lane& lane = lanes_[i];
  uint64_t call = 0, seen = 0;
  const auto is_called = [&] {
    call = call_.load(std::memory_order_acquire);
    return call != seen || stopping_;
  };
  while (!stopping_) {
    if (!spin(is_called)) {
      std::unique_lock lock(mutex_);
      ++sleeping_;  // before the last look: parallel_for sees the one, or this the other
      wanted_.wait(lock, [&] { return call_.load() != seen || stopping_; });
      --sleeping_;
      continue;
    }
    seen = call;
    const uint64_t number = number_of(call);
    if (i >= lanes_of(call) || !take(lane, number, lane.state.load(std::memory_order_acquire))) continue;
    task_(arg_, i);
    lane.state.store(2 * number, std::memory_order_release);
  }
}

void HotPool::parallel_for(void* self, qm_task task, void* arg, size_t count) {
  auto& pool = *static_cast<HotPool*>(self);
  pool.task_ = task;
  pool.arg_ = arg;
  const uint64_t call = number_of(pool.call_.load(std::memory_order_relaxed)) + 1;
  pool.call_.store(call << 16 | count);
  if (pool.sleeping_.load()) {
    const std::lock_guard lock(pool.mutex_);
    pool.wanted_.notify_all();
  }
  task(arg, 0);
  for (size_t i = 1; i < count; ++i) {
    Lane& lane = pool.lanes_[i];
    const auto is_done = [&] { return lane.state.load(std::memory_order_acquire) == 2 * call; };
    if (is_done()) continue;
    if (take(lane, call, lane.state.load(std::memory_order_acquire))) {
      task(arg, i);
      lane.state.store(2 * call, std::memory_order_release);
      continue;
    }
    while (!spin(is_done)) {
    }
  }
}

HostExperts::~HostExperts() {
  stopping_ = true;
  if (server_.joinable()) server_.join();
  for (Layer& layer : layers_) release(layer);
}

void HostExperts::release(Layer& layer) {
#if defined(__linux__)
  for (const int i : {0, 1})
    if (layer.rows[i])
      munmap(layer.rows[i], static_cast<size_t>(layer.row_bytes[static_cast<size_t>(i)] * layer.experts));
#endif
  layer.rows[0] = layer.rows[1] = nullptr;
}

int HostExperts::add(const qm_moe& moe, int64_t experts) {
  Layer layer{moe, moe, experts, {}, {}};
  for (qm_projection* w : {&layer.moe.w13, &layer.moe.w2}) w->layout = k_layout_cpu_panel, w->layout_version = 1;
  char error[QM_ERROR_SIZE];
  if (qm_validate("QuantMoE", &layer.moe, nullptr, error))
    throw std::invalid_argument(std::string("quantmoe.misses: the CPU does not take this layer: ") + error);
  layer.row_bytes = row_bytes_of(layer.moe);
  layers_.push_back(layer);
  return static_cast<int>(layers_.size()) - 1;
}

int64_t HostExperts::bytes(int number) const {
  const Layer& layer = layers_[static_cast<size_t>(number)];
  return layer.experts * (layer.row_bytes[0] + layer.row_bytes[1]);
}

void HostExperts::pack(int number, const void* w13, const void* w2) {
  Layer& layer = layers_[static_cast<size_t>(number)];
  pack_first(layer, w13, w2, layer.experts);
}

void HostExperts::pack_first(Layer& layer, const void* w13, const void* w2, int64_t experts) {
  const void* const from[2] = {w13, w2};
  for (const int i : {0, 1})
    if (!layer.rows[i])
      layer.rows[i] = map_memory(static_cast<size_t>(layer.row_bytes[static_cast<size_t>(i)] * layer.experts));
  const qm_moe& moe = layer.packed;
  const std::array sizes = row_bytes_of(moe);
  struct Scratch {
    Matrix gate, up, down;
  };
  std::vector<std::unique_ptr<Scratch>> scratch(static_cast<size_t>(pool_.lanes()));
  std::mutex mutex;
  std::string failed;  // nothing may be thrown through another thread
  parallel(pool_.lanes(), HotPool::parallel_for, &pool_, experts, [&](int lane, int64_t expert) {
    char error[QM_ERROR_SIZE];
    std::string what;
    try {
      auto& own = scratch[static_cast<size_t>(lane)];
      const int64_t h = moe.hidden_size, i = moe.intermediate_size;
      if (!own) own.reset(new Scratch{{moe.w13, i, h}, {moe.w13, i, h}, {moe.w2, h, i}});
      const auto row = [&](int of) {
        return static_cast<const char*>(from[of]) + expert * sizes[static_cast<size_t>(of)];
      };
      const auto to = [&](int of) { return layer.rows[of] + expert * layer.row_bytes[static_cast<size_t>(of)]; };
      qm_matrix matrices[] = {own->gate.of, own->up.of, own->down.of};
      qm_matrix* const first = matrices + (moe.gated ? 0 : 1);
      const void* const packed[] = {row(0), row(1)};
      void* const rows[] = {to(0), to(1)};
      if (!qm_unpack("QuantMoE", &moe, packed, first, 1, nullptr, nullptr, error) &&
          !qm_pack("QuantMoE", &layer.moe, first, rows, 1, nullptr, nullptr, error))
        return;
      what = error;
    } catch (const std::exception& e) {
      what = e.what();
    }
    const std::lock_guard lock(mutex);
    failed = "quantmoe.misses: expert " + std::to_string(moe.expert_offset + expert) + ": " + what;
  });
  if (!failed.empty()) throw std::runtime_error(failed);
}

// False: the kernels failed.
bool HostExperts::multiply(const Layer& layer, int64_t tokens, int64_t top_k, const HostPlaces& host) try {
  // The device has written it: the lines come while the call is planned.
  for (int64_t i = 0; i < tokens * layer.moe.hidden_size; i += 16) __builtin_prefetch(host.x + i);
  const qm_shape rows{2, {tokens, layer.moe.hidden_size}}, routes{2, {tokens, top_k}};
  const auto packed = [&](int i) {
    return qm_tensor{layer.rows[i], 0, {2, {layer.experts, layer.row_bytes[static_cast<size_t>(i)] / 4}}};
  };
  const qm_tensor inputs[] = {{host.x, QM_F32, rows},
                              {host.ids, QM_INT32, routes},
                              {host.weights, QM_F32, routes},
                              packed(0),
                              packed(1)},
                  outputs[] = {{host.y, QM_F32, rows}};
  qm_call call{};
  call.inputs = inputs;
  call.outputs = outputs;
  call.lanes = pool_.lanes();
  call.parallel_for = HotPool::parallel_for;
  call.parallel_context = &pool_;
  size_t size = qm_workspace("QuantMoE", &layer.moe, &call);
  if (workspace_.size() < size + 63) workspace_.resize(size + 63);
  size_t space = workspace_.size();
  void* at = workspace_.data();
  call.workspace = std::align(64, size, at, space);
  char error[QM_ERROR_SIZE];
  return qm_run("QuantMoE", &layer.moe, &call, error) == QM_OK;
} catch (const std::bad_alloc&) {
  return false;
}

void HostExperts::serve(qm_cuda_host* host) {
  host_ = host;
  if (!server_.joinable()) server_ = std::thread([this] { answer_until_stopped(); });
}

double HostExperts::measure(int number, const void* w13, const void* w2, int64_t experts, int64_t at_once) {
  Layer& layer = layers_[static_cast<size_t>(number)];
  pack_first(layer, w13, w2, experts);
  qm_cuda_host& request = *host_;
  const HostPlaces host = host_places(host_, layer.moe.hidden_size);
  std::fill_n(host.x, layer.moe.hidden_size, 1.0f);
  std::fill_n(host.weights, at_once, 1.0f);
  request.layer = number;
  request.tokens = 1;
  request.top_k = static_cast<int32_t>(at_once);
  std::vector<double> took;
  constexpr int64_t kLeast = 16;  // for a median
  for (int64_t next = 0; next < at_once * std::max(kLeast, experts / at_once);) {
    for (int64_t i = 0; i < at_once; ++i, ++next)
      host.ids[i] = static_cast<int32_t>(layer.moe.expert_offset + next % experts);
    const uint64_t asked = request.asked + 1;  // the device's begin at 2^32
    const auto is_answered = [&] { return __atomic_load_n(&request.answered, __ATOMIC_ACQUIRE) == asked; };
    const auto begin = Clock::now();
    __atomic_store_n(&request.asked, asked, __ATOMIC_RELEASE);
    while (!spin(is_answered)) {
    }
    took.push_back(std::chrono::duration<double>(Clock::now() - begin).count());
  }
  release(layer);
  if (std::isnan(host.y[0])) return INFINITY;  // its kernels failed, or the weights are none
  const auto middle = took.begin() + static_cast<std::ptrdiff_t>(took.size() / 2);
  std::nth_element(took.begin(), middle, took.end());
  return *middle / static_cast<double>(at_once);
}

void HostExperts::answer_until_stopped() {
  // The device writes these, and reads `answered`.
  qm_cuda_host* const request = host_;
  uint64_t last = 0, asked = 0;
  const auto is_asked = [&] {
    asked = __atomic_load_n(&request->asked, __ATOMIC_ACQUIRE);
    return asked != last || stopping_;
  };
  for (;;) {
    if (!spin(is_asked))
      while (!is_asked()) std::this_thread::sleep_for(kNap);
    if (asked == last) return;  // stopping
    last = asked;
    const Layer& layer = layers_[static_cast<size_t>(request->layer)];
    const HostPlaces host = host_places(request, layer.moe.hidden_size);
    if (!multiply(layer, request->tokens, request->top_k, host))
      std::fill(host.y, host.y + request->tokens * layer.moe.hidden_size, NAN);
    __atomic_store_n(&request->answered, asked, __ATOMIC_RELEASE);
  }
}

}  // namespace quantmoe
