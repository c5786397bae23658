# Fails if an object compiled for a wider instruction set defines a weak function (an inline function
# or template) outside its own isa_* namespace: the linker could pick that copy for everybody.
set(escaped)
if(NOT OBJECTS)
  message(FATAL_ERROR "no objects to check")
endif()
foreach(object IN LISTS OBJECTS)
  execute_process(COMMAND ${NM} --demangle --defined-only ${object}
                  OUTPUT_VARIABLE listing COMMAND_ERROR_IS_FATAL ANY)
  # Brackets and semicolons mean something in CMake lists.
  string(REGEX REPLACE "[][;]" "," listing "${listing}")
  string(REGEX MATCHALL " W [^\n]*" lines "${listing}")
  list(FILTER lines EXCLUDE REGEX "isa_v[34]")
  foreach(line IN LISTS lines)
    list(APPEND escaped "${object}:${line}")
  endforeach()
endforeach()
if(escaped)
  list(JOIN escaped "\n  " text)
  message(FATAL_ERROR "shared inline functions in instruction-set specific objects:\n  ${text}")
endif()
message(STATUS "no shared inline functions")
