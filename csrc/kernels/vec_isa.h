// Sixteen float lanes with the same meaning in every tier: one AVX-512 register, two AVX2
// registers, or an array and correctly rounded fmaf. Included by *_isa.cc only, inside no
// namespace.
//
// These files are compiled several times with different flags, so nothing in them may have external
// linkage outside kvpager::KVPAGER_ISA_NS: no inline functions of shared headers, no standard
// library templates.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#if KVPAGER_ISA_LEVEL >= 3
#if defined(__GNUC__) && !defined(__clang__)
// g++ 12 warns of its own _mm512_undefined_ps.
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#include <immintrin.h>
#endif

#include "base/half.h"
#include "kvpager/codes.h"

#define KVPAGER_INLINE inline __attribute__((always_inline))
#define KVPAGER_INLINED __attribute__((always_inline))  // of a lambda

namespace kvpager {
namespace KVPAGER_ISA_NS {

#if KVPAGER_ISA_LEVEL == 4

struct Vec {
  __m512 x;
};
static KVPAGER_INLINE Vec load(const float* p) { return {_mm512_loadu_ps(p)}; }
static KVPAGER_INLINE void store(float* p, Vec a) { _mm512_storeu_ps(p, a.x); }
static KVPAGER_INLINE Vec splat(float a) { return {_mm512_set1_ps(a)}; }
static KVPAGER_INLINE Vec add(Vec a, Vec b) { return {_mm512_add_ps(a.x, b.x)}; }
static KVPAGER_INLINE Vec sub(Vec a, Vec b) { return {_mm512_sub_ps(a.x, b.x)}; }
static KVPAGER_INLINE Vec mul(Vec a, Vec b) { return {_mm512_mul_ps(a.x, b.x)}; }
static KVPAGER_INLINE Vec div(Vec a, Vec b) { return {_mm512_div_ps(a.x, b.x)}; }
static KVPAGER_INLINE Vec max(Vec a, Vec b) { return {_mm512_max_ps(a.x, b.x)}; }
static KVPAGER_INLINE Vec fma(Vec a, Vec b, Vec c) { return {_mm512_fmadd_ps(a.x, b.x, c.x)}; }
// x < limit ? 0 : a
static KVPAGER_INLINE Vec zero_below(Vec x, float limit, Vec a) {
  const __mmask16 keep = _mm512_cmp_ps_mask(x.x, _mm512_set1_ps(limit), _CMP_NLT_UQ);
  return {_mm512_maskz_mov_ps(keep, a.x)};
}
// 2^n for integer n held in the low bits of t = n + 1.5 * 2^23
static KVPAGER_INLINE Vec power_of_two(Vec t) {
  const __m512i bits = _mm512_slli_epi32(_mm512_castps_si512(t.x), 23);
  return {_mm512_castsi512_ps(_mm512_add_epi32(bits, _mm512_set1_epi32(0x3F800000)))};
}
// Lane i is a's where begin <= i < end, else `other`.
static KVPAGER_INLINE Vec keep_range(Vec a, int begin, int end, float other) {
  const int first = begin < 0 ? 0 : begin > 16 ? 16 : begin;
  const int last = end < 0 ? 0 : end > 16 ? 16 : end;
  const __mmask16 keep = static_cast<__mmask16>((0xFFFFu >> (16 - last)) & ~((1u << first) - 1u));
  return {_mm512_mask_mov_ps(_mm512_set1_ps(other), keep, a.x)};
}
static KVPAGER_INLINE Vec sign_bits(Vec a) { return {_mm512_and_ps(a.x, _mm512_set1_ps(-0.0f))}; }
static KVPAGER_INLINE Vec xor_bits(Vec a, Vec b) { return {_mm512_xor_ps(a.x, b.x)}; }
static KVPAGER_INLINE Vec load_bfloat16(const uint16_t* p) {
  const __m512i wide =
      _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(wide, 16))};
}
static KVPAGER_INLINE Vec load_float16(const uint16_t* p) {
  return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}
