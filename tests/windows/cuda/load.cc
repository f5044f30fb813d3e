// Opens the library that is named and asks for a GPU.
#include <windows.h>

#include <cstdio>

#include "quantmoe/quant_moe_cuda.h"

int main(int, char** arguments) {
  const HMODULE library = LoadLibraryA(arguments[1]);
  if (!library || !GetProcAddress(library, "RegisterCustomOps")) return 1;
  const auto query =
      reinterpret_cast<decltype(qm_cuda_query)*>(reinterpret_cast<void*>(GetProcAddress(library, "qm_cuda_query")));
  char error[QM_ERROR_SIZE];
  qm_cuda_device device;
  if (query(0, &device, error) == QM_OK) return 1;
  std::printf("%s\n", error);
}
