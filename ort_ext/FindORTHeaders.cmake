# ORT_INCLUDE_DIR: the folder of onnxruntime_c_api.h, API 21 (ONNX Runtime 1.21) or newer. Only headers are needed: the
# library gets every function from the runtime that loads it. In this order: -DORT_INCLUDE_DIR, ORT_ROOT (variable or environment), an
# unpacked release archive or NuGet package, the system's libonnxruntime-dev, the same package unpacked into this repository's build folder from a newer release of the distribution.
# Also runs by itself (cmake -P), before a build whose output is not seen.
set(ORT_MINIMUM_API 21)

function(ort_find)
  unset(ORT_INCLUDE_DIR CACHE)
  find_path(ORT_INCLUDE_DIR onnxruntime_c_api.h ${ARGN}
    PATH_SUFFIXES build/native/include include/onnxruntime include/onnxruntime/core/session include onnxruntime onnxruntime/core/session)
  if(ORT_INCLUDE_DIR)
    file(STRINGS ${ORT_INCLUDE_DIR}/onnxruntime_c_api.h api REGEX "^#define ORT_API_VERSION")
    string(REGEX MATCH "[0-9]+" api "${api}")
    if(NOT api OR api LESS ORT_MINIMUM_API)
      message(STATUS "ONNX Runtime headers in ${ORT_INCLUDE_DIR} are API ${api}; ${ORT_MINIMUM_API} is needed")
      unset(ORT_INCLUDE_DIR CACHE)
    endif()
  endif()
endfunction()

get_filename_component(ort_fetched ${CMAKE_CURRENT_LIST_DIR}/../build/onnxruntime_headers ABSOLUTE)
if(ORT_INCLUDE_DIR AND NOT ORT_INCLUDE_DIR STREQUAL "${ort_found}")  # it was given: the last run did not find it
  ort_find(HINTS ${ORT_INCLUDE_DIR} NO_DEFAULT_PATH)
else()
  if(ORT_ROOT OR DEFINED ENV{ORT_ROOT})
    ort_find(HINTS ${ORT_ROOT} $ENV{ORT_ROOT} NO_DEFAULT_PATH)
  else()
    execute_process(COMMAND ldd --version OUTPUT_VARIABLE ort_libc ERROR_VARIABLE ort_libc RESULT_VARIABLE ort_ldd)  # musl's fails
    if(ort_libc MATCHES "^musl")
      message(FATAL_ERROR "This system has musl, as Alpine does. QuantMoE's and ONNX Runtime's libraries need glibc: build on Debian or "
        "Ubuntu, or set ORT_ROOT to an ONNX Runtime that you built for musl, which is not tested")
    endif()
    ort_find(HINTS ${ort_fetched} PATHS /usr/local /usr)
    if(NOT ORT_INCLUDE_DIR)
      execute_process(COMMAND sh ${CMAKE_CURRENT_LIST_DIR}/onnxruntime_headers.sh ${ort_fetched} ERROR_VARIABLE ort_log)
      ort_find(HINTS ${ort_fetched})
    endif()
  endif()
  set(ort_found "${ORT_INCLUDE_DIR}" CACHE INTERNAL "")
endif()
if(NOT ORT_INCLUDE_DIR)
  message(FATAL_ERROR "No ONNX Runtime headers (onnxruntime_c_api.h, API ${ORT_MINIMUM_API} or newer). Unpack a release archive "
    "or NuGet package of ONNX Runtime 1.21 or newer, or install libonnxruntime-dev, and set ORT_ROOT (environment or -DORT_ROOT=) to its "
    "folder, or -DORT_INCLUDE_DIR= to the folder of the headers.\n${ort_log}")
endif()
message(STATUS "ONNX Runtime headers: ${ORT_INCLUDE_DIR}")
