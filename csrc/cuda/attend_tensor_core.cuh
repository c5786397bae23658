// What one warp does: 16 queries (times kM) against one key tile in shared memory.
//
// A warp's lanes hold its queries as the mma fragments have them: lane / 4 is row g of a 16-row
// tile, which also has row g + 8, called half 0 and half 1; lane % 4 is the place in the quad.
//
// Tiles lie in shared memory as rows of 16-byte units, K by d and V by token, and are read with
// load_matrix_x4_trans: eight lanes read the same unit of eight consecutive rows. Eight units span
// all banks; without more, those eight lanes would meet in the same ones. Units<n> xors the unit
// with bits of the row such that the eight fall on eight different places modulo 8:
//   n a multiple of 8: with row % 8;  of 4: with row / 2 % 4, rows being 4 units apart modulo 8;
//   2: with row / 4 % 2, as four rows span the banks.
// A copy's eight neighbouring lanes write whole aligned groups of 8 (4, 2) units, only permuted.
// Neither has a bank conflict.
#pragma once

#include "cuda/attend_tensor.cuh"
#include "cuda/matrix_units.cuh"

namespace kvpager::gpu::tensor {

// Places of units in a tile of rows of kUnits. What depends on the lane goes into offset(), once; what
// the compiler knows goes into step(), an xor and an immediate offset for each access.
template <int kUnits>
struct Units {
  static_assert(kUnits == 2 || kUnits % 4 == 0, "");
  static constexpr int kSpan = kUnits % 8 == 0 ? 8 : kUnits % 4 == 0 ? 4 : 2;  // that are permuted

  static KVP_DEVICE int twist(int row) {
    return kSpan == 8 ? row & 7 : kSpan == 4 ? row >> 1 & 3 : row >> 2 & 1;
  }
  // In bytes, of a unit < kSpan.
  static KVP_DEVICE int offset(int row, int unit) {
    return (row * kUnits + (unit ^ twist(row))) * 16;
  }
  // `row` rows and `unit` units on from `from`, the sum of a tile's address, a multiple of 128, and
  // an offset. Bits of `row` and `unit` are not among those of the offset's row and unit.
  template <class Byte>
  static KVP_DEVICE Byte* step(Byte* from, int row, int unit) {
    const uintptr_t moved = reinterpret_cast<uintptr_t>(from) ^
                            static_cast<uintptr_t>((twist(row) ^ (unit & (kSpan - 1))) * 16);
    return reinterpret_cast<Byte*>(moved) + (row * kUnits + (unit & ~(kSpan - 1))) * 16;
  }
};

// A lane's part in copying rows of kUnits units to shared memory: kLanes lanes copy neighbouring
// units of a row, kRows rows at a time.
template <int kUnits>
struct Copy {
  static constexpr int kLanes = Units<kUnits>::kSpan;
  static constexpr int kRows = 32 / kLanes;
  static KVP_DEVICE int row() { return lane_index() / kLanes; }
  static KVP_DEVICE int unit() { return lane_index() % kLanes; }
};

// Where a lane's row address for load_matrix_x4_trans is in a tile: add rows in multiples of 16 and
// units in multiples of 2 with Units::step. A row of codes is a pair of rows: of eight of them, rows 2 i
// and 2 i + 1 of a matrix are i and i + 4, so that a lane gets the codes of its places in b0 and b1.
template <int kUnits, bool kCodes>
KVP_DEVICE int matrix_offset() {
  int row = lane_index() & 15;
  if (kCodes) row = (row & 8) | (row & 7) >> 1 | (row & 1) << 2;
  return Units<kUnits>::offset(row, lane_index() >> 4);
}

// The queries of a warp: [begin, begin + 16 kM) of a part and kv head, those from `end` on unused.
template <int kM>
struct Queries {
  int32_t begin = 0, end = 0;
  int32_t first_index = 0;  // of the part's rows within Tables::order
  int32_t kv_head = 0, group = 1;
  int32_t row[kM][2];  // -1: unused

