// The inverse of write_rows.
#pragma once

#include "kernels/float_environment.h"
#include "kernels/kernel_table.h"
#include "kvpager/layout.h"

namespace kvpager::testing {

// Token `offset` of a page as float32 [k_dim] and [v_dim].
inline void read_row(const Layout& layout, const std::byte* slice, int kv_head, int offset,
                     float* k, float* v) {
  const FloatEnvironment environment;
  const KernelTable& table = kernels();
  const std::byte* page = slice + layout.page_bytes() * kv_head;
  const int64_t k_element = dtype_bytes(layout.k_dtype);
  for (int64_t d = 0; d < layout.k_dim; ++d) {
    table.to_float(page + (d * layout.chunk_tokens + offset) * k_element, layout.k_dtype, 1, k + d);
  }
  const std::byte* v_row =
      page + layout.k_tile_bytes() + int64_t{offset} * layout.v_dim * dtype_bytes(layout.v_dtype);
  table.to_float(v_row, layout.v_dtype, layout.v_dim, v);
}

}  // namespace kvpager::testing
