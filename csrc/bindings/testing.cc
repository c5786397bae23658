// For tests: the fault seam, where this build has it, and the allocator's own count.
#include <pybind11/pybind11.h>

#include "base/fault.h"
#include "bindings/bind.h"
#include "memory/slab.h"

namespace kvpager {

namespace py = pybind11;

void bind_testing(py::module_& m) {
#ifdef KVPAGER_TEST_SEAMS
  m.def("arm_fault", &fault::arm, py::arg("point"), py::arg("after"), py::arg("error_number"),
        "Makes the `after`-th next visit of a named fault point fail once with this errno. Only in "
        "builds for tests, as is disarm_faults.");
  m.def("disarm_faults", &fault::disarm_all, "Takes back every armed fault.");
#endif
  m.def("total_mapped_bytes", &total_mapped_bytes,
        "Bytes of all live slabs of this process, counted where they are mapped.");
#ifdef KVPAGER_CHECK_INVARIANTS
  m.attr("CHECKS_INVARIANTS") = true;
#else
  m.attr("CHECKS_INVARIANTS") = false;
#endif
}

}  // namespace kvpager