// 32 elements, those at even places and those at odd places: a shift and a mask, where widening in
// order takes a permutation as well.
static KVPAGER_INLINE void load_bfloat16_apart(const uint16_t* p, Vec* even, Vec* odd) {
  const __m512i pairs = _mm512_loadu_si512(p);
  even->x = _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16));
  odd->x = _mm512_castsi512_ps(
      _mm512_and_si512(pairs, _mm512_set1_epi32(static_cast<int32_t>(0xFFFF0000u))));
}
// a = lanes 0..15, b = lanes 16..31 become the even and the odd ones; and back.
static KVPAGER_INLINE void take_apart(Vec* a, Vec* b) {
  const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
  const __m512i odd = _mm512_setr_epi32(1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
  const __m512 x = a->x;
  a->x = _mm512_permutex2var_ps(x, even, b->x);
  b->x = _mm512_permutex2var_ps(x, odd, b->x);
}
static KVPAGER_INLINE void put_together(Vec* even, Vec* odd) {
  const __m512i low = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
  const __m512i high =
      _mm512_setr_epi32(8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
  const __m512 x = even->x;
  even->x = _mm512_permutex2var_ps(x, low, odd->x);
  odd->x = _mm512_permutex2var_ps(x, high, odd->x);
}

// Sixteen 32-bit sums, and sixteen pairs of 16-bit factors.
struct Ints {
  __m512i x;
};
struct Pairs {
  __m512i x;
};
static KVPAGER_INLINE Ints no_ints() { return {_mm512_setzero_si512()}; }
static KVPAGER_INLINE Vec to_floats(Ints a) { return {_mm512_cvtepi32_ps(a.x)}; }
// Lane i of sum + a[0] * b[i][0] + a[1] * b[i][1].
template <bool kVnni>
static KVPAGER_INLINE Ints add_dots(const int16_t* a, Pairs b, Ints sum) {
  int32_t both;
  std::memcpy(&both, a, sizeof both);
  const __m512i factors = _mm512_set1_epi32(both);
  if (!kVnni) return {_mm512_add_epi32(sum.x, _mm512_madd_epi16(b.x, factors))};
  // As an instruction: the rest of the function is for processors without it.
  __m512i x = sum.x;
  asm("vpdpwssd %2, %1, %0" : "+v"(x) : "v"(b.x), "v"(factors));
  return {x};
}
static KVPAGER_INLINE __m128i load_bytes(const void* p) {
  return _mm_loadu_si128(static_cast<const __m128i*>(p));
}
static KVPAGER_INLINE Pairs pairs_of(__m256i bytes) { return {_mm512_cvtepi8_epi16(bytes)}; }
static KVPAGER_INLINE Pairs pairs_of(__m128i low, __m128i high) {
  return pairs_of(_mm256_set_m128i(high, low));
}
static KVPAGER_INLINE Pairs load_pairs(const int8_t* p) {
  return pairs_of(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
// Thirty-two bfloat16, in pairs.
struct BFloat16Pairs {
  __m512i x;
};
static KVPAGER_INLINE BFloat16Pairs load_bfloat16_pairs(const uint16_t* p) {
  return {_mm512_loadu_si512(p)};
}
static KVPAGER_INLINE Vec odd_floats(BFloat16Pairs a) {
  const __m512i high = _mm512_set1_epi32(static_cast<int32_t>(0xFFFF0000u));
  return {_mm512_castsi512_ps(_mm512_and_si512(a.x, high))};
}
static KVPAGER_INLINE Vec even_floats(BFloat16Pairs a) {
  return {_mm512_castsi512_ps(_mm512_slli_epi32(a.x, 16))};
}
// a * factor to the nearest integers, which fit 16 bits.
static KVPAGER_INLINE void store_rounded(int16_t* p, Vec a, Vec factor) {
  const __m512i bits =
      _mm512_castps_si512(add(mul(a, factor), splat(12582912.0f)).x);  // 1.5 * 2^23
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(bits));
}

#elif KVPAGER_ISA_LEVEL == 3

struct Vec {
  __m256 x, y;
};
static KVPAGER_INLINE Vec load(const float* p) {
  return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)};
}
static KVPAGER_INLINE void store(float* p, Vec a) {
  _mm256_storeu_ps(p, a.x);
  _mm256_storeu_ps(p + 8, a.y);
}
static KVPAGER_INLINE Vec splat(float a) { return {_mm256_set1_ps(a), _mm256_set1_ps(a)}; }
static KVPAGER_INLINE Vec add(Vec a, Vec b) {
  return {_mm256_add_ps(a.x, b.x), _mm256_add_ps(a.y, b.y)};
}
static KVPAGER_INLINE Vec sub(Vec a, Vec b) {
  return {_mm256_sub_ps(a.x, b.x), _mm256_sub_ps(a.y, b.y)};
}
static KVPAGER_INLINE Vec mul(Vec a, Vec b) {
  return {_mm256_mul_ps(a.x, b.x), _mm256_mul_ps(a.y, b.y)};
}
static KVPAGER_INLINE Vec div(Vec a, Vec b) {
  return {_mm256_div_ps(a.x, b.x), _mm256_div_ps(a.y, b.y)};
}
static KVPAGER_INLINE Vec max(Vec a, Vec b) {
  return {_mm256_max_ps(a.x, b.x), _mm256_max_ps(a.y, b.y)};
}
static KVPAGER_INLINE Vec fma(Vec a, Vec b, Vec c) {
  return {_mm256_fmadd_ps(a.x, b.x, c.x), _mm256_fmadd_ps(a.y, b.y, c.y)};
}
static KVPAGER_INLINE Vec zero_below(Vec x, float limit, Vec a) {
  const __m256 bound = _mm256_set1_ps(limit);
  return {_mm256_and_ps(_mm256_cmp_ps(x.x, bound, _CMP_NLT_UQ), a.x),
          _mm256_and_ps(_mm256_cmp_ps(x.y, bound, _CMP_NLT_UQ), a.y)};
}
static KVPAGER_INLINE __m256 power_of_two_half(__m256 t) {
  const __m256i bits = _mm256_slli_epi32(_mm256_castps_si256(t), 23);
  return _mm256_castsi256_ps(_mm256_add_epi32(bits, _mm256_set1_epi32(0x3F800000)));
}
static KVPAGER_INLINE Vec power_of_two(Vec t) {
  return {power_of_two_half(t.x), power_of_two_half(t.y)};
}
static KVPAGER_INLINE __m256 keep_half(__m256 a, int begin, int end, float other) {
  const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  const __m256i keep = _mm256_andnot_si256(_mm256_cmpgt_epi32(_mm256_set1_epi32(begin), lane),
                                           _mm256_cmpgt_epi32(_mm256_set1_epi32(end), lane));
  return _mm256_blendv_ps(_mm256_set1_ps(other), a, _mm256_castsi256_ps(keep));
}
static KVPAGER_INLINE Vec keep_range(Vec a, int begin, int end, float other) {
  return {keep_half(a.x, begin, end, other), keep_half(a.y, begin - 8, end - 8, other)};
}
static KVPAGER_INLINE Vec sign_bits(Vec a) {
  const __m256 mask = _mm256_set1_ps(-0.0f);
  return {_mm256_and_ps(a.x, mask), _mm256_and_ps(a.y, mask)};
}
static KVPAGER_INLINE Vec xor_bits(Vec a, Vec b) {
  return {_mm256_xor_ps(a.x, b.x), _mm256_xor_ps(a.y, b.y)};
}
static KVPAGER_INLINE __m256 widen_bfloat16(const uint16_t* p) {
  const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
}
static KVPAGER_INLINE Vec load_bfloat16(const uint16_t* p) {
  return {widen_bfloat16(p), widen_bfloat16(p + 8)};
}
static KVPAGER_INLINE Vec load_float16(const uint16_t* p) {
  return {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))),
          _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 8)))};
}
// 16 elements, those at even places in one register and those at odd places in the other: a shift
// and a mask, where widening in order takes a permutation as well.
static KVPAGER_INLINE Vec load_bfloat16_apart(const uint16_t* p) {
  const __m256i pairs = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  const __m256i high = _mm256_set1_epi32(static_cast<int32_t>(0xFFFF0000u));
  return {_mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16)),
          _mm256_castsi256_ps(_mm256_and_si256(pairs, high))};
}
// Lanes in order become the even and the odd ones; and back.
static KVPAGER_INLINE __m256 in_quarters(__m256 a) {
  return _mm256_castpd_ps(_mm256_permute4x64_pd(_mm256_castps_pd(a), 0xD8));
}
static KVPAGER_INLINE void take_apart(Vec* a) {
  const __m256 even = _mm256_shuffle_ps(a->x, a->y, 0x88);
  const __m256 odd = _mm256_shuffle_ps(a->x, a->y, 0xDD);
  *a = {in_quarters(even), in_quarters(odd)};
}
static KVPAGER_INLINE void put_together(Vec* a) {
  const __m256 low = _mm256_unpacklo_ps(a->x, a->y);
  const __m256 high = _mm256_unpackhi_ps(a->x, a->y);
  *a = {_mm256_permute2f128_ps(low, high, 0x20), _mm256_permute2f128_ps(low, high, 0x31)};
}

