// What each file of the bindings adds to the module. Bindings convert and check types; they decide
// nothing.
#pragma once

#include <pybind11/pybind11.h>

namespace kvpager {

void bind_errors(pybind11::module_& m);
void bind_config(pybind11::module_& m);
void bind_snapshot(pybind11::module_& m);
void bind_pager(pybind11::module_& m);
void bind_device(pybind11::module_& m);
void bind_testing(pybind11::module_& m);
void bind_watch(pybind11::module_& m);
void bind_locks(pybind11::module_& m);
void bind_linear(pybind11::module_& m);
void bind_program(pybind11::module_& m);

}  // namespace kvpager
