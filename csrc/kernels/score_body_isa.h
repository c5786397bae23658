// Scans of summaries: integer dot products of an int8 query with unsigned codes. Integers have no
// order, so that each tier may sum as it likes; the float steps at the end are spelled out in
// `combine`.
//
// Included by score_isa.cc and, with KVPAGER_VNNI defined, by score_vnni_isa.cc.
#pragma once

#include "kernels/functions_isa.h"
#include "kernels/vec_isa.h"

namespace kvpager {
namespace KVPAGER_ISA_NS {
namespace {

// Heads scored in one pass over a summary.
constexpr int kHeads = 4;
constexpr int kMaxDim = 512;
constexpr int kPrefetchBytes = 4096;

float read_float(const std::byte* p) {
  float value;
  std::memcpy(&value, p, sizeof value);
  return value;
}

// Both products are exact: a 16-bit significand times a 32-bit integer. The sum is rounded once.
double combine(float first_scale, int32_t first, double second_scale, int32_t second) {
  const double a = static_cast<double>(first_scale) * static_cast<double>(first);
  const double b = second_scale * static_cast<double>(second);
  return a + b;
}

// Reading ahead: a summary is scattered memory of a few pages' length at most.
void prefetch(const std::byte* p, int64_t bytes) {
  if (bytes > kPrefetchBytes) bytes = kPrefetchBytes;
  for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(p + i, 0, 2);
}

// ---- sketches

// Where a sketch's parts lie.
struct Sketch {
  Sketch(const SketchParams& params, const std::byte* summary)
      : codes(reinterpret_cast<const uint8_t*>(summary)),
        low(reinterpret_cast<const int16_t*>(summary + int64_t{params.padded_dim} * params.tokens *
                                                           params.bits / 8)),
        step(reinterpret_cast<const uint8_t*>(low + params.padded_dim)),
        low_scale(read_float(reinterpret_cast<const std::byte*>(step + params.padded_dim))),
        step_scale(read_float(reinterpret_cast<const std::byte*>(step + params.padded_dim) + 4)) {}