struct Ints {
  __m256i x, y;
};
struct Pairs {
  __m256i x, y;
};
static KVPAGER_INLINE Ints no_ints() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
static KVPAGER_INLINE Vec to_floats(Ints a) {
  return {_mm256_cvtepi32_ps(a.x), _mm256_cvtepi32_ps(a.y)};
}
template <bool kVnni>
static KVPAGER_INLINE Ints add_dots(const int16_t* a, Pairs b, Ints sum) {
  int32_t both;
  std::memcpy(&both, a, sizeof both);
  const __m256i factors = _mm256_set1_epi32(both);
  return {_mm256_add_epi32(sum.x, _mm256_madd_epi16(b.x, factors)),
          _mm256_add_epi32(sum.y, _mm256_madd_epi16(b.y, factors))};
}
static KVPAGER_INLINE __m128i load_bytes(const void* p) {
  return _mm_loadu_si128(static_cast<const __m128i*>(p));
}
static KVPAGER_INLINE Pairs pairs_of(__m128i low, __m128i high) {
  return {_mm256_cvtepi8_epi16(low), _mm256_cvtepi8_epi16(high)};
}
static KVPAGER_INLINE Pairs load_pairs(const int8_t* p) {
  return pairs_of(load_bytes(p), load_bytes(p + 16));
}
struct BFloat16Pairs {
  __m256i x, y;
};
static KVPAGER_INLINE BFloat16Pairs load_bfloat16_pairs(const uint16_t* p) {
  return {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)),
          _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 16))};
}
static KVPAGER_INLINE Vec odd_floats(BFloat16Pairs a) {
  const __m256i high = _mm256_set1_epi32(static_cast<int32_t>(0xFFFF0000u));
  return {_mm256_castsi256_ps(_mm256_and_si256(a.x, high)),
          _mm256_castsi256_ps(_mm256_and_si256(a.y, high))};
}
static KVPAGER_INLINE Vec even_floats(BFloat16Pairs a) {
  return {_mm256_castsi256_ps(_mm256_slli_epi32(a.x, 16)),
          _mm256_castsi256_ps(_mm256_slli_epi32(a.y, 16))};
}
static KVPAGER_INLINE void store_rounded(int16_t* p, Vec a, Vec factor) {
  const Vec shifted = add(mul(a, factor), splat(12582912.0f));  // 1.5 * 2^23
  const __m256i low = _mm256_slli_epi32(_mm256_castps_si256(shifted.x), 16);
  const __m256i high = _mm256_slli_epi32(_mm256_castps_si256(shifted.y), 16);
  const __m256i packed =
      _mm256_packs_epi32(_mm256_srai_epi32(low, 16), _mm256_srai_epi32(high, 16));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm256_permute4x64_epi64(packed, 0xD8));
}

