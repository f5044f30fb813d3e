// A model of another tool in QuantMoE's execution provider: provider LIBRARY MODEL prints the first numbers of each
// output. The inputs are 1 everywhere, and so is the size of each free dimension; nothing is past.
#include <onnxruntime_cxx_api.h>

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <iostream>
#include <stdexcept>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

static Ort::Session create_session(Ort::Env& env, const std::filesystem::path& library,
                                   const std::filesystem::path& model) {
  env.RegisterExecutionProviderLibrary("QuantMoE", library);  // once in a process
  std::vector<Ort::ConstEpDevice> devices;
  for (Ort::ConstEpDevice device : env.GetEpDevices())
    if (std::string(device.EpName()) == "QuantMoE") devices.push_back(device);
  Ort::SessionOptions options;
  options.SetLogSeverityLevel(ORT_LOGGING_LEVEL_FATAL);  // what it logs is in its exceptions
  const std::unordered_map<std::string, std::string> own{
      {"activations", "auto"}};  // docs/guides/qmoe-models.md has them
  options.AppendExecutionProvider_V2(env, devices, own);
  return {env, model.c_str(), options};
}

static Ort::Value ones(const std::string& name, const Ort::TypeInfo& type) {
  const auto info = type.GetTensorTypeAndShapeInfo();
  std::vector<int64_t> shape = info.GetShape();
  const std::vector<const char*> names = info.GetSymbolicDimensions();
  for (size_t i = 0; i < shape.size(); ++i) {
    const std::string_view dimension = names[i];
    const bool past = dimension.find("past") != dimension.npos && dimension.find('+') == dimension.npos;
    if (shape[i] < 0) shape[i] = past ? 0 : 1;
  }
  Ort::AllocatorWithDefaultOptions allocator;
  Ort::Value value = Ort::Value::CreateTensor(allocator, shape.data(), shape.size(), info.GetElementType());
  const size_t count = value.GetTensorTypeAndShapeInfo().GetElementCount();
  switch (info.GetElementType()) {
    case ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT:
      std::fill_n(value.GetTensorMutableData<float>(), count, 1.0f);
      break;
    case ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16:
      std::fill_n(value.GetTensorMutableData<Ort::Float16_t>(), count, Ort::Float16_t(1.0f));
      break;
    case ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64:
      std::fill_n(value.GetTensorMutableData<int64_t>(), count, 1);
      break;
    default:
      throw std::invalid_argument("input " + name + " is of type " + std::to_string(info.GetElementType()) +
                                  " of ONNX, expected float, float16 or int64");
  }
  return value;
}

static void print(const std::string& name, const Ort::Value& value) {
  const auto info = value.GetTensorTypeAndShapeInfo();
  const bool half = info.GetElementType() == ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16;
  std::printf("%s:", name.c_str());
  for (size_t i = 0; i < std::min<size_t>(8, info.GetElementCount()); ++i)
    std::printf(" %.6f", half ? value.GetTensorData<Ort::Float16_t>()[i].ToFloat() : value.GetTensorData<float>()[i]);
  std::printf("\n");
}

#if defined(_WIN32)  // paths in UTF-16
int wmain(int argc, wchar_t** argv) try {
#else
int main(int argc, char** argv) try {
#endif
  if (argc != 3) throw std::invalid_argument("usage: provider LIBRARY MODEL");
  const std::filesystem::path model = argv[2];
  if (std::filesystem::is_directory(model))
    throw std::invalid_argument(model.string() + " is a folder, expected a model's .onnx file");
  Ort::Env env(ORT_LOGGING_LEVEL_ERROR, "provider");
  Ort::Session session = create_session(env, argv[1], model);
  const std::vector<std::string> inputs = session.GetInputNames(), outputs = session.GetOutputNames();
  std::vector<const char*> in, out;
  std::vector<Ort::Value> values;
  for (size_t i = 0; i < inputs.size(); ++i) {
    in.push_back(inputs[i].c_str());
    values.push_back(ones(inputs[i], session.GetInputTypeInfo(i)));
  }
  for (const std::string& name : outputs) out.push_back(name.c_str());
  const auto found = session.Run({}, in.data(), values.data(), in.size(), out.data(), out.size());
  for (size_t i = 0; i < found.size(); ++i) print(outputs[i], found[i]);
} catch (const std::exception& error) {
  std::cerr << error.what() << '\n';
  return 1;
}
