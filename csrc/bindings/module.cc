#include <pybind11/typing.h>

#include "base/processor.h"
#include "bindings/bind.h"
#include "kvpager/attention.h"
#include "kvpager/snapshot.h"

PYBIND11_MODULE(_core, m) {
  m.doc() = "kvpager's native core. Use the kvpager package; this module is its private half.";
  m.attr("__version__") = KVPAGER_VERSION;
  m.attr("KERNEL_VERSION") = kvpager::kKernelVersion;
  m.attr("CHUNKS_PER_SPLIT") = kvpager::kChunksPerSplit;
  m.attr("SNAPSHOT_VERSION") =
      pybind11::make_tuple(kvpager::kSnapshotMajor, kvpager::kSnapshotMinor);
  m.def("isa_name", &kvpager::isa_name, "Instruction-set tier in use: 'base', 'v3' or 'v4'.");
  m.def(
      "processor",
      [] {
        const kvpager::Processor& found = kvpager::processor();
        pybind11::typing::Dict<pybind11::str, int> told;
        told["level"] = found.level;
        told["vnni"] = static_cast<int>(found.vnni);
        told["bf16"] = static_cast<int>(found.bf16);
        told["amx"] = static_cast<int>(found.amx);
        return told;
      },
      "What this processor can run, whatever KVPAGER_ISA says: its level of x86-64 (1, 3 or 4), "
      "and\n"
      "whether it has dot products of bytes and of bfloat16, and AMX tiles of bfloat16.");
  kvpager::bind_errors(m);
  kvpager::bind_linear(m);
  kvpager::bind_program(m);
  kvpager::bind_config(m);
  kvpager::bind_snapshot(m);
  kvpager::bind_pager(m);
  kvpager::bind_device(m);
  kvpager::bind_testing(m);
  kvpager::bind_watch(m);
  kvpager::bind_locks(m);
  kvpager::bind_blocks(m);
}
