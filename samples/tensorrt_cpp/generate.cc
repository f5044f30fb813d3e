// Greedy decoding of an exported folder: generate LIBRARY FOLDER COUNT ID... [-- EXPECTED...] prints COUNT token ids.
#include <NvInfer.h>
#include <NvOnnxParser.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <bit>
#include <cstdlib>
#include <iostream>
#include <map>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

using namespace nvinfer1;

struct Logger : ILogger {
  void log(Severity severity, const char* text) noexcept override {
    if (severity <= Severity::kWARNING) std::cerr << text << "\n";
  }
};

template <class T>
T Need(T value, const char* what) {
  if (value) return value;
  std::cerr << "generate: " << what << "\n";
  std::exit(1);
}
void Check(cudaError_t error) { Need(error == cudaSuccess, cudaGetErrorString(error)); }

float Widen(uint16_t bits, bool bf16) {
  if (bf16) return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16);
  const uint32_t magnitude = bits & 0x7fff, sign = (bits & 0x8000u) << 16;
  // 2^112 rebiases a half's exponent; logits are finite.
  return std::bit_cast<float>(std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude << 13) * 0x1p112f) | sign);
}

int main(int argc, char** argv) {
  if (argc < 5) return std::cerr << "usage: generate LIBRARY FOLDER COUNT ID... [-- EXPECTED...]\n", 2;
  const std::vector<std::string> arguments(argv + 4, argv + argc);
  const auto split = std::find(arguments.begin(), arguments.end(), "--");
  std::vector<int64_t> ids, expected, generated;
  std::transform(arguments.begin(), split, std::back_inserter(ids), [](const auto& a) { return std::stoll(a); });
  if (split != arguments.end())
    std::transform(split + 1, arguments.end(), std::back_inserter(expected),
                   [](const auto& a) { return std::stoll(a); });
  const int64_t most = static_cast<int64_t>(ids.size()) + std::stoll(argv[3]);

  Logger logger;
  const std::unique_ptr<IBuilder> builder(createInferBuilder(logger));
  // The global registry: the builder's own would leave the runtime below without the plug-ins.
  Need(getPluginRegistry()->loadLibrary(argv[1]), "the plug-in library does not load");
  const auto typed = static_cast<uint32_t>(NetworkDefinitionCreationFlag::kSTRONGLY_TYPED);
  const std::unique_ptr<INetworkDefinition> network(builder->createNetworkV2(1U << typed));
  const std::unique_ptr<nvonnxparser::IParser> parser(nvonnxparser::createParser(*network, logger));
  Need(parser->parseFromFile((std::string(argv[2]) + "/model.onnx").c_str(), 2), "the model does not parse");

  IOptimizationProfile* profile = builder->createOptimizationProfile();  // batch 1, nothing cached, 1 to `most` tokens
  for (int i = 0; i < network->getNbInputs(); ++i) {
    const ITensor* input = network->getInput(i);
    for (const auto select : {OptProfileSelector::kMIN, OptProfileSelector::kOPT, OptProfileSelector::kMAX}) {
      Dims dims = input->getDimensions();
      dims.d[0] = 1;
      if (dims.nbDims == 4) {
        dims.d[2] = 0;
      } else {
        dims.d[1] = select == OptProfileSelector::kMIN ? 1 : most;
      }
      profile->setDimensions(input->getName(), select, dims);
    }
  }
  const std::unique_ptr<IBuilderConfig> config(builder->createBuilderConfig());
  config->addOptimizationProfile(profile);
  const std::unique_ptr<IHostMemory> plan(Need(builder->buildSerializedNetwork(*network, *config), "no engine"));
  const std::unique_ptr<IRuntime> runtime(createInferRuntime(logger));
  const std::unique_ptr<ICudaEngine> engine(
      Need(runtime->deserializeCudaEngine(plan->data(), plan->size()), "no engine"));
  const std::unique_ptr<IExecutionContext> context(engine->createExecutionContext());

  // One buffer a tensor, for the longest sequence.
  std::map<std::string, void*> buffers;
  for (int i = 0; i < engine->getNbIOTensors(); ++i) {
    const char* name = engine->getIOTensorName(i);
    const Dims dims = engine->getTensorShape(name);
    int64_t bytes = 8;
    for (int d = 0; d < dims.nbDims; ++d) bytes *= dims.d[d] > 0 ? dims.d[d] : d ? most : 1;
    Check(cudaMalloc(&buffers[name], bytes));
    context->setTensorAddress(name, buffers[name]);
    if (engine->getTensorIOMode(name) == TensorIOMode::kINPUT && dims.nbDims == 4)
      context->setInputShape(name, Dims4(1, dims.d[1], 0, dims.d[3]));
  }
  const bool bf16 = engine->getTensorDataType("logits") == DataType::kBF16;
  cudaStream_t stream;
  Check(cudaStreamCreate(&stream));
  while (generated.size() < std::stoul(argv[3])) {
    const auto length = static_cast<int64_t>(ids.size());
    std::vector<int64_t> mask(length, 1), positions(length);
    std::iota(positions.begin(), positions.end(), 0);
    for (const auto& [name, values] :
         {std::pair("input_ids", &ids), {"attention_mask", &mask}, {"position_ids", &positions}}) {
      if (!buffers.contains(name)) continue;
      Check(cudaMemcpy(buffers[name], values->data(), 8 * length, cudaMemcpyHostToDevice));
      context->setInputShape(name, Dims2(1, length));
    }
    Need(context->enqueueV3(stream), "the engine does not run");
    Check(cudaStreamSynchronize(stream));
    const Dims shape = context->getTensorShape("logits");  // of the last token, or of all
    const int64_t vocabulary = shape.d[2];
    std::vector<uint16_t> last(vocabulary);
    const auto* logits = static_cast<const uint16_t*>(buffers["logits"]) + (shape.d[1] - 1) * vocabulary;
    Check(cudaMemcpy(last.data(), logits, 2 * vocabulary, cudaMemcpyDeviceToHost));
    const auto best = std::max_element(last.begin(), last.end(),
                                       [&](uint16_t a, uint16_t b) { return Widen(a, bf16) < Widen(b, bf16); });
    ids.push_back(best - last.begin());
    generated.push_back(ids.back());
    std::cout << (generated.size() > 1 ? " " : "") << ids.back() << std::flush;
  }
  std::cout << "\n";
  return expected.empty() || expected == generated ? 0 : (std::cerr << "not the expected tokens\n", 1);
}
