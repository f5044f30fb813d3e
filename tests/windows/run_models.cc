// usage: run_models LIBRARY FOLDER...: runs each folder's model.onnx on the inputs that its file `inputs` lists, with
// the custom operators of LIBRARY, in two threads. A line for each: the folder and a digest of the outputs' bytes, or
// the error.
#include <onnxruntime_cxx_api.h>

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <iomanip>
#include <iostream>
#include <iterator>
#include <sstream>
#include <string>
#include <vector>

// An input: its name, element type as ONNX numbers it, and shape; its bytes are in a file of its name.
struct ModelInput {
  std::string name;
  Ort::Value value{nullptr};
  std::string bytes;
};

static std::string read_file(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

static uint64_t run_model(const Ort::Env& env, const std::filesystem::path& library,
                          const std::filesystem::path& folder) {
  Ort::SessionOptions options;
  options.SetLogSeverityLevel(ORT_LOGGING_LEVEL_FATAL);
  options.SetIntraOpNumThreads(2);
  options.RegisterCustomOpsLibrary(library.c_str());
  Ort::Session session(env, (folder / "model.onnx").c_str(), options);
  const auto memory = Ort::MemoryInfo::CreateCpu(OrtArenaAllocator, OrtMemTypeDefault);
  std::istringstream lines(read_file(folder / "inputs"));
  std::vector<ModelInput> inputs;
  for (std::string line; std::getline(lines, line);) {
    std::istringstream words(line);
    ModelInput input;
    int type;
    words >> input.name >> type;
    const std::vector<int64_t> shape{std::istream_iterator<int64_t>(words), {}};
    input.bytes = read_file(folder / input.name);
    inputs.push_back(std::move(input));
    inputs.back().value = Ort::Value::CreateTensor(memory, inputs.back().bytes.data(), inputs.back().bytes.size(),
                                                   shape.data(), shape.size(), ONNXTensorElementDataType(type));
  }
  Ort::IoBinding binding(session);
  for (const ModelInput& input : inputs) binding.BindInput(input.name.c_str(), input.value);
  binding.BindOutput("y", memory);
  session.Run({}, binding);
  uint64_t digest = 14695981039346656037u;  // FNV-1a
  const Ort::Value y = std::move(binding.GetOutputValues()[0]);
  const auto* bytes = y.GetTensorData<unsigned char>();
  for (size_t i = 0; i < 4 * y.GetTensorTypeAndShapeInfo().GetElementCount(); ++i)
    digest = (digest ^ bytes[i]) * 1099511628211u;
  return digest;
}

#if defined(_WIN32)
int wmain(int argc, wchar_t** argv) {
#else
int main(int argc, char** argv) {
#endif
  Ort::Env env(ORT_LOGGING_LEVEL_FATAL, "run_models");
  for (int i = 2; i < argc; ++i) {
    const std::filesystem::path folder = argv[i];
    std::cout << folder.filename().string() << ' ';
    try {
      const uint64_t digest = run_model(env, argv[1], folder);
      std::cout << std::hex << std::setw(16) << std::setfill('0') << digest << std::endl;
    } catch (const Ort::Exception& error) {
      const std::string text = error.what();
      std::cout << "refused: " << text.substr(0, text.find('\n')) << std::endl;
    }
  }
}
