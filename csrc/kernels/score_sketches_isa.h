// Scans of sketches. A summary is read once for all rows and query heads: its codes are unpacked
// where more than kPackedHeads heads use them, and four heads at a time walk them.
//
// Integers have no order, so that each tier may sum as it likes; the float steps at the end are
// spelled out in `combine`.
#pragma once

#include "kernels/score_ints_isa.h"

namespace kvpager {
namespace KVPAGER_ISA_NS {
namespace {

constexpr int kMaxDim = 512;
constexpr int kMaxTokens = 256;
constexpr int kPackedHeads = 8;  // more heads, and codes are unpacked once for all
constexpr int64_t kAhead = 2;    // summaries between the one in use and the one asked for

// Where a sketch's parts lie.
struct Sketch {
  Sketch(const SketchParams& params, const std::byte* summary)
      : codes(reinterpret_cast<const uint8_t*>(summary)),
        low(reinterpret_cast<const int16_t*>(summary + int64_t{params.padded_dim} * params.tokens *
                                                           params.bits / 8)),
        step(reinterpret_cast<const uint8_t*>(low + params.padded_dim)),
        low_scale(read_float(reinterpret_cast<const std::byte*>(step + params.padded_dim))),
        step_scale(256.0 * static_cast<double>(read_float(
                               reinterpret_cast<const std::byte*>(step + params.padded_dim + 4)))) {
  }

  const uint8_t* codes;
  const int16_t* low;
  const uint8_t* step;
  float low_scale;
  double step_scale;
};

// Four heads' queries, and what they weigh a dimension's codes with: (q * step + 128) >> 8.
struct FourHeads {
  const int16_t* q[kFour];
  alignas(64) int8_t weights[kFour][kMaxDim];
};

#if KVPAGER_ISA_LEVEL == 1

void weigh(const int16_t* q, const uint8_t* step, int count, int8_t* weights) {
  for (int d = 0; d < count; ++d) {
    weights[d] = static_cast<int8_t>((int32_t{q[d]} * step[d] + 128) >> 8);
  }
}

// [D / 4][tokens][4] codes, a byte each.
template <int kBits>
void unpack(const SketchParams& params, const uint8_t* codes, ptrdiff_t, uint8_t* out) {
  constexpr int kPerByte = 8 / kBits;
  constexpr int kMask = (1 << kBits) - 1;
  const int row = params.tokens * 4;
  for (int g = 0; g < params.padded_dim / (4 * kPerByte); ++g) {
    for (int s = 0; s < kPerByte; ++s) {
      for (int i = 0; i < row; ++i) {
        out[i] = static_cast<uint8_t>((codes[i] >> (s * kBits)) & kMask);
      }
      out += row;
    }
    codes += row;
  }
}

// Sums of 64 steps of at most 3 * 127 fit into 16 bits.
int32_t best_token(const SketchParams& params, const uint8_t* unpacked, const int8_t* weights) {
  constexpr int kGroups = 64;
  const int row = params.tokens * 4;
  int32_t sums[kMaxTokens] = {};
  int16_t bytes[kMaxTokens * 4];
  for (int first = 0; first < params.padded_dim / 4; first += kGroups) {
    const int rest = params.padded_dim / 4 - first;
    std::memset(bytes, 0, sizeof bytes);
    for (int g = first; g < first + (rest < kGroups ? rest : kGroups); ++g) {
      int16_t w[16];
      for (int i = 0; i < 16; ++i) w[i] = weights[4 * g + i % 4];
      const uint8_t* codes = unpacked + int64_t{g} * row;
      for (int t = 0; t < row; t += 16) {
        for (int i = 0; i < 16; ++i) {
          bytes[t + i] = static_cast<int16_t>(bytes[t + i] + w[i] * codes[t + i]);
        }
      }
    }
    for (int t = 0; t < params.tokens; ++t) {
      for (int b = 0; b < 4; ++b) sums[t] += bytes[4 * t + b];
    }
  }
  int32_t best = sums[0];
  for (int t = 1; t < params.tokens; ++t) best = sums[t] > best ? sums[t] : best;
  return best;
}

template <int kBits, int kCount, int kTokens>
void score_four(const SketchParams& params, const Sketch& sketch, const uint8_t* unpacked,
                ptrdiff_t, FourHeads* heads, double* values) {
  alignas(64) uint8_t own[kMaxDim * kMaxTokens];
  if (unpacked == nullptr) unpack<kBits>(params, sketch.codes, 0, own);
  for (int h = 0; h < kCount; ++h) {
    weigh(heads->q[h], sketch.step, params.padded_dim, heads->weights[h]);
    int32_t low = 0;
    for (int d = 0; d < params.padded_dim; ++d) low += int32_t{heads->q[h][d]} * sketch.low[d];
    const int32_t best =
        best_token(params, unpacked == nullptr ? own : unpacked, heads->weights[h]);
    values[h] = combine(sketch.low_scale, low, sketch.step_scale, best);
  }
}

#else

void weigh(const int16_t* q, const uint8_t* step, int count, int8_t* weights) {
#if KVPAGER_ISA_LEVEL == 4
  for (int d = 0; d < count; d += 32) {
    const __m256i bytes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(step + d));
    const __m512i wide = _mm512_slli_epi16(_mm512_cvtepu8_epi16(bytes), 7);
    const __m512i product = _mm512_mulhrs_epi16(_mm512_loadu_si512(q + d), wide);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(weights + d), _mm512_cvtepi16_epi8(product));
  }
#else
  for (int d = 0; d < count; d += 32) {
    __m256i product[2];
    for (int i = 0; i < 2; ++i) {
      const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(step + d + 16 * i));
      product[i] = _mm256_mulhrs_epi16(load_bytes(q + d + 16 * i),
                                       _mm256_slli_epi16(_mm256_cvtepu8_epi16(bytes), 7));
    }
    store_bytes(weights + d,
                _mm256_permute4x64_epi64(_mm256_packs_epi16(product[0], product[1]), 0xD8));
  }
#endif
}

