#include "experts/experts.h"

#include <algorithm>
#include <cerrno>
#include <cinttypes>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <optional>
#include <sstream>
#include <stdexcept>

#include "core/control_groups.h"
#include "core/numbers.h"
#include "experts/per_session.h"
#include "files/mapping.h"

#if defined(__linux__)
#include <fcntl.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#endif

namespace quantmoe {
namespace {

bool number_in(const std::string& text, int least, int most) {
  if (text.empty() || text.size() > 9 || text.find_first_not_of("0123456789") != std::string::npos) return false;
  const int number = std::stoi(text);
  return least <= number && number <= most;
}

}  // namespace

std::string ExpertSettings::key(const char* setting) const {
  if (!of_environment) return std::string("quantmoe.") + setting;
  std::string name = std::string("QUANTMOE_") + setting;
  for (char& c : name)
    if (c >= 'a' && c <= 'z') c += 'A' - 'a';
  return name;
}

void ExpertSettings::refuse(const std::string& why) const {
  throw std::invalid_argument((of_environment ? "" : "quantmoe: ") + why);
}

int64_t ExpertSettings::bytes_of(const char* setting, const std::string& text, bool automatic) const {
  if (text.empty() || (automatic && text == "auto")) return -1;
  if (text.size() > 18 || text.find_first_not_of("0123456789") != std::string::npos)
    refuse(key(setting) + " is \"" + text + "\", expected a number of bytes" + (automatic ? " or auto" : ""));
  return std::stoll(text);
}

void ExpertSettings::check() const {
  if (experts != "" && experts != "host" && !disk())
    refuse("quantmoe.experts is \"" + experts + "\", the CPU library takes host, disk or auto");
  (void)ram_bytes();
  (void)reserve_bytes();
  for (const auto& [name, given] : {std::pair{"gpu_memory", &gpu_memory}, {"misses", &misses}, {"threads", &threads}})
    if (*given != "") refuse(key(name) + " is an entry of the CUDA library");
  if (!disk() && (ram != "" || reserve != ""))
    refuse("quantmoe.ram and quantmoe.reserve need quantmoe.experts = disk or auto");
  if (warm != "" && !disk()) refuse("quantmoe.warm needs quantmoe.experts = disk or auto");
  if (reserve != "" && ram != "" && ram != "auto")
    refuse("quantmoe.reserve is of quantmoe.ram = auto, here quantmoe.ram is " + ram);
#if !defined(__linux__)
  if (disk() || trace != "") refuse("quantmoe.experts = disk and quantmoe.trace need Linux");
#endif
}

void ExpertSettings::check_cuda() const {
  const std::string where = key("experts");
  if (experts != "" && experts != "gpu" && !host())
    refuse(where + " is \"" + experts + "\", the CUDA library takes gpu, host, disk or auto");
  (void)gpu_memory_bytes();
  (void)ram_bytes();
  (void)reserve_bytes();
  if (ram != "" && !disk())
    refuse(key("ram") + " needs " + where + " = disk or auto, here it is " + (experts == "" ? "gpu" : experts));
  if (!host() && (gpu_memory != "" || reserve != ""))
    refuse(key("gpu_memory") + " and " + key("reserve") + " need " + where + " = host, disk or auto");
  if (reserve != "" && gpu_memory != "" && gpu_memory != "auto")
    refuse(key("reserve") + " is of " + key("gpu_memory") + " = auto, here it is " + gpu_memory);
  if (warm != "" && !host())
    refuse(key("warm") + " needs " + where + " = host, disk or auto, here it is " + (experts == "" ? "gpu" : experts));
  const std::vector<int32_t> shares = host_shares();
  if (misses != "" && (!host() || experts == "disk"))
    refuse(key("misses") + " needs " + where + " = host or auto, here it is " + (experts == "" ? "gpu" : experts));
  if (threads != "" && std::ranges::count(shares, 0) == std::ssize(shares))
    refuse(key("threads") + " needs " + key("misses") + " = cpu, auto or a share");
  if (threads != "" && !number_in(threads, 1, 1024))
    refuse(key("threads") + " is \"" + threads + "\", expected 1 to 1024");
#if !defined(__linux__)
  if (host()) refuse(where + " = " + experts + " needs Linux");
  if (trace != "") refuse("quantmoe.trace needs Linux");
#endif
}

std::vector<int32_t> ExpertSettings::host_shares() const {
  const auto share_of = [&](const std::string& word) {
    if (word == "copy") return 0;
    if (word == "cpu" || misses == "auto") return 256;
    const std::string percent = word.substr(0, word.size() - !word.empty());
    if (!word.ends_with('%') || !number_in(percent, 0, 100))
      refuse(key("misses") + " is \"" + misses +
             "\", expected copy, cpu, auto, the CPU's share, 0% to 100%, or a list " +
             "of layers such as 24*copy,24*cpu");
    return (std::stoi(percent) * 256 + 50) / 100;
  };
  if (misses == "") return {0};
  if (!misses_by_layer()) return {share_of(misses)};
  std::vector<int32_t> shares;
  std::string run;
  for (std::istringstream runs(misses + ","); std::getline(runs, run, ',');) {
    const size_t star = run.find('*');
    const std::string layers = run.substr(0, star);
    const bool counted = star != std::string::npos && number_in(layers, 1, 1 << 16);
    shares.insert(shares.end(), counted ? std::stoul(layers) : 0, share_of(counted ? run.substr(star + 1) : ""));
  }
  return shares;
}

std::vector<std::pair<int, int64_t>> Trace::most_used(size_t most, int layer, bool half) const {
  std::vector<std::vector<size_t>> uses(runs.size());
  std::vector<std::pair<int, int64_t>> found;
  const int first = std::max(layer, 0), end = layer < 0 ? static_cast<int>(runs.size()) : layer + 1;
  for (int i = first; i < end; ++i) {
    const auto& all = runs[static_cast<size_t>(i)];
    auto& own = uses[static_cast<size_t>(i)];
    for (size_t run = 0; run < (half ? all.size() / 2 : all.size()); ++run)
      for (const uint16_t expert : all[run].ids) {
        if (expert >= own.size()) own.resize(expert + size_t{1});
        ++own[expert];
      }
    for (size_t expert = 0; expert < own.size(); ++expert)
      if (own[expert]) found.emplace_back(i, static_cast<int64_t>(expert));
  }
  const auto ranked = [&](const auto& of) {  // std::stable_sort warns with clang 19 and libstdc++ 12
    return std::pair(uses[static_cast<size_t>(of.first)][static_cast<size_t>(of.second)], of);
  };
  std::sort(found.begin(), found.end(), [&](const auto& a, const auto& b) { return ranked(a) < ranked(b); });
  if (found.size() > most) found.erase(found.begin(), found.end() - static_cast<ptrdiff_t>(most));
  return found;
}

#if defined(__linux__)
namespace {

// Reads that run at one time, and the most bytes of one. A few reads keep an NVMe disk busy. Experts of a few MB are
// split.
constexpr int kReaders = 8;
constexpr int64_t kPiece = 1 << 20;

constexpr uint16_t kNone = 0xffff;  // no expert, in a trace
constexpr char kTrace[] = "{\"quantmoe_trace\": ";

std::string words(int error) { return std::strerror(error); }

// The value of a line "key value" or "key: value kB", in its unit; 0 where there is none.
int64_t value_of(const std::string& path, const char* key) {
  int64_t found = 0;
  if (std::FILE* file = std::fopen(path.c_str(), "r")) {
    char line[512];
    const size_t length = std::strlen(key);
    while (std::fgets(line, sizeof line, file))
      if (std::strncmp(line, key, length) == 0 && std::sscanf(line + length, "%*[: ]%" SCNd64, &found) == 1) break;
    std::fclose(file);
  }
  return found;
}

// The file's first number; -1 for a word, or no file.
int64_t number_in(const std::string& path) {
  int64_t found = -1;
  if (std::FILE* file = std::fopen(path.c_str(), "r")) {
    if (std::fscanf(file, "%" SCNd64, &found) != 1) found = -1;
    std::fclose(file);
  }
  return found;
}

// What the memory controller of a control group leaves, or `most`.
int64_t within_limit(int64_t most, const std::string& folder, bool v2) {
  const int64_t limit = number_in(folder + (v2 ? "/memory.max" : "/memory.limit_in_bytes"));
  const int64_t used = number_in(folder + (v2 ? "/memory.current" : "/memory.usage_in_bytes"));
  if (limit < 0 || used < 0) return most;
  const std::string stat = folder + "/memory.stat";
  const int64_t cache = v2 ? value_of(stat, "inactive_file") + value_of(stat, "active_file")
                           : value_of(stat, "total_inactive_file") + value_of(stat, "total_active_file");
  return std::min(most, std::max<int64_t>(0, limit - std::max<int64_t>(0, used - cache)));
}

}  // namespace

int64_t available_memory() {
  int64_t most = value_of("/proc/meminfo", "MemAvailable") * 1024;
  for_control_groups("", "memory", [&](const std::string& folder, bool v2) { most = within_limit(most, folder, v2); });
  return most;
}

DataFile::DataFile(const std::string& path, std::string identity) : path_(path), identity_(std::move(identity)) {
  const auto refuse = [&](const std::string& why) {
    if (buffered_ >= 0) close(buffered_);
    throw std::invalid_argument(path_ + " " + why);
  };
  const std::string deleted = " (deleted)";
  if (path_.size() > deleted.size() && path_.compare(path_.size() - deleted.size(), deleted.size(), deleted) == 0) {
    path_.erase(path_.size() - deleted.size());
    refuse("was removed or replaced while it was opened");
  }
  buffered_ = open(path_.c_str(), O_RDONLY | O_CLOEXEC);
  if (buffered_ < 0) refuse("cannot be opened: " + words(errno));
  // stat's devices and inodes differ from a mapping's in overlays and subvolumes. So mappings are compared with a
  // mapping of this file.
  void* const page = mmap(nullptr, kPage, PROT_READ, MAP_PRIVATE, buffered_, 0);
  if (page == MAP_FAILED) refuse("cannot be mapped: " + words(errno));
  const std::string found = Mapping(page).identity;
  munmap(page, kPage);
  if (found != identity_) refuse("was replaced while it was opened");
  struct stat info;
  if (fstat(buffered_, &info)) refuse(words(errno));
  bytes_ = info.st_size;
  changed_[0] = info.st_mtim.tv_sec;
  changed_[1] = info.st_mtim.tv_nsec;
  direct_ = open(path_.c_str(), O_RDONLY | O_CLOEXEC | O_DIRECT);
  struct stat same;
  if (direct_ >= 0 && (fstat(direct_, &same) || same.st_ino != info.st_ino || same.st_dev != info.st_dev)) {
    close(direct_);
    refuse("was replaced while it was opened");
  }
}

bool DataFile::operator==(const DataFile& other) const {
  return identity_ == other.identity_ && bytes_ == other.bytes_ && std::ranges::equal(changed_, other.changed_);
}

DataFile::~DataFile() {
  close(buffered_);
  if (direct_ >= 0) close(direct_);
}

void DataFile::check_unchanged() const {
  struct stat info;
  if (fstat(buffered_, &info)) throw std::runtime_error(path_ + ": " + words(errno));
  if (info.st_size != bytes_)
    throw std::runtime_error(path_ + " has " + std::to_string(info.st_size) + " bytes, " + std::to_string(bytes_) +
                             " when it was opened");
  if (info.st_mtim.tv_sec != changed_[0] || info.st_mtim.tv_nsec != changed_[1])
    throw std::runtime_error(path_ + " was written to since it was opened");
}

void DataFile::read(int64_t offset, int64_t size, char* out) const {
  const int64_t lead = offset % kPage, all = align_up(lead + size, kPage);
  int64_t done = 0;  // from the page's beginning
  // A direct read that ends early is completed by others, which have no alignment to keep.
  if (direct_ >= 0) {
    ssize_t count;
    do count = pread(direct_, out - lead, static_cast<size_t>(all), offset - lead);
    while (count < 0 && errno == EINTR);
    if (count < 0 && errno != EINVAL)  // EINVAL: this file system has other alignments, or none
      throw std::runtime_error(std::to_string(size) + " bytes at " + std::to_string(offset) + " of " + path_ + ": " +
                               words(errno));
    done = std::clamp<int64_t>(count - lead, 0, size);
  }
  if (done < size) read_buffered(offset + done, size - done, out + done);
  check_unchanged();
}

void DataFile::read_buffered(int64_t offset, int64_t size, char* out) const {
  const int64_t begin = offset;
  while (size > 0) {
    const ssize_t count = pread(buffered_, out, static_cast<size_t>(size), offset);
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0)
      throw std::runtime_error(std::to_string(size) + " bytes at " + std::to_string(offset) + " of " + path_ + ": " +
                               (count < 0 ? words(errno) : "the file ends before them"));
    offset += count;
    out += count;
    size -= count;
  }
  (void)posix_fadvise(buffered_, begin, offset - begin, POSIX_FADV_DONTNEED);
}

