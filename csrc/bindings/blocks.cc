// Reads of a chunk store, without the interpreter's lock from the first block to the last.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <limits>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "bindings/bind.h"
#include "kvpager/error.h"
#include "snapshot/block_reader.h"

namespace kvpager {

namespace py = pybind11;

namespace {

using snapshot::BlockRead;
using snapshot::BlockResult;
using snapshot::ReadGate;

// File, start, binding, check, destination.
using PythonBlock = std::tuple<int, int64_t, py::bytes, py::bytes, py::buffer>;

py::buffer_info requested(const py::buffer& buffer, bool writable) {
  try {
    return buffer.request(writable);
  } catch (const py::error_already_set& e) {
    if (!e.matches(PyExc_BufferError)) throw;
    throw InvalidArgumentError(py::str(e.value()).cast<std::string>());
  }
}

py::buffer_info contiguous(const py::buffer& buffer, bool writable) {
  py::buffer_info info = requested(buffer, writable);
  if (PyBuffer_IsContiguous(info.view(), 'C') == 0) {
    throw InvalidArgumentError("a buffer is not contiguous");
  }
  return info;
}

size_t bytes_of(const py::buffer_info& info) {
  return static_cast<size_t>(info.size * info.itemsize);
}

const char* word_of(BlockResult result) {
  switch (result) {
    case BlockResult::kHit:
      return "hit";
    case BlockResult::kMiss:
      return "miss";
    case BlockResult::kDamaged:
      return "damaged";
    case BlockResult::kUnreadable:
      return "unreadable";
  }
  return "";
}

const char* word_of(ReadGate::State state) {
  switch (state) {
    case ReadGate::State::kOpen:
      return "open";
    case ReadGate::State::kAbandoned:
      return "abandoned";
    case ReadGate::State::kLate:
      return "late";
  }
  return "";
}

std::vector<const char*> read_blocks(ReadGate& gate, const std::vector<PythonBlock>& given) {
  std::vector<py::buffer_info> destinations;
  std::vector<BlockRead> blocks;
  for (const auto& [file, start, binding, check, into] : given) {
    const py::buffer_info& info = destinations.emplace_back(contiguous(into, true));
    blocks.push_back(
        {file, start, binding, check, static_cast<std::byte*>(info.ptr), bytes_of(info)});
  }
  std::vector<BlockResult> results;
  {
    const py::gil_scoped_release release;
    results = snapshot::read_blocks(gate, blocks);
  }
  std::vector<const char*> words;
  for (const BlockResult result : results) words.push_back(word_of(result));
  return words;
}

bool copy(ReadGate& gate, const py::buffer& into, const py::buffer& data) {
  const py::buffer_info to = contiguous(into, true), from = contiguous(data, false);
  if (bytes_of(to) != bytes_of(from)) {
    throw InvalidArgumentError(str("into has ", bytes_of(to), " bytes, expected ", bytes_of(from)));
  }
  const py::gil_scoped_release release;
  return gate.copy(static_cast<std::byte*>(to.ptr), static_cast<const std::byte*>(from.ptr),
                   bytes_of(from));
}

py::bytes block_check(const py::bytes& binding, const py::buffer& data) {
  const py::buffer_info info = contiguous(data, false);
  snapshot::BlockCheck check;
  {
    const py::gil_scoped_release release;
    check = snapshot::block_check(binding, static_cast<const std::byte*>(info.ptr), bytes_of(info));
  }
  return {reinterpret_cast<const char*>(check.data()), check.size()};
}

}  // namespace

void bind_blocks(py::module_& m) {
  py::class_<ReadGate>(m, "ReadGate",
                       "Whether reads may still write to their destinations. Once closed it stays "
                       "closed.")
      .def(py::init([](std::optional<double> seconds) {
             return std::make_unique<ReadGate>(
                 seconds.value_or(std::numeric_limits<double>::infinity()));
           }),
           py::arg("seconds") = py::none(), "Closes by itself after `seconds`; None: never.")
      .def("close", &ReadGate::close, py::call_guard<py::gil_scoped_release>(),
           "Closes the gate; returns when no copy is running.")
      .def("is_open", &ReadGate::is_open)
      .def("copy", &copy, py::arg("into"), py::arg("data"),
           "Copies a block; False, and nothing is written, if the gate is closed.")
      .def_property_readonly(
          "state", [](const ReadGate& gate) { return word_of(gate.state()); },
          "What `is_open` and copies found last: \"open\", \"abandoned\" or \"late\".");
  m.def("read_blocks", &read_blocks, py::arg("gate"), py::arg("blocks"),
        "Reads blocks one after the other and copies those whose check is right.\n\n"
        "Args:\n"
        "    blocks: file, start, binding, check and destination of each; the files stay open "
        "meanwhile.\n\n"
        "Returns:\n"
        "    For each \"hit\", \"miss\" (the gate was closed), \"damaged\" or \"unreadable\".");
  m.def("block_check", &block_check, py::arg("binding"), py::arg("data"),
        "The check of a block: 16 bytes.");
}

}  // namespace kvpager
