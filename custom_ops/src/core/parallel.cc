#include "core/parallel.h"

#include <thread>
#include <vector>

void qm_parallel_threads(void*, qm_task task, void* arg, size_t count) {
  std::vector<std::thread> threads;
  threads.reserve(count);
  for (size_t i = 1; i < count; ++i) threads.emplace_back(task, arg, i);
  if (count) task(arg, 0);
  for (std::thread& thread : threads) thread.join();
}
