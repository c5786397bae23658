// Preconditions that checking builds assert. Nothing a user of the Python package does breaks one: what
// comes from outside is checked where it enters, and refused with an exception.
#pragma once

#include <cstdio>
#include <cstdlib>

// KVPAGER_REQUIRE(condition): in a checking build (KVPAGER_CHECK_INVARIANTS) a condition that does not
// hold is printed with its file and line, and ends the process. In any other build it is compiled and
// never evaluated. It calls nothing of this project's, so that kernels of one instruction set share no
// function with those of another.
#ifdef KVPAGER_CHECK_INVARIANTS
#define KVPAGER_REQUIRE(...)                                                                  \
  ((__VA_ARGS__) ? static_cast<void>(0)                                                       \
                 : (std::fprintf(stderr, "%s:%d: precondition does not hold: %s\n", __FILE__, \
                                 __LINE__, #__VA_ARGS__),                                     \
                    std::abort()))
#else
#define KVPAGER_REQUIRE(...) static_cast<void>(sizeof(!(__VA_ARGS__)))
#endif
