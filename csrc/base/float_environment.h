// Rounds to nearest and keeps denormals (or takes them for zeros, as operands and results) while it lives, whatever the calling thread's settings are:
// a process that flushes denormals on one thread would otherwise get other bits from that thread.
#pragma once

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace kvpager {

class FloatEnvironment {
 public:
#if defined(__x86_64__)
  explicit FloatEnvironment(bool flush_denormals = false) : saved_(_mm_getcsr()) {
    _mm_setcsr(flush_denormals ? 0x1F80 | 0x8040 : 0x1F80);
  }
  ~FloatEnvironment() { _mm_setcsr(saved_); }
#else
  explicit FloatEnvironment(bool = false) {}
#endif
  FloatEnvironment(const FloatEnvironment&) = delete;
  FloatEnvironment& operator=(const FloatEnvironment&) = delete;

#if defined(__x86_64__)
 private:
  unsigned int saved_;
#endif
};

}  // namespace kvpager
