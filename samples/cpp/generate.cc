// Greedy decoding of an exported folder: generate FOLDER COUNT ID... prints up to COUNT token ids. What was read and
// said may be loaded from a file and saved.
#include <onnxruntime_cxx_api.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <iostream>
#include <iterator>
#include <limits>
#include <map>
#include <numeric>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "state.h"

static int64_t to_number(const std::string& text) {
  int64_t value = -1;
  const char* end = text.data() + text.size();
  if (std::from_chars(text.data(), end, value).ptr != end || value < 0)
    throw std::invalid_argument('"' + text + "\": expected a number from 0");
  return value;
}

// What the export wrote into the model, nothing in folders of older exports.
static std::string text_of(const Ort::Session& session, const char* key) {
  Ort::AllocatorWithDefaultOptions allocator;
  const auto text = session.GetModelMetadata().LookupCustomMetadataMapAllocated(key, allocator);
  return text ? text.get() : "";
}

// Numbers with commas between.
static Ids numbers_of(const Ort::Session& session, const char* key) {
  std::istringstream stream(text_of(session, key));
  Ids numbers;
  for (std::string number; std::getline(stream, number, ',');) numbers.push_back(to_number(number));
  return numbers;
}

// The best token at the last position of logits [1, sequence, vocabulary].
static int64_t best_token(const Ort::Value& logits) {
  const auto info = logits.GetTensorTypeAndShapeInfo();
  if (info.GetElementType() != ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT)
    throw std::runtime_error("logits are not f32: export with --dtype f32");
  const float* end = logits.GetTensorData<float>() + info.GetElementCount();
  const float* last = end - info.GetShape()[2];
  if (!std::all_of(last, end, [](float logit) { return std::isfinite(logit); }))
    throw std::runtime_error("logits are not finite");
  return std::max_element(last, end) - last;
}

// Prints a prompt's continuation; what the file `load` has of it is not run again.
static void generate(Ort::Session& session, int64_t count, Ids ids, const std::filesystem::path& load,
                     const std::filesystem::path& save) {
  const Ids stop = numbers_of(session, "eos_token_id"), length = numbers_of(session, "context_length");
  const int64_t context = length.empty() ? std::numeric_limits<int64_t>::max() : length[0];
  const int64_t room = context - static_cast<int64_t>(ids.size());
  if (room <= 0)
    throw std::invalid_argument(std::to_string(ids.size()) +
                                " tokens and 1 for the answer do not fit into the model's context of " +
                                std::to_string(context) + " tokens");

  count = std::min(count, room);

  // Batch 1. Past and present are one buffer that each run writes in place, if the model takes that. Otherwise present
  // is the longer past of the next run.
  Ort::AllocatorWithDefaultOptions allocator;
  const bool shares = text_of(session, "past_present_share_buffer") == "true";
  const int64_t slots = shares ? static_cast<int64_t>(ids.size()) + count : 0;
  std::vector<Past> pasts;
  for (size_t i = 0; i < session.GetInputCount(); ++i) {
    const std::string name = session.GetInputNameAllocated(i, allocator).get();
    if (name.starts_with("past_key_values."))
      pasts.emplace_back(name, session.GetInputTypeInfo(i).GetTensorTypeAndShapeInfo());
  }
  const std::string identity = text_of(session, "identity");
  std::optional<StateFile> file;
  if (!load.empty()) file.emplace(load, identity, pasts);
  const int64_t kept = file ? file->keep(ids) : 0;
  Ends ends = file ? file->load_ends(kept) : Ends();
  std::vector<Ort::Value> cache;
  for (const Past& past : pasts) {
    const Ids shape = past.shape_of(shares ? slots : kept);
    cache.push_back(Ort::Value::CreateTensor(allocator, shape.data(), shape.size(), past.type));
    if (file) file->load_into(past, kept, cache.back());
  }
  const auto memory = Ort::MemoryInfo::CreateCpu(OrtArenaAllocator, OrtMemTypeDefault);
  const auto row = [&](Ids& values) {
    const int64_t shape[] = {1, static_cast<int64_t>(values.size())};
    return Ort::Value::CreateTensor<int64_t>(memory, values.data(), values.size(), shape, 2);
  };

  Ids tokens(ids.begin(), ids.begin() + kept), mask(kept, 1);
  ids.erase(ids.begin(), ids.begin() + kept);
  // States to go back to are of the prompt's end and of a few tokens before it, for the same prompt again.
  constexpr size_t kTail = 8;
  Ids tail;
  if (!save.empty() && ids.size() > kTail &&
      std::any_of(pasts.begin(), pasts.end(), [](const Past& past) { return past.is_state(); })) {
    tail.assign(ids.end() - kTail, ids.end());
    ids.resize(ids.size() - kTail);
  }
  Ort::IoBinding binding(session);
  while (count > 0) {
    Ids positions(ids.size());
    std::iota(positions.begin(), positions.end(), mask.size());
    mask.resize(mask.size() + ids.size(), 1);
    binding.BindInput("input_ids", row(ids));
    binding.BindInput("attention_mask", row(mask));
    binding.BindInput("position_ids", row(positions));
    binding.BindOutput("logits", memory);
    for (size_t i = 0; i < cache.size(); ++i) {
      binding.BindInput(pasts[i].name.c_str(), cache[i]);
      if (shares)
        binding.BindOutput(pasts[i].present.c_str(), cache[i]);
      else
        binding.BindOutput(pasts[i].present.c_str(), memory);
    }
    session.Run({}, binding);
    cache = binding.GetOutputValues();
    tokens.insert(tokens.end(), ids.begin(), ids.end());
    const int64_t best = best_token(cache[0]);
    cache.erase(cache.begin());
    if ((ids.size() > 1 || !tail.empty()) && !save.empty())
      ends[static_cast<int64_t>(tokens.size())] = states_of(pasts, cache);
    if (!tail.empty()) {
      ids = std::exchange(tail, {});
      continue;
    }
    ids = {best}, --count;
    std::cout << ids[0] << ' ' << std::flush;
    if (std::find(stop.begin(), stop.end(), ids[0]) != stop.end()) break;
  }
  if (!tokens.empty()) std::cout << std::endl;  // before the file, which may fail
  if (!save.empty()) save_state(save, identity, tokens, pasts, cache, std::move(ends));
}