  KVP_DEVICE int number(int m, int half) const {
    return begin + 16 * m + 8 * half + lane_index() / 4;
  }
  KVP_DEVICE int64_t index(int m, int half) const { return first_index + number(m, half) / group; }
  KVP_DEVICE int q_head(int m, int half) const { return kv_head * group + number(m, half) % group; }
  KVP_DEVICE void place(const AttendParams& p, const Part& part, int head, int from, int to) {
    begin = from;
    end = to;
    first_index = part.first_row;
    kv_head = head;
    group = p.shape.q_heads / p.shape.kv_heads;
    KVP_UNROLL
    for (int m = 0; m < kM; ++m) {
      KVP_UNROLL
      for (int half = 0; half < 2; ++half) {
        row[m][half] = number(m, half) < end ? p.tables.order[index(m, half)] : -1;
      }
    }
  }
};

// Queries as A fragments, one for each 16 of d. Unused ones are zeros.
template <int kDim, int kM>
struct RegisterFragments {
  uint32_t step[kM][kDim / 16][4];

  KVP_DEVICE void put(int m, int k, const uint32_t (&a)[4]) {
    KVP_UNROLL
    for (int i = 0; i < 4; ++i) step[m][k][i] = a[i];
  }
  KVP_DEVICE void get(int m, int k, uint32_t (&a)[4]) const {
    KVP_UNROLL
    for (int i = 0; i < 4; ++i) a[i] = step[m][k][i];
  }
};

// The same in shared memory, for wide heads. Each lane reads what it wrote.
template <int kDim, int kM>
struct SharedFragments {
  static constexpr int kWarpBytes = kM * kDim / 16 * 32 * 16;
  unsigned char* memory = nullptr;  // kWarpBytes of this warp's

