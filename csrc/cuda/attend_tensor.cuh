// What the kernels of tensor attention share: parameters, which keys a row sees, and the fold of one
// partial state into another.
//
// The bits of a query are a function of its row and the constants below; nothing here or in the
// kernels takes part in them that depends on other queries, the launch or addresses:
//   tile    T = min(C, 64) tokens of a chunk. s[t]: mma.m16n8k16 over d ascending, from 0; times
//           `scale`, after a soft cap times `cap`, so that s is a base-2 exponent; -inf if not seen
//           m' = max(m, max_t s[t]); r = 2^(m - m'); p[t] = 2^(s[t] - m'); l = fmaf(l, r, sum of
//           p): thread t % 8 / 2 of a quad sums its own, ascending; acc = acc * r, then mma of p,
//           rounded to the 16-bit type, and V over t ascending. Untouched where no key is seen.
//   split   kSplitChunks chunks from (-inf, 0, 0); the quad's four l are added at its end
//   fold    splits into a group of kSplitsPerGroup splits, groups into the total, both at absolute
//           indices, ascending, from (-inf, 0, 0) or for the total from the sink (sink, 1, 0); one
//           that saw no key is skipped. M' = max(M, m), L = fmaf(L, 2^(M - M'), l * 2^(m - M')),
//           acc likewise
//   out     acc / l, + 0 so that a zero has one sign; zeros for a row that sees no key
// Of q8 codes, K and V are levels, exact in bfloat16: s[t] is times the key's scale before it is times
// `scale`; p[t] times the value's scale is what is rounded. Rotated queries are rounded to bfloat16.
// A weight that is 0 times a value is taken to add nothing, whatever the value: the values of later
// rows of a tile are there in some forwards and zeros in others.
#pragma once

#include <cmath>
#include <type_traits>

#include "cuda/params.h"
#include "cuda/portable.h"
#include "cuda/tables.cuh"
#include "kvpager/attention.h"

namespace kvpager::gpu::tensor {

inline constexpr float kMinusInfinity = -INFINITY;
inline constexpr int kTokens = 64;  // of a chunk: the only size that has kernels
inline constexpr float kLog2E = 1.4426950408889634f;
// Splits and groups are a function of position alone (docs/design/15), part of the bits: with another
// number kTensorKernelVersion is another.
inline constexpr int kSplitChunks = 4;
inline constexpr int kSplitsPerGroup = 16;
inline constexpr int kGroupChunks = kSplitChunks * kSplitsPerGroup;
static_assert(kGroupChunks == 64, "the chunks of a group are the bits of a word");
static_assert(kWaveChunks % kGroupChunks == 0, "a wave has whole groups");
static_assert(8 % kSplitChunks == 0, "the chunks of a split are bits of one byte");
inline constexpr uint32_t kSplitMask = (1u << kSplitChunks) - 1;

// How much of a tile's keys one item of work walks; the rest is left to the merge kernel.
enum class Level : int32_t { kSplit = 0, kGroup = 1, kWalk = 2 };

struct Launch {
  AttendParams attend;
  float scale = 1.0f;         // makes scores exponents of 2; with a soft cap, arguments of tanh
  float cap = 0.0f;           // tanh to exponents of 2; 0: no soft cap
  int32_t small_workers = 0;  // warps, in all
  int32_t large_workers = 0;  // blocks
  bool q_words = false, out_words = false;  // pairs of elements of q and out are aligned
};

// Scratch: a total for each query, which is kept from wave to wave, then the states of its units.
// A state: v_dim accumulators, then m and l four times, for each lane of a quad its own.
inline constexpr int kSumFloats = 8;
KVP_DEVICE int64_t state_floats(const Shape& shape) { return shape.v_dim + kSumFloats; }

KVP_DEVICE int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
KVP_DEVICE int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

// The granularity of this forward, decided by every block alike from what is in device memory, so
// that a captured launch suits later forwards. It moves work, never a bit.
struct Plan {
  Level small = Level::kWalk;
  Level large = Level::kWalk;
  int32_t splits = 0;   // of the longest span
  int64_t queries = 0;  // with a total and states in scratch
  int64_t states = 0;   // in scratch for each query: one per unit, or a group's for a walk

