// y = x W^T + b, with one order of operations for each element of y: it is the same for
// every number of rows, every instruction-set tier, any number of threads and any place of the row.
// On the processor it needs AVX2: the base tier has none of it, and takes what v3 has.
// Sixteen lanes begin at +0 and go along the depth; elements that are missing at its end are +0.
//   float32, float16: lane i += x[16 j + i] * w[16 j + i], for j = 0, 1, ...
//   bfloat16:         lane i += x[32 j + 2 i + 1] * w[32 j + 2 i + 1],
//                     lane i += x[32 j + 2 i] * w[32 j + 2 i], for j = 0, 1, ...
// Every += is a fused multiply-add of float32. Then lane i += lane i + 8, and so on with 4, 2 and 1;
// lane 0 is the sum. With a bias, sum + bias in float32. The result is rounded to the dtype, to
// nearest, ties to even.
//
// In bfloat16 denormal operands and results are zeros of their sign, as in the instruction that has
// this order, VDPBF16PS (Intel's Software Developer's Manual, volume 2C).
#pragma once

#include <cstdint>

#include "kvpager/compressed_weights.h"
#include "kvpager/types.h"

namespace kvpager {

class ThreadPool;

// Version of the order above. Bits of other versions differ.
inline constexpr int kLinearVersion = 1;

struct LinearParams {
  DType dtype = DType::kFloat32;  // of all four: float32, float16 or bfloat16
  int64_t rows = 0;
  int64_t outputs = 0;
  int64_t depth = 0;
  const void* x = nullptr;  // [rows][depth]
  int64_t x_stride = 0;     // elements from one row to the next
  const void* w = nullptr;  // [outputs][depth]
  int64_t w_stride = 0;
  const void* bias = nullptr;  // [outputs]; null: none
  void* y = nullptr;           // [rows][outputs]; apart from all the others
  int64_t y_stride = 0;
  CompressedRows compressed = {};  // of w; linear() looks for them itself
};

// Several of one dtype and number of rows, none of which reads what another writes, are computed at
// once. compressed: copies that few rows are multiplied with, where it has those of a product's weights.
void linear(const LinearParams* products, int64_t count, ThreadPool& pool,
            const CompressedWeights* compressed = nullptr);
inline void linear(const LinearParams& params, ThreadPool& pool,
                   const CompressedWeights* compressed = nullptr) {
  linear(&params, 1, pool, compressed);
}

// One of many matrices for each row of y, as experts of a mixture are: the same order of operations,
// whichever rows share a matrix.
struct ExpertsParams {
  // Of rows of y; x has [rows / choices][depth], each row of which is the input of `choices` rows of y
  // that follow one another. w: [experts * outputs][depth]; bias: [experts * outputs], or null.
  LinearParams all;
  int64_t experts = 0;
  int64_t choices = 1;
  const int64_t* chosen = nullptr;  // [rows]: the expert of each row of y
};

// Each matrix that is chosen is read once. Throws InvalidArgumentError if there is no such expert.
void linear_of_experts(const ExpertsParams& params, ThreadPool& pool,
                       const CompressedWeights* compressed = nullptr);

}  // namespace kvpager
