# Whether the tests notice when a barrier is missing: leaves out one after the other, by its line.
#   cmake -DTEST=cuda_test -DSOURCES=csrc/cuda -P barriers.cmake
# The shim cannot show that a barrier is needed between a warp collective and what follows: to it, every
# collective is a barrier. Those lines say so: "collectives do not order memory". "for racecheck" are
# those without which every interleaving gives the same result; "for registers" order nothing.
# With -DRACES=ON, and the shim that finds races in KVPAGER_DEVICE_PATH, a report of a race is what counts,
# and only the last kind and those "of global memory" are passed over. -DFILES=a.cu,b.cuh: these alone.
cmake_minimum_required(VERSION 3.22...3.31)
set(ENV{KVPAGER_TEST_DEVICES} shim)
file(GLOB sources ${SOURCES}/*.cu ${SOURCES}/*.cuh)
string(REPLACE "," ";" FILES "${FILES}")
if(RACES)
  set(not_for_tests "for registers|of global memory")
else()
  set(not_for_tests "do not order memory|for (racecheck|registers)")
endif()
set(unnoticed)
set(passed)
set(count 0)

# Sets `result`. A test that hangs has noticed.
macro(run_tests small seed)
  set(ENV{KVPAGER_TEST_SMALL} ${small})
  set(ENV{KVPAGER_SHIM_SEED} ${seed})
  execute_process(COMMAND ${TEST} --source-file=${tests} --abort-after=1
    RESULT_VARIABLE result OUTPUT_VARIABLE output ERROR_VARIABLE output TIMEOUT 300)
  # With an address that nobody has written yet a reader crashes before the writer comes.
  if(RACES AND NOT output MATCHES "race on byte|SIGSEGV|misaligned 0x")
    set(result 0)
  endif()
endmacro()

foreach(source IN LISTS sources)
  get_filename_component(name ${source} NAME)
  if(FILES AND NOT name IN_LIST FILES)
    continue()
  endif()
  if(name MATCHES "^attend_(reference|tensor)")
    set(tests "*/attend_${CMAKE_MATCH_1}_test.cc")
  elseif(name MATCHES "^(write_rows|summarize|rotate|linear)")
    set(tests "*/${CMAKE_MATCH_1}_test.cc")
  else()
    set(tests "*/select_test.cc")
  endif()
  file(READ ${source} text)
  string(REGEX REPLACE "[][;\\]" " " text "${text}")
  string(REPLACE "\n" ";" lines "${text}")
  set(number 0)
  foreach(line IN LISTS lines)
    math(EXPR number "${number} + 1")
    if(NOT line MATCHES " sync_(block|warp)\\(\\)"
       OR line MATCHES "${not_for_tests}")
      continue()
    endif()
    if(NOT RACES AND NOT tests IN_LIST passed)
      # What fails anyway would seem to notice everything.
      unset(ENV{KVPAGER_SHIM_WITHOUT})
      run_tests(0 1)
      if(NOT result EQUAL 0 OR output MATCHES "test cases: +0 ")
        message(FATAL_ERROR "${tests} fails, or is empty, with all barriers: ${output}")
      endif()
      list(APPEND passed ${tests})
    endif()
    math(EXPR count "${count} + 1")
    set(ENV{KVPAGER_SHIM_WITHOUT} "${name}:${number}")
    run_tests(1 1)  # enough for most, and quick
    foreach(seed RANGE 1 3)
      if(result EQUAL 0 AND NOT RACES)  # a race shows in any order
        run_tests(0 ${seed})
      endif()
    endforeach()
    if(result EQUAL 0)
      message("unnoticed: ${name}:${number}: ${line}")
      list(APPEND unnoticed "${name}:${number}")
    endif()
  endforeach()
endforeach()
list(LENGTH unnoticed missed)
message("${count} barriers left out, ${missed} unnoticed")
if(unnoticed OR count EQUAL 0)
  message(FATAL_ERROR "no test fails without ${unnoticed}")
endif()
