// The launches of one element type, head_dim and kind of page; attend_tensor_*.cu instantiate one each, so that
// they compile side by side.
#pragma once

#include <algorithm>

#include "cuda/attend_tensor_large.cuh"
#include "cuda/attend_tensor_merge.cuh"
#include "cuda/attend_tensor_small.cuh"

namespace kvpager::gpu::tensor {

template <DType kType, int kDim, bool kCodes>
int launch_tensor(const Launch& launch, void* stream) {
  using Small = SmallShape<kDim, kCodes>;
  using Large = LargeShape<kDim, kCodes>;
  Launch args = launch;
  const AttendParams& p = args.attend;
  const HostCounts& counts = p.counts;
  const Shape& shape = p.shape;
  const int64_t units =
      std::max<int64_t>(1, (counts.max_visible + kChunksPerSplit - 1) / kChunksPerSplit);
  const int64_t processors = multiprocessors();
  const int64_t small_items = int64_t{counts.small_tiles} * shape.kv_heads * units;
  const int64_t small_blocks =
      std::min<int64_t>((small_items + kSmallWarps - 1) / kSmallWarps, processors * kSmallBlocks);
  const int64_t large_blocks =
      std::min<int64_t>(int64_t{counts.large_tiles} * shape.kv_heads * units,
                        processors * Large::kBlocksPerMultiprocessor);
  args.small_workers = static_cast<int32_t>(std::max<int64_t>(1, small_blocks * kSmallWarps));
  args.large_workers = static_cast<int32_t>(std::max<int64_t>(1, large_blocks));
  int error = gpu::launch(large_tiles<kType, kDim, kCodes>,
                          {large_blocks, Large::kThreads, Large::kBlockBytes, stream}, args);
  if (error != 0) return error;
  error = gpu::launch(small_tiles<kType, kDim, kCodes>,
                      {small_blocks, 32 * kSmallWarps, Small::kBlockBytes, stream}, args);
  if (error != 0) return error;
  const int64_t merge_blocks =
      std::min<int64_t>(int64_t{counts.rows} * shape.q_heads, processors * kMergeBlocks);
  return gpu::launch(merge_states<kDim>,
                     {merge_blocks, kMergeThreads, merge_shared_bytes(kDim), stream}, args);
}

}  // namespace kvpager::gpu::tensor
