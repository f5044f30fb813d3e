// The entry points, and the registry of a TensorRT that is loaded when this library is only opened.
#include <dlfcn.h>
#include <link.h>

#include <algorithm>
#include <cstring>
#include <mutex>
#include <string>
#include <vector>

#include "plugin.h"

namespace quantmoe {

// The tables of IPluginRegistry. There are two, as for a logger: in TensorRT 10 functions of IPluginV2 come first, in
// 11 there are none.
struct PlainRegistryHead {
  virtual bool registerV2(void* creator, const char* name_space) noexcept = 0;
  virtual void* const* creatorsV2(int32_t* count) const noexcept = 0;
  virtual void* creatorV2(const char* name, const char* version, const char* name_space) noexcept = 0;
  virtual ~PlainRegistryHead() = default;
  virtual void setErrorRecorder(IErrorRecorder* recorder) noexcept = 0;
  virtual IErrorRecorder* getErrorRecorder() const noexcept = 0;
  virtual bool deregisterV2(const void* creator) noexcept = 0;
};
struct VersionedRegistryHead {
  virtual ~VersionedRegistryHead() = default;
  virtual void setErrorRecorder(IErrorRecorder* recorder) noexcept = 0;
  virtual IErrorRecorder* getErrorRecorder() const noexcept = 0;
};
template <class Head>
struct Registry : Head {
  virtual bool isParentSearchEnabled() const = 0;
  virtual void setParentSearchEnabled(bool enabled) = 0;
  virtual void* loadLibrary(const char* path) noexcept = 0;
  virtual void deregisterLibrary(void* library) noexcept = 0;
  virtual bool registerCreator(IPluginCreatorInterface& creator, const char* name_space) noexcept = 0;
  virtual IPluginCreatorInterface* const* getAllCreators(int32_t* count) const noexcept = 0;
  virtual IPluginCreatorInterface* getCreator(const char* name, const char* version,
                                              const char* name_space) noexcept = 0;
  virtual bool deregisterCreator(const IPluginCreatorInterface& creator) noexcept = 0;
};

namespace {

// Where the library with this code or data is; nullptr when none has it.
const void* library_of(const void* address) {
  Dl_info where;
  return dladdr(address, &where) ? where.dli_fbase : nullptr;
}
constexpr int32_t kOldest = 10000;  // TensorRT-RTX 1.0; 8 and 9 have no V3 creators: 8.6.1 is 8601

// A TensorRT's global registry.
struct Global {
  void* registry;
  bool versioned;

  template <class Use>
  bool with_registry(const Use& use) const {
    return versioned ? use(*static_cast<Registry<VersionedRegistryHead>*>(registry))
                     : use(*static_cast<Registry<PlainRegistryHead>*>(registry));
  }
};
// Those that hold the creators because this library was only opened: trtexec --staticPlugins, ONNX Runtime's
// trt_extra_plugin_lib_paths, dlopen.
std::mutex registered_mutex;
std::vector<Global>& registered() {
  static auto& registered = *new std::vector<Global>;
  return registered;
}

// Whether another copy of this library, an engine's for example, is registered. getCreator would log that it is not.
template <class AnyRegistry>
bool holds(const AnyRegistry& registry) {
  int32_t count = 0;
  IPluginCreatorInterface* const* creators = registry.getAllCreators(&count);
  return std::any_of(creators, creators + count, [](IPluginCreatorInterface* creator) {
    return !std::strcmp(creator->getInterfaceInfo().kind, "PLUGIN CREATOR_V3ONE") &&
           !std::strcmp(static_cast<IPluginCreatorV3One*>(creator)->getPluginName(), "QuantMoE");
  });
}

// Every TensorRT in the process; this library links to none.
void register_where_loaded() {
  std::vector<std::string> names;  // of what is loaded; "" is the program
  dl_iterate_phdr(
      [](dl_phdr_info* info, size_t, void* names) {
        static_cast<std::vector<std::string>*>(names)->emplace_back(info->dlpi_name);
        return 0;
      },
      &names);
  for (const std::string& name : names) {
    void* library = dlopen(name.empty() ? nullptr : name.c_str(), RTLD_LAZY | RTLD_NOLOAD);
    if (!library) continue;
    auto* get = reinterpret_cast<void* (*)()>(dlsym(library, "getPluginRegistry"));
    void* registry = get && dlsym(library, "getInferLibVersion") ? get() : nullptr;
    const int32_t version = registry ? library_version(registry) : 0;
    const Global global{registry, versioned(version)};
    const bool registers = version >= kOldest && global.with_registry([](auto& r) {
      if (holds(r)) return false;
      for (IPluginCreatorInterface* creator : creators()) r.registerCreator(*creator, "");
      return true;
    });
    if (registers) {
      registered().push_back(global);
      void* logger = dlsym(library, "getLogger");
      if (global.versioned) {
        versioned_logger = reinterpret_cast<VersionedLogger* (*)()>(logger);
      } else {
        plain_logger = reinterpret_cast<PlainLogger* (*)()>(logger);
      }
      continue;  // stays loaded: its registry and logger are used as long as this library is there
    }
    dlclose(library);
  }
}

// A registry that loads the library registers what getCreators returns, and refuses what is registered already. So the
// creators come from the TensorRT in this library, from no other. When that one deregisters the library, it has none.
void unregister(const void* tensorrt) {
  std::vector<Global> calling;
  {
    const std::lock_guard<std::mutex> lock(registered_mutex);
    std::vector<Global>& all = registered();
    const auto others = std::partition(all.begin(), all.end(), [&](const Global& global) {
      return library_of(table_of(global.registry)) != tensorrt;
    });
    calling.assign(others, all.end());
    all.erase(others, all.end());
  }
  for (const Global& global : calling)
    for (IPluginCreatorInterface* creator : creators())
      global.with_registry([&](auto& r) { return r.deregisterCreator(*creator); });
}

__attribute__((constructor)) void opened() {
  guard("quantmoe:", 0, [] {
    register_where_loaded();
    return 0;
  });
}

}  // namespace
}  // namespace quantmoe

extern "C" QM_API void setLoggerFinder(nvinfer1::ILoggerFinder* finder) {
  using namespace quantmoe;
  const int32_t version = finder ? library_version(finder) : 0;
  plain_finder = nullptr;
  versioned_finder = nullptr;
  if (versioned(version)) {
    versioned_finder = reinterpret_cast<VersionedLoggerFinder*>(finder);
  } else if (version) {
    plain_finder = reinterpret_cast<PlainLoggerFinder*>(finder);
  }
}

extern "C" QM_API nvinfer1::IPluginCreatorInterface* const* getCreators(int32_t& count) {
  using namespace quantmoe;
  count = 0;
  const void* caller = library_of(__builtin_return_address(0));
  return guard<IPluginCreatorInterface* const*>("quantmoe:", nullptr, [&] {
    unregister(caller);
    count = static_cast<int32_t>(creators().size());
    return creators().data();
  });
}
