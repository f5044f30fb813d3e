// Builds TensorRT engines of exported models and runs them, as tests/tensorrt/run.py asks.
//
// usage: run PLUGIN_LIBRARY < COMMANDS; one line is one command, and one line of output says how it went:
//   engine NAME MODEL.onnx LEVEL PROFILE...  builds an engine; a profile is BATCH/NEW/PAST, each MIN:OPT:MAX tokens;
//                                            /fixed: PAST is the cache's capacity
//   save NAME FILE, load NAME FILE           an engine's plan
//   run TOKENS ROWS CAPACITY OUTPUT STEP...  feeds int64 [ROWS, T] in steps; a step is ENGINE/PROFILE/LENGTH; /graph
//                                            replays it from a CUDA graph. CAPACITY 0: the cache grows, and each step
//                                            has a graph of its own; else past and present are the same memory for so
//                                            many tokens, and the first such step's graph serves the later ones
// Inputs ..._state are zeros at first, and in place where the cache is.
// A token below zero is padding. OUTPUT gets the logits of each step, [ROWS, LENGTH, V] in the model's 16 bits. An
// input hidden_states is read from TOKENS.hidden, [ROWS, T, H] in the model's 16 bits.
#include <NvInfer.h>
#include <NvOnnxParser.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <iterator>
#include <map>
#include <memory>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

using namespace nvinfer1;

namespace {

struct RunLogger : ILogger {
  void log(Severity severity, const char* text) noexcept override {
    if (severity <= Severity::kERROR) std::cerr << text << std::endl;
  }
} logger;

void need(bool condition, const std::string& what) {
  if (!condition) throw std::runtime_error(what);
}
void check(cudaError_t error) { need(error == cudaSuccess, cudaGetErrorString(error)); }

std::vector<std::string> split(const std::string& text, char mark) {
  std::vector<std::string> parts;
  std::stringstream stream(text);
  for (std::string part; std::getline(stream, part, mark);) parts.push_back(part);
  return parts;
}

struct Free {
  void operator()(void* memory) const { cudaFree(memory); }
};
using Memory = std::unique_ptr<void, Free>;
using BuffersByName = std::map<std::string, Memory>;
struct Destroy {
  void operator()(cudaGraphExec_t graph) const { cudaGraphExecDestroy(graph); }
};
using Graph = std::unique_ptr<CUgraphExec_st, Destroy>;

Memory allocate(size_t bytes) {
  void* memory = nullptr;
  check(cudaMalloc(&memory, bytes + 8));  // an empty cache, too, has an address
  return Memory(memory);
}

struct Engine {
  std::unique_ptr<ICudaEngine> engine;
  std::map<int, std::unique_ptr<IExecutionContext>> contexts;  // by profile
};

class Session {
 public:
  explicit Session(const char* library) : runtime_(createInferRuntime(logger)) {
    need(runtime_ != nullptr, "TensorRT does not start");
    need(getPluginRegistry()->loadLibrary(library), "the plug-in library does not load");
    check(cudaStreamCreate(&stream_));
  }

  std::string build_engine(std::istream& words) {
    std::string name, model, profile;
    int level = 3;
    words >> name >> model >> level;
    if (!builder_) builder_.reset(createInferBuilder(logger));
    need(builder_ != nullptr, "TensorRT has no builder");
    const auto typed = static_cast<uint32_t>(NetworkDefinitionCreationFlag::kSTRONGLY_TYPED);
    const std::unique_ptr<INetworkDefinition> network(builder_->createNetworkV2(1U << typed));
    const std::unique_ptr<nvonnxparser::IParser> parser(nvonnxparser::createParser(*network, logger));
    need(parser->parseFromFile(model.c_str(), 1), "the model does not parse");
    const std::unique_ptr<IBuilderConfig> config(builder_->createBuilderConfig());
    config->setBuilderOptimizationLevel(level);
    while (words >> profile) config->addOptimizationProfile(make_profile(*network, profile));
    const std::unique_ptr<IHostMemory> plan(builder_->buildSerializedNetwork(*network, *config));
    need(plan != nullptr, "no engine is built");
    setenv("QUANTMOE_FOLDER", std::filesystem::path(model).parent_path().c_str(), 1);  // of --external-experts
    return deserialize(name, plan->data(), plan->size());
  }