#else

struct Vec {
  float x[16];
};
template <class Function>
static KVPAGER_INLINE Vec each_lane(Function function) {
  Vec out;
  for (int i = 0; i < 16; ++i) out.x[i] = function(i);
  return out;
}
static KVPAGER_INLINE Vec load(const float* p) {
  return each_lane([&](int i) { return p[i]; });
}
static KVPAGER_INLINE void store(float* p, const Vec& a) { std::memcpy(p, a.x, sizeof a.x); }
static KVPAGER_INLINE Vec splat(float a) {
  return each_lane([&](int) { return a; });
}
static KVPAGER_INLINE Vec add(const Vec& a, const Vec& b) {
  return each_lane([&](int i) { return a.x[i] + b.x[i]; });
}
static KVPAGER_INLINE Vec sub(const Vec& a, const Vec& b) {
  return each_lane([&](int i) { return a.x[i] - b.x[i]; });
}
static KVPAGER_INLINE Vec mul(const Vec& a, const Vec& b) {
  return each_lane([&](int i) { return a.x[i] * b.x[i]; });
}
static KVPAGER_INLINE Vec div(const Vec& a, const Vec& b) {
  return each_lane([&](int i) { return a.x[i] / b.x[i]; });
}
static KVPAGER_INLINE Vec max(const Vec& a, const Vec& b) {
  return each_lane([&](int i) { return a.x[i] > b.x[i] ? a.x[i] : b.x[i]; });
}
static KVPAGER_INLINE Vec fma(const Vec& a, const Vec& b, const Vec& c) {
  return each_lane([&](int i) { return __builtin_fmaf(a.x[i], b.x[i], c.x[i]); });
}
static KVPAGER_INLINE Vec zero_below(const Vec& x, float limit, const Vec& a) {
  return each_lane([&](int i) { return x.x[i] < limit ? 0.0f : a.x[i]; });
}
static KVPAGER_INLINE Vec power_of_two(const Vec& t) {
  return each_lane([&](int i) { return bits_float((float_bits(t.x[i]) << 23) + 0x3F800000u); });
}
static KVPAGER_INLINE Vec keep_range(const Vec& a, int begin, int end, float other) {
  return each_lane([&](int i) { return begin <= i && i < end ? a.x[i] : other; });
}
static KVPAGER_INLINE Vec sign_bits(const Vec& a) {
  return each_lane([&](int i) { return bits_float(float_bits(a.x[i]) & 0x80000000u); });
}
static KVPAGER_INLINE Vec xor_bits(const Vec& a, const Vec& b) {
  return each_lane([&](int i) { return bits_float(float_bits(a.x[i]) ^ float_bits(b.x[i])); });
}
static KVPAGER_INLINE Vec load_bfloat16(const uint16_t* p) {
  return each_lane([&](int i) { return bfloat16_to_float(p[i]); });
}
static KVPAGER_INLINE Vec load_float16(const uint16_t* p) {
  return each_lane([&](int i) { return float16_to_float(p[i]); });
}

