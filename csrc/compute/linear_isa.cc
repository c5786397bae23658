// Tiles of y = x W^T + b: kvpager/linear.h has the order of operations. A tile is a few rows by a
// few outputs, whose lanes stay in registers along the whole depth.
#include <type_traits>

#include "compute/functions_isa.h"
#include "compute/linear_compressed_isa.h"
#include "compute/linear_elements_isa.h"
#if KVPAGER_ISA_LEVEL == 3
#include "compute/linear_packed_isa.h"
#include "compute/linear_several_isa.h"
#endif

namespace kvpager {
namespace KVPAGER_ISA_NS {
namespace {

// The largest tile: as many lanes as there are registers for, beside operands.
#if KVPAGER_ISA_LEVEL == 4
constexpr int kTileRows = 6;
constexpr int kTileOutputs = 4;
#else
constexpr int kTileRows = 3;
constexpr int kTileOutputs = 2;
#endif

// kRows rows by kOutputs outputs. The tiles of rows that go through these weights, one after the other,
// bring those after them to the caches meanwhile, each its part, in the order in which they lie in
// memory, whatever the order they are read in; without parts, where they begin.
template <class Type, int kRows, int kOutputs>
void tile(const LinearParams& params, int64_t row, int64_t output, Part part) {
  using Element = typename Type::Element;
  const Element* const x = static_cast<const Element*>(params.x) + row * params.x_stride;
  const Element* const w = static_cast<const Element*>(params.w) + output * params.w_stride;
  Vec sums[kRows][kOutputs];
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
    for (int n = 0; n < kOutputs; ++n) sums[r][n] = splat(0.0f);
  }
  const int64_t whole = params.depth / Type::kStep * Type::kStep;
  Next<kOutputs, Type::kStep * sizeof(Element)> next(w + kOutputs * params.w_stride, part,
                                                     whole / Type::kStep);
  for (int64_t k = 0; k < whole; k += Type::kStep) {
    next.step();
    add_step<Type, false>(x + k, params.x_stride, 0, sums,
                          [&](int n) { return w + n * params.w_stride + k; });
  }
  // From the second-level cache, whose own prefetching begins with a row's second miss.
  if (part.of == 0) {
#pragma GCC unroll 8
    for (int n = 0; n < kOutputs; ++n) {
#pragma GCC unroll 3
      for (int line = 0; line < 3; ++line) {
        __builtin_prefetch(reinterpret_cast<const char*>(w + (kOutputs + n) * params.w_stride) +
                           64 * line);
      }
    }
  }
  add_rest<Type>(params, x, w, whole, sums);
  finish<Type>(params, row, output, sums);
}

template <class Type, int kOutputs>
void one_row_tile(const LinearParams& params, int64_t row, int64_t output, Part part) {
  const int64_t whole = params.depth / Type::kStep * Type::kStep;
  const auto add = [&](int, const auto* x, const auto* w, Vec(&sum)[1][1]) KVPAGER_INLINED {
#pragma GCC unroll 4
    for (int64_t k = 0; k < whole; k += Type::kStep) {
      if (part.is_first()) fetch(reinterpret_cast<const char*>(w + k) + kRowAhead);
      add_step<Type, false>(x + k, 0, 0, sum, [&](int) { return w + k; });
    }
  };
  one_row<Type, kOutputs>(params, row, output, whole, add);
}

using Tile = void (*)(const LinearParams& params, int64_t row, int64_t output, Part part);

// Tiles of 1 to kTileRows rows, by their number; of weights, or of copies of them.
template <class Type, int kOutputs, bool kCompressed>
struct Tiles {
  Tile of_rows[kTileRows + 1] = {};
  constexpr Tiles() {
#if KVPAGER_ISA_LEVEL == 4
    fill<1, 2, 3, 4, 5, 6>();
#else
    fill<1, 2, 3>();
#endif
  }