  std::string load_engine(std::istream& words) {
    std::string name, file;
    words >> name >> file;
    std::ifstream input(file, std::ios::binary);
    const std::string plan((std::istreambuf_iterator<char>(input)), {});
    return deserialize(name, plan.data(), plan.size());
  }
  std::string save_engine(std::istream& words) {
    std::string name, file;
    words >> name >> file;
    const std::unique_ptr<IHostMemory> plan(engines_.at(name).engine->serialize());
    need(plan != nullptr, "the engine is not serialized");
    std::ofstream output(file, std::ios::binary);
    output.write(static_cast<const char*>(plan->data()), static_cast<std::streamsize>(plan->size()));
    need(output.good(), file + " is not written");
    return file;
  }

  std::string run_steps(std::istream& words) {
    std::string file, output, step;
    size_t rows = 0;
    words >> file >> rows >> capacity_ >> output;
    std::ifstream input(file, std::ios::binary);
    const std::string bytes((std::istreambuf_iterator<char>(input)), {});
    need(!bytes.empty() && bytes.size() % (8 * rows) == 0, file + " does not have " + std::to_string(rows) + " rows");
    const auto* tokens = reinterpret_cast<const int64_t*>(bytes.data());
    std::ifstream hidden_file(file + ".hidden", std::ios::binary);
    const std::string hidden((std::istreambuf_iterator<char>(hidden_file)), {});
    const size_t length = bytes.size() / 8 / rows;
    std::ofstream logits(output, std::ios::binary);
    graphs_.clear();
    kept_.clear();
    caches_.clear();
    size_t past = 0;
    while (words >> step) {
      const auto parts = split(step, '/');
      const size_t count = std::stoul(parts.at(2));
      need(past + count <= length, "more steps than tokens");
      need(!capacity_ || length <= capacity_, "more tokens than the cache has room for");
      Feed feed;
      for (size_t row = 0; row < rows; ++row) {
        int64_t position = 0;
        for (size_t i = 0; i < past + count; ++i) {
          const int64_t token = tokens[row * length + i];
          append(feed["attention_mask"], token >= 0);
          if (i >= past) {
            append(feed["input_ids"], std::max<int64_t>(token, 0));
            append(feed["position_ids"], position);
          }
          position += token >= 0;
        }
        if (capacity_) feed["attention_mask"].resize((row + 1) * capacity_ * sizeof(int64_t));
        const size_t features = hidden.size() / rows / length;  // bytes of a token's
        feed["hidden_states"] += hidden.substr((row * length + past) * features, count * features);
      }
      logits << run_step(parts, feed, rows, past);
      past += count;
    }
    return "steps to " + std::to_string(past);
  }

 private:
  using Feed = std::map<std::string, std::string>;  // the bytes of what a step reads

  std::string deserialize(const std::string& name, const void* plan, size_t size) {
    engines_.erase(name);  // with its contexts, which must not outlive it
    Engine& made = engines_[name];
    made.engine.reset(runtime_->deserializeCudaEngine(plan, size));
    need(made.engine != nullptr, "the engine does not load");
    return "plan " + std::to_string(size) + " memory " + std::to_string(made.engine->getDeviceMemorySizeV2());
  }

  static void append(std::string& bytes, int64_t value) {
    bytes.append(reinterpret_cast<const char*>(&value), sizeof(value));
  }

  IOptimizationProfile* make_profile(const INetworkDefinition& network, const std::string& text) {
    std::vector<std::array<int64_t, 3>> ranges;
    const bool fixed = text.ends_with("/fixed");
    for (const auto& range : split(text, '/')) {
      const auto numbers = split(range, ':');
      if (numbers.size() != 3) break;
      ranges.push_back({std::stoll(numbers.at(0)), std::stoll(numbers.at(1)), std::stoll(numbers.at(2))});
    }
    IOptimizationProfile* profile = builder_->createOptimizationProfile();
    for (int i = 0; i < network.getNbInputs(); ++i) {
      const ITensor* input = network.getInput(i);
      for (const auto select : {OptProfileSelector::kMIN, OptProfileSelector::kOPT, OptProfileSelector::kMAX}) {
        const auto at = static_cast<size_t>(select);
        Dims dims = input->getDimensions();
        dims.d[0] = ranges.at(0)[at];
        if (is_cache(input->getName())) {
          dims.d[2] = ranges.at(2)[at];
        } else if (!is_state(input->getName())) {
          const bool mask = std::string(input->getName()) == "attention_mask";
          dims.d[1] = (mask && fixed ? 0 : ranges.at(1)[at]) + (mask ? ranges.at(2)[at] : 0);
        }
        need(profile->setDimensions(input->getName(), select, dims), std::string("profile of ") + input->getName());
      }
    }
    return profile;
  }

