// Few rows: weights go from memory to registers, once, and are multiplied there. A block has a few
// outputs of all rows; its warps take the splits of the depth in turn, so that few outputs still keep
// many loads under way, and their sums meet in shared memory.
#pragma once

#include "cuda/linear_tensor.cuh"

namespace kvpager::gpu::linear {

// kM by kN tiles of an instruction. kWide: rows of x and W can be read 16 bytes at a time.
template <int kM, int kN>
struct FewShape {
  static constexpr int kRows = kM * kRowTile;
  static constexpr int kOutputs = kN * kOutputTile;
  static constexpr int kSharedBytes = kWarps * kRows * kOutputs * 4;
  static constexpr int kTotals = kRows * kOutputs / kThreads;  // of a thread
  static_assert(kRows * kOutputs % kThreads == 0, "");
  // Steps whose elements are in registers at once.
  static constexpr int kAtOnce = kM == 1 ? 4 : 2;
};

// A lane's eight elements of `row` from `at` on; those that are missing, and all unless `valid`, are +0.
// Weights are read once, and need not stay in the first cache, where x does.
template <bool kWide, bool kOnce>
KVP_DEVICE Word4 load_eight(const uint16_t* row, int64_t at, int64_t depth, bool valid) {
  Word4 out = {{0, 0, 0, 0}};
  if constexpr (kWide) {
    if (!valid || at >= depth) return out;
    if constexpr (kOnce) {
      load_once(out.x, row + at);
    } else {
      out = *reinterpret_cast<const Word4*>(row + at);
    }
  } else {
    KVP_UNROLL
    for (int i = 0; i < 8; ++i) {
      const uint32_t element = valid && at + i < depth ? row[at + i] : 0u;
      out.x[i / 2] |= element << (16 * (i % 2));
    }
  }
  return out;
}

template <DType kType, int kM, int kN, bool kWide>
KVP_DEVICE void add_split(const LinearParams& p, int64_t row, int64_t output, int64_t begin,
                          float (&sums)[kM][kN][4]) {
  constexpr int kAtOnce = FewShape<kM, kN>::kAtOnce;
  KVP_NO_UNROLL
  for (int64_t k = begin; k < begin + kSplit && k < p.depth; k += kAtOnce * kStep) {
    Word4 weights[kAtOnce][kN], rows[kAtOnce][kM][2];
    KVP_UNROLL
    for (int i = 0; i < kAtOnce; ++i) {
      const int64_t at = k + i * kStep + lane_eight();
      KVP_UNROLL
      for (int n = 0; n < kN; ++n) {
        const int64_t of = output + n * kOutputTile + lane_row();
        weights[i][n] =
            load_eight<kWide, true>(row_of(p.w, of, p.w_stride), at, p.depth, of < p.outputs);
      }
      KVP_UNROLL
      for (int m = 0; m < kM; ++m) {
        KVP_UNROLL
        for (int half = 0; half < 2; ++half) {
          const int64_t of = row + m * kRowTile + 8 * half + lane_row();
          rows[i][m][half] =
              load_eight<kWide, false>(row_of(p.x, of, p.x_stride), at, p.depth, of < p.rows);
        }
      }
    }
    KVP_UNROLL
    for (int i = 0; i < kAtOnce; ++i) {
      if (i > 0 && k + i * kStep >= p.depth) break;  // a step is there, or adds nothing at all
      KVP_UNROLL
      for (int m = 0; m < kM; ++m) {
        KVP_UNROLL
        for (int n = 0; n < kN; ++n) add_step<kType>(sums[m][n], rows[i][m], weights[i][n]);
      }
    }
  }
}

template <DType kType, int kM, int kN, bool kWide>
KVP_KERNEL KVP_BOUNDS(kThreads, kM == 1 ? 2 : 1) few_rows(const LinearParams p) {
  using Shape = FewShape<kM, kN>;
  const int64_t tiles = tiles_of(p.outputs, Shape::kOutputs);
  const int64_t output = block_index() % tiles * Shape::kOutputs;
  const int64_t row = block_index() / tiles * Shape::kRows;
  const int64_t splits = tiles_of(p.depth, kSplit);
  float* const shared = reinterpret_cast<float*>(shared_memory());  // [warp][row][output]
  float totals[Shape::kTotals];
  KVP_UNROLL
  for (int i = 0; i < Shape::kTotals; ++i) totals[i] = 0.0f;
  KVP_NO_UNROLL
  for (int64_t first = 0; first < splits; first += kWarps) {
    float sums[kM][kN][4];
    KVP_UNROLL
    for (int m = 0; m < kM; ++m) {
      KVP_UNROLL
      for (int n = 0; n < kN; ++n) {
        KVP_UNROLL
        for (int i = 0; i < 4; ++i) sums[m][n][i] = 0.0f;
      }
    }
    const int64_t split = first + warp_index();
    if (split < splits) {
      add_split<kType, kM, kN, kWide>(p, row, output, split * kSplit, sums);
    }
    if (first > 0) sync_block();  // what was there has been added
    KVP_UNROLL
    for (int m = 0; m < kM; ++m) {
      KVP_UNROLL
      for (int n = 0; n < kN; ++n) {
        KVP_UNROLL
        for (int half = 0; half < 2; ++half) {
          const int at = (warp_index() * Shape::kRows + m * kRowTile + 8 * half + lane_row()) *
                             Shape::kOutputs +
                         n * kOutputTile + lane_index() % 4 * 2;
          *reinterpret_cast<tensor::Float2*>(shared + at) = {
              {sums[m][n][2 * half], sums[m][n][2 * half + 1]}};
        }
      }
    }
    sync_block();
    const int64_t there = splits - first < kWarps ? splits - first : kWarps;
    KVP_UNROLL
    for (int i = 0; i < Shape::kTotals; ++i) {
      for (int64_t warp = 0; warp < there; ++warp) {
        totals[i] += shared[warp * Shape::kRows * Shape::kOutputs + i * kThreads + thread_index()];
      }
    }
  }
  KVP_UNROLL
  for (int i = 0; i < Shape::kTotals; ++i) {
    const int at = i * kThreads + thread_index();
    store<kType>(p, row + at / Shape::kOutputs, output + at % Shape::kOutputs, totals[i]);
  }
}

}  // namespace kvpager::gpu::linear
