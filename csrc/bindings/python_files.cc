#include "bindings/python_files.h"

#include <cstring>
#include <memory>
#include <string>
#include <utility>

#include "kvpager/error.h"

namespace kvpager {

namespace py = pybind11;

namespace {

// An object of Python whose last owner may be any thread.
class Owned {
 public:
  explicit Owned(py::object object) : object_(std::move(object)) {}
  ~Owned() {
    const py::gil_scoped_acquire gil;
    object_ = py::object();
  }
  Owned(const Owned&) = delete;
  Owned& operator=(const Owned&) = delete;
  const py::object& operator*() const { return object_; }

 private:
  py::object object_;
};

// The contiguous bytes of an object; of one that has none, no bytes at no address.
class View {
 public:
  explicit View(const py::object& object) {
    if (PyObject_GetBuffer(object.ptr(), &view_, PyBUF_SIMPLE) == 0) return;
    PyErr_Clear();
    view_ = Py_buffer{};
  }
  ~View() { PyBuffer_Release(&view_); }
  View(const View&) = delete;
  View& operator=(const View&) = delete;
  const Py_buffer* operator->() const { return &view_; }

 private:
  Py_buffer view_{};
};

// TypeError if there is none.
py::object attribute(const py::object& source, const char* name, const char* what) {
  if (!py::hasattr(source, name)) {
    throw py::type_error(
        str(what, " has no ", name, ": ", py::repr(py::type::of(source)).cast<std::string>()));
  }
  return source.attr(name);
}

uint64_t size_of(const std::string& path, const py::object& source) {
  const py::object size = attribute(source, "size", "what the opener returned");
  const auto bytes = py::isinstance<py::int_>(size) ? PyLong_AsLongLong(size.ptr()) : -1;
  if (PyErr_Occurred() != nullptr) PyErr_Clear();
  if (bytes < 0) {
    throw InvalidArgumentError(str(path, ": size is ", py::repr(size).cast<std::string>(),
                                   ", expected a number of bytes"));
  }
  return static_cast<uint64_t>(bytes);
}

// A view of native memory for a call of Python. Nothing may keep it: of kvpager's own classes none does.
py::memoryview lent(const std::byte* data, uint64_t bytes) {
  return py::memoryview::from_memory(static_cast<const void*>(data),
                                     static_cast<py::ssize_t>(bytes));
}
py::memoryview lent(std::byte* data, uint64_t bytes) {
  return py::memoryview::from_memory(static_cast<void*>(data), static_cast<py::ssize_t>(bytes));
}

// Calls Python. Its OSError becomes StorageError and its CorruptSnapshotError that of C++, with
// `words()` before their messages; others, KeyboardInterrupt among them, pass. REQUIRES: the GIL.
template <class Call, class Words>
auto call_python(const Call& call, const Words& words) {
  try {
    return call();
  } catch (py::error_already_set& e) {
    const auto message = [&] { return str(words(), ": ", py::str(e.value()).cast<std::string>()); };
    if (e.matches(py::module_::import("kvpager._core").attr("CorruptSnapshotError"))) {
      throw CorruptSnapshotError(message());
    }
    if (e.matches(PyExc_OSError)) throw StorageError(message());
    throw;
  }
}

class PythonRanges : public ByteRanges {
 public:
  // REQUIRES: the GIL.
  PythonRanges(std::string path, const py::object& source)
      : path_(std::move(path)),
        bytes_(size_of(path_, source)),
        read_(attribute(source, "read", "what the opener returned")),
        read_into_(py::getattr(source, "_read_into", py::none())),
        will_need_(attribute(source, "will_need", "what the opener returned")) {}

  const std::string& path() const override { return path_; }
  uint64_t bytes() const override { return bytes_; }

  void read(std::byte* out, uint64_t bytes, uint64_t offset,
            const std::function<std::string()>& what) const override {
    const py::gil_scoped_acquire gil;
    const auto words = [&] { return str(path_, ": cannot read ", what(), " at offset ", offset); };
    call_python(
        [&] {
          if (!(*read_into_).is_none())
            return static_cast<void>((*read_into_)(offset, lent(out, bytes)));
          const py::object data = (*read_)(offset, bytes);
          const View view(data);
          if (view->buf == nullptr || static_cast<uint64_t>(view->len) != bytes) {
            throw StorageError(str(words(), ": read(", offset, ", ", bytes, ") returned ",
                                   py::repr(py::type::of(data)).cast<std::string>(), " of ",
                                   view->len, " bytes, expected ", bytes, " contiguous bytes"));
          }
          std::memcpy(out, view->buf, static_cast<size_t>(bytes));
        },
        words);
  }

  void will_need(uint64_t bytes, uint64_t offset) const noexcept override {
    const py::gil_scoped_acquire gil;
    try {
      (*will_need_)(offset, bytes);
    } catch (py::error_already_set& e) {
      e.discard_as_unraisable(path_.c_str());
    }
  }

 private:
  std::string path_;
  uint64_t bytes_;
  Owned read_, read_into_, will_need_;
};

class PythonCipher : public FileCipher {
 public:
  // REQUIRES: the GIL.
  explicit PythonCipher(const py::object& cipher)
      : block_bytes_(attribute(cipher, "block_bytes", "cipher").cast<uint64_t>()),
        header_bytes_(attribute(cipher, "header_bytes", "cipher").cast<uint64_t>()),
        tag_bytes_(attribute(cipher, "tag_bytes", "cipher").cast<uint64_t>()),
        header_(attribute(cipher, "header", "cipher")),
        encrypt_(attribute(cipher, "encrypt", "cipher")) {}

  uint64_t block_bytes() const override { return block_bytes_; }
  uint64_t header_bytes() const override { return header_bytes_; }
  uint64_t tag_bytes() const override { return tag_bytes_; }

  std::string header(uint64_t plain_bytes) override {
    const py::gil_scoped_acquire gil;
    std::string header = (*header_)(plain_bytes).cast<std::string>();
    KVPAGER_REQUIRE(header.size() == header_bytes_);
    return header;
  }

  void encrypt(uint64_t first, const std::byte* plain, uint64_t bytes, std::byte* out) override {
    const py::gil_scoped_acquire gil;
    const uint64_t blocks = first == 0 ? 1 : (bytes + block_bytes_ - 1) / block_bytes_;
    (*encrypt_)(first, lent(plain, bytes), lent(out, bytes + blocks * tag_bytes_));
  }

 private:
  uint64_t block_bytes_, header_bytes_, tag_bytes_;
  Owned header_, encrypt_;
};

}  // namespace

std::shared_ptr<FileCipher> cipher_of(const py::object& cipher) {
  return cipher.is_none() ? nullptr : std::make_shared<PythonCipher>(cipher);
}

RangesOpener opener_of(const PythonOpener& opener) {
  if (!opener) return {};
  const auto open = std::make_shared<const Owned>(*opener);
  return [open](const std::string& path) -> std::shared_ptr<const ByteRanges> {
    const py::gil_scoped_acquire gil;
    return call_python(
        [&]() -> std::shared_ptr<const ByteRanges> {
          return std::make_shared<PythonRanges>(path, (**open)(path));
        },
        [&] { return str(path, ": cannot open the snapshot"); });
  };
}

}  // namespace kvpager
