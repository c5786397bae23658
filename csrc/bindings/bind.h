// What each file of the bindings adds to the module. Bindings convert and check types; they decide
// nothing.
#pragma once

#include <pybind11/pybind11.h>

namespace kvpager {

// __exit__, which calls a method whatever was raised.
template <class T>
auto exit_by(void (T::*method)()) {
  return [method](T& self, const pybind11::object&, const pybind11::object&,
                  const pybind11::object&) { (self.*method)(); };
}

void bind_errors(pybind11::module_& m);
void bind_config(pybind11::module_& m);
void bind_snapshot(pybind11::module_& m);
void bind_pager(pybind11::module_& m);
void bind_device(pybind11::module_& m);
void bind_testing(pybind11::module_& m);
void bind_watch(pybind11::module_& m);
void bind_locks(pybind11::module_& m);
void bind_blocks(pybind11::module_& m);
void bind_linear(pybind11::module_& m);
void bind_program(pybind11::module_& m);

}  // namespace kvpager
