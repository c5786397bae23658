// Products of more rows than a tile has, with AVX2: its sixteen registers are few, and one half of the
// lanes at a time has room for three rows by four outputs. Rows are copied first, as float32 in the
// order in which they are multiplied, so that elements of 16 bits are widened once and addresses are
// next to one another (rows a power of two apart would share a few places of the cache). Included by
// linear_isa.cc only.
#pragma once

#include <type_traits>

#include "compute/compute_table.h"
#include "compute/linear_elements_isa.h"

namespace kvpager {
namespace KVPAGER_ISA_NS {
namespace {

constexpr int kPackedRows = 3;
constexpr int kPackedOutputs = 4;
constexpr int64_t kVectorFloats = 16;
constexpr int64_t kBlockVectors = 64;  // of the depth: a tile's weights fit the nearest cache
constexpr int64_t kGroup = 3;          // tiles of rows that are copied together
constexpr int64_t kGroupRows = kLinearGroupRows;
static_assert(kGroupRows == kGroup * kPackedRows);
constexpr int64_t kTileFloats = kPackedRows * kPackedOutputs * kVectorFloats;  // of sums

constexpr int64_t row_tiles(int64_t rows) { return (rows + kPackedRows - 1) / kPackedRows; }
constexpr int64_t first_row(int64_t tile, int64_t rows) {
  return first_row(tile, row_tiles(rows), rows);
}
constexpr int64_t output_tiles(int64_t outputs) {
  return (outputs + kPackedOutputs - 1) / kPackedOutputs;
}

// Vectors of the whole depth; at least a step's.
template <class Type>
int64_t all_vectors(int64_t depth) {
  return depth == 0 ? Type::kVectors : (depth + Type::kStep - 1) / Type::kStep * Type::kVectors;
}

// Operands are copied in the order in which they are multiplied: [block of the depth][half of the
// lanes][tile][vector][row of the tile][8], so that one block's half follows the other.

// kCount rows of a matrix from `first` on, or the last one again where there are fewer: `vectors` vectors
// from element k on. other: from one half of the lanes to the other.
template <class Type, int kCount>
KVPAGER_INLINE void pack(const typename Type::Element* from, int64_t stride, int64_t first,
                         int64_t rows, int64_t k, int64_t depth, int64_t vectors, int64_t other,
                         float* out) {
  const typename Type::Element* p[kCount];
#pragma GCC unroll 4
  for (int r = 0; r < kCount; ++r) p[r] = from + least(first + r, rows - 1) * stride + k;
  const auto step = [&](auto last, int64_t element) {
    typename Type::Step steps[kCount];
#pragma GCC unroll 4
    for (int r = 0; r < kCount; ++r) {
      steps[r] = read_step<Type, last.value>(p[r] + element, depth - k - element);
    }
#pragma GCC unroll 2
    for (int v = 0; v < Type::kVectors; ++v, out += kCount * 8) {
#pragma GCC unroll 4
      for (int r = 0; r < kCount; ++r) {
        const Vec vector = Type::vector(steps[r], v);
        _mm256_storeu_ps(out + r * 8, vector.x);
        _mm256_storeu_ps(out + other + r * 8, vector.y);
      }
    }
  };
  const int64_t elements = vectors / Type::kVectors * Type::kStep;
  const int64_t whole = least(elements, (depth - k) / Type::kStep * Type::kStep);
  for (int64_t i = 0; i < whole; i += Type::kStep) step(std::false_type(), i);
  for (int64_t i = whole; i < elements; i += Type::kStep) step(std::true_type(), i);
}

// Tile `tile` of `tiles`, whose first row is `first`: of many vectors from from_vector on.
template <class Type, int kCount>
void pack_tile(const void* from, int64_t stride, int64_t first, int64_t rows, int64_t depth,
               int64_t from_vector, int64_t vectors, int64_t tile, int64_t tiles, float* out) {
  for (int64_t done = 0; done < vectors; done += kBlockVectors) {
    const int64_t block = least(kBlockVectors, vectors - done);
    pack<Type, kCount>(static_cast<const typename Type::Element*>(from), stride, first, rows,
                       (from_vector + done) / Type::kVectors * Type::kStep, depth, block,
                       tiles * block * kCount * 8,
                       out + (done * tiles * 2 + tile * block) * kCount * 8);
  }
}

// Half the lanes of a tile's weights, step by step: of weights that were copied.
struct CopiedWeights {
  static constexpr int kVectors = 1;
  const float* at;
  KVPAGER_INLINE __m256 vector(int output, int) const { return _mm256_loadu_ps(at + output * 8); }
  KVPAGER_INLINE void next() { at += kPackedOutputs * 8; }
};

KVPAGER_INLINE __m256 half_vector(Float32, const float* p, int) { return _mm256_loadu_ps(p); }
KVPAGER_INLINE __m256 half_vector(Float16, const uint16_t* p, int) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
// As instructions: pairs that are kept for their second vector, or a mask, would take the register of
// a sum, which is then kept in memory.
alignas(32) constexpr uint32_t kOddHalf[8] = {0xFFFF0000u, 0xFFFF0000u, 0xFFFF0000u, 0xFFFF0000u,
                                              0xFFFF0000u, 0xFFFF0000u, 0xFFFF0000u, 0xFFFF0000u};
KVPAGER_INLINE __m256 half_vector(BFloat16, const uint16_t* p, int i) {
  __m256 floats;
  const auto& pairs = *reinterpret_cast<const uint16_t (*)[16]>(p);
  if (i == 0) {
    asm("vmovdqu %1, %0\n\tvpand %2, %0, %0" : "=x"(floats) : "m"(pairs), "m"(kOddHalf));
  } else {
    asm("vmovdqu %1, %0\n\tvpslld $16, %0, %0" : "=x"(floats) : "m"(pairs));
  }
  return floats;
}

// The same of weights as they lie.
template <class Type>
struct OwnWeights {
  static constexpr int kVectors = Type::kVectors;
  const typename Type::Element* at[kPackedOutputs];  // half a step further for the upper half
  KVPAGER_INLINE __m256 vector(int output, int i) const {
    return half_vector(Type(), at[output], i);
  }
  KVPAGER_INLINE void next() {
#pragma GCC unroll 4
    for (int n = 0; n < kPackedOutputs; ++n) at[n] += Type::kStep;
  }
};

// Memory that is read next and brought to the nearest cache meanwhile, a little with each step of a
// tile, as only so many lines can be on their way at once.
struct Ahead {
  const char* at;
  int64_t step;  // bytes

