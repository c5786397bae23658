// One tile against many queries: scores, online softmax, weighted values. The order of every
// operation is the one attention.h states; a query's own sequence of operations is the same in a
// block of one and of many.
#include "kernels/attend_codes_isa.h"
#include "kernels/attend_product_isa.h"

namespace kvpager {
namespace KVPAGER_ISA_NS {
namespace {

// Keys or values of a tile, [rows][stride], with what is fetched while they are read.
struct Operand {
  const void* data;
  DType dtype;
  int64_t stride;
  int64_t ahead;  // bytes from data to the same side of the next tile; 0: there is none
};

// Bytes from a side to the next tile's, which is fetched where one block of queries goes through the
// tile; 0: nothing is.
int64_t ahead_of(const TileParams& params, const void* side, const void* next) {
  if (next == nullptr || params.count > kQueryBlock) return 0;
  return static_cast<int64_t>(reinterpret_cast<uintptr_t>(next) -
                              reinterpret_cast<uintptr_t>(side));
}

// Blocks of at most kQueryBlock queries, as equal as they can be: fn(first, number).
template <class Function>
KVPAGER_INLINE void each_block(int64_t count, Function fn) {
  const int64_t blocks = (count + kQueryBlock - 1) / kQueryBlock;
  const int64_t small = count / blocks;
  const int64_t larger = count % blocks;
  int64_t first = 0;
  for (int64_t block = 0; block < blocks; ++block) {
    const int64_t size = small + (block < larger ? 1 : 0);
    fn(first, static_cast<int>(size));
    first += size;
  }
}

// A side that many blocks go through is widened once, into memory that stays in the caches.
Operand widened(const Operand& side, int64_t rows, float* wide) {
  if (side.dtype == DType::kFloat32) return side;
  to_float(side.data, side.dtype, rows * side.stride, wide);
  return {wide, DType::kFloat32, side.stride, 0};
}

// Lines [first, last) of the next tile's side. Inline: GCC leaves out calls of a function that does
// nothing but prefetch.
KVPAGER_INLINE void fetch_lines(const void* data, int64_t ahead, int64_t first, int64_t last) {
  if (ahead == 0) return;
  for (int64_t line = first; line < last; ++line) fetch<64>(data, ahead + 64 * line);
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
    x = keep_range(x, query.begin - t, query.end - t, -__builtin_inff());
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
void accumulate(const TileParams& params, const Operand& v, const TileQuery* queries, int count,
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

// The block's queries, where their scores go, and the tokens that any of them sees.
struct ScoreBlock {
  ScoreBlock(const TileParams& params, int64_t first, int count, float* scores)
      : begin(params.tokens), end(0) {
    for (int i = 0; i < count; ++i) {
      const TileQuery& query = params.queries[first + i];
      q[i] = query.q;
      integers[i] = query.integers;
      units[i] = query.unit;
      out[i] = scores + (first + i) * params.tokens;
      if (query.begin < begin) begin = query.begin;
      if (query.end > end) end = query.end;
    }
    begin &= ~15;
    end = (end + 15) & ~15;
  }
  const float* q[kQueryBlock];
  const int16_t* integers[kQueryBlock];
  float units[kQueryBlock];
  float* out[kQueryBlock];
  int begin;
  int end;
};

void score(const TileParams& params, float* scores, float* wide) {
  const Operand k = {params.k, params.k_dtype, params.tokens,
                     ahead_of(params, params.k, params.next_k)};
  const Operand read = params.count > kWidenQueries ? widened(k, params.k_dim, wide) : k;
  each_block(params.count, [&](int64_t first, int count) {
    const ScoreBlock of(params, first, count, scores);
    multiply(
        read.dtype, count,
        {of.q, 0, params.k_dim, read.data, read.stride, of.out, Start::kZero, nullptr, read.ahead},
        of.begin, of.end);
  });
}

// A tile of codes; of the one that comes next, scales are fetched at once.
CodeTile code_tile(const TileParams& params, const void* data, const void* next, DType dtype,
                   int dim) {
  const int64_t ahead = ahead_of(params, data, next);
  fetch_lines(data, ahead, params.tokens * row_code_bytes(dtype, dim) / 64,
              params.tokens * row_bytes(dtype, dim) / 64);
  return {data, dtype, params.tokens, dim, ahead};
}

template <bool kVnni>
void score_codes(const TileParams& params, float* scores) {
  const CodeTile k = code_tile(params, params.k, params.next_k, params.k_dtype, params.k_dim);
  each_block(params.count, [&](int64_t first, int count) {
    const ScoreBlock of(params, first, count, scores);
    KeyScores<kVnni>(k, of.integers, of.units, of.out).run(count, of.begin, of.end);
  });
}

void weigh_values(const TileParams& params, const float* scores, const float* rescale,
                  float* wide) {
  const Operand v = {params.v, params.v_dtype, params.v_dim,
                     ahead_of(params, params.v, params.next_v)};
  const Operand read = params.count > kWidenQueries ? widened(v, params.tokens, wide) : v;
  each_block(params.count, [&](int64_t first, int count) {
    const float* weights[kQueryBlock];
    for (int i = 0; i < count; ++i) weights[i] = scores + (first + i) * params.tokens;
    accumulate(params, read, params.queries + first, count, weights, rescale + first);
  });
}

template <bool kVnni>
void weigh_codes(const TileParams& params, const float* scores, const float* rescale) {
  const CodeTile v = code_tile(params, params.v, params.next_v, params.v_dtype, params.v_dim);
  each_block(params.count, [&](int64_t first, int count) {
    const float* weights[kQueryBlock];
    for (int i = 0; i < count; ++i) weights[i] = scores + (first + i) * params.tokens;
    WeightedValues<kVnni>(v, params.queries + first, weights, rescale + first).run(count);
  });
}

template <bool kVnni>
void attend_tile_with(const TileParams& params) {
  const int64_t tokens = params.tokens;
  float* rescale = params.scratch;
  float* scores = rescale + (params.count + kLanes - 1) / kLanes * kLanes;
  float* wide = scores + params.count * tokens;
  if (is_coded(params.k_dtype)) {
    score_codes<kVnni>(params, scores);
  } else {
    score(params, scores, wide);
  }
  // While weights are made nothing is read; the memory need not wait.
  constexpr int64_t kLinesMeanwhile = 32;
  if (is_coded(params.v_dtype)) {
    fetch_lines(params.v, ahead_of(params, params.v, params.next_v), 0, kLinesMeanwhile);
  }
  for (int64_t i = 0; i < params.count; i += kSoftened) {
    const int count = params.count - i < kSoftened ? static_cast<int>(params.count - i) : kSoftened;
    soften(params, params.queries + i, count, scores + i * tokens, rescale + i);
  }
  if (is_coded(params.v_dtype)) {
    weigh_codes<kVnni>(params, scores, rescale);
  } else {
    weigh_values(params, scores, rescale, wide);
  }
}

}  // namespace

void attend_tile(const TileParams& params) { attend_tile_with<false>(params); }
#if KVPAGER_ISA_LEVEL == 4
void attend_tile_vnni(const TileParams& params) { attend_tile_with<true>(params); }
#endif

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