ExpertLayer::Tensor Experts::find(const void* data, int64_t rows, int64_t row_bytes) {
  const Mapping mapping(data);
  const auto begin = reinterpret_cast<uintptr_t>(data);
  const bool found = !mapping.path.empty() && begin + static_cast<uintptr_t>(rows * row_bytes) <= mapping.end;
  if (!found && settings_.experts == "auto") return {nullptr, 0, row_bytes};
  const std::string wanted = settings_.key("experts") + " = " + settings_.experts + ", but ";
  if (!found)
    throw std::invalid_argument(wanted +
                                "its packed weights are not mapped from a file: expected a model that is loaded by "
                                "its path, with external data");
  const int64_t offset = mapping.offset + static_cast<int64_t>(begin - mapping.begin);
  if (offset % 64) throw std::invalid_argument("packed weights are not at a multiple of 64 bytes in their file");
  auto file =
      std::find_if(files_.begin(), files_.end(), [&](const auto& f) { return f->identity() == mapping.identity; });
  if (file == files_.end()) try {
      file = files_.insert(file, std::make_shared<const DataFile>(mapping.path, mapping.identity));
    } catch (const std::invalid_argument& why) {
      throw std::invalid_argument(wanted + why.what());
    }
  return {*file, offset, row_bytes};
}

