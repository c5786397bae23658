// Devices: what was found of them, and what attention one of them would run.
#include "device/device.h"

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <pybind11/typing.h>

#include "bindings/bind.h"
#include "bindings/names.h"
#include "kvpager/error.h"
#include "kvpager/pager.h"

namespace kvpager {

namespace py = pybind11;

namespace {

py::typing::Dict<py::str, py::object> probe(const std::string& kind) {
  device::Report report;
  {
    const py::gil_scoped_release release;
    report = device::probe(kind);
  }
  py::list devices;
  for (const device::Info& info : report.devices) {
    py::dict d;
    d["name"] = std::string(info.name);
    d["capability"] = str(info.major, ".", info.minor);
    d["multiprocessors"] = info.multiprocessors;
    d["memory_bytes"] = info.memory_bytes;
    d["driver"] = info.driver;
    d["runtime"] = info.runtime;
    devices.append(d);
  }
  py::typing::Dict<py::str, py::object> d;
  d["kind"] = report.kind;
  d["plugin"] = report.plugin;
  d["why_not"] = report.why_not;
  d["devices"] = devices;
  return d;
}

}  // namespace

void bind_device(py::module_& m) {
  m.def("probe_device", &probe, py::arg("kind"),
        "What was found of \"cuda\" or \"shim\": kind, plugin (a path), why_not, devices.");
  m.def(
      "attention_of",
      [](const PagerOptions& options, const std::string& q_dtype) {
        const PagerOptions copied = options;  // Python may set them while the GIL is free
        const DType dtype = dtype_from_name("q_dtype", q_dtype);
        AttentionKind kind;
        {
          const py::gil_scoped_release release;
          kind = attention_of(copied, dtype);
        }
        return std::make_pair(kind.name, kind.version);
      },
      py::arg("options"), py::arg("q_dtype"),
      "What a pager of these options runs for queries of a dtype, \"reference\" or \"tensor\", and "
      "its "
      "version.");
  m.def("total_device_bytes", &device::total_device_bytes,
        "Bytes of device memory this process holds, counted where they are allocated.");
  m.def("total_pinned_bytes", &device::total_pinned_bytes, "The same of pinned host memory.");
}

}  // namespace kvpager
