// The inverse of write_rows, written from the description of the bytes alone.
#pragma once

#include <cstring>

#include "base/half.h"
#include "kvpager/layout.h"

namespace kvpager::testing {

// A number of a tile; of codes, its level and the scale apart.
struct Stored {
  float level;
  float scale;  // 1 where there are no codes
};

// Dimension d of a token.
inline Stored read_stored(DType dtype, bool keys, const std::byte* tile, int64_t tokens,
                          int64_t dim, int64_t d, int64_t token) {
  const auto* bytes = reinterpret_cast<const uint8_t*>(tile);
  if (is_coded(dtype)) {
    const bool four = dtype == DType::kQ4;
    const uint8_t* scales = bytes + tokens * (four ? dim / 2 : dim);
    uint16_t scale;
    std::memcpy(&scale, scales + 2 * ((four ? d / kQ4Group * tokens : 0) + token), 2);
    const int64_t row = keys ? d : token;
    const int64_t column = keys ? token : d;
    const int64_t columns = keys ? tokens : dim;
    if (!four) {
      const auto level = static_cast<int8_t>(bytes[(row / 2 * columns + column) * 2 + row % 2]);
      return {static_cast<float>(level), bfloat16_to_float(scale)};
    }
    const uint8_t both =
        keys ? bytes[d / 2 * tokens + token] : bytes[token * dim / 2 + d / kQ4Group * 16 + d % 16];
    const bool high = keys ? d % 2 == 1 : d % kQ4Group >= 16;
    return {static_cast<float>(kQ4Levels[high ? both >> 4 : both & 15]), bfloat16_to_float(scale)};
  }
  const int64_t at = keys ? d * tokens + token : token * dim + d;
  float value;
  if (dtype == DType::kFloat32) {
    std::memcpy(&value, tile + 4 * at, 4);
    return {value, 1.0f};
  }
  uint16_t half;
  std::memcpy(&half, tile + 2 * at, 2);
  return {dtype == DType::kFloat16 ? float16_to_float(half) : bfloat16_to_float(half), 1.0f};
}

// Token `offset` of a page as float32 [k_dim] and [v_dim].
inline void read_row(const Layout& layout, const std::byte* slice, int kv_head, int offset,
                     float* k, float* v) {
  const std::byte* page = slice + layout.page_bytes() * kv_head;
  for (int64_t d = 0; d < layout.k_dim; ++d) {
    const Stored key =
        read_stored(layout.k_dtype, true, page, layout.chunk_tokens, layout.k_dim, d, offset);
    k[d] = key.level * key.scale;
  }
  for (int64_t d = 0; d < layout.v_dim; ++d) {
    const Stored value = read_stored(layout.v_dtype, false, page + layout.k_tile_bytes(),
                                     layout.chunk_tokens, layout.v_dim, d, offset);
    v[d] = value.level * value.scale;
  }
}

}  // namespace kvpager::testing