int Experts::add(ExpertLayer layer) {
  const std::lock_guard lock(mutex_);
  if (trace_ && layer.experts >= kNone)
    throw std::invalid_argument("quantmoe.trace has no room for " + std::to_string(layer.experts) + " experts");
  if (started_) throw std::runtime_error("quantmoe: a layer was added after the first run");
  for (int i : {0, 1})
    regions_.bytes[i] =
        std::max(regions_.bytes[i], align_up(layer.tensors[i].row_bytes, DataFile::kPage) + DataFile::kPage);
  const int64_t ram = settings_.ram_bytes();
  if (disk() && ram >= 0 && ram < slot_bytes())
    throw std::invalid_argument(settings_.key("ram") + " is " + std::to_string(ram) + ", expected at least the " +
                                std::to_string(slot_bytes()) +
                                " bytes of one expert, and to be of use those of 3 top_k a layer");
  layers_.push_back(std::move(layer));
  return static_cast<int>(layers_.size()) - 1;
}

int64_t Experts::bytes_read() const {
  if (!cache_) return 0;
  const auto lock = cache_->lock();
  return counts_.bytes_read;
}

std::string Experts::report() {
  std::string text;
  for (const auto& experts : PerSession<Experts>::alive()) {
    const std::lock_guard lock(experts->mutex_);
    const auto counted = experts->cache_ ? experts->cache_->lock() : ExpertCache::Lock();
    const ExpertCache::Counts& counts = experts->counts_;
    text += json_line({{"layers", experts->layers_.size()},
                       {"slots", experts->share_.slots.size()},
                       {"slot_bytes", static_cast<uint64_t>(experts->slot_bytes())},
                       {"hits", static_cast<uint64_t>(counts.hits)},
                       {"misses", static_cast<uint64_t>(counts.misses)},
                       {"bytes_read", static_cast<uint64_t>(counts.bytes_read)},
                       {"rounds", static_cast<uint64_t>(counts.rounds)}});
  }
  return text;
}