KVPAGER_INLINE Int dot_low(const int16_t* q, const int16_t* low, int count) {
  Int sum = zero();
  for (int d = 0; d < count; d += kIntBytes / 2) {
#ifdef KVPAGER_VNNI
    sum = _mm512_dpwssd_epi32(sum, load_bytes(q + d), load_bytes(low + d));
#else
    sum = add_int(sum, pair_sums(load_bytes(q + d), load_bytes(low + d)));
#endif
  }
  return sum;
}

// [D / 4][tokens][4] codes, a byte each.
template <int kBits>
void unpack(const SketchParams& params, const uint8_t* codes, ptrdiff_t ahead, uint8_t* out) {
  constexpr int kPerByte = 8 / kBits;
  constexpr int kMask = (1 << kBits) - 1;
  const int row = params.tokens * 4;
  for (int g = 0; g < params.padded_dim / (4 * kPerByte); ++g) {
    for (int at = 0; at < row; at += kIntBytes) {
      if (at % 64 == 0) prefetch(codes + at + ahead);
      const Int raw = load_bytes(codes + at);
#pragma GCC unroll 8
      for (int s = 0; s < kPerByte; ++s) {
        store_bytes(out + s * row + at, field(raw, s * kBits, kMask));
      }
    }
    codes += row;
    out += kPerByte * row;
  }
}

template <int kCount, int kVectors>
KVPAGER_INLINE void clear(Int (&sum)[kCount][kVectors]) {
  for (int h = 0; h < kCount; ++h) {
    for (int v = 0; v < kVectors; ++v) sum[h][v] = zero();
  }
}

// Adds to sum[h][v] what the codes [first, last) of vector v give head h, in groups of a code of
// every byte's. kBits of 8: unpacked codes.
template <int kBits, int kCount, int kVectors>
KVPAGER_INLINE void walk_groups(int64_t row, int first, int last, const uint8_t* codes,
                                ptrdiff_t ahead, const FourHeads& heads,
                                Int (&sum)[kCount][kVectors]) {
  constexpr int kPerByte = 8 / kBits;
  constexpr int kMask = (1 << kBits) - 1;
  for (int g = first; g < last; ++g) {
    Int raw[kVectors];
    for (int v = 0; v < kVectors; ++v) {
      const uint8_t* p = codes + g * row + v * kIntBytes;
      if (kBits < 8 && v * kIntBytes % 64 == 0) prefetch(p + ahead);
      raw[v] = load_bytes(p);
    }
#pragma GCC unroll 8
    for (int s = 0; s < kPerByte; ++s) {
      Int part[kVectors];
      for (int v = 0; v < kVectors; ++v) {
        part[v] = kBits < 8 ? field(raw[v], s * kBits, kMask) : raw[v];
      }
      for (int h = 0; h < kCount; ++h) {
        const Int w = splat_four(heads.weights[h] + (g * kPerByte + s) * 4);
        for (int v = 0; v < kVectors; ++v) sum[h][v] = dot_step(sum[h][v], part[v], w);
      }
    }
  }
}

