// Keys and values in 8 and 4 bits, as kvpager/codes.h has them: integers, and the few float steps of
// kernels/codes_isa.cc and kernels/attend_codes_isa.h, each one IEEE operation.
#pragma once

#include "cuda/portable.h"
#include "kvpager/codes.h"

namespace kvpager::gpu::codes {

// kvpager::is_coded, which is a function of the host.
KVP_DEVICE bool coded(DType dtype) { return dtype == DType::kQ8 || dtype == DType::kQ4; }

// What is below this counts as zero: it has no inverse.
inline constexpr float kNegligible = 1e-30f;
inline constexpr uint32_t kInfinityBits = 0x7F800000u;

KVP_DEVICE uint32_t magnitude_bits(float x) { return float_to_bits(x) & 0x7FFFFFFFu; }

// Of a warp's lanes. Magnitudes are ordered as their bits are.
KVP_DEVICE uint32_t largest_of_warp(uint32_t bits) {
  for (int mask = 16; mask > 0; mask /= 2) {
    const uint32_t other = shuffle_xor(bits, mask);
    bits = other > bits ? other : bits;
  }
  return bits;
}

// x * factor to the nearest integer, ties to even: adding 1.5 * 2^23 leaves it in the low bits.
KVP_DEVICE int32_t rounded(float x, float factor) {
  const float product = x * factor;
  return static_cast<int32_t>(float_to_bits(product + 12582912.0f)) - 0x4B400000;
}

// What makes numbers of this largest magnitude integers of 16 bits, and what one of them is worth.
struct Unit {
  float factor;
  float worth;
};
KVP_DEVICE Unit unit_of(uint32_t largest) {
  if (largest >= kInfinityBits) return {0.0f, bits_to_float(0x7FC00000u)};
  const float value = bits_to_float(largest);
  if (value < kNegligible) return {0.0f, 0.0f};
  return {div_rn(32767.0f, value), div_rn(value, 32767.0f)};
}

// Integers where floats lie.
KVP_DEVICE float as_float(int32_t x) { return bits_to_float(static_cast<uint32_t>(x)); }
KVP_DEVICE int32_t as_int(float x) { return static_cast<int32_t>(float_to_bits(x)); }

KVP_DEVICE int32_t level_of(uint32_t code) {
  const uint64_t levels = code < 8 ? kQ4LowLevels : kQ4HighLevels;
  return static_cast<int8_t>(levels >> (8 * (code & 7u)) & 0xFFu);
}

// A row of up to 512 numbers in a warp: lane i has the numbers i, i + 32, ...
inline constexpr int kWarp = 32;
inline constexpr int kRowVectors = 16;

// kernels/codes_isa.cc: rotate. Lanes past the row's end keep zeros.
KVP_DEVICE void rotate_row(float* x, int dim) {
  const int block = dim & -dim;
  for (int step = 1; step < kWarp && step < block; step *= 2) {
    KVP_UNROLL
    for (int i = 0; i < kRowVectors; ++i) {
      if (i * kWarp >= dim) break;
      const float other = shuffle_xor(x[i], step);
      x[i] = (lane_index() & step) == 0 ? x[i] + other : other - x[i];
    }
  }
  KVP_UNROLL
  for (int apart = 1; apart < kRowVectors; apart *= 2) {
    if (apart * kWarp >= block) break;
    KVP_UNROLL
    for (int i = 0; i < kRowVectors; ++i) {
      if ((i & apart) != 0 || i * kWarp >= dim) continue;
      const float a = x[i], b = x[i + apart];
      x[i] = a + b;
      x[i + apart] = a - b;
    }
  }
  float factor = 1.0f;
  int rest = block;
  for (; rest >= 4; rest /= 4) factor = factor * 0.5f;
  if (rest == 2) factor = factor * bits_to_float(0x3F3504F3u);  // 1 / sqrt(2)
  KVP_UNROLL
  for (int i = 0; i < kRowVectors; ++i) x[i] = x[i] * factor;
}

KVP_DEVICE int32_t low_level(uint32_t pair) { return static_cast<int8_t>(pair & 0xFFu); }
KVP_DEVICE int32_t high_level(uint32_t pair) { return static_cast<int8_t>(pair >> 8 & 0xFFu); }

// The scales of a tile, tokens innermost.
KVP_DEVICE const uint16_t* scales_of(const unsigned char* tile, DType dtype, int tokens, int dim) {
  const int64_t row = dtype == DType::kQ4 ? dim / 2 : dim;
  return reinterpret_cast<const uint16_t*>(tile + tokens * row);
}

// A key of a K tile as the number that it stands for.
KVP_DEVICE float key_of(const unsigned char* tile, DType dtype, int tokens, int dim, int d,
                        int token) {
  const uint16_t* scales = scales_of(tile, dtype, tokens, dim);
  if (dtype == DType::kQ4) {
    const uint32_t both = tile[int64_t{d / 2} * tokens + token];
    const int32_t level = level_of(d % 2 == 0 ? both & 15u : both >> 4);
    return static_cast<float>(level) *
           bfloat16_bits_to_float(scales[int64_t{d / kQ4Group} * tokens + token]);
  }
  const auto level = static_cast<int8_t>(tile[(int64_t{d / 2} * tokens + token) * 2 + d % 2]);
  return static_cast<float>(level) * bfloat16_bits_to_float(scales[token]);
}

}  // namespace kvpager::gpu::codes
