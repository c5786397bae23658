// What the scorers share: finite keys, short scales and int8 queries. Every step is one IEEE
// operation.
#pragma once

#include <cstdint>
#include <cstring>
#include <vector>

#include "kvpager/layout.h"

namespace kvpager {

inline constexpr int64_t round_up(int64_t value, int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

// The keys of a tile in float32 [k_dim][tokens]; NaN becomes 0 and infinity the largest finite
// value.
void load_finite_keys(const Layout& layout, const std::byte* k_tile, std::vector<float>* keys);

// The least float with 16 significant bits that is >= largest / levels, so that a product with a
// 32-bit integer is exact in binary64. 0 when `largest` is below 1e-30: such values count as zero.
float short_scale(double largest, int levels);

// value / scale to the nearest integer, ties to even, within [-limit, limit]; 0 for scale 0.
int32_t quantize(double value, float scale, int32_t limit);

// Queries of one kv group as int8 with one scale: q[head][d] is about scale * code, |code| <= 127.
struct QuantizedQuery {
  double scale = 0.0;
  std::vector<int8_t> codes;  // [group][k_dim]
};
void quantize_query(int64_t count, const float* q, QuantizedQuery* out);

// The first bytes of every prepared query.
struct QueryHeader {
  double scale = 0.0;
  char padding[56] = {};
};
static_assert(sizeof(QueryHeader) == 64, "what follows starts on a cache line");

inline double query_header_scale(const std::byte* query) {
  double scale;
  std::memcpy(&scale, query, sizeof scale);
  return scale;
}

}  // namespace kvpager
