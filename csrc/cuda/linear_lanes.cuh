// y = x W^T + b of float32, in the processor's order of operations (kvpager/linear.h): its sixteen lanes
// are those of half a warp, so that the bits are the processor's.
#pragma once

#include "cuda/linear_tiles.cuh"
#include "cuda/params.h"
#include "cuda/portable.h"
#include "kvpager/linear.h"

namespace kvpager::gpu::linear {

inline constexpr int kLanes = 16;
inline constexpr int kLaneThreads = 128;

// Each half of a warp has kRows rows by kOutputs outputs.
template <int kRows, int kOutputs>
KVP_KERNEL KVP_BOUNDS(kLaneThreads, 2) in_lanes(const LinearParams p) {
  const int64_t half = (block_index() * kLaneThreads + thread_index()) / kLanes;
  const int lane = thread_index() % kLanes;
  const int64_t tiles = tiles_of(p.outputs, kOutputs);
  const int64_t output = half % tiles * kOutputs;
  const int64_t row = half / tiles * kRows;  // may be after the last: all lanes shuffle
  const float *x[kRows], *w[kOutputs];
  KVP_UNROLL
  for (int r = 0; r < kRows; ++r) {
    const int64_t of = row + r < p.rows ? row + r : p.rows - 1;
    x[r] = static_cast<const float*>(p.x) + of * p.x_stride;
  }
  KVP_UNROLL
  for (int n = 0; n < kOutputs; ++n) {
    const int64_t of = output + n < p.outputs ? output + n : p.outputs - 1;
    w[n] = static_cast<const float*>(p.w) + of * p.w_stride;
  }
  float sums[kRows][kOutputs];
  KVP_UNROLL
  for (int r = 0; r < kRows; ++r) {
    KVP_UNROLL
    for (int n = 0; n < kOutputs; ++n) sums[r][n] = 0.0f;
  }
  const int64_t steps = tiles_of(p.depth, kLanes);
  KVP_UNROLL_4
  for (int64_t step = 0; step < steps; ++step) {
    const int64_t k = step * kLanes + lane;
    float rows[kRows];
    KVP_UNROLL
    for (int r = 0; r < kRows; ++r) rows[r] = k < p.depth ? x[r][k] : 0.0f;
    KVP_UNROLL
    for (int n = 0; n < kOutputs; ++n) {
      const float weight = k < p.depth ? w[n][k] : 0.0f;
      KVP_UNROLL
      for (int r = 0; r < kRows; ++r) sums[r][n] = fma_rn(rows[r], weight, sums[r][n]);
    }
  }
  KVP_UNROLL
  for (int r = 0; r < kRows; ++r) {
    KVP_UNROLL
    for (int n = 0; n < kOutputs; ++n) {
      float sum = sums[r][n];
      KVP_UNROLL
      for (int width = kLanes / 2; width >= 1; width /= 2) sum += shuffle_xor(sum, width);
      if (lane != (r * kOutputs + n) % kLanes || row + r >= p.rows || output + n >= p.outputs) {
        continue;
      }
      if (p.bias != nullptr) sum += static_cast<const float*>(p.bias)[output + n];
      static_cast<float*>(p.y)[(row + r) * p.y_stride + output + n] = sum;
    }
  }
}

}  // namespace kvpager::gpu::linear
