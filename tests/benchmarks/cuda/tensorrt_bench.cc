// TensorRT for tensorrt_bench.py: an engine of an ONNX file and its contexts, by ctypes.
#include <NvInfer.h>
#include <NvOnnxParser.h>

#include <algorithm>
#include <iostream>
#include <memory>

using namespace nvinfer1;

namespace {

struct BenchLogger : ILogger {
  void log(Severity severity, const char* text) noexcept override {
    if (severity <= Severity::kERROR) std::cerr << text << std::endl;
  }
} logger;

std::unique_ptr<IBuilder> builder;
std::unique_ptr<IRuntime> runtime;

}  // namespace

extern "C" {

// Sizes of an input in a profile: least, usual, most.
struct Range {
  const char* name;
  int32_t rank;
  int64_t sizes[3][4];
};

bool bench_open(const char* plugin) {
  builder.reset(createInferBuilder(logger));
  runtime.reset(createInferRuntime(logger));
  return builder && runtime && getPluginRegistry()->loadLibrary(plugin);
}
// nullptr where it fails; what is wrong is on stderr.
ICudaEngine* bench_build(const char* model, int32_t level, const Range* ranges, int32_t inputs, int32_t profiles) {
  const auto typed = static_cast<uint32_t>(NetworkDefinitionCreationFlag::kSTRONGLY_TYPED);
  const std::unique_ptr<INetworkDefinition> network(builder->createNetworkV2(1U << typed));
  const std::unique_ptr<nvonnxparser::IParser> parser(nvonnxparser::createParser(*network, logger));
  if (!parser->parseFromFile(model, 1)) return nullptr;
  const std::unique_ptr<IBuilderConfig> config(builder->createBuilderConfig());
  config->setBuilderOptimizationLevel(level);
  for (int32_t p = 0; p < profiles; ++p) {
    IOptimizationProfile* profile = builder->createOptimizationProfile();
    for (int32_t i = 0; i < inputs; ++i) {
      const Range& range = ranges[p * inputs + i];
      for (const auto select : {OptProfileSelector::kMIN, OptProfileSelector::kOPT, OptProfileSelector::kMAX}) {
        Dims dims{range.rank, {}};
        std::copy_n(range.sizes[static_cast<size_t>(select)], range.rank, dims.d);
        if (!profile->setDimensions(range.name, select, dims)) return nullptr;
      }
    }
    config->addOptimizationProfile(profile);
  }
  const std::unique_ptr<IHostMemory> plan(builder->buildSerializedNetwork(*network, *config));
  return plan ? runtime->deserializeCudaEngine(plan->data(), plan->size()) : nullptr;
}
int64_t bench_memory(ICudaEngine* engine) { return engine->getDeviceMemorySizeV2(); }
IExecutionContext* bench_context(ICudaEngine* engine, int32_t profile, void* stream) {
  IExecutionContext* context = engine->createExecutionContext();
  const bool set = context && context->setOptimizationProfileAsync(profile, static_cast<cudaStream_t>(stream));
  return set ? context : nullptr;
}
// Sizes of an input, or rank -1, and the address of a tensor.
bool bench_bind(IExecutionContext* context, const char* name, void* address, int32_t rank, const int64_t* sizes) {
  Dims dims{rank, {}};
  if (rank >= 0) std::copy_n(sizes, rank, dims.d);
  return (rank < 0 || context->setInputShape(name, dims)) && context->setTensorAddress(name, address);
}
bool bench_enqueue(IExecutionContext* context, void* stream) {
  return context->enqueueV3(static_cast<cudaStream_t>(stream));
}

}  // extern "C"