  KVP_DEVICE Word4* at(int m, int k) const {
    return reinterpret_cast<Word4*>(memory) + (m * (kDim / 16) + k) * 32 + lane_index();
  }
  KVP_DEVICE void put(int m, int k, const uint32_t (&a)[4]) {
    *at(m, k) = Word4{{a[0], a[1], a[2], a[3]}};
  }
  KVP_DEVICE void get(int m, int k, uint32_t (&a)[4]) const {
    const Word4 word = *at(m, k);
    KVP_UNROLL
    for (int i = 0; i < 4; ++i) a[i] = word.x[i];
  }
};

// Elements `at` and at + 1 of q as a pair of kType.
template <DType kType>
KVP_DEVICE uint32_t pair_of_floats(const Tensor& q, int64_t at) {
  const float* from = static_cast<const float*>(q.data) + at;
  return pack<kType>(from[0], from[1]);
}

KVP_DEVICE uint32_t load_pair(const uint16_t* from, bool words) {
  if (words) return *reinterpret_cast<const uint32_t*>(from);
  return static_cast<uint32_t>(from[0]) | static_cast<uint32_t>(from[1]) << 16;
}

// Queries of codes may be rotated ones, which are float32.
template <DType kType, int kDim, int kM, bool kCodes, class Fragments>
KVP_DEVICE void load_queries(const Launch& launch, const Queries<kM>& queries, Fragments& out) {
  const Tensor& q = launch.attend.q;
  KVP_UNROLL
  for (int m = 0; m < kM; ++m) {
    int64_t from[2];
    KVP_UNROLL
    for (int half = 0; half < 2; ++half) {
      from[half] = lane_index() % 4 * 2;
      if (queries.row[m][half] >= 0) {
        from[half] += queries.row[m][half] * q.row_stride + queries.q_head(m, half) * q.head_stride;
      }
    }
    KVP_UNROLL
    for (int k = 0; k < kDim / 16; ++k) {
      uint32_t a[4];
      KVP_UNROLL
      for (int i = 0; i < 4; ++i) {
        const int half = i & 1;
        const int64_t at = from[half] + 16 * k + 8 * (i >> 1);
        if (queries.row[m][half] < 0) {
          a[i] = 0;
        } else if (kCodes && q.dtype == DType::kFloat32) {
          a[i] = pair_of_floats<kType>(q, at);
        } else {
          a[i] = load_pair(static_cast<const uint16_t*>(q.data) + at, launch.q_words);
        }
      }
      out.put(m, k, a);
    }
  }
}

// s += q k^T over 16 of d. `keys`: a tile's address + matrix_offset; the step is its rows [row, row +
// 16).
template <DType kType, int kM>
KVP_DEVICE void add_scores(float (&s)[kM][kTokens / 8][4], const uint32_t (&q)[kM][4],
                           const unsigned char* keys, int row) {
  KVP_UNROLL
  for (int n = 0; n < kTokens / 16; ++n) {
    uint32_t b[4];
    load_matrix_x4_trans(b, Units<kTokens / 8>::step(keys, row, 2 * n));
    KVP_UNROLL
    for (int m = 0; m < kM; ++m) {
      mma<kType>(s[m][2 * n], q[m], b[0], b[1]);
      mma<kType>(s[m][2 * n + 1], q[m], b[2], b[3]);
    }
  }
}

// to += p b. kKeep: a half that is not `seen` is left as it is; without, all are seen or unused.
template <DType kType, bool kKeep>
KVP_DEVICE void add_value(float (&to)[4], const uint32_t (&p)[4], uint32_t b0, uint32_t b1,
                          const bool (&seen)[2]) {
  if constexpr (kKeep) {
    float sum[4] = {to[0], to[1], to[2], to[3]};
    mma<kType>(sum, p, b0, b1);
    KVP_UNROLL
    for (int e = 0; e < 4; ++e) to[e] = seen[e >> 1] ? sum[e] : to[e];
  } else {
    mma<kType>(to, p, b0, b1);
  }
}

// acc += p v over 16 tokens, in the same way.
template <DType kType, int kDim, int kM, bool kKeep>
KVP_DEVICE void add_values(float (&acc)[kM][kDim / 8][4], const uint32_t (&p)[kM][4],
                           const unsigned char* values, int row, const bool (&seen)[kM][2]) {
  KVP_UNROLL
  for (int n = 0; n < kDim / 16; ++n) {
    uint32_t b[4];
    load_matrix_x4_trans(b, Units<kDim / 8>::step(values, row, 2 * n));
    KVP_UNROLL
    for (int m = 0; m < kM; ++m) {
      KVP_UNROLL
      for (int i = 0; i < 2; ++i) {
        add_value<kType, kKeep>(acc[m][2 * n + i], p[m], b[2 * i], b[2 * i + 1], seen[m]);
      }
    }
  }
}

// Four codes of q8 as the bfloat16 numbers that they are, exactly: levels have 7 bits and a sign.
struct Levels {
  uint32_t low, high;  // of the lower two, and of the upper two
};
KVP_DEVICE Levels levels_of(uint32_t codes) {
  const uint32_t biased = codes ^ 0x80808080u;  // level + 128
  uint32_t bits[4];
  KVP_UNROLL
  for (int i = 0; i < 4; ++i) {  // 2^23 + level + 128, less 2^23 + 128
    bits[i] = float_to_bits(bits_to_float(0x4B000000u | (biased >> (8 * i) & 0xFFu)) - 8388736.0f);
  }
  return {bits[0] >> 16 | (bits[1] & 0xFFFF0000u), bits[2] >> 16 | (bits[3] & 0xFFFF0000u)};
}

// s += q k^T over 32 of d, of codes without their scales: 16 rows of pairs of d.
template <int kM>
KVP_DEVICE void add_code_scores(float (&s)[kM][kTokens / 8][4], const uint32_t (&q)[2][kM][4],
                                const unsigned char* keys, int row) {
  KVP_UNROLL
  for (int n = 0; n < kTokens / 16; ++n) {
    uint32_t b[4];
    load_matrix_x4_trans(b, Units<kTokens / 8>::step(keys, row, 2 * n));
    KVP_UNROLL
    for (int i = 0; i < 4; ++i) {
      const Levels levels = levels_of(b[i]);
      KVP_UNROLL
      for (int m = 0; m < kM; ++m) {
        mma<DType::kBFloat16>(s[m][2 * n + (i >> 1)], q[i & 1][m], levels.low, levels.high);
      }
    }
  }
}

// acc += p v over 32 tokens, in the same way; p has the scales.
template <int kDim, int kM, bool kKeep>
KVP_DEVICE void add_code_values(float (&acc)[kM][kDim / 8][4], const uint32_t (&p0)[kM][4],
                                const uint32_t (&p1)[kM][4], const unsigned char* values, int row,
                                const bool (&seen)[kM][2]) {
  KVP_UNROLL
  for (int n = 0; n < kDim / 16; ++n) {
    uint32_t b[4];
    load_matrix_x4_trans(b, Units<kDim / 8>::step(values, row, 2 * n));
    KVP_UNROLL
    for (int i = 0; i < 4; ++i) {
      const Levels levels = levels_of(b[i]);
      KVP_UNROLL
      for (int m = 0; m < kM; ++m) {
        add_value<DType::kBFloat16, kKeep>(acc[m][2 * n + (i >> 1)], (i & 1) == 0 ? p0[m] : p1[m],
                                           levels.low, levels.high, seen[m]);
      }
    }
  }
}

// acc += p v over 16 rows of a tile, the `step`th such.
template <DType kType, int kDim, int kM, bool kCodes, bool kKeep>
KVP_DEVICE void use_values(float (&acc)[kM][kDim / 8][4], const uint32_t (&p)[kTokens / 16][kM][4],
                           int step, const unsigned char* values, int row,
                           const bool (&seen)[kM][2]) {
  if constexpr (kCodes) {
    add_code_values<kDim, kM, kKeep>(acc, p[2 * step], p[2 * step + 1], values, row, seen);
  } else {
    add_values<kType, kDim, kM, kKeep>(acc, p[step], values, row, seen);
  }
}

// How a page lies in memory. Rows of a tile are what it is brought by: of codes, pairs of d or tokens.
template <int kDim, bool kCodes>
struct Page {
  static constexpr int kKeyRows = kCodes ? kDim / 2 : kDim;
  static constexpr int kValueRows = kCodes ? kTokens / 2 : kTokens;
  static constexpr int kTileBytes = kKeyRows * kTokens * 2;  // of K and of V, without scales
  static constexpr int kValuesAt = kTileBytes + (kCodes ? kTokens * 2 : 0);
};

// Two bfloat16 scales as float32.
KVP_DEVICE Float2 two_scales(uint32_t both) {
  return {{bits_to_float(both << 16), bits_to_float(both & 0xFFFF0000u)}};
}

// Scales of a tile's keys and values, of codes: of the two columns that a lane has of block n. All lanes.
struct LaneScales {
  uint32_t mine[2] = {};  // of keys and values, of tokens 2 lane and 2 lane + 1

