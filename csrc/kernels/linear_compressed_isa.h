// y = x W^T + b for few rows, of copies of the weights in 12 bits (kvpager/compressed_weights.h): each
// group is unpacked to the nearest cache and multiplied there, as the weights are. Included by
// linear_isa.cc only.
#pragma once

#include "kernels/linear_elements_isa.h"
#include "kvpager/compressed_weights.h"

namespace kvpager {
namespace KVPAGER_ISA_NS {
namespace {

constexpr int64_t kCompressedAhead = 8192;  // bytes: how far ahead copies are fetched

// Two registers of bfloat16 as elements.
KVPAGER_INLINE void store_elements(__m256i first, __m256i second, uint16_t* out) {
  __m256i* const to = reinterpret_cast<__m256i*>(out);
  _mm256_store_si256(to, first);
  _mm256_store_si256(to + 1, second);
}
KVPAGER_INLINE void store_elements(__m256i first, __m256i second, float* out) {
  const __m256i zero = _mm256_setzero_si256();
  __m256i* const to = reinterpret_cast<__m256i*>(out);
  _mm256_store_si256(to, _mm256_unpacklo_epi16(zero, first));
  _mm256_store_si256(to + 1, _mm256_unpackhi_epi16(zero, first));
  _mm256_store_si256(to + 2, _mm256_unpacklo_epi16(zero, second));
  _mm256_store_si256(to + 3, _mm256_unpackhi_epi16(zero, second));
}

// The 32 elements whose low bytes are in one register, and whose high bytes' places in the low halves of
// another's.
template <class Element>
KVPAGER_INLINE void unpack_half(__m256i low, __m256i places, __m256i table, Element* out) {
  const __m256i high = _mm256_shuffle_epi8(table, _mm256_and_si256(places, _mm256_set1_epi8(0x0F)));
  store_elements(_mm256_unpacklo_epi8(low, high), _mm256_unpackhi_epi8(low, high), out);
}

// The copies of one output.
struct CompressedRow {
  __m256i table;
  const uint8_t* groups;
  const uint64_t* marked;

  CompressedRow() = default;
  explicit CompressedRow(const CompressedRows& rows)
      : table(_mm256_broadcastsi128_si256(
            _mm_loadu_si128(reinterpret_cast<const __m128i*>(rows.tables)))),
        groups(rows.groups),
        marked(rows.marked) {}

  KVPAGER_INLINE bool is_marked(int64_t group) const {
    return (marked[group / 64] >> (group % 64) & 1) != 0;
  }
  // A group's elements; those of one that is marked are others.
  template <class Element>
  KVPAGER_INLINE void unpack(int64_t group, Element* out) const {
    const auto* const from = reinterpret_cast<const __m256i*>(groups + group * kCompressedBytes);
    const __m256i places = _mm256_loadu_si256(from);
    unpack_half(_mm256_loadu_si256(from + 1), places, table, out);
    unpack_half(_mm256_loadu_si256(from + 2), _mm256_srli_epi16(places, 4), table, out + 32);
  }
};

// Elements [k, k + count) of an output, where k begins a group.
template <class Element>
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
      copies.unpack(group, out);
    }
  }
  std::memcpy(out, w + k, static_cast<size_t>(last - k) * sizeof(Element));
}

template <class Type, int kRows, int kOutputs>
void compressed_tile(const LinearParams& params, int64_t row, int64_t output, bool fetch) {
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
  const uint8_t* ahead = copies[0].groups + kCompressedAhead;
  for (int64_t group = 0; group < whole; ++group) {
    const int64_t k = group * kCompressedGroup;
    const Element* weights[kOutputs];
#pragma GCC unroll 8
    for (int n = 0; n < kOutputs; ++n) {
      copies[n].unpack(group, unpacked[n]);
      weights[n] = copies[n].is_marked(group) ? w + n * params.w_stride + k : unpacked[n];
    }
    if (fetch) {
#pragma GCC unroll 8
      for (int line = 0; line < (kOutputs * kCompressedBytes + 63) / 64; ++line) {
        __builtin_prefetch(ahead + 64 * line);
      }
      ahead += kOutputs * kCompressedBytes;
    }
#pragma GCC unroll 4
    for (int64_t i = 0; i < kCompressedGroup; i += Type::kStep) {
      add_step<Type, false>(x + k + i, params.x_stride, 0, sums,
                            [&](int n) { return weights[n] + i; });
    }
  }
  for (int64_t k = whole * kCompressedGroup; k < params.depth; k += Type::kStep) {
    add_step<Type, true>(x + k, params.x_stride, least(params.depth - k, Type::kStep), sums,
                         [&](int n) { return w + n * params.w_stride + k; });
  }
  finish<Type>(params, row, output, sums);
}

}  // namespace
}  // namespace KVPAGER_ISA_NS
}  // namespace kvpager
