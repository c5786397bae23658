// What tells that a model is as it was: the objects it is made of, and the bytes of its weights.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <utility>
#include <vector>

#include "bindings/bind.h"
#include "kvpager/error.h"
#include "snapshot/byte_watch.h"

namespace kvpager {

namespace py = pybind11;

namespace {

using snapshot::ByteWatch;

// A number that CPython gives a dictionary anew at each change, in versions that have one; else 0.
// Of a changed dictionary it tells nothing more, so that the entries are compared.
uint64_t version_of([[maybe_unused]] PyObject* dict) {
#if PY_VERSION_HEX < 0x030C0000
  return reinterpret_cast<PyDictObject*>(dict)->ma_version_tag;
#else
  return 0;
#endif
}

// Dictionaries and lists as they were: the same keys and values, by identity, in the same order.
// The maker of one keeps the containers and all that was in them alive.
class ObjectTable {
 public:
  void add(const py::object& container) {
    if (!PyDict_Check(container.ptr()) && !PyList_Check(container.ptr())) {
      throw py::type_error("container is neither a dict nor a list");
    }
    const bool is_list = PyList_Check(container.ptr()) != 0;
    entries_.push_back({container.ptr(), is_list ? 0 : version_of(container.ptr()), is_list});
    items_.push_back(items_of(container.ptr()));
  }

  void refresh(size_t index) {
    Entry& entry = entries_.at(index);
    items_[index] = items_of(entry.container);
    if (!entry.is_list) entry.version = version_of(entry.container);
  }

  void add_type(const py::object& object) {
    types_.emplace_back(object.ptr(), Py_TYPE(object.ptr()));
  }

  // The objects are all over memory, and a forward has put other things into the caches: they are
  // asked for some entries ahead.
  std::vector<size_t> changed() {
    std::vector<size_t> found;
    for (size_t i = 0; i < entries_.size(); ++i) {
      if (i + kAhead < entries_.size()) prefetch(entries_[i + kAhead].container);
      if (!same(i)) found.push_back(i);
    }
    return found;
  }

  std::vector<size_t> changed_types() const {
    std::vector<size_t> found;
    for (size_t i = 0; i < types_.size(); ++i) {
      if (i + kAhead < types_.size()) prefetch(types_[i + kAhead].first);
      if (Py_TYPE(types_[i].first) != types_[i].second) found.push_back(i);
    }
    return found;
  }

 private:
  static constexpr size_t kAhead = 12;

  struct Entry {
    PyObject* container;
    uint64_t version;
    bool is_list;
  };

  static void prefetch(const PyObject* object) {
    const char* address = reinterpret_cast<const char*>(object);
    __builtin_prefetch(address);
    __builtin_prefetch(address + sizeof(PyDictObject) - 1);
  }

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

  bool same(size_t index) {
    Entry& entry = entries_[index];
    if (!entry.is_list && entry.version != 0 && version_of(entry.container) == entry.version) {
      return true;
    }
    const std::vector<PyObject*>& items = items_[index];
    if (entry.is_list) {
      if (static_cast<size_t>(PyList_GET_SIZE(entry.container)) != items.size()) return false;
      for (size_t i = 0; i < items.size(); ++i) {
        if (PyList_GET_ITEM(entry.container, static_cast<Py_ssize_t>(i)) != items[i]) return false;
      }
      return true;
    }
    if (2 * static_cast<size_t>(PyDict_GET_SIZE(entry.container)) != items.size()) return false;
    PyObject *key, *value;
    size_t i = 0;
    for (Py_ssize_t at = 0; PyDict_Next(entry.container, &at, &key, &value); i += 2) {
      if (items[i] != key || items[i + 1] != value) return false;
    }
    entry.version = version_of(entry.container);
    return true;
  }

  std::vector<Entry> entries_;
  std::vector<std::vector<PyObject*>> items_;  // of each entry; of a dict, keys and values in turn
  std::vector<std::pair<PyObject*, PyTypeObject*>> types_;
};

ByteWatch make_watch(const std::vector<std::pair<uintptr_t, int64_t>>& ranges, int threads,
                     uint64_t seed) {
  std::vector<ByteWatch::Region> regions;
  regions.reserve(ranges.size());
  for (const auto& [address, bytes] : ranges) {
    if (bytes < 0 || (address == 0 && bytes > 0)) {
      throw InvalidArgumentError(str("ranges[", regions.size(), "] is ", bytes, " bytes at ",
                                     address, "; expected 0 or more, at an address"));
    }
    regions.push_back({reinterpret_cast<const std::byte*>(address), bytes});
  }
  // No call guard: pybind11 notes a new object in a table that the GIL guards.
  const py::gil_scoped_release release;
  return ByteWatch(std::move(regions), threads, seed);
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
      .def(py::init(&make_watch), py::arg("ranges"), py::arg("threads"), py::arg("seed"))
      .def(
          "digests",
          [](const ByteWatch& watch, size_t range) {
            if (range >= watch.regions()) throw py::index_error("no such range");
            const std::vector<Hash128> digests = watch.digests(range);
            return py::bytes(reinterpret_cast<const char*>(digests.data()),
                             digests.size() * sizeof(Hash128));
          },
          py::arg("range"),
          "Of a range as it was when this was made: a digest of 16 bytes for each MiB, by the "
          "seed.")
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
