// A prompt on disk, as `quantmoe generate --save-state` writes it: a safetensors file of tokens and what a cache has of
// them (docs/reference/exported-folder.md, "Saved prompts").
#pragma once

#include <onnxruntime_cxx_api.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <map>
#include <numeric>
#include <random>
#include <sstream>
#include <stdexcept>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

namespace quantmoe {

using Ids = std::vector<int64_t>;

inline int64_t element_count(const Ids& shape) {
  return std::accumulate(shape.begin(), shape.end(), int64_t{1}, std::multiplies<>());
}

// Bytes of a number of a type, by safetensors' name of it.
inline int64_t byte_size(const std::string& dtype) {
  return dtype == "I64" ? 8 : dtype.ends_with("32") ? 4 : dtype.ends_with("16") ? 2 : 1;
}

inline std::string to_text(const Ids& numbers) {
  std::string text;
  for (const int64_t number : numbers) text += (text.empty() ? "" : ", ") + std::to_string(number);
  return '[' + text + ']';
}

// The CRC-32 of bytes after others that have `crc`, 0 of none; zlib's. Eight at a time: the tables have what a byte so
// many places before the last adds.
inline uint32_t crc32(uint32_t crc, const char* data, int64_t bytes) {
  static const auto tables = [] {
    std::array<std::array<uint32_t, 256>, 8> made{};
    for (uint32_t i = 0; i < 256; ++i) {
      made[0][i] = i;
      for (int bit = 0; bit < 8; ++bit) made[0][i] = made[0][i] >> 1 ^ (made[0][i] & 1 ? 0xedb88320 : 0);
    }
    for (size_t place = 1; place < 8; ++place)
      for (uint32_t i = 0; i < 256; ++i) made[place][i] = made[place - 1][i] >> 8 ^ made[0][made[place - 1][i] & 255];
    return made;
  }();
  crc = ~crc;
  for (; bytes >= 8; bytes -= 8, data += 8) {
    uint64_t word;
    std::memcpy(&word, data, 8);
    word ^= crc, crc = 0;
    for (int byte = 0; byte < 8; ++byte) crc ^= tables[7 - byte][word >> 8 * byte & 255];
  }
  for (; bytes > 0; --bytes, ++data) crc = crc >> 8 ^ tables[0][(crc ^ static_cast<uint8_t>(*data)) & 255];
  return ~crc;
}

// One of the model's inputs past_key_values.*: keys or values [1, heads, length, width], or a state of linear
// attention. A state is of all tokens so far. With --state-window, its first dimension is the last tokens.
struct Past {
  Past(const std::string& input, Ort::ConstTensorTypeAndShapeInfo info)
      : name(input),
        present("present" + input.substr(input.find('.'))),
        type(info.GetElementType()),
        dims(info.GetShape()) {
    window = static_cast<int64_t>(dims.size()) - (name.ends_with(".conv_state") ? 3 : 4);
    if (window != 0 && !(window == 1 && is_state()))
      throw std::runtime_error(name + " has shape " + to_text(dims) + ", which this release does not know");
    dims[window] = 1;  // of the batch
    const std::map<ONNXTensorElementDataType, const char*> types = {
        {ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT, "F32"},     {ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16, "F16"},
        {ONNX_TENSOR_ELEMENT_DATA_TYPE_BFLOAT16, "BF16"}, {ONNX_TENSOR_ELEMENT_DATA_TYPE_INT8, "I8"},
        {ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT8, "U8"},
    };
    dtype = types.at(type), size = byte_size(dtype);
  }

  bool is_state() const { return name.ends_with("_state"); }

  // Of a cache of so many slots.
  Ids shape_of(int64_t slots) const {
    Ids shape = dims;
    std::replace_if(shape.begin(), shape.end(), [](int64_t dim) { return dim < 0; }, slots);
    return shape;
  }

  // Of so many tokens in a file.
  Ids saved_shape(int64_t length) const {
    const Ids shape = shape_of(length);
    return {shape.begin() + window, shape.end()};
  }

  std::string name, present;
  ONNXTensorElementDataType type;
  Ids dims;              // -1: the length
  int64_t window, size;  // dimensions in front of the batch's; bytes of a number
  std::string dtype;
};

// Where the first tokens' keys or values are in a cache's tensor, or the state: pieces of so many bytes.
struct Pieces {
  Pieces(const Past& past, Ort::Value& value, int64_t length)
      : data(static_cast<char*>(value.GetTensorMutableRawData())) {
    const Ids shape = value.GetTensorTypeAndShapeInfo().GetShape();
    if (past.is_state()) {
      count = 1, stride = 0, bytes = element_count(past.saved_shape(0)) * past.size;
      data += element_count(shape) * past.size - bytes;  // the last of the window
    } else {
      count = shape[1], stride = shape[2] * shape[3] * past.size, bytes = length * shape[3] * past.size;
    }
  }

