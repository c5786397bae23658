#include "kvpager/snapshot.h"

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include "bindings/bind.h"

namespace kvpager {

namespace py = pybind11;

void bind_snapshot(py::module_& m) {
  py::class_<SnapshotReader, std::shared_ptr<SnapshotReader>>(
      m, "SnapshotReader", "An opened snapshot file: metadata verified, payload read on demand.")
      .def_static("open", &SnapshotReader::open, py::arg("path"),
                  py::call_guard<py::gil_scoped_release>())
      .def_property_readonly("path", [](const SnapshotReader& r) { return r.path(); })
      .def_property_readonly("layout", [](const SnapshotReader& r) { return r.meta().layout; })
      .def_property_readonly("scorer", [](const SnapshotReader& r) { return r.meta().scorer; })
      .def_property_readonly("fingerprint",
                             [](const SnapshotReader& r) { return r.meta().fingerprint; })
      .def_property_readonly("session", [](const SnapshotReader& r) { return r.meta().session; })
      .def_property_readonly("tokens",
                             [](const SnapshotReader& r) {
                               const auto& tokens = r.meta().tokens;
                               return py::array_t<TokenId>(static_cast<py::ssize_t>(tokens.size()),
                                                           tokens.data());
                             })
      .def_property_readonly("chunks",
                             [](const SnapshotReader& r) { return r.meta().chunks.size(); })
      .def_property_readonly("sealed_chunks",
                             [](const SnapshotReader& r) { return r.meta().sealed_chunks(); })
      .def_property_readonly("payload_bytes_read", &SnapshotReader::payload_bytes_read)
      .def_property_readonly("logical_digest", [](const SnapshotReader& r) {
        const Hash128 h = r.logical_digest();
        char text[33];
        std::snprintf(text, sizeof text, "%016llx%016llx", static_cast<unsigned long long>(h.high),
                      static_cast<unsigned long long>(h.low));
        return std::string(text);
      });
}

}  // namespace kvpager