struct Ints {
  int32_t x[16];
};
struct Pairs {
  int16_t x[32];
};
static KVPAGER_INLINE Ints no_ints() { return {}; }
static KVPAGER_INLINE Vec to_floats(const Ints& a) {
  return each_lane([&](int i) { return static_cast<float>(a.x[i]); });
}
template <bool kVnni>
static KVPAGER_INLINE Ints add_dots(const int16_t* a, const Pairs& b, Ints sum) {
  for (int i = 0; i < 16; ++i) sum.x[i] += a[0] * b.x[2 * i] + a[1] * b.x[2 * i + 1];
  return sum;
}
static KVPAGER_INLINE Pairs load_pairs(const int8_t* p) {
  Pairs pairs;
  for (int i = 0; i < 32; ++i) pairs.x[i] = p[i];
  return pairs;
}
static KVPAGER_INLINE void store_rounded(int16_t* p, const Vec& a, const Vec& factor) {
  for (int i = 0; i < 16; ++i) {
    const float shifted = a.x[i] * factor.x[i] + 12582912.0f;  // 1.5 * 2^23
    p[i] = static_cast<int16_t>(float_bits(shifted) & 0xFFFFu);
  }
}

#endif

// Of 4-bit codes: the levels of the low and of the high half of each byte, side by side; and those of
// one half of two rows.
#if KVPAGER_ISA_LEVEL == 4
// Of the low four bits of each half lane: the table is there twice, as the fifth is looked at too.
static KVPAGER_INLINE Pairs levels_of(__m512i codes) {
  const __m256i levels = _mm256_broadcastsi128_si256(load_bytes(kQ4Levels));
  return {_mm512_permutexvar_epi16(codes, _mm512_cvtepi8_epi16(levels))};
}
// Of a shuffle: byte i of 16 in the low byte of either half of lane i, 0 in the high one.
alignas(64) constexpr uint32_t kByteInBothHalves[16] = {
    0x80008000u, 0x80018001u, 0x80028002u, 0x80038003u, 0x80048004u, 0x80058005u,
    0x80068006u, 0x80078007u, 0x80088008u, 0x80098009u, 0x800A800Au, 0x800B800Bu,
    0x800C800Cu, 0x800D800Du, 0x800E800Eu, 0x800F800Fu};