// top[h] = larger(top[h], sums of the tokens of kVectors vectors).
template <int kBits, int kCount, int kVectors>
KVPAGER_INLINE void walk_strip(int64_t row, int groups, const uint8_t* codes, ptrdiff_t ahead,
                               const FourHeads& heads, Int* top) {
  Int sum[kCount][kVectors];
  clear(sum);
#ifdef KVPAGER_VNNI
  walk_groups<kBits>(row, 0, groups, codes, ahead, heads, sum);
#else
  constexpr int kGroups = kSteps * kBits / 8;
  Int part[kCount][kVectors];
  for (int first = 0; first < groups; first += kGroups) {
    const int last = groups - first < kGroups ? groups : first + kGroups;
    clear(part);
    walk_groups<kBits>(row, first, last, codes, ahead, heads, part);
    for (int h = 0; h < kCount; ++h) {
      for (int v = 0; v < kVectors; ++v) sum[h][v] = add_int(sum[h][v], flush(part[h][v]));
    }
  }
#endif
  for (int h = 0; h < kCount; ++h) {
    for (int v = 0; v < kVectors; ++v) top[h] = larger(top[h], sum[h][v]);
  }
}

#ifdef KVPAGER_VNNI
// One or two heads: no time to spare for shifts. A field is left where it lies in its byte, so that
// its sums are 2^(kBits s) times what they should be, and are shifted once at the end.
template <int kBits, int kCount, int kVectors>
KVPAGER_INLINE void walk_in_place(int64_t row, int groups, const uint8_t* codes, ptrdiff_t ahead,
                                  const FourHeads& heads, Int* top) {
  constexpr int kPerByte = 8 / kBits;
  constexpr int kMask = (1 << kBits) - 1;
  constexpr int kSums = 4;  // fields with sums of their own; a later field is shifted down to one
  Int sum[kSums][kCount][kVectors];
  for (int s = 0; s < kSums; ++s) clear(sum[s]);
  for (int g = 0; g < groups; ++g) {
    Int raw[kVectors];
    for (int v = 0; v < kVectors; ++v) {
      const uint8_t* p = codes + g * row + v * kIntBytes;
      prefetch(p + ahead);
      raw[v] = load_bytes(p);
    }
#pragma GCC unroll 8
    for (int s = 0; s < kPerByte; ++s) {
      if (s == kSums) {
        for (int v = 0; v < kVectors; ++v) raw[v] = _mm512_srli_epi16(raw[v], kSums * kBits);
      }
      for (int h = 0; h < kCount; ++h) {
        const Int w = splat_four(heads.weights[h] + (g * kPerByte + s) * 4);
        for (int v = 0; v < kVectors; ++v) {
          const Int part = field(raw[v], 0, kMask << (s % kSums * kBits));
          sum[s % kSums][h][v] = dot_step(sum[s % kSums][h][v], part, w);
        }
      }
    }
  }
  for (int h = 0; h < kCount; ++h) {
    for (int v = 0; v < kVectors; ++v) {
      Int total = sum[0][h][v];
      for (int s = 1; s < kSums; ++s) {
        total = add_int(total, _mm512_srai_epi32(sum[s][h][v], static_cast<unsigned>(s * kBits)));
      }
      top[h] = larger(top[h], total);
    }
  }
}
#endif

// kTokens of 0: any.
template <int kBits, int kCount, int kTokens>
KVPAGER_INLINE void walk(const SketchParams& params, const uint8_t* codes, ptrdiff_t ahead,
                         const FourHeads& heads, Int* top) {
  const int bytes = (kTokens != 0 ? kTokens : params.tokens) * 4;
  const int groups = params.padded_dim * kBits / 32;
  int at = 0;
#ifdef KVPAGER_VNNI
  constexpr bool kInPlace = kBits < 8 && kCount <= 2;
  constexpr int kVectors = kInPlace ? 4 / kCount : 4;
  if constexpr (kInPlace) {
    for (; at + kVectors * kIntBytes <= bytes; at += kVectors * kIntBytes) {
      walk_in_place<kBits, kCount, kVectors>(bytes, groups, codes + at, ahead, heads, top);
    }
  }
#else
  constexpr int kVectors = 2;
#endif
  for (; at + kVectors * kIntBytes <= bytes; at += kVectors * kIntBytes) {
    walk_strip<kBits, kCount, kVectors>(bytes, groups, codes + at, ahead, heads, top);
  }
  for (; at < bytes; at += kIntBytes) {
    walk_strip<kBits, kCount, 1>(bytes, groups, codes + at, ahead, heads, top);
  }
}

