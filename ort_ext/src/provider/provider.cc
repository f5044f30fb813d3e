// The plug-in execution provider "QuantMoE": computes com.microsoft's QMoE and MatMulNBits nodes of existing models on
// the CPU. A node is a graph of its own for ONNX Runtime, which releases the initializers; packed weights lie in a file
// beside the model (packed_file.h).
#include <algorithm>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "core/attributes.h"
#include "core/half.h"
#include "core/parallel.h"
#include "cpu/pool.h"
#include "provider/claim.h"
#include "provider/packed_file.h"
#include "provider/provider_api.h"

namespace quantmoe {
namespace {

constexpr const char* kName = "QuantMoE";

struct Settings {
  Activations activations = Activations::kAuto;
  std::string cache;  // a file; "": beside the model; "off"
  bool verify = false;
};

Settings settings_of(const GraphApi& api, const OrtSessionOptions* options) {
  auto left = session_entries(api.api, options, "ep.quantmoe.");  // with the prefix that ONNX Runtime puts before them
  std::string known;
  const auto take = [&](const char* name, const char* usual) {
    known += (known.empty() ? "" : ", ") + std::string(name);
    const auto node = left.extract(name);
    return node ? node.mapped() : std::string(usual);
  };
  const auto refuse = [](const char* name, const std::string& found, const char* expected) {
    throw std::invalid_argument(std::string("quantmoe: provider option ") + name + " is \"" + found + "\", expected " +
                                expected);
  };
  Settings settings;
  const std::string activations = take("activations", "auto");
  const bool named = left.contains("cache");
  settings.cache = take("cache", "");
  const std::string verify = take("verify", "0");
  if (!left.empty())
    throw std::invalid_argument("quantmoe: there is no provider option \"" + left.begin()->first +
                                "\", expected one of " + known);
  if (activations == "float")
    settings.activations = Activations::kFloat;
  else if (activations == "int8")
    settings.activations = Activations::kInt8;
  else if (activations != "auto")
    refuse("activations", activations, "auto, float or int8");
  if (named && settings.cache.empty()) refuse("cache", "", "a file or off");
  if (verify != "0" && verify != "1") refuse("verify", verify, "0 or 1");
  settings.verify = verify == "1";
  return settings;
}

// A node of a session.
class Compiled : public NodeComputeInfo {
 public:
  // places: of the claim's inputs among a run's inputs; -1: none.
  Compiled(const OrtApi* api, Claim claim, std::vector<int> places, std::shared_ptr<const PackedWeights> packed,
           size_t first)
      : api_(api), claim_(std::move(claim)), places_(std::move(places)), packed_(std::move(packed)), first_(first) {
    CreateState = [](NodeComputeInfo* self, OrtNodeComputeContext*, void** state) -> OrtStatus* {
      *state = self;
      return nullptr;
    };
    ReleaseState = [](NodeComputeInfo*, void*) {};
    Compute = [](NodeComputeInfo* info, void*, OrtKernelContext* context) {
      const auto& self = *static_cast<const Compiled*>(info);
      return guard(self.api_, [&] {
        try {
          self.claim_.moe ? self.run_moe(context) : self.run_linear(context);
        } catch (const std::invalid_argument& error) {
          throw std::invalid_argument(self.claim_.node + ": " + error.what());
        }
      });
    };
    check(api_, api_->CreateCpuMemoryInfo(OrtArenaAllocator, OrtMemTypeDefault, &memory_));
  }
  ~Compiled() { api_->ReleaseMemoryInfo(memory_); }
  Compiled(const Compiled&) = delete;
  Compiled& operator=(const Compiled&) = delete;

 private:
  struct Input {
    const void* data = nullptr;
    Shape shape;
  };
  Input input(OrtKernelContext* context, size_t index) const;
  void* output(OrtKernelContext* context, const Shape& shape) const;
  qm_tensor packed_tensor(size_t index) const {
    const Matrix& matrix = claim_.weights[index];
    return {const_cast<void*>(packed_->at(first_ + index)), 0, {2, {matrix.experts, matrix.row.bytes / 4}}};
  }
  void run_moe(OrtKernelContext* context) const;
  void run_linear(OrtKernelContext* context) const;
  [[noreturn]] void refuse(const char* name, const Shape& found, const std::string& expected) const {
    throw std::invalid_argument(std::string(name) + " has shape " + text_of(found) + ", expected " + expected);
  }