  IExecutionContext& make_context(const std::string& name, int profile) {
    need(engines_.contains(name), "no engine " + name);
    Engine& found = engines_[name];
    auto& context = found.contexts[profile];
    if (!context) {
      context.reset(found.engine->createExecutionContext());
      need(context && context->setOptimizationProfileAsync(profile, stream_), "no context");
      check(cudaStreamSynchronize(stream_));
    }
    return *context;
  }

  // The logits' bytes. A cache that grows: what is present becomes what is past.
  std::string run_step(const std::vector<std::string>& parts, const Feed& feed, size_t rows, size_t past) {
    IExecutionContext& context = make_context(parts.at(0), std::stoi(parts.at(1)));
    const std::string key = parts.at(0) + "/" + parts.at(1) + "/" + parts.at(2);
    BuffersByName own;
    BuffersByName& buffers = capacity_ ? kept_[key] : own;
    const std::vector<std::string> outputs = bind_buffers(context, buffers, feed, rows, past);
    const BuffersByName states = capacity_ ? copy_states(context) : BuffersByName();
    std::string replayed;
    if (graphs_.contains(key)) {
      replayed = replay_graph(graphs_[key], context, buffers);
      put_back(context, states);
    }
    need(context.enqueueV3(stream_), "the engine does not run");
    check(cudaStreamSynchronize(stream_));
    std::string logits = read_output(context, "logits", buffers);
    if (parts.size() > 3 && replayed.empty()) {
      for (const auto& name : outputs)
        if (!capacity_ && name != "logits") check(cudaMemset(buffers[name].get(), 0xff, byte_size(context, name)));
      Graph graph = capture(context);
      put_back(context, states);
      replayed = replay_graph(graph, context, buffers);
      if (capacity_) graphs_[key] = std::move(graph);
    }
    need(replayed.empty() || logits == replayed, "the CUDA graph gives other logits");
    for (const auto& name : outputs)
      if (!capacity_ && is_present(name)) caches_[past_of(name)] = std::move(buffers[name]);
    return logits;
  }

  // Shapes, values and addresses; the outputs' names. In place a buffer stays where it is, for graphs.
  std::vector<std::string> bind_buffers(IExecutionContext& context, BuffersByName& buffers, const Feed& feed,
                                        size_t rows, size_t past) {
    const ICudaEngine& engine = context.getEngine();
    const auto buffer = [&](BuffersByName& of, const std::string& name, size_t bytes) {
      if (of.contains(name)) return of[name].get();
      check(cudaMemset((of[name] = allocate(bytes)).get(), 0xff, bytes));
      return of[name].get();
    };
    std::vector<std::string> outputs;
    for (const auto mode : {TensorIOMode::kINPUT, TensorIOMode::kOUTPUT}) {  // outputs' shapes follow the inputs'
      for (int i = 0; i < engine.getNbIOTensors(); ++i) {
        const std::string name = engine.getIOTensorName(i);
        if (engine.getTensorIOMode(name.c_str()) != mode) continue;
        if (mode == TensorIOMode::kOUTPUT) {
          outputs.push_back(name);
          const bool shared = capacity_ && is_present(name);
          context.setTensorAddress(
              name.c_str(), shared ? caches_.at(past_of(name)).get() : buffer(buffers, name, byte_size(context, name)));
          continue;
        }
        Dims dims = engine.getTensorShape(name.c_str());
        const bool fed = feed.contains(name), state = is_state(name), starts = !caches_.contains(name);
        dims.d[0] = static_cast<int64_t>(rows);
        if (is_cache(name)) dims.d[2] = static_cast<int64_t>(capacity_ ? capacity_ : past);
        if (fed) {
          dims.d[1] = 1;
          dims.d[1] = static_cast<int64_t>(feed.at(name).size() / byte_size(engine, name, dims));
        }
        need(context.setInputShape(name.c_str(), dims), "shape of " + name);
        void* memory = buffer(fed ? buffers : caches_, name, byte_size(context, name));
        if (state && starts) check(cudaMemset(memory, 0, byte_size(context, name)));
        if (fed) check(cudaMemcpy(memory, feed.at(name).data(), feed.at(name).size(), cudaMemcpyHostToDevice));
        context.setTensorAddress(name.c_str(), memory);
      }
    }
    return outputs;
  }
  static std::string past_of(const std::string& present) { return "past_key_values" + present.substr(7); }
  static bool is_present(const std::string& name) { return name.starts_with("present."); }
  static bool is_state(const std::string& name) { return name.ends_with("_state"); }
  static bool is_cache(const std::string& name) { return name.starts_with("past_key_values") && !is_state(name); }

