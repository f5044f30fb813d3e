// How many threads there may be, and a pool of none: threads for one call.
#include "core/parallel.h"

#include <algorithm>
#include <cstdio>
#include <exception>
#include <string>
#include <thread>
#include <vector>

#include "core/control_groups.h"

#if defined(__linux__)
#include <dirent.h>
#include <sched.h>

#include <cerrno>
#include <cstdlib>
#elif defined(_WIN32)
#define NOMINMAX
#include <windows.h>

#include <bit>
#endif

namespace quantmoe {
namespace {

#if defined(__linux__)
// CPUs in the affinity masks of this process's threads; 0 when the system does not say. Not of the calling one alone:
// OpenMP's OMP_PROC_BIND binds a program's first thread to one CPU, while an engine's pool has all of them.
int64_t affinity() {
  for (size_t size = sizeof(cpu_set_t); size <= 64 * sizeof(cpu_set_t); size *= 2) {  // EINVAL: the mask is longer
    std::vector<cpu_set_t> mask(size / sizeof(cpu_set_t)), all(mask.size());
    bool short_mask = false;
    if (DIR* tasks = opendir("/proc/self/task")) {
      while (const dirent* task = readdir(tasks)) {
        const int id = std::atoi(task->d_name);
        if (id <= 0) continue;  // "." and ".."
        if (sched_getaffinity(id, size, mask.data()) == 0)
          CPU_OR_S(size, all.data(), all.data(), mask.data());
        else
          short_mask |= errno == EINVAL;
      }
      closedir(tasks);
    }
    if (const int64_t found = CPU_COUNT_S(size, all.data()); found || !short_mask) return found;
  }
  return 0;
}
#elif defined(_WIN32)
// CPUs of the process's affinity mask, which is of its group of at most 64; 0 when it has several groups.
int64_t affinity() {
  DWORD_PTR process, system;
  return GetProcessAffinityMask(GetCurrentProcess(), &process, &system) ? std::popcount(process) : 0;
}
#endif

// The number that a file holds, or the two; 0 for what is not there or is a word.
void read_numbers(const std::string& path, long long* first, long long* second = nullptr) {
  *first = 0;
  if (second) *second = 0;
  std::FILE* file = std::fopen(path.c_str(), "r");
  if (!file) return;
  const int found = std::fscanf(file, "%lld", first);
  if (found == 1 && second && std::fscanf(file, "%lld", second) != 1) *second = 0;
  std::fclose(file);
}

// The CPUs that a control group's quota is worth, or `most`. Version 2 has "quota period" or "max period" in cpu.max;
// version 1 has a file each, and a quota of -1 is none.
int64_t within_quota(int64_t most, const std::string& folder, bool v2) {
  long long quota, period;
  if (v2) {
    read_numbers(folder + "/cpu.max", &quota, &period);
  } else {
    read_numbers(folder + "/cpu.cfs_quota_us", &quota);
    read_numbers(folder + "/cpu.cfs_period_us", &period);
  }
  return quota > 0 && period > 0 ? std::min<int64_t>(most, quota / period + (quota % period != 0)) : most;
}

}  // namespace

int cpus(int allowed, const std::string& root) try {
  int64_t found = allowed;
#if defined(__linux__) || defined(_WIN32)
  if (found <= 0) found = affinity();
#endif
  if (found <= 0) found = std::thread::hardware_concurrency();
  for_control_groups(root, "cpu", [&](const std::string& folder, bool v2) { found = within_quota(found, folder, v2); });
  return static_cast<int>(std::max<int64_t>(1, found));
} catch (const std::exception&) {  // of memory
  return 1;
}

void start_threads(void*, qm_task task, void* arg, size_t count) {
  struct Threads : std::vector<std::thread> {
    ~Threads() {
      for (std::thread& thread : *this) thread.join();
    }
  } threads;
  size_t next = 1;
  try {
    for (threads.reserve(count); next < count; ++next) threads.emplace_back(task, arg, next);
  } catch (const std::exception&) {  // the system has no more threads, or no memory for one: this one does the rest
  }
  if (count) task(arg, 0);
  for (; next < count; ++next) task(arg, next);
}

}  // namespace quantmoe
