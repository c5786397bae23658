#include "kvpager/linear.h"

#include <dlfcn.h>
#include <pybind11/stl.h>

#include <memory>
#include <string>

#include "bindings/bind.h"
#include "bindings/tensor.h"
#include "device/device.h"
#include "kvpager/error.h"
#include "kvpager/thread_pool.h"

namespace kvpager {

namespace py = pybind11;

namespace {

constexpr int64_t kMostExperts = int64_t{1} << 20;  // of one layer

using OptionalCopies = std::optional<std::shared_ptr<CompressedWeights>>;

const CompressedWeights* address(const OptionalCopies& copies) {
  return copies ? copies->get() : nullptr;
}

// Nothing where a tensor is elsewhere, dtypes differ, shapes do not fit, or what is written is read too.
std::optional<LinearParams> product_of_tensors(const DevicePlace& place, py::handle x,
                                               py::handle weight, py::handle bias, py::handle out) {
  const std::optional<Matrix> from = matrix_at(place, x), factors = matrix_at(place, weight),
                              to = matrix_at(place, out);
  if (!from || !factors || !to) return std::nullopt;
  LinearParams params;
  params.dtype = factors->dtype;
  if (from->dtype != params.dtype || to->dtype != params.dtype) return std::nullopt;
  if (from->columns != factors->columns || to->columns != factors->rows || from->rows != to->rows) {
    return std::nullopt;
  }
  if (!to->rows_apart() || may_overlap(*to, *from) || may_overlap(*to, *factors)) {
    return std::nullopt;
  }
  if (!bias.is_none()) {
    const std::optional<Matrix> added = matrix_at(place, bias);
    if (!added || added->dtype != params.dtype || added->rows != 1 ||
        added->columns != factors->rows || may_overlap(*to, *added)) {
      return std::nullopt;
    }
    params.bias = added->data;
  }
  params.rows = from->rows;
  params.outputs = factors->rows;
  params.depth = factors->columns;
  params.x = from->data;
  params.x_stride = from->stride;
  params.w = factors->data;
  params.w_stride = factors->stride;
  params.y = to->data;
  params.y_stride = to->stride;
  return params;
}

bool multiply_in_workers(ThreadPool& workers, py::handle x, py::handle weight, py::handle bias,
                         py::handle out, const OptionalCopies& compressed) {
  static const DevicePlace host;
  const std::optional<LinearParams> params = product_of_tensors(host, x, weight, bias, out);
  if (!params) return false;
  if (params->rows == 0 || params->outputs == 0) return true;
  const py::gil_scoped_release release;
  linear(*params, workers, address(compressed));
  return true;
}

bool multiply_by_experts(ThreadPool& workers, py::handle x, py::handle weight, py::handle bias,
                         py::handle chosen, py::handle out, const OptionalCopies& compressed) {
  const std::optional<Matrix> from = host_matrix(x), factors = host_matrix(weight),
                              to = host_matrix(out);
  const std::optional<Integers> experts = host_integers(chosen);
  const int64_t outputs = to ? to->columns : 0;
  if (!from || !factors || !experts || outputs == 0 || factors->rows % outputs != 0) return false;
  ExpertsParams params;
  LinearParams& all = params.all;
  all = {factors->dtype, to->rows,        outputs, factors->columns, from->data, from->stride,
         factors->data,  factors->stride, nullptr, to->data,         to->stride};
  params.experts = factors->rows / outputs;
  if (from->dtype != all.dtype || to->dtype != all.dtype || from->columns != all.depth ||
      experts->count != all.rows || from->rows == 0 || all.rows % from->rows != 0) {
    return false;
  }
  if (!to->rows_apart() || may_overlap(*to, *from) || may_overlap(*to, *factors) ||
      params.experts > kMostExperts) {
    return false;
  }
  params.choices = all.rows / from->rows;
  params.chosen = experts->data;
  if (!bias.is_none()) {
    const std::optional<Matrix> added = host_matrix(bias);
    if (!added || added->dtype != all.dtype || added->rows != params.experts ||
        added->columns != outputs || (added->stride != outputs && params.experts != 1)) {
      return false;
    }
    all.bias = added->data;
  }
  const py::gil_scoped_release release;
  linear_of_experts(params, workers, address(compressed));
  return true;
}

bool compress(CompressedWeights& copies, ThreadPool& workers, py::handle weight) {
  const std::optional<Matrix> of = host_matrix(weight);
  if (!of) return false;
  const py::gil_scoped_release release;
  return copies.add(of->data, of->dtype, of->rows, of->columns, of->stride, workers);
}

bool multiply_on_device(const device::Device& device, py::handle x, py::handle weight,
                        py::handle bias, py::handle out, uintptr_t stream) {
  const DevicePlace place{device.api().tensor_device, device.ordinal(), device.name()};
  const std::optional<LinearParams> params = product_of_tensors(place, x, weight, bias, out);
  if (!params) return false;
  if (params->rows == 0 || params->outputs == 0) return true;
  const py::gil_scoped_release release;
  device.check(device.api().multiply(device.context(), &*params, reinterpret_cast<void*>(stream)),
               "multiplying");
  return true;
}

std::shared_ptr<device::Device> open_device(const std::string& name) {
  const py::gil_scoped_release release;
  return device::Device::open(name);
}

std::shared_ptr<ThreadPool> make_workers(int threads, const std::string& openmp) {
  if (openmp.empty()) return std::make_shared<ThreadPool>(threads);
  void* library = dlopen(openmp.c_str(), RTLD_NOW | RTLD_NOLOAD);
  void* entry = library == nullptr ? nullptr : dlsym(library, "GOMP_parallel");
  if (entry == nullptr) {
    throw InvalidArgumentError(str("openmp is \"", openmp, "\"; expected the path of an OpenMP ",
                                   "runtime that is loaded and has GOMP_parallel"));
  }
  ThreadPool::Runtime runtime;
  runtime.parallel = reinterpret_cast<decltype(runtime.parallel)>(entry);
  return std::make_shared<ThreadPool>(threads, runtime);
}

}  // namespace

void bind_linear(py::module_& m) {
  py::class_<ThreadPool, std::shared_ptr<ThreadPool>>(
      m, "Workers", "Threads that a pager and products of matrices share.")
      .def(py::init(&make_workers), py::arg("threads"), py::arg("openmp") = "",
           "openmp: path of an OpenMP runtime that is loaded, whose threads are used; empty: of "
           "their own.")
      .def_property_readonly("threads", &ThreadPool::threads, "With the caller's own.");
  py::class_<CompressedWeights, std::shared_ptr<CompressedWeights>>(
      m, "CompressedWeights",
      "Lossless copies of weights in 12 bits each, which products of few rows read in their place.")
      .def(py::init<>())
      .def(
          "add", &compress, py::arg("workers"), py::arg("weight"),
          "Copies a tensor [..., n, k], which has to stay where and as it is; is not held.\n\n"
          "False, and nothing is copied: it is no float32 or bfloat16 tensor on the CPU, its rows\n"
          "are not apart (as those of an expanded one), or more than one in eight groups of 64\n"
          "numbers has some that 12 bits cannot hold.")
      .def("clear", &CompressedWeights::clear, "Frees all copies; not while they are read.")
      .def_property_readonly("bytes", &CompressedWeights::bytes, "Of all copies.")
      .def_property_readonly("weight_bytes", &CompressedWeights::weight_bytes,
                             "Of the weights that they are of.");
  m.attr("LINEAR_VERSION") = kLinearVersion;
  m.attr("TENSOR_LINEAR_VERSION") = gpu::kTensorLinearVersion;
  py::class_<device::Device, std::shared_ptr<device::Device>>(
      m, "Device", "A device that is open for products of matrices.")
      .def(py::init(&open_device), py::arg("name"), "name: \"cuda\", \"cuda:1\" or \"shim\".")
      .def_property_readonly("name", &device::Device::name, "With its number.")
      .def("linear", &multiply_on_device, py::arg("x"), py::arg("weight"), py::arg("bias"),
           py::arg("out"), py::arg("stream") = 0,
           "As the function `linear`, of tensors on this device: launched on a stream, and not "
           "waited for.");
  m.def("linear", &multiply_in_workers, py::arg("workers"), py::arg("x"), py::arg("weight"),
        py::arg("bias"), py::arg("out"), py::arg("compressed") = py::none(),
        "Writes x [..., k] times weight [n, k] transposed, plus bias [n] or None, to out [..., "
        "n].\n\n"
        "compressed: copies of weights, perhaps of these; they change no bit.\n\n"
        "False, and nothing is written: a tensor is not on the CPU, dtypes differ or are none of\n"
        "float32, float16 and bfloat16, shapes do not fit, rows are not equally far apart, or out\n"
        "has elements in common, with itself or with another tensor.");
  m.def("linear_of_experts", &multiply_by_experts, py::arg("workers"), py::arg("x"),
        py::arg("weight"), py::arg("bias"), py::arg("chosen"), py::arg("out"),
        py::arg("compressed") = py::none(),
        "Writes x [M, k] times weight [experts, n, k] transposed, plus bias [experts, n] or None,\n"
        "to out [M * c, n]: row i of the result is row i // c of x times the matrix number\n"
        "chosen[i], int64 [M * c] of any shape. compressed: as for `linear`.\n\n"
        "False, and nothing is written: as for `linear`. InvalidArgumentError if there is no such\n"
        "matrix.");
}

}  // namespace kvpager
