// y = x W^T + b for many rows with AVX2, whose sixteen registers are few: one half of the lanes at a
// time has room for three rows by four outputs. Operands are copied first, as float32 in the order in
// which they are multiplied, so that elements of 16 bits are widened once and addresses are next to one
// another (rows a power of two apart would share a few places of the cache). Included by
// linear_isa.cc only.
#pragma once

#include <type_traits>

#include "kernels/kernel_table.h"
#include "kernels/linear_elements_isa.h"

namespace kvpager {
namespace KVPAGER_ISA_NS {
namespace {

constexpr int kPackedRows = 3;
constexpr int kPackedOutputs = 4;
constexpr int64_t kVectorFloats = 16;
constexpr int64_t kBlockVectors = 64;   // of the depth: a tile's weights fit the nearest cache
constexpr int64_t kWholeVectors = 192;  // of a depth that is gone through at once, not in blocks
constexpr int64_t kGroup = 3;           // tiles of rows that go through the same weights
constexpr int64_t kGroupRows = kLinearGroupRows;
static_assert(kGroupRows == kGroup * kPackedRows);
constexpr int64_t kPackedWeights = 24 * kWholeVectors * kVectorFloats;  // in the second-level cache
constexpr int64_t kTileFloats = kPackedRows * kPackedOutputs * kVectorFloats;  // of sums

constexpr int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

// Vectors of the whole depth; at least a step's.
template <class Type>
int64_t all_vectors(int64_t depth) {
  return depth == 0 ? Type::kVectors : (depth + Type::kStep - 1) / Type::kStep * Type::kVectors;
}

// Vectors that are gone through at a time. Of a deeper one all rows are read again for each block of
// outputs, from memory that no cache holds: so outputs are more, and vectors fewer.
int64_t packed_vectors(int64_t all) { return all <= kWholeVectors ? all : kBlockVectors; }

// Outputs whose weights are packed at a time.
int64_t packed_outputs(int64_t all) {
  const int64_t room = kPackedWeights / (packed_vectors(all) * kVectorFloats);
  return least(room, kLinearBlockOutputs) / kPackedOutputs * kPackedOutputs;
}

// Operands are copied in the order in which they are multiplied: [block of the depth][half of the
// lanes][tile][vector][row of the tile][8], so that one block's half follows the other.

// kCount rows of a matrix from `first` on, or the last one again where there are fewer: `vectors` vectors
// from element k on. other: from one half of the lanes to the other.
template <class Type, int kCount>
KVPAGER_INLINE void pack(const typename Type::Element* from, int64_t stride, int64_t first,
                         int64_t rows, int64_t k, int64_t depth, int64_t vectors, int64_t other,
                         float* out) {
  const typename Type::Element* p[kCount];
#pragma GCC unroll 4
  for (int r = 0; r < kCount; ++r) p[r] = from + least(first + r, rows - 1) * stride + k;
  const auto step = [&](auto last, int64_t element) {
    typename Type::Step steps[kCount];
#pragma GCC unroll 4
    for (int r = 0; r < kCount; ++r) {
      steps[r] = read_step<Type, last.value>(p[r] + element, depth - k - element);
    }
#pragma GCC unroll 2
    for (int v = 0; v < Type::kVectors; ++v, out += kCount * 8) {
#pragma GCC unroll 4
      for (int r = 0; r < kCount; ++r) {
        const Vec vector = Type::vector(steps[r], v);
        _mm256_storeu_ps(out + r * 8, vector.x);
        _mm256_storeu_ps(out + other + r * 8, vector.y);
      }
    }
  };
  const int64_t elements = vectors / Type::kVectors * Type::kStep;
  const int64_t whole = least(elements, (depth - k) / Type::kStep * Type::kStep);
  for (int64_t i = 0; i < whole; i += Type::kStep) step(std::false_type(), i);
  for (int64_t i = whole; i < elements; i += Type::kStep) step(std::true_type(), i);
}

// Tile `tile` of `tiles`, whose first row is `first`: of many vectors from from_vector on.
template <class Type, int kCount>
void pack_tile(const void* from, int64_t stride, int64_t first, int64_t rows, int64_t depth,
               int64_t from_vector, int64_t vectors, int64_t tile, int64_t tiles, float* out) {
  for (int64_t done = 0; done < vectors; done += kBlockVectors) {
    const int64_t block = least(kBlockVectors, vectors - done);
    pack<Type, kCount>(static_cast<const typename Type::Element*>(from), stride, first, rows,
                       (from_vector + done) / Type::kVectors * Type::kStep, depth, block,
                       tiles * block * kCount * 8,
                       out + (done * tiles * 2 + tile * block) * kCount * 8);
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

// Memory that is read next, brought to a cache while others are multiplied: a little at a time, as only
// so many lines can be on their way at once.
struct Fetch {
  const char* at = nullptr;  // where the row begins
  int64_t stride = 0;        // bytes from one row to the next
  int64_t row_bytes = 0;
  int64_t rows = 0;   // left; 0: nothing to fetch
  int64_t lines = 0;  // at a time
  int64_t line = 0;   // in bytes, of the row

  // kCache: 3, the nearest; 2, the second.
  template <int kCache>
  KVPAGER_INLINE void some() {
    for (int64_t i = 0; i < lines && rows > 0; ++i) {
      __builtin_prefetch(at + line, 0, kCache);
      line += 64;
      if (line >= row_bytes) {
        line = 0;
        at += stride;
        --rows;
      }
    }
  }
};

// Weights that are packed: outputs, and vectors of the depth.
struct PackedWeights {
  int64_t first_output, last_output;
  int64_t from_vector, vectors;
  bool first, last;  // of the depth
};

// A group of rows from `row` on by all outputs. input: of this group, from the first of all vectors on;
// the next group's follows. sums: [tiles of rows][tiles of outputs][kTileFloats].
template <class Type>
void packed_group(const LinearParams& params, const PackedWeights& panel, int64_t row,
                  const float* weights, const float* input, int64_t group_floats, float* sums,
                  Fetch& next_weights) {
  constexpr auto kFloat = static_cast<int64_t>(sizeof(float));
  const int64_t outputs =
      (panel.last_output - panel.first_output + kPackedOutputs - 1) / kPackedOutputs;
  const int64_t tiles = least((params.rows - row + kPackedRows - 1) / kPackedRows, kGroup);
  const bool last_group = row + kGroupRows >= params.rows;
  const float* x = input + panel.from_vector * kGroupRows * kVectorFloats;
  const float* const next_group = last_group ? nullptr : x + group_floats;
  const float* w = weights;
  for (int64_t at = 0; at < panel.vectors; at += kBlockVectors) {
    const int64_t vectors = least(kBlockVectors, panel.vectors - at);
    const int64_t x_floats = vectors * kPackedRows * 8, w_floats = vectors * kPackedOutputs * 8;
    for (int64_t half = 0; half < 2; ++half) {
      const bool last = half == 1 && at + vectors == panel.vectors;
      const float* const next = last ? next_group : x + kGroup * x_floats;
      Fetch next_rows;
      next_rows.at = reinterpret_cast<const char*>(next);
      next_rows.row_bytes = kGroup * x_floats * kFloat;
      next_rows.rows = next == nullptr ? 0 : 1;
      next_rows.lines = next_rows.row_bytes / 64 / (outputs * tiles) + 1;
      for (int64_t n = 0; n < outputs; ++n, w += w_floats) {
        next_weights.some<2>();
        for (int64_t g = 0; g < tiles; ++g) {
          next_rows.some<3>();
          add_half(x + g * x_floats, w, vectors, panel.first && at == 0,
                   sums + (g * outputs + n) * kTileFloats + half * 8);
        }
      }
      x = next;
    }
  }
  if (!panel.last) return;
  for (int64_t g = 0; g < tiles; ++g) {
    for (int64_t n = 0; n < outputs; ++n, sums += kTileFloats) {
      finish_packed<Type>(params, row + g * kPackedRows, params.rows,
                          panel.first_output + n * kPackedOutputs, panel.last_output, sums);
    }
  }
}

// next: weights that are packed after these.
template <class Type>
Fetch fetch_of(const LinearParams& params, const PackedWeights& panel, const void* next) {
  Fetch fetch;
  if (next == nullptr) return fetch;
  constexpr auto kElement = static_cast<int64_t>(sizeof(typename Type::Element));
  const int64_t outputs = panel.last_output - panel.first_output;
  const int64_t groups = params.rows / kGroupRows + 1;
  const int64_t times =
      2 * groups * (outputs / kPackedOutputs + 1) * (panel.vectors / kBlockVectors + 1);
  fetch.at = static_cast<const char*>(next);
  fetch.stride = params.w_stride * kElement;
  fetch.row_bytes = panel.vectors / Type::kVectors * Type::kStep * kElement;
  fetch.rows = outputs;
  fetch.lines = outputs * (fetch.row_bytes / 64 + 1) / times + 1;
  return fetch;
}

// input: every tile of rows as pack_blocks leaves it.
template <class Type>
void packed_panel(const LinearParams& params, const void* next_w, const float* input,
                  float* scratch) {
  using Element = typename Type::Element;
  const int64_t all = all_vectors<Type>(params.depth);
  const int64_t group_floats = all * kGroupRows * kVectorFloats;
  const int64_t outputs = packed_outputs(all);
  const int64_t vectors = packed_vectors(all);
  const auto* w = static_cast<const Element*>(params.w);
  float* const weights = scratch;
  float* const sums = weights + kPackedWeights;
  PackedWeights panel = {};
  for (int64_t output = 0; output < params.outputs; output += outputs) {
    panel.first_output = output;
    panel.last_output = least(output + outputs, params.outputs);
    for (int64_t vector = 0; vector < all; vector += vectors) {
      panel.from_vector = vector;
      panel.vectors = least(vectors, all - vector);
      panel.first = vector == 0;
      panel.last = vector + panel.vectors == all;
      const int64_t tiles = (panel.last_output - output + kPackedOutputs - 1) / kPackedOutputs;
      for (int64_t n = 0; n < tiles; ++n) {
        pack_tile<Type, kPackedOutputs>(params.w, params.w_stride, output + n * kPackedOutputs,
                                        panel.last_output, params.depth, vector, panel.vectors, n,
                                        tiles, weights);
      }
      const void* next = next_w;
      if (!panel.last) {
        next =
            w + output * params.w_stride + (vector + panel.vectors) / Type::kVectors * Type::kStep;
      } else if (panel.last_output < params.outputs) {
        next = w + panel.last_output * params.w_stride;
      }
      Fetch fetch = fetch_of<Type>(params, panel, next);
      for (int64_t row = 0; row < params.rows; row += kGroupRows) {
        const int64_t group = row / kGroupRows;
        // Sums that are finished at once need not last.
        float* kept = sums;
        if (!panel.first || !panel.last) {
          kept += group * kGroup * (outputs / kPackedOutputs) * kTileFloats;
        }
        packed_group<Type>(params, panel, row, weights, input + group * group_floats, group_floats,
                           kept, fetch);
      }
    }
  }
}

int64_t packed_scratch_floats(int64_t rows, int64_t vectors) {
  const int64_t kept = (rows + kGroupRows - 1) / kGroupRows * kGroupRows;
  return kPackedWeights +
         (vectors <= kWholeVectors ? kGroupRows : kept) * packed_outputs(vectors) * kVectorFloats;
}

}  // namespace
}  // namespace KVPAGER_ISA_NS
}  // namespace kvpager
