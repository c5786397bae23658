// y = x W^T + b for many rows with AVX2: weights are copied too, 24 to 48 outputs at a time, as all rows
// go through them. Included by linear_isa.cc only.
#pragma once

#include "compute/linear_copied_isa.h"

namespace kvpager {
namespace KVPAGER_ISA_NS {
namespace {

constexpr int64_t kWholeVectors = 192;  // of a depth that is gone through at once, not in blocks
constexpr int64_t kPackedWeights = 24 * kWholeVectors * kVectorFloats;  // in the second-level cache

// Vectors that are gone through at a time. Of a deeper one all rows are read again for each block of
// outputs, from memory that no cache holds: so outputs are more, and vectors fewer.
int64_t packed_vectors(int64_t all) { return all <= kWholeVectors ? all : kBlockVectors; }

// Outputs whose weights are packed at a time.
int64_t packed_outputs(int64_t all) {
  const int64_t room = kPackedWeights / (packed_vectors(all) * kVectorFloats);
  return least(room, kLinearBlockOutputs) / kPackedOutputs * kPackedOutputs;
}

// Weights that are packed next, brought to the second-level cache while others are multiplied.
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

// Weights that are packed: outputs, and vectors of the depth.
struct PackedWeights {
  int64_t first_output, last_output;
  int64_t from_vector, vectors;
  bool first, last;  // of the depth
};

// A group of rows from `row` on by all outputs. input: of this group, from the first of all vectors
// on; the next group's is group_floats further. sums: [tiles of rows][tiles of outputs][kTileFloats].
template <class Type>
void packed_group(const LinearParams& params, const PackedWeights& panel, int64_t row,
                  const float* weights, const float* input, int64_t group_floats, float* sums,
                  Fetch& next_weights) {
  const int64_t outputs = output_tiles(panel.last_output - panel.first_output);
  const int64_t tiles = least(row_tiles(params.rows) - row / kPackedRows, kGroup);
  const float* x = input + panel.from_vector * kGroupRows * kVectorFloats;
  const float* const next_group = row + kGroupRows < params.rows ? x + group_floats : nullptr;
  const float* w = weights;
  for (int64_t at = 0; at < panel.vectors; at += kBlockVectors) {
    const int64_t vectors = least(kBlockVectors, panel.vectors - at);
    const int64_t x_floats = vectors * kPackedRows * 8, w_floats = vectors * kPackedOutputs * 8;
    for (int half = 0; half < 2; ++half, x += kGroup * x_floats) {
      const bool last = half == 1 && at + vectors == panel.vectors;
      const int64_t bytes = kGroup * x_floats * static_cast<int64_t>(sizeof(float));
      Ahead ahead(last ? next_group : x + kGroup * x_floats, bytes, outputs * tiles * vectors);
      for (int64_t n = 0; n < outputs; ++n, w += w_floats) {
        next_weights.some();
        for (int64_t g = 0; g < tiles; ++g) {
          add_half<kPackedRows>(x + g * x_floats, CopiedWeights{w}, vectors, panel.first && at == 0,
                                sums + (g * outputs + n) * kTileFloats + half * 8, ahead);
        }
      }
    }
  }
  if (!panel.last) return;
  for (int64_t g = 0; g < tiles; ++g) {
    for (int64_t n = 0; n < outputs; ++n, sums += kTileFloats) {
      finish_packed<Type>(params, row / kPackedRows + g, panel.first_output + n * kPackedOutputs,
                          panel.last_output, sums);
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

// input: every group of rows as pack_tile leaves it.
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
      const int64_t tiles = output_tiles(panel.last_output - output);
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