  template <int kDim>
  static KVP_DEVICE LaneScales of(const unsigned char* page) {
    using P = Page<kDim, true>;
    const int at = P::kTileBytes + 4 * lane_index();
    return {{*reinterpret_cast<const uint32_t*>(page + at),
             *reinterpret_cast<const uint32_t*>(page + P::kValuesAt + at)}};
  }
  KVP_DEVICE Float2 keys(int n) const {
    return two_scales(shuffle(mine[0], 4 * n + lane_index() % 4));
  }
  KVP_DEVICE Float2 values(int n) const {
    return two_scales(shuffle(mine[1], 4 * n + lane_index() % 4));
  }
};

// The same in shared memory: those of keys, then those of values.
struct SharedScales {
  static constexpr int kBytes = 2 * kTokens * 2;
  const unsigned char* memory = nullptr;

  KVP_DEVICE Float2 keys(int n) const {
    return two_scales(reinterpret_cast<const uint32_t*>(memory)[4 * n + lane_index() % 4]);
  }
  KVP_DEVICE Float2 values(int n) const {
    return two_scales(
        reinterpret_cast<const uint32_t*>(memory)[kTokens / 2 + 4 * n + lane_index() % 4]);
  }
};

// cap * tanh(x) = cap * (1 - e) / (1 + e), the division as Newton steps from a line that is off by 1/17
// at most: eight times as many digits after three of them, and no branch.
KVP_DEVICE float soft_capped(float x, float cap) {
  const float e = exp2_approximate(-2.0f * kLog2E * fabsf(x));
  const float divisor = 1.0f + e;  // in [1, 2]
  float inverse = fma_rn(-8.0f / 17.0f, divisor, 24.0f / 17.0f);
  KVP_UNROLL
  for (int i = 0; i < 3; ++i) {
    inverse = fma_rn(inverse, fma_rn(-divisor, inverse, 1.0f), inverse);
  }
  const float tanh = (1.0f - e) * inverse;
  return (x < 0.0f ? -tanh : tanh) * cap;
}

// The chunks of a span that some query of a tile sees. A chunk is a tile of keys.
template <int kSpan>
struct TileRange {
  typename Sight<kSpan>::Word chunks = 0;

