// y = x W^T + b for many rows with AVX2, whose sixteen registers are few: one half of the lanes at a
// time has room for three rows by four outputs. Operands are copied first, as float32 in the order in
// which they are multiplied, so that elements of 16 bits are widened once and addresses are next to one
// another (rows a power of two apart would share a few places of the cache). Included by
// linear_isa.cc only.
#pragma once

#include "kernels/kernel_table.h"
#include "kernels/linear_elements_isa.h"

namespace kvpager {
namespace KVPAGER_ISA_NS {
namespace {

constexpr int kPackedRows = 3;
constexpr int kPackedOutputs = 4;
constexpr int64_t kBlockVectors = 64;  // of the depth
constexpr int64_t kGroup = 3;          // tiles of rows that go through the same weights
constexpr int64_t kBlockRows = 29 * kGroup * kPackedRows;  // a prompt of 256: packed once
constexpr int64_t kBlockOutputs = kLinearBlockOutputs;
constexpr int64_t kVectorFloats = 16;
constexpr int64_t kPackedWeights = kBlockOutputs * kBlockVectors * kVectorFloats;
constexpr int64_t kPackedInput = kGroup * kPackedRows * kBlockVectors * kVectorFloats;

// kCount rows of a matrix from `first` on, or the last one again where there are fewer: of `vectors`
// vectors from element k on, out[half][vector][row][8].
template <class Type, int kCount>
KVPAGER_INLINE void pack(const typename Type::Element* from, int64_t stride, int64_t first,
                         int64_t rows, int64_t k, int64_t depth, int64_t vectors, float* out) {
  const int64_t half = vectors * kCount * 8;
  for (int r = 0; r < kCount; ++r) {
    const int64_t row = first + r < rows ? first + r : rows - 1;
    const typename Type::Element* p = from + row * stride + k;
    float* to = out + r * 8;
    for (int64_t left = depth - k, i = 0; i < vectors; left -= Type::kStep, p += Type::kStep) {
      const auto step =
          left >= Type::kStep ? read_step<Type, false>(p, 0) : read_step<Type, true>(p, left);
#pragma GCC unroll 2
      for (int v = 0; v < Type::kVectors; ++v, ++i, to += kCount * 8) {
        const Vec vector = Type::vector(step, v);
        _mm256_storeu_ps(to, vector.x);
        _mm256_storeu_ps(to + half, vector.y);
      }
    }
  }
}

// Adds the products of half the lanes to sums, which are 0 where they are the first.
KVPAGER_INLINE void add_half(const float* x, const float* w, int64_t vectors, bool first,
                             float* sums) {
  __m256 sum[kPackedRows][kPackedOutputs];
#pragma GCC unroll 4
  for (int r = 0; r < kPackedRows; ++r) {
#pragma GCC unroll 4
    for (int n = 0; n < kPackedOutputs; ++n) {
      sum[r][n] = first ? _mm256_setzero_ps()
                        : _mm256_loadu_ps(sums + (r * kPackedOutputs + n) * kVectorFloats);
    }
  }
  for (int64_t i = 0; i < vectors; ++i, x += kPackedRows * 8, w += kPackedOutputs * 8) {
    __m256 rows[kPackedRows];
#pragma GCC unroll 4
    for (int r = 0; r < kPackedRows; ++r) {
      rows[r] = _mm256_loadu_ps(x + r * 8);
      asm("" : "+x"(rows[r]));  // in a register: not read again for each output
    }
#pragma GCC unroll 4
    for (int n = 0; n < kPackedOutputs; ++n) {
      __m256 weights = _mm256_loadu_ps(w + n * 8);
      asm("" : "+x"(weights));
#pragma GCC unroll 4
      for (int r = 0; r < kPackedRows; ++r) {
        sum[r][n] = _mm256_fmadd_ps(rows[r], weights, sum[r][n]);
      }
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < kPackedRows; ++r) {
#pragma GCC unroll 4
    for (int n = 0; n < kPackedOutputs; ++n) {
      _mm256_storeu_ps(sums + (r * kPackedOutputs + n) * kVectorFloats, sum[r][n]);
    }
  }
}

template <class Type>
KVPAGER_INLINE void finish_packed(const LinearParams& params, int64_t row, int64_t last_row,
                                  int64_t output, int64_t last_output, const float* sums) {
  Vec tile[kPackedRows][kPackedOutputs];
#pragma GCC unroll 4
  for (int r = 0; r < kPackedRows; ++r) {
#pragma GCC unroll 4
    for (int n = 0; n < kPackedOutputs; ++n, sums += kVectorFloats) tile[r][n] = load(sums);
  }
  const int64_t rows = last_row - row, outputs = last_output - output;
  finish<Type>(params, row, output, tile, static_cast<int>(rows < kPackedRows ? rows : kPackedRows),
               static_cast<int>(outputs < kPackedOutputs ? outputs : kPackedOutputs));
}

// Weights that are packed next, brought to the second-level cache while others are multiplied: a
// little at a time, as only so many lines can be on their way at once.
struct Fetch {
  const char* at = nullptr;  // where the row begins
  int64_t stride = 0;        // bytes from one row to the next
  int64_t row_bytes = 0;
  int64_t rows = 0;   // left; 0: nothing to fetch
  int64_t lines = 0;  // at a time
  int64_t line = 0;   // in bytes, of the row

  KVPAGER_INLINE void some() {
    for (int64_t i = 0; i < lines && rows > 0; ++i) {
      __builtin_prefetch(at + line, 0, 2);
      line += 64;
      if (line >= row_bytes) {
        line = 0;
        at += stride;
        --rows;
      }
    }
  }
};

// What is multiplied at a time: rows and outputs, and vectors of the depth from one step on.
struct PackedBlock {
  int64_t first_row, last_row;
  int64_t first_output, last_output;
  int64_t k;        // the first element of the depth
  int64_t vectors;  // of it
  bool first, last;
};

constexpr int64_t kTileFloats = kPackedRows * kPackedOutputs * kVectorFloats;

// A few tiles of rows from `row` on by all outputs; sums: [tiles][tiles of outputs][kTileFloats].
template <class Type>
void packed_group(const LinearParams& params, const PackedBlock& block, int64_t row,
                  const float* weights, float* input, float* sums, Fetch& fetch) {
  const int64_t outputs =
      (block.last_output - block.first_output + kPackedOutputs - 1) / kPackedOutputs;
  const int64_t left = (block.last_row - row + kPackedRows - 1) / kPackedRows;
  const int64_t tiles = left < kGroup ? left : kGroup;
  const int64_t input_half = block.vectors * kPackedRows * 8;
  const int64_t weights_half = block.vectors * kPackedOutputs * 8;
  for (int64_t g = 0; g < tiles; ++g) {
    pack<Type, kPackedRows>(static_cast<const typename Type::Element*>(params.x), params.x_stride,
                            row + g * kPackedRows, block.last_row, block.k, params.depth,
                            block.vectors, input + 2 * g * input_half);
  }
  for (int64_t half = 0; half < 2; ++half) {
    for (int64_t n = 0; n < outputs; ++n) {
      fetch.some();
      for (int64_t g = 0; g < tiles; ++g) {
        add_half(input + (2 * g + half) * input_half, weights + (2 * n + half) * weights_half,
                 block.vectors, block.first, sums + (g * outputs + n) * kTileFloats + half * 8);
      }
    }
  }
  if (!block.last) return;
  for (int64_t g = 0; g < tiles; ++g) {
    for (int64_t n = 0; n < outputs; ++n, sums += kTileFloats) {
      finish_packed<Type>(params, row + g * kPackedRows, block.last_row,
                          block.first_output + n * kPackedOutputs, block.last_output, sums);
    }
  }
}

template <class Type>
void packed_block(const LinearParams& params, const PackedBlock& block, const void* next,
                  float* scratch) {
  float* const weights = scratch;
  float* const input = weights + kPackedWeights;
  float* const sums = input + kPackedInput;
  float* packed = weights;
  for (int64_t n = block.first_output; n < block.last_output; n += kPackedOutputs) {
    pack<Type, kPackedOutputs>(static_cast<const typename Type::Element*>(params.w),
                               params.w_stride, n, block.last_output, block.k, params.depth,
                               block.vectors, packed);
    packed += block.vectors * kPackedOutputs * kVectorFloats;
  }
  Fetch fetch;
  if (next != nullptr) {
    const int64_t groups = (block.last_row - block.first_row) / (kGroup * kPackedRows) + 1;
    const int64_t times =
        2 * groups * ((block.last_output - block.first_output) / kPackedOutputs + 1);
    fetch.at = static_cast<const char*>(next);
    fetch.stride = params.w_stride * static_cast<int64_t>(sizeof(typename Type::Element));
    fetch.row_bytes = block.vectors / Type::kVectors * Type::kStep *
                      static_cast<int64_t>(sizeof(typename Type::Element));
    fetch.rows = block.last_output - block.first_output;
    fetch.lines = fetch.rows * (fetch.row_bytes / 64 + 1) / times + 1;
  }
  const bool whole = block.first && block.last;  // sums need not last
  for (int64_t row = block.first_row; row < block.last_row; row += kGroup * kPackedRows) {
    const int64_t before = whole ? 0 : row - block.first_row;
    packed_group<Type>(params, block, row, weights, input,
                       sums + before / kPackedRows * (kBlockOutputs / kPackedOutputs) * kTileFloats,
                       fetch);
  }
}

template <class Type>
void packed_panel(const LinearParams& params, const void* next_w, float* scratch) {
  constexpr int64_t kBlockSteps = kBlockVectors / Type::kVectors;
  const auto least = [](int64_t a, int64_t b) { return a < b ? a : b; };
  const int64_t steps = params.depth == 0 ? 1 : (params.depth + Type::kStep - 1) / Type::kStep;
  const int64_t block_rows = steps <= kBlockSteps ? params.rows : kBlockRows;
  for (int64_t row = 0; row < params.rows; row += block_rows) {
    for (int64_t output = 0; output < params.outputs; output += kBlockOutputs) {
      PackedBlock block = {};
      block.first_row = row;
      block.last_row = least(row + block_rows, params.rows);
      block.first_output = output;
      block.last_output = least(output + kBlockOutputs, params.outputs);
      const auto* w = static_cast<const typename Type::Element*>(params.w);
      for (int64_t step = 0; step < steps; step += kBlockSteps) {
        block.k = step * Type::kStep;
        block.vectors = least(kBlockSteps, steps - step) * Type::kVectors;
        block.first = step == 0;
        block.last = step + kBlockSteps >= steps;
        const void* next = next_w;
        if (!block.last) {
          next = w + output * params.w_stride + block.k + kBlockSteps * Type::kStep;
        } else if (block.last_output < params.outputs) {
          next = w + block.last_output * params.w_stride;
        } else if (block.last_row < params.rows) {
          next = w;
        }
        packed_block<Type>(params, block, next, scratch);
      }
    }
  }
}

}  // namespace
}  // namespace KVPAGER_ISA_NS
}  // namespace kvpager
