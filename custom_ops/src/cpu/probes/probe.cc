// What this machine could do at best, for the bench to measure the kernels against: read bandwidth and int8
// multiply-adds.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <thread>
#include <vector>

#include "core/parallel.h"
#include "cpu/kernel.h"

namespace quantmoe {
namespace {

// Seconds from when all lanes have threads, lane 0 being the last to start (start_threads), to when the last one
// is done.
template <typename Body>
double seconds(int64_t lanes, const Body& body) {
  using Clock = std::chrono::steady_clock;
  std::atomic<bool> ready{false};
  std::vector<Clock::time_point> begin(lanes), end(lanes);
  const auto lane = [&](int64_t i) {
    if (i == 0) ready.store(true);
    while (!ready.load()) std::this_thread::yield();
    begin[i] = Clock::now();
    body(i);
    end[i] = Clock::now();
  };
  start_threads(
      nullptr, [](void* f, size_t i) { (*static_cast<decltype(lane)*>(f))(static_cast<int64_t>(i)); },
      const_cast<void*>(static_cast<const void*>(&lane)), static_cast<size_t>(lanes));
  return std::chrono::duration<double>(*std::max_element(end.begin(), end.end()) -
                                       *std::min_element(begin.begin(), begin.end()))
      .count();
}

// Reads [begin, begin + bytes) once, as kStreams sequential streams. One stream leaves some cores' prefetchers short of
// work, because they stop at the end of a page.
void read_slice(const uint8_t* begin, int64_t bytes) {
  constexpr int64_t kStreams = 4, kStep = 64;
  const int64_t part = bytes / kStreams / kStep * kStep;
  uint64_t sums[kStep / 8] = {};
  for (int64_t at = 0; at < part; at += kStep)
    for (int64_t s = 0; s < kStreams; ++s) {
      uint64_t words[kStep / 8];
      __builtin_prefetch(begin + s * part + at + 1024);
      std::memcpy(words, begin + s * part + at, kStep);
      for (int64_t i = 0; i < kStep / 8; ++i) sums[i] ^= words[i];
    }
  asm volatile("" : : "m"(sums));
}

}  // namespace

int64_t int8_peak_portable(int64_t rounds) {
  constexpr int kCount = 256;
  int8_t a[kCount] = {}, b[kCount] = {};
  int32_t sum = 0;
  for (int64_t r = 0; r < rounds; ++r) {
    asm volatile("" : "+m"(a), "+m"(b));  // unknown anew each round
    for (int i = 0; i < kCount; ++i) sum += a[i] * b[i];
  }
  asm volatile("" : : "r"(sum));
  return rounds * kCount;
}

}  // namespace quantmoe

using namespace quantmoe;

double qm_probe_read(const void* data, size_t bytes, int lanes) {
  lanes = std::max(lanes, 1);
  const int64_t slice = static_cast<int64_t>(bytes) / lanes;
  const double time =
      seconds(lanes, [&](int64_t lane) { read_slice(static_cast<const uint8_t*>(data) + lane * slice, slice); });
  return static_cast<double>(slice) * lanes / time;
}

double qm_probe_int8(int lanes) {
  char err[QM_ERROR_SIZE];
  const CpuKernel* kernel = select_kernel(err);
  if (!kernel) return 0;
  lanes = std::max(lanes, 1);
  // Doubles the rounds until the clock does not count; short enough to fit between other processes.
  for (int64_t rounds = 1 << 10;; rounds *= 2) {
    int64_t products = 0;
    const double time = seconds(lanes, [&](int64_t) {
      const int64_t done = kernel->int8_peak(rounds);
      __atomic_fetch_add(&products, done, __ATOMIC_RELAXED);
    });
    if (time > 0.01) return 2.0 * static_cast<double>(products) / time;
  }
}
