#include "bindings/tensor.h"

#include <optional>

#include "bindings/dlpack.h"
#include "kvpager/error.h"

namespace kvpager {

namespace py = pybind11;

namespace {

constexpr int64_t kMostRows = int64_t{1} << 31;
constexpr int64_t kMostHeads = 65536;

// torch's table of C functions: four tensors cross in less than a microsecond, without capsules.
const dlpack::ExchangeApi* exchange_api(py::handle tensor) {
  struct Known {
    PyTypeObject* type = nullptr;
    const dlpack::ExchangeApi* api = nullptr;
  };
  static Known known[2];  // torch.Tensor and Parameter, mostly
  static size_t oldest = 0;
  PyTypeObject* type = Py_TYPE(tensor.ptr());
  for (const Known& one : known) {
    if (type == one.type) return one.api;
  }
  const dlpack::ExchangeApi* api = nullptr;
  const py::object capsule =
      py::getattr(reinterpret_cast<PyObject*>(type), "__dlpack_c_exchange_api__", py::none());
  if (PyCapsule_IsValid(capsule.ptr(), "dlpack_exchange_api")) {
    api = static_cast<const dlpack::ExchangeApi*>(
        PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api"));
    if (api->version.major != dlpack::kMajorVersion || api->tensor_from_object == nullptr) {
      api = nullptr;
    }
  }
  Py_INCREF(type);  // a type object that went away could be mistaken for a new one at its address
  Known& place = known[oldest];
  oldest = (oldest + 1) % 2;
  Py_XDECREF(reinterpret_cast<PyObject*>(place.type));
  place = {type, api};
  return api;
}

// As torch calls it.
std::string device_name(int32_t type, int32_t ordinal) {
  switch (type) {
    case dlpack::kCpu:
      return "cpu";
    case dlpack::kCuda:
      return str("cuda:", ordinal);
    case dlpack::kCudaHost:
      return "pinned memory of the CPU";
    default:
      return str("DLPack device ", type, ":", ordinal);
  }
}

void require_place(const char* name, const dlpack::Device& device, const DevicePlace& place) {
  // Pinned memory is memory of the CPU, of whatever device it was pinned for.
  const bool host = device.type == dlpack::kCpu || device.type == dlpack::kCudaHost;
  if (place.type == dlpack::kCpu ? host : device.type == place.type && device.id == place.ordinal) {
    return;
  }
  throw InvalidArgumentError(str(name, ": a tensor on ", device_name(device.type, device.id),
                                 ", expected one on ", device_name(place.type, place.ordinal),
                                 ", where this pager is (", place.name, ")"));
}

TensorView checked_view(const char* name, const dlpack::Tensor& t, const DevicePlace& place) {
  require_place(name, t.device, place);
  if (t.ndim != 3) {
    throw InvalidArgumentError(
        str(name, ": ", t.ndim, " dimensions, expected 3 (rows, heads, head_dim)"));
  }
  TensorView view;
  const std::optional<DType> dtype = float_dtype(t.dtype);
  if (!dtype) {
    throw InvalidArgumentError(str(name, ": element type code ", static_cast<int>(t.dtype.code),
                                   " with ", static_cast<int>(t.dtype.bits),
                                   " bits, expected float32, float16 or bfloat16"));
  }
  view.dtype = *dtype;
  view.rows = t.shape[0];
  view.heads = t.shape[1];
  view.dim = t.shape[2];
  if (view.rows > kMostRows || view.heads > kMostHeads || view.dim > kMostHeads) {
    throw InvalidArgumentError(str(name, ": shape [", view.rows, ", ", view.heads, ", ", view.dim,
                                   "], expected at most ", kMostRows, " rows, and heads and a ",
                                   "head_dim of at most ", kMostHeads));
  }
  view.row_stride = t.strides == nullptr ? view.heads * view.dim : t.strides[0];
  view.head_stride = t.strides == nullptr ? view.dim : t.strides[1];
  if (t.strides != nullptr && t.strides[2] != 1 && view.dim != 1) {
    throw InvalidArgumentError(str(name, ": stride ", t.strides[2],
                                   " in the last dimension, expected 1; pass a contiguous tensor"));
  }
  view.data = static_cast<char*>(t.data) + t.byte_offset;
  if (t.data == nullptr && view.rows * view.heads * view.dim > 0) {
    throw InvalidArgumentError(str(name, ": the tensor has no memory (a fake or meta tensor?)"));
  }
  if (reinterpret_cast<uintptr_t>(view.data) % static_cast<uintptr_t>(dtype_bytes(view.dtype))) {
    throw InvalidArgumentError(str(name, ": its elements of ", dtype_bytes(view.dtype),
                                   " bytes are not aligned to their size; pass a copy"));
  }
  return view;
}

// Whether a torch tensor has its numbers negated when they are read, of which DLPack knows nothing.
bool is_negated(py::handle tensor) {
  static PyObject* const name = PyUnicode_InternFromString("is_neg");
  const auto negated =
      py::reinterpret_steal<py::object>(PyObject_CallMethodNoArgs(tensor.ptr(), name));
  if (!negated) throw py::error_already_set();
  return negated.is(py::bool_(true));
}

// False for what is no torch tensor, has no memory, or has other numbers there than it reads.
bool borrow(py::handle tensor, dlpack::Tensor& t) {
  const dlpack::ExchangeApi* api = exchange_api(tensor);
  if (api == nullptr || is_negated(tensor)) return false;
  if (api->tensor_from_object(tensor.ptr(), &t) == 0) return true;
  PyErr_Clear();  // of a device without memory, such as meta
  return false;
}

}  // namespace

std::optional<Integers> host_integers(py::handle tensor) {
  dlpack::Tensor t;
  if (!borrow(tensor, t) || t.device.type != dlpack::kCpu) return std::nullopt;
  if (t.dtype.code != dlpack::kInt || t.dtype.bits != 64 || t.dtype.lanes != 1) return std::nullopt;
  Integers integers;
  for (int32_t i = t.ndim - 1; i >= 0; --i) {
    if (t.strides != nullptr && t.shape[i] != 1 && t.strides[i] != integers.count) {
      return std::nullopt;
    }
    integers.count *= t.shape[i];
  }
  integers.data =
      reinterpret_cast<const int64_t*>(static_cast<const char*>(t.data) + t.byte_offset);
  if (t.data == nullptr && integers.count > 0) return std::nullopt;
  return integers;
}

std::optional<Matrix> matrix_at(const DevicePlace& place, py::handle tensor) {
  dlpack::Tensor t;
  if (!borrow(tensor, t)) return std::nullopt;
  const bool there =
      t.device.type == place.type && (place.type == dlpack::kCpu || t.device.id == place.ordinal);
  return there ? matrix_of(t) : std::nullopt;
}

BorrowedTensor::BorrowedTensor(const char* name, py::handle tensor, const DevicePlace& place,
                               bool writable) {
  if (const dlpack::ExchangeApi* api = exchange_api(tensor)) {
    dlpack::Tensor t;
    if (is_negated(tensor)) {
      throw InvalidArgumentError(str(
          name, ": a tensor that torch negates when it is read (is_neg), as the imaginary part ",
          "of a conjugate is; pass tensor.resolve_neg()"));
    }
    if (api->tensor_from_object(tensor.ptr(), &t) != 0) throw py::error_already_set();
    view_ = checked_view(name, t, place);
    return;
  }
  if (!py::hasattr(tensor, "__dlpack__")) {
    throw InvalidArgumentError(str(name, ": ", py::cast<std::string>(py::str(py::type::of(tensor))),
                                   ", expected a torch tensor or a numpy array"));
  }
  if (writable && py::hasattr(tensor, "flags") &&
      !py::cast<bool>(tensor.attr("flags").attr("writeable"))) {
    throw InvalidArgumentError(str(name, ": the array is read-only"));
  }
  py::object capsule;
  try {
    capsule = tensor.attr("__dlpack__")();
  } catch (py::error_already_set& error) {
    if (!error.matches(PyExc_BufferError)) throw;
    throw InvalidArgumentError(str(name, ": ", error.what()));
  }
  owned_ = static_cast<dlpack::ManagedTensor*>(PyCapsule_GetPointer(capsule.ptr(), "dltensor"));
  if (owned_ == nullptr) throw py::error_already_set();
  PyCapsule_SetName(capsule.ptr(), "used_dltensor");
  try {
    view_ = checked_view(name, owned_->tensor, place);
  } catch (...) {
    if (owned_->deleter != nullptr) owned_->deleter(owned_);
    throw;
  }
}

BorrowedTensor::~BorrowedTensor() {
  if (owned_ != nullptr && owned_->deleter != nullptr) owned_->deleter(owned_);
}

}  // namespace kvpager