  // bytes: from `at` on, within `steps` steps. at: null, and nothing is fetched.
  Ahead(const void* from, int64_t bytes, int64_t steps)
      : at(static_cast<const char*>(from)), step(from == nullptr ? 0 : bytes / steps + 1) {}
};

// Adds the products of half the lanes to sums, which are 0 where they are the first.
template <int kRows, class Weights>
KVPAGER_INLINE void add_half(const float* x, Weights weights, int64_t vectors, bool first,
                             float* sums, Ahead& ahead) {
  __m256 sum[kRows][kPackedOutputs];
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int n = 0; n < kPackedOutputs; ++n) {
      sum[r][n] = first ? _mm256_setzero_ps()
                        : _mm256_loadu_ps(sums + (r * kPackedOutputs + n) * kVectorFloats);
    }
  }
  const char* fetched = ahead.at;
  for (int64_t i = 0; i < vectors; i += Weights::kVectors, weights.next()) {
    __builtin_prefetch(fetched);
    fetched += ahead.step;
#pragma GCC unroll 2
    for (int v = 0; v < Weights::kVectors; ++v, x += kPackedRows * 8) {
      __m256 rows[kRows];
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) {
        rows[r] = _mm256_loadu_ps(x + r * 8);
        asm("" : "+x"(rows[r]));  // in a register: not read again for each output
      }
#pragma GCC unroll 4
      for (int n = 0; n < kPackedOutputs; ++n) {
        __m256 of_output = weights.vector(n, v);
        asm("" : "+x"(of_output));
#pragma GCC unroll 4
        for (int r = 0; r < kRows; ++r) sum[r][n] = _mm256_fmadd_ps(rows[r], of_output, sum[r][n]);
      }
    }
  }
  ahead.at = fetched;
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int n = 0; n < kPackedOutputs; ++n) {
      _mm256_storeu_ps(sums + (r * kPackedOutputs + n) * kVectorFloats, sum[r][n]);
    }
  }
}

template <class Type>
KVPAGER_INLINE void finish_packed(const LinearParams& params, int64_t row_tile, int64_t output,
                                  int64_t last_output, const float* sums) {
  Vec tile[kPackedRows][kPackedOutputs];
#pragma GCC unroll 4
  for (int r = 0; r < kPackedRows; ++r) {
#pragma GCC unroll 4
    for (int n = 0; n < kPackedOutputs; ++n, sums += kVectorFloats) tile[r][n] = load(sums);
  }
  const int64_t row = first_row(row_tile, params.rows);
  finish<Type>(params, row, output, tile,
               static_cast<int>(first_row(row_tile + 1, params.rows) - row),
               static_cast<int>(least(last_output - output, kPackedOutputs)));
}

}  // namespace
}  // namespace KVPAGER_ISA_NS
}  // namespace kvpager
