// Rounds to nearest and keeps denormals while it lives, whatever the calling thread's settings are:
// a process that flushes denormals on one thread would otherwise get other bits from that thread.
#pragma once

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace kvpager {

class FloatEnvironment {
 public:
#if defined(__x86_64__)
  FloatEnvironment() : saved_(_mm_getcsr()) { _mm_setcsr(0x1F80); }
  ~FloatEnvironment() { _mm_setcsr(saved_); }
#else
  FloatEnvironment() = default;
#endif
  FloatEnvironment(const FloatEnvironment&) = delete;
  FloatEnvironment& operator=(const FloatEnvironment&) = delete;

#if defined(__x86_64__)
 private:
  unsigned int saved_;
#endif
};

}  // namespace kvpager
