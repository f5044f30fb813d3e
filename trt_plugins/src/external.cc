#include "external.h"

#include <charconv>
#include <cstring>
#include <filesystem>
#include <map>
#include <mutex>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>

#include "environment.h"
#include "experts/per_session.h"
#include "experts/row_bytes.h"
#include "files/mapped_file.h"
#include "hashes/identity.h"

namespace quantmoe {
namespace {

constexpr const char* kFolder = "QUANTMOE_FOLDER";
constexpr const char* kVerify = "QUANTMOE_VERIFY";
constexpr int64_t kAlignment = 64;  // of packed tensors in their file

[[noreturn]] void refuse(const std::string& what) { throw std::invalid_argument(what); }

bool wants_verify() {
  const std::string wanted = environment(kVerify);
  if (wanted != "" && wanted != "0" && wanted != "1")
    refuse(std::string(kVerify) + " is \"" + wanted + "\", expected 0 or 1");
  return wanted == "1";
}

ExpertSettings settings() {
  ExpertSettings found;
  found.of_environment = true;
  found.experts = environment("QUANTMOE_EXPERTS");
  if (found.experts == "") found.experts = "auto";
  found.ram = environment("QUANTMOE_RAM");
  found.reserve = environment("QUANTMOE_RESERVE");
  found.gpu_memory = environment("QUANTMOE_GPU_MEMORY");
  found.check_cuda();
  return found;
}

}  // namespace

// The mapped files of a folder, and what its engines have of a device.
class ExpertFolder {
 public:
  explicit ExpertFolder(const std::filesystem::path& path)
      : path_(path), experts_(PerSession<DeviceExperts>::of(this, settings())) {}

  // The one of this process for the folder that the environment names and the current device.
  static std::shared_ptr<ExpertFolder> of(const std::string& file) {
    const std::string wanted = environment(kFolder);
    if (wanted == "")
      refuse("its experts are in " + file + ": set " + kFolder + " to the exported folder, which has this file");
    std::error_code error;
    const auto path = std::filesystem::canonical(wanted, error);
    if (error) refuse(std::string(kFolder) + " is " + wanted + ": " + error.message());
    int device = 0;
    if (const cudaError_t failure = cudaGetDevice(&device))
      throw std::runtime_error(std::string("CUDA: ") + cudaGetErrorString(failure));
    // Never destroyed: TensorRT's objects may outlive the library's exit handlers.
    static auto& mutex = *new std::mutex;
    static auto& all = *new std::map<std::pair<std::filesystem::path, int>, std::weak_ptr<ExpertFolder>>;
    const std::lock_guard lock(mutex);
    auto& entry = all[{path, device}];
    std::shared_ptr<ExpertFolder> found = entry.lock();
    if (!found) entry = found = std::make_shared<ExpertFolder>(path);
    return found;
  }

  // Where a file has a projection's rows, which are those that the model was exported with.
  const void* find(const ExternalExperts::Part& part, const char* identity) {
    const bool verify = wants_verify();
    const std::lock_guard lock(mutex_);
    const std::filesystem::path path = path_ / part.file;
    auto file = files_.find(part.file);
    if (file == files_.end()) try {
        file = files_.try_emplace(part.file, path).first;
      } catch (const std::runtime_error& error) {
        throw std::runtime_error(path.string() + ": " + error.what());
      }
    const auto size = static_cast<int64_t>(file->second.size());
    if (part.offset > size || part.bytes > size - part.offset)
      throw std::runtime_error(path.string() + " has " + std::to_string(size) + " bytes, " + part.name + " is " +
                               std::to_string(part.bytes) + " from " + std::to_string(part.offset) + " on");
    const char* const rows = file->second.data() + part.offset;
    if (identity) try {
        check_identity(part.name, identity, static_cast<size_t>(part.bytes), verify,
                       [&](size_t at, size_t) { return rows + at; });
      } catch (const std::invalid_argument& error) {
        throw std::invalid_argument(path.string() + ": " + error.what());
      }
    return rows;
  }

