// Scans of sketches. A summary is read once for all rows and query heads; four heads at a time walk
// its codes, which stay packed: unpacking them for many heads gains nothing.
//
// Integers have no order, so that each tier may sum as it likes; the float steps at the end are
// spelled out in `combine`.
#pragma once

#include "kernels/score_ints_isa.h"

namespace kvpager {
namespace KVPAGER_ISA_NS {
namespace {

constexpr int kBits = 2;       // of a code
constexpr int64_t kAhead = 2;  // summaries between the one in use and the one asked for

// Where a sketch's parts lie.
struct Sketch {
  Sketch(const SketchParams& params, const std::byte* summary)
      : codes(reinterpret_cast<const uint8_t*>(summary)),
        low(reinterpret_cast<const int16_t*>(summary + int64_t{params.padded_dim} * params.tokens *
                                                           kBits / 8)),
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
  alignas(64) int8_t weights[kFour][kMostDim];
};

#if KVPAGER_ISA_LEVEL == 1

void weigh(const int16_t* q, const uint8_t* step, int count, int8_t* weights) {
  for (int d = 0; d < count; ++d) {
    weights[d] = static_cast<int8_t>((int32_t{q[d]} * step[d] + 128) >> 8);
  }
}

// [D / 4][tokens][4] codes, a byte each.
void unpack(const SketchParams& params, const uint8_t* codes, uint8_t* out) {
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
  int32_t sums[kMostChunkTokens] = {};
  int16_t bytes[kMostChunkTokens * 4];
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

template <int kCount, int kTokens>
void score_four(const SketchParams& params, const Sketch& sketch, ptrdiff_t, FourHeads* heads,
                double* values) {
  alignas(64) uint8_t unpacked[kMostDim * kMostChunkTokens];
  unpack(params, sketch.codes, unpacked);
  for (int h = 0; h < kCount; ++h) {
    weigh(heads->q[h], sketch.step, params.padded_dim, heads->weights[h]);
    int32_t low = 0;
    for (int d = 0; d < params.padded_dim; ++d) low += int32_t{heads->q[h][d]} * sketch.low[d];
    const int32_t best = best_token(params, unpacked, heads->weights[h]);
    values[h] = combine(sketch.low_scale, low, sketch.step_scale, best);
  }
}

#else

// 32 dimensions' steps, as 16-bit fractions.
struct Steps {
#if KVPAGER_ISA_LEVEL == 4
  explicit Steps(const uint8_t* step)
      : wide(_mm512_slli_epi16(
            _mm512_cvtepu8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(step))), 7)) {}
  // (q * step + 128) >> 8.
  KVPAGER_INLINE void weigh(const Int (&q)[1], int8_t* weights) const {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(weights),
                        _mm512_cvtepi16_epi8(_mm512_mulhrs_epi16(q[0], wide)));
  }
  Int wide;
#else
  explicit Steps(const uint8_t* step) {
    for (int i = 0; i < 2; ++i) {
      const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(step + 16 * i));
      wide[i] = _mm256_slli_epi16(_mm256_cvtepu8_epi16(bytes), 7);
    }
  }
  KVPAGER_INLINE void weigh(const Int (&q)[2], int8_t* weights) const {
    store_bytes(weights,
                _mm256_permute4x64_epi64(_mm256_packs_epi16(_mm256_mulhrs_epi16(q[0], wide[0]),
                                                            _mm256_mulhrs_epi16(q[1], wide[1])),
                                         0xD8));
  }
  Int wide[2];
#endif
};

// The weights of kCount heads, and low[h] = their queries' products with the chunk's lows, in lanes.
template <int kCount>
KVPAGER_INLINE void weigh_heads(const Sketch& sketch, int count, FourHeads* heads, Int* low) {
  constexpr int kVectors = 64 / kIntBytes;
  for (int d = 0; d < count; d += kSketchDims) {
    const Steps steps(sketch.step + d);
    Int lows[kVectors];
    for (int v = 0; v < kVectors; ++v) lows[v] = load_bytes(sketch.low + d + v * kIntBytes / 2);
    for (int h = 0; h < kCount; ++h) {
      Int q[kVectors];
      for (int v = 0; v < kVectors; ++v) {
        q[v] = load_bytes(heads->q[h] + d + v * kIntBytes / 2);
        low[h] = add_pair_sums(low[h], q[v], lows[v]);
      }
      steps.weigh(q, heads->weights[h] + d);
    }
  }
}