  const OrtApi* api_;
  Claim claim_;
  std::vector<int> places_;
  std::shared_ptr<const PackedWeights> packed_;
  size_t first_;
  OrtMemoryInfo* memory_ = nullptr;
};

Compiled::Input Compiled::input(OrtKernelContext* context, size_t index) const {
  Input found;
  if (index >= places_.size() || places_[index] < 0) return found;
  const OrtValue* value = nullptr;
  check(api_, api_->KernelContext_GetInput(context, static_cast<size_t>(places_[index]), &value));
  OrtTensorTypeAndShapeInfo* info = nullptr;
  check(api_, api_->GetTensorTypeAndShape(value, &info));
  const std::unique_ptr<OrtTensorTypeAndShapeInfo, void (*)(OrtTensorTypeAndShapeInfo*)> owned(
      info, api_->ReleaseTensorTypeAndShapeInfo);
  size_t rank = 0;
  check(api_, api_->GetDimensionsCount(info, &rank));
  found.shape.resize(rank);
  check(api_, api_->GetDimensions(info, found.shape.data(), rank));
  void* data = nullptr;
  check(api_, api_->GetTensorMutableData(const_cast<OrtValue*>(value), &data));
  found.data = data;
  return found;
}

void* Compiled::output(OrtKernelContext* context, const Shape& shape) const {
  OrtValue* value = nullptr;
  void* data = nullptr;
  check(api_, api_->KernelContext_GetOutput(context, 0, shape.data(), shape.size(), &value));
  check(api_, api_->GetTensorMutableData(value, &data));
  return data;
}

void Compiled::run_linear(OrtKernelContext* context) const {
  const qm_linear& linear = claim_.linear;
  const Input x = input(context, 0);
  Shape shape = x.shape;
  if (shape.empty() || shape.back() != linear.in_features)
    refuse("A", shape, "[.., K " + std::to_string(linear.in_features) + "]");
  const int64_t rows = rows_of(shape);
  shape.back() = linear.out_features;
  void* const y = output(context, shape);
  if (rows == 0) return;
  const qm_tensor inputs[] = {{const_cast<void*>(x.data), claim_.type, {2, {rows, linear.in_features}}},
                              packed_tensor(0)},
                  outputs[] = {{y, claim_.type, {2, {rows, linear.out_features}}}};
  qm_call call{};
  call.inputs = inputs;
  call.outputs = outputs;
  run_with_pool(api_, context, memory_, "QuantLinear", &linear, call);
}

// QMoE's routing, as in ONNX Runtime's CPU kernel: the k largest of router_probs, of equal ones the last. The weights
// are their softmax, or their numbers in router_weights. Weights up to 1e-8 are left out.
struct Routing {
  const void* probs;
  const void* weights;  // or null
  qm_type type;
  int64_t experts, top_k;
  bool normalize;

