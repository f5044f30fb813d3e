// Registers quantmoe_ort_cuda.dll with ONNX Runtime, and asks it for a GPU.
#include <windows.h>

#include <cstdio>
#include <initializer_list>

#include "onnxruntime_c_api.h"
#include "quantmoe/quant_moe_cuda.h"

namespace {

template <class F>
F* find(HMODULE library, const char* name) {
  return reinterpret_cast<F*>(reinterpret_cast<void*>(GetProcAddress(library, name)));
}

}  // namespace

int main() {
  const OrtApi* api = find<decltype(OrtGetApiBase)>(LoadLibraryA("onnxruntime.dll"), "OrtGetApiBase")()->GetApi(21);
  for (const char* experts : {"gpu", "host"}) {
    OrtSessionOptions* options;
    (void)api->CreateSessionOptions(&options);
    (void)api->AddSessionConfigEntry(options, "quantmoe.experts", experts);
    OrtStatus* status = api->RegisterCustomOpsLibrary_V2(options, L"quantmoe_ort_cuda.dll");
    std::printf("%s\n", status ? api->GetErrorMessage(status) : "registered");
  }
  char error[QM_ERROR_SIZE] = "a GPU";
  qm_cuda_device device;
  (void)find<decltype(qm_cuda_query)>(GetModuleHandleA("quantmoe_ort_cuda.dll"), "qm_cuda_query")(0, &device, error);
  std::printf("%s\n", error);
}
