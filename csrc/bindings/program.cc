#include "kvpager/program.h"

#include <pybind11/stl.h>

#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings/bind.h"
#include "bindings/names.h"
#include "bindings/tensor.h"
#include "kvpager/error.h"

namespace kvpager {

namespace py = pybind11;

namespace {

constexpr std::pair<const char*, Operation> kOperations[] = {{"copy", Operation::kCopy},
                                                             {"add", Operation::kAdd},
                                                             {"subtract", Operation::kSubtract},
                                                             {"multiply", Operation::kMultiply},
                                                             {"negate", Operation::kNegate},
                                                             {"square", Operation::kSquare},
                                                             {"rsqrt", Operation::kReciprocalSqrt},
                                                             {"mean", Operation::kMean},
                                                             {"linear", Operation::kLinear}};

using Strides = std::array<int64_t, 4>;
using MemoryOperand = std::tuple<int32_t, int64_t, std::string, Strides>;
using Step = std::tuple<std::string, Strides, int64_t, std::vector<py::object>, bool>;

Operation operation_of(const std::string& name) {
  for (const auto& [known, operation] : kOperations) {
    if (name == known) return operation;
  }
  throw InvalidArgumentError(str("operation is \"", name, "\"; expected copy, add, subtract, ",
                                 "multiply, negate, square, rsqrt, mean or linear"));
}

Operand operand_of(const py::object& given) {
  Operand operand;
  if (given.is_none()) return operand;
  if (py::isinstance<py::float_>(given)) {
    operand.number = static_cast<float>(py::cast<double>(given));
    return operand;
  }
  try {
    const auto [base, offset, dtype, strides] = py::cast<MemoryOperand>(given);
    operand.base = base;
    operand.offset = offset;
    operand.dtype = dtype_from_name("dtype", dtype);
    operand.strides = strides;
  } catch (const py::cast_error&) {
    throw InvalidArgumentError(str("an operand is ", py::cast<std::string>(py::repr(given)),
                                   "; expected (base, offset, dtype, strides), a float or None"));
  }
  return operand;
}

Instruction instruction_of(const Step& step) {
  const auto& [name, shape, depth, operands, beside] = step;
  Instruction made;
  made.operation = operation_of(name);
  made.shape = shape;
  made.depth = depth;
  made.beside = beside;
  Operand* const places[] = {&made.out, &made.a, &made.b, &made.c};
  if (operands.empty() || operands.size() > 4) {
    throw InvalidArgumentError(
        str("an operation has ", operands.size(), " operands; expected out and one to three"));
  }
  for (size_t i = 0; i < operands.size(); ++i) *places[i] = operand_of(operands[i]);
  return made;
}

// All of a tensor's memory. InvalidArgumentError: it is not contiguous, or no float on the CPU.
Memory memory_of(py::handle tensor) {
  const std::optional<Matrix> matrix = host_matrix(tensor);
  if (!matrix || (matrix->rows > 1 && matrix->stride != matrix->columns)) {
    throw InvalidArgumentError("a program's memory: expected a contiguous float tensor on the CPU");
  }
  return {matrix->data, matrix->rows * matrix->columns * dtype_bytes(matrix->dtype)};
}

// A program with the tensors that it reads and writes.
class BoundProgram {
 public:
  BoundProgram(std::shared_ptr<ThreadPool> workers, const std::vector<Step>& steps,
               std::vector<py::object> fixed, std::vector<int64_t> given)
      : workers_(std::move(workers)),
        fixed_(std::move(fixed)),
        program_(instructions(steps), memory(fixed_), std::move(given)) {}

  void run(const std::vector<py::object>& given) const {
    const std::vector<int64_t>& expected = program_.given();
    if (given.size() != expected.size()) {
      throw InvalidArgumentError(
          str(given.size(), " tensors are given; expected ", expected.size()));
    }
    std::vector<void*> data;
    data.reserve(given.size());
    for (size_t i = 0; i < given.size(); ++i) {
      const Memory memory = memory_of(given[i]);
      if (memory.bytes != expected[i]) {
        throw InvalidArgumentError(
            str("tensor ", i, " has ", memory.bytes, " bytes; expected ", expected[i]));
      }
      data.push_back(memory.data);
    }
    const py::gil_scoped_release release;
    program_.run(data, *workers_);
  }

 private:
  static std::vector<Instruction> instructions(const std::vector<Step>& steps) {
    std::vector<Instruction> made;
    for (const Step& step : steps) made.push_back(instruction_of(step));
    return made;
  }
  static std::vector<Memory> memory(const std::vector<py::object>& tensors) {
    std::vector<Memory> made;
    for (const py::object& tensor : tensors) made.push_back(memory_of(tensor));
    return made;
  }

  const std::shared_ptr<ThreadPool> workers_;
  const std::vector<py::object> fixed_;
  const Program program_;
};

}  // namespace

void bind_program(py::module_& m) {
  py::class_<BoundProgram>(
      m, "Program", "Small operations on tensors of the CPU, one after the other in one call.")
      .def(py::init<std::shared_ptr<ThreadPool>, const std::vector<Step>&, std::vector<py::object>,
                    std::vector<int64_t>>(),
           py::arg("workers"), py::arg("steps"), py::arg("fixed"), py::arg("given"),
           "steps: (operation, shape, depth, (out, a, b, c), beside); an operand is\n"
           "(base, offset in bytes, dtype, strides), a float or None. beside: a product that is\n"
           "computed at the same time as the one before it. fixed: tensors, the first bases.\n"
           "given: bytes of those that run() gets, which follow.\n\n"
           "Raises:\n"
           "    InvalidArgumentError: an operand outside of its memory, or of another kind than\n"
           "        its operation's.")
      .def("run", &BoundProgram::run, py::arg("given"),
           "Computes all of it. InvalidArgumentError: a tensor is not contiguous, or of another "
           "size.");
}

}  // namespace kvpager
