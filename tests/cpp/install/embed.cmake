# Builds and runs examples/cpp against an installed copy, as a user would: with find_package alone.
#   cmake -DPREFIX=... -DEXAMPLE=examples/cpp -DBINARY=... -DGENERATOR=Ninja -DCXX=g++ -P embed.cmake
file(REMOVE_RECURSE ${BINARY})
execute_process(
  COMMAND ${CMAKE_COMMAND} -S ${EXAMPLE} -B ${BINARY} -G ${GENERATOR} -DCMAKE_CXX_COMPILER=${CXX}
          -DCMAKE_PREFIX_PATH=${PREFIX}
  COMMAND_ERROR_IS_FATAL ANY)
file(STRINGS ${BINARY}/CMakeCache.txt found REGEX "^kvpager_DIR:")
if(NOT found MATCHES "=${PREFIX}/")
  message(FATAL_ERROR "another kvpager was found: ${found}, expected the one in ${PREFIX}")
endif()
execute_process(COMMAND ${CMAKE_COMMAND} --build ${BINARY} COMMAND_ERROR_IS_FATAL ANY)
execute_process(COMMAND ${BINARY}/embed COMMAND_ERROR_IS_FATAL ANY)
