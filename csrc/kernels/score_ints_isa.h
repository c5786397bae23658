// Vectors of integers for the scans: 64 bytes in tier v4, 32 in tier v3, in 32-bit lanes of four
// bytes. Included by score_*_isa.cc only; with KVPAGER_VNNI defined by score_vnni_isa.cc.
#pragma once

#include "kernels/functions_isa.h"
#include "kernels/vec_isa.h"

namespace kvpager {
namespace KVPAGER_ISA_NS {
namespace {

constexpr int kFour = 4;  // heads, boxes or summaries that are worked on side by side

KVPAGER_INLINE void prefetch(const void* p) { __builtin_prefetch(p, 0, 2); }

KVPAGER_INLINE float read_float(const std::byte* p) {
  float value;
  std::memcpy(&value, p, sizeof value);
  return value;
}

#if KVPAGER_ISA_LEVEL == 1

// Both products are exact: a 16-bit significand times a 32-bit integer. The sum is rounded once.
KVPAGER_INLINE double combine(float first_scale, int32_t first, double second_scale,
                              int32_t second) {
  const double a = static_cast<double>(first_scale) * static_cast<double>(first);
  const double b = second_scale * static_cast<double>(second);
  return a + b;
}

#else

#if KVPAGER_ISA_LEVEL == 4
using Int = __m512i;
KVPAGER_INLINE Int load_bytes(const void* p) { return _mm512_loadu_si512(p); }
KVPAGER_INLINE void store_bytes(void* p, Int a) { _mm512_storeu_si512(p, a); }
KVPAGER_INLINE Int zero() { return _mm512_setzero_si512(); }
KVPAGER_INLINE Int splat_int(int32_t a) { return _mm512_set1_epi32(a); }
KVPAGER_INLINE Int field(Int a, int shift, int mask) {
  return _mm512_and_si512(_mm512_srli_epi16(a, static_cast<unsigned>(shift)),
                          _mm512_set1_epi8(static_cast<char>(mask)));
}
KVPAGER_INLINE Int add_int(Int a, Int b) { return _mm512_add_epi32(a, b); }
KVPAGER_INLINE Int larger(Int a, Int b) { return _mm512_max_epi32(a, b); }
// Sums of two neighbouring 16-bit products.
KVPAGER_INLINE Int pair_sums(Int a, Int b) { return _mm512_madd_epi16(a, b); }
KVPAGER_INLINE __m256i upper(Int a) { return _mm512_extracti64x4_epi64(a, 1); }
KVPAGER_INLINE __m256i lower(Int a) { return _mm512_castsi512_si256(a); }
KVPAGER_INLINE __m128i fold_sum(Int a) {
  const __m256i half = _mm256_add_epi32(lower(a), upper(a));
  return _mm_add_epi32(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
}
KVPAGER_INLINE __m128i fold_largest(Int a) {
  const __m256i half = _mm256_max_epi32(lower(a), upper(a));
  return _mm_max_epi32(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
}
#else
using Int = __m256i;
KVPAGER_INLINE Int load_bytes(const void* p) {
  return _mm256_loadu_si256(static_cast<const __m256i*>(p));
}
KVPAGER_INLINE void store_bytes(void* p, Int a) {
  _mm256_storeu_si256(static_cast<__m256i*>(p), a);
}
KVPAGER_INLINE Int zero() { return _mm256_setzero_si256(); }
KVPAGER_INLINE Int splat_int(int32_t a) { return _mm256_set1_epi32(a); }
KVPAGER_INLINE Int field(Int a, int shift, int mask) {
  return _mm256_and_si256(_mm256_srli_epi16(a, shift), _mm256_set1_epi8(static_cast<char>(mask)));
}
KVPAGER_INLINE Int add_int(Int a, Int b) { return _mm256_add_epi32(a, b); }
KVPAGER_INLINE Int larger(Int a, Int b) { return _mm256_max_epi32(a, b); }
KVPAGER_INLINE Int pair_sums(Int a, Int b) { return _mm256_madd_epi16(a, b); }
KVPAGER_INLINE __m128i fold_sum(Int a) {
  return _mm_add_epi32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
}
KVPAGER_INLINE __m128i fold_largest(Int a) {
  return _mm_max_epi32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
}
#endif

constexpr int kIntBytes = static_cast<int>(sizeof(Int));

KVPAGER_INLINE Int splat_four(const int8_t* p) {
  int32_t four;
  std::memcpy(&four, p, sizeof four);
  return splat_int(four);
}

// Lane i of the result is the sum, or the largest, of the lanes of vector i.
KVPAGER_INLINE __m128i sums_of(const Int (&a)[4]) {
  const __m128i x0 = fold_sum(a[0]), x1 = fold_sum(a[1]), x2 = fold_sum(a[2]), x3 = fold_sum(a[3]);
  const __m128i u = _mm_add_epi32(_mm_unpacklo_epi32(x0, x1), _mm_unpackhi_epi32(x0, x1));
  const __m128i v = _mm_add_epi32(_mm_unpacklo_epi32(x2, x3), _mm_unpackhi_epi32(x2, x3));
  return _mm_add_epi32(_mm_unpacklo_epi64(u, v), _mm_unpackhi_epi64(u, v));
}
KVPAGER_INLINE __m128i largest_of(const Int (&a)[4]) {
  const __m128i x0 = fold_largest(a[0]), x1 = fold_largest(a[1]);
  const __m128i x2 = fold_largest(a[2]), x3 = fold_largest(a[3]);
  const __m128i u = _mm_max_epi32(_mm_unpacklo_epi32(x0, x1), _mm_unpackhi_epi32(x0, x1));
  const __m128i v = _mm_max_epi32(_mm_unpacklo_epi32(x2, x3), _mm_unpackhi_epi32(x2, x3));
  return _mm_max_epi32(_mm_unpacklo_epi64(u, v), _mm_unpackhi_epi64(u, v));
}

// Both products are exact: a 16-bit significand times a 32-bit integer. The sum is rounded once.
KVPAGER_INLINE __m256d combine_four(__m256d first_scales, __m128i first, __m256d second_scales,
                                    __m128i second) {
  return _mm256_add_pd(_mm256_mul_pd(first_scales, _mm256_cvtepi32_pd(first)),
                       _mm256_mul_pd(second_scales, _mm256_cvtepi32_pd(second)));
}

// Products of four unsigned codes <= 3 and four signed weights are added to each 32-bit lane.
// Without VNNI the sums are of two products in 16 bits, which hold kSteps steps of at most
// 2 * 3 * 127 before they are flushed into 32.
#ifdef KVPAGER_VNNI
// Not the intrinsic: GCC 12 copies every accumulator before and after each of them, and spills some.
KVPAGER_INLINE Int dot_step(Int sum, Int codes, Int weights) {
  asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(codes), "v"(weights));
  return sum;
}
// Adds sums of two neighbouring 16-bit products.
KVPAGER_INLINE Int add_pair_sums(Int sum, Int a, Int b) {
  asm("vpdpwssd %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b));
  return sum;
}
#elif KVPAGER_ISA_LEVEL == 4
constexpr int kSteps = 32;
KVPAGER_INLINE Int dot_step(Int sum, Int codes, Int weights) {
  return _mm512_add_epi16(sum, _mm512_maddubs_epi16(codes, weights));
}
KVPAGER_INLINE Int flush(Int sum) { return pair_sums(sum, _mm512_set1_epi16(1)); }
#else
constexpr int kSteps = 32;
// Not the intrinsics: GCC 12 moves all products before the sums, and spills them.
KVPAGER_INLINE Int dot_step(Int sum, Int codes, Int weights) {
  Int products;
  asm("vpmaddubsw %3, %2, %1\n\tvpaddw %1, %0, %0"
      : "+x"(sum), "=&x"(products)
      : "x"(codes), "x"(weights));
  return sum;
}
KVPAGER_INLINE Int flush(Int sum) { return pair_sums(sum, _mm256_set1_epi16(1)); }
#endif

#ifndef KVPAGER_VNNI
KVPAGER_INLINE Int add_pair_sums(Int sum, Int a, Int b) { return add_int(sum, pair_sums(a, b)); }
#endif

#endif  // KVPAGER_ISA_LEVEL

}  // namespace
}  // namespace KVPAGER_ISA_NS
}  // namespace kvpager
