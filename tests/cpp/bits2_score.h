// Scores, and layouts of keys, for tests.
#pragma once

#include "kvpager/selection.h"

namespace kvpager::bits2 {

inline void score(const Layout& layout, int group, const std::byte* query,
                  const std::byte* const* summaries, int64_t count, double* scores) {
  score_rows(layout, group, 1, &query, summaries, count, &scores);
}

}  // namespace kvpager::bits2

namespace kvpager::testing {

// Keys of one page.
inline Layout key_layout(int tokens, int k_dim, DType dtype = DType::kFloat32, int kv_heads = 1) {
  Layout layout;
  layout.layers = 1;
  layout.kv_heads = kv_heads;
  layout.chunk_tokens = tokens;
  layout.k_dim = k_dim;
  layout.v_dim = 16;
  layout.k_dtype = layout.v_dtype = dtype;
  return layout;
}

}  // namespace kvpager::testing
