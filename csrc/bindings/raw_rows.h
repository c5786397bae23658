// Room for keys and values as they are read: words of their size, which torch and numpy view as floats.
#pragma once

#include <pybind11/numpy.h>
#include <pybind11/typing.h>

#include <vector>

#include "kvpager/layout.h"

namespace kvpager {

class RawRows {
 public:
  // layout: of the layer that is read.
  RawRows(const Layout& layout, int64_t rows)
      : k_(words(layout.k_dtype, rows, layout.kv_heads, layout.k_dim)),
        v_(words(layout.v_dtype, rows, layout.kv_heads, layout.v_dim)) {}

  std::byte* k() { return static_cast<std::byte*>(k_.mutable_data()); }
  std::byte* v() { return static_cast<std::byte*>(v_.mutable_data()); }
  // k [rows, kv_heads, k_dim] and v [rows, kv_heads, v_dim].
  pybind11::typing::Tuple<pybind11::array, pybind11::array> tuple() const {
    return pybind11::make_tuple(k_, v_);
  }

 private:
  static pybind11::array words(DType dtype, int64_t rows, int64_t heads, int64_t dim) {
    const std::vector<pybind11::ssize_t> shape = {rows, heads, dim};
    return read_dtype(dtype) == DType::kFloat32
               ? pybind11::array(pybind11::dtype::of<uint32_t>(), shape)
               : pybind11::array(pybind11::dtype::of<uint16_t>(), shape);
  }
  pybind11::array k_;
  pybind11::array v_;
};

}  // namespace kvpager
