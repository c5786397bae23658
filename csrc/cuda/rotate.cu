// Queries before, and outputs after attention over rows that were rotated: a warp has a head of a row.
#include "cuda/codes.cuh"
#include "cuda/kernels.h"
#include "cuda/portable.h"
#include "cuda/summarize_steps.cuh"

namespace kvpager::gpu {
namespace {

constexpr int kWarps = 4;

KVP_KERNEL KVP_BOUNDS(kWarps* codes::kWarp, 4) rotate_rows(const RotateParams p) {
  const int64_t items = int64_t{p.header->rows} * p.from.heads;
  const int64_t item = block_index() * kWarps + warp_index();
  if (item >= items) return;
  const int64_t row = item / p.from.heads;
  const int64_t head = item % p.from.heads;
  const int64_t read = row * p.from.row_stride + head * p.from.head_stride;
  const int64_t written = row * p.to.row_stride + head * p.to.head_stride;
  float x[codes::kRowVectors];
  KVP_UNROLL
  for (int i = 0; i < codes::kRowVectors; ++i) {
    const int d = i * codes::kWarp + lane_index();
    x[i] = d < p.from.dim ? scoring::element_to_float(p.from.data, p.from.dtype, read + d) : 0.0f;
  }
  codes::rotate_row(x, p.from.dim);
  KVP_UNROLL
  for (int i = 0; i < codes::kRowVectors; ++i) {
    const int d = i * codes::kWarp + lane_index();
    if (d >= p.from.dim) continue;
    if (p.to.dtype == DType::kFloat32) {
      static_cast<float*>(p.to.data)[written + d] = x[i];
    } else if (p.to.dtype == DType::kFloat16) {
      static_cast<uint16_t*>(p.to.data)[written + d] = float_to_float16_bits(x[i]);
    } else {
      static_cast<uint16_t*>(p.to.data)[written + d] = float_to_bfloat16_bits(x[i]);
    }
  }
}

}  // namespace

int rotate(const RotateParams& params, void* stream) {
  const int64_t items = int64_t{params.counts.rows} * params.from.heads;
  if (items == 0) return 0;
  return launch(rotate_rows, {(items + kWarps - 1) / kWarps, kWarps * codes::kWarp, 0, stream},
                params);
}

}  // namespace kvpager::gpu
