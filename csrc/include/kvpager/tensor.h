// A borrowed view of a host tensor: what bindings hand to the core. Owns nothing.
#pragma once

#include <cstdint>

#include "kvpager/types.h"

namespace kvpager {

// Rows x heads x dim, any strides for rows and heads, dim contiguous. Strides are in elements.
struct TensorView {
  void* data = nullptr;
  DType dtype = DType::kFloat32;
  int64_t rows = 0;
  int64_t heads = 0;
  int64_t dim = 0;
  int64_t row_stride = 0;
  int64_t head_stride = 0;

  bool empty() const { return data == nullptr; }
};

}  // namespace kvpager