  KVP_DEVICE int units(Level level) const {
    if (level == Level::kSplit) return splits;
    return level == Level::kGroup ? (splits + kSplitsPerGroup - 1) / kSplitsPerGroup : 1;
  }
};

inline constexpr int kWalkStates = 1;  // a group's

// 1024ths of the machine that `items` of equal length keep busy.
KVP_DEVICE int64_t busy(int64_t items, int64_t workers) {
  const int64_t waves = larger(1, (items + workers - 1) / workers);
  return items * 1024 / (waves * workers);
}

KVP_DEVICE Plan make_plan(const Launch& launch) {
  const AttendParams& p = launch.attend;
  const Header header = *p.tables.header;
  Plan plan;
  plan.splits = static_cast<int32_t>((most_chunks(p.wave, header.max_visible) + kSplitChunks - 1) /
                                     kSplitChunks);
  plan.queries = int64_t{ordered_rows(p.tables)} * p.shape.q_heads;
  if (plan.queries == 0) return plan;
  const int64_t room = p.scratch_bytes / 4 / (state_floats(p.shape) * plan.queries) - 1;
  const bool split_fits = plan.splits <= room;
  const bool group_fits = plan.units(Level::kGroup) <= room;
  const int64_t small = int64_t{header.small_tiles} * p.shape.kv_heads;
  const int64_t large = int64_t{header.large_tiles} * p.shape.kv_heads;
  if (small < 4 * int64_t{launch.small_workers}) {
    plan.small = split_fits ? Level::kSplit : group_fits ? Level::kGroup : Level::kWalk;
  }
  // States of splits cost about two fifths of a walk's time in traffic, those of groups a fiftieth.
  int64_t best = busy(large, launch.large_workers) * 100;
  if (group_fits && plan.splits > kSplitsPerGroup) {
    const int64_t gain = busy(large * plan.units(Level::kGroup), launch.large_workers) * 98;
    if (gain > best) {
      best = gain;
      plan.large = Level::kGroup;
    }
  }
  if (split_fits && busy(large * plan.splits, launch.large_workers) * 60 > best) {
    plan.large = Level::kSplit;
  }
  const auto need = [&](int64_t tiles, Level level) {
    if (tiles == 0) return 0;
    return level == Level::kWalk ? kWalkStates : plan.units(level);
  };
  plan.states = larger(need(small, plan.small), need(large, plan.large));
  return plan;
}

// The first split of a unit of work, and how many it has.
KVP_DEVICE int unit_splits(const Plan& plan, Level level) {
  if (level == Level::kWalk) return plan.splits;
  return level == Level::kGroup ? kSplitsPerGroup : 1;
}

// The total of one query in scratch. `index`: of its row within Tables::order.
KVP_DEVICE float* total_at(const AttendParams& p, int64_t index, int q_head) {
  return static_cast<float*>(p.scratch) +
         (index * p.shape.q_heads + q_head) * state_floats(p.shape);
}
// The state of one of its units, which are counted from the span's first chunk.
KVP_DEVICE float* state_at(const AttendParams& p, const Plan& plan, int64_t index, int q_head,
                           int64_t unit) {
  const int64_t query = index * p.shape.q_heads + q_head;
  return static_cast<float*>(p.scratch) +
         (plan.queries + query * plan.states + unit) * state_floats(p.shape);
}

// Ones at [begin, end) of a word; none if the range is empty.
KVP_DEVICE uint64_t ones(int64_t begin, int64_t end) {
  begin = larger(begin, 0);
  end = smaller(end, 64);
  if (begin >= end) return 0;
  return (~uint64_t{0} >> (64 - (end - begin))) << begin;
}

// The keys a row sees of one span of chunks: a split or a group. Tokens count from its start; bit c:
// chunk c is among them.
template <int kSpan>
struct alignas(kSpan == kGroupChunks ? 16 : 4) Sight {
  static_assert(kSpan == kSplitChunks || kSpan == kGroupChunks, "");
  using Word = std::conditional_t<kSpan == kGroupChunks, uint64_t, uint32_t>;
  Word chunks = 0;
  int32_t begin = 0;
  int32_t end = 0;
};

template <int kSpan>
KVP_DEVICE Sight<kSpan> sight_of(const AttendParams& p, int64_t row, int kv_head, int64_t span) {
  using Word = typename Sight<kSpan>::Word;
  const int tokens = p.shape.chunk_tokens;
  const int64_t start = span * kSpan * tokens;
  const int64_t position = p.tables.rows[row].position;
  const int64_t first = p.window > 0 ? larger(0, position - p.window + 1) : 0;
  Sight<kSpan> sight;
  sight.begin = static_cast<int32_t>(smaller(larger(first - start, 0), kSpan * tokens));
  sight.end = static_cast<int32_t>(smaller(larger(position + 1 - start, 0), kSpan * tokens));
  if (sight.begin >= sight.end) return sight;
  sight.chunks = static_cast<Word>(ones(sight.begin / tokens, (sight.end + tokens - 1) / tokens));
  if (p.selected != nullptr) {
    const uint8_t* bytes = p.selected + (row * p.shape.kv_heads + kv_head) * p.selected_stride;
    if constexpr (kSpan == kSplitChunks) {
      const int64_t first = span * kSplitChunks;
      sight.chunks &= uint32_t{bytes[first / 8]} >> (first % 8) & kSplitMask;
    } else {
      const int64_t at = span * kGroupChunks / 8;
      uint64_t bits = *reinterpret_cast<const uint32_t*>(bytes + at);
      if (at + 4 < p.selected_stride) {
        bits |= uint64_t{*reinterpret_cast<const uint32_t*>(bytes + at + 4)} << 32;
      }
      sight.chunks &= bits;
    }
  }
  return sight;
}

KVP_DEVICE uint64_t slice_address(const AttendParams& p, const Part& part, int64_t chunk) {
  const int64_t entry = part.first + chunk;
  if (p.tables.staged != nullptr) {
    const uint64_t staged = p.tables.staged[entry];
    if (staged != 0) return staged;
  }
  return p.tables.chunks[entry] + static_cast<uint64_t>(p.shape.slice_offset);
}

// Whether a state holds anything. A sum that is not a number counts, so that it is seen.
KVP_DEVICE bool holds(float m, float l) { return !(m == kMinusInfinity && l == 0.0f); }

struct Weights {
  float m;     // the new maximum
  float into;  // of what is there
  float from;  // of what comes
};
KVP_DEVICE Weights fold_weights(float into_m, float from_m) {
  const float m = fmaxf(into_m, from_m);
  return {m, exp2_approximate(into_m - m), exp2_approximate(from_m - m)};
}
KVP_DEVICE float fold(const Weights& weights, float into, float from) {
  return fma_rn(into, weights.into, from * weights.from);
}
KVP_DEVICE float finish(float acc, float l) { return div_rn(acc, l) + 0.0f; }

KVP_DEVICE uint16_t half_bits(DType dtype, float x) {
  return dtype == DType::kBFloat16 ? float_to_bfloat16_bits(x) : float_to_float16_bits(x);
}

KVP_DEVICE void write_out(const AttendParams& p, int64_t row, int q_head, int dim, float x) {
  const int64_t at = row * p.out.row_stride + q_head * p.out.head_stride + dim;
  if (p.out.dtype == DType::kFloat32) {
    static_cast<float*>(p.out.data)[at] = x;
  } else {
    static_cast<uint16_t*>(p.out.data)[at] = half_bits(p.out.dtype, x);
  }
}

// Elements dim and dim + 1, dim even.
KVP_DEVICE void write_out_pair(const Launch& launch, int64_t row, int q_head, int dim, float x,
                               float y) {
  const AttendParams& p = launch.attend;
  if (p.out.dtype == DType::kFloat32 || !launch.out_words) {
    write_out(p, row, q_head, dim, x);
    write_out(p, row, q_head, dim + 1, y);
    return;
  }
  const int64_t at = row * p.out.row_stride + q_head * p.out.head_stride + dim;
  *reinterpret_cast<uint32_t*>(static_cast<uint16_t*>(p.out.data) + at) =
      static_cast<uint32_t>(half_bits(p.out.dtype, x)) |
      static_cast<uint32_t>(half_bits(p.out.dtype, y)) << 16;
}

}  // namespace kvpager::gpu::tensor
