// What tiles of y = x W^T + b are made of: how elements of each dtype are read, multiplied and
// rounded. Included by linear_isa.cc only.
#pragma once

#include <type_traits>

#include "kernels/vec_isa.h"
#include "kvpager/linear.h"

namespace kvpager {
namespace KVPAGER_ISA_NS {
namespace {

// Multiplies elements of one dtype; Step is what one step along the depth reads, kVectors vectors of
// float32 that are multiplied one after the other. Of float32 and float16, one:
struct Lanes {
  static constexpr int kStep = 16;
  static constexpr int kVectors = 1;
  using Step = Vec;
  static KVPAGER_INLINE Vec vector(const Step& step, int) { return step; }
  static KVPAGER_INLINE Vec add_products(const Step& x, const Step& w, const Vec& sum) {
    return fma(x, w, sum);
  }
};

struct Float32 : Lanes {
  using Element = float;
  static KVPAGER_INLINE Step read(const Element* p) { return load(p); }
  static KVPAGER_INLINE float widen(Element a) { return a; }
  static KVPAGER_INLINE void round(const float* a, int64_t count, Element* out) {
    std::memcpy(out, a, static_cast<size_t>(count) * sizeof(float));
  }
};

struct Float16 : Lanes {
  using Element = uint16_t;
  static KVPAGER_INLINE Step read(const Element* p) { return load_float16(p); }
  static KVPAGER_INLINE float widen(Element a) { return float16_to_float(a); }
  static KVPAGER_INLINE void round(const float* a, int64_t count, Element* out) {
    store_float16(a, count, out);
  }
};

struct BFloat16 {
  using Element = uint16_t;
  static constexpr int kStep = 32;
  static constexpr int kVectors = 2;
  using Step = BFloat16Pairs;
  static KVPAGER_INLINE Step read(const Element* p) { return load_bfloat16_pairs(p); }
  static KVPAGER_INLINE Vec vector(const Step& step, int i) {
    return i == 0 ? odd_floats(step) : even_floats(step);
  }
  static KVPAGER_INLINE Vec add_products(const Step& x, const Step& w, const Vec& sum) {
    return fma(vector(x, 1), vector(w, 1), fma(vector(x, 0), vector(w, 0), sum));
  }
  static KVPAGER_INLINE float widen(Element a) { return bfloat16_to_float(a); }
  static KVPAGER_INLINE void round(const float* a, int64_t count, Element* out) {
    store_bfloat16(a, count, out);
  }
};

#if KVPAGER_ISA_LEVEL == 4
// For processors that have AVX512_BF16.
struct BFloat16Dots : BFloat16 {
  static KVPAGER_INLINE Vec add_products(const Step& x, const Step& w, const Vec& sum) {
    // As an instruction: the rest of the function is for processors without it.
    __m512 lanes = sum.x;
    asm("vdpbf16ps %2, %1, %0" : "+v"(lanes) : "v"(x.x), "v"(w.x));
    return {lanes};
  }
};
#endif

// tree_sum of every vector: sums[r][n] of a[r][n], with room for rows to a multiple of four.
template <int kRows, int kCount>
KVPAGER_INLINE void tree_sums(const Vec (&a)[kRows][kCount], float* sums) {
#if KVPAGER_ISA_LEVEL == 4
  if (kCount == 4) {  // the same additions, of four rows of four vectors at a time
    const auto fours = [&](int r) -> __m512 {  // of vector n of a row, four lanes in quarter n
      const auto& row = a[r < kRows ? r : kRows - 1];
      const auto halves = [](Vec x, Vec y) -> __m512 {  // lanes i and i + 8 of two vectors
        return _mm512_add_ps(_mm512_shuffle_f32x4(x.x, y.x, 0x44),
                             _mm512_shuffle_f32x4(x.x, y.x, 0xEE));
      };
      const __m512 first = halves(row[0], row[1 % kCount]);
      const __m512 second = halves(row[2 % kCount], row[3 % kCount]);
      return _mm512_add_ps(_mm512_shuffle_f32x4(first, second, 0x88),
                           _mm512_shuffle_f32x4(first, second, 0xDD));
    };
    const auto twos = [](__m512 x, __m512 y) -> __m512 {
      return _mm512_add_ps(_mm512_shuffle_ps(x, y, 0x44), _mm512_shuffle_ps(x, y, 0xEE));
    };
    const __m512i by_row = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
#pragma GCC unroll 2
    for (int r = 0; r < kRows; r += 4) {
      const __m512 low = twos(fours(r), fours(r + 1)), high = twos(fours(r + 2), fours(r + 3));
      const __m512 ones =
          _mm512_add_ps(_mm512_shuffle_ps(low, high, 0x88), _mm512_shuffle_ps(low, high, 0xDD));
      _mm512_storeu_ps(sums + 4 * r, _mm512_permutexvar_ps(by_row, ones));
    }
    return;
  }
#else
  if (kCount == 4) {  // the same additions, of four vectors at a time
    const auto fours = [](Vec a, Vec b) -> __m256 {  // four lanes of one in each half
      const __m256 x = _mm256_add_ps(a.x, a.y), y = _mm256_add_ps(b.x, b.y);
      return _mm256_add_ps(_mm256_permute2f128_ps(x, y, 0x20), _mm256_permute2f128_ps(x, y, 0x31));
    };
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      const __m256 first = fours(a[r][0], a[r][1 % kCount]);
      const __m256 second = fours(a[r][2 % kCount], a[r][3 % kCount]);
      const __m256 twos = _mm256_add_ps(_mm256_shuffle_ps(first, second, 0x44),
                                        _mm256_shuffle_ps(first, second, 0xEE));
      const __m128 even = _mm256_castps256_ps128(twos), odd = _mm256_extractf128_ps(twos, 1);
      const __m128 ones =
          _mm_add_ps(_mm_shuffle_ps(even, odd, 0x88), _mm_shuffle_ps(even, odd, 0xDD));
      _mm_storeu_ps(sums + 4 * r, _mm_shuffle_ps(ones, ones, 0xD8));
    }
    return;
  }
#endif
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
    for (int n = 0; n < kCount; ++n) sums[r * kCount + n] = tree_sum(a[r][n]);
  }
}

constexpr int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

// Of so many tiles of rows, which are as large as one another or by one row.
constexpr int64_t first_row(int64_t tile, int64_t tiles, int64_t rows) {
  return tile * rows / tiles;
}

// Which of several tiles of rows that go through the same weights, one after the other, a tile is.
struct Part {
  int64_t number = 0;
  int64_t of = 0;  // 0: of many rows, whose weights are in the second-level cache

