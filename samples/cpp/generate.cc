// Greedy decoding of an exported folder: generate LIBRARY FOLDER COUNT ID... prints COUNT token ids.
#include <onnxruntime_cxx_api.h>

#include <algorithm>
#include <iostream>
#include <numeric>
#include <string>
#include <vector>

using Shape = std::vector<int64_t>;

int main(int argc, char** argv) {
  if (argc < 5) return std::cerr << "usage: generate LIBRARY FOLDER COUNT ID...\n", 2;
  Shape ids;
  for (int i = 4; i < argc; ++i) ids.push_back(std::stoll(argv[i]));

  Ort::Env env(ORT_LOGGING_LEVEL_WARNING, "generate");
  Ort::SessionOptions options;
  options.RegisterCustomOpsLibrary(argv[1]);
  Ort::Session session(env, (std::string(argv[2]) + "/model.onnx").c_str(), options);
  Ort::AllocatorWithDefaultOptions allocator;
  const auto memory = Ort::MemoryInfo::CreateCpu(OrtArenaAllocator, OrtMemTypeDefault);

  std::vector<std::string> inputs, outputs{"logits"};  // past_key_values.X goes in, present.X comes out
  std::vector<Ort::Value> cache;
  for (size_t i = 0; i < session.GetInputCount(); ++i) {
    inputs.emplace_back(session.GetInputNameAllocated(i, allocator).get());
    const std::string prefix = "past_key_values";
    if (inputs.back().rfind(prefix, 0) != 0) continue;
    outputs.push_back("present" + inputs.back().substr(prefix.size()));
    const Ort::TypeInfo type = session.GetInputTypeInfo(i);
    const auto info = type.GetTensorTypeAndShapeInfo();
    Shape shape = info.GetShape();  // batch 1, past length 0
    for (int64_t& dim : shape) dim = dim < 0 ? &dim == &shape[0] : dim;
    cache.push_back(Ort::Value::CreateTensor(allocator, shape.data(), shape.size(), info.GetElementType()));
  }
  std::vector<const char*> input_names, output_names;
  for (const auto& name : inputs) input_names.push_back(name.c_str());
  for (const auto& name : outputs) output_names.push_back(name.c_str());

  const auto row = [&](Shape& values) {
    const int64_t shape[] = {1, static_cast<int64_t>(values.size())};
    return Ort::Value::CreateTensor<int64_t>(memory, values.data(), values.size(), shape, 2);
  };
  size_t past = 0;
  for (int step = 0; step < std::stoi(argv[3]); ++step) {
    Shape mask(past + ids.size(), 1), positions(ids.size());
    std::iota(positions.begin(), positions.end(), past);
    past += ids.size();
    std::vector<Ort::Value> values;
    size_t next_cache = 0;
    for (const auto& name : inputs)
      values.push_back(name == "input_ids"        ? row(ids)
                       : name == "attention_mask" ? row(mask)
                       : name == "position_ids"   ? row(positions)
                                                  : std::move(cache[next_cache++]));
    auto results =
        session.Run({}, input_names.data(), values.data(), values.size(), output_names.data(), output_names.size());
    if (results[0].GetTensorTypeAndShapeInfo().GetElementType() != ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT) {
      std::cerr << "logits are not f32: export with --dtype f32\n";
      return 1;
    }
    const auto vocabulary = results[0].GetTensorTypeAndShapeInfo().GetShape()[2];
    const float* last =
        results[0].GetTensorData<float>() + results[0].GetTensorTypeAndShapeInfo().GetElementCount() - vocabulary;
    ids = {std::max_element(last, last + vocabulary) - last};
    std::cout << (step ? " " : "") << ids[0];
    std::move(results.begin() + 1, results.end(), cache.begin());
  }
  std::cout << "\n";
}
