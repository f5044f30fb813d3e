// Greedy decoding of an exported folder: generate LIBRARY FOLDER COUNT ID... [-- EXPECTED...] prints COUNT token ids.
//
// The cache has room for all of them and stays where it is: past and present are bound to the same memory. So every
// token after the prompt has the same shapes, and one CUDA graph serves them all.
#include <NvInfer.h>
#include <NvOnnxParser.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <bit>
#include <cstdlib>
#include <iostream>
#include <map>
#include <memory>
#include <string>
#include <vector>

using namespace nvinfer1;

struct Logger : ILogger {
  void log(Severity severity, const char* text) noexcept override {
    if (severity <= Severity::kWARNING) std::cerr << text << "\n";
  }
};

template <class T>
T need(T value, const char* what) {
  if (value) return value;
  std::cerr << "generate: " << what << "\n";
  std::exit(1);
}
void check(cudaError_t error) { need(error == cudaSuccess, cudaGetErrorString(error)); }

float widen(uint16_t bits, bool bf16) {
  if (bf16) return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16);
  const uint32_t magnitude = bits & 0x7fff, sign = (bits & 0x8000u) << 16;
  // 2^112 rebiases a half's exponent; logits are finite.
  return std::bit_cast<float>(std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude << 13) * 0x1p112f) | sign);
}

// The engine of the folder's model for a prompt of `prompt` tokens and caches of `capacity`, serialized: a profile for
// the prompt, one for a token.
IHostMemory* build_engine(IBuilder& builder, Logger& logger, const std::string& folder, int64_t prompt,
                          int64_t capacity) {
  const auto typed = static_cast<uint32_t>(NetworkDefinitionCreationFlag::kSTRONGLY_TYPED);
  const std::unique_ptr<INetworkDefinition> network(builder.createNetworkV2(1U << typed));
  const std::unique_ptr<nvonnxparser::IParser> parser(nvonnxparser::createParser(*network, logger));
  need(parser->parseFromFile((folder + "/model.onnx").c_str(), 2), "the model does not parse");

  const std::unique_ptr<IBuilderConfig> config(builder.createBuilderConfig());
  for (const int64_t length : {prompt, int64_t{1}}) {
    IOptimizationProfile* profile = builder.createOptimizationProfile();
    for (int i = 0; i < network->getNbInputs(); ++i) {
      const ITensor* input = network->getInput(i);
      Dims dims = input->getDimensions();
      dims.d[0] = 1;
      if (dims.nbDims == 4) {
        dims.d[2] = capacity;
      } else {
        dims.d[1] = input->getName() == std::string("attention_mask") ? capacity : length;
      }
      for (const auto select : {OptProfileSelector::kMIN, OptProfileSelector::kOPT, OptProfileSelector::kMAX})
        need(profile->setDimensions(input->getName(), select, dims), "no profile");
    }
    config->addOptimizationProfile(profile);
  }
  return need(builder.buildSerializedNetwork(*network, *config), "no engine");
}

cudaGraphExec_t capture(IExecutionContext& context, cudaStream_t stream) {
  cudaGraph_t graph;
  cudaGraphExec_t step;
  check(cudaStreamSynchronize(stream));
  check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  need(context.enqueueV3(stream), "the engine does not run");
  check(cudaStreamEndCapture(stream, &graph));
  check(cudaGraphInstantiate(&step, graph, 0));
  return step;
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
  const int64_t prompt = std::ssize(ids), capacity = prompt + std::stoll(argv[3]);

  Logger logger;
  const std::unique_ptr<IBuilder> builder(createInferBuilder(logger));
  // The global registry: the builder's own would leave the runtime below without the plug-ins.
  need(getPluginRegistry()->loadLibrary(argv[1]), "the plug-in library does not load");
  const std::unique_ptr<IHostMemory> plan(build_engine(*builder, logger, argv[2], prompt, capacity));
  const std::unique_ptr<IRuntime> runtime(createInferRuntime(logger));
  const std::unique_ptr<ICudaEngine> engine(
      need(runtime->deserializeCudaEngine(plan->data(), plan->size()), "no engine"));
  cudaStream_t stream;
  check(cudaStreamCreate(&stream));

  // One buffer a tensor; a present has its past's.
  std::map<std::string, void*> buffers;
  const auto context_of = [&](int profile) {
    IExecutionContext* context = need(engine->createExecutionContext(), "no context");
    need(context->setOptimizationProfileAsync(profile, stream), "no profile");
    for (int i = 0; i < engine->getNbIOTensors(); ++i) {
      const std::string name = engine->getIOTensorName(i);
      const bool input = engine->getTensorIOMode(name.c_str()) == TensorIOMode::kINPUT;
      const Dims dims = input ? engine->getProfileShape(name.c_str(), profile, OptProfileSelector::kMAX)
                              : engine->getTensorShape(name.c_str());
      if (input) need(context->setInputShape(name.c_str(), dims), "no shape");
      const std::string of = name.starts_with("present") ? "past_key_values" + name.substr(7) : name;
      if (!buffers.contains(of)) {
        int64_t bytes = 8;
        for (int d = 0; d < dims.nbDims; ++d) bytes *= dims.d[d] > 0 ? dims.d[d] : d ? prompt : 1;
        check(cudaMalloc(&buffers[of], bytes));
        check(cudaMemset(buffers[of], 0, bytes));
      }
      need(context->setTensorAddress(name.c_str(), buffers[of]), "no address");
    }
    return std::unique_ptr<IExecutionContext>(context);
  };
  const auto of_prompt = context_of(0), of_token = context_of(1);
  const auto set = [&](const char* name, int64_t at, int64_t value) {
    if (buffers.contains(name))
      check(cudaMemcpy(static_cast<int64_t*>(buffers[name]) + at, &value, 8, cudaMemcpyHostToDevice));
  };
  const bool bf16 = engine->getTensorDataType("logits") == DataType::kBF16;
  const int64_t vocabulary = engine->getTensorShape("logits").d[2];
  const auto take_best = [&](int64_t row) {
    check(cudaStreamSynchronize(stream));
    std::vector<uint16_t> logits(vocabulary);
    const auto* from = static_cast<const uint16_t*>(buffers["logits"]) + row * vocabulary;
    check(cudaMemcpy(logits.data(), from, 2 * vocabulary, cudaMemcpyDeviceToHost));
    const auto best = std::max_element(logits.begin(), logits.end(),
                                       [&](uint16_t a, uint16_t b) { return widen(a, bf16) < widen(b, bf16); });
    generated.push_back(best - logits.begin());
    std::cout << (generated.size() > 1 ? " " : "") << generated.back() << std::flush;
  };

  for (int64_t i = 0; i < prompt; ++i)
    set("input_ids", i, ids[i]), set("position_ids", i, i), set("attention_mask", i, 1);
  need(of_prompt->enqueueV3(stream), "the engine does not run");
  take_best(of_prompt->getTensorShape("logits").d[1] - 1);  // of the last token, or of all
  cudaGraphExec_t step = nullptr;
  for (int64_t at = prompt; at < capacity - 1; ++at) {
    set("input_ids", 0, generated.back()), set("position_ids", 0, at), set("attention_mask", at, 1);
    if (step) {
      check(cudaGraphLaunch(step, stream));
    } else {  // TensorRT settles shapes in a call of its own
      need(of_token->enqueueV3(stream), "the engine does not run");
      step = capture(*of_token, stream);
    }
    take_best(0);
  }
  std::cout << "\n";
  return expected.empty() || expected == generated ? 0 : (std::cerr << "not the expected tokens\n", 1);
}
