// Tiles of codes against many queries, in integers: kvpager/codes.h states the steps. Included by
// attend_isa.cc only, once per tier.
#pragma once

#include "kernels/attend_product_isa.h"
#include "kvpager/codes.h"

namespace kvpager {
namespace KVPAGER_ISA_NS {
namespace {

// A tile of codes, with what is fetched while it is read.
struct CodeTile {
  const uint8_t* codes;
  const uint16_t* scales;  // [groups][tokens]
  bool four;               // 4 bits, or 8
  int tokens;
  int dim;
  int64_t ahead;  // bytes from codes to the next tile's; 0: there is none

  CodeTile(const void* data, DType dtype, int tokens_, int dim_, int64_t ahead_)
      : codes(static_cast<const uint8_t*>(data)),
        scales(reinterpret_cast<const uint16_t*>(codes + tokens_ * row_code_bytes(dtype, dim_))),
        four(dtype == DType::kQ4),
        tokens(tokens_),
        dim(dim_),
        ahead(ahead_) {}

  int group() const { return four ? kQ4Group : dim; }
};

// Levels of pairs of rows, kWidth * 16 columns of them.
template <int kWidth>
struct BytePairs {
  const uint8_t* at;  // [rows / 2][columns][2]
  int64_t stride;
  int64_t ahead;
  KVPAGER_INLINE void load(int pair, Pairs* wide) const {
    const uint8_t* p = at + pair * stride;
    for (int w = 0; w < kWidth; ++w)
      wide[w] = load_pairs(reinterpret_cast<const int8_t*>(p) + 32 * w);
    fetch<32 * kWidth>(p, ahead);
  }
};
template <int kWidth>
struct HalfPairs {
  const uint8_t* at;  // [rows / 2][columns], a byte is a pair
  int64_t stride;
  int64_t ahead;
  KVPAGER_INLINE void load(int pair, Pairs* wide) const {
    const uint8_t* p = at + pair * stride;
    for (int w = 0; w < kWidth; ++w) wide[w] = load_level_pairs(p + 16 * w);
    fetch<16 * kWidth>(p, ahead);
  }
};
// One group of columns of two rows.
struct RowPairs {
  const uint8_t* at;  // [rows][columns / 2]
  int64_t stride;
  int64_t ahead;
  KVPAGER_INLINE void load(int pair, Pairs* wide) const {
    const uint8_t* p = at + 2 * pair * stride;
    load_rows_of_levels(p, p + stride, wide, wide + 1);
    fetch<16>(p, ahead);
    fetch<16>(p + stride, ahead);
  }
};

template <bool kVnni, int kQueries, int kWidth, class Reader>
KVPAGER_INLINE void sum_pairs(const int16_t* const* a, int begin, int end, const Reader& reader,
                              Ints (&sum)[kQueries][kWidth]) {
  for (int q = 0; q < kQueries; ++q) {
    for (int w = 0; w < kWidth; ++w) sum[q][w] = no_ints();
  }
  for (int pair = begin; pair < end; ++pair) {
    Pairs wide[kWidth];
    reader.load(pair, wide);
    for (int q = 0; q < kQueries; ++q) {
      for (int w = 0; w < kWidth; ++w) {
        sum[q][w] = add_dots<kVnni>(a[q] + 2 * pair, wide[w], sum[q][w]);
      }
    }
  }
}

// Columns of 16 per strip: as many as leave the sums in registers.
constexpr int int_strip_width(int queries) {
#if KVPAGER_ISA_LEVEL == 4
  return queries <= 6 ? 4 : 2;
#elif KVPAGER_ISA_LEVEL == 3
  return queries <= 1 ? 2 : 1;
#else
  return queries >= 1 ? 1 : 0;
#endif
}

template <int kCount>
struct Number {
  static constexpr int value = kCount;
};
template <class Function>
KVPAGER_INLINE void with_number(int count, const Function& function) {
  switch (count) {
    case 1:
      return function(Number<1>());
    case 2:
      return function(Number<2>());
    case 3:
      return function(Number<3>());
    case 4:
      return function(Number<4>());
    case 5:
      return function(Number<5>());
    case 6:
      return function(Number<6>());
#if KVPAGER_ISA_LEVEL == 4
    case 7:
      return function(Number<7>());
    default:
      return function(Number<8>());
#endif
  }
}

// Dot products of a block of queries with a tile of keys.
template <bool kVnni>
class KeyScores {
 public:
  KeyScores(const CodeTile& tile, const int16_t* const* queries, const float* units,
            float* const* out)
      : tile_(tile), queries_(queries), units_(units), out_(out) {}

  // Columns [begin, end), multiples of 16.
  void run(int count, int begin, int end) const {
    with_number(count, [&](auto number) {
      constexpr int kQueries = decltype(number)::value;
      constexpr int kWidth = int_strip_width(kQueries);
      int column = begin;
      for (; column + 16 * kWidth <= end; column += 16 * kWidth) strip<kQueries, kWidth>(column);
      if (kWidth > 2 && column + 32 <= end) {
        strip<kQueries, kWidth == 1 ? 1 : 2>(column);
        column += 32;
      }
      if (kWidth > 1 && column + 16 <= end) strip<kQueries, 1>(column);
    });
  }

