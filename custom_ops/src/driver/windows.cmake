# CUDA for Windows, built on Linux without MSVC. QUANTMOE_CUDA_BUILD is the folder that `make cuda` has filled: nvcc's
# objects there have the device code. PyPI's clang compiles host code beside it; what it calls of CUDA's runtime is in
# runtime.cc.
set(QUANTMOE_CUDA_BUILD ${PROJECT_SOURCE_DIR}/build/cuda CACHE PATH "The CUDA build for Linux")
load_cache(${QUANTMOE_CUDA_BUILD} READ_WITH_PREFIX linux_ CMAKE_CUDA_COMPILER)
get_filename_component(cuda_include ${linux_CMAKE_CUDA_COMPILER}/../../include ABSOLUTE)
set(CMAKE_CUDA_TOOLKIT_INCLUDE_DIRECTORIES ${CMAKE_CURRENT_LIST_DIR}/host ${cuda_include})
add_compile_definitions(__NV_NO_HOST_COMPILER_CHECK)
find_program(OBJCOPY objcopy REQUIRED)

# zig's command takes no CUDA. The clang inside does, and finds neither its headers nor their settings.
separate_arguments(zig_arguments UNIX_COMMAND "${CMAKE_CXX_COMPILER_ARG1}")
execute_process(COMMAND ${CMAKE_CXX_COMPILER} ${zig_arguments} -E -v -x c++ /dev/null OUTPUT_QUIET ERROR_VARIABLE said
  WORKING_DIRECTORY ${PROJECT_SOURCE_DIR})
string(REGEX MATCHALL "-(isystem|D) [^ ]+" found "${said}")
foreach(flag ${found})
  string(REGEX REPLACE "^-(isystem|D) " "" value ${flag})
  if(flag MATCHES "^-D")
    list(APPEND zig_flags -D${value})
  else()  # zig's own paths may be relative
    cmake_path(ABSOLUTE_PATH value BASE_DIRECTORY ${PROJECT_SOURCE_DIR})
    list(APPEND zig_flags -isystem ${value})
  endif()
endforeach()
set(host_flags --target=x86_64-w64-windows-gnu -x cuda --cuda-host-only -nocudainc -nocudalib -nostdinc -nostdinc++
  -Xclang -target-sdk-version=12.8 -isystem ${CMAKE_CURRENT_LIST_DIR}/host ${zig_flags} -isystem ${cuda_include}
  -include cuda_runtime.h -D__NV_NO_HOST_COMPILER_CHECK -DNDEBUG -std=c++20 -O2 -fvisibility=hidden -Wno-deprecated-volatile)

# The objects of .cu files of the current folder; their device code is what nvcc made of them for `target`. Beside each
# are its fatbin, and the layouts of its structs, which tests/windows/cuda reads.
function(quantmoe_windows_objects objects target)
  set(built ${QUANTMOE_CUDA_BUILD}/custom_ops/CMakeFiles/${target}.dir)
  foreach(source ${ARGN})
    cmake_path(RELATIVE_PATH source OUTPUT_VARIABLE name)
    set(object ${CMAKE_CURRENT_BINARY_DIR}/windows/${name}.obj)
    get_filename_component(folder ${object} DIRECTORY)
    file(MAKE_DIRECTORY ${folder})
    add_custom_command(OUTPUT ${object} DEPENDS ${source} ${built}/${name}.o DEPFILE ${object}.d
      COMMAND ${OBJCOPY} --output-target=binary --only-section=.nv_fatbin ${built}/${name}.o ${object}.fatbin
      COMMAND ${CMAKE_CXX_COMPILER} clang ${host_flags} -I${CMAKE_CURRENT_SOURCE_DIR}/include
        -I${CMAKE_CURRENT_SOURCE_DIR}/src -I${CMAKE_CURRENT_SOURCE_DIR} -I${CMAKE_BINARY_DIR}/operators
        -Xclang -fcuda-include-gpubinary -Xclang ${object}.fatbin -Xclang -fdump-record-layouts-canonical
        -MD -MF ${object}.d -MT ${object} -c ${source} -o ${object} > ${object}.layouts
      COMMENT "Host code of ${name}")
    list(APPEND all ${object})
  endforeach()
  set(${objects} ${all} PARENT_SCOPE)
endfunction()