  bool is_first() const { return of != 0 && number == 0; }
  // Its part of so many: [first, end).
  int64_t first(int64_t all) const { return of == 0 ? 0 : number * all / of; }
  int64_t end(int64_t all) const { return of == 0 ? 0 : (number + 1) * all / of; }
};

// Weights are fetched to the second-level cache, which can wait for more lines at once than the first.
KVPAGER_INLINE void fetch(const void* p) { __builtin_prefetch(p, 0, 2); }
constexpr int64_t kRowAhead = 8192;    // bytes: how far ahead weights of a single row are fetched
constexpr int64_t kTileAhead = 16384;  // and beyond the next tile's, those of several

// What is read after a tile's own weights: each step of the tile fetches kLines times kBytes of it, or
// the part of these that falls to it.
template <int kLines, int kBytes>
class Next {
 public:
  // after: behind the tile's own; steps: of the tile along the depth.
  KVPAGER_INLINE Next(const void* after, Part part, int64_t steps)
      : lines_(part.end(kLines) - part.first(kLines)),
        at_(static_cast<const char*>(after) + part.first(kLines) * kBytes * steps + kTileAhead) {}

  KVPAGER_INLINE void step() {
#pragma GCC unroll 8
    for (int line = 0; line < kLines; ++line) {
      if (line < lines_) fetch(at_ + line * kBytes);
    }
    at_ += lines_ * kBytes;
  }

