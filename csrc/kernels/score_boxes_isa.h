// Scans of boxes. Four dot products of each kind are folded together: of four heads with one box,
// of one head with four boxes, or of one head with four chunks of a box each.
#pragma once

#include "kernels/score_ints_isa.h"

namespace kvpager {
namespace KVPAGER_ISA_NS {
namespace {

constexpr int64_t kAheadBytes = 4096;

// Four boxes and the queries they are held against; entries may repeat.
struct FourBoxes {
  const uint8_t* box[kFour];  // centre codes, then spread codes
  const int8_t* q[kFour];
  const int8_t* abs_q[kFour];
  int32_t bias[kFour];
  double centre_scale[kFour];
  double spread_scale[kFour];
};

#if KVPAGER_ISA_LEVEL == 1

void score_four_boxes(const BoxParams& params, const FourBoxes& four, double* values) {
  for (int i = 0; i < kFour; ++i) {
    int32_t centre = -four.bias[i];
    int32_t spread = 0;
    const uint8_t* codes = four.box[i];
    for (int d = 0; d < params.padded_dim; ++d) centre += int32_t{codes[d]} * four.q[i][d];
    if (params.spread) {
      codes += params.padded_dim;
      for (int d = 0; d < params.padded_dim; ++d) spread += int32_t{codes[d]} * four.abs_q[i][d];
    }
    values[i] =
        combine(static_cast<float>(four.centre_scale[i]), centre, four.spread_scale[i], spread);
  }
}

#else

#ifdef KVPAGER_VNNI
// Adds the products of unsigned codes and signed queries.
KVPAGER_INLINE Int dot_box(Int sum, const uint8_t* codes, const int8_t* q, int count) {
  for (int d = 0; d < count; d += 64) {
    sum = dot_step(sum, load_bytes(codes + d), load_bytes(q + d));
  }
  return sum;
}
#else
KVPAGER_INLINE Int dot_box(Int sum, const uint8_t* codes, const int8_t* q, int count) {
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

void score_four_boxes(const BoxParams& params, const FourBoxes& four, double* values) {
  const int dim = params.padded_dim;
  Int centre[kFour];
  Int spread[kFour];
  for (int i = 0; i < kFour; ++i) {
    centre[i] = dot_box(zero(), four.box[i], four.q[i], dim);
    spread[i] = params.spread ? dot_box(zero(), four.box[i] + dim, four.abs_q[i], dim) : zero();
  }
  const __m128i bias = _mm_loadu_si128(reinterpret_cast<const __m128i*>(four.bias));
  _mm256_storeu_pd(
      values, combine_four(_mm256_loadu_pd(four.centre_scale), _mm_sub_epi32(sums_of(centre), bias),
                           _mm256_loadu_pd(four.spread_scale), sums_of(spread)));
}

#endif  // KVPAGER_ISA_LEVEL

// The summary at hand, of `count` that follow each other in an order of the caller's.
struct Boxes {
  Boxes(const BoxParams& params, const std::byte* summary)
      : codes(reinterpret_cast<const uint8_t*>(summary)) {
    const std::byte* scales =
        summary + int64_t{params.padded_dim} * (params.spread ? 2 : 1) * params.boxes;
    centre_scale = static_cast<double>(read_float(scales));
    spread_scale = static_cast<double>(read_float(scales + 4));
  }
  const uint8_t* codes;
  double centre_scale;
  double spread_scale;
};

KVPAGER_INLINE void set_head(const BoxParams& params, int row, int head, FourBoxes* four, int i) {
  const int64_t offset = int64_t{head} * params.padded_dim;
  four->q[i] = params.q[row] + offset;
  four->abs_q[i] = params.q[row] + int64_t{params.group} * params.padded_dim + offset;
  four->bias[i] = params.bias[row][head];
}

KVPAGER_INLINE void set_box(const Boxes& boxes, int64_t offset, FourBoxes* four, int i) {
  four->box[i] = boxes.codes + offset;
  four->centre_scale[i] = boxes.centre_scale;
  four->spread_scale[i] = boxes.spread_scale;
}

// One row of one head, one box a chunk.
void scan_single_boxes(const BoxParams& params, const std::byte* const* summaries, int64_t count,
                       int64_t ahead, double* scores) {
  const int64_t bytes = int64_t{params.padded_dim} * (params.spread ? 2 : 1) + 8;
  FourBoxes four;
  for (int i = 0; i < kFour; ++i) set_head(params, 0, 0, &four, i);
  double values[kFour];
  for (int64_t first = 0; first < count; first += kFour) {
    const int64_t some = count - first < kFour ? count - first : kFour;
    for (int i = 0; i < kFour; ++i) {
      const int64_t at = first + (i < some ? i : 0);
      set_box(Boxes(params, summaries[at]), 0, &four, i);
      if (at + ahead >= count) continue;
      for (int64_t b = 0; b < bytes; b += 64) prefetch(summaries[at + ahead] + b);
    }
    score_four_boxes(params, four, values);
    for (int i = 0; i < some; ++i) scores[first + i] = values[i];
  }
}

// The best of one head's boxes, four of them at a time.
double best_box(const BoxParams& params, const Boxes& boxes, int row, int head) {
  const int64_t box_bytes = int64_t{params.padded_dim} * (params.spread ? 2 : 1);
  FourBoxes four;
  for (int i = 0; i < kFour; ++i) set_head(params, row, head, &four, i);
  double best = 0.0;
  for (int first = 0; first < params.boxes; first += kFour) {
    const int some = params.boxes - first < kFour ? params.boxes - first : kFour;
    for (int i = 0; i < kFour; ++i) {
      set_box(boxes, (first + (i < some ? i : 0)) * box_bytes, &four, i);
    }
    double values[kFour];
    score_four_boxes(params, four, values);
    for (int i = 0; i < some; ++i) {
      if (first + i == 0 || values[i] > best) best = values[i];
    }
  }
  return best;
}

void scan_boxes(const BoxParams& params, const std::byte* const* summaries, int64_t count,
                double* const* scores) {
  const int64_t box_bytes = int64_t{params.padded_dim} * (params.spread ? 2 : 1);
  const int64_t bytes = box_bytes * params.boxes + 8;
  const int64_t ahead = 1 + kAheadBytes / bytes;
  const int heads = params.rows * params.group;
  if (heads == 1 && params.boxes == 1) {
    return scan_single_boxes(params, summaries, count, ahead, scores[0]);
  }
  const bool box_by_box = heads >= kFour || params.boxes < kFour;
  FourBoxes four;
  for (int64_t at = 0; at < count; ++at) {
    const Boxes boxes(params, summaries[at]);
    if (at + ahead < count) {
      for (int64_t b = 0; b < bytes; b += 64) prefetch(summaries[at + ahead] + b);
    }
    int row = 0;
    int head = 0;
    double best = 0.0;
    for (int first = 0; !box_by_box && first < heads; ++first) {
      const double value = best_box(params, boxes, row, head);
      if (head == 0 || value > best) best = value;
      if (++head == params.group) {
        scores[row++][at] = best;
        head = 0;
      }
    }
    for (int first = 0; box_by_box && first < heads; first += kFour) {
      const int some = heads - first < kFour ? heads - first : kFour;
      int of_row = row;
      int of_head = head;
      for (int i = 0; i < some; ++i) {
        set_head(params, of_row, of_head, &four, i);
        if (++of_head == params.group) ++of_row, of_head = 0;
      }
      for (int i = some; i < kFour; ++i) set_head(params, row, head, &four, i);
      double top[kFour];
      for (int b = 0; b < params.boxes; ++b) {
        double values[kFour];
        for (int i = 0; i < kFour; ++i) set_box(boxes, b * box_bytes, &four, i);
        score_four_boxes(params, four, values);
        for (int i = 0; i < kFour; ++i) {
          top[i] = b == 0 || values[i] > top[i] ? values[i] : top[i];
        }
      }
      for (int i = 0; i < some; ++i) {
        if (head == 0 || top[i] > best) best = top[i];
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
