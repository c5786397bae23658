// One warp, one row and a pack of its query heads: the order of operations of kvpager/attention.h, in
// the steps of kernels/attend_isa.cc, so that the bits are the CPU's.
//
// Where the CPU has sixteen lanes of a vector, t mod 16, here each half of the warp has them. Maxima
// take their operands in the CPU's order: it decides what becomes of NaN.
//
// KVP_NO_UNROLL: loops that have all their loads in flight as they are, or few steps for a lane. Copies
// of them, for every dtype and pack, were half of what the compiler had to do.
#pragma once

#include <cstdint>

#include "cuda/codes.cuh"
#include "cuda/portable.h"
#include "cuda/tables.cuh"
#include "kvpager/attention.h"

namespace kvpager::gpu::reference {

inline constexpr int kWarp = 32;
inline constexpr int kHalf = 16;  // lanes of the CPU's logical vector

// A number per query of a pack.
template <int kQueries>
struct alignas(4 * kQueries) Pack {
  float x[kQueries];
};

struct Float32 {
  using Element = float;
  static KVP_DEVICE float widen(float x) { return x; }
};
struct Float16 {
  using Element = uint16_t;
  static KVP_DEVICE float widen(uint16_t x) { return float16_bits_to_float(x); }
};
struct BFloat16 {
  using Element = uint16_t;
  static KVP_DEVICE float widen(uint16_t x) { return bfloat16_bits_to_float(x); }
};

KVP_DEVICE float minus_infinity() { return bits_to_float(0xFF800000u); }

// vec_isa.h: exp. The products that are added to something are not contracted by the compiler
// (-fmad=false), nor by fma_rn.
KVP_DEVICE float exp(float x) {
  const float magic = 12582912.0f;
  const float t = fma_rn(x, 1.44269504f, magic);
  const float n = t - magic;
  float r = fma_rn(n, -0.693359375f, x);
  r = fma_rn(n, 2.12194440e-4f, r);
  float p = 1.9875691500e-4f;
  p = fma_rn(p, r, 1.3981999507e-3f);
  p = fma_rn(p, r, 8.3334519073e-3f);
  p = fma_rn(p, r, 4.1665795894e-2f);
  p = fma_rn(p, r, 1.6666665459e-1f);
  p = fma_rn(p, r, 5.0000001201e-1f);
  p = fma_rn(p, r * r, r);
  p = p + 1.0f;
  const float power = bits_to_float((float_to_bits(t) << 23) + 0x3F800000u);
  return x < -87.0f ? 0.0f : p * power;
}

// vec_isa.h: tanh.
KVP_DEVICE float tanh(float x) {
  const uint32_t sign = float_to_bits(x) & 0x80000000u;
  const float magnitude = bits_to_float(float_to_bits(x) ^ sign);
  const float e = exp(magnitude * -2.0f);
  return bits_to_float(float_to_bits(div_rn(1.0f - e, 1.0f + e)) ^ sign);
}

// kernels/attend_isa.cc: merge_state, with the lanes of a warp at their own elements of acc.
struct Merge {
  float m;
  float old_weight;
  float new_weight;
};
KVP_DEVICE Merge merge_of(float total_m, float part_m) {
  Merge merge;
  merge.m = total_m > part_m ? total_m : part_m;
  merge.old_weight = exp(total_m - merge.m);
  merge.new_weight = exp(part_m - merge.m);
  return merge;
}
KVP_DEVICE float merged(const Merge& merge, float total, float part) {
  return fma_rn(total, merge.old_weight, part * merge.new_weight);
}

// The splits of a span in which a row may see a key, half open; none where begin >= end.
static_assert(kWaveChunks % kChunksPerSplit == 0, "a wave has whole splits");
struct Splits {
  int64_t begin;
  int64_t end;
};
KVP_DEVICE int64_t first_chunk(const AttendParams& p, int64_t position) {
  if (p.window <= 0 || position < p.window) return 0;
  return (position - p.window + 1) / p.shape.chunk_tokens;
}
KVP_DEVICE Splits splits_of(const AttendParams& p, int64_t position, const Span& span) {
  const int64_t first = first_chunk(p, position);
  const int64_t after = position / p.shape.chunk_tokens + 1;
  const int64_t begin = first > span.begin ? first : span.begin;
  const int64_t end = after < span.end ? after : span.end;
  return {begin / kChunksPerSplit, (end + kChunksPerSplit - 1) / kChunksPerSplit};
}

// Heads [head, head + count) of one row, of one kv head.
struct Queries {
  int64_t position;
  int64_t first;            // the part's chunk 0
  const uint8_t* selected;  // of the row and kv head, or null
  int32_t kv_head;
  int32_t head;
  int32_t count;
};

// Running softmax; lane i holds acc[i], acc[i + 32], ...
template <int kQueries, int kVectors>
struct State {
  float acc[kQueries][kVectors];
  float m[kQueries];
  float l[kQueries];

