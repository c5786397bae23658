// The float steps that summaries and prepared queries are made of, each one IEEE operation, as
// kernels/bits2.cc has them.
#pragma once

#include <cmath>

#include "cuda/portable.h"

namespace kvpager::gpu::scoring {

inline constexpr double kNegligible = 1e-30;
inline constexpr float kLargestFloat = 3.402823466385288598e38f;

// NaN becomes 0 and infinity the largest finite value.
KVP_DEVICE float finite(float x) {
  if (x != x) return 0.0f;
  if (x > kLargestFloat) return kLargestFloat;
  if (x < -kLargestFloat) return -kLargestFloat;
  return x;
}

// 16 aligned bytes.
struct __attribute__((may_alias, aligned(16))) Words {
  uint32_t w[4];
};
KVP_DEVICE Words load_words(const void* at) { return *static_cast<const Words*>(at); }

KVP_DEVICE float half_to_float(uint32_t bits, DType dtype) {
  return dtype == DType::kFloat16 ? float16_bits_to_float(static_cast<uint16_t>(bits))
                                  : bfloat16_bits_to_float(static_cast<uint16_t>(bits));
}

KVP_DEVICE float element_to_float(const void* data, DType dtype, int64_t index) {
  if (dtype == DType::kFloat32) return static_cast<const float*>(data)[index];
  return half_to_float(static_cast<const uint16_t*>(data)[index], dtype);
}

// The least float with 16 significant bits that is >= largest / levels; 0 where largest counts as
// zero.
KVP_DEVICE float short_scale(double largest, int levels) {
  if (!(largest >= kNegligible)) return 0.0f;
  const uint32_t bits = float_to_bits(static_cast<float>(largest / levels));
  const uint32_t rounded = (bits + 0xFFu) & ~0xFFu;
  const float shortened = bits_to_float(rounded);
  return static_cast<double>(shortened) * levels >= largest ? shortened
                                                            : bits_to_float(rounded + 0x100u);
}

// value / scale to the nearest integer, ties to even, within [-limit, limit]; 0 for scale 0.
KVP_DEVICE int32_t quantize(double value, float scale, int32_t limit) {
  if (scale == 0.0f) return 0;
  const double code = nearbyint(value / static_cast<double>(scale));
  if (code > limit) return limit;
  if (code < -limit) return -limit;
  return static_cast<int32_t>(code);
}

// A query's code in a group whose largest magnitude is `largest`, with inverse = 127 / largest.
// Adding 1.5 * 2^23 rounds to the nearest integer, ties to even, and leaves it in the low bits.
KVP_DEVICE int32_t query_code(float q, float inverse) {
  const float product = finite(q) * inverse;
  const float shifted = product + 12582912.0f;
  const int32_t code = static_cast<int32_t>(float_to_bits(shifted)) - 0x4B400000;
  return code > 127 ? 127 : code < -127 ? -127 : code;
}

KVP_DEVICE double larger(double a, double b) { return b > a ? b : a; }

}  // namespace kvpager::gpu::scoring
