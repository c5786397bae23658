// What a calling thread may have done to its floating-point unit before it calls the kernels.
#pragma once

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace kvpager::testing {

// Bits of MXCSR.
inline constexpr unsigned kPlainMode = 0x1F80;  // round to nearest, denormals kept, nothing traps

struct NamedMode {
  const char* name;
  unsigned bits;
};

inline constexpr NamedMode kModes[] = {
    {"plain", kPlainMode},
    {"flushes denormals", 0x1F80 | 0x8040},
    {"rounds down", 0x1F80 | 0x2000},
    {"rounds up and flushes denormals", 0x1F80 | 0x4000 | 0x8040},
    {"rounds to zero", 0x1F80 | 0x6000},
    {"traps every exception", 0},
};

// The calling thread is in a mode while it lives. Threads it starts inherit the mode.
class FloatMode {
 public:
#if defined(__x86_64__)
  explicit FloatMode(unsigned bits) : saved_(_mm_getcsr()) { _mm_setcsr(bits); }
  ~FloatMode() { _mm_setcsr(saved_); }
#else
  explicit FloatMode(unsigned) {}
#endif
  FloatMode(const FloatMode&) = delete;
  FloatMode& operator=(const FloatMode&) = delete;

#if defined(__x86_64__)
 private:
  unsigned saved_;
#endif
};

}  // namespace kvpager::testing