static KVPAGER_INLINE Pairs load_level_pairs(const uint8_t* p) {
  const __m512i bytes = _mm512_shuffle_epi8(_mm512_broadcast_i32x4(load_bytes(p)),
                                            _mm512_load_si512(kByteInBothHalves));
  return levels_of(_mm512_srlv_epi16(bytes, _mm512_set1_epi32(4 << 16)));
}
static KVPAGER_INLINE void load_rows_of_levels(const uint8_t* p, const uint8_t* next, Pairs* low,
                                               Pairs* high) {
  const __m128i a = load_bytes(p);
  const __m128i b = load_bytes(next);
  const __m256i bytes = _mm256_inserti128_si256(_mm256_castsi128_si256(_mm_unpacklo_epi8(a, b)),
                                                _mm_unpackhi_epi8(a, b), 1);
  const __m512i both = _mm512_cvtepu8_epi16(bytes);
  *low = levels_of(both);
  *high = levels_of(_mm512_srli_epi16(both, 4));
}
#elif KVPAGER_ISA_LEVEL == 3
static KVPAGER_INLINE __m128i low_levels(__m128i bytes) {
  return _mm_shuffle_epi8(load_bytes(kQ4Levels), _mm_and_si128(bytes, _mm_set1_epi8(15)));
}
static KVPAGER_INLINE __m128i high_levels(__m128i bytes) {
  return low_levels(_mm_srli_epi16(bytes, 4));
}
static KVPAGER_INLINE Pairs side_by_side(__m128i a, __m128i b) {
  return pairs_of(_mm_unpacklo_epi8(a, b), _mm_unpackhi_epi8(a, b));
}
static KVPAGER_INLINE Pairs load_level_pairs(const uint8_t* p) {
  const __m128i bytes = load_bytes(p);
  return side_by_side(low_levels(bytes), high_levels(bytes));
}
static KVPAGER_INLINE void load_rows_of_levels(const uint8_t* p, const uint8_t* next, Pairs* low,
                                               Pairs* high) {
  const __m128i bytes = load_bytes(p);
  const __m128i next_bytes = load_bytes(next);
  *low = side_by_side(low_levels(bytes), low_levels(next_bytes));
  *high = side_by_side(high_levels(bytes), high_levels(next_bytes));
}
#else
static KVPAGER_INLINE Pairs load_level_pairs(const uint8_t* p) {
  Pairs pairs;
  for (int i = 0; i < 16; ++i) {
    pairs.x[2 * i] = kQ4Levels[p[i] & 15];
    pairs.x[2 * i + 1] = kQ4Levels[p[i] >> 4];
  }
  return pairs;
}
static KVPAGER_INLINE void load_rows_of_levels(const uint8_t* p, const uint8_t* next, Pairs* low,
                                               Pairs* high) {
  for (int i = 0; i < 16; ++i) {
    low->x[2 * i] = kQ4Levels[p[i] & 15];
    low->x[2 * i + 1] = kQ4Levels[next[i] & 15];
    high->x[2 * i] = kQ4Levels[p[i] >> 4];
    high->x[2 * i + 1] = kQ4Levels[next[i] >> 4];
  }
}
#endif

// Lanes folded in halves: i with i + 8, then + 4, + 2, + 1.
#if KVPAGER_ISA_LEVEL >= 3
static KVPAGER_INLINE __m256 low_half(Vec a) {
#if KVPAGER_ISA_LEVEL == 4
  return _mm512_castps512_ps256(a.x);
#else
  return a.x;
#endif
}
static KVPAGER_INLINE __m256 high_half(Vec a) {
#if KVPAGER_ISA_LEVEL == 4
  return _mm512_extractf32x8_ps(a.x, 1);
#else
  return a.y;
#endif
}
static KVPAGER_INLINE float tree_sum(Vec a) {
  const __m256 eight = _mm256_add_ps(low_half(a), high_half(a));
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}
static KVPAGER_INLINE float tree_max(Vec a) {
  const __m256 eight = _mm256_max_ps(low_half(a), high_half(a));
  const __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}
#else
static inline float tree_sum(const Vec& a) {
  float x[16];
  store(x, a);
  for (int width = 8; width >= 1; width /= 2) {
    for (int i = 0; i < width; ++i) x[i] = x[i] + x[i + width];
  }
  return x[0];
}
static inline float tree_max(const Vec& a) {
  float x[16];
  store(x, a);
  for (int width = 8; width >= 1; width /= 2) {
    for (int i = 0; i < width; ++i) x[i] = x[i] > x[i + width] ? x[i] : x[i + width];
  }
  return x[0];
}
#endif