  // Engines of one model have the same layers.
  int number_of(const std::string& layer, const qm_moe& moe, int64_t experts, const void* const rows[2]) {
    const std::lock_guard lock(mutex_);
    const Key key{rows[0], rows[1], experts, row_bytes_of(moe)};
    const auto found = numbers_.find(key);
    if (found != numbers_.end()) return found->second;
    return numbers_[key] = experts_->add(layer, moe, experts, rows[0], rows[1]);
  }

  DeviceExperts& experts() const { return *experts_; }

 private:
  using Key = std::tuple<const void*, const void*, int64_t, std::array<int64_t, 2>>;  // rows, how many, their sizes

  const std::filesystem::path path_;
  std::mutex mutex_;
  std::map<std::string, MappedFile> files_;
  const std::shared_ptr<DeviceExperts> experts_;
  std::map<Key, int> numbers_;
};

ExternalExperts::~ExternalExperts() = default;
// As many slots as there can be: the workspace is the same for less, and none takes less.
void ExternalExperts::describe(NodeProblem* problem) const {
  problem->slots = count_;
  problem->inputs[QuantMoE_w13].shape = {2, {count_, row_bytes_[0] / 4}};
  problem->inputs[QuantMoE_w2].shape = {2, {count_, row_bytes_[1] / 4}};
}
DeviceExperts& ExternalExperts::experts() const { return folder_->experts(); }

ExternalExperts::Part ExternalExperts::parse(const std::string& name, const char* text) {
  Part part{name, {}};
  const auto expect = [&](bool good) {
    if (!good) refuse(name + "_external is \"" + text + "\", expected first byte, bytes, and the name of a file");
  };
  const char *at = text, *const end = at + std::strlen(text);
  for (int64_t* number : {&part.offset, &part.bytes}) {
    const auto [after, error] = std::from_chars(at, end, *number);
    expect(error == std::errc() && *number >= 0 && after != end && *after == ' ');
    at = after + 1;
  }
  part.file.assign(at, end);
  expect(part.file != "" && part.file != "." && part.file != ".." && part.file.find('/') == std::string::npos);
  if (part.offset % kAlignment)
    refuse(name + "_external begins at byte " + std::to_string(part.offset) + ", expected a multiple of " +
           std::to_string(kAlignment));
  return part;
}

std::shared_ptr<ExternalExperts> ExternalExperts::of(const PluginLayer& layer, const qm_moe& moe) {
  const char* const texts[] = {layer.text("w13_external"), layer.text("w2_external")};
  if (!texts[0] && !texts[1]) return nullptr;
  if (!texts[0] || !texts[1])
    refuse(std::string(texts[0] ? "w2" : "w13") + "_external is missing, expected that of w13 and of w2, or neither");
  std::shared_ptr<ExternalExperts> made(new ExternalExperts);
  int64_t counts[2];
  made->row_bytes_ = row_bytes_of(moe);
  for (const int i : {0, 1}) {
    const Part& part = made->parts_[i] = parse(i ? "w2" : "w13", texts[i]);
    const int64_t row = made->row_bytes_[static_cast<size_t>(i)];
    counts[i] = part.bytes / row;
    if (counts[i] < 1 || part.bytes % row)
      refuse(part.name + "_external has " + std::to_string(part.bytes) + " bytes, expected a multiple of the " +
             std::to_string(row) + " of an expert with these attributes");
  }
  if (counts[0] != counts[1])
    refuse("w13_external has " + std::to_string(counts[0]) + " experts and w2_external " + std::to_string(counts[1]) +
           ", expected the same number");
  made->count_ = counts[0];
  return made;
}

void ExternalExperts::open(const PluginLayer& layer, const qm_moe& moe) try {
  find(layer, moe);
} catch (const std::exception& error) {
  failure_ = error.what();
  log_message(Severity::kERROR, layer.name + " " + failure_);
}

void ExternalExperts::find(const PluginLayer& layer, const qm_moe& moe) {
  folder_ = ExpertFolder::of(parts_[0].file);
  for (const int i : {0, 1}) rows_[i] = folder_->find(parts_[i], layer.text(i ? "w2_identity" : "w13_identity"));
  number_ = folder_->number_of(layer.name, moe, count_, rows_);
}

}  // namespace quantmoe
