// ONNX Runtime's plug-in execution provider interface as far as the provider uses it: what 1.23 and 1.24 have added.
#pragma once
#include <cstddef>
#include <cstdint>

#include "common/ort_api.h"

struct OrtEpDevice;
struct OrtEpGraphSupportInfo;
struct OrtExternalInitializerInfo;
struct OrtGraph;
struct OrtHardwareDevice;
struct OrtNode;
struct OrtNodeComputeContext;
struct OrtValueInfo;

namespace quantmoe {

// ONNX Runtime 1.24: the library asks for its API. The structs below are of 1.23, and say so.
constexpr uint32_t kProviderApi = 24;
constexpr uint32_t kProviderStructs = 23;

struct EpFactory;

struct EpApi {
  OrtStatus*(ORT_API_CALL* CreateEpDevice)(EpFactory*, const OrtHardwareDevice*, const OrtKeyValuePairs* metadata,
                                           const OrtKeyValuePairs* options, OrtEpDevice**);
  void(ORT_API_CALL* ReleaseEpDevice)(OrtEpDevice*);
  OrtStatus*(ORT_API_CALL* EpGraphSupportInfo_AddNodesToFuse)(OrtEpGraphSupportInfo*, const OrtNode* const*, size_t,
                                                              const struct FusionOptions*);
};

struct GraphApi {
  explicit GraphApi(const OrtApi* api) : api(api) {}
  const OrtApi* api;
#define QM_ORT(place, name, ...) ApiFunction<place, __VA_ARGS__> name{api};
  QM_ORT(289, GetValueInfoName, OrtStatus* ORT_API_CALL(const OrtValueInfo*, const char**))
  QM_ORT(290, GetValueInfoTypeInfo, OrtStatus* ORT_API_CALL(const OrtValueInfo*, const OrtTypeInfo**))
  QM_ORT(307, HardwareDevice_Type, int ORT_API_CALL(const OrtHardwareDevice*))  // 0: a CPU
  QM_ORT(317, GetEpApi, const EpApi* ORT_API_CALL())
  QM_ORT(326, ValueInfo_GetInitializerValue, OrtStatus* ORT_API_CALL(const OrtValueInfo*, const OrtValue**))
  QM_ORT(327, ValueInfo_GetExternalInitializerInfo,
         OrtStatus* ORT_API_CALL(const OrtValueInfo*, OrtExternalInitializerInfo**))
  QM_ORT(331, ValueInfo_IsConstantInitializer, OrtStatus* ORT_API_CALL(const OrtValueInfo*, bool*))
  QM_ORT(334, Graph_GetModelPath, OrtStatus* ORT_API_CALL(const OrtGraph*, const ORTCHAR_T**))
  QM_ORT(344, Graph_GetNumNodes, OrtStatus* ORT_API_CALL(const OrtGraph*, size_t*))
  QM_ORT(345, Graph_GetNodes, OrtStatus* ORT_API_CALL(const OrtGraph*, const OrtNode**, size_t))
  QM_ORT(346, Graph_GetParentNode, OrtStatus* ORT_API_CALL(const OrtGraph*, const OrtNode**))
  QM_ORT(349, Node_GetName, OrtStatus* ORT_API_CALL(const OrtNode*, const char**))
  QM_ORT(350, Node_GetOperatorType, OrtStatus* ORT_API_CALL(const OrtNode*, const char**))
  QM_ORT(351, Node_GetDomain, OrtStatus* ORT_API_CALL(const OrtNode*, const char**))
  QM_ORT(353, Node_GetNumInputs, OrtStatus* ORT_API_CALL(const OrtNode*, size_t*))
  QM_ORT(354, Node_GetInputs, OrtStatus* ORT_API_CALL(const OrtNode*, const OrtValueInfo**, size_t))
  QM_ORT(361, Node_GetAttributeByName, OrtStatus* ORT_API_CALL(const OrtNode*, const char*, const OrtOpAttr**))
  QM_ORT(369, ReleaseExternalInitializerInfo, void ORT_API_CALL(OrtExternalInitializerInfo*))
  QM_ORT(370, ExternalInitializerInfo_GetFilePath, const ORTCHAR_T* ORT_API_CALL(const OrtExternalInitializerInfo*))
  QM_ORT(371, ExternalInitializerInfo_GetFileOffset, int64_t ORT_API_CALL(const OrtExternalInitializerInfo*))
  QM_ORT(372, ExternalInitializerInfo_GetByteSize, size_t ORT_API_CALL(const OrtExternalInitializerInfo*))
#undef QM_ORT
  void check(OrtStatus* status) const { quantmoe::check(api, status); }
};

struct FusionOptions {
  uint32_t ort_version_supported = kProviderStructs;
  bool drop_constant_initializers = true;  // ONNX Runtime releases its own, and does not load those in data files
};

struct NodeComputeInfo {
  uint32_t ort_version_supported = kProviderStructs;
  OrtStatus*(ORT_API_CALL* CreateState)(NodeComputeInfo*, OrtNodeComputeContext*, void** state) = nullptr;
  OrtStatus*(ORT_API_CALL* Compute)(NodeComputeInfo*, void* state, OrtKernelContext*) = nullptr;
  void(ORT_API_CALL* ReleaseState)(NodeComputeInfo*, void* state) = nullptr;
};

// Null: ONNX Runtime does what it does without.
struct Ep {
  uint32_t ort_version_supported = kProviderStructs;
  const char*(ORT_API_CALL* GetName)(const Ep*) = nullptr;
  OrtStatus*(ORT_API_CALL* GetCapability)(Ep*, const OrtGraph*, OrtEpGraphSupportInfo*) = nullptr;
  OrtStatus*(ORT_API_CALL* Compile)(Ep*, const OrtGraph**, const OrtNode** fused, size_t count, NodeComputeInfo**,
                                    OrtNode** contexts) = nullptr;
  void(ORT_API_CALL* ReleaseNodeComputeInfos)(Ep*, NodeComputeInfo**, size_t) = nullptr;
  void* others[8] = {};     // to GetCompiledModelCompatibilityInfo, of 1.23
  void* of_later[24] = {};  // not read by a runtime that believes ort_version_supported
};

struct EpFactory {
  uint32_t ort_version_supported = kProviderStructs;
  const char*(ORT_API_CALL* GetName)(const EpFactory*) = nullptr;
  const char*(ORT_API_CALL* GetVendor)(const EpFactory*) = nullptr;
  OrtStatus*(ORT_API_CALL* GetSupportedDevices)(EpFactory*, const OrtHardwareDevice* const*, size_t count,
                                                OrtEpDevice**, size_t room, size_t* found) = nullptr;
  OrtStatus*(ORT_API_CALL* CreateEp)(EpFactory*, const OrtHardwareDevice* const*, const OrtKeyValuePairs* const*,
                                     size_t count, const OrtSessionOptions*, const OrtLogger*, Ep**) = nullptr;
  void(ORT_API_CALL* ReleaseEp)(EpFactory*, Ep*) = nullptr;
  uint32_t(ORT_API_CALL* GetVendorId)(const EpFactory*) = nullptr;
  const char*(ORT_API_CALL* GetVersion)(const EpFactory*) = nullptr;
  void* ValidateCompiledModelCompatibilityInfo = nullptr;
  OrtStatus*(ORT_API_CALL* CreateAllocator)(EpFactory*, const OrtMemoryInfo*, const OrtKeyValuePairs*,
                                            OrtAllocator**) = nullptr;
  void(ORT_API_CALL* ReleaseAllocator)(EpFactory*, OrtAllocator*) = nullptr;
  OrtStatus*(ORT_API_CALL* CreateDataTransfer)(EpFactory*, void**) = nullptr;
  bool(ORT_API_CALL* IsStreamAware)(const EpFactory*) = nullptr;
  void* CreateSyncStreamForDevice = nullptr;
  void* of_later[24] = {};
};

}  // namespace quantmoe