  // A run in place moves states on. Another run of the same step wants them as they were.
  BuffersByName copy_states(const IExecutionContext& context) {
    BuffersByName copies;
    for (const auto& [name, memory] : caches_) {
      if (!is_state(name)) continue;
      const size_t bytes = byte_size(context, name);
      check(cudaMemcpy((copies[name] = allocate(bytes)).get(), memory.get(), bytes, cudaMemcpyDeviceToDevice));
    }
    return copies;
  }
  void put_back(const IExecutionContext& context, const BuffersByName& states) {
    for (const auto& [name, memory] : states)
      check(cudaMemcpy(caches_.at(name).get(), memory.get(), byte_size(context, name), cudaMemcpyDeviceToDevice));
  }

  Graph capture(IExecutionContext& context) {
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t replay = nullptr;
    check(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal));
    const bool enqueued = context.enqueueV3(stream_);
    const cudaError_t ended = cudaStreamEndCapture(stream_, &graph);
    if (!enqueued || ended != cudaSuccess) {
      cudaGetLastError();
      throw std::runtime_error("a CUDA graph cannot be captured");
    }
    check(cudaGraphInstantiate(&replay, graph, 0));
    check(cudaGraphDestroy(graph));
    return Graph(replay);
  }
  std::string replay_graph(const Graph& graph, IExecutionContext& context, BuffersByName& buffers) {
    check(cudaMemset(buffers["logits"].get(), 0xff, byte_size(context, "logits")));
    check(cudaGraphLaunch(graph.get(), stream_));
    check(cudaStreamSynchronize(stream_));
    return read_output(context, "logits", buffers);
  }

  static size_t byte_size(const IExecutionContext& context, const std::string& name) {
    return byte_size(context.getEngine(), name, context.getTensorShape(name.c_str()));
  }
  static size_t byte_size(const ICudaEngine& engine, const std::string& name, const Dims& dims) {
    const DataType type = engine.getTensorDataType(name.c_str());
    size_t bytes = type == DataType::kINT64 ? 8 : type == DataType::kFLOAT ? 4 : 2;
    for (int i = 0; i < dims.nbDims; ++i) bytes *= dims.d[i];
    return bytes;
  }

  static std::string read_output(const IExecutionContext& context, const std::string& name,
                                 const BuffersByName& memory) {
    std::string bytes(byte_size(context, name), '\0');
    check(cudaMemcpy(bytes.data(), memory.at(name).get(), bytes.size(), cudaMemcpyDeviceToHost));
    return bytes;
  }

  std::unique_ptr<IBuilder> builder_;
  std::unique_ptr<IRuntime> runtime_;
  cudaStream_t stream_ = nullptr;
  std::map<std::string, Engine> engines_;
  size_t capacity_ = 0;
  BuffersByName caches_;                       // past's
  std::map<std::string, BuffersByName> kept_;  // in place: by engine, profile and length
  std::map<std::string, Graph> graphs_;
};

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) return std::cerr << "usage: run PLUGIN_LIBRARY < COMMANDS\n", 2;
  try {
    Session session(argv[1]);
    for (std::string line; std::getline(std::cin, line);) {
      std::istringstream words(line);
      std::string command;
      words >> command;
      try {
        std::cout << "ok "
                  << (command == "engine" ? session.build_engine(words)
                      : command == "save" ? session.save_engine(words)
                      : command == "load" ? session.load_engine(words)
                                          : session.run_steps(words))
                  << std::endl;
      } catch (const std::exception& error) {
        std::cout << "failed " << error.what() << std::endl;
      }
    }
  } catch (const std::exception& error) {
    std::cerr << "run: " << error.what() << std::endl;
    return 1;
  }
}
