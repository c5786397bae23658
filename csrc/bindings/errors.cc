// The one place where C++ exceptions become Python ones, with the same names.
#include <pybind11/pybind11.h>

#include "bindings/bind.h"
#include "kvpager/error.h"

namespace kvpager {

namespace py = pybind11;

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
  py::register_exception<CorruptSnapshotError>(m, "CorruptSnapshotError", base);
  py::register_exception<UnsupportedVersionError>(m, "UnsupportedVersionError", base);
  py::register_exception<FingerprintMismatchError>(m, "FingerprintMismatchError", base);
  py::register_exception<InvariantError>(m, "InvariantError", base);
}

}  // namespace kvpager