 private:
  int64_t lines_;
  const char* at_;
};

template <class Type>
constexpr bool kHasCopies = !std::is_same_v<Type, Float16>;

// What a step reads; of the last one, the elements that are `left`.
template <class Type, bool kLast>
KVPAGER_INLINE typename Type::Step read_step(const typename Type::Element* p, int64_t left) {
  if (!kLast) return Type::read(p);
  typename Type::Element padded[Type::kStep] = {};
  std::memcpy(padded, p, static_cast<size_t>(left) * sizeof(typename Type::Element));
  return Type::read(padded);
}

// Adds the products of a step of kRows rows by kOutputs outputs, whose weights begin at weights(output).
// Loops over rows and outputs are unrolled, so that every sum has a register.
template <class Type, bool kLast, int kRows, int kOutputs, class Weights>
KVPAGER_INLINE void add_step(const typename Type::Element* x, int64_t x_stride, int64_t left,
                             Vec (&sums)[kRows][kOutputs], const Weights& weights) {
  typename Type::Step rows[kRows];
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) rows[r] = read_step<Type, kLast>(x + r * x_stride, left);
#pragma GCC unroll 8
  for (int n = 0; n < kOutputs; ++n) {
    const auto of_output = read_step<Type, kLast>(weights(n), left);
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      sums[r][n] = Type::add_products(rows[r], of_output, sums[r][n]);
    }
  }
}

// Adds the products of what is left of the depth from element k on, less than steps that are read whole.
template <class Type, int kRows, int kOutputs>
KVPAGER_INLINE void add_rest(const LinearParams& params, const typename Type::Element* x,
                             const typename Type::Element* w, int64_t k,
                             Vec (&sums)[kRows][kOutputs]) {
  for (; k < params.depth; k += Type::kStep) {
    add_step<Type, true>(x + k, params.x_stride, least(params.depth - k, Type::kStep), sums,
                         [&](int n) { return w + n * params.w_stride + k; });
  }
}

// The elements of a tile, of which the first `rows` by `outputs` are wanted.
template <class Type, int kRows, int kOutputs>
KVPAGER_INLINE void finish(const LinearParams& params, int64_t row, int64_t output,
                           const Vec (&sums)[kRows][kOutputs], int rows = kRows,
                           int outputs = kOutputs) {
  using Element = typename Type::Element;
  const Element* bias = static_cast<const Element*>(params.bias);
  Element* y = static_cast<Element*>(params.y) + row * params.y_stride + output;
  constexpr int kPadded = (kRows + 3) / 4 * 4;
  alignas(64) float sum[kPadded][kOutputs];
  alignas(64) Element rounded[kRows][kOutputs];
  tree_sums(sums, sum[0]);
  if (bias != nullptr) {
    for (int r = 0; r < kRows; ++r) {
      for (int n = 0; n < outputs; ++n) sum[r][n] += Type::widen(bias[output + n]);
    }
  }
  Type::round(sum[0], kRows * kOutputs, rounded[0]);
#pragma GCC unroll 8
  for (int r = 0; r < rows; ++r) {
    std::memcpy(y + r * params.y_stride, rounded[r],
                static_cast<size_t>(outputs) * sizeof(Element));
  }
}

// One row by kOutputs outputs, one after the other: weights are then read in the order in which they lie
// in memory, where a tile of several rows reads as many places at once as it has outputs.
// add(n, x, w, sum) adds the products of the first `whole` elements of output n's weights.
template <class Type, int kOutputs, class Add>
KVPAGER_INLINE void one_row(const LinearParams& params, int64_t row, int64_t output, int64_t whole,
                            const Add& add) {
  using Element = typename Type::Element;
  const Element* const x = static_cast<const Element*>(params.x) + row * params.x_stride;
  const Element* w = static_cast<const Element*>(params.w) + output * params.w_stride;
  Vec sums[1][kOutputs];
#pragma GCC unroll 8
  for (int n = 0; n < kOutputs; ++n, w += params.w_stride) {
    Vec sum[1][1] = {{splat(0.0f)}};
    add(n, x, w, sum);
    add_rest<Type>(params, x, w, whole, sum);
    sums[0][n] = sum[0][0];
  }
  finish<Type>(params, row, output, sums);
}

}  // namespace
}  // namespace KVPAGER_ISA_NS
}  // namespace kvpager
