// A Python tensor (torch, numpy, anything that speaks DLPack) borrowed for the length of one call.
#pragma once

#include <pybind11/pybind11.h>

#include "kvpager/pager.h"
#include "kvpager/tensor.h"

namespace kvpager {

namespace dlpack {
struct ManagedTensor;
}

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
