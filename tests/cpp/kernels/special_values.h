// Problems with denormals, zeros of either sign, extreme scores and bytes that nobody wrote, for tests
// that hold kernels against a reference.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "attend_problem.h"
#include "noise.h"

namespace kvpager::testing {

inline constexpr float kInfinity = std::numeric_limits<float>::infinity();
inline constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
inline constexpr float kMax = std::numeric_limits<float>::max();

inline Element noisy(uint64_t what, float scale) {
  return [=](int64_t t, int head, int d) {
    return scale * noise(what, static_cast<uint64_t>(t), static_cast<uint64_t>(head),
                         static_cast<uint64_t>(d));
  };
}

inline Element constant(float value) {
  return [=](int64_t, int, int) { return value; };
}

inline std::vector<float> noisy_query(const Shape& shape, uint64_t row, float scale) {
  std::vector<float> q(static_cast<size_t>(shape.kv_heads * shape.group * shape.k_dim));
  for (size_t i = 0; i < q.size(); ++i) q[i] = scale * noise(77, row, i);
  return q;
}

// Two splits and a bit, so that states are rescaled, merged and finished.
inline Shape small_shape(DType dtype = DType::kFloat32) {
  Shape shape;
  shape.dtype = dtype;
  shape.kv_heads = 2;
  shape.group = 2;
  shape.tokens = 16;
  shape.k_dim = 32;
  shape.v_dim = 48;
  return shape;
}
inline constexpr int64_t kLength = 16 * 17 + 5;

inline std::vector<Row> noisy_rows(const Shape& shape, const std::vector<int64_t>& positions,
                                   float query_scale) {
  std::vector<Row> rows = rows_at(positions);
  for (Row& row : rows) {
    row.query = noisy_query(shape, static_cast<uint64_t>(row.position), query_scale);
  }
  return rows;
}

// Rows at the places where something begins or ends.
inline std::vector<Row> rows_of(const Shape& shape, float query_scale) {
  return noisy_rows(shape, {0, 1, 15, 16, 127, 128, kLength - 17, kLength - 1}, query_scale);
}

// Elements that differ in a bit. All NaN count as one: which of several operands' payload survives
// is no order of operations.
inline int64_t differing(const std::vector<float>& a, const std::vector<float>& b) {
  int64_t count = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    count += std::isnan(a[i]) ? !std::isnan(b[i]) : float_bits(a[i]) != float_bits(b[i]);
  }
  return count;
}

inline int64_t differing(const std::vector<std::vector<float>>& a,
                         const std::vector<std::vector<float>>& b) {
  if (a.size() != b.size()) return -1;
  int64_t count = 0;
  for (size_t i = 0; i < a.size(); ++i) count += differing(a[i], b[i]);
  return count;
}

inline int64_t count_if(const std::vector<std::vector<float>>& outputs, bool (*is)(float)) {
  int64_t count = 0;
  for (const auto& row : outputs) count += std::count_if(row.begin(), row.end(), is);
  return count;
}
inline bool is_denormal(float x) { return std::fpclassify(x) == FP_SUBNORMAL; }
inline bool is_negative_zero(float x) { return float_bits(x) == 0x80000000u; }
inline bool is_not_finite(float x) { return !std::isfinite(x); }

// The least normal magnitude of a dtype.
inline float least_normal(DType dtype) { return dtype == DType::kFloat16 ? 0x1p-14f : 0x1p-126f; }

// Fills the key and value of one token of every head with a bit pattern, as if nobody had written
// it.
inline void spoil(const Layout& layout, const Sequence& sequence, int64_t t, uint32_t bits) {
  std::byte* slice = const_cast<std::byte*>(sequence.table().slices[t / layout.chunk_tokens]);
  const int64_t element = dtype_bytes(layout.k_dtype);
  const uint16_t half = static_cast<uint16_t>(bits >> 16);
  const void* source = element == 4 ? static_cast<const void*>(&bits) : &half;
  for (int head = 0; head < layout.kv_heads; ++head) {
    std::byte* page = slice + layout.page_bytes() * head;
    for (int64_t d = 0; d < layout.k_dim; ++d) {
      const int64_t at = d * layout.chunk_tokens + t % layout.chunk_tokens;
      std::memcpy(page + at * element, source, static_cast<size_t>(element));
    }
    std::byte* row =
        page + layout.k_tile_bytes() + t % layout.chunk_tokens * layout.v_dim * element;
    for (int64_t d = 0; d < layout.v_dim; ++d) {
      std::memcpy(row + d * element, source, static_cast<size_t>(element));
    }
  }
}

}  // namespace kvpager::testing
