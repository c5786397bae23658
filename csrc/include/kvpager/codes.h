// Keys and values in fewer bits. A token's row of one head becomes integer levels and scales when it is
// written, from that row's own numbers alone, so that what is stored does not depend on when or with
// what else it was written.
//
//   q8  one scale for the row; levels -127..127, one byte each
//   q4  a scale for each group of 32 numbers; 4-bit codes, each of one of the 16 levels of kQ4Levels
//
// What a row stands for has that row's codes: reading and writing again changes no bit, unless rows are
// rotated.
// A scale is a bfloat16, of q4 of either sign, and a stored number is level * scale, which float32 holds exactly.
//
//   K tile = codes, then scales with tokens innermost
//     q8: int8 [k_dim / 2][C][2], dimensions 2 r and 2 r + 1 of a token side by side;  bfloat16 [C]
//     q4: bytes [k_dim / 2][C], the code of dimension 2 r in the low half, of 2 r + 1 in the high
//         half;                                                    bfloat16 [k_dim / 32][C]
//   V tile = codes, then scales with tokens innermost
//     q8: int8 [C / 2][v_dim][2], tokens 2 r and 2 r + 1 side by side;  bfloat16 [C]
//     q4: bytes [C][v_dim / 2], byte i of 16 of a group of 32 columns with the code of column i in
//         the low half, of column 16 + i in the high half;         bfloat16 [v_dim / 32][C]
//
// Rows that are rotated (Layout::k_rotated, v_rotated) have their largest numbers spread over all others
// before they become codes. Numbers x[0..dim), in blocks of B, the largest power of two that divides dim:
//   rotated  for h = 1, 2, 4, .. B / 2: x[i], x[i + h] = x[i] + x[i + h], x[i] - x[i + h] of every i of a
//            block with i / h even; then each times 1 / sqrt(B), rounded to float32
// in float32. Twice that is the identity but for rounding. Queries are rotated before they are rounded,
// and outputs acc[j] / l of rotated values before they become the output's dtype.
//
// Attention multiplies levels as integers, so that sums have no order; floats, all float32, remain for:
//   query    of each (row, head): u = max |q| / 32767; a[d] = q[d] * (32767 / max |q|), rounded to the
//            nearest integer, ties to even
//   score    s[t] = fmaf over groups g of sum_g a[d] * level[d][t], scale[g][t], from +0; then s * u
//   weights  w[t] = p[t] * scale[g][t]; W = max |w|; b[t] = w[t] * (32767 / W), rounded likewise
//   values   acc[j] = fmaf(sum b[t] * level[t][j], W / 32767, acc[j] * r)
// instead of the steps of the same name in kvpager/attention.h. Where a maximum is below 1e-30 all its
// integers are 0; where it is not finite, so is the result.
#pragma once

#include <cstdint>

#include "kvpager/types.h"

namespace kvpager {

inline constexpr int kQ4Group = 32;  // numbers that share a scale
// Of least squared error for normal numbers: scripts/q4_levels.py. static: see base/half.h.
static constexpr int8_t kQ4Levels[16] = {-127, -101, -81, -64, -49, -35, -22, -11,
                                         0,    11,   22,  35,  49,  64,  82,  106};

// The same levels in words, a byte each, for code that cannot index a table of the host's.
constexpr uint64_t q4_level_word(int first) {
  uint64_t word = 0;
  for (int i = 0; i < 8; ++i) {
    word |= static_cast<uint64_t>(static_cast<uint8_t>(kQ4Levels[first + i])) << (8 * i);
  }
  return word;
}
static constexpr uint64_t kQ4LowLevels = q4_level_word(0);
static constexpr uint64_t kQ4HighLevels = q4_level_word(8);

constexpr int64_t code_scales(DType dtype, int64_t dim) {
  return dtype == DType::kQ4 ? dim / kQ4Group : 1;
}
// Bytes of the codes of `dim` numbers, of any DType.
constexpr int64_t row_code_bytes(DType dtype, int64_t dim) {
  if (dtype == DType::kQ8) return dim;
  if (dtype == DType::kQ4) return dim / 2;
  return dim * dtype_bytes(dtype);
}
// Bytes of one row of a head: codes and scales.
constexpr int64_t row_bytes(DType dtype, int64_t dim) {
  return row_code_bytes(dtype, dim) + (is_coded(dtype) ? 2 * code_scales(dtype, dim) : 0);
}

}  // namespace kvpager
