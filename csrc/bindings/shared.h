// Native objects that Python drops. What is behind them may wait for a lock or for the disk when it
// goes: the pager's lock is held for as long as an attention call runs.
#pragma once

#include <pybind11/pybind11.h>

#include <memory>
#include <utility>

namespace kvpager {

// The same object, whose last owner in Python destroys it with the GIL released, so that other
// threads go on meanwhile.
template <class T>
std::shared_ptr<T> dropped_without_gil(std::shared_ptr<T> object) {
  T* const address = object.get();
  const auto drop = [object = std::move(object)](T*) mutable {
    if (PyGILState_Check() == 0) return object.reset();  // not Python that drops it
    const pybind11::gil_scoped_release release;
    object.reset();
  };
  return std::shared_ptr<T>(address, drop);
}

}  // namespace kvpager
