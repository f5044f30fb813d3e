// A rank's watch (ranks/watch.h) for a test's process, whose ranks say who they are in files and have GPUs that are
// busy when the test says so.
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <sstream>

#include "ranks/watch.h"

namespace {

std::vector<std::string> exchange(const std::filesystem::path& folder, int32_t rank, int32_t world,
                                  const std::string& card) {
  std::ofstream(folder / "new") << card;
  std::filesystem::rename(folder / "new", folder.parent_path() / std::to_string(rank));
  std::vector<std::string> cards;
  while (cards.size() < static_cast<size_t>(world)) {
    std::ifstream file(folder.parent_path() / std::to_string(cards.size()));
    if (std::stringstream text; file && text << file.rdbuf())
      cards.push_back(text.str());
    else
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  return cards;
}

}  // namespace

// Watches until it gave up, or for so many ms; writes what it knows then, "gave up: " before it where it did. `error`
// is what it finds of the GPUs' connections after 200 ms. A folder of the rank's own in one of all ranks.
extern "C" void driver_watch(int32_t rank, int32_t world, const char* release, const char* folder, int32_t busy,
                             const char* error, int32_t ms, char* said, size_t size) {
  using Clock = std::chrono::steady_clock;
  const auto begin = Clock::now();
  std::atomic<bool> gave_up{false};
  std::string text;
  try {
    const quantmoe::Watch watch(
        rank, world, release, std::chrono::seconds(10),
        [&](const std::string& card) { return exchange(folder, rank, world, card); },
        {[&] { return Clock::now() - begin > std::chrono::milliseconds(200) ? std::string(error) : ""; },
         [&] { return busy != 0; }, [&](const std::string&) { gave_up = true; }});
    std::ofstream(std::filesystem::path(folder) / "met");
    while (!gave_up && Clock::now() - begin < std::chrono::milliseconds(ms))
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    text = (gave_up ? "gave up: " : "") + watch.failure();
  } catch (const std::exception& e) {
    text = std::string("refused: ") + e.what();
  }
  std::snprintf(said, size, "%s", text.c_str());
}
