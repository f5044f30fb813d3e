# TENSORRT_INCLUDE_DIR: the folder of NvInfer.h. Only headers are needed, and any of TensorRT 10, 11 or TensorRT-RTX do: the interfaces
# that a plug-in implements are the same in all (logger.h and library.cc say where they are not). In this order: TENSORRT_ROOT (variable or
# environment), the system's, the headers in the Rust crate trtx-sys, fetched by cargo into the build tree.
set(trt_crate "0.9.1+rtx1.7")
set(trt_sysroot ${CMAKE_BINARY_DIR}/tensorrt_headers)
set(trt_folder vendor/trtx-sys/TensorRT-Headers/TRT-RTX-1.7)

function(trt_find)
  find_path(TENSORRT_INCLUDE_DIR NvInferRuntimePlugin.h ${ARGN} PATH_SUFFIXES include include/x86_64-linux-gnu)
endfunction()

if(TENSORRT_ROOT OR DEFINED ENV{TENSORRT_ROOT})
  trt_find(HINTS ${TENSORRT_ROOT} $ENV{TENSORRT_ROOT} NO_DEFAULT_PATH)
else()
  trt_find(HINTS ${trt_sysroot}/${trt_folder})
  function(trt_cargo_runs result path)  # rustup's shim fails where the user has no default toolchain
    execute_process(COMMAND ${path} --version RESULT_VARIABLE failed OUTPUT_QUIET ERROR_QUIET)
    if(failed)
      set(${result} FALSE PARENT_SCOPE)
    endif()
  endfunction()
  find_program(CARGO cargo VALIDATOR trt_cargo_runs)
  if(NOT TENSORRT_INCLUDE_DIR AND CARGO)
    message(STATUS "Fetching the TensorRT headers of trtx-sys ${trt_crate} into ${trt_sysroot}")
    file(WRITE ${trt_sysroot}/Cargo.toml "[package]\nname = \"headers\"\nversion = \"0.0.0\"\nedition = \"2021\"\n"
      "[lib]\npath = \"lib.rs\"\n[dependencies]\ntrtx-sys = \"=${trt_crate}\"\n")
    file(WRITE ${trt_sysroot}/lib.rs "")
    execute_process(COMMAND ${CARGO} vendor vendor WORKING_DIRECTORY ${trt_sysroot} OUTPUT_VARIABLE trt_log ERROR_VARIABLE trt_log)
    trt_find(HINTS ${trt_sysroot}/${trt_folder})
  endif()
endif()
if(NOT TENSORRT_INCLUDE_DIR)
  message(FATAL_ERROR "No TensorRT headers (NvInferRuntimePlugin.h). Set TENSORRT_ROOT (environment or -DTENSORRT_ROOT=) to the folder of "
    "TensorRT 10, 11 or TensorRT-RTX, or install cargo (rustup: with a default toolchain).\n${trt_log}")
endif()
message(STATUS "TensorRT headers: ${TENSORRT_INCLUDE_DIR}")