// Or empty.
static bool is_trace(int file) {
  char begin[sizeof(kTrace) - 1];
  const ssize_t size = pread(file, begin, sizeof(begin), 0);
  return size == 0 || (size == sizeof(begin) && !std::memcmp(begin, kTrace, sizeof(begin)));
}

Experts::Experts(const ExpertSettings& settings, bool shares) : settings_(settings), shares_(shares) {
  if (settings.trace == "") return;
  const int file = open(settings.trace.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0666);
  std::string why;
  if (file < 0) {
    why = words(errno);
  } else if (flock(file, LOCK_EX | LOCK_NB)) {
    why = "another session writes it";
  } else if (!is_trace(file)) {
    why = "is there, and is no trace: expected an earlier trace, or no file";
  } else if (std::error_code none; std::filesystem::equivalent(settings.trace, settings.warm, none)) {
    why = "is quantmoe.warm, too: expected another file";
  } else if (ftruncate(file, 0) || !(trace_ = fdopen(file, "wb"))) {
    why = words(errno);
  }
  if (trace_) return;
  if (file >= 0) close(file);
  throw std::invalid_argument("quantmoe: quantmoe.trace " + settings.trace + ": " + why);
}

Experts::~Experts() {
  if (cache_) cache_->leave(share_);
  if (trace_ && std::fclose(trace_))
    std::fprintf(stderr, "quantmoe: quantmoe.trace %s: its end is lost: %s\n", settings_.trace.c_str(),
                 words(errno).c_str());
}

