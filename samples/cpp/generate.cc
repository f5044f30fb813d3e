// Greedy decoding of an exported folder, up to COUNT token ids. What was read and said may be loaded from a file and
// saved:
//
//   generate [--load-state FILE] [--save-state FILE] [--entry NAME=VALUE] FOLDER COUNT ID...
#include <quantmoe/token_cache.h>

#include <charconv>
#include <iostream>

static int64_t to_number(const std::string& text) {
  int64_t value = -1;
  const char* end = text.data() + text.size();
  if (std::from_chars(text.data(), end, value).ptr != end || value < 0)
    throw std::invalid_argument('"' + text + "\": expected a number from 0");
  return value;
}

#if defined(_WIN32)  // paths in UTF-16
int wmain(int argc, wchar_t** argv) try {
#else
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
      if (entry.find('=') == entry.npos) throw std::invalid_argument("--entry " + entry + ": expected NAME=VALUE");
      entries[entry.substr(0, entry.find('='))] = entry.substr(entry.find('=') + 1);
    } else {
      break;
    }
  }
  if (argc > 1 && std::filesystem::path(argv[1]).string().starts_with("--"))
    throw std::invalid_argument(std::filesystem::path(argv[1]).string() +
                                ": expected --load-state FILE, --save-state FILE or --entry NAME=VALUE");
  if (argc < 4)
    throw std::invalid_argument(
        "usage: generate [--load-state FILE] [--save-state FILE] [--entry NAME=VALUE] FOLDER COUNT ID...");
  quantmoe::Ids numbers;
  for (int i = 2; i < argc; ++i) numbers.push_back(to_number(std::filesystem::path(argv[i]).string()));
  if (!save.empty() && !std::filesystem::is_directory(std::filesystem::absolute(save).parent_path()))
    throw std::invalid_argument(save.string() + ": its folder is missing");

  const quantmoe::Model model(argv[1], [&](Ort::SessionOptions& options) {
    // What ONNX Runtime logs is in its exceptions, except what the entries come to.
    options.SetLogSeverityLevel(entries.empty() ? ORT_LOGGING_LEVEL_FATAL : ORT_LOGGING_LEVEL_INFO);
    for (const auto& [name, value] : entries) options.AddConfigEntry(name.c_str(), value.c_str());
  });
  const auto cache = load.empty() ? std::make_unique<quantmoe::TokenCache>(model, !save.empty())
                                  : quantmoe::TokenCache::load(model, load, !save.empty());
  const quantmoe::Ids ids(numbers.begin() + 1, numbers.end());
  const size_t kept = cache->keep(ids), count = static_cast<size_t>(numbers[0]);
  for (const int64_t id : cache->generate({ids.begin() + kept, ids.end()}, {.max_new_tokens = count}))
    std::cout << id << ' ' << std::flush;
  if (count > 0) std::cout << std::endl;  // before the file, which may fail
  if (!save.empty()) cache->save(save);
} catch (const std::exception& error) {
  std::cerr << error.what() << '\n';
  return 1;
}
