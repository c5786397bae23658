#include "kvpager/linear.h"
#include "kvpager/thread_pool.h"

#include <dlfcn.h>

#include <memory>
#include <string>

#include "bindings/bind.h"
#include "bindings/tensor.h"
#include "kvpager/error.h"

namespace kvpager {

namespace py = pybind11;

namespace {

bool linear_of_tensors(ThreadPool& workers, py::handle x, py::handle weight, py::handle bias,
                       py::handle out) {
  const std::optional<HostMatrix> from = host_matrix(x), factors = host_matrix(weight),
                                  to = host_matrix(out);
  if (!from || !factors || !to) return false;
  LinearParams params;
  params.dtype = factors->dtype;
  if (from->dtype != params.dtype || to->dtype != params.dtype) return false;
  if (from->columns != factors->columns || to->columns != factors->rows || from->rows != to->rows) {
    return false;
  }
  if (!bias.is_none()) {
    const std::optional<HostMatrix> added = host_matrix(bias);
    if (!added || added->dtype != params.dtype || added->rows != 1 ||
        added->columns != factors->rows) {
      return false;
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
  const py::gil_scoped_release release;
  linear(params, workers);
  return true;
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
  m.attr("LINEAR_VERSION") = kLinearVersion;
  m.def("linear", &linear_of_tensors, py::arg("workers"), py::arg("x"), py::arg("weight"),
        py::arg("bias"), py::arg("out"),
        "Writes x [..., k] times weight [n, k] transposed, plus bias [n] or None, to out [..., "
        "n].\n\n"
        "False, and nothing is written: a tensor is not on the CPU, dtypes differ or are none of\n"
        "float32, float16 and bfloat16, shapes do not fit, or rows are not equally far apart.");
}

}  // namespace kvpager
