// How the host cuts a product: which kernel has it, and in how many blocks. The test that replays
// launches calls these functions too.
#pragma once

#include "cuda/linear_few.cuh"
#include "cuda/linear_lanes.cuh"
#include "cuda/linear_many.cuh"

namespace kvpager::gpu::linear {

inline constexpr int64_t kFewRows = 64;  // more of them are a product of many rows

template <int kM, int kN>
int64_t few_blocks(const LinearParams& p) {
  using Shape = FewShape<kM, kN>;
  return tiles_of(p.rows, Shape::kRows) * tiles_of(p.outputs, Shape::kOutputs);
}
inline int64_t many_blocks(const LinearParams& p) {
  return tiles_of(p.rows, ManyShape::kRows) * tiles_of(p.outputs, ManyShape::kOutputs);
}
template <int kRows, int kOutputs>
int64_t lane_blocks(const LinearParams& p) {
  return tiles_of(tiles_of(p.rows, kRows) * tiles_of(p.outputs, kOutputs), kLaneThreads / kLanes);
}

// Whether rows of x and W can be read 16 bytes at a time.
inline bool is_wide(const LinearParams& p) {
  const auto at_16 = [](const void* data, int64_t stride) {
    return reinterpret_cast<uintptr_t>(data) % 16 == 0 && stride % 8 == 0;
  };
  return p.depth % 8 == 0 && at_16(p.x, p.x_stride) && at_16(p.w, p.w_stride);
}

}  // namespace kvpager::gpu::linear
