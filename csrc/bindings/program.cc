#include "kvpager/program.h"

#include <pybind11/stl.h>
#include <pybind11/typing.h>

#include <algorithm>
#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <variant>
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
// A tensor that is given to each run: its bytes, or its dtype and shape.
using Shaped = std::pair<std::string, std::vector<int64_t>>;
using Given = std::variant<int64_t, Shaped>;
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

int64_t bytes_of(const Given& given) {
  if (const auto* bytes = std::get_if<int64_t>(&given)) return *bytes;
  const auto& [dtype, shape] = std::get<Shaped>(given);
  int64_t bytes = dtype_bytes(dtype_from_name("dtype", dtype));
  for (const int64_t count : shape) {
    if (count < 0 || __builtin_mul_overflow(bytes, count, &bytes)) {
      throw InvalidArgumentError(str("given: a dimension of ", count, " in a shape of ",
                                     shape.size(), "; expected a tensor that fits in memory"));
    }
  }
  return bytes;
}

bool has_shape(const py::tuple& found, const std::vector<int64_t>& shape) {
  if (found.size() != shape.size()) return false;
  for (size_t i = 0; i < shape.size(); ++i) {
    if (py::cast<int64_t>(found[i]) != shape[i]) return false;
  }
  return true;
}

// InvalidArgumentError unless the tensor, of which memory_of() is something, has the dtype and the shape.
void require_shaped(size_t number, py::handle tensor, const Shaped& expected) {
  const auto& [dtype, shape] = expected;
  const std::optional<Matrix> matrix = host_matrix(tensor);
  const py::tuple found = tensor.attr("shape");
  if (matrix && dtype_name(matrix->dtype) == dtype && has_shape(found, shape)) return;
  const auto text = [](const py::object& object) { return py::cast<std::string>(py::str(object)); };
  throw InvalidArgumentError(str("tensor ", number, " is ", text(tensor.attr("dtype")),
                                 " of shape ", text(py::tuple(found)), "; expected ", dtype,
                                 " of shape ", text(py::tuple(py::cast(shape)))));
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
               std::vector<py::object> fixed, std::vector<Given> given,
               std::optional<std::shared_ptr<CompressedWeights>> compressed)
      : workers_(std::move(workers)),
        compressed_(std::move(compressed).value_or(nullptr)),
        fixed_(std::move(fixed)),
        given_(std::move(given)),
        program_(instructions(steps), memory(fixed_), bytes(given_)) {
    for (const Step& step : steps) {
      const Call& call = std::get<5>(step);
      if (!call) continue;
      calls_.push_back(call_of(*call));
      calls_.back().instruction =
          &program_.instructions()[static_cast<size_t>(&step - steps.data())];
    }
  }

  void run(const py::object& attention, const std::vector<py::object>& given) const {
    const std::vector<Memory> data = memory(given);  // the program compares their number and bytes
    for (size_t i = 0; i < std::min(given.size(), given_.size()); ++i) {
      if (const auto* shaped = std::get_if<Shaped>(&given_[i])) {
        require_shaped(i, given[i], *shaped);
      }
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
  static std::vector<int64_t> bytes(const std::vector<Given>& given) {
    std::vector<int64_t> made;
    for (const Given& one : given) made.push_back(bytes_of(one));
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
  const std::vector<Given> given_;
  const Program program_;
  std::vector<AttentionCall> calls_;
};

}  // namespace

void bind_program(py::module_& m) {
  py::class_<BoundProgram>(
      m, "Program", "Small operations on tensors of the CPU, one after the other in one call.")
      .def(py::init<std::shared_ptr<ThreadPool>, const std::vector<Step>&, std::vector<py::object>,
                    std::vector<Given>, std::optional<std::shared_ptr<CompressedWeights>>>(),
           py::arg("workers"), py::arg("steps"), py::arg("fixed"), py::arg("given"),
           py::arg("compressed") = py::none(),
           "steps: (operation, shape, depth, (out, a, b, c, d), beside, call); an operand is\n"
           "(base, offset in bytes, dtype, strides), a float or None. beside: a product that is\n"
           "computed at the same time as the one before it. call: of an attention, its layer and\n"
           "keyword arguments; else None. fixed: tensors, the first bases. given: of each that\n"
           "run() gets, which follow, its dtype and shape, or its bytes. compressed: copies of\n"
           "weights that products read.\n\n"
           "Raises:\n"
           "    InvalidArgumentError: an operand outside of its memory, or of another kind than\n"
           "        its operation's.")
      .def("run", &BoundProgram::run, py::arg("attention"), py::arg("given"),
           "Computes all of it.\n\n"
           "attention: the running forward of a pager on the CPU, whose attention is computed\n"
           "without Python; or an object with the same `attend`, or None where nothing attends.\n\n"
           "Raises:\n"
           "    InvalidArgumentError: another number of tensors is given, or one is not "
           "contiguous,\n"
           "        or of another size, dtype or shape than expected. Nothing is computed then.\n"
           "    Whatever attention, or a signal's handler, raises; the rest is not computed then.");
}

}  // namespace kvpager
