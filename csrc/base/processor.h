// What this processor can run. Asked of it directly: __builtin_cpu_supports answers no to everything
// where zig's run-time library is linked, as in wheels. Include it in no file that is compiled for more
// than the baseline.
#pragma once

#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include <cstdint>

namespace kvpager {

struct Processor {
  int level = 1;      // of x86-64: 1, 3 or 4
  bool vnni = false;  // AVX-512's dot products of bytes
  bool bf16 = false;  // AVX-512's dot products of bfloat16; only beside vnni
  bool amx = false;   // AMX tiles of bfloat16
};

// Sources: Intel's Software Developer's Manual, volume 2A, CPUID, and volume 1, 13.3 (XCR0); the psABI of
// x86-64, table 3.1 (levels).
inline Processor ask_processor() {
  Processor found;
#if defined(__x86_64__)
  const auto all = [](uint32_t word, uint32_t bits) { return (word & bits) == bits; };
  const auto bit = [](int n) { return uint32_t{1} << n; };
  uint32_t eax = 0, basic = 0, extended = 0, seven_b = 0, seven_c = 0, seven_d = 0, spare = 0;
  if (__get_cpuid(1, &eax, &spare, &basic, &spare) == 0) return found;
  if (__get_cpuid_count(7, 0, &eax, &seven_b, &seven_c, &seven_d) == 0) return found;
  if (__get_cpuid(0x80000001u, &eax, &spare, &extended, &spare) == 0) return found;
  const uint32_t osxsave = bit(27);
  if (!all(basic, osxsave)) return found;
  uint32_t states = 0, high = 0;  // which registers the system saves
  __asm__ volatile("xgetbv" : "=a"(states), "=d"(high) : "c"(0));
  // SSE3, SSSE3, FMA, CMPXCHG16B, SSE4.1, SSE4.2, MOVBE, POPCNT, AVX, F16C; BMI1, AVX2, BMI2; LAHF, LZCNT
  const bool v3 = all(states, 0x6) &&
                  all(basic, bit(0) | bit(9) | bit(12) | bit(13) | bit(19) | bit(20) | bit(22) |
                                 bit(23) | bit(28) | bit(29)) &&
                  all(seven_b, bit(3) | bit(5) | bit(8)) && all(extended, bit(0) | bit(5));
  if (!v3) return found;
  found.level = 3;
  // AVX512F, DQ, CD, BW, VL
  if (all(states, 0xe6) && all(seven_b, bit(16) | bit(17) | bit(28) | bit(30) | bit(31))) {
    found.level = 4;
    found.vnni = all(seven_c, bit(11));
    uint32_t leaf_1_eax = 0;
    if (__get_cpuid_count(7, 1, &leaf_1_eax, &spare, &spare, &spare) != 0) {
      found.bf16 = found.vnni && all(leaf_1_eax, bit(5));
    }
    found.amx = all(states, bit(17) | bit(18)) && all(seven_d, bit(22) | bit(24));
  }
#endif
  return found;
}

// Asked once.
inline const Processor& processor() {
  static const Processor found = ask_processor();
  return found;
}

}  // namespace kvpager
