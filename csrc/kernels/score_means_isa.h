// Scans of mean keys: four dot products are folded together, of four heads of a chunk, or of a lone
// head and four chunks.
#pragma once

#include "kernels/score_ints_isa.h"

namespace kvpager {
namespace KVPAGER_ISA_NS {
namespace {

constexpr int64_t kAheadBytes = 4096;

// Four means and the queries they are held against; entries may repeat.
struct FourMeans {
  const uint8_t* mean[kFour];
  const int8_t* q[kFour];
  int32_t bias[kFour];
  double scale[kFour];
};

#if KVPAGER_ISA_LEVEL == 1

void score_four_means(const MeanParams& params, const FourMeans& four, double* values) {
  for (int i = 0; i < kFour; ++i) {
    int32_t sum = -four.bias[i];
    for (int d = 0; d < params.padded_dim; ++d) sum += int32_t{four.mean[i][d]} * four.q[i][d];
    values[i] = combine(static_cast<float>(four.scale[i]), sum, 0.0, 0);
  }
}

#else

#ifdef KVPAGER_VNNI
// Adds the products of unsigned codes and signed queries.
KVPAGER_INLINE Int dot_mean(Int sum, const uint8_t* codes, const int8_t* q, int count) {
  for (int d = 0; d < count; d += 64) {
    sum = dot_step(sum, load_bytes(codes + d), load_bytes(q + d));
  }
  return sum;
}
#else
KVPAGER_INLINE Int dot_mean(Int sum, const uint8_t* codes, const int8_t* q, int count) {
  for (int d = 0; d < count; d += kIntBytes / 2) {
#if KVPAGER_ISA_LEVEL == 4
    const Int wide =
        _mm512_cvtepu8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes + d)));
    const Int query =
        _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(q + d)));
#else
    const Int wide =
        _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(codes + d)));
    const Int query =
        _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(q + d)));
#endif
    sum = add_int(sum, pair_sums(wide, query));
  }
  return sum;
}
#endif

void score_four_means(const MeanParams& params, const FourMeans& four, double* values) {
  Int sums[kFour];
  for (int i = 0; i < kFour; ++i) {
    sums[i] = dot_mean(zero(), four.mean[i], four.q[i], params.padded_dim);
  }
  const __m128i bias = _mm_loadu_si128(reinterpret_cast<const __m128i*>(four.bias));
  _mm256_storeu_pd(values,
                   combine_four(_mm256_loadu_pd(four.scale), _mm_sub_epi32(sums_of(sums), bias),
                                _mm256_setzero_pd(), _mm_setzero_si128()));
}

#endif  // KVPAGER_ISA_LEVEL

KVPAGER_INLINE void set_head(const MeanParams& params, int row, int head, FourMeans* four, int i) {
  four->q[i] = params.q[row] + int64_t{head} * params.padded_dim;
  four->bias[i] = params.bias[row][head];
}

KVPAGER_INLINE void set_mean(const MeanParams& params, const std::byte* summary, FourMeans* four,
                             int i) {
  four->mean[i] = reinterpret_cast<const uint8_t*>(summary);
  four->scale[i] = static_cast<double>(read_float(summary + params.padded_dim));
}

// A lone head: four chunks at a time.
void scan_means_of_one(const MeanParams& params, const std::byte* const* summaries, int64_t count,
                       double* scores) {
  const int64_t bytes = int64_t{params.padded_dim} + 8;
  const int64_t ahead = 1 + kAheadBytes / bytes;
  FourMeans four;
  for (int i = 0; i < kFour; ++i) set_head(params, 0, 0, &four, i);
  double values[kFour];
  for (int64_t first = 0; first < count; first += kFour) {
    const int64_t some = count - first < kFour ? count - first : kFour;
    for (int i = 0; i < kFour; ++i) {
      const int64_t at = first + (i < some ? i : 0);
      set_mean(params, summaries[at], &four, i);
      if (at + ahead >= count) continue;
      for (int64_t b = 0; b < bytes; b += 64) prefetch(summaries[at + ahead] + b);
    }
    score_four_means(params, four, values);
    for (int i = 0; i < some; ++i) scores[first + i] = values[i];
  }
}

void scan_means(const MeanParams& params, const std::byte* const* summaries, int64_t count,
                double* const* scores) {
  const int heads = params.rows * params.group;
  if (heads == 1) return scan_means_of_one(params, summaries, count, scores[0]);
  const int64_t bytes = int64_t{params.padded_dim} + 8;
  const int64_t ahead = 1 + kAheadBytes / bytes;
  FourMeans four;
  for (int64_t at = 0; at < count; ++at) {
    for (int i = 0; i < kFour; ++i) set_mean(params, summaries[at], &four, i);
    if (at + ahead < count) {
      for (int64_t b = 0; b < bytes; b += 64) prefetch(summaries[at + ahead] + b);
    }
    int row = 0;
    int head = 0;
    double best = 0.0;
    for (int first = 0; first < heads; first += kFour) {
      const int some = heads - first < kFour ? heads - first : kFour;
      int of_row = row;
      int of_head = head;
      for (int i = 0; i < some; ++i) {
        set_head(params, of_row, of_head, &four, i);
        if (++of_head == params.group) ++of_row, of_head = 0;
      }
      for (int i = some; i < kFour; ++i) set_head(params, row, head, &four, i);
      double values[kFour];
      score_four_means(params, four, values);
      for (int i = 0; i < some; ++i) {
        if (head == 0 || values[i] > best) best = values[i];
        if (++head == params.group) {
          scores[row++][at] = best;
          head = 0;
        }
      }
    }
  }
}

}  // namespace
}  // namespace KVPAGER_ISA_NS
}  // namespace kvpager