template <int kBits, int kCount, int kTokens>
__attribute__((noinline)) void score_four(const SketchParams& params, const Sketch& sketch,
                                          const uint8_t* unpacked, ptrdiff_t ahead,
                                          FourHeads* heads, double* values) {
  Int top[kFour];
  Int low[kFour];
  for (int h = 0; h < kFour; ++h) {
    low[h] = zero();
    top[h] = splat_int(INT32_MIN);
  }
  for (int h = 0; h < kCount; ++h) {
    weigh(heads->q[h], sketch.step, params.padded_dim, heads->weights[h]);
    low[h] = dot_low(heads->q[h], sketch.low, params.padded_dim);
  }
  if (unpacked != nullptr) {
    walk<8, kCount, kTokens>(params, unpacked, 0, *heads, top);
  } else {
    walk<kBits, kCount, kTokens>(params, sketch.codes, ahead, *heads, top);
  }
  _mm256_storeu_pd(values,
                   combine_four(_mm256_set1_pd(static_cast<double>(sketch.low_scale)), sums_of(low),
                                _mm256_set1_pd(sketch.step_scale), largest_of(top)));
}

#endif  // KVPAGER_ISA_LEVEL

template <int kBits, int kTokens>
void scan_sketches_of(const SketchParams& params, const std::byte* const* summaries, int64_t count,
                      double* const* scores) {
  const int heads = params.rows * params.group;
  const int64_t code_bytes = int64_t{params.padded_dim} * params.tokens * kBits / 8;
  const int64_t tail_bytes = int64_t{params.padded_dim} * 3 + 8;
  alignas(64) uint8_t unpacked[kMaxDim * kMaxTokens];
  const uint8_t* shared = heads > kPackedHeads ? unpacked : nullptr;
  FourHeads four;
  for (int64_t i = 0; i < count; ++i) {
    const Sketch sketch(params, summaries[i]);
    const std::byte* next = summaries[i + kAhead < count ? i + kAhead : i];
    const ptrdiff_t ahead = next - summaries[i];
    for (int64_t at = 0; at < tail_bytes; at += 64) prefetch(next + code_bytes + at);
    if (shared != nullptr) unpack<kBits>(params, sketch.codes, ahead, unpacked);
    int row = 0;
    int head = 0;
    double best = 0.0;
    for (int first = 0; first < heads; first += kFour) {
      const int some = heads - first < kFour ? heads - first : kFour;
      int of_row = row;
      int of_head = head;
      for (int h = 0; h < some; ++h) {
        four.q[h] = params.q[of_row] + int64_t{of_head} * params.padded_dim;
        if (++of_head == params.group) ++of_row, of_head = 0;
      }
      double values[kFour];
      switch (some) {
        case 1:
          score_four<kBits, 1, kTokens>(params, sketch, shared, ahead, &four, values);
          break;
        case 2:
          score_four<kBits, 2, kTokens>(params, sketch, shared, ahead, &four, values);
          break;
        case 3:
          score_four<kBits, 3, kTokens>(params, sketch, shared, ahead, &four, values);
          break;
        default:
          score_four<kBits, 4, kTokens>(params, sketch, shared, first == 0 ? ahead : 0, &four,
                                        values);
          break;
      }
      for (int h = 0; h < some; ++h) {
        if (head == 0 || values[h] > best) best = values[h];
        if (++head == params.group) {
          scores[row++][i] = best;
          head = 0;
        }
      }
    }
  }
}

void scan_sketches(const SketchParams& params, const std::byte* const* summaries, int64_t count,
                   double* const* scores) {
  const bool usual = params.tokens == 64;
  if (params.bits == 1) {
    (usual ? scan_sketches_of<1, 64> : scan_sketches_of<1, 0>)(params, summaries, count, scores);
  } else {
    (usual ? scan_sketches_of<2, 64> : scan_sketches_of<2, 0>)(params, summaries, count, scores);
  }
}

}  // namespace
}  // namespace KVPAGER_ISA_NS
}  // namespace kvpager
