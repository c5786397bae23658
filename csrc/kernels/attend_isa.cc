// One tile against many queries: scores, online softmax, weighted values. The order of every
// operation is the one attention.h states; a query's own sequence of operations is the same in a
// block of one and of many.
#include "kernels/functions_isa.h"
#include "kernels/vec_isa.h"

namespace kvpager {
namespace KVPAGER_ISA_NS {
namespace {

struct Float32 {
  using Element = float;
  static KVPAGER_INLINE Vec load(const float* p) { return KVPAGER_ISA_NS::load(p); }
};
struct Float16 {
  using Element = uint16_t;
  static KVPAGER_INLINE Vec load(const uint16_t* p) { return load_float16(p); }
};
struct BFloat16 {
  using Element = uint16_t;
  static KVPAGER_INLINE Vec load(const uint16_t* p) { return load_bfloat16(p); }
};

// How the accumulators begin: at zero, as they are, or multiplied by the query's rescale factor.
enum class Start { kZero, kContinue, kRescale };

// out[q][n] = start, then fmaf over k = begin..end-1 of a[q][k] * b[k][n], for a strip of 16 *
// kWidth columns.
template <int kQueries, int kWidth, class Source>
KVPAGER_INLINE void strip(const float* const* a, int begin, int end,
                          const typename Source::Element* b, int64_t b_stride, float* const* out,
                          int column, Start start, const float* rescale) {
  Vec sum[kQueries][kWidth];
  if (start == Start::kZero) {
    for (int q = 0; q < kQueries; ++q) {
      for (int w = 0; w < kWidth; ++w) sum[q][w] = splat(0.0f);
    }
  } else if (start == Start::kContinue) {
    for (int q = 0; q < kQueries; ++q) {
      for (int w = 0; w < kWidth; ++w) sum[q][w] = load(out[q] + column + 16 * w);
    }
  } else {
    for (int q = 0; q < kQueries; ++q) {
      const Vec factor = splat(rescale[q]);
      for (int w = 0; w < kWidth; ++w) sum[q][w] = mul(load(out[q] + column + 16 * w), factor);
    }
  }
  const typename Source::Element* row = b + begin * b_stride + column;
  for (int k = begin; k < end; ++k, row += b_stride) {
    Vec wide[kWidth];
    for (int w = 0; w < kWidth; ++w) wide[w] = Source::load(row + 16 * w);
    for (int q = 0; q < kQueries; ++q) {
      const Vec broadcast = splat(a[q][k]);
      for (int w = 0; w < kWidth; ++w) sum[q][w] = fma(broadcast, wide[w], sum[q][w]);
    }
  }
  for (int q = 0; q < kQueries; ++q) {
    for (int w = 0; w < kWidth; ++w) store(out[q] + column + 16 * w, sum[q][w]);
  }
}

// Columns per strip: as many as leave the accumulators in registers.
constexpr int strip_width(int queries) {
#if KVPAGER_ISA_LEVEL == 4
  return queries <= 2 ? 8 : 4;
#elif KVPAGER_ISA_LEVEL == 3
  return queries <= 1 ? 4 : queries <= 3 ? 2 : 1;
#else
  return queries >= 1 ? 1 : 0;
#endif
}

template <int kQueries, class Source>
void product(const float* const* a, int begin, int end, const typename Source::Element* b,
             int64_t b_stride, float* const* out, int column, int column_end, Start start,
             const float* rescale) {
  constexpr int kWidth = strip_width(kQueries);
  for (; column + 16 * kWidth <= column_end; column += 16 * kWidth) {
    strip<kQueries, kWidth, Source>(a, begin, end, b, b_stride, out, column, start, rescale);
  }
  if (kWidth > 4 && column + 64 <= column_end) {
    strip<kQueries, 4, Source>(a, begin, end, b, b_stride, out, column, start, rescale);
    column += 64;
  }
  if (kWidth > 2 && column + 32 <= column_end) {
    strip<kQueries, 2, Source>(a, begin, end, b, b_stride, out, column, start, rescale);
    column += 32;
  }
  if (kWidth > 1 && column + 16 <= column_end) {
    strip<kQueries, 1, Source>(a, begin, end, b, b_stride, out, column, start, rescale);
  }
}

template <class Source>
void product_of(int queries, const float* const* a, int begin, int end,
                const typename Source::Element* b, int64_t b_stride, float* const* out, int column,
                int column_end, Start start, const float* rescale) {
  static_assert(kQueryBlock == 6, "one case per number of queries");
  switch (queries) {
    case 1:
      return product<1, Source>(a, begin, end, b, b_stride, out, column, column_end, start,
                                rescale);
    case 2:
      return product<2, Source>(a, begin, end, b, b_stride, out, column, column_end, start,
                                rescale);
    case 3:
      return product<3, Source>(a, begin, end, b, b_stride, out, column, column_end, start,
                                rescale);
    case 4:
      return product<4, Source>(a, begin, end, b, b_stride, out, column, column_end, start,
                                rescale);
    case 5:
      return product<5, Source>(a, begin, end, b, b_stride, out, column, column_end, start,
                                rescale);
    default:
      return product<6, Source>(a, begin, end, b, b_stride, out, column, column_end, start,
                                rescale);
  }
}

// A tile in memory, in its own dtype.
struct Tile {
  const void* data;
  DType dtype;
  int64_t stride;
};

void multiply(const Tile& tile, int queries, const float* const* a, int begin, int end,
              float* const* out, int column, int column_end, Start start, const float* rescale) {
  if (tile.dtype == DType::kFloat32) {
    product_of<Float32>(queries, a, begin, end, static_cast<const float*>(tile.data), tile.stride,
                        out, column, column_end, start, rescale);
  } else if (tile.dtype == DType::kFloat16) {
    product_of<Float16>(queries, a, begin, end, static_cast<const uint16_t*>(tile.data),
                        tile.stride, out, column, column_end, start, rescale);
  } else {
    product_of<BFloat16>(queries, a, begin, end, static_cast<const uint16_t*>(tile.data),
                         tile.stride, out, column, column_end, start, rescale);
  }
}

// Rows [begin, end) of a tile. With many queries a tile is taken in parts that stay in the
// first-level cache, each widened to float32 once; with few it is read where it lies. Chains of
// fmaf go on from part to part.
Tile part_of(const Tile& tile, int64_t begin, int64_t end, bool widen, float* wide) {
  const std::byte* rows =
      static_cast<const std::byte*>(tile.data) + begin * tile.stride * dtype_bytes(tile.dtype);
  if (!widen || tile.dtype == DType::kFloat32) return {rows, tile.dtype, tile.stride};
  to_float(rows, tile.dtype, (end - begin) * tile.stride, wide);
  return {wide, DType::kFloat32, tile.stride};
}

// Turns raw dot products s[begin, end) into weights, zero elsewhere in the touched lanes, and
// returns the factor that rescales what was accumulated before.
float soften(const TileParams& params, const TileQuery& query, float* s) {
  float& m = query.state[params.v_dim];
  float& l = query.state[params.v_dim + 1];
  const int first = query.begin & ~15;
  const Vec scaling = splat(params.scaling);
  const Vec cap = splat(params.softcap);
  Vec top = splat(-__builtin_inff());
  for (int t = first; t < query.end; t += 16) {
    Vec x = mul(load(s + t), scaling);
    if (params.softcap != 0.0f) x = mul(tanh(div(x, cap)), cap);
    x = keep_range(x, query.begin - t, query.end - t);
    store(s + t, x);
    top = max(top, x);
  }
  const float reached = tree_max(top);
  const float new_m = m > reached ? m : reached;
  const Vec shift = splat(new_m);
  Vec sum = splat(0.0f);
  for (int t = first; t < query.end; t += 16) {
    const Vec p = exp(sub(load(s + t), shift));
    store(s + t, p);
    sum = add(sum, p);
  }
  float factor = 1.0f;
  if (m != new_m) {
    float lanes[16];
    store(lanes, exp(splat(m - new_m)));
    factor = lanes[0];
  }
  m = new_m;
  l = __builtin_fmaf(l, factor, tree_sum(sum));
  return factor;
}

// Values of tokens [first, last) for a block of queries; v begins at token `first`. Each query adds
// its own visible tokens in ascending order and no others: those all queries of the block see go
// through together, the rest one query at a time.
void accumulate(const TileParams& params, const Tile& v, int first, int last,
                const TileQuery* queries, int count, const float* const* weights,
                const float* rescale) {
  int begin[kQueryBlock];
  int end[kQueryBlock];
  int common_begin = 0;
  int common_end = last - first;
  const float* p[kQueryBlock];
  float* out[kQueryBlock];
  for (int q = 0; q < count; ++q) {
    begin[q] = queries[q].begin > first ? queries[q].begin - first : 0;
    end[q] = (queries[q].end < last ? queries[q].end : last) - first;
    if (begin[q] > common_begin) common_begin = begin[q];
    if (end[q] < common_end) common_end = end[q];
    p[q] = weights[q] + first;
    out[q] = queries[q].state;
  }
  if (common_begin >= common_end) {
    for (int q = 0; q < count; ++q) {
      multiply(v, 1, p + q, begin[q], end[q], out + q, 0, params.v_dim,
               first == 0 ? Start::kRescale : Start::kContinue, rescale + q);
    }
    return;
  }
  bool ragged_head = false;
  for (int q = 0; q < count; ++q) ragged_head = ragged_head || begin[q] != common_begin;
  Start start = first == 0 ? Start::kRescale : Start::kContinue;
  if (ragged_head) {
    for (int q = 0; q < count; ++q) {
      multiply(v, 1, p + q, begin[q], common_begin, out + q, 0, params.v_dim, start, rescale + q);
    }
    start = Start::kContinue;
  }
  multiply(v, count, p, common_begin, common_end, out, 0, params.v_dim, start, rescale);
  for (int q = 0; q < count; ++q) {
    if (end[q] <= common_end) continue;
    multiply(v, 1, p + q, common_end, end[q], out + q, 0, params.v_dim, Start::kContinue,
             rescale + q);
  }
}

// Calls fn(first query, number of queries) for each block of queries.
template <class Function>
KVPAGER_INLINE void each_block(int64_t count, Function fn) {
  for (int64_t first = 0; first < count; first += kQueryBlock) {
    fn(first, count - first < kQueryBlock ? static_cast<int>(count - first) : kQueryBlock);
  }
}

}  // namespace

void attend_tile(const TileParams& params) {
  const Tile k = {params.k, params.k_dtype, params.tokens};
  const Tile v = {params.v, params.v_dtype, params.v_dim};
  float* wide = params.scratch;
  float* rescale = wide + kWideFloats;
  float* scores = rescale + params.count;
  const bool many = params.count > 2 * kQueryBlock;
  const int k_rows = many ? kWideFloats / params.tokens : params.k_dim;
  const int v_rows = many ? kWideFloats / params.v_dim : params.tokens;

  for (int d = 0; d < params.k_dim; d += k_rows) {
    const int end_d = d + k_rows < params.k_dim ? d + k_rows : params.k_dim;
    const Tile part = part_of(k, d, end_d, many, wide);
    each_block(params.count, [&](int64_t first, int count) {
      const float* q[kQueryBlock];
      float* out[kQueryBlock];
      int begin = params.tokens;
      int end = 0;
      for (int i = 0; i < count; ++i) {
        const TileQuery& query = params.queries[first + i];
        q[i] = query.q + d;
        out[i] = scores + (first + i) * params.tokens;
        if (query.begin < begin) begin = query.begin;
        if (query.end > end) end = query.end;
      }
      multiply(part, count, q, 0, end_d - d, out, begin & ~15, (end + 15) & ~15,
               d == 0 ? Start::kZero : Start::kContinue, nullptr);
    });
  }
  for (int64_t i = 0; i < params.count; ++i) {
    rescale[i] = soften(params, params.queries[i], scores + i * params.tokens);
  }
  for (int t = 0; t < params.tokens; t += v_rows) {
    const int end_t = t + v_rows < params.tokens ? t + v_rows : params.tokens;
    const Tile part = part_of(v, t, end_t, many, wide);
    each_block(params.count, [&](int64_t first, int count) {
      const float* weights[kQueryBlock];
      for (int i = 0; i < count; ++i) weights[i] = scores + (first + i) * params.tokens;
      accumulate(params, part, t, end_t, params.queries + first, count, weights, rescale + first);
    });
  }
}

// A = fmaf(A, exp(M - M'), a * exp(m - M')), L likewise, M' = max(M, m).
void merge_state(float* total, const float* part, int32_t v_dim) {
  const float total_m = total[v_dim];
  const float part_m = part[v_dim];
  const float m = total_m > part_m ? total_m : part_m;
  const Vec old_weight = exp(splat(total_m - m));
  const Vec new_weight = exp(splat(part_m - m));
  for (int j = 0; j < v_dim; j += 16) {
    store(total + j, fma(load(total + j), old_weight, mul(load(part + j), new_weight)));
  }
  float lanes[16];
  store(lanes, fma(splat(total[v_dim + 1]), old_weight, mul(splat(part[v_dim + 1]), new_weight)));
  total[v_dim] = m;
  total[v_dim + 1] = lanes[0];
}

void finish_state(const float* state, int32_t v_dim, float* out) {
  const Vec l = splat(state[v_dim + 1]);
  for (int j = 0; j < v_dim; j += 16) store(out + j, div(load(state + j), l));
}

void exp_lanes(const float* x, float* y, int64_t count) {
  for (int64_t i = 0; i < count; i += 16) {
    float lanes[16] = {};
    const size_t bytes = sizeof(float) * static_cast<size_t>(count - i < 16 ? count - i : 16);
    std::memcpy(lanes, x + i, bytes);
    store(lanes, exp(load(lanes)));
    std::memcpy(y + i, lanes, bytes);
  }
}

}  // namespace KVPAGER_ISA_NS
}  // namespace kvpager
