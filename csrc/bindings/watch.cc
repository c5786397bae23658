// What tells that a model is as it was: the objects it is made of, and the bytes of its weights.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <utility>
#include <vector>

#include "bindings/bind.h"
#include "snapshot/byte_watch.h"

namespace kvpager {

namespace py = pybind11;

namespace {

using snapshot::ByteWatch;

// Dictionaries and lists as they were: the same keys and values, by identity, in the same order.
// Whoever makes one keeps the containers and all that was in them alive.
class ObjectTable {
 public:
  void add(const py::object& container) {
    if (!PyDict_Check(container.ptr()) && !PyList_Check(container.ptr())) {
      throw py::type_error("container is neither a dict nor a list");
    }
    entries_.push_back(
        {container.ptr(), PyList_Check(container.ptr()) != 0, items_of(container.ptr())});
  }

  void refresh(size_t index) { entries_.at(index).items = items_of(entries_.at(index).container); }

  void add_type(const py::object& object) {
    types_.emplace_back(object.ptr(), Py_TYPE(object.ptr()));
  }

  std::vector<size_t> changed() const {
    std::vector<size_t> found;
    for (size_t i = 0; i < entries_.size(); ++i) {
      if (!same(entries_[i])) found.push_back(i);
    }
    return found;
  }

  std::vector<size_t> changed_types() const {
    std::vector<size_t> found;
    for (size_t i = 0; i < types_.size(); ++i) {
      if (Py_TYPE(types_[i].first) != types_[i].second) found.push_back(i);
    }
    return found;
  }

 private:
  struct Entry {
    PyObject* container;
    bool is_list;
    std::vector<PyObject*> items;  // of a dict, keys and values in turn
  };

  static std::vector<PyObject*> items_of(PyObject* container) {
    std::vector<PyObject*> items;
    if (PyList_Check(container)) {
      for (Py_ssize_t i = 0; i < PyList_GET_SIZE(container); ++i) {
        items.push_back(PyList_GET_ITEM(container, i));
      }
      return items;
    }
    PyObject *key, *value;
    for (Py_ssize_t at = 0; PyDict_Next(container, &at, &key, &value);) {
      items.push_back(key);
      items.push_back(value);
    }
    return items;
  }

  static bool same(const Entry& entry) {
    const std::vector<PyObject*>& items = entry.items;
    if (entry.is_list) {
      if (static_cast<size_t>(PyList_GET_SIZE(entry.container)) != items.size()) return false;
      for (size_t i = 0; i < items.size(); ++i) {
        if (PyList_GET_ITEM(entry.container, static_cast<Py_ssize_t>(i)) != items[i]) return false;
      }
      return true;
    }
    if (2 * static_cast<size_t>(PyDict_GET_SIZE(entry.container)) != items.size()) return false;
    if (items.empty()) return true;  // most are: hooks that nobody has added
    PyObject *key, *value;
    size_t i = 0;
    for (Py_ssize_t at = 0; PyDict_Next(entry.container, &at, &key, &value); i += 2) {
      if (items[i] != key || items[i + 1] != value) return false;
    }
    return true;
  }

  std::vector<Entry> entries_;
  std::vector<std::pair<PyObject*, PyTypeObject*>> types_;
};

ByteWatch make_watch(const std::vector<std::pair<uintptr_t, int64_t>>& ranges, int threads) {
  std::vector<ByteWatch::Region> regions;
  regions.reserve(ranges.size());
  for (const auto& [address, bytes] : ranges) {
    regions.push_back({reinterpret_cast<const std::byte*>(address), bytes});
  }
  return ByteWatch(std::move(regions), threads);
}

}  // namespace

void bind_watch(py::module_& m) {
  py::class_<ObjectTable>(m, "ObjectTable",
                          "Dictionaries and lists as they were. Whoever makes one keeps them, and "
                          "all that was in them, alive.")
      .def(py::init<>())
      .def("add", &ObjectTable::add, py::arg("container"), "Remembers what is in it now.")
      .def("refresh", &ObjectTable::refresh, py::arg("index"), "Remembers it anew.")
      .def("add_type", &ObjectTable::add_type, py::arg("object"), "Remembers its type.")
      .def("changed", &ObjectTable::changed,
           "Numbers of the containers whose keys or values are other objects, or in another order.")
      .def("changed_types", &ObjectTable::changed_types,
           "Numbers of the objects that have another type.");
  py::class_<ByteWatch>(m, "ByteWatch",
                        "Whether memory still holds what it held: ranges of (address, bytes) that "
                        "whoever makes one keeps readable.")
      .def(py::init(&make_watch), py::arg("ranges"), py::arg("threads"),
           py::call_guard<py::gil_scoped_release>())
      .def("sample", &ByteWatch::sample, py::arg("blocks"),
           "Reads so many blocks of each range again, at random places; returns the number of a "
           "range that was found changed, or -1.")
      .def("sweep", &ByteWatch::sweep, py::arg("bytes"),
           "Reads about so many bytes again from where the last call ended; returns likewise.")
      .def_property_readonly("total_bytes", &ByteWatch::total_bytes, "Of all ranges.")
      .def_property_readonly_static(
          "block_bytes", [](const py::object&) { return ByteWatch::kBlockBytes; },
          "Bytes that are read together.");
}

}  // namespace kvpager
