// y = x W^T + b for few rows, of copies of the weights in 12 bits (kvpager/compressed_weights.h): each
// group is unpacked to the nearest cache and multiplied there, as the weights are. Included by
// linear_isa.cc only.
#pragma once

#include "compute/linear_elements_isa.h"
#include "kvpager/compressed_weights.h"

namespace kvpager {
namespace KVPAGER_ISA_NS {
namespace {

// The steps of a group along the depth.
template <class Type>
constexpr int kGroupSteps = kCompressedGroup / Type::kStep;

// Of the low bytes and the high ones of elements: the steps that these are.
#if KVPAGER_ISA_LEVEL == 4
// The lower halves of two registers, and the upper ones.
KVPAGER_INLINE __m512i lower_halves(__m512i a, __m512i b) {
  return _mm512_shuffle_i64x2(a, b, 0x44);
}
KVPAGER_INLINE __m512i upper_halves(__m512i a, __m512i b) {
  return _mm512_shuffle_i64x2(a, b, 0xEE);
}
KVPAGER_INLINE void into_steps(__m512i low, __m512i high, BFloat16Pairs (&steps)[2]) {
  const __m512i first = _mm512_unpacklo_epi8(low, high), second = _mm512_unpackhi_epi8(low, high);
  steps[0] = {lower_halves(first, second)};
  steps[1] = {upper_halves(first, second)};
}
KVPAGER_INLINE void into_steps(__m512i low, __m512i high, Vec (&steps)[4]) {
  const __m512i zero = _mm512_setzero_si512();
  const __m512i both[2] = {_mm512_unpacklo_epi8(low, high), _mm512_unpackhi_epi8(low, high)};
#pragma GCC unroll 2
  for (int i = 0; i < 2; ++i) {
    const __m512i first = _mm512_unpacklo_epi16(zero, both[i]);
    const __m512i second = _mm512_unpackhi_epi16(zero, both[i]);
    steps[i] = {_mm512_castsi512_ps(lower_halves(first, second))};
    steps[2 + i] = {_mm512_castsi512_ps(upper_halves(first, second))};
  }
}
#else
KVPAGER_INLINE void into_steps(__m256i low, __m256i high, BFloat16Pairs* steps) {
  *steps = {_mm256_unpacklo_epi8(low, high), _mm256_unpackhi_epi8(low, high)};
}
KVPAGER_INLINE void into_steps(__m256i low, __m256i high, Vec* steps) {
  const __m256i zero = _mm256_setzero_si256();
  const __m256i both[2] = {_mm256_unpacklo_epi8(low, high), _mm256_unpackhi_epi8(low, high)};
#pragma GCC unroll 2
  for (int i = 0; i < 2; ++i) {
    steps[i] = {_mm256_castsi256_ps(_mm256_unpacklo_epi16(zero, both[i])),
                _mm256_castsi256_ps(_mm256_unpackhi_epi16(zero, both[i]))};
  }
}
#endif

// The copies of one output.
struct CompressedRow {
  __m128i table;
  const uint8_t* groups;
  const uint64_t* marked;

  CompressedRow() = default;
  explicit CompressedRow(const CompressedRows& rows)
      : table(_mm_loadu_si128(reinterpret_cast<const __m128i*>(rows.tables))),
        groups(rows.groups),
        marked(rows.marked) {}