  // The first at or after `tile`, before `limit`; else limit.
  KVP_DEVICE int next(int tile, int limit) const {
    for (; tile < limit; ++tile) {
      if ((chunks >> tile & 1) != 0) return tile;
    }
    return limit;
  }
};

// What the lane's rows see of a span, and any of the warp's. Unused rows then count as seeing all, so
// that they are in nobody's way.
template <int kSpan, int kM>
KVP_DEVICE TileRange<kSpan> look(const AttendParams& p, const Queries<kM>& queries, int64_t span,
                                 Sight<kSpan> (&sight)[kM][2]) {
  TileRange<kSpan> range;
  KVP_UNROLL
  for (int m = 0; m < kM; ++m) {
    KVP_UNROLL
    for (int half = 0; half < 2; ++half) {
      Sight<kSpan>& one = sight[m][half];
      if (queries.row[m][half] < 0) {
        one.chunks = ~typename Sight<kSpan>::Word{0};
        one.begin = 0;
        one.end = INT32_MAX;
        continue;
      }
      one = sight_of<kSpan>(p, queries.row[m][half], queries.kv_head, span);
      range.chunks |= one.chunks;
    }
  }
  KVP_UNROLL
  for (int mask = 4; mask < 32; mask *= 2) {  // the lanes of a quad agree
    range.chunks |= shuffle_xor(range.chunks, mask);
  }
  return range;
}

// Which keys of the tile at hand a lane's two rows see: [begin, end) of it.
struct TileSight {
  int begin[2], end[2];
  bool seen[2];  // any; true for unused rows
};

template <int kSpan>
KVP_DEVICE TileSight tile_sight(const Sight<kSpan> (&sight)[2], int tile) {
  TileSight seen;
  KVP_UNROLL
  for (int half = 0; half < 2; ++half) {
    const bool chosen = sight[half].chunks >> tile & 1;
    const int begin = sight[half].begin - tile * kTokens;
    const int end = sight[half].end - tile * kTokens;
    seen.begin[half] = begin > 0 ? begin : 0;
    seen.end[half] = !chosen ? 0 : end < kTokens ? end : kTokens;
    seen.seen[half] = seen.begin[half] < seen.end[half];
  }
  return seen;
}

// Scores to weights, in place, adding them to the running sums. Returns whether acc has to be
// rescaled.
KVP_DEVICE bool weigh(const Launch& launch, bool masked, const TileSight& sight,
                      float (&s)[kTokens / 8][4], float (&m)[2], float (&l)[2],
                      float (&rescale)[2]) {
  constexpr int kBlocks = kTokens / 8;
  KVP_UNROLL
  for (int n = 0; n < kBlocks; ++n) {
    KVP_UNROLL
    for (int e = 0; e < 4; ++e) s[n][e] *= launch.scale;
  }
  if (launch.cap != 0.0f) {
    KVP_UNROLL
    for (int n = 0; n < kBlocks; ++n) {
      KVP_UNROLL
      for (int e = 0; e < 4; ++e) s[n][e] = soft_capped(s[n][e], launch.cap);
    }
  }
  if (masked) {
    const int column = lane_index() % 4 * 2;
    KVP_UNROLL
    for (int n = 0; n < kBlocks; ++n) {
      KVP_UNROLL
      for (int e = 0; e < 4; ++e) {
        const int t = 8 * n + column + (e & 1);
        const bool visible = t >= sight.begin[e >> 1] && t < sight.end[e >> 1];
        s[n][e] = visible ? s[n][e] : kMinusInfinity;
      }
    }
  }
  KVP_UNROLL
  for (int half = 0; half < 2; ++half) {
    float top = m[half];
    KVP_UNROLL
    for (int n = 0; n < kBlocks; ++n) {
      top = fmaxf(top, fmaxf(s[n][2 * half], s[n][2 * half + 1]));
    }
    top = fmaxf(top, shuffle_xor(top, 1));
    top = fmaxf(top, shuffle_xor(top, 2));
    const float base = top == kMinusInfinity ? 0.0f : top;  // never -inf less -inf
    rescale[half] = exp2_approximate(m[half] - base);
    m[half] = top;
    float sum = 0.0f;
    KVP_UNROLL
    for (int n = 0; n < kBlocks; ++n) {
      KVP_UNROLL
      for (int e = 2 * half; e < 2 * half + 2; ++e) {
        s[n][e] = exp2_approximate(s[n][e] - base);
        sum += s[n][e];
      }
    }
    l[half] = fma_rn(l[half], rescale[half], sum);
  }
  return ballot(rescale[0] != 1.0f || rescale[1] != 1.0f) != 0;
}

// The running state of a split in registers: 16 kM queries.
template <int kDim, int kM>
struct SplitState {
  float acc[kM][kDim / 8][4];
  float m[kM][2], l[kM][2];