 private:
  template <int kQueries, int kWidth>
  void strip(int column) const {
    const int pairs = tile_.group() / 2;
    for (int group = 0; group * 2 * pairs < tile_.dim; ++group) {
      Ints sum[kQueries][kWidth];
      const int begin = group * pairs;
      if (tile_.four) {
        const HalfPairs<kWidth> rows = {tile_.codes + column, tile_.tokens, tile_.ahead};
        sum_pairs<kVnni>(queries_, begin, begin + pairs, rows, sum);
      } else {
        const BytePairs<kWidth> rows = {tile_.codes + 2 * column, 2 * tile_.tokens, tile_.ahead};
        sum_pairs<kVnni>(queries_, begin, begin + pairs, rows, sum);
      }
      const bool last = (group + 1) * 2 * pairs == tile_.dim;
      for (int w = 0; w < kWidth; ++w) {
        const int at = column + 16 * w;
        const Vec scale = load_bfloat16(tile_.scales + group * tile_.tokens + at);
        for (int q = 0; q < kQueries; ++q) {
          const Vec before = group == 0 ? splat(0.0f) : load(out_[q] + at);
          const Vec score = fma(to_floats(sum[q][w]), scale, before);
          store(out_[q] + at, last ? mul(score, splat(units_[q])) : score);
        }
      }
    }
  }

  const CodeTile& tile_;
  const int16_t* const* queries_;
  const float* units_;
  float* const* out_;
};

// Numbers below this are no more than zeros, and have no inverse.
constexpr float kNegligible = 1e-30f;

// What makes numbers whose largest magnitude is `largest` integers of 16 bits, and what one of those
// is worth, of 16 such sets at a time.
KVPAGER_INLINE void unit_of(const float* largest, float* factor, float* unit) {
  const Vec greatest = load(largest);
  const Vec most = splat(32767.0f);
  store(factor, zero_below(greatest, kNegligible, div(most, greatest)));
  store(unit, zero_below(greatest, kNegligible, div(greatest, most)));
}

// Weighted values of a block of queries. Tokens a query does not see have a weight of 0.
template <bool kVnni>
class WeightedValues {
 public:
  WeightedValues(const CodeTile& tile, const TileQuery* queries, const float* const* weights,
                 const float* rescale)
      : tile_(tile), queries_(queries), weights_(weights), rescale_(rescale) {}

  void run(int count) {
    begin_ = tile_.tokens;
    end_ = 0;
    for (int q = 0; q < count; ++q) {
      if (queries_[q].begin < begin_) begin_ = queries_[q].begin;
      if (queries_[q].end > end_) end_ = queries_[q].end;
      integers_[q] = room_[q];
    }
    for (int group = 0; group * tile_.group() < tile_.dim; ++group) {
      round_weights(count, group);
      with_number(count, [&](auto number) { columns<decltype(number)::value>(group); });
    }
  }

 private:
  // Weights times the scales of a group, 0 where a query sees no token.
  void round_weights(int count, int group) {
    const uint16_t* scales = tile_.scales + group * tile_.tokens;
    const int first = begin_ & ~15;
    float largest[16] = {};
    for (int q = 0; q < count; ++q) {
      const TileQuery& query = queries_[q];
      const bool all = query.begin <= first && query.end >= ((end_ + 15) & ~15);
      Vec top = splat(0.0f);
      for (int t = first; t < end_; t += 16) {
        Vec weight = mul(load(weights_[q] + t), load_bfloat16(scales + t));
        if (!all) weight = keep_range(weight, query.begin - t, query.end - t, 0.0f);
        store(scaled_[q] + t, weight);
        top = max(top, xor_bits(weight, sign_bits(weight)));
      }
      largest[q] = tree_max(top);
    }
    float factors[16];
    unit_of(largest, factors, units_);
    for (int q = 0; q < count; ++q) {
      const Vec factor = splat(factors[q]);
      for (int t = first; t < end_; t += 16) {
        store_rounded(room_[q] + t, load(scaled_[q] + t), factor);
      }
    }
  }

  template <int kQueries>
  void columns(int group) const {
    if (tile_.four) {
      const RowPairs rows = {tile_.codes + group * kQ4Group / 2, tile_.dim / 2, tile_.ahead};
      return strip<kQueries, 2>(group * kQ4Group, rows);
    }
    constexpr int kWidth = int_strip_width(kQueries);
    int column = 0;
    for (; column + 16 * kWidth <= tile_.dim; column += 16 * kWidth) {
      strip<kQueries, kWidth>(column, bytes<kWidth>(column));
    }
    if (kWidth > 2 && column + 32 <= tile_.dim) {
      strip<kQueries, 2>(column, bytes<2>(column));
      column += 32;
    }
    if (kWidth > 1 && column + 16 <= tile_.dim) strip<kQueries, 1>(column, bytes<1>(column));
  }

  template <int kWidth>
  BytePairs<kWidth> bytes(int column) const {
    return {tile_.codes + 2 * column, 2 * tile_.dim, tile_.ahead};
  }

  template <int kQueries, int kWidth, class Reader>
  void strip(int column, const Reader& rows) const {
    Ints sum[kQueries][kWidth];
    sum_pairs<kVnni>(integers_, begin_ / 2, (end_ + 1) / 2, rows, sum);
    for (int q = 0; q < kQueries; ++q) {
      float* acc = queries_[q].state + column;
      for (int w = 0; w < kWidth; ++w) {
        const Vec before = mul(load(acc + 16 * w), splat(rescale_[q]));
        store(acc + 16 * w, fma(to_floats(sum[q][w]), splat(units_[q]), before));
      }
    }
  }

  static constexpr int kMostTokens = 256;
  const CodeTile& tile_;
  const TileQuery* queries_;
  const float* const* weights_;
  const float* rescale_;
  int begin_ = 0;
  int end_ = 0;
  alignas(64) float scaled_[kQueryBlock][kMostTokens];
  alignas(64) int16_t room_[kQueryBlock][kMostTokens];
  const int16_t* integers_[kQueryBlock];
  float units_[16];
};

}  // namespace
}  // namespace KVPAGER_ISA_NS
}  // namespace kvpager
