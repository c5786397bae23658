// y = x W^T + b for several rows with AVX2: more than one or two tiles have, too few to pay for a copy
// of the weights, which are multiplied as they lie. Included by linear_isa.cc only.
#pragma once

#include "compute/linear_compressed_isa.h"
#include "compute/linear_copied_isa.h"

namespace kvpager {
namespace KVPAGER_ISA_NS {
namespace {

constexpr int64_t kSeveralRows = 48;

// Weights of a tile of outputs and a block of the depth, unpacked.
constexpr int64_t kUnpackedFloats = kPackedOutputs * kBlockVectors * kVectorFloats;

// One tile of outputs: all rows by one block of the depth, from vector `at` on. input: every group of
// rows as pack_tile leaves it. unpacked: room for weights that have copies; null: none have.
template <class Type>
KVPAGER_INLINE void several_rows_block(const LinearParams& params, const float* input,
                                       int64_t output, int64_t at, float* sums,
                                       typename Type::Element* unpacked, Ahead& ahead) {
  using Element = typename Type::Element;
  const int64_t all = all_vectors<Type>(params.depth);
  const int64_t vectors = least(kBlockVectors, all - at);
  const int64_t k = at / Type::kVectors * Type::kStep;
  const int64_t whole = least(vectors, (params.depth - k) / Type::kStep * Type::kVectors);
  OwnWeights<Type> own, rest;
  Element padded[kPackedOutputs][Type::kStep] = {};
  for (int n = 0; n < kPackedOutputs; ++n) {
    const int64_t row = least(output + n, params.outputs - 1);  // the last one again
    own.at[n] = static_cast<const Element*>(params.w) + row * params.w_stride + k;
    if constexpr (kHasCopies<Type>) {
      if (unpacked != nullptr) {
        const int64_t elements = vectors / Type::kVectors * Type::kStep;
        Element* const to = unpacked + n * elements;
        read_compressed<Type>(params, row, k, least(elements, params.depth - k), to);
        own.at[n] = to;
      }
    }
    rest.at[n] = padded[n];
    if (whole == vectors) continue;
    const int64_t done = whole / Type::kVectors * Type::kStep;
    std::memcpy(padded[n], own.at[n] + done,
                static_cast<size_t>(params.depth - k - done) * sizeof(Element));
  }
  const int64_t tiles = row_tiles(params.rows), tile_floats = vectors * kPackedRows * 8;
  for (int half = 0; half < 2; ++half) {
    for (int64_t t = 0; t < tiles; ++t) {
      const float* x = input + (t / kGroup * all + at) * kGroupRows * kVectorFloats +
                       (half * kGroup + t % kGroup) * tile_floats;
      float* const to = sums + t * kTileFloats + half * 8;
      const auto add_rows = [&](auto rows) {
        add_half<rows.value>(x, own, whole, at == 0, to, ahead);
        if (whole == vectors) return;
        add_half<rows.value>(x + whole * kPackedRows * 8, rest, vectors - whole,
                             at == 0 && whole == 0, to, ahead);
      };
      if (first_row(t + 1, params.rows) - first_row(t, params.rows) == kPackedRows) {
        add_rows(std::integral_constant<int, kPackedRows>());
      } else {
        add_rows(std::integral_constant<int, kPackedRows - 1>());
      }
    }
    for (int n = 0; n < kPackedOutputs; ++n) {
      own.at[n] += Type::kStep / 2;
      rest.at[n] += Type::kStep / 2;
    }
  }
}

// next_w: the weights that this thread multiplies after these; null: not known.
template <class Type>
void several_rows_panel(const LinearParams& params, const void* next_w, const float* input,
                        float* scratch) {
  constexpr auto kElement = static_cast<int64_t>(sizeof(typename Type::Element));
  const int64_t all = all_vectors<Type>(params.depth);
  const int64_t tiles = row_tiles(params.rows);
  float* const sums = scratch + kUnpackedFloats;
  const bool compressed = params.compressed.groups != nullptr;
  auto* const unpacked = compressed ? reinterpret_cast<typename Type::Element*>(scratch) : nullptr;
  for (int64_t output = 0; output < params.outputs; output += kPackedOutputs) {
    const int64_t next = output + kPackedOutputs;
    const char* from = static_cast<const char*>(params.w) + next * params.w_stride * kElement;
    int64_t bytes = kPackedOutputs * params.w_stride * kElement;
    if (compressed) {
      from = reinterpret_cast<const char*>(params.compressed.from(next).groups);
      bytes = kPackedOutputs * params.compressed.of_row * kCompressedBytes;
    } else if (next >= params.outputs) {
      from = static_cast<const char*>(next_w);
    }
    Ahead ahead(from, bytes, all / Type::kVectors * 2 * tiles);
    for (int64_t at = 0; at < all; at += kBlockVectors) {
      several_rows_block<Type>(params, input, output, at, sums, unpacked, ahead);
    }
    for (int64_t t = 0; t < tiles; ++t) {
      finish_packed<Type>(params, t, output, params.outputs, sums + t * kTileFloats);
    }
  }
}

int64_t several_scratch_floats(int64_t rows) {
  return kUnpackedFloats + row_tiles(rows) * kTileFloats;
}

}  // namespace
}  // namespace KVPAGER_ISA_NS
}  // namespace kvpager
