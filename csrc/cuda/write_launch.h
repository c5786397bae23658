// How the work of writing rows is cut: blocks of keys and values first, those of queries after them,
// each kTileRows rows of one head.
#pragma once

#include "cuda/params.h"
#include "cuda/portable.h"

namespace kvpager::gpu {

inline constexpr int kWriteTileRows = 32;

KVP_HOST_DEVICE int64_t write_tiles(const WriteParams& p) {
  return (p.counts.rows + kWriteTileRows - 1) / kWriteTileRows;
}
KVP_HOST_DEVICE int64_t writing_blocks(const WriteParams& p) {
  return p.writes ? write_tiles(p) * p.shape.kv_heads : 0;
}
KVP_HOST_DEVICE int64_t looking_blocks(const WriteParams& p) {
  return p.q.data == nullptr ? 0 : write_tiles(p) * p.q.heads;
}

}  // namespace kvpager::gpu
