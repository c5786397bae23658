// A Python tensor (torch, numpy, anything that speaks DLPack) borrowed for the length of one call.
#pragma once

#include <pybind11/pybind11.h>

#include <optional>

#include "bindings/matrix.h"
#include "kvpager/pager.h"
#include "kvpager/tensor.h"

namespace kvpager {

namespace dlpack {
struct ManagedTensor;
}

// Nothing for another device or dtype, for rows that are not so, and for what is no torch tensor. The
// caller keeps the tensor while it uses the matrix.
std::optional<Matrix> matrix_at(const DevicePlace& place, pybind11::handle tensor);
inline std::optional<Matrix> host_matrix(pybind11::handle tensor) {
  static const DevicePlace host;
  return matrix_at(host, tensor);
}

// The numbers of a torch tensor of int64 in the processor's memory, one behind the other.
struct Integers {
  const int64_t* data = nullptr;
  int64_t count = 1;
};
std::optional<Integers> host_integers(pybind11::handle tensor);  // nothing for any other tensor

class BorrowedTensor {
 public:
  // Three dimensions, memory of `place`, a supported float dtype, last dimension contiguous;
  // InvalidArgumentError that names `name` otherwise. `writable` refuses read-only exporters.
  BorrowedTensor(const char* name, pybind11::handle tensor, const DevicePlace& place,
                 bool writable = false);
  ~BorrowedTensor();
  BorrowedTensor(const BorrowedTensor&) = delete;
  BorrowedTensor& operator=(const BorrowedTensor&) = delete;

  const TensorView& view() const { return view_; }

 private:
  TensorView view_;
  dlpack::ManagedTensor* owned_ =
      nullptr;  // what an exporter without the C exchange table handed over
};

}  // namespace kvpager