  char* data;
  int64_t count, stride, bytes;
};

// Copies of the states by the number of tokens that they are of: where a cache can go back to.
using Ends = std::map<int64_t, std::vector<std::string>>;

inline std::vector<std::string> states_of(const std::vector<Past>& pasts, std::vector<Ort::Value>& cache) {
  std::vector<std::string> states;
  for (size_t i = 0; i < pasts.size(); ++i)
    if (pasts[i].is_state()) {
      const Pieces pieces(pasts[i], cache[i], 0);
      states.emplace_back(pieces.data, pieces.bytes);
    }
  return states;
}

// The error of a file that the system did not read; errno is 0 if it gave no reason.
inline std::runtime_error unreadable(const std::filesystem::path& path) {
  return std::runtime_error(path.string() +
                            ": cannot be read: " + (errno ? std::generic_category().message(errno) : "it ends early"));
}

// A file that was opened and checked.
class StateFile {
 public:
  StateFile(const std::filesystem::path& path, const std::string& identity, const std::vector<Past>& pasts)
      : StateFile(path, pasts) {
    std::string model(identity.size(), 0);
    read_at(take_entry("model", "U8", {static_cast<int64_t>(model.size())}), 0, model.size(), model.data());
    if (model != identity) fail("saved with another model: its identity is another");
    if (!entries_.contains("checksum")) fail("checksum is missing: save it again");
    const Entry checksum = take_entry("checksum", "U32", {1});
    const auto entry = entries_.find("tokens");
    tokens_.resize(
        entry == entries_.end() || entry->second.shape.empty() ? 0 : (entry->second.end - entry->second.begin) / 8);
    const int64_t length = static_cast<int64_t>(tokens_.size());
    read_at(take_entry("tokens", "I64", {length}), 0, 8 * length, tokens_.data());
    std::map<int64_t, int> ends;
    for (const auto& [name, other] : entries_)
      if (const size_t at = name.find('@');
          at != name.npos && name.size() - at < 11 && name.find_first_not_of("0123456789", at + 1) == name.npos)
        ends[std::atoll(&name[at + 1])] = 0;
    for (const Past& past : pasts)
      if (!past.is_state())
        found_[past.name] = take_entry(past.name, past.dtype, past.saved_shape(length));
      else
        for (auto& [end, states] : ends) {
          const std::string name = past.name + '@' + std::to_string(end);
          found_[name] = take_entry(name, past.dtype, past.saved_shape(0)), ++states;
        }
    if (!entries_.empty()) fail(entries_.begin()->first + " is not of this model's cache");
    for (const auto& [end, states] : ends) ends_.push_back(end);
    const bool hybrid = std::any_of(pasts.begin(), pasts.end(), [](const Past& past) { return past.is_state(); });
    if (hybrid && (ends_.empty() || ends_.back() != length))
      fail("expected states after its " + std::to_string(length) + " tokens, found those after " + to_text(ends_));
    check_bytes(checksum);
  }

  // Whether a saver may replace what has this name: nothing, an empty file or an earlier saved state.
  static bool is_replaceable(const std::filesystem::path& path) {
    const std::filesystem::file_status status = std::filesystem::status(path);
    if (!std::filesystem::exists(status)) return true;
    if (!std::filesystem::is_regular_file(status)) return false;
    if (std::filesystem::file_size(path) == 0) return true;
    if (!std::ifstream(path)) throw unreadable(path);
    const std::vector<Past> none;
    try {
      const StateFile file(path, none);
      return file.entries_.contains("model") && file.entries_.contains("tokens");
    } catch (const std::runtime_error&) {
      return false;
    }
  }

  const Ids& tokens() const { return tokens_; }

  // Puts the first tokens' part into a cache's tensor.
  void load_into(const Past& past, int64_t length, Ort::Value& value) {
    if (length == 0) return;
    const Entry& entry = found_.at(past.is_state() ? past.name + '@' + std::to_string(length) : past.name);
    const Pieces pieces(past, value, length);
    for (int64_t i = 0; i < pieces.count; ++i)
      read_at(entry, i * ((entry.end - entry.begin) / pieces.count), pieces.bytes, pieces.data + i * pieces.stride);
  }