 private:
  template <int... kRows>
  constexpr void fill() {
    ((of_rows[kRows] = one<kRows>()), ...);
  }
  template <int kRows>
  static constexpr Tile one() {
    if constexpr (kCompressed && kRows == 1) return compressed_one_row_tile<Type, kOutputs>;
    if constexpr (kCompressed && kRows > 1) return compressed_tile<Type, kRows, kOutputs>;
    if constexpr (kRows == 1) {
      return one_row_tile<Type, kOutputs>;
    } else {
      return tile<Type, kRows, kOutputs>;
    }
  }
};

// Up to so many rows go through a tile's weights before the next weights are read.
constexpr int64_t kFewRows = 4 * kTileRows;

// Up to so many rows are multiplied with copies of weights: more take as long to be multiplied as
// their weights take to be read. 0: the dtype has none.
template <class Type>
constexpr int64_t kCompressedRows =
    !kHasCopies<Type>               ? 0
    : std::is_same_v<Type, Float32> ? (KVPAGER_ISA_LEVEL == 4 ? 8 : 12)
                                    : kTileRows;

template <class Type, bool kCompressed>
void tiles(const LinearParams& params) {
  static constexpr Tiles<Type, kTileOutputs, kCompressed> kWide;
  static constexpr Tiles<Type, 1, kCompressed> kNarrow;
  const int64_t count = (params.rows + kTileRows - 1) / kTileRows;
  const int64_t outputs = params.outputs / kTileOutputs * kTileOutputs;
  const auto both = [&](int64_t i, int64_t output, Part part) {
    const int64_t row = first_row(i, count, params.rows);
    const int64_t rows = first_row(i + 1, count, params.rows) - row;
    (output < outputs ? kWide.of_rows : kNarrow.of_rows)[rows](params, row, output, part);
  };
  const auto width = [&](int64_t output) { return output < outputs ? kTileOutputs : 1; };
  if (params.rows <= kFewRows) {
    for (int64_t output = 0; output < params.outputs; output += width(output)) {
      for (int64_t i = 0; i < count; ++i) both(i, output, {i, count});
    }
    return;
  }
  for (int64_t i = 0; i < count; ++i) {
    for (int64_t output = 0; output < params.outputs; output += width(output)) both(i, output, {});
  }
}

template <class Type>
void panel(const LinearParams& params, const void* next_w, const float* input, float* scratch) {
#if KVPAGER_ISA_LEVEL == 3
  if (input != nullptr && params.rows <= kSeveralRows) {
    return several_rows_panel<Type>(params, next_w, input, scratch);
  }
  if (input != nullptr) return packed_panel<Type>(params, next_w, input, scratch);
#endif
  (void)next_w;
  (void)input;
  (void)scratch;
  if constexpr (kCompressedRows<Type> > 0) {
    if (params.compressed.groups != nullptr) return tiles<Type, true>(params);
  }
  tiles<Type, false>(params);
}

}  // namespace

LinearPacking linear_packing(const LinearParams& params) {
  LinearPacking packing;
#if KVPAGER_ISA_LEVEL == 3
  // Copies of rows pay from the second tile on; in float32, where weights are not widened, from the
  // third.
  const bool widened = params.dtype != DType::kFloat32 || params.compressed.groups != nullptr;
  if (params.rows > (widened ? 1 : 2) * kTileRows) {
    const int64_t vectors = params.dtype == DType::kBFloat16 ? all_vectors<BFloat16>(params.depth)
                                                             : all_vectors<Float32>(params.depth);
    packing.group_floats = vectors * kGroupRows * kVectorFloats;
    packing.scratch_floats = params.rows <= kSeveralRows
                                 ? several_scratch_floats(params.rows)
                                 : packed_scratch_floats(params.rows, vectors);
  }
#endif
  (void)params;
  return packing;
}

int64_t linear_compressed_rows(DType dtype) {
  if (dtype == DType::kFloat32) return kCompressedRows<Float32>;
  if (dtype == DType::kFloat16) return kCompressedRows<Float16>;
  return kCompressedRows<BFloat16>;
}

void linear_pack(const LinearParams& params, int64_t group, float* out) {
#if KVPAGER_ISA_LEVEL == 3
  const auto pack = [&](auto type) {
    using Type = decltype(type);
    for (int64_t tile = 0; tile < kGroup; ++tile) {
      const int64_t of_all = group * kGroup + tile;
      if (of_all >= row_tiles(params.rows)) break;
      pack_tile<Type, kPackedRows>(params.x, params.x_stride, first_row(of_all, params.rows),
                                   params.rows, params.depth, 0, all_vectors<Type>(params.depth),
                                   tile, kGroup, out);
    }
  };
  if (params.dtype == DType::kFloat32) return pack(Float32());
  if (params.dtype == DType::kFloat16) return pack(Float16());
  pack(BFloat16());
#else
  (void)params;
  (void)group;
  (void)out;
#endif
}

void linear_panel(const LinearParams& params, const void* next_w, const float* input,
                  float* scratch) {
  if (params.dtype == DType::kFloat32) return panel<Float32>(params, next_w, input, scratch);
  if (params.dtype == DType::kFloat16) return panel<Float16>(params, next_w, input, scratch);
  panel<BFloat16>(params, next_w, input, scratch);
}

#if KVPAGER_ISA_LEVEL == 4
void linear_panel_dots(const LinearParams& params, const void* next_w, const float* input,
                       float* scratch) {
  if (params.dtype != DType::kBFloat16) return linear_panel(params, next_w, input, scratch);
  panel<BFloat16Dots>(params, next_w, input, scratch);
}
#endif

}  // namespace KVPAGER_ISA_NS
}  // namespace kvpager