  KVPAGER_INLINE bool is_marked(int64_t group) const {
    return (marked[group / 64] >> (group % 64) & 1) != 0;
  }
  // A group's steps; those of one that is marked are others.
  template <class Step, int kSteps>
  KVPAGER_INLINE void unpack(int64_t group, Step (&steps)[kSteps]) const {
    const auto* const from = reinterpret_cast<const __m256i*>(groups + group * kCompressedBytes);
    const __m256i places = _mm256_loadu_si256(from), above = _mm256_srli_epi16(places, 4);
#if KVPAGER_ISA_LEVEL == 4
    const __m512i all = _mm512_inserti64x4(_mm512_castsi256_si512(places), above, 1);
    const __m512i high = _mm512_shuffle_epi8(_mm512_broadcast_i32x4(table),
                                             _mm512_and_si512(all, _mm512_set1_epi8(0x0F)));
    into_steps(_mm512_loadu_si512(from + 1), high, steps);
#else
    const auto half = [&](__m256i low, __m256i of_half, Step* out) {
      const __m256i high = _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(table),
                                               _mm256_and_si256(of_half, _mm256_set1_epi8(0x0F)));
      into_steps(low, high, out);
    };
    half(_mm256_loadu_si256(from + 1), places, steps);
    half(_mm256_loadu_si256(from + 2), above, steps + kSteps / 2);
#endif
  }
};

// Elements [k, k + count) of an output, where k begins a group.
template <class Type, class Element = typename Type::Element>
void read_compressed(const LinearParams& params, int64_t output, int64_t k, int64_t count,
                     Element* out) {
  const Element* const w = static_cast<const Element*>(params.w) + output * params.w_stride;
  const CompressedRow copies(params.compressed.from(output));
  const int64_t last = k + count;
  for (; k + kCompressedGroup <= last; k += kCompressedGroup, out += kCompressedGroup) {
    const int64_t group = k / kCompressedGroup;
    if (copies.is_marked(group)) {
      std::memcpy(out, w + k, kCompressedGroup * sizeof(Element));
    } else {
      typename Type::Step steps[kGroupSteps<Type>];
      copies.unpack(group, steps);
      std::memcpy(out, steps, sizeof steps);
    }
  }
  std::memcpy(out, w + k, static_cast<size_t>(last - k) * sizeof(Element));
}

template <class Type, int kRows, int kOutputs>
void compressed_tile(const LinearParams& params, int64_t row, int64_t output, Part part) {
  using Element = typename Type::Element;
  const Element* const x = static_cast<const Element*>(params.x) + row * params.x_stride;
  const Element* const w = static_cast<const Element*>(params.w) + output * params.w_stride;
  Vec sums[kRows][kOutputs];
  CompressedRow copies[kOutputs];
#pragma GCC unroll 8
  for (int n = 0; n < kOutputs; ++n) {
    copies[n] = CompressedRow(params.compressed.from(output + n));
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) sums[r][n] = splat(0.0f);
  }
  alignas(64) Element unpacked[kOutputs][kCompressedGroup];
  const int64_t whole = params.depth / kCompressedGroup;
  Next<(kOutputs * kCompressedBytes + 63) / 64, 64> next(
      copies[0].groups + kOutputs * params.compressed.of_row * kCompressedBytes, part, whole);
  for (int64_t group = 0; group < whole; ++group) {
    const int64_t k = group * kCompressedGroup;
    const Element* weights[kOutputs];
#pragma GCC unroll 8
    for (int n = 0; n < kOutputs; ++n) {
      typename Type::Step steps[kGroupSteps<Type>];
      copies[n].unpack(group, steps);
      std::memcpy(unpacked[n], steps, sizeof steps);
      weights[n] = copies[n].is_marked(group) ? w + n * params.w_stride + k : unpacked[n];
    }
    next.step();
#pragma GCC unroll 4
    for (int64_t i = 0; i < kCompressedGroup; i += Type::kStep) {
      add_step<Type, false>(x + k + i, params.x_stride, 0, sums,
                            [&](int n) { return weights[n] + i; });
    }
  }
  add_rest<Type>(params, x, w, whole * kCompressedGroup, sums);
  finish<Type>(params, row, output, sums);
}

// As one_row_tile; a group stays in registers.
template <class Type, int kOutputs>
void compressed_one_row_tile(const LinearParams& params, int64_t row, int64_t output, Part part) {
  const int64_t whole = params.depth / kCompressedGroup;
  const auto add = [&](int n, const auto* x, const auto* w, Vec(&sum)[1][1]) KVPAGER_INLINED {
    const CompressedRow copies(params.compressed.from(output + n));
    for (int64_t group = 0; group < whole; ++group) {
      const int64_t k = group * kCompressedGroup;
      typename Type::Step steps[kGroupSteps<Type>];
      if (part.is_first()) {
        const uint8_t* ahead = copies.groups + group * kCompressedBytes + kRowAhead;
        fetch(ahead);
        fetch(ahead + 64);
      }
      if (__builtin_expect(copies.is_marked(group), 0)) {
#pragma GCC unroll 4
        for (int i = 0; i < kGroupSteps<Type>; ++i) steps[i] = Type::read(w + k + i * Type::kStep);
      } else {
        copies.unpack(group, steps);
      }
#pragma GCC unroll 4
      for (int i = 0; i < kGroupSteps<Type>; ++i) {
        sum[0][0] = Type::add_products(Type::read(x + k + i * Type::kStep), steps[i], sum[0][0]);
      }
    }
  };
  one_row<Type, kOutputs>(params, row, output, whole * kCompressedGroup, add);
}

}  // namespace
}  // namespace KVPAGER_ISA_NS
}  // namespace kvpager
