# `cmake --install`: the libraries, the headers, and what find_package and pkg-config read.
include(GNUInstallDirs)
include(CMakePackageConfigHelpers)
set(config ${CMAKE_INSTALL_LIBDIR}/cmake/quantmoe)
foreach(kind ort ort_static)
  set_target_properties(quantmoe_${kind} PROPERTIES EXPORT_NAME ${kind})
  target_compile_definitions(quantmoe_${kind} INTERFACE QUANTMOE_LINKED)  # token_cache.h
endforeach()
install(TARGETS quantmoe_ort quantmoe_ort_static EXPORT quantmoe INCLUDES DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
install(TARGETS quantmoe)
install(EXPORT quantmoe FILE quantmoeTargets.cmake NAMESPACE quantmoe:: DESTINATION ${config})
install(DIRECTORY ort_ext/include/quantmoe packages/cpp/include/quantmoe packages/rust/text/include/quantmoe
  DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
install(FILES custom_ops/include/quantmoe/quant_moe.h DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/quantmoe)
install(FILES LICENSE THIRD_PARTY_NOTICES.txt DESTINATION ${CMAKE_INSTALL_DATADIR}/licenses/quantmoe)
install(FILES packages/cpp/CMakeLists.txt DESTINATION ${config})
configure_package_config_file(packages/cpp/quantmoeConfig.cmake.in quantmoeConfig.cmake INSTALL_DESTINATION ${config})
write_basic_package_version_file(quantmoeConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${CMAKE_CURRENT_BINARY_DIR}/quantmoeConfig.cmake ${CMAKE_CURRENT_BINARY_DIR}/quantmoeConfigVersion.cmake
  DESTINATION ${config})
# The library of `make text-library`, for COMPONENTS text.
set(QUANTMOE_TEXT_LIBRARY "" CACHE FILEPATH "libquantmoe_text.so, to be installed")
if(QUANTMOE_TEXT_LIBRARY)
  install(PROGRAMS ${QUANTMOE_TEXT_LIBRARY} DESTINATION ${CMAKE_INSTALL_LIBDIR})
endif()

# What a program that links the static library names, too.
set(static_needs ${CMAKE_CXX_IMPLICIT_LINK_LIBRARIES} ${KLEIDIAI_LIBRARY})
list(FILTER static_needs EXCLUDE REGEX "^(c|gcc|gcc_s)$")
list(TRANSFORM static_needs PREPEND -l REGEX "^[a-z]")
list(REMOVE_DUPLICATES static_needs)
list(JOIN static_needs " " static_needs)
string(APPEND static_needs " -pthread")
file(RELATIVE_PATH to_prefix /${CMAKE_INSTALL_LIBDIR}/pkgconfig /)
configure_file(packages/cpp/quantmoe.pc.in quantmoe.pc @ONLY)
install(FILES ${CMAKE_CURRENT_BINARY_DIR}/quantmoe.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)