#if defined(_WIN32)  // paths in UTF-16
static constexpr const char* kLibrary = "quantmoe_ort.dll";
int wmain(int argc, wchar_t** argv) try {
#else
static constexpr const char* kLibrary = "libquantmoe_ort.so";
int main(int argc, char** argv) try {
#endif
  std::filesystem::path load, save;
  std::map<std::string, std::string> entries;
  for (; argc > 2; argc -= 2, argv += 2) {
    const std::filesystem::path option = argv[1], value = argv[2];
    if (option == "--load-state") {
      load = value;
    } else if (option == "--save-state") {
      save = value;
    } else if (option == "--entry") {
      const std::string entry = value.string();
      entries[entry.substr(0, entry.find('='))] = entry.substr(entry.find('=') + 1);
    } else {
      break;
    }
  }
  if (argc < 4)
    throw std::invalid_argument(
        "usage: generate [--load-state FILE] [--save-state FILE] [--entry NAME=VALUE] FOLDER COUNT ID...");
  const std::filesystem::path folder = argv[1];
  Ids numbers;
  for (int i = 2; i < argc; ++i) numbers.push_back(to_number(std::filesystem::path(argv[i]).string()));

  Ort::Env env(ORT_LOGGING_LEVEL_ERROR, "generate");
  Ort::SessionOptions options;
  // What it logs is in its exceptions, but for what a session's entries come to.
  options.SetLogSeverityLevel(entries.empty() ? ORT_LOGGING_LEVEL_FATAL : ORT_LOGGING_LEVEL_INFO);
  for (const auto& [name, value] : entries) options.AddConfigEntry(name.c_str(), value.c_str());
  // The folder's library is native code of whoever exported it; QUANTMOE_ORT_LIBRARY names your own.
  const char* own = std::getenv("QUANTMOE_ORT_LIBRARY");
  const std::filesystem::path library = own ? std::filesystem::path(own) : folder / kLibrary;
  options.RegisterCustomOpsLibrary(library.c_str());
  Ort::Session session(env, (folder / "model.onnx").c_str(), options);

  if (!save.empty() && !std::filesystem::is_directory(std::filesystem::absolute(save).parent_path()))
    throw std::invalid_argument(save.string() + ": its folder is missing");
  generate(session, numbers[0], {numbers.begin() + 1, numbers.end()}, load, save);
} catch (const std::exception& error) {
  std::cerr << error.what() << '\n';
  return 1;
}
