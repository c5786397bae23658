// One tile against many queries: scores, online softmax, weighted values. The order of every
// operation is the one attention.h states; a query's own sequence of operations is the same in a
// block of one and of many.
#include "kernels/attend_product_isa.h"

namespace kvpager {
namespace KVPAGER_ISA_NS {
namespace {

// Keys or values of a tile, [rows][stride], with what is fetched while they are read.
struct Side {
  const void* data;
  DType dtype;
  int64_t stride;
  int64_t ahead;  // bytes from data to the same side of the next tile; 0: there is none
};

int64_t distance(const void* from, const void* to) {
  if (to == nullptr) return 0;
  return static_cast<int64_t>(reinterpret_cast<uintptr_t>(to) - reinterpret_cast<uintptr_t>(from));
}

// Blocks of at most kQueryBlock queries, as equal as they can be: fn(first, number, block, blocks).
template <class Function>
KVPAGER_INLINE void each_block(int64_t count, Function fn) {
  const int64_t blocks = (count + kQueryBlock - 1) / kQueryBlock;
  const int64_t small = count / blocks;
  const int64_t larger = count % blocks;
  int64_t first = 0;
  for (int64_t block = 0; block < blocks; ++block) {
    const int64_t size = small + (block < larger ? 1 : 0);
    fn(first, static_cast<int>(size), block, blocks);
    first += size;
  }
}

// A side that many blocks go through is widened once, into memory that stays in the caches.
Side widened(const Side& side, int64_t rows, float* wide) {
  if (side.dtype == DType::kFloat32) return side;
  to_float(side.data, side.dtype, rows * side.stride, wide);
  return {wide, DType::kFloat32, side.stride, 0};
}

// Lines [block / blocks, (block + 1) / blocks) of the next tile's side.
void fetch_share(const Side& side, int64_t rows, int64_t block, int64_t blocks) {
  if (side.ahead == 0) return;
  const int64_t lines = rows * side.stride * dtype_bytes(side.dtype) / 64;
  const uintptr_t next =
      reinterpret_cast<uintptr_t>(side.data) + static_cast<uintptr_t>(side.ahead);
  for (int64_t line = lines * block / blocks; line < lines * (block + 1) / blocks; ++line) {
    __builtin_prefetch(reinterpret_cast<const void*>(next + static_cast<uintptr_t>(64 * line)), 0,
                       2);
  }
}

// Queries that are softened together, so that one exp gives the factors of all.
constexpr int kSoftened = kLanes;

struct Softening {
  Vec scaling;
  Vec cap;
  bool capped;
};

KVPAGER_INLINE bool sees_all(const TileParams& params, const TileQuery& query) {
  return query.begin == 0 && query.end == params.tokens;
}

// The greatest score of a query; with a cap or hidden tokens the scaled scores go back to s.
KVPAGER_INLINE float greatest(const Softening& by, bool plain, const TileQuery& query, int tokens,
                              float* s) {
  Vec top = splat(-__builtin_inff());
  if (plain) {
    for (int t = 0; t < tokens; t += 16) top = max(top, mul(load(s + t), by.scaling));
    return tree_max(top);
  }
  for (int t = query.begin & ~15; t < query.end; t += 16) {
    Vec x = mul(load(s + t), by.scaling);
    if (by.capped) x = mul(tanh(div(x, by.cap)), by.cap);
    x = keep_range(x, query.begin - t, query.end - t);
    store(s + t, x);
    top = max(top, x);
  }
  return tree_max(top);
}

// Scores to weights, zero elsewhere in the touched lanes; returns their sum.
KVPAGER_INLINE float weigh(const Softening& by, bool plain, const TileQuery& query, int tokens,
                           float m, float* s) {
  const Vec shift = splat(m);
  Vec sum = splat(0.0f);
  if (plain) {
    for (int t = 0; t < tokens; t += 16) {
      const Vec p = exp(sub(mul(load(s + t), by.scaling), shift));
      store(s + t, p);
      sum = add(sum, p);
    }
    return tree_sum(sum);
  }
  for (int t = query.begin & ~15; t < query.end; t += 16) {
    const Vec p = exp(sub(load(s + t), shift));
    store(s + t, p);
    sum = add(sum, p);
  }
  return tree_sum(sum);
}

// Turns the raw dot products of `count` <= kSoftened queries into weights and advances their
// running maximum and sum. rescale[i] is what multiplies what query i accumulated before.
void soften(const TileParams& params, const TileQuery* queries, int count, float* scores,
            float* rescale) {
  const Softening by = {splat(params.scaling), splat(params.softcap), params.softcap != 0.0f};
  const int tokens = params.tokens;
  float drop[kSoftened] = {};
  bool moved[kSoftened] = {};
  for (int i = 0; i < count; ++i) {
    const TileQuery& query = queries[i];
    const bool plain = !by.capped && sees_all(params, query);
    float& m = query.state[params.v_dim];
    const float reached = greatest(by, plain, query, tokens, scores + i * tokens);
    const float new_m = m > reached ? m : reached;
    drop[i] = m - new_m;
    moved[i] = m != new_m;
    m = new_m;
  }
  float factors[kSoftened];
  store(factors, exp(load(drop)));
  for (int i = 0; i < count; ++i) {
    const TileQuery& query = queries[i];
    const bool plain = !by.capped && sees_all(params, query);
    const float sum =
        weigh(by, plain, query, tokens, query.state[params.v_dim], scores + i * tokens);
    float& l = query.state[params.v_dim + 1];
    rescale[i] = moved[i] ? factors[i] : 1.0f;
    l = __builtin_fmaf(l, rescale[i], sum);
  }
}

// Values for a block of queries. Each query adds its own visible tokens in ascending order and no
// others: those all queries of the block see go through together, the rest one query at a time.
void accumulate(const TileParams& params, const Side& v, const TileQuery* queries, int count,
                const float* const* weights, const float* rescale) {
  int common_begin = 0;
  int common_end = params.tokens;
  bool ragged_head = false;
  float* out[kQueryBlock];
  for (int q = 0; q < count; ++q) {
    ragged_head = ragged_head || queries[q].begin != queries[0].begin;
    if (queries[q].begin > common_begin) common_begin = queries[q].begin;
    if (queries[q].end < common_end) common_end = queries[q].end;
    out[q] = queries[q].state;
  }
  const auto add = [&](int first, int number, int begin, int end, Start start, int64_t ahead) {
    multiply(
        v.dtype, number,
        {weights + first, begin, end, v.data, v.stride, out + first, start, rescale + first, ahead},
        0, params.v_dim);
  };
  if (common_begin >= common_end) {
    for (int q = 0; q < count; ++q) {
      add(q, 1, queries[q].begin, queries[q].end, Start::kRescale, 0);
    }
    return;
  }
  if (ragged_head) {
    for (int q = 0; q < count; ++q) {
      add(q, 1, queries[q].begin, common_begin, Start::kRescale, 0);
    }
  }
  add(0, count, common_begin, common_end, ragged_head ? Start::kContinue : Start::kRescale,
      v.ahead);
  for (int q = 0; q < count; ++q) {
    if (queries[q].end > common_end) {
      add(q, 1, common_end, queries[q].end, Start::kContinue, 0);
    }
  }
}

}  // namespace

void attend_tile(const TileParams& params) {
  Side k = {params.k, params.k_dtype, params.tokens, distance(params.k, params.next_k)};
  Side v = {params.v, params.v_dtype, params.v_dim, distance(params.v, params.next_v)};
  const int64_t tokens = params.tokens;
  float* rescale = params.scratch;
  float* scores = rescale + (params.count + kLanes - 1) / kLanes * kLanes;
  float* wide = scores + params.count * tokens;
  // With few queries the next tile is fetched row by row as this one is read; with many its lines
  // are spread over the blocks.
  const bool few = params.count <= kQueryBlock;
  const bool widen = params.count > kWidenQueries;

  const Side k_read = widen ? widened(k, params.k_dim, wide) : k;
  each_block(params.count, [&](int64_t first, int count, int64_t block, int64_t blocks) {
    const float* q[kQueryBlock];
    float* out[kQueryBlock];
    int begin = params.tokens;
    int end = 0;
    for (int i = 0; i < count; ++i) {
      const TileQuery& query = params.queries[first + i];
      q[i] = query.q;
      out[i] = scores + (first + i) * tokens;
      if (query.begin < begin) begin = query.begin;
      if (query.end > end) end = query.end;
    }
    if (!few) fetch_share(k, params.k_dim, block, blocks);
    multiply(k_read.dtype, count,
             {q, 0, params.k_dim, k_read.data, k_read.stride, out, Start::kZero, nullptr,
              few ? k.ahead : 0},
             begin & ~15, (end + 15) & ~15);
  });
  for (int64_t i = 0; i < params.count; i += kSoftened) {
    const int count = params.count - i < kSoftened ? static_cast<int>(params.count - i) : kSoftened;
    soften(params, params.queries + i, count, scores + i * tokens, rescale + i);
  }
  Side v_read = widen ? widened(v, params.tokens, wide) : v;
  v_read.ahead = few ? v.ahead : 0;
  each_block(params.count, [&](int64_t first, int count, int64_t block, int64_t blocks) {
    const float* weights[kQueryBlock];
    for (int i = 0; i < count; ++i) weights[i] = scores + (first + i) * tokens;
    if (!few) fetch_share(v, params.tokens, block, blocks);
    accumulate(params, v_read, params.queries + first, count, weights, rescale + first);
  });
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
