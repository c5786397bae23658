// y = x W^T + b of 16-bit elements on tensor cores, with one order of operations for each element of
// y: it is the same for every number of rows, any place of the row and whichever kernel computes it.
//
// The depth is cut into splits of 256, the last of which may be shorter. A split's sum begins at +0
// and goes along the split 32 elements at a time, by two instructions (mma.m16n8k16): the first takes
// the elements whose number modulo 8 is below 4, the second the others, as places 2 t + j and
// 8 + 2 t + j of its 16 the elements 8 t + j and 8 t + 2 + j (4 on with the second), t below 4 and j
// below 2. Elements that are missing at the end of the depth are +0. What an instruction does to a sum
// is the device's own, and the same for each of its 16 rows. Then a total begins at +0, to which the
// splits' sums are added, ascending, and the bias; it is rounded to the dtype, to nearest, ties to even.
//
// So that a lane reads 16 bytes of a row, eight elements, and they are its parts of two instructions.
#pragma once

#include "cuda/linear_tiles.cuh"
#include "cuda/matrix_units.cuh"
#include "cuda/params.h"
#include "cuda/portable.h"
#include "kvpager/linear.h"

namespace kvpager::gpu::linear {

using tensor::Word4;

inline constexpr int kSplit = 256;
inline constexpr int kStep = 32;
inline constexpr int kRowTile = 16;    // of an instruction
inline constexpr int kOutputTile = 8;  // of an instruction
inline constexpr int kThreads = 256;
inline constexpr int kWarps = kThreads / 32;

// A lane's place: row g and g + 8 of a tile of rows, output g of one of outputs, elements 8 t to 8 t + 7
// of a step.
KVP_DEVICE int lane_row() { return lane_index() >> 2; }
KVP_DEVICE int lane_eight() { return (lane_index() & 3) * 8; }

KVP_DEVICE const uint16_t* row_of(const void* matrix, int64_t row, int64_t stride) {
  return static_cast<const uint16_t*>(matrix) + row * stride;
}

// sums += the products of a step; rows[half]: of rows g and g + 8.
template <DType kType>
KVP_DEVICE void add_step(float (&sums)[4], const Word4 (&rows)[2], const Word4& weights) {
  KVP_UNROLL
  for (int i = 0; i < 4; i += 2) {
    const uint32_t a[4] = {rows[0].x[i], rows[1].x[i], rows[0].x[i + 1], rows[1].x[i + 1]};
    tensor::mma<kType>(sums, a, weights.x[i], weights.x[i + 1]);
  }
}

template <DType kType>
KVP_DEVICE float widen(uint16_t bits) {
  return kType == DType::kBFloat16 ? bfloat16_bits_to_float(bits) : float16_bits_to_float(bits);
}

// The total of one element of y, with its bias, where it belongs.
template <DType kType>
KVP_DEVICE void store(const LinearParams& p, int64_t row, int64_t output, float total) {
  if (row >= p.rows || output >= p.outputs) return;
  if (p.bias != nullptr) total += widen<kType>(static_cast<const uint16_t*>(p.bias)[output]);
  static_cast<uint16_t*>(p.y)[row * p.y_stride + output] =
      kType == DType::kBFloat16 ? float_to_bfloat16_bits(total) : float_to_float16_bits(total);
}

}  // namespace kvpager::gpu::linear