  // The states of so many tokens and fewer.
  Ends load_ends(int64_t length) {
    Ends ends;
    for (const int64_t end : ends_)
      for (const Past& past : pasts_)
        if (end <= length && past.is_state()) {
          const Entry& entry = found_.at(past.name + '@' + std::to_string(end));
          std::string& bytes = ends[end].emplace_back(entry.end - entry.begin, 0);
          read_at(entry, 0, bytes.size(), bytes.data());
        }
    return ends;
  }

 private:
  struct Entry {
    std::string dtype;
    Ids shape;
    int64_t begin, end;
  };

  // Opens a file and reads its header alone.
  StateFile(const std::filesystem::path& path, const std::vector<Past>& pasts)
      : path_(path.string()), pasts_(pasts), file_(path, std::ios::binary) {
    if (!file_) throw unreadable(path);
    if (std::filesystem::is_directory(path)) fail("is a folder, expected a safetensors file");
    read_header();
  }

  [[noreturn]] void fail(const std::string& text) const { throw std::runtime_error(path_ + ": " + text); }

  // {"name": {"dtype": "F32", "shape": [1, 2], "data_offsets": [0, 8]}, ...} after its length, an int64.
  void read_header() {
    int64_t length = -1;
    const int64_t size = file_.seekg(0, std::ios::end).tellg();
    file_.seekg(0).read(reinterpret_cast<char*>(&length), 8);
    if (!file_) fail(std::to_string(size) + " bytes, expected a safetensors file");
    if (length < 0 || length > size - 8)
      fail("a header of " + std::to_string(length) + " bytes; is the file truncated?");
    std::string header(length, 0);
    file_.read(header.data(), length);
    std::istringstream text(header);
    const auto take = [&](char c) { return (text >> std::ws).peek() == c && text.get() == c; };
    const auto expect = [&](char c) {
      if (!take(c)) fail(std::string("corrupt header: expected ") + c);
    };
    const auto string = [&] {
      std::string found;
      expect('"'), std::getline(text, found, '"');  // our names have no escapes
      return found;
    };
    const auto each = [&](const char* brackets, const std::function<void()>& item) {
      expect(brackets[0]);
      if (take(brackets[1])) return;
      do item();
      while (take(','));
      expect(brackets[1]);
    };
    each("{}", [&] {
      const std::string name = string();
      std::map<std::string, std::string> texts;
      std::map<std::string, Ids> lists;
      expect(':'), each("{}", [&] {
        const std::string field = string();
        expect(':');
        if ((text >> std::ws).peek() == '"')
          texts[field] = string();
        else
          each("[]", [&, &list = lists[field]] {
            if (int64_t n; text >> n && n >= 0) return list.push_back(n);
            fail("corrupt header: expected a number in " + name);
          });
      });
      if (name == "__metadata__") return;
      Ids& offsets = lists["data_offsets"];
      if (offsets.size() != 2 || offsets[0] > offsets[1] || offsets[1] > size - 8 - length)
        fail(name + ": data_offsets " + to_text(offsets) + " in a file of " + std::to_string(size) +
             " bytes; is it truncated?");
      entries_[name] = {texts["dtype"], lists["shape"], 8 + length + offsets[0], 8 + length + offsets[1]};
    });
  }

  // That all bytes before the checksum are those that were saved.
  void check_bytes(const Entry& checksum) {
    if (checksum.end != file_.seekg(0, std::ios::end).tellg()) fail("checksum is not its last tensor");
    uint32_t stated = 0, found = 0;
    read_at(checksum, 0, 4, &stated);
    std::string part(std::min<int64_t>(checksum.begin, 1 << 20), 0);
    file_.seekg(0);
    for (int64_t at = 0; at < checksum.begin;) {
      const int64_t bytes = std::min<int64_t>(checksum.begin - at, static_cast<int64_t>(part.size()));
      if (errno = 0; !file_.read(part.data(), bytes)) throw unreadable(path_);
      found = crc32(found, part.data(), bytes);
      at += bytes;
    }
    if (found != stated) fail("was altered or is damaged: its bytes have another CRC-32 than its checksum says");
  }

  Entry take_entry(const std::string& name, const std::string& dtype, const Ids& shape) {
    const auto node = entries_.extract(name);
    if (!node) fail(name + " is missing");
    const Entry& entry = node.mapped();
    if (entry.dtype != dtype || entry.shape != shape ||
        entry.end - entry.begin != element_count(shape) * byte_size(dtype))
      fail(name + " is " + entry.dtype + ' ' + to_text(entry.shape) + ", expected " + dtype + ' ' + to_text(shape) +
           " of this model");
    return entry;
  }