  float read(const void* values, int64_t at) const {
    return type == QM_F32 ? static_cast<const float*>(values)[at]
                          : static_cast<float>(static_cast<const Half*>(values)[at]);
  }
  void select(int64_t token, int32_t* ids, float* found) const {
    thread_local std::vector<std::pair<float, int32_t>> all;
    all.resize(static_cast<size_t>(experts));
    bool numbers = true;
    for (int64_t e = 0; e < experts; ++e) {
      all[static_cast<size_t>(e)] = {read(probs, token * experts + e), static_cast<int32_t>(e)};
      numbers &= !std::isnan(all[static_cast<size_t>(e)].first);
    }
    if (!numbers) {  // comparisons would be meaningless: the token's output is not a number
      for (int64_t j = 0; j < top_k; ++j) ids[j] = static_cast<int32_t>(j), found[j] = NAN;
      return;
    }
    std::partial_sort(all.begin(), all.begin() + top_k, all.end(), std::greater<>());
    float sum = 0;
    for (int64_t j = 0; j < top_k; ++j) {
      ids[j] = all[static_cast<size_t>(j)].second;
      found[j] = weights ? read(weights, token * experts + ids[j])
                         : std::exp(all[static_cast<size_t>(j)].first - all[0].first);
      sum += found[j];
    }
    const float factor = weights && !normalize ? 1.0f : sum == 0 ? 0.0f : 1.0f / sum;
    for (int64_t j = 0; j < top_k; ++j) {
      found[j] *= factor;
      if (!(found[j] > 1e-8f) && !std::isnan(found[j])) ids[j] = -1;
    }
  }
};

void Compiled::run_moe(OrtKernelContext* context) const {
  const qm_moe& moe = claim_.experts;
  const Input x = input(context, 0), probs = input(context, 1), weights = input(context, 2);
  if (x.shape.empty() || x.shape.back() != moe.hidden_size)
    refuse("input", x.shape, "[.., hidden_size " + std::to_string(moe.hidden_size) + "]");
  const int64_t tokens = rows_of(x.shape), top_k = claim_.top_k;
  const Shape routed{tokens, moe.num_experts};
  if (probs.shape != routed) refuse("router_probs", probs.shape, text_of(routed));
  if (weights.data && weights.shape != routed) refuse("router_weights", weights.shape, text_of(routed));
  void* const y = output(context, x.shape);
  if (tokens == 0) return;
  const size_t pairs = static_cast<size_t>(tokens * top_k);
  const std::unique_ptr<int32_t[]> ids(new int32_t[pairs]);
  const std::unique_ptr<float[]> factors(new float[pairs]);
  const qm_shape rows{2, {tokens, moe.hidden_size}}, routes{2, {tokens, top_k}};
  const qm_tensor inputs[] = {{const_cast<void*>(x.data), claim_.type, rows},
                              {ids.get(), QM_INT32, routes},
                              {factors.get(), QM_F32, routes},
                              packed_tensor(0),
                              packed_tensor(1)},
                  outputs[] = {{y, claim_.type, rows}};
  qm_call call{};
  call.inputs = inputs;
  call.outputs = outputs;
  run_with_pool(api_, context, memory_, "QuantMoE", &moe, call, [&] {
    constexpr int64_t kTokens = 16;  // of a task
    const Routing routing{probs.data, weights.data, claim_.type, moe.num_experts, top_k, claim_.normalize};
    parallel(call.lanes, call.parallel_for, call.parallel_context, (tokens + kTokens - 1) / kTokens,
             [&](int, int64_t task) {
               for (int64_t t = task * kTokens; t < std::min(tokens, (task + 1) * kTokens); ++t)
                 routing.select(t, ids.get() + t * top_k, factors.get() + t * top_k);
             });
  });
}

// What a session has of the provider.
class Provider : public Ep {
 public:
  Provider(const OrtApi* api, const OrtLogger* logger, Settings settings)
      : api_(api), logger_(logger), settings_(std::move(settings)) {
    GetName = [](const Ep*) { return kName; };
    GetCapability = [](Ep* ep, const OrtGraph* graph, OrtEpGraphSupportInfo* support) {
      auto& self = *static_cast<Provider*>(ep);
      return guard(self.api_.api, [&] { self.claim(graph, support); });
    };
    Compile = [](Ep* ep, const OrtGraph** graphs, const OrtNode** fused, size_t count, NodeComputeInfo** infos,
                 OrtNode**) {
      auto& self = *static_cast<Provider*>(ep);
      return guard(self.api_.api, [&] { self.compile(graphs, fused, count, infos); });
    };
    ReleaseNodeComputeInfos = [](Ep*, NodeComputeInfo** infos, size_t count) {
      for (size_t i = 0; i < count; ++i) delete static_cast<Compiled*>(infos[i]);
    };
  }

 private:
  void log(OrtLoggingLevel level, const std::string& said) const {
    check(api_.api,
          api_.api->Logger_LogMessage(logger_, level, ("quantmoe: " + said).c_str(), ORT_FILE, __LINE__, __func__));
  }
  std::vector<const OrtNode*> nodes_of(const OrtGraph* graph) const {
    size_t count = 0;
    api_.check(api_.Graph_GetNumNodes(graph, &count));
    std::vector<const OrtNode*> nodes(count);
    api_.check(api_.Graph_GetNodes(graph, nodes.data(), count));
    return nodes;
  }
  std::filesystem::path model_of(const OrtGraph* graph) const {
    const ORTCHAR_T* path = nullptr;
    api_.check(api_.Graph_GetModelPath(graph, &path));
    return path ? path : std::filesystem::path();
  }
  void claim(const OrtGraph* graph, OrtEpGraphSupportInfo* support) const;
  void compile(const OrtGraph** graphs, const OrtNode** fused, size_t count, NodeComputeInfo** infos) const;
  std::shared_ptr<const PackedWeights> packed(const std::filesystem::path& model,
                                              const std::vector<const Matrix*>& matrices) const;

