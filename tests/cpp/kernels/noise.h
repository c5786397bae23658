// Numbers for tests that are the same on every machine and with every standard library.
#pragma once

#include <cstdint>

namespace kvpager::testing {

// In (-1, 1), with 24 significant bits, a function of where it stands.
inline float noise(uint64_t a, uint64_t b = 0, uint64_t c = 0, uint64_t d = 0) {
  uint64_t x = (((a * 1000003 + b) * 1000003 + c) * 1000003 + d) * 0x9E3779B97F4A7C15ull;
  x ^= x >> 29;
  x *= 0xBF58476D1CE4E5B9ull;
  x ^= x >> 32;
  return static_cast<float>(static_cast<double>(x >> 40) / (1 << 23)) - 1.0f;
}

}  // namespace kvpager::testing