  KVP_DEVICE void reset() {
    KVP_UNROLL
    for (int i = 0; i < kM; ++i) {
      KVP_UNROLL
      for (int n = 0; n < kDim / 8; ++n) {
        KVP_UNROLL
        for (int e = 0; e < 4; ++e) acc[i][n][e] = 0.0f;
      }
      KVP_UNROLL
      for (int half = 0; half < 2; ++half) {
        m[i][half] = kMinusInfinity;
        l[i][half] = 0.0f;
      }
    }
  }

  // The tile's scores become weights, packed as A fragments; acc is rescaled. scales: of codes.
  template <DType kType, bool kCodes, class Scales>
  KVP_DEVICE void take(const Launch& launch, bool masked, const TileSight (&sight)[kM],
                       const Scales& scales, float (&s)[kM][kTokens / 8][4],
                       uint32_t (&p)[kTokens / 16][kM][4]) {
    if constexpr (kCodes) {
      KVP_UNROLL
      for (int n = 0; n < kTokens / 8; ++n) {
        const Float2 scale = scales.keys(n);
        KVP_UNROLL
        for (int i = 0; i < kM; ++i) {
          KVP_UNROLL
          for (int e = 0; e < 4; ++e) s[i][n][e] *= scale.x[e & 1];
        }
      }
    }
    KVP_UNROLL
    for (int i = 0; i < kM; ++i) {
      float rescale[2];
      if (weigh(launch, masked, sight[i], s[i], m[i], l[i], rescale)) {
        KVP_UNROLL
        for (int n = 0; n < kDim / 8; ++n) {
          KVP_UNROLL
          for (int e = 0; e < 4; ++e) acc[i][n][e] *= rescale[e >> 1];
        }
      }
    }
    if constexpr (kCodes) {
      KVP_UNROLL
      for (int n = 0; n < kTokens / 8; ++n) {
        const Float2 scale = scales.values(n);
        KVP_UNROLL
        for (int i = 0; i < kM; ++i) {
          KVP_UNROLL
          for (int e = 0; e < 4; ++e) {  // the scale of a token that is not written may be anything
            s[i][n][e] = s[i][n][e] == 0.0f ? 0.0f : s[i][n][e] * scale.x[e & 1];
          }
        }
      }
    }
    KVP_UNROLL
    for (int i = 0; i < kM; ++i) {
      KVP_UNROLL
      for (int k = 0; k < kTokens / 16; ++k) {
        KVP_UNROLL
        for (int j = 0; j < 4; ++j) {
          const int n = 2 * k + (j >> 1);
          const int e = 2 * (j & 1);
          p[k][i][j] = pack<kType>(s[i][n][e], s[i][n][e + 1]);
        }
      }
    }
  }

  // Adds up the quad's sums; unused queries become empty.
  KVP_DEVICE void close(const Queries<kM>& queries) {
    KVP_UNROLL
    for (int i = 0; i < kM; ++i) {
      KVP_UNROLL
      for (int half = 0; half < 2; ++half) {
        float& sum = l[i][half];
        sum += shuffle_xor(sum, 1);
        sum += shuffle_xor(sum, 2);
        if (queries.row[i][half] < 0) {
          m[i][half] = kMinusInfinity;
          sum = 0.0f;
        }
      }
    }
  }
};

}  // namespace kvpager::gpu::tensor