  KVP_DEVICE void reset() {
    KVP_UNROLL
    for (int q = 0; q < kQueries; ++q) {
      m[q] = minus_infinity();
      l[q] = 0.0f;
      KVP_UNROLL
      for (int i = 0; i < kVectors; ++i) acc[q][i] = 0.0f;
    }
  }
};

// A warp's part of shared memory: queries by dimension, then scores or weights by token, then what the
// integers of queries are worth where keys are codes.
inline constexpr int kWorthPacks = 1;
KVP_DEVICE int64_t worth_at(const Shape& shape) { return shape.k_dim + shape.chunk_tokens; }
template <int kQueries>
KVP_DEVICE Pack<kQueries>* warp_memory(const Shape& shape) {
  return reinterpret_cast<Pack<kQueries>*>(shared_memory()) +
         static_cast<int64_t>(warp_index()) * (worth_at(shape) + kWorthPacks);
}

template <class Source, int kQueries>
KVP_DEVICE void widen_queries(const AttendParams& p, int64_t row, const Queries& queries,
                              Pack<kQueries>* out) {
  const auto* data = static_cast<const typename Source::Element*>(p.q.data) + row * p.q.row_stride +
                     queries.head * p.q.head_stride;
  KVP_NO_UNROLL
  for (int d = lane_index(); d < p.shape.k_dim; d += kWarp) {
    Pack<kQueries> pack;
    KVP_UNROLL
    for (int q = 0; q < kQueries; ++q) {
      pack.x[q] = q < queries.count ? Source::widen(data[q * p.q.head_stride + d]) : 0.0f;
    }
    out[d] = pack;
  }
}

// Each lane's numbers of the queries become integers, and the last pack what they are worth.
template <int kQueries>
KVP_DEVICE void round_queries(const Shape& shape, Pack<kQueries>* queries) {
  uint32_t largest[kQueries] = {};
  KVP_NO_UNROLL
  for (int d = lane_index(); d < shape.k_dim; d += kWarp) {
    KVP_UNROLL
    for (int q = 0; q < kQueries; ++q) {
      const uint32_t bits = codes::magnitude_bits(queries[d].x[q]);
      largest[q] = bits > largest[q] ? bits : largest[q];
    }
  }
  Pack<kQueries> factor, worth;
  KVP_UNROLL
  for (int q = 0; q < kQueries; ++q) {
    const codes::Unit unit = codes::unit_of(codes::largest_of_warp(largest[q]));
    factor.x[q] = unit.factor;
    worth.x[q] = unit.worth;
  }
  KVP_NO_UNROLL
  for (int d = lane_index(); d < shape.k_dim; d += kWarp) {
    Pack<kQueries> pack = queries[d];
    KVP_UNROLL
    for (int q = 0; q < kQueries; ++q) {
      const bool none = factor.x[q] == 0.0f;
      pack.x[q] = codes::as_float(none ? 0 : codes::rounded(pack.x[q], factor.x[q]));
    }
    queries[d] = pack;
  }
  if (lane_index() == 0) queries[worth_at(shape)] = worth;
}

// The scores of tokens [start, start + 32 kGroups), -inf where not in [begin, end).
template <class Source, int kQueries, int kGroups>
KVP_DEVICE void score(const AttendParams& p, const typename Source::Element* keys,
                      const Pack<kQueries>* queries, int start, int begin, int end,
                      Pack<kQueries>* scores) {
  constexpr int kStep = 8;  // loads in flight; k_dim is a multiple of 16
  const int tokens = p.shape.chunk_tokens;
  float sum[kGroups][kQueries];
  bool visible[kGroups];
  KVP_UNROLL
  for (int g = 0; g < kGroups; ++g) {
    const int t = start + g * kWarp + lane_index();
    visible[g] = begin <= t && t < end;
    KVP_UNROLL
    for (int q = 0; q < kQueries; ++q) sum[g][q] = 0.0f;
  }
  const typename Source::Element* column = keys + start + lane_index();
  KVP_NO_UNROLL
  for (int d = 0; d < p.shape.k_dim; d += kStep) {
    float k[kStep][kGroups];
    KVP_UNROLL
    for (int i = 0; i < kStep; ++i) {
      KVP_UNROLL
      for (int g = 0; g < kGroups; ++g) {
        k[i][g] = visible[g] ? Source::widen(column[i * tokens + g * kWarp]) : 0.0f;
      }
    }
    KVP_UNROLL
    for (int i = 0; i < kStep; ++i) {
      const Pack<kQueries> query = queries[d + i];
      KVP_UNROLL
      for (int g = 0; g < kGroups; ++g) {
        KVP_UNROLL
        for (int q = 0; q < kQueries; ++q) sum[g][q] = fma_rn(query.x[q], k[i][g], sum[g][q]);
      }
    }
    column += kStep * tokens;
  }
  KVP_UNROLL
  for (int g = 0; g < kGroups; ++g) {
    const int t = start + g * kWarp + lane_index();
    if (t >= tokens) continue;
    Pack<kQueries> pack;
    KVP_UNROLL
    for (int q = 0; q < kQueries; ++q) {
      float x = sum[g][q] * p.scaling;
      if (p.softcap != 0.0f) x = tanh(div_rn(x, p.softcap)) * p.softcap;
      pack.x[q] = visible[g] ? x : minus_infinity();
    }
    scores[t] = pack;
  }
}

template <class Source, int kQueries>
KVP_DEVICE void score_chunk(const AttendParams& p, const unsigned char* tile,
                            const Pack<kQueries>* queries, int begin, int end,
                            Pack<kQueries>* scores) {
  const auto* keys = reinterpret_cast<const typename Source::Element*>(tile);
  for (int start = begin / kWarp * kWarp; start < end; start += 2 * kWarp) {
    if (start + kWarp < end) {
      score<Source, kQueries, 2>(p, keys, queries, start, begin, end, scores);
    } else {
      score<Source, kQueries, 1>(p, keys, queries, start, begin, end, scores);
    }
  }
}

// The same of codes: pairs of dimensions, in integers.
template <DType kCodes, int kQueries>
KVP_DEVICE void score_codes(const AttendParams& p, const unsigned char* tile,
                            const Pack<kQueries>* queries, int begin, int end,
                            Pack<kQueries>* scores) {
  const int tokens = p.shape.chunk_tokens;
  const int pairs = kCodes == DType::kQ4 ? kQ4Group / 2 : p.shape.k_dim / 2;  // that share a scale
  const uint16_t* scales = codes::scales_of(tile, kCodes, tokens, p.shape.k_dim);
  const Pack<kQueries> worth = queries[worth_at(p.shape)];
  for (int start = begin / kWarp * kWarp; start < end; start += kWarp) {
    const int t = start + lane_index();
    if (t >= tokens) continue;
    const bool visible = begin <= t && t < end;
    float dot[kQueries] = {};
    for (int first = 0, g = 0; visible && first < p.shape.k_dim / 2; first += pairs, ++g) {
      int32_t sum[kQueries] = {};
      for (int r = first; r < first + pairs; ++r) {
        int32_t low, high;
        if (kCodes == DType::kQ4) {
          const uint32_t both = tile[r * tokens + t];
          low = codes::level_of(both & 15u);
          high = codes::level_of(both >> 4);
        } else {
          const uint32_t pair = reinterpret_cast<const uint16_t*>(tile)[r * tokens + t];
          low = codes::low_level(pair);
          high = codes::high_level(pair);
        }
        const Pack<kQueries> one = queries[2 * r], other = queries[2 * r + 1];
        KVP_UNROLL
        for (int q = 0; q < kQueries; ++q) {
          sum[q] += codes::as_int(one.x[q]) * low + codes::as_int(other.x[q]) * high;
        }
      }
      const float scale = bfloat16_bits_to_float(scales[g * tokens + t]);
      KVP_UNROLL
      for (int q = 0; q < kQueries; ++q) dot[q] = fma_rn(static_cast<float>(sum[q]), scale, dot[q]);
    }
    Pack<kQueries> pack;
    KVP_UNROLL
    for (int q = 0; q < kQueries; ++q) {
      float x = dot[q] * worth.x[q] * p.scaling;
      if (p.softcap != 0.0f) x = tanh(div_rn(x, p.softcap)) * p.softcap;
      pack.x[q] = visible ? x : minus_infinity();
    }
    scores[t] = pack;
  }
}

// Turns scores into weights, brings m and l up to date and rescales acc.
template <int kQueries, int kVectors>
KVP_DEVICE void soften(int begin, int end, Pack<kQueries>* scores,
                       State<kQueries, kVectors>* state) {
  // Tokens in whole vectors of sixteen that hold a visible one.
  const int first = begin / kHalf * kHalf;
  const int last = (end + kHalf - 1) / kHalf * kHalf;
  const int own = first + lane_index() % kHalf;
  float top[kQueries], sum[kQueries];
  KVP_UNROLL
  for (int q = 0; q < kQueries; ++q) {
    top[q] = minus_infinity();
    sum[q] = 0.0f;
  }
  KVP_NO_UNROLL
  for (int t = own; t < last; t += kHalf) {
    const Pack<kQueries> x = scores[t];
    KVP_UNROLL
    for (int q = 0; q < kQueries; ++q) top[q] = top[q] > x.x[q] ? top[q] : x.x[q];
  }
  float shift[kQueries];
  KVP_UNROLL
  for (int q = 0; q < kQueries; ++q) {
    // Lane 0 is what counts: its operands are the lower lane's, then the higher one's.
    for (int width = kHalf / 2; width >= 1; width /= 2) {
      const float other = shuffle_xor(top[q], width);
      top[q] = top[q] > other ? top[q] : other;
    }
    const float reached = shuffle(top[q], 0);
    shift[q] = state->m[q] > reached ? state->m[q] : reached;
  }
  sync_warp();  // the scores have been read; collectives do not order memory
  KVP_NO_UNROLL
  for (int t = first + lane_index(); t < last; t += kWarp) {
    Pack<kQueries> x = scores[t];
    KVP_UNROLL
    for (int q = 0; q < kQueries; ++q) x.x[q] = exp(x.x[q] - shift[q]);
    scores[t] = x;
  }
  sync_warp();
  KVP_NO_UNROLL
  for (int t = own; t < last; t += kHalf) {
    const Pack<kQueries> x = scores[t];
    KVP_UNROLL
    for (int q = 0; q < kQueries; ++q) sum[q] = sum[q] + x.x[q];
  }
  KVP_UNROLL
  for (int q = 0; q < kQueries; ++q) {
    for (int width = kHalf / 2; width >= 1; width /= 2) {
      sum[q] = sum[q] + shuffle_xor(sum[q], width);
    }
    const float factor = state->m[q] != shift[q] ? exp(state->m[q] - shift[q]) : 1.0f;
    state->m[q] = shift[q];
    state->l[q] = fma_rn(state->l[q], factor, sum[q]);
    KVP_UNROLL
    for (int i = 0; i < kVectors; ++i) state->acc[q][i] = state->acc[q][i] * factor;
  }
}

template <class Source, int kQueries, int kVectors>
KVP_DEVICE void accumulate(const AttendParams& p, const unsigned char* tile, int begin, int end,
                           const Pack<kQueries>* weights, State<kQueries, kVectors>* state) {
  const int v_dim = p.shape.v_dim;
  const auto* values = reinterpret_cast<const typename Source::Element*>(tile) +
                       static_cast<int64_t>(begin) * v_dim + lane_index();
  for (int t = begin; t < end; ++t, values += v_dim) {
    const Pack<kQueries> weight = weights[t];
    KVP_UNROLL
    for (int i = 0; i < kVectors; ++i) {
      const bool within = i * kWarp + lane_index() < v_dim;
      const float v = within ? Source::widen(values[i * kWarp]) : 0.0f;
      KVP_UNROLL
      for (int q = 0; q < kQueries; ++q) {
        state->acc[q][i] = fma_rn(weight.x[q], v, state->acc[q][i]);
      }
    }
  }
}

// The same of codes: weights times scales become integers, and lose the floats they were.
template <int kQueries, int kVectors>
KVP_DEVICE void accumulate_codes(const AttendParams& p, const unsigned char* tile, int begin,
                                 int end, Pack<kQueries>* weights,
                                 State<kQueries, kVectors>* state) {
  const int v_dim = p.shape.v_dim;
  const uint16_t* scales = codes::scales_of(tile, DType::kQ8, p.shape.chunk_tokens, v_dim);
  uint32_t largest[kQueries] = {};
  sync_warp();  // the weights have been summed
  KVP_NO_UNROLL
  for (int t = begin + lane_index(); t < end; t += kWarp) {
    const float scale = bfloat16_bits_to_float(scales[t]);
    Pack<kQueries> pack = weights[t];
    KVP_UNROLL
    for (int q = 0; q < kQueries; ++q) {
      pack.x[q] = pack.x[q] * scale;
      const uint32_t bits = codes::magnitude_bits(pack.x[q]);
      largest[q] = bits > largest[q] ? bits : largest[q];
    }
    weights[t] = pack;
  }
  codes::Unit unit[kQueries];
  KVP_UNROLL
  for (int q = 0; q < kQueries; ++q) {
    unit[q] = codes::unit_of(codes::largest_of_warp(largest[q]));
  }
  KVP_NO_UNROLL
  for (int t = begin + lane_index(); t < end; t += kWarp) {
    Pack<kQueries> pack = weights[t];
    KVP_UNROLL
    for (int q = 0; q < kQueries; ++q) {
      const bool none = unit[q].factor == 0.0f;
      pack.x[q] = codes::as_float(none ? 0 : codes::rounded(pack.x[q], unit[q].factor));
    }
    weights[t] = pack;
  }
  sync_warp();
  int32_t sum[kQueries][kVectors] = {};
  for (int t = begin; t < end; ++t) {
    const Pack<kQueries> weight = weights[t];
    const unsigned char* row = tile + int64_t{t / 2} * 2 * v_dim + t % 2;
    KVP_UNROLL
    for (int i = 0; i < kVectors; ++i) {
      const int j = i * kWarp + lane_index();
      const int32_t level = j < v_dim ? static_cast<int8_t>(row[2 * j]) : 0;
      KVP_UNROLL
      for (int q = 0; q < kQueries; ++q) sum[q][i] += codes::as_int(weight.x[q]) * level;
    }
  }
  KVP_UNROLL
  for (int q = 0; q < kQueries; ++q) {
    KVP_UNROLL
    for (int i = 0; i < kVectors; ++i) {
      state->acc[q][i] = fma_rn(static_cast<float>(sum[q][i]), unit[q].worth, state->acc[q][i]);
    }
  }
}

// The same of codes with a scale for 32 columns, what the lanes have of one vector: every vector makes
// integers of the weights anew, which stay the floats they were. Each is moved to where acc[q][0] is and
// ends where it was, so that all this is there four times and not sixteen.
template <int kQueries, int kVectors>
KVP_DEVICE void accumulate_q4(const AttendParams& p, const unsigned char* tile, int begin, int end,
                              const Pack<kQueries>* weights, State<kQueries, kVectors>* state) {
  static_assert(kQ4Group == kWarp, "a group is a vector");
  const int v_dim = p.shape.v_dim;
  const int tokens = p.shape.chunk_tokens;
  const uint16_t* all = codes::scales_of(tile, DType::kQ4, tokens, v_dim);
  const int lane = lane_index();
  const auto next_vector = [&] {
    KVP_UNROLL
    for (int q = 0; q < kQueries; ++q) {
      const float first = state->acc[q][0];
      KVP_UNROLL
      for (int j = 0; j + 1 < kVectors; ++j) state->acc[q][j] = state->acc[q][j + 1];
      state->acc[q][kVectors - 1] = first;
    }
  };
  KVP_UNROLL_4
  for (int i = 0; i < kVectors; ++i, next_vector()) {
    if (i * kWarp >= v_dim) continue;
    const uint16_t* scales = all + i * tokens;
    uint32_t largest[kQueries] = {};
    KVP_NO_UNROLL
    for (int t = begin + lane; t < end; t += kWarp) {
      const float scale = bfloat16_bits_to_float(scales[t]);
      KVP_UNROLL
      for (int q = 0; q < kQueries; ++q) {
        const uint32_t bits = codes::magnitude_bits(weights[t].x[q] * scale);
        largest[q] = bits > largest[q] ? bits : largest[q];
      }
    }
    codes::Unit unit[kQueries];
    KVP_UNROLL
    for (int q = 0; q < kQueries; ++q) {
      unit[q] = codes::unit_of(codes::largest_of_warp(largest[q]));
    }
    int32_t sum[kQueries] = {};
    for (int start = begin; start < end; start += kWarp) {
      const int own = start + lane;
      const float scale = own < end ? bfloat16_bits_to_float(scales[own]) : 0.0f;
      int32_t integers[kQueries];
      KVP_UNROLL
      for (int q = 0; q < kQueries; ++q) {
        const bool none = own >= end || unit[q].factor == 0.0f;
        integers[q] = none ? 0 : codes::rounded(weights[own].x[q] * scale, unit[q].factor);
      }
      const int here = end - start < kWarp ? end - start : kWarp;
      for (int s = 0; s < here; ++s) {
        const uint32_t both = tile[int64_t{start + s} * (v_dim / 2) + i * 16 + lane % 16];
        const int32_t level = codes::level_of(lane < 16 ? both & 15u : both >> 4);
        KVP_UNROLL
        for (int q = 0; q < kQueries; ++q) sum[q] += shuffle(integers[q], s) * level;
      }
    }
    KVP_UNROLL
    for (int q = 0; q < kQueries; ++q) {
      state->acc[q][0] = fma_rn(static_cast<float>(sum[q]), unit[q].worth, state->acc[q][0]);
    }
  }
}

// Adds the visible tokens of chunk c.
template <int kQueries, int kVectors>
KVP_DEVICE void add_chunk(const AttendParams& p, const Queries& queries, int64_t c,
                          Pack<kQueries>* memory, State<kQueries, kVectors>* state) {
  const int64_t tokens = p.shape.chunk_tokens;
  const int64_t start = c * tokens;
  const int64_t after = queries.position + 1 - start;
  int64_t before = p.window > 0 ? queries.position - p.window + 1 - start : 0;
  if (before < 0) before = 0;
  const int begin = static_cast<int>(before);
  const int end = static_cast<int>(after < tokens ? after : tokens);
  if (begin >= end) return;

  const int64_t entry = queries.first + c;
  const uint64_t staged = p.tables.staged != nullptr ? p.tables.staged[entry] : 0;
  const uint64_t slice =
      staged != 0 ? staged : p.tables.chunks[entry] + static_cast<uint64_t>(p.shape.slice_offset);
  const auto* page =
      reinterpret_cast<const unsigned char*>(slice) + queries.kv_head * p.shape.page_bytes;
  const unsigned char* values = page + p.shape.k_tile_bytes;
  Pack<kQueries>* scores = memory + p.shape.k_dim;

  sync_warp();  // the queries are there; the weights of the chunk before have been used
  if (p.shape.k_dtype == DType::kQ8) {
    score_codes<DType::kQ8>(p, page, memory, begin, end, scores);
  } else if (p.shape.k_dtype == DType::kQ4) {
    score_codes<DType::kQ4>(p, page, memory, begin, end, scores);
  } else if (p.shape.k_dtype == DType::kFloat32) {
    score_chunk<Float32>(p, page, memory, begin, end, scores);
  } else if (p.shape.k_dtype == DType::kFloat16) {
    score_chunk<Float16>(p, page, memory, begin, end, scores);
  } else {
    score_chunk<BFloat16>(p, page, memory, begin, end, scores);
  }
  sync_warp();
  soften(begin, end, scores, state);
  if (p.shape.v_dtype == DType::kQ8) {
    accumulate_codes(p, values, begin, end, scores, state);
  } else if (p.shape.v_dtype == DType::kQ4) {
    accumulate_q4(p, values, begin, end, scores, state);
  } else if (p.shape.v_dtype == DType::kFloat32) {
    accumulate<Float32>(p, values, begin, end, scores, state);
  } else if (p.shape.v_dtype == DType::kFloat16) {
    accumulate<Float16>(p, values, begin, end, scores, state);
  } else {
    accumulate<BFloat16>(p, values, begin, end, scores, state);
  }
}

// The state of one split, from a fresh one. False: no chunk of it is attended to.
template <int kQueries, int kVectors>
KVP_DEVICE bool walk_split(const AttendParams& p, const Queries& queries, int64_t split,
                           Pack<kQueries>* memory, State<kQueries, kVectors>* state) {
  const uint32_t chosen = queries.selected != nullptr ? queries.selected[split] : 0xFFu;
  if (chosen == 0) return false;
  state->reset();
  const int64_t low = first_chunk(p, queries.position);
  const int64_t high = queries.position / p.shape.chunk_tokens;
  for (int i = 0; i < kChunksPerSplit; ++i) {
    const int64_t c = split * kChunksPerSplit + i;
    if (c < low || c > high || (chosen >> i & 1u) == 0) continue;
    add_chunk(p, queries, c, memory, state);
  }
  return true;
}

// acc / l in the output's dtype; zeros where no key was seen.
KVP_DEVICE void write_output(const AttendParams& p, int64_t row, int32_t head, int32_t j, float acc,
                             float m, float l) {
  const float x = m == minus_infinity() ? 0.0f : div_rn(acc, l);
  const int64_t at = row * p.out.row_stride + head * p.out.head_stride + j;
  if (p.out.dtype == DType::kFloat32) {
    static_cast<float*>(p.out.data)[at] = x;
  } else if (p.out.dtype == DType::kFloat16) {
    static_cast<uint16_t*>(p.out.data)[at] = float_to_float16_bits(x);
  } else {
    static_cast<uint16_t*>(p.out.data)[at] = float_to_bfloat16_bits(x);
  }
}

}  // namespace kvpager::gpu::reference
