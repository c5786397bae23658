// Many rows: tiles of x and W are copied to shared memory in the background, three at a time, and a
// block multiplies 128 rows by 64 outputs. Warps have 32 rows and 32 outputs each.
//
// A tile of shared memory is a step of the depth, 64 bytes of each row, one row after the other: eight
// neighbouring lanes read 128 bytes in a row, and no two meet in a bank.
#pragma once

#include "cuda/linear_tensor.cuh"

namespace kvpager::gpu::linear {

struct ManyShape {
  static constexpr int kRows = 128;
  static constexpr int kOutputs = 64;
  static constexpr int kM = 2;  // tiles of an instruction of a warp
  static constexpr int kN = 4;
  static constexpr int kWarpsAlongRows = kRows / (kM * kRowTile);
  static constexpr int kSteps = 2;  // in a stage
  static constexpr int kStages = 3;
  static constexpr int kLineBytes = kStep * 2;
  static constexpr int kStepBytes = (kRows + kOutputs) * kLineBytes;  // rows, then outputs
  static constexpr int kStageBytes = kSteps * kStepBytes;
  static constexpr int kSharedBytes = kStages * kStageBytes;
  static constexpr int kStageDepth = kSteps * kStep;
  static_assert(kSplit % kStageDepth == 0, "");
  static_assert(kWarpsAlongRows * kOutputs / (kN * kOutputTile) == kWarps, "");
};

// Starts copies of rows [first, first + kLines) of a matrix, whose rows end at `last`, for one step.
template <int kLines>
KVP_DEVICE void copy_lines(unsigned char* to, const void* matrix, int64_t stride, int64_t first,
                           int64_t last, int64_t k, int64_t depth) {
  constexpr int kAtOnce = kThreads / 4;
  static_assert(kLines % kAtOnce == 0, "");
  const int64_t at = k + thread_index() % 4 * 8;
  KVP_UNROLL
  for (int line = thread_index() / 4; line < kLines; line += kAtOnce) {
    const bool valid = first + line < last && at < depth;
    const uint16_t* from =
        valid ? row_of(matrix, first + line, stride) + at : static_cast<const uint16_t*>(matrix);
    copy_async16(to + line * ManyShape::kLineBytes + thread_index() % 4 * 16, from, valid);
  }
}

KVP_DEVICE void copy_stage(const LinearParams& p, unsigned char* to, int64_t row, int64_t output,
                           int64_t k) {
  KVP_UNROLL
  for (int step = 0; step < ManyShape::kSteps; ++step) {
    const int64_t from = k + step * kStep;
    if (from >= p.depth) break;
    unsigned char* const at = to + step * ManyShape::kStepBytes;
    copy_lines<ManyShape::kRows>(at, p.x, p.x_stride, row, p.rows, from, p.depth);
    copy_lines<ManyShape::kOutputs>(at + ManyShape::kRows * ManyShape::kLineBytes, p.w, p.w_stride,
                                    output, p.outputs, from, p.depth);
  }
}

template <DType kType>
KVP_KERNEL KVP_BOUNDS(kThreads, 2) many_rows(const LinearParams p) {
  using Shape = ManyShape;
  constexpr int kM = Shape::kM;
  constexpr int kN = Shape::kN;
  // Blocks of the same outputs are neighbours, so that weights are read from memory once.
  const int64_t tiles = tiles_of(p.rows, Shape::kRows);
  const int64_t row = block_index() % tiles * Shape::kRows;
  const int64_t output = block_index() / tiles * Shape::kOutputs;
  const int64_t stages = tiles_of(p.depth, Shape::kStageDepth);
  unsigned char* const shared = shared_memory();
  const int warp_row = warp_index() % Shape::kWarpsAlongRows * kM * kRowTile;
  const int warp_output = warp_index() / Shape::kWarpsAlongRows * kN * kOutputTile;
  // Of a step: a lane's first eight elements of x and of W.
  const int x_at = (warp_row + lane_row()) * Shape::kLineBytes + lane_eight() * 2;
  const int w_at = (Shape::kRows + warp_output + lane_row()) * Shape::kLineBytes + lane_eight() * 2;

  float totals[kM][kN][4], sums[kM][kN][4];
  KVP_UNROLL
  for (int m = 0; m < kM; ++m) {
    KVP_UNROLL
    for (int n = 0; n < kN; ++n) {
      KVP_UNROLL
      for (int i = 0; i < 4; ++i) totals[m][n][i] = sums[m][n][i] = 0.0f;
    }
  }
  KVP_UNROLL
  for (int i = 0; i < Shape::kStages - 1; ++i) {
    copy_stage(p, shared + i * Shape::kStageBytes, row, output, i * Shape::kStageDepth);
    copy_async_commit();
  }
  KVP_NO_UNROLL
  for (int64_t stage = 0; stage < stages; ++stage) {
    copy_async_wait<Shape::kStages - 2>();
    sync_block();  // the stage is there, and all have done with the one before it
    const int64_t ahead = stage + Shape::kStages - 1;
    copy_stage(p, shared + ahead % Shape::kStages * Shape::kStageBytes, row, output,
               ahead * Shape::kStageDepth);
    copy_async_commit();
    const unsigned char* const here = shared + stage % Shape::kStages * Shape::kStageBytes;
    KVP_UNROLL
    for (int step = 0; step < Shape::kSteps; ++step) {
      if (step > 0 && stage * Shape::kStageDepth + step * kStep >= p.depth) break;
      const unsigned char* const at = here + step * Shape::kStepBytes;
      Word4 rows[kM][2];
      KVP_UNROLL
      for (int m = 0; m < kM; ++m) {
        KVP_UNROLL
        for (int half = 0; half < 2; ++half) {
          rows[m][half] = *reinterpret_cast<const Word4*>(
              at + x_at + (m * kRowTile + 8 * half) * Shape::kLineBytes);
        }
      }
      KVP_UNROLL
      for (int n = 0; n < kN; ++n) {
        const Word4 weights =
            *reinterpret_cast<const Word4*>(at + w_at + n * kOutputTile * Shape::kLineBytes);
        KVP_UNROLL
        for (int m = 0; m < kM; ++m) add_step<kType>(sums[m][n], rows[m], weights);
      }
    }
    if ((stage + 1) % (kSplit / Shape::kStageDepth) == 0 || stage + 1 == stages) {
      KVP_UNROLL
      for (int m = 0; m < kM; ++m) {
        KVP_UNROLL
        for (int n = 0; n < kN; ++n) {
          KVP_UNROLL
          for (int i = 0; i < 4; ++i) {
            totals[m][n][i] += sums[m][n][i];
            sums[m][n][i] = 0.0f;
          }
        }
      }
    }
  }
  copy_async_wait<0>();
  KVP_UNROLL
  for (int m = 0; m < kM; ++m) {
    KVP_UNROLL
    for (int n = 0; n < kN; ++n) {
      KVP_UNROLL
      for (int i = 0; i < 4; ++i) {
        store<kType>(p, row + warp_row + m * kRowTile + i / 2 * 8 + lane_row(),
                     output + warp_output + n * kOutputTile + lane_index() % 4 * 2 + i % 2,
                     totals[m][n][i]);
      }
    }
  }
}

}  // namespace kvpager::gpu::linear