template <int kCount, int kVectors>
KVPAGER_INLINE void clear(Int (&sum)[kCount][kVectors]) {
  for (int h = 0; h < kCount; ++h) {
    for (int v = 0; v < kVectors; ++v) sum[h][v] = zero();
  }
}

// Adds to sum[h][v] what the codes [first, last) of vector v give head h, in groups of a code of
// every byte's.
template <int kCount, int kVectors>
KVPAGER_INLINE void walk_groups(int64_t row, int first, int last, const uint8_t* codes,
                                ptrdiff_t ahead, const FourHeads& heads,
                                Int (&sum)[kCount][kVectors]) {
  constexpr int kPerByte = 8 / kBits;
  constexpr int kMask = (1 << kBits) - 1;
  for (int g = first; g < last; ++g) {
    Int raw[kVectors];
    for (int v = 0; v < kVectors; ++v) {
      const uint8_t* p = codes + g * row + v * kIntBytes;
      if (v * kIntBytes % 64 == 0) prefetch(p + ahead);
      raw[v] = load_bytes(p);
    }
#pragma GCC unroll 8
    for (int s = 0; s < kPerByte; ++s) {
      Int part[kVectors];
      for (int v = 0; v < kVectors; ++v) part[v] = field(raw[v], s * kBits, kMask);
      for (int h = 0; h < kCount; ++h) {
        const Int w = splat_four(heads.weights[h] + (g * kPerByte + s) * 4);
        for (int v = 0; v < kVectors; ++v) sum[h][v] = dot_step(sum[h][v], part[v], w);
      }
    }
  }
}

