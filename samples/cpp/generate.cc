// Greedy decoding of an exported folder: generate FOLDER COUNT ID... prints up to COUNT token ids.
#include <onnxruntime_cxx_api.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <iostream>
#include <iterator>
#include <limits>
#include <numeric>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

using Ids = std::vector<int64_t>;

static int64_t Number(const std::string& text) {
  int64_t value = -1;
  const char* end = text.data() + text.size();
  if (std::from_chars(text.data(), end, value).ptr != end || value < 0)
    throw std::invalid_argument('"' + text + "\": expected a number from 0");
  return value;
}

// What the export wrote into the model: numbers with commas between, none in folders of older exports.
static Ids Metadata(const Ort::Session& session, const char* key) {
  Ort::AllocatorWithDefaultOptions allocator;
  const auto text = session.GetModelMetadata().LookupCustomMetadataMapAllocated(key, allocator);
  std::istringstream stream(text ? text.get() : "");
  Ids numbers;
  for (std::string number; std::getline(stream, number, ',');) numbers.push_back(Number(number));
  return numbers;
}

// The best token at the last position of logits [1, sequence, vocabulary].
static int64_t Best(const Ort::Value& logits) {
  const auto info = logits.GetTensorTypeAndShapeInfo();
  if (info.GetElementType() != ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT)
    throw std::runtime_error("logits are not f32: export with --dtype f32");
  const float* end = logits.GetTensorData<float>() + info.GetElementCount();
  const float* last = end - info.GetShape()[2];
  if (!std::all_of(last, end, [](float logit) { return std::isfinite(logit); }))
    throw std::runtime_error("logits are not finite");
  return std::max_element(last, end) - last;
}

static Ids Generate(Ort::Session& session, int64_t count, Ids ids) {
  const Ids stop = Metadata(session, "eos_token_id"), length = Metadata(session, "context_length");
  const int64_t context = length.empty() ? std::numeric_limits<int64_t>::max() : length[0];
  const int64_t room = context - static_cast<int64_t>(ids.size());
  if (room <= 0)
    throw std::invalid_argument("a prompt of " + std::to_string(ids.size()) +
                                " tokens leaves no room in the model's context of " + std::to_string(context));

  Ort::AllocatorWithDefaultOptions allocator;
  std::vector<std::string> inputs{"input_ids", "attention_mask", "position_ids"}, outputs{"logits"};
  std::vector<Ort::Value> cache;
  for (size_t i = 0; i < session.GetInputCount(); ++i) {
    const std::string name = session.GetInputNameAllocated(i, allocator).get(), prefix = "past_key_values";
    if (name.rfind(prefix, 0) != 0) continue;
    inputs.push_back(name);
    outputs.push_back("present" + name.substr(prefix.size()));
    const Ort::TypeInfo type = session.GetInputTypeInfo(i);
    const auto info = type.GetTensorTypeAndShapeInfo();
    Ids shape = info.GetShape();  // batch 1, past length 0
    for (int64_t& dim : shape) dim = dim < 0 ? &dim == &shape[0] : dim;
    cache.push_back(Ort::Value::CreateTensor(allocator, shape.data(), shape.size(), info.GetElementType()));
  }
  const auto pointers = [](const std::vector<std::string>& names) {
    std::vector<const char*> found;
    for (const auto& name : names) found.push_back(name.c_str());
    return found;
  };
  const auto input_names = pointers(inputs), output_names = pointers(outputs);
  const auto memory = Ort::MemoryInfo::CreateCpu(OrtArenaAllocator, OrtMemTypeDefault);
  const auto row = [&](Ids& values) {
    const int64_t shape[] = {1, static_cast<int64_t>(values.size())};
    return Ort::Value::CreateTensor<int64_t>(memory, values.data(), values.size(), shape, 2);
  };

  Ids generated, mask;
  for (count = std::min(count, room); count > 0; --count) {
    Ids positions(ids.size());
    std::iota(positions.begin(), positions.end(), mask.size());
    mask.resize(mask.size() + ids.size(), 1);
    std::vector<Ort::Value> values;
    for (Ids* numbers : {&ids, &mask, &positions}) values.push_back(row(*numbers));
    std::move(cache.begin(), cache.end(), std::back_inserter(values));
    auto results =
        session.Run({}, input_names.data(), values.data(), values.size(), output_names.data(), output_names.size());
    ids = {Best(results[0])};
    generated.push_back(ids[0]);
    if (std::find(stop.begin(), stop.end(), ids[0]) != stop.end()) break;
    std::move(results.begin() + 1, results.end(), cache.begin());
  }
  return generated;
}

int main(int argc, char** argv) try {
  if (argc < 4) throw std::invalid_argument("usage: generate FOLDER COUNT ID...");
  const std::string folder = argv[1];
  Ids numbers;
  std::transform(argv + 2, argv + argc, std::back_inserter(numbers), Number);

  Ort::Env env(ORT_LOGGING_LEVEL_ERROR, "generate");
  Ort::SessionOptions options;
  options.SetLogSeverityLevel(ORT_LOGGING_LEVEL_FATAL);  // what it logs is in its exceptions
  options.RegisterCustomOpsLibrary((folder + "/libquantmoe_ort.so").c_str());
  Ort::Session session(env, (folder + "/model.onnx").c_str(), options);

  for (int64_t id : Generate(session, numbers[0], {numbers.begin() + 1, numbers.end()})) std::cout << id << ' ';
  std::cout << '\n';
} catch (const std::exception& error) {
  std::cerr << error.what() << '\n';
  return 1;
}