// `count` numbers to the nearest of a dtype, as float_to_bfloat16 and float_to_float16.
static KVPAGER_INLINE void store_bfloat16(const float* x, int64_t count, uint16_t* out) {
  int64_t i = 0;
#if KVPAGER_ISA_LEVEL == 4
  for (; i < count / 16 * 16; i += 16) {
    const __m512 a = _mm512_loadu_ps(x + i);
    const __m512i bits = _mm512_castps_si512(a);
    const __m512i high = _mm512_srli_epi32(bits, 16);
    const __m512i half =
        _mm512_add_epi32(_mm512_set1_epi32(0x7FFF), _mm512_and_si512(high, _mm512_set1_epi32(1)));
    const __m512i nearest = _mm512_srli_epi32(_mm512_add_epi32(bits, half), 16);
    const __m512i made = _mm512_mask_or_epi32(nearest, _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q), high,
                                              _mm512_set1_epi32(0x40));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + i), _mm512_cvtepi32_epi16(made));
  }
#endif
#if KVPAGER_ISA_LEVEL >= 3
  for (; i < count / 4 * 4; i += 4) {
    const __m128 a = _mm_loadu_ps(x + i);
    const __m128i bits = _mm_castps_si128(a);
    const __m128i high = _mm_srli_epi32(bits, 16);
    const __m128i half =
        _mm_add_epi32(_mm_set1_epi32(0x7FFF), _mm_and_si128(high, _mm_set1_epi32(1)));
    const __m128i nearest = _mm_srli_epi32(_mm_add_epi32(bits, half), 16);
    const __m128i quiet = _mm_or_si128(high, _mm_set1_epi32(0x40));
    const __m128i made = _mm_blendv_epi8(nearest, quiet, _mm_castps_si128(_mm_cmpunord_ps(a, a)));
    _mm_storel_epi64(reinterpret_cast<__m128i*>(out + i), _mm_packus_epi32(made, made));
  }
#endif
  for (; i < count; ++i) out[i] = float_to_bfloat16(x[i]);
}
static KVPAGER_INLINE void store_float16(const float* x, int64_t count, uint16_t* out) {
  int64_t i = 0;
#if KVPAGER_ISA_LEVEL >= 3
  for (; i < count / 8 * 8; i += 8) {
    const __m128i half = _mm256_cvtps_ph(_mm256_loadu_ps(x + i), _MM_FROUND_TO_NEAREST_INT);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out + i), half);
  }
#endif
  for (; i < count; ++i) out[i] = float_to_float16(x[i]);
}

// e^x for x <= 0, relative error about one ulp; exp(0) = 1, 0 below -87, NaN stays NaN. n = round(x
// / ln 2) by adding 1.5 * 2^23, r = x - n ln 2 in two steps, a polynomial of degree 7 in r, times
// 2^n.
static KVPAGER_INLINE Vec exp(Vec x) {
  const Vec magic = splat(12582912.0f);
  const Vec t = fma(x, splat(1.44269504f), magic);
  const Vec n = sub(t, magic);
  Vec r = fma(n, splat(-0.693359375f), x);
  r = fma(n, splat(2.12194440e-4f), r);
  Vec p = splat(1.9875691500e-4f);
  p = fma(p, r, splat(1.3981999507e-3f));
  p = fma(p, r, splat(8.3334519073e-3f));
  p = fma(p, r, splat(4.1665795894e-2f));
  p = fma(p, r, splat(1.6666665459e-1f));
  p = fma(p, r, splat(5.0000001201e-1f));
  p = fma(p, mul(r, r), r);
  p = add(p, splat(1.0f));
  return zero_below(x, -87.0f, mul(p, power_of_two(t)));
}

static KVPAGER_INLINE Vec negative(const Vec& a) { return xor_bits(a, splat(-0.0f)); }

// tanh(x) = sign(x) (1 - e) / (1 + e), e = exp(-2 |x|); absolute error about 1e-7.
static KVPAGER_INLINE Vec tanh(Vec x) {
  const Vec sign = sign_bits(x);
  const Vec magnitude = xor_bits(x, sign);
  const Vec e = exp(mul(magnitude, splat(-2.0f)));
  const Vec one = splat(1.0f);
  return xor_bits(div(sub(one, e), add(one, e)), sign);
}

}  // namespace KVPAGER_ISA_NS
}  // namespace kvpager
