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
constexpr bool kHasCopies = KVPAGER_ISA_LEVEL >= 3 && !std::is_same_v<Type, Float16>;

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

}  // namespace
}  // namespace KVPAGER_ISA_NS
}  // namespace kvpager