// top[h] = larger(top[h], sums of the tokens of kVectors vectors).
template <int kCount, int kVectors>
KVPAGER_INLINE void walk_strip(int64_t row, int groups, const uint8_t* codes, ptrdiff_t ahead,
                               const FourHeads& heads, Int* top) {
  Int sum[kCount][kVectors];
  clear(sum);
#ifdef KVPAGER_VNNI
  walk_groups(row, 0, groups, codes, ahead, heads, sum);
#else
  constexpr int kGroups = kSteps * kBits / 8;
  walk_groups(row, 0, groups < kGroups ? groups : kGroups, codes, ahead, heads, sum);
  for (int h = 0; h < kCount; ++h) {
    for (int v = 0; v < kVectors; ++v) sum[h][v] = flush(sum[h][v]);
  }
  for (int first = kGroups; first < groups; first += kGroups) {
    const int last = groups - first < kGroups ? groups : first + kGroups;
    Int part[kCount][kVectors];
    clear(part);
    walk_groups(row, first, last, codes, ahead, heads, part);
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
constexpr int kStrip = 4;

// A lone head: no time to spare for shifts. A field is left where it lies in its byte, so that its
// sums are 2^(kBits s) times what they should be, and are shifted once at the end.
KVPAGER_INLINE void walk_in_place(int64_t row, int groups, const uint8_t* codes, ptrdiff_t ahead,
                                  const FourHeads& heads, Int* top) {
  constexpr int kPerByte = 8 / kBits;
  constexpr int kMask = (1 << kBits) - 1;
  constexpr int kSums = 4;  // fields with sums of their own; a later field is shifted down to one
  Int sum[kSums][1][kStrip];
  for (int s = 0; s < kSums; ++s) clear(sum[s]);
  for (int g = 0; g < groups; ++g) {
    Int raw[kStrip];
    for (int v = 0; v < kStrip; ++v) {
      const uint8_t* p = codes + g * row + v * kIntBytes;
      prefetch(p + ahead);
      raw[v] = load_bytes(p);
    }
#pragma GCC unroll 8
    for (int s = 0; s < kPerByte; ++s) {
      if (s == kSums) {
        for (int v = 0; v < kStrip; ++v) raw[v] = _mm512_srli_epi16(raw[v], kSums * kBits);
      }
      const Int w = splat_four(heads.weights[0] + (g * kPerByte + s) * 4);
      for (int v = 0; v < kStrip; ++v) {
        const Int part = field(raw[v], 0, kMask << (s % kSums * kBits));
        sum[s % kSums][0][v] = dot_step(sum[s % kSums][0][v], part, w);
      }
    }
  }
  for (int v = 0; v < kStrip; ++v) {
    Int total = sum[0][0][v];
    for (int s = 1; s < kSums; ++s) {
      total = add_int(total, _mm512_srai_epi32(sum[s][0][v], static_cast<unsigned>(s * kBits)));
    }
    top[0] = larger(top[0], total);
  }
}
#else
constexpr int kStrip = 2;
#endif

// kTokens of 0: any.
template <int kCount, int kTokens>
KVPAGER_INLINE void walk(const SketchParams& params, const uint8_t* codes, ptrdiff_t ahead,
                         const FourHeads& heads, Int* top) {
  const int bytes = (kTokens != 0 ? kTokens : params.tokens) * 4;
  const int groups = params.padded_dim * kBits / 32;
  int at = 0;
#ifdef KVPAGER_VNNI
  if constexpr (kCount == 1) {
    for (; at + kStrip * kIntBytes <= bytes; at += kStrip * kIntBytes) {
      walk_in_place(bytes, groups, codes + at, ahead, heads, top);
    }
  }
#endif
  for (; at + kStrip * kIntBytes <= bytes; at += kStrip * kIntBytes) {
    walk_strip<kCount, kStrip>(bytes, groups, codes + at, ahead, heads, top);
  }
  for (; at < bytes; at += kIntBytes) {
    walk_strip<kCount, 1>(bytes, groups, codes + at, ahead, heads, top);
  }
}

template <int kCount, int kTokens>
__attribute__((noinline)) void score_four(const SketchParams& params, const Sketch& sketch,
                                          ptrdiff_t ahead, FourHeads* heads, double* values) {
  Int top[kFour];
  Int low[kFour];
  for (int h = 0; h < kFour; ++h) {
    low[h] = zero();
    top[h] = splat_int(INT32_MIN);
  }
  weigh_heads<kCount>(sketch, params.padded_dim, heads, low);
  walk<kCount, kTokens>(params, sketch.codes, ahead, *heads, top);
  _mm256_storeu_pd(values,
                   combine_four(_mm256_set1_pd(static_cast<double>(sketch.low_scale)), sums_of(low),
                                _mm256_set1_pd(sketch.step_scale), largest_of(top)));
}

#endif  // KVPAGER_ISA_LEVEL

template <int kTokens>
void scan_sketches_of(const SketchParams& params, const std::byte* const* summaries, int64_t count,
                      double* const* scores) {
  const int heads = params.rows * params.group;
  const int64_t code_bytes = int64_t{params.padded_dim} * params.tokens * kBits / 8;
  const int64_t tail_bytes = int64_t{params.padded_dim} * 3 + 8;
  FourHeads four;
  for (int64_t i = 0; i < count; ++i) {
    const Sketch sketch(params, summaries[i]);
    const std::byte* next = summaries[i + kAhead < count ? i + kAhead : i];
    const ptrdiff_t ahead = next - summaries[i];
    for (int64_t at = 0; at < tail_bytes; at += 64) prefetch(next + code_bytes + at);
    int row = 0;
    int head = 0;
    double best = 0.0;
    for (int first = 0; first < heads; first += kFour) {
      const int some = heads - first < kFour ? heads - first : kFour;
      int of_row = row;
      int of_head = head;
      for (int h = 0; h < some; ++h) {
        four.q[h] = reinterpret_cast<const int16_t*>(params.queries[of_row] + kQueryHeaderBytes) +
                    int64_t{of_head} * params.padded_dim;
        if (++of_head == params.group) ++of_row, of_head = 0;
      }
      double values[kFour];
      switch (some) {
        case 1:
          score_four<1, kTokens>(params, sketch, ahead, &four, values);
          break;
        case 2:
          score_four<2, kTokens>(params, sketch, ahead, &four, values);
          break;
        case 3:
          score_four<3, kTokens>(params, sketch, ahead, &four, values);
          break;
        default:
          score_four<4, kTokens>(params, sketch, first == 0 ? ahead : 0, &four, values);
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
  (params.tokens == 64 ? scan_sketches_of<64> : scan_sketches_of<0>)(params, summaries, count,
                                                                     scores);
}

}  // namespace
}  // namespace KVPAGER_ISA_NS
}  // namespace kvpager