  const GraphApi api_;
  const OrtLogger* logger_;
  const Settings settings_;
};

void Provider::claim(const OrtGraph* graph, OrtEpGraphSupportInfo* support) const {
  const OrtNode* parent = nullptr;
  api_.check(api_.Graph_GetParentNode(graph, &parent));
  const FusionOptions fusion;
  size_t claimed = 0, left = 0;
  for (const OrtNode* node : nodes_of(graph)) {
    if (!is_candidate(api_, node)) continue;
    try {
      if (parent) throw Unclaimed("it is in a graph of another node");
      (void)read_claim(api_, node, settings_.activations);
      api_.check(api_.GetEpApi()->EpGraphSupportInfo_AddNodesToFuse(support, &node, 1, &fusion));
      ++claimed;
    } catch (const Unclaimed& why) {
      ++left;
      log(ORT_LOGGING_LEVEL_VERBOSE, node_name(api_, node) + " stays with ONNX Runtime: " + why.what());
    }
  }
  if (claimed + left)
    log(ORT_LOGGING_LEVEL_INFO, std::to_string(claimed) + " nodes of QMoE and MatMulNBits are computed here, " +
                                    std::to_string(left) + " stay with ONNX Runtime");
}

void Provider::compile(const OrtGraph** graphs, const OrtNode** fused, size_t count, NodeComputeInfo** infos) const {
  std::vector<Claim> claims;
  for (size_t i = 0; i < count; ++i) {
    const std::vector<const OrtNode*> nodes = nodes_of(graphs[i]);
    if (nodes.size() != 1)
      throw std::runtime_error("quantmoe: a graph of one node has " + std::to_string(nodes.size()));
    claims.push_back(read_claim(api_, nodes[0], settings_.activations));
  }
  std::vector<const Matrix*> matrices;
  for (const Claim& claim : claims)
    for (const Matrix& matrix : claim.weights) matrices.push_back(&matrix);
  if (matrices.empty()) return;
  const auto weights = packed(model_of(graphs[0]), matrices);
  std::vector<std::unique_ptr<Compiled>> made;
  for (size_t i = 0, first = 0; i < count; ++i) {
    std::map<std::string, int> places;
    int place = 0;
    for (const OrtValueInfo* value : node_inputs(api_, fused[i])) places.emplace(value_name(api_, value), place++);
    std::vector<int> own;
    for (const std::string& name : claims[i].inputs) own.push_back(name.empty() ? -1 : places.at(name));
    const size_t tensors = claims[i].weights.size();
    made.push_back(std::make_unique<Compiled>(api_.api, std::move(claims[i]), std::move(own), weights, first));
    first += tensors;
  }
  for (size_t i = 0; i < count; ++i) infos[i] = made[i].release();
}

std::shared_ptr<const PackedWeights> Provider::packed(const std::filesystem::path& model,
                                                      const std::vector<const Matrix*>& matrices) const {
  std::vector<PackedEntry> entries;
  const Pack pack = [&](size_t i, const Put& put) { pack_matrix(api_, *matrices[i], put); };
  std::filesystem::path file;
  if (settings_.cache != "off" && !settings_.cache.empty())
    file = std::filesystem::path(std::u8string(settings_.cache.begin(), settings_.cache.end()));
  else if (settings_.cache.empty() && !model.empty())
    (file = model) += ".quantmoe";
  for (const Matrix* matrix : matrices)
    entries.push_back({file.empty() ? "" : identity_of(api_, *matrix, model.parent_path()), matrix->bytes()});
  if (file.empty()) {
    log(ORT_LOGGING_LEVEL_INFO,
        "weights are packed into memory: " + std::string(model.empty() && settings_.cache.empty()
                                                             ? "the model has no path"
                                                             : "provider option cache is off"));
    return pack_in_memory(entries, pack);
  }
  const auto name = file.u8string();
  const std::string text(name.begin(), name.end());
  std::error_code ignored;
  const SourceSum source = [&](size_t i) { return source_sum(api_, *matrices[i]); };
  const SourceSum verify = settings_.verify ? source : nullptr;
  std::string found;  // what is wrong with the file that is there
  if (std::filesystem::exists(file, ignored)) {
    try {
      return map_packed(file, entries, verify);
    } catch (const std::runtime_error& why) {
      found = why.what();
    }
  }
  try {
    write_packed(file, entries, source, pack);
    if (!found.empty()) log(ORT_LOGGING_LEVEL_INFO, text + " is written anew: " + found);
    return map_packed(file, entries, verify);
  } catch (const std::exception& why) {
    log(ORT_LOGGING_LEVEL_WARNING,
        text + " cannot be written, weights are packed into memory each time: " + why.what());
  }
  return pack_in_memory(entries, pack);
}

class Factory : public EpFactory {
 public:
  explicit Factory(const OrtApi* api) : api(api) {
    GetName = [](const EpFactory*) { return kName; };
    GetVendor = [](const EpFactory*) { return "QuantMoE"; };
    GetVendorId = [](const EpFactory*) { return uint32_t{0}; };
    GetVersion = [](const EpFactory*) {
      qm_library library;
      char error[QM_ERROR_SIZE];
      (void)qm_describe(&library, error);
      return library.version;
    };
    GetSupportedDevices = [](EpFactory* self, const OrtHardwareDevice* const* devices, size_t count, OrtEpDevice** out,
                             size_t room, size_t* found) {
      const OrtApi* const ort = static_cast<Factory*>(self)->api;
      *found = 0;
      return guard(ort, [&] {
        const GraphApi graph(ort);
        for (size_t i = 0; i < count && *found < room; ++i) {
          if (graph.HardwareDevice_Type(devices[i]) != 0) continue;
          graph.check(graph.GetEpApi()->CreateEpDevice(self, devices[i], nullptr, nullptr, &out[*found]));
          ++*found;
        }
      });
    };
    CreateEp = [](EpFactory* self, const OrtHardwareDevice* const*, const OrtKeyValuePairs* const*, size_t,
                  const OrtSessionOptions* options, const OrtLogger* logger, Ep** ep) {
      const OrtApi* const ort = static_cast<Factory*>(self)->api;
      return guard(ort, [&] { *ep = new Provider(ort, logger, settings_of(GraphApi(ort), options)); });
    };
    ReleaseEp = [](EpFactory*, Ep* ep) { delete static_cast<Provider*>(ep); };
    // Memory is ONNX Runtime's own of the CPU.
    CreateAllocator = [](EpFactory*, const OrtMemoryInfo*, const OrtKeyValuePairs*,
                         OrtAllocator** allocator) -> OrtStatus* {
      *allocator = nullptr;
      return nullptr;
    };
    ReleaseAllocator = [](EpFactory*, OrtAllocator*) {};
    CreateDataTransfer = [](EpFactory*, void** transfer) -> OrtStatus* {
      *transfer = nullptr;
      return nullptr;
    };
    IsStreamAware = [](const EpFactory*) { return false; };
  }
  const OrtApi* const api;
};

}  // namespace
}  // namespace quantmoe

extern "C" QM_API OrtStatus* CreateEpFactories(const char*, const OrtApiBase* base, const OrtLogger*,
                                               quantmoe::EpFactory** factories, size_t room, size_t* count) {
  const OrtApi* const api = base->GetApi(quantmoe::kProviderApi);
  *count = 0;
  if (!api) {
    const std::string message = std::string("quantmoe's execution provider needs ONNX Runtime 1.24 or newer, found ") +
                                base->GetVersionString();
    return base->GetApi(1)->CreateStatus(ORT_NOT_IMPLEMENTED, message.c_str());
  }
  return quantmoe::guard(api, [&] {
    if (room < 1) throw std::invalid_argument("quantmoe: no room for a provider's factory");
    factories[0] = new quantmoe::Factory(api);
    *count = 1;
  });
}

extern "C" QM_API OrtStatus* ReleaseEpFactory(quantmoe::EpFactory* factory) {
  delete static_cast<quantmoe::Factory*>(factory);
  return nullptr;
}