std::string Experts::start(const Trace* trace) {
  std::unique_lock lock(mutex_);
  if (started_) return "";
  if (trace_) write_header();
  int64_t experts = 0, bytes = 0;
  for (const ExpertLayer& layer : layers_) {
    experts += layer.experts;
    bytes += layer.experts * (layer.tensors[0].row_bytes + layer.tensors[1].row_bytes);
  }
  const auto in_memory = [](const ExpertLayer& layer) { return !layer.tensors[0].file || !layer.tensors[1].file; };
  if (!disk() || std::any_of(layers_.begin(), layers_.end(), in_memory)) {
    started_ = true;
    return disk() ? "experts = auto: the model is not loaded by its path, and stays in memory" : "";
  }
  int64_t budget = settings_.ram_bytes();
  std::string source = settings_.key("ram");
  if (budget < 0) {
    // The rest of the model is read, too, and the caches of the first tokens are not there yet.
    int64_t reserve = settings_.reserve_bytes();
    if (reserve < 0) {
      reserve = kReserve;
      for (const auto& file : files_) reserve += file->bytes();
      reserve = std::max(reserve - bytes, kReserve);
    }
    const int64_t available = available_memory();
    budget = std::max<int64_t>(0, available - reserve);
    source = std::to_string(available) + " bytes available less " + std::to_string(reserve);
  }
  if (settings_.experts == "auto" && budget >= bytes) {
    started_ = true;
    return "experts = auto: all " + std::to_string(experts) + " experts fit and stay mapped (" + std::to_string(bytes) +
           " bytes; " + source + ")";
  }
  const int64_t count = std::min(experts, budget / slot_bytes());
  if (count < 1)
    throw std::runtime_error(settings_.key("ram") + " = auto has " + source + " in reserve, expected at least the " +
                             std::to_string(slot_bytes()) + " bytes of one expert; set " + settings_.key("ram") +
                             " or " + settings_.key("reserve"));
  const int64_t size = count * slot_bytes();
  if (const int64_t available = available_memory(); settings_.ram_bytes() >= 0 && size > available)
    throw std::runtime_error(settings_.key("ram") + ": " + std::to_string(count) + " experts take " +
                             std::to_string(size) + " bytes, " + std::to_string(available) + " are available");
  std::optional<Trace> own;
  if (!trace) trace = &own.emplace(settings_.warm == "" ? Trace{} : read_warm());
  const auto warm = trace->most_used(static_cast<size_t>(count));
  auto cache = shares_ ? ExpertCache::of(files_, regions_) : std::make_shared<ExpertCache>(files_, regions_);
  numbers_.clear();  // of a start that failed later
  for (const ExpertLayer& layer : layers_) numbers_.push_back(cache->add(layer));
  const auto all = static_cast<int64_t>(cache->join(share_, count));
  cache_ = std::move(cache);
  started_ = true;
  mapped_ = false;
  lock.unlock();  // other runs begin
  warm_up(warm);
  return "experts = " + settings_.experts + ": memory for " + std::to_string(count) + " of " + std::to_string(experts) +
         " experts (" + std::to_string(size) + " of " + std::to_string(bytes) + " bytes; " + source + ")" +
         (all == count ? "" : "; sessions of this file have memory for " + std::to_string(all)) +
         (settings_.warm == "" ? "" : "; " + std::to_string(warm.size()) + " are read as quantmoe.warm says");
}

// What of a trace's first line is not as expected: the number of layers, a layer, or else. Names have no bare quotes.
static std::string difference(const std::string& line, const std::string& expected) {
  if (!line.starts_with(kTrace)) return "expected a trace that quantmoe.trace wrote";
  const auto split = [](const std::string& text) {
    const std::string first = ": [{", between = "}, {\"";
    std::vector<std::string> parts{text.substr(0, text.find(first))};
    const size_t all = text.size() - (text.ends_with("}]}") ? 3 : 0);
    for (size_t at = parts[0].size() + first.size(), end; at < all; at = end + between.size() - 1) {
      end = std::min(text.find(between, at), all);
      parts.push_back(text.substr(at, end - at));
    }
    return parts;
  };
  const std::vector<std::string> found = split(line), wanted = split(expected);
  const std::string of = "it is of another model or target: ";
  if (found.size() != wanted.size())
    return of + "it has " + std::to_string(found.size() - 1) + " layers, expected " + std::to_string(wanted.size() - 1);
  const auto at = static_cast<size_t>(std::ranges::mismatch(found, wanted).in1 - found.begin());
  if (at == found.size()) return of + "its first line ends otherwise";
  return of + (at ? "its layer " + std::to_string(at - 1) + " is " : "it begins with ") + found[at] + ", expected " +
         wanted[at];
}

Trace Experts::read_warm() const {
  const auto refuse = [&](const std::string& why) {
    throw std::runtime_error("quantmoe.warm " + settings_.warm + ": " + why);
  };
  std::ifstream file(settings_.warm, std::ios::binary);
  if (!file) refuse(words(errno));
  std::string line;
  std::getline(file, line);
  if (const std::string mine = header(); line + "\n" != mine) refuse(difference(line, mine.substr(0, mine.size() - 1)));
  const std::string rest{std::istreambuf_iterator<char>(file), {}};
  std::vector<uint16_t> words(rest.size() / 2);
  std::copy_n(rest.data(), 2 * words.size(), reinterpret_cast<char*>(words.data()));
  Trace trace{std::vector<std::vector<Trace::Run>>(layers_.size())};
  for (size_t at = 0; 2 * at < rest.size();) {
    const bool whole = at + 4 <= words.size();
    const int64_t tokens = whole ? words[at + 2] | int64_t{words[at + 3]} << 16 : 0;
    const size_t ids = whole ? words[at + 1] * static_cast<size_t>(tokens) : 0;
    if (!whole || ids > words.size() - at - 4) refuse("it ends within the record at word " + std::to_string(at));
    Trace::Run run{tokens, words[at + 1], {}};
    bool known = words[at] < layers_.size();
    for (size_t i = at + 4; known && i < at + 4 + ids; ++i) {
      if (words[i] == kNone) continue;
      known = words[i] < layers_[words[at]].experts;
      run.ids.push_back(words[i]);
    }
    if (!known) refuse("the record at word " + std::to_string(at) + " has a layer or an expert that the model lacks");
    trace.runs[words[at]].push_back(std::move(run));
    at += 4 + ids;
  }
  return trace;
}

