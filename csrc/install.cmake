# What C++ projects link: kvpager::kvpager (the pager) and kvpager::compute (linear layers and
# programs), each one static library, from `find_package(kvpager)` or `add_subdirectory`. Of how they
# were compiled a project inherits nothing but the headers' folder, C++17 and threads.

# kvpager_add_library(<name> ROOMS <room>...)
function(kvpager_add_library name)
  cmake_parse_arguments(PARSE_ARGV 1 arg "" "" "ROOMS")
  set(objects)
  foreach(room IN LISTS arg_ROOMS)
    get_target_property(of_room kvpager_${room} KVPAGER_OBJECTS)
    list(APPEND objects ${of_room})
  endforeach()
  add_library(${name} STATIC ${objects})
  set_target_properties(${name} PROPERTIES LINKER_LANGUAGE CXX)
  target_include_directories(${name} INTERFACE
    $<BUILD_INTERFACE:${CMAKE_CURRENT_SOURCE_DIR}/include>
    $<INSTALL_INTERFACE:${CMAKE_INSTALL_INCLUDEDIR}>)
  target_compile_features(${name} INTERFACE cxx_std_17)
  target_link_libraries(${name} INTERFACE Threads::Threads)
endfunction()

kvpager_add_library(kvpager_library ROOMS base hash layout kernels memory core snapshot device pager)
target_link_libraries(kvpager_library INTERFACE ${CMAKE_DL_LIBS})
set_target_properties(kvpager_library PROPERTIES OUTPUT_NAME kvpager EXPORT_NAME kvpager)
kvpager_add_library(kvpager_compute_library ROOMS compute)
target_link_libraries(kvpager_compute_library INTERFACE kvpager_library)
set_target_properties(kvpager_compute_library PROPERTIES OUTPUT_NAME kvpager_compute EXPORT_NAME compute)
if(KVPAGER_SANITIZE)
  target_link_options(kvpager_library INTERFACE -fsanitize=${KVPAGER_SANITIZE})
endif()

add_library(kvpager::kvpager ALIAS kvpager_library)
add_library(kvpager::compute ALIAS kvpager_compute_library)

if(NOT KVPAGER_INSTALL)
  set_target_properties(kvpager_library kvpager_compute_library PROPERTIES EXCLUDE_FROM_ALL ON)
  return()
endif()

include(CMakePackageConfigHelpers)
set(folder ${CMAKE_INSTALL_LIBDIR}/cmake/kvpager)
install(TARGETS kvpager_library kvpager_compute_library EXPORT kvpager
        ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR} COMPONENT cpp)
# The headers are copied when an archive was made, and installed from there: libraries that were built
# before the sources changed are never installed with the headers of today.
set(headers ${CMAKE_CURRENT_BINARY_DIR}/include)
add_custom_command(OUTPUT ${headers}.stamp
  COMMAND ${CMAKE_COMMAND} -E rm -rf ${headers}
  COMMAND ${CMAKE_COMMAND} -E copy_directory ${CMAKE_CURRENT_SOURCE_DIR}/include ${headers}
  COMMAND ${CMAKE_COMMAND} -E touch ${headers}.stamp
  DEPENDS kvpager_library kvpager_compute_library)
add_custom_target(kvpager_headers ALL DEPENDS ${headers}.stamp)
install(DIRECTORY ${headers}/kvpager DESTINATION ${CMAKE_INSTALL_INCLUDEDIR} COMPONENT cpp
        FILES_MATCHING PATTERN "*.h")
install(EXPORT kvpager NAMESPACE kvpager:: FILE kvpagerTargets.cmake DESTINATION ${folder} COMPONENT cpp)
file(WRITE ${CMAKE_CURRENT_BINARY_DIR}/kvpagerConfig.cmake [[
include(CMakeFindDependencyMacro)
set(THREADS_PREFER_PTHREAD_FLAG ON)
find_dependency(Threads)
include(${CMAKE_CURRENT_LIST_DIR}/kvpagerTargets.cmake)
]])
# Before 1.0 a minor version may change what a project calls.
write_basic_package_version_file(${CMAKE_CURRENT_BINARY_DIR}/kvpagerConfigVersion.cmake
                                 COMPATIBILITY SameMinorVersion)
install(FILES ${CMAKE_CURRENT_BINARY_DIR}/kvpagerConfig.cmake
              ${CMAKE_CURRENT_BINARY_DIR}/kvpagerConfigVersion.cmake
        DESTINATION ${folder} COMPONENT cpp)
