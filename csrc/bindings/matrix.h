// What strides make of a tensor: rows that are equally far apart. Nothing here needs Python.
#pragma once

#include <cstdint>
#include <optional>

#include "bindings/dlpack.h"
#include "kvpager/types.h"

namespace kvpager {

// A tensor [..., columns] as rows equally far apart; of one dimension: as one row.
struct Matrix {
  void* data = nullptr;
  DType dtype = DType::kFloat32;
  int64_t rows = 1;
  int64_t columns = 0;
  int64_t stride = 0;  // elements from one row to the next; of all rows in one place 0

  bool empty() const { return rows == 0 || columns == 0; }
  // Whether each element has memory of its own, as one that is written must.
  bool rows_apart() const { return rows <= 1 || stride >= columns; }
};

inline std::optional<DType> float_dtype(const dlpack::DataType& type) {
  if (type.lanes != 1) return std::nullopt;
  if (type.code == dlpack::kFloat && type.bits == 32) return DType::kFloat32;
  if (type.code == dlpack::kFloat && type.bits == 16) return DType::kFloat16;
  if (type.code == dlpack::kBfloat && type.bits == 16) return DType::kBFloat16;
  return std::nullopt;
}

// Nothing of another dtype, of rows that are not equally far apart or backwards, of columns that are not
// next to each other, and of memory that is missing or not aligned.
inline std::optional<Matrix> matrix_of(const dlpack::Tensor& t) {
  const std::optional<DType> dtype = float_dtype(t.dtype);
  if (!dtype || t.ndim < 1) return std::nullopt;
  Matrix matrix;
  matrix.dtype = *dtype;
  matrix.columns = t.shape[t.ndim - 1];
  matrix.stride = matrix.columns;
  for (int32_t i = 0; i + 1 < t.ndim; ++i) {
    // Rows of a stride of 0 take no memory, however many they are.
    if (__builtin_mul_overflow(matrix.rows, t.shape[i], &matrix.rows)) return std::nullopt;
  }
  if (t.strides != nullptr) {
    // Dimensions of one element may have any stride.
    if (matrix.columns != 1 && t.strides[t.ndim - 1] != 1) return std::nullopt;
    // Stride that the next dimension outwards has where rows are equally far apart.
    std::optional<int64_t> next;
    for (int32_t i = t.ndim - 2; i >= 0 && matrix.rows > 1; --i) {
      if (t.shape[i] == 1) continue;
      if (next && t.strides[i] != *next) return std::nullopt;
      if (!next) matrix.stride = t.strides[i];
      int64_t outwards = 0;
      if (__builtin_mul_overflow(t.strides[i], t.shape[i], &outwards)) return std::nullopt;
      next = outwards;
    }
  }
  matrix.data = static_cast<char*>(t.data) + t.byte_offset;
  const bool has_memory = t.data != nullptr || matrix.empty();
  const bool aligned =
      reinterpret_cast<uintptr_t>(matrix.data) % static_cast<uintptr_t>(dtype_bytes(*dtype)) == 0;
  if (!has_memory || !aligned || matrix.stride < 0) return std::nullopt;
  return matrix;
}

// Whether two of one dtype may have an element in common.
inline bool may_overlap(const Matrix& a, const Matrix& b) {
  if (a.empty() || b.empty()) return false;
  const int64_t size = dtype_bytes(a.dtype);
  const auto begin = [](const Matrix& m) { return reinterpret_cast<intptr_t>(m.data); };
  const auto end = [&](const Matrix& m) {
    return begin(m) + ((m.rows - 1) * m.stride + m.columns) * size;
  };
  if (end(a) <= begin(b) || end(b) <= begin(a)) return false;
  if (a.stride != b.stride || !a.rows_apart() || !b.rows_apart() || a.rows == 1 || b.rows == 1) {
    return true;
  }
  // Columns of one larger matrix: apart if they are so within a row.
  const int64_t row = a.stride * size;
  const int64_t from_a = ((begin(b) - begin(a)) % row + row) % row;
  return from_a < a.columns * size || from_a + b.columns * size > row;
}

}  // namespace kvpager