// Reads experts that all have a slot, the last one to stay longest.
void Experts::warm_up(const std::vector<std::pair<int, int64_t>>& experts) {
  auto lock = cache_->lock();
  std::vector<ExpertCache::Slot*> pinned;
  ExpertCache::Counts counts;  // nobody asked for them
  for (const auto& [layer, expert] : experts)
    if (auto* const slot = cache_->pin(numbers_[static_cast<size_t>(layer)], expert, counts)) pinned.push_back(slot);
  counts_.bytes_read += counts.bytes_read;
  std::string error;
  for (ExpertCache::Slot* const slot : pinned) {
    while (slot->reads) cache_->progress(lock);
    if (slot->failed) error = slot->error;
    cache_->unpin(*slot);
  }
  if (error != "") throw std::runtime_error(error);
}

std::shared_ptr<ExpertCache> ExpertCache::of(const Files& files, const Regions& regions) {
  // Never destroyed: sessions may outlive the library's exit handlers.
  static auto& mutex = *new std::mutex;
  static auto& all = *new std::vector<std::weak_ptr<ExpertCache>>;
  const auto same = [](const auto& a, const auto& b) { return *a == *b; };
  const std::lock_guard lock(mutex);
  std::erase_if(all, [](const auto& one) { return one.expired(); });
  for (const auto& one : all)
    if (auto found = one.lock(); found && found->regions_ == regions && std::ranges::equal(found->files_, files, same))
      return found;
  auto made = std::make_shared<ExpertCache>(files, regions);
  all.push_back(made);
  return made;
}

ExpertCache::ExpertCache(const Files& files, const Regions& regions) : files_(files), regions_(regions) {
  try {
    for (int i = 0; i < kReaders; ++i) readers_.emplace_back([this] { read_until_stopped(); });
  } catch (const std::exception&) {  // no more threads: runs read themselves
  }
}

ExpertCache::~ExpertCache() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  wanted_.notify_all();
  for (std::thread& reader : readers_) reader.join();
}

int ExpertCache::add(const ExpertLayer& layer) {
  const auto same = [](const ExpertLayer::Tensor& a, const ExpertLayer::Tensor& b) {
    return *a.file == *b.file && a.offset == b.offset && a.row_bytes == b.row_bytes;
  };
  const std::lock_guard lock(mutex_);
  const auto found = std::ranges::find_if(layers_, [&](const ExpertLayer& of) {
    return of.experts == layer.experts && std::ranges::equal(of.tensors, layer.tensors, same);
  });
  if (found != layers_.end()) return static_cast<int>(found - layers_.begin());
  layers_.push_back(layer);
  map_.emplace_back(layer.experts, nullptr);
  return static_cast<int>(layers_.size()) - 1;
}

size_t ExpertCache::join(Share& share, int64_t slots) {
  const auto size = static_cast<size_t>(slots * regions_.slot_bytes());
  void* const memory = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED)
    throw std::runtime_error("no memory for " + std::to_string(slots) + " experts, " + std::to_string(size) + " bytes");
  (void)madvise(memory, size, MADV_HUGEPAGE);
  share.memory = static_cast<char*>(memory);
  share.slots.resize(static_cast<size_t>(slots));
  const std::lock_guard lock(mutex_);
  for (int64_t i = slots; i-- > 0;) {
    Slot& slot = share.slots[static_cast<size_t>(i)];
    slot.memory = share.memory + i * regions_.slot_bytes();
    link(slot, false);
  }
  slots_ += share.slots.size();
  done_.notify_all();
  return slots_;
}

void ExpertCache::leave(Share& share) {
  Lock lock(mutex_);
  for (Slot& slot : share.slots) {
    forget(slot);
    slot.leaving = true;
    if (!slot.pins) unlink(slot);
  }
  for (Slot& slot : share.slots)
    while (slot.pins) progress(lock);
  slots_ -= share.slots.size();
  munmap(share.memory, share.slots.size() * static_cast<size_t>(regions_.slot_bytes()));
}

char* ExpertCache::memory_of(const Slot& slot, int tensor) const {
  return slot.memory + (tensor ? regions_.bytes[0] : 0);
}

