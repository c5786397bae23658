// For tests: the fault seam and the allocator's own count.
#include <pybind11/pybind11.h>

#include "bindings/bind.h"
#include "kvpager/fault.h"
#include "memory/slab.h"

namespace kvpager {

namespace py = pybind11;

void bind_testing(py::module_& m) {
  m.def("arm_fault", &fault::arm, py::arg("point"), py::arg("after"), py::arg("error_number"),
        "Makes the `after`-th next visit of a named fault point fail once with this errno.");
  m.def("disarm_faults", &fault::disarm_all, "Takes back every armed fault.");
  m.def("total_mapped_bytes", &total_mapped_bytes,
        "Bytes of all live slabs of this process, counted where they are mapped.");
#ifdef KVPAGER_CHECK_INVARIANTS
  m.attr("CHECKS_INVARIANTS") = true;
#else
  m.attr("CHECKS_INVARIANTS") = false;
#endif
}

}  // namespace kvpager