  void read_at(const Entry& entry, int64_t from, int64_t bytes, void* to) {
    errno = 0;
    file_.seekg(entry.begin + from).read(static_cast<char*>(to), bytes);
    if (!file_) throw unreadable(path_);
  }

  std::string path_;
  const std::vector<Past>& pasts_;
  std::ifstream file_;
  std::map<std::string, Entry> entries_, found_;  // of the header; of this model's cache
  Ids tokens_, ends_;
};

// Writes the cache of these tokens, and states of fewer to go back to. The file has its name when all is there.
inline void save_state(const std::filesystem::path& path, const std::string& identity, const Ids& tokens,
                       const std::vector<Past>& pasts, std::vector<Ort::Value>& cache, Ends ends) {
  if (identity.empty()) throw std::runtime_error("the model has no identity in its metadata; export it again");
  if (tokens.empty()) throw std::runtime_error(path.string() + ": the cache has no tokens to save");
  const int64_t length = static_cast<int64_t>(tokens.size());
  while (ends.size() > 4) ends.erase(ends.begin());  // states are large
  ends[length] = states_of(pasts, cache);

  std::string header;
  int64_t offset = 0;
  std::vector<std::pair<const char*, int64_t>> pieces;
  const auto add = [&](const std::string& name, const std::string& dtype, const Ids& shape, const char* data,
                       int64_t count, int64_t bytes, int64_t stride) {
    header += (header.empty() ? "{\"" : ", \"") + name + "\": {\"dtype\": \"" + dtype +
              "\", \"shape\": " + to_text(shape) + ", \"data_offsets\": " + to_text({offset, offset + count * bytes}) +
              '}';
    offset += count * bytes;
    for (int64_t i = 0; i < count; ++i) pieces.emplace_back(data + i * stride, bytes);
  };
  const int64_t letters = static_cast<int64_t>(identity.size());
  add("model", "U8", {letters}, identity.data(), 1, letters, 0);
  add("tokens", "I64", {length}, reinterpret_cast<const char*>(tokens.data()), 1, 8 * length, 0);
  for (size_t i = 0; i < pasts.size(); ++i)
    if (!pasts[i].is_state()) {
      const Pieces own(pasts[i], cache[i], length);
      add(pasts[i].name, pasts[i].dtype, pasts[i].saved_shape(length), own.data, own.count, own.bytes, own.stride);
    }
  for (const auto& [end, states] : ends) {
    auto state = states.begin();
    for (const Past& past : pasts)
      if (past.is_state()) {
        add(past.name + '@' + std::to_string(end), past.dtype, past.saved_shape(0), state->data(), 1, state->size(), 0);
        ++state;
      }
  }
  uint32_t checksum = 0;  // of what is before it
  add("checksum", "U32", {1}, reinterpret_cast<const char*>(&checksum), 1, 4, 0);
  header += '}';
  header.resize((header.size() + 7) / 8 * 8, ' ');

  // A link stays a link, and savers of one path each write a file of their own.
  std::filesystem::path target = path;
  for (int links = 0; links < 40 && std::filesystem::is_symlink(target); ++links)
    target = target.parent_path() / std::filesystem::read_symlink(target);
  if (!StateFile::is_replaceable(target))
    throw std::runtime_error(path.string() + ": is there, and is no saved state: expected an earlier one, or no file");
  std::random_device random;
  std::filesystem::path partial = target;
  partial += '.' + std::to_string(random()) + std::to_string(random()) + std::to_string(random()) + ".partial";
  std::ofstream file(partial, std::ios::binary);
  const int64_t size = static_cast<int64_t>(header.size());
  pieces.insert(pieces.begin(), {{reinterpret_cast<const char*>(&size), 8}, {header.data(), size}});
  for (const auto& [data, bytes] : pieces) {
    file.write(data, bytes);  // the last piece is the checksum
    checksum = crc32(checksum, data, bytes);
  }
  file.close();
  std::error_code error, ignored;
  if (file)
    std::filesystem::rename(partial, target, error);
  else
    error.assign(errno ? errno : EIO, std::generic_category());
  if (error) {
    std::filesystem::remove(partial, ignored);
    throw std::runtime_error(path.string() + ": cannot be written: " + error.message());
  }
}

}  // namespace quantmoe