const void* ExpertCache::row_of(const Slot& slot, int tensor) const {
  const ExpertLayer::Tensor& t = layers_[slot.layer].tensors[tensor];
  return memory_of(slot, tensor) + (t.offset + slot.expert * t.row_bytes) % DataFile::kPage;
}

void ExpertCache::link(Slot& slot, bool last) {
  slot.before = last ? newest_ : nullptr;
  slot.after = last ? nullptr : oldest_;
  (slot.before ? slot.before->after : oldest_) = &slot;
  (slot.after ? slot.after->before : newest_) = &slot;
}

void ExpertCache::unlink(Slot& slot) {
  (slot.before ? slot.before->after : oldest_) = slot.after;
  (slot.after ? slot.after->before : newest_) = slot.before;
}

// Its expert is read again for the next who asks, although runs may have the slot pinned, and reads may be under way.
void ExpertCache::forget(const Slot& slot) {
  if (slot.expert < 0) return;
  Slot*& mapped = map_[slot.layer][slot.expert];
  if (mapped == &slot) mapped = nullptr;
}

ExpertCache::Slot* ExpertCache::pin(int layer, int64_t expert, Counts& counts) {
  Slot*& mapped = map_[layer][expert];
  if (mapped) {
    ++counts.hits;
    if (mapped->pins++ == 0) unlink(*mapped);
    return mapped;
  }
  if (!oldest_) return nullptr;
  ++counts.misses;
  Slot& slot = *oldest_;
  unlink(slot);
  forget(slot);
  mapped = &slot;
  slot.layer = layer;
  slot.expert = static_cast<int32_t>(expert);
  slot.pins = 2;
  slot.failed = false;
  slot.error.clear();
  for (int i : {0, 1}) {
    const ExpertLayer::Tensor& tensor = layers_[layer].tensors[i];
    int64_t from = tensor.offset + expert * tensor.row_bytes;
    const int64_t end = from + tensor.row_bytes, begin = from / DataFile::kPage * DataFile::kPage;
    for (int64_t next; from < end; from = next, ++slot.reads) {
      next = std::min(end, (from / DataFile::kPage + kPiece / DataFile::kPage) * DataFile::kPage);
      reads_.push_back({&slot, tensor.file.get(), from, next - from, memory_of(slot, i) + (from - begin)});
    }
    counts.bytes_read += tensor.row_bytes;
  }
  wanted_.notify_all();
  return &slot;
}

void ExpertCache::unpin(Slot& slot) {
  if (--slot.pins) return;
  if (!slot.leaving) link(slot, !slot.failed);
  done_.notify_all();
}

// False where there is none.
bool ExpertCache::read_one(Lock& lock) {
  if (reads_.empty()) return false;
  const Read read = reads_.front();
  reads_.pop_front();
  std::string error;
  lock.unlock();
  try {
    read.file->read(read.at, read.size, read.to);
  } catch (const std::exception& why) {
    error = why.what();
  }
  lock.lock();
  Slot& slot = *read.slot;
  if (error != "" && !slot.failed) {
    slot.failed = true;
    slot.error = "expert " + std::to_string(slot.expert) + ": " + error;
    forget(slot);
  }
  if (--slot.reads == 0) {
    if (slot.failed) slot.expert = -1;
    unpin(slot);
    done_.notify_all();
  }
  return true;
}

void ExpertCache::progress(Lock& lock) {
  if (!read_one(lock)) done_.wait(lock);
}

void ExpertCache::read_until_stopped() {
  Lock lock(mutex_);
  while (!stopping_)
    if (!read_one(lock)) wanted_.wait(lock);
}

ExpertCache::Slot* Experts::Lease::pin(int64_t expert) {
  ExpertCache::Slot* const slot = cache_.pin(all_.numbers_[static_cast<size_t>(layer_)], expert, all_.counts_);
  if (slot) pins_.push_back({expert, slot});
  return slot;
}

Experts::Lease::~Lease() {
  const auto lock = cache_.lock();
  for (; first_ < pins_.size(); ++first_) cache_.unpin(*pins_[first_].slot);
}

int64_t Experts::Lease::read(const int64_t* begin, int64_t first, const void** w13, const void** w2) {
  const int64_t experts = all_.layers_[layer_].experts;
  auto lock = cache_.lock();
  if (first == 0) reach_ = 0;  // of another slice of tokens
  for (; first_ < pins_.size() && (first == 0 || pins_[first_].expert < first); ++first_)
    cache_.unpin(*pins_[first_].slot);
  for (;; cache_.progress(lock)) {
    while (reach_ < experts && (begin[reach_] == begin[reach_ + 1] || pin(reach_))) ++reach_;
    if (first_ < pins_.size()) break;
    if (reach_ == experts) return experts;
  }
  // Experts that are there are computed while the others are read, unless a piece is too small for a round.
  const size_t count = pins_.size() - first_, ready = wait(lock, (count + 3) / 4, w13, w2);
  return ready < count ? pins_[first_ + ready].expert : reach_;
}