  const uint8_t* codes;
  const int16_t* low;
  const uint8_t* step;
  float low_scale;
  float step_scale;
};

int32_t dot_low(const int16_t* q, const int16_t* low, int count) {
  int32_t sum = 0;
  for (int d = 0; d < count; ++d) sum += int32_t{q[d]} * low[d];
  return sum;
}

// (q * step + 128) >> 8
void weigh(const int16_t* q, const uint8_t* step, int count, int8_t* weights) {
#if KVPAGER_ISA_LEVEL == 4
  for (int d = 0; d < count; d += 32) {
    const __m256i bytes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(step + d));
    const __m512i wide = _mm512_slli_epi16(_mm512_cvtepu8_epi16(bytes), 7);
    const __m512i product = _mm512_mulhrs_epi16(_mm512_loadu_si512(q + d), wide);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(weights + d), _mm512_cvtepi16_epi8(product));
  }
#else
  for (int d = 0; d < count; ++d) {
    weights[d] = static_cast<int8_t>((int32_t{q[d]} * step[d] + 128) >> 8);
  }
#endif
}

// best[h] = max over tokens of weights[h] . codes, for kCount heads.
#if KVPAGER_ISA_LEVEL == 1

template <int kBits, int kCount>
void best_tokens(const SketchParams& params, const uint8_t* codes, const int8_t (*weights)[kMaxDim],
                 int32_t* best) {
  constexpr int kPerByte = 8 / kBits;
  constexpr int kMask = (1 << kBits) - 1;
  for (int h = 0; h < kCount; ++h) {
    int32_t sums[256] = {};
    for (int g = 0; g < params.padded_dim / (4 * kPerByte); ++g) {
      const uint8_t* bytes = codes + int64_t{g} * params.tokens * 4;
      for (int s = 0; s < kPerByte; ++s) {
        const int8_t* w = weights[h] + (g * kPerByte + s) * 4;
        for (int t = 0; t < params.tokens; ++t) {
          for (int b = 0; b < 4; ++b) {
            sums[t] += w[b] * ((bytes[4 * t + b] >> (s * kBits)) & kMask);
          }
        }
      }
    }
    best[h] = sums[0];
    for (int t = 1; t < params.tokens; ++t) best[h] = sums[t] > best[h] ? sums[t] : best[h];
  }
}

#else

#if KVPAGER_ISA_LEVEL == 4
using Int = __m512i;
KVPAGER_INLINE Int load_bytes(const void* p) { return _mm512_loadu_si512(p); }
KVPAGER_INLINE Int zero() { return _mm512_setzero_si512(); }
KVPAGER_INLINE Int broadcast(const int8_t* p) {
  int32_t four;
  std::memcpy(&four, p, sizeof four);
  return _mm512_set1_epi32(four);
}
KVPAGER_INLINE Int field(Int a, int shift, int mask) {
  return _mm512_and_si512(_mm512_srli_epi16(a, static_cast<unsigned>(shift)),
                          _mm512_set1_epi8(static_cast<char>(mask)));
}
KVPAGER_INLINE Int larger(Int a, Int b) { return _mm512_max_epi32(a, b); }
KVPAGER_INLINE int32_t largest(Int a) { return _mm512_reduce_max_epi32(a); }
KVPAGER_INLINE Int lowest() { return _mm512_set1_epi32(INT32_MIN); }
// Adds to each 32-bit lane the products of its four unsigned codes and signed weights.
KVPAGER_INLINE Int dot(Int sum, Int codes, Int weights) {
#ifdef KVPAGER_VNNI
  return _mm512_dpbusd_epi32(sum, codes, weights);
#else
  const Int pairs = _mm512_maddubs_epi16(codes, weights);
  return _mm512_add_epi32(sum, _mm512_madd_epi16(pairs, _mm512_set1_epi16(1)));
#endif
}
#else
using Int = __m256i;
KVPAGER_INLINE Int load_bytes(const void* p) {
  return _mm256_loadu_si256(static_cast<const __m256i*>(p));
}
KVPAGER_INLINE Int zero() { return _mm256_setzero_si256(); }
KVPAGER_INLINE Int broadcast(const int8_t* p) {
  int32_t four;
  std::memcpy(&four, p, sizeof four);
  return _mm256_set1_epi32(four);
}
KVPAGER_INLINE Int field(Int a, int shift, int mask) {
  return _mm256_and_si256(_mm256_srli_epi16(a, shift), _mm256_set1_epi8(static_cast<char>(mask)));
}
KVPAGER_INLINE Int larger(Int a, Int b) { return _mm256_max_epi32(a, b); }
KVPAGER_INLINE int32_t largest(Int a) {
  __m128i four = _mm_max_epi32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
  four = _mm_max_epi32(four, _mm_shuffle_epi32(four, 0x4E));
  four = _mm_max_epi32(four, _mm_shuffle_epi32(four, 0xB1));
  return _mm_cvtsi128_si32(four);
}
KVPAGER_INLINE Int lowest() { return _mm256_set1_epi32(INT32_MIN); }
KVPAGER_INLINE Int dot(Int sum, Int codes, Int weights) {
  const Int pairs = _mm256_maddubs_epi16(codes, weights);
  return _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}
#endif

template <int kBits, int kCount, int kVectors>
KVPAGER_INLINE void best_of_strip(const SketchParams& params, const uint8_t* codes,
                                  const int8_t (*weights)[kMaxDim], Int* best) {
  constexpr int kPerByte = 8 / kBits;
  constexpr int kMask = (1 << kBits) - 1;
  const int64_t row = int64_t{params.tokens} * 4;
  const int groups = params.padded_dim / (4 * kPerByte);
  Int sum[kCount][kVectors];
  for (int h = 0; h < kCount; ++h) {
    for (int v = 0; v < kVectors; ++v) sum[h][v] = zero();
  }
  for (int g = 0; g < groups; ++g) {
    Int raw[kVectors];
    for (int v = 0; v < kVectors; ++v) {
      raw[v] = load_bytes(codes + g * row + v * static_cast<int>(sizeof(Int)));
    }
#pragma GCC unroll 8
    for (int s = 0; s < kPerByte; ++s) {
      Int part[kVectors];
      for (int v = 0; v < kVectors; ++v) part[v] = field(raw[v], s * kBits, kMask);
      for (int h = 0; h < kCount; ++h) {
        const Int w = broadcast(weights[h] + (g * kPerByte + s) * 4);
        for (int v = 0; v < kVectors; ++v) sum[h][v] = dot(sum[h][v], part[v], w);
      }
    }
  }
  for (int h = 0; h < kCount; ++h) {
    for (int v = 0; v < kVectors; ++v) best[h] = larger(best[h], sum[h][v]);
  }
}

template <int kBits, int kCount>
void best_tokens(const SketchParams& params, const uint8_t* codes, const int8_t (*weights)[kMaxDim],
                 int32_t* best) {
  constexpr int kBytes = static_cast<int>(sizeof(Int));
  constexpr int kVectors = kBytes == 64 ? 4 : 2;
  Int top[kCount];
  for (int h = 0; h < kCount; ++h) top[h] = lowest();
  const int bytes = params.tokens * 4;
  int at = 0;
  for (; at + kVectors * kBytes <= bytes; at += kVectors * kBytes) {
    best_of_strip<kBits, kCount, kVectors>(params, codes + at, weights, top);
  }
  for (; at < bytes; at += kBytes) {
    best_of_strip<kBits, kCount, 1>(params, codes + at, weights, top);
  }
  for (int h = 0; h < kCount; ++h) best[h] = largest(top[h]);
}

#endif  // KVPAGER_ISA_LEVEL

template <int kBits>
void scan_sketches_of(const SketchParams& params, const std::byte* const* summaries, int64_t count,
                      double* scores) {
  const int64_t bytes = int64_t{params.padded_dim} * (params.tokens * kBits / 8 + 3) + 8;
  for (int64_t i = 0; i < count; ++i) {
    if (i + 1 < count) prefetch(summaries[i + 1], bytes);
    const Sketch sketch(params, summaries[i]);
    double score = 0.0;
    for (int first = 0; first < params.group; first += kHeads) {
      const int heads = params.group - first < kHeads ? params.group - first : kHeads;
      alignas(64) int8_t weights[kHeads][kMaxDim];
      const int16_t* q = params.q + int64_t{first} * params.padded_dim;
      for (int h = 0; h < heads; ++h) {
        weigh(q + h * params.padded_dim, sketch.step, params.padded_dim, weights[h]);
      }
      int32_t best[kHeads];
      switch (heads) {
        case 1:
          best_tokens<kBits, 1>(params, sketch.codes, weights, best);
          break;
        case 2:
          best_tokens<kBits, 2>(params, sketch.codes, weights, best);
          break;
        case 3:
          best_tokens<kBits, 3>(params, sketch.codes, weights, best);
          break;
        default:
          best_tokens<kBits, 4>(params, sketch.codes, weights, best);
          break;
      }
      for (int h = 0; h < heads; ++h) {
        const int32_t low = dot_low(q + h * params.padded_dim, sketch.low, params.padded_dim);
        const double value =
            combine(sketch.low_scale, low, 256.0 * static_cast<double>(sketch.step_scale), best[h]);
        if (first + h == 0 || value > score) score = value;
      }
    }
    scores[i] = score;
  }
}

void scan_sketches(const SketchParams& params, const std::byte* const* summaries, int64_t count,
                   double* scores) {
  if (params.bits == 1) {
    scan_sketches_of<1>(params, summaries, count, scores);
  } else {
    scan_sketches_of<2>(params, summaries, count, scores);
  }
}

// ---- boxes

// Sum of codes[d] * q[d]; count is a multiple of 64.
int32_t dot_codes(const uint8_t* codes, const int8_t* q, int count) {
#ifdef KVPAGER_VNNI
  Int sum = zero();
  for (int d = 0; d < count; d += 64) sum = dot(sum, load_bytes(codes + d), load_bytes(q + d));
  return _mm512_reduce_add_epi32(sum);
#else
  int32_t sum = 0;
  for (int d = 0; d < count; ++d) sum += int32_t{codes[d]} * q[d];
  return sum;
#endif
}

void scan_boxes(const BoxParams& params, const std::byte* const* summaries, int64_t count,
                double* scores) {
  const int64_t box_bytes = int64_t{params.padded_dim} * (params.spread ? 2 : 1);
  for (int64_t i = 0; i < count; ++i) {
    if (i + 4 < count) prefetch(summaries[i + 4], box_bytes * params.boxes + 8);
    const uint8_t* codes = reinterpret_cast<const uint8_t*>(summaries[i]);
    const float centre_scale = read_float(summaries[i] + box_bytes * params.boxes);
    const double spread_scale =
        static_cast<double>(read_float(summaries[i] + box_bytes * params.boxes + 4));
    double score = 0.0;
    for (int h = 0; h < params.group; ++h) {
      const int8_t* q = params.q + int64_t{h} * params.padded_dim;
      const int8_t* abs_q = params.abs_q + int64_t{h} * params.padded_dim;
      for (int b = 0; b < params.boxes; ++b) {
        const uint8_t* box = codes + b * box_bytes;
        const int32_t centre = dot_codes(box, q, params.padded_dim) - params.bias[h];
        const int32_t spread =
            params.spread ? dot_codes(box + params.padded_dim, abs_q, params.padded_dim) : 0;
        const double value = combine(centre_scale, centre, spread_scale, spread);
        if (h + b == 0 || value > score) score = value;
      }
    }
    scores[i] = score;
  }
}

}  // namespace
}  // namespace KVPAGER_ISA_NS
}  // namespace kvpager
