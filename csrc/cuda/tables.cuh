// What kernels read off the tables of a forward.
#pragma once

#include "cuda/params.h"
#include "cuda/portable.h"

namespace kvpager::gpu {

// Rows that are no padding: the length of Tables::order.
KVP_DEVICE int32_t ordered_rows(const Tables& tables) {
  const int32_t parts = tables.header->parts;
  return parts == 0 ? 0 : tables.parts[parts - 1].first_row + tables.parts[parts - 1].rows;
}

}  // namespace kvpager::gpu
