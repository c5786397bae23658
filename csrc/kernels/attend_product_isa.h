// Products of a block of queries with a tile of keys or values, and the fetching of the tile that
// comes next. Included by attend_isa.cc only, once per tier.
#pragma once

#include "kernels/functions_isa.h"
#include "kernels/vec_isa.h"

namespace kvpager {
namespace KVPAGER_ISA_NS {
namespace {

// How stored elements become lanes. load_row widens kWidth * 16 neighbours, in whatever order is
// cheapest; place and unplace take lanes from the natural order to that one and back.
struct Float32 {
  using Element = float;
  template <int kWidth>
  static KVPAGER_INLINE void load_row(const float* p, Vec* wide) {
    for (int w = 0; w < kWidth; ++w) wide[w] = load(p + 16 * w);
  }
  template <int kWidth>
  static KVPAGER_INLINE void place(Vec*) {}
  template <int kWidth>
  static KVPAGER_INLINE void unplace(Vec*) {}
};
struct Float16 {
  using Element = uint16_t;
  template <int kWidth>
  static KVPAGER_INLINE void load_row(const uint16_t* p, Vec* wide) {
    for (int w = 0; w < kWidth; ++w) wide[w] = load_float16(p + 16 * w);
  }
  template <int kWidth>
  static KVPAGER_INLINE void place(Vec*) {}
  template <int kWidth>
  static KVPAGER_INLINE void unplace(Vec*) {}
};
struct BFloat16 {
  using Element = uint16_t;
#if KVPAGER_ISA_LEVEL == 4
  template <int kWidth>
  static KVPAGER_INLINE void load_row(const uint16_t* p, Vec* wide) {
    int w = 0;
    for (; w + 1 < kWidth; w += 2) load_bfloat16_apart(p + 16 * w, wide + w, wide + w + 1);
    for (; w < kWidth; ++w) wide[w] = load_bfloat16(p + 16 * w);
  }
  template <int kWidth>
  static KVPAGER_INLINE void place(Vec* sum) {
    for (int w = 0; w + 1 < kWidth; w += 2) take_apart(sum + w, sum + w + 1);
  }
  template <int kWidth>
  static KVPAGER_INLINE void unplace(Vec* sum) {
    for (int w = 0; w + 1 < kWidth; w += 2) put_together(sum + w, sum + w + 1);
  }
#elif KVPAGER_ISA_LEVEL == 3
  template <int kWidth>
  static KVPAGER_INLINE void load_row(const uint16_t* p, Vec* wide) {
    for (int w = 0; w < kWidth; ++w) wide[w] = load_bfloat16_apart(p + 16 * w);
  }
  template <int kWidth>
  static KVPAGER_INLINE void place(Vec* sum) {
    for (int w = 0; w < kWidth; ++w) take_apart(sum + w);
  }
  template <int kWidth>
  static KVPAGER_INLINE void unplace(Vec* sum) {
    for (int w = 0; w < kWidth; ++w) put_together(sum + w);
  }
#else
  template <int kWidth>
  static KVPAGER_INLINE void load_row(const uint16_t* p, Vec* wide) {
    for (int w = 0; w < kWidth; ++w) wide[w] = load_bfloat16(p + 16 * w);
  }
  template <int kWidth>
  static KVPAGER_INLINE void place(Vec*) {}
  template <int kWidth>
  static KVPAGER_INLINE void unplace(Vec*) {}
#endif
};

// Queries that share one pass over a tile, at most: as many as leave each of them two accumulators
// in registers.
#if KVPAGER_ISA_LEVEL == 4
constexpr int kQueryBlock = 8;
#else
constexpr int kQueryBlock = 6;
#endif

// How the accumulators begin: at zero, as they are, or multiplied by the query's rescale factor.
enum class Start { kZero, kContinue, kRescale };

// A product out[q][n] = start, then fmaf over k = begin..end-1 of a[q][k] * b[k][n].
struct Product {
  const float* const* a;
  int begin;
  int end;
  const void* b;
  int64_t b_stride;  // elements
  float* const* out;
  Start start;
  const float* rescale;
  // Distance in bytes from b to what is read after it and is fetched meanwhile; 0: nothing.
  int64_t ahead;
};

// What lies `ahead` bytes behind p, into the second-level cache, which can wait for more lines at once
// than the first.
template <int kBytes>
KVPAGER_INLINE void fetch(const void* p, int64_t ahead) {
  const uintptr_t from = reinterpret_cast<uintptr_t>(p) + static_cast<uintptr_t>(ahead);
  for (int byte = 0; byte < kBytes; byte += 64) {
    __builtin_prefetch(reinterpret_cast<const void*>(from + static_cast<uintptr_t>(byte)), 0, 2);
  }
}

// A strip of 16 * kWidth columns.
template <int kQueries, int kWidth, class Source>
KVPAGER_INLINE void strip(const Product& product, int column) {
  using Element = typename Source::Element;
  Vec sum[kQueries][kWidth];
  for (int q = 0; q < kQueries; ++q) {
    if (product.start == Start::kZero) {
      for (int w = 0; w < kWidth; ++w) sum[q][w] = splat(0.0f);
      continue;
    }
    for (int w = 0; w < kWidth; ++w) sum[q][w] = load(product.out[q] + column + 16 * w);
    if (product.start == Start::kRescale) {
      const Vec factor = splat(product.rescale[q]);
      for (int w = 0; w < kWidth; ++w) sum[q][w] = mul(sum[q][w], factor);
    }
    Source::template place<kWidth>(sum[q]);
  }
  const float* a[kQueries];
  for (int q = 0; q < kQueries; ++q) a[q] = product.a[q];
  const int64_t stride = product.b_stride;
  const Element* row = static_cast<const Element*>(product.b) + product.begin * stride + column;
  const int64_t ahead = product.ahead;
  const int end = product.end;
  for (int k = product.begin; k < end; ++k, row += stride) {
    Vec wide[kWidth];
    Source::template load_row<kWidth>(row, wide);
    fetch<16 * kWidth* static_cast<int>(sizeof(Element))>(row, ahead);
    for (int q = 0; q < kQueries; ++q) {
      const Vec broadcast = splat(a[q][k]);
      for (int w = 0; w < kWidth; ++w) sum[q][w] = fma(broadcast, wide[w], sum[q][w]);
    }
  }
  for (int q = 0; q < kQueries; ++q) {
    Source::template unplace<kWidth>(sum[q]);
    for (int w = 0; w < kWidth; ++w) store(product.out[q] + column + 16 * w, sum[q][w]);
  }
}

// Columns per strip: as many as leave the accumulators in registers.
constexpr int strip_width(int queries) {
#if KVPAGER_ISA_LEVEL == 4
  return queries <= 2 ? 8 : queries <= 6 ? 4 : 2;
#elif KVPAGER_ISA_LEVEL == 3
  return queries <= 1 ? 4 : queries <= 3 ? 2 : 1;
#else
  return queries >= 1 ? 1 : 0;
#endif
}

template <int kQueries, class Source>
void columns_of(const Product& product, int column, int column_end) {
  constexpr int kWidth = strip_width(kQueries);
  for (; column + 16 * kWidth <= column_end; column += 16 * kWidth) {
    strip<kQueries, kWidth, Source>(product, column);
  }
  if (kWidth > 4 && column + 64 <= column_end) {
    strip<kQueries, 4, Source>(product, column);
    column += 64;
  }
  if (kWidth > 2 && column + 32 <= column_end) {
    strip<kQueries, 2, Source>(product, column);
    column += 32;
  }
  if (kWidth > 1 && column + 16 <= column_end) {
    strip<kQueries, 1, Source>(product, column);
  }
}

template <class Source>
void product_of(int queries, const Product& product, int column, int column_end) {
  static_assert(kQueryBlock <= 8, "one case per number of queries");
  switch (queries) {
    case 1:
      return columns_of<1, Source>(product, column, column_end);
    case 2:
      return columns_of<2, Source>(product, column, column_end);
    case 3:
      return columns_of<3, Source>(product, column, column_end);
    case 4:
      return columns_of<4, Source>(product, column, column_end);
    case 5:
      return columns_of<5, Source>(product, column, column_end);
    case 6:
      return columns_of<6, Source>(product, column, column_end);
#if KVPAGER_ISA_LEVEL == 4
    case 7:
      return columns_of<7, Source>(product, column, column_end);
    default:
      return columns_of<8, Source>(product, column, column_end);
#endif
  }
}

// Of so many rows all columns are read before other rows are. With AVX2 a strip of two or three queries
// is one line of 16-bit elements wide, and lines that are far apart come slower from memory than
// neighbours do.
constexpr int rows_at_once(DType dtype, int queries, int rows) {
  const bool of_one_line =
      KVPAGER_ISA_LEVEL == 3 && dtype != DType::kFloat32 && (queries == 2 || queries == 3);
  return of_one_line ? 8 : rows;
}

void multiply_rows(DType dtype, int queries, const Product& product, int column, int column_end) {
  if (dtype == DType::kFloat32) {
    product_of<Float32>(queries, product, column, column_end);
  } else if (dtype == DType::kFloat16) {
    product_of<Float16>(queries, product, column, column_end);
  } else {
    product_of<BFloat16>(queries, product, column, column_end);
  }
}

// Columns [column, column_end), multiples of 16, of `queries` products with a tile of `dtype`.
void multiply(DType dtype, int queries, const Product& product, int column, int column_end) {
  const int step = rows_at_once(dtype, queries, product.end - product.begin);
  Product rows = product;
  do {  // at least once: one of no rows still multiplies what was accumulated
    rows.end = rows.begin + step < product.end ? rows.begin + step : product.end;
    multiply_rows(dtype, queries, rows, column, column_end);
    rows.begin = rows.end;
    rows.start = Start::kContinue;
  } while (rows.begin < product.end);
}

}  // namespace
}  // namespace KVPAGER_ISA_NS
}  // namespace kvpager
