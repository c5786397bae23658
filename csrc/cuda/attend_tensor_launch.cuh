// The launches of one element type, head_dim and kind of page; attend_tensor_*.cu instantiate those of one
// head_dim each, so that they compile side by side.
#pragma once

#include <algorithm>

#include "cuda/attend_tensor_large.cuh"
#include "cuda/attend_tensor_merge.cuh"
#include "cuda/attend_tensor_small.cuh"

namespace kvpager::gpu::tensor {

// Blocks of the kernels of one call.
struct Grids {
  int64_t small = 0, large = 0, merge = 0;
};

template <int kDim, bool kCodes = false>
Grids grids_of(const AttendParams& p, int64_t processors) {
  const Shape& shape = p.shape;
  const HostCounts& counts = p.counts;
  const int64_t units = std::max<int64_t>(
      1, (most_chunks(p.wave, counts.max_visible) + kSplitChunks - 1) / kSplitChunks);
  const int64_t small_items = int64_t{counts.small_tiles} * shape.kv_heads * units;
  Grids grids;
  grids.small = std::min<int64_t>(small_items, processors * kSmallBlocks);
  grids.large = std::min<int64_t>(int64_t{counts.large_tiles} * shape.kv_heads * units,
                                  processors * LargeShape<kDim, kCodes>::kBlocksPerMultiprocessor);
  grids.merge = std::min<int64_t>(int64_t{counts.rows} * shape.q_heads, processors * kMergeBlocks);
  return grids;
}

inline void set_workers(const Grids& grids, Launch* launch) {
  launch->small_workers = static_cast<int32_t>(std::max<int64_t>(1, grids.small * kSmallWarps));
  launch->large_workers = static_cast<int32_t>(std::max<int64_t>(1, grids.large));
}

template <DType kType, int kDim, bool kCodes>
int launch_tensor(const Launch& launch, void* stream) {
  using Small = SmallShape<kDim, kCodes>;
  using Large = LargeShape<kDim, kCodes>;
  const Grids grids = grids_of<kDim, kCodes>(launch.attend, multiprocessors());
  Launch args = launch;
  set_workers(grids, &args);
  int error = gpu::launch(large_tiles<kType, kDim, kCodes>,
                          {grids.large, Large::kThreads, Large::kBlockBytes, stream}, args);
  if (error != 0) return error;
  error = gpu::launch(small_tiles<kType, kDim, kCodes>,
                      {grids.small, 32 * kSmallWarps, Small::kBlockBytes, stream}, args);
  if (error != 0) return error;
  return gpu::launch(merge_states<kDim>,
                     {grids.merge, kMergeThreads, merge_shared_bytes(kDim), stream}, args);
}

}  // namespace kvpager::gpu::tensor
