// The one place where C++ exceptions become Python ones, with the same names.
#include <pybind11/gil_safe_call_once.h>
#include <pybind11/pybind11.h>

#include <exception>

#include "bindings/bind.h"
#include "kvpager/error.h"

namespace kvpager {

namespace py = pybind11;

namespace {

// CorruptSnapshotError says which chunk, layer and positions are damaged; None: all of the file.
void bind_corrupt_snapshot(py::module_& m, const py::object& base) {
  PYBIND11_CONSTINIT static py::gil_safe_call_once_and_store<py::object> storage;
  const py::object& type =
      storage
          .call_once_and_store_result([&]() -> py::object {
            return py::exception<CorruptSnapshotError>(m, "CorruptSnapshotError", base);
          })
          .get_stored();
  type.attr("chunk") = py::none();
  type.attr("layer") = py::none();
  type.attr("start") = py::none();
  type.attr("stop") = py::none();
  py::register_exception_translator([](std::exception_ptr p) {
    try {
      if (p) std::rethrow_exception(p);
    } catch (const CorruptSnapshotError& e) {
      const py::object& raised = storage.get_stored();
      const py::object error = raised(e.what());
      if (e.layer >= 0) error.attr("layer") = e.layer;
      if (e.chunk >= 0) {
        error.attr("chunk") = e.chunk;
        error.attr("start") = e.start;
        error.attr("stop") = e.stop;
      }
      PyErr_SetObject(raised.ptr(), error.ptr());
    }
  });
}

}  // namespace

void bind_errors(py::module_& m) {
  // Translators are tried last registered first: the base comes first, so that it only sees what no
  // other took.
  const auto& base = py::register_exception<PagerError>(m, "PagerError");
  py::register_exception<CapacityError>(m, "CapacityError", base);
  py::register_exception<InvalidArgumentError>(m, "InvalidArgumentError",
                                               py::make_tuple(base, py::handle(PyExc_ValueError)));
  py::register_exception<NonFiniteError>(m, "NonFiniteError", base);
  py::register_exception<StorageError>(m, "StorageError",
                                       py::make_tuple(base, py::handle(PyExc_OSError)));
  py::register_exception<DeviceError>(m, "DeviceError", base);
  bind_corrupt_snapshot(m, base);
  py::register_exception<UnsupportedVersionError>(m, "UnsupportedVersionError", base);
  py::register_exception<FingerprintMismatchError>(m, "FingerprintMismatchError", base);
  py::register_exception<InvariantError>(m, "InvariantError", base);
}

}  // namespace kvpager