void Experts::Lease::read_all(const std::vector<int64_t>& experts, const void** w13, const void** w2) {
  auto lock = cache_.lock();
  for (const int64_t expert : experts)
    while (!pin(expert)) cache_.progress(lock);  // reads of an earlier call that failed may still have some
  wait(lock, pins_.size(), w13, w2);
}

size_t Experts::Lease::wait(ExpertCache::Lock& lock, size_t enough, const void** w13, const void** w2) {
  const size_t count = pins_.size() - first_;
  size_t ready = 0;
  while (ready < count) {
    const ExpertCache::Slot& slot = *pins_[first_ + ready].slot;
    if (slot.failed) throw std::runtime_error(slot.error);
    if (slot.reads == 0) {
      ++ready;
    } else if (ready >= enough) {
      break;
    } else {
      cache_.progress(lock);
    }
  }
  ++all_.counts_.rounds;
  for (size_t i = first_; i < first_ + ready; ++i) {
    w13[pins_[i].expert] = cache_.row_of(*pins_[i].slot, 0);
    w2[pins_[i].expert] = cache_.row_of(*pins_[i].slot, 1);
  }
  return ready;
}

// A line of JSON, then records: exporter/inspecting/expert_trace.py.
std::string Experts::header() const {
  std::string text = std::string(kTrace) + "1, \"slot_bytes\": " + std::to_string(slot_bytes()) + ", \"layers\": [";
  for (const ExpertLayer& layer : layers_) {
    std::string name;
    for (const char c : layer.node) {
      if (c == '"' || c == '\\') name += '\\';
      name += static_cast<unsigned char>(c) < ' ' ? ' ' : c;
    }
    text += (&layer == &layers_[0] ? "" : ", ") + std::string("{\"node\": \"") + name +
            "\", \"experts\": " + std::to_string(layer.experts) +
            ", \"bytes\": " + std::to_string(layer.tensors[0].row_bytes + layer.tensors[1].row_bytes) + "}";
  }
  return text + "]}\n";
}

void Experts::write_header() {
  const std::string text = header();
  std::rewind(trace_);  // of a start that failed later
  if (std::fwrite(text.data(), 1, text.size(), trace_) != text.size() || std::fflush(trace_))
    throw std::runtime_error("quantmoe.trace " + settings_.trace + ": " + words(errno));
}

template <class Id>
void Experts::trace(int layer, const Id* ids, int64_t tokens, int64_t top_k) {
  if (!trace_) return;
  std::vector<uint16_t> record(static_cast<size_t>(4 + tokens * top_k));
  const uint16_t head[4] = {static_cast<uint16_t>(layer), static_cast<uint16_t>(top_k), static_cast<uint16_t>(tokens),
                            static_cast<uint16_t>(tokens >> 16)};
  std::copy(head, head + 4, record.begin());
  std::transform(ids, ids + tokens * top_k, record.begin() + 4, [](Id id) { return static_cast<uint16_t>(id); });
  const std::lock_guard lock(trace_mutex_);
  if (std::fwrite(record.data(), 2, record.size(), trace_) != record.size())
    throw std::runtime_error("quantmoe.trace " + settings_.trace + ": " + words(errno));
}
template void Experts::trace(int, const int32_t*, int64_t, int64_t);
template void Experts::trace(int, const int64_t*, int64_t, int64_t);

#else  // check() refuses settings that need any of these

int64_t available_memory() { return 0; }
ExpertLayer::Tensor Experts::find(const void*, int64_t, int64_t) { return {}; }
int Experts::add(ExpertLayer) { return 0; }
std::string Experts::start(const Trace*) { return ""; }
template <class Id>
void Experts::trace(int, const Id*, int64_t, int64_t) {}
template void Experts::trace(int, const int32_t*, int64_t, int64_t);
template void Experts::trace(int, const int64_t*, int64_t, int64_t);
Experts::Lease::~Lease() {}
int64_t Experts::Lease::read(const int64_t*, int64_t, const void**, const void**) { return -1; }
void Experts::Lease::read_all(const std::vector<int64_t>&, const void**, const void**) {}
int64_t Experts::bytes_read() const { return 0; }
Trace Experts::read_warm() const { return {}; }
void DataFile::read(int64_t, int64_t, char*) const {}
Experts::Experts(const ExpertSettings& settings, bool shares) : settings_(settings), shares_(shares) {}
Experts::~Experts() {}
std::string Experts::report() { return ""; }

#endif

}  // namespace quantmoe
