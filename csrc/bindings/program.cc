#include "kvpager/program.h"

#include <pybind11/stl.h>
#include <pybind11/typing.h>

#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings/bind.h"
#include "bindings/handles.h"
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
                                                             {"silu", Operation::kSilu},
                                                             {"gelu_tanh", Operation::kGeluTanh},
                                                             {"mean", Operation::kMean},
                                                             {"linear", Operation::kLinear},
                                                             {"attend", Operation::kAttend}};

using Strides = std::array<int64_t, 4>;
using MemoryOperand = std::tuple<int32_t, int64_t, std::string, Strides>;
// The layer of an attention, and the keyword arguments that it was called with.
using Call = std::optional<std::tuple<int, py::typing::Dict<py::str, py::object>>>;
using Step = std::tuple<std::string, Strides, int64_t, std::vector<py::object>, bool, Call>;

Operation operation_of(const std::string& name) {
  for (const auto& [known, operation] : kOperations) {
    if (name == known) return operation;
  }
  std::string known_names;
  for (const auto& [known, operation] : kOperations) {
    known_names += (operation == kOperations[0].second ? "" : ", ") + std::string(known);
  }
  throw InvalidArgumentError(str("operation is \"", name, "\"; expected one of ", known_names));
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
  const auto& [name, shape, depth, operands, beside, call] = step;
  Instruction made;
  made.operation = operation_of(name);
  made.shape = shape;
  made.depth = depth;
  made.beside = beside;
  Operand* const places[] = {&made.out, &made.a, &made.b, &made.c, &made.d};
  if (operands.empty() || operands.size() > std::size(places)) {
    throw InvalidArgumentError(
        str("an operation has ", operands.size(), " operands; expected out and one to four"));
  }
  if (call.has_value() != (made.operation == Operation::kAttend)) {
    throw InvalidArgumentError("a call: expected one of attention, and of nothing else");
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

// One attention as a running forward takes it, and as Python calls it.
struct AttentionCall {
  int layer = 0;
  AttendOptions options;
  py::dict keywords;
  const Instruction* instruction = nullptr;  // of the program
};

AttentionCall call_of(const Call::value_type& given) {
  AttentionCall made;
  made.layer = std::get<0>(given);
  made.keywords = std::get<1>(given);
  const auto number = [&](const char* name, auto standard) {
    const py::object value = made.keywords.attr("get")(name);
    try {
      return value.is_none() ? standard : py::cast<decltype(standard)>(value);
    } catch (const py::cast_error&) {
      throw InvalidArgumentError(
          str(name, " is ", py::cast<std::string>(py::repr(value)), "; expected a number or None"));
    }
  };
  made.options.scaling = number("scaling", 1.0f);
  made.options.softcap = number("softcap", 0.0f);
  made.options.window = number("window", int64_t{0});
  return made;
}

// Lets an interrupt end what runs long without Python.
class Interruptible {
 public:
  // Without the GIL. Throws what a signal's handler raises.
  void check() {
    const Clock::time_point now = Clock::now();
    if (now - checked_ < std::chrono::milliseconds(200)) return;
    const py::gil_scoped_acquire acquire;
    if (PyErr_CheckSignals() != 0) throw py::error_already_set();
    checked_ = now;
  }

 private:
  using Clock = std::chrono::steady_clock;
  Clock::time_point checked_ = Clock::now();
};

// A program with the tensors that it reads and writes.
class BoundProgram {
 public:
  BoundProgram(std::shared_ptr<ThreadPool> workers, const std::vector<Step>& steps,
               std::vector<py::object> fixed, std::vector<int64_t> given,
               std::optional<std::shared_ptr<CompressedWeights>> compressed)
      : workers_(std::move(workers)),
        compressed_(std::move(compressed).value_or(nullptr)),
        fixed_(std::move(fixed)),
        program_(instructions(steps), memory(fixed_), std::move(given)) {
    for (const Step& step : steps) {
      const Call& call = std::get<5>(step);
      if (!call) continue;
      calls_.push_back(call_of(*call));
      calls_.back().instruction =
          &program_.instructions()[static_cast<size_t>(&step - steps.data())];
    }
  }

  void run(const py::object& attention, const std::vector<py::object>& given) const {
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
    if (!calls_.empty() && attention.is_none()) {
      throw InvalidArgumentError("attention is None; expected what computes it");
    }
    Interruptible interruptible;
    Attend attend = [&](const Attention& at) {
      const py::gil_scoped_acquire acquire;
      call(attention, calls_[at.number], given);
    };
    if (!calls_.empty() && py::isinstance<ForwardHandle>(attention)) {
      auto* const forward = py::cast<ForwardHandle*>(attention);
      if (forward->pager()->device_place().type != DevicePlace().type) {
        throw InvalidArgumentError("attention: a forward of a device, expected one on the CPU");
      }
      attend = [&, forward](const Attention& at) {
        interruptible.check();
        AttendOptions options = calls_[at.number].options;
        options.sinks = at.sinks;
        forward->attend(calls_[at.number].layer, at.q, at.k, at.v, at.out, options);
      };
    }
    const py::gil_scoped_release release;
    program_.run(data, *workers_, attend, compressed_.get());
  }

 private:
  // Attention of a Python object, with tensors of the memory that its operands are in.
  void call(const py::object& attention, const AttentionCall& as,
            const std::vector<py::object>& given) const {
    const Instruction& of = *as.instruction;
    const auto [rows, q_heads, kv_heads, v_dim] = of.shape;
    const py::module_ torch = py::module_::import("torch");
    const auto tensor = [&](const Operand& operand, const std::vector<int64_t>& shape) {
      const auto base = static_cast<size_t>(operand.base);
      const py::object& whole = base < fixed_.size() ? fixed_[base] : given[base - fixed_.size()];
      const py::object elements =
          whole.attr("view")(-1).attr("view")(torch.attr(dtype_name(operand.dtype)));
      const std::vector<int64_t> strides(operand.strides.end() - static_cast<int64_t>(shape.size()),
                                         operand.strides.end());
      const int64_t first = py::cast<int64_t>(elements.attr("storage_offset")());
      return elements.attr("as_strided")(py::cast(shape), py::cast(strides),
                                         first + operand.offset / dtype_bytes(operand.dtype));
    };
    py::object sinks = py::none();
    if (of.d.base != Operand::kNumber) sinks = tensor(of.d, {q_heads});
    attention.attr("attend")(
        as.layer, tensor(of.a, {rows, q_heads, of.depth}), tensor(of.b, {rows, kv_heads, of.depth}),
        tensor(of.c, {rows, kv_heads, v_dim}), **as.keywords, py::arg("sinks") = sinks,
        py::arg("out") = tensor(of.out, {rows, q_heads, v_dim}));
  }
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
  const std::shared_ptr<CompressedWeights> compressed_;
  const std::vector<py::object> fixed_;
  const Program program_;
  std::vector<AttentionCall> calls_;
};

}  // namespace

void bind_program(py::module_& m) {
  py::class_<BoundProgram>(
      m, "Program", "Small operations on tensors of the CPU, one after the other in one call.")
      .def(py::init<std::shared_ptr<ThreadPool>, const std::vector<Step>&, std::vector<py::object>,
                    std::vector<int64_t>, std::optional<std::shared_ptr<CompressedWeights>>>(),
           py::arg("workers"), py::arg("steps"), py::arg("fixed"), py::arg("given"),
           py::arg("compressed") = py::none(),
           "steps: (operation, shape, depth, (out, a, b, c, d), beside, call); an operand is\n"
           "(base, offset in bytes, dtype, strides), a float or None. beside: a product that is\n"
           "computed at the same time as the one before it. call: of an attention, its layer and\n"
           "keyword arguments; else None. fixed: tensors, the first bases. given: bytes of those\n"
           "that run() gets, which follow. compressed: copies of weights that products read.\n\n"
           "Raises:\n"
           "    InvalidArgumentError: an operand outside of its memory, or of another kind than\n"
           "        its operation's.")
      .def("run", &BoundProgram::run, py::arg("attention"), py::arg("given"),
           "Computes all of it.\n\n"
           "attention: the running forward of a pager on the CPU, whose attention is computed\n"
           "without Python; or an object with the same `attend`, or None where nothing attends.\n\n"
           "Raises:\n"
           "    InvalidArgumentError: a tensor is not contiguous, or of another size.\n"
           "    Whatever attention, or a signal's handler, raises; the rest is not computed then.");
}

}  // namespace kvpager
