#include "kvpager/program.h"

#include <algorithm>
#include <utility>

#include "compute/compute_table.h"
#include "kvpager/error.h"

namespace kvpager {
namespace {

constexpr int64_t kBlock = 1024;  // elements that are widened at once

const char* at(const Operand& operand, void* const* bases, int64_t elements) {
  return static_cast<const char*>(bases[operand.base]) + operand.offset +
         elements * dtype_bytes(operand.dtype);
}

// `count` elements of a row as float32: where they are, or in `scratch`; of stride 0, one.
const float* widened(const KernelTable& table, const Operand& operand, void* const* bases,
                     int64_t row, int64_t first, int64_t count, float* scratch) {
  if (operand.base == Operand::kNumber) return &operand.number;
  const bool one = operand.strides[3] == 0;
  const char* from = at(operand, bases, row + (one ? 0 : first));
  if (operand.dtype == DType::kFloat32) return reinterpret_cast<const float*>(from);
  table.to_float(from, operand.dtype, one ? 1 : count, scratch);
  return scratch;
}

bool is_one(const Operand& operand) {
  return operand.base == Operand::kNumber || operand.strides[3] == 0;
}

// Calls visit(out, a, b) for every row of an instruction, with the elements before each operand's.
template <class Visit>
void each_row(const Instruction& of, Visit visit) {
  const auto before = [](const Operand& operand, int64_t i, int64_t j, int64_t k) {
    return i * operand.strides[0] + j * operand.strides[1] + k * operand.strides[2];
  };
  for (int64_t i = 0; i < of.shape[0]; ++i) {
    for (int64_t j = 0; j < of.shape[1]; ++j) {
      for (int64_t k = 0; k < of.shape[2]; ++k) {
        visit(before(of.out, i, j, k), before(of.a, i, j, k), before(of.b, i, j, k));
      }
    }
  }
}

void elements(const KernelTable& table, const ComputeTable& compute, const Instruction& of,
              void* const* bases) {
  const bool two = of.operation == Operation::kAdd || of.operation == Operation::kSubtract ||
                   of.operation == Operation::kMultiply;
  const bool straight = of.out.dtype == DType::kFloat32;
  const int64_t columns = of.shape[3];
  alignas(64) float left[kBlock], right[kBlock], made[kBlock];
  each_row(of, [&](int64_t out_row, int64_t a_row, int64_t b_row) {
    for (int64_t first = 0; first < columns; first += kBlock) {
      const int64_t count = std::min(kBlock, columns - first);
      const float* x = widened(table, of.a, bases, a_row, first, count, left);
      if (is_one(of.a) && count > 1) {
        const float number = *x;
        std::fill(left, left + count, number);
        x = left;
      }
      const float* y = two ? widened(table, of.b, bases, b_row, first, count, right) : x;
      char* to = const_cast<char*>(at(of.out, bases, out_row + first));
      float* out = straight ? reinterpret_cast<float*>(to) : made;
      compute.combine(of.operation, x, y, two && is_one(of.b), count, out);
      if (!straight) table.from_float(made, of.out.dtype, count, to);
    }
  });
}

void means(const ComputeTable& compute, const Instruction& of, void* const* bases) {
  each_row(of, [&](int64_t out_row, int64_t a_row, int64_t) {
    const char* x = at(of.a, bases, a_row);
    char* out = const_cast<char*>(at(of.out, bases, out_row));
    *reinterpret_cast<float*>(out) = compute.mean(reinterpret_cast<const float*>(x), of.shape[3]);
  });
}

LinearParams product(const Instruction& given, void* const* bases) {
  LinearParams params;
  params.dtype = given.out.dtype;
  params.rows = given.shape[2];
  params.outputs = given.shape[3];
  params.depth = given.depth;
  params.x = at(given.a, bases, 0);
  params.x_stride = given.a.strides[2];
  params.w = at(given.b, bases, 0);
  params.w_stride = given.b.strides[2];
  if (given.c.base != Operand::kNumber) params.bias = at(given.c, bases, 0);
  params.y = const_cast<char*>(at(given.out, bases, 0));
  params.y_stride = given.out.strides[2];
  return params;
}

Attention attention(const KernelTable& table, const Instruction& given, void* const* bases,
                    std::vector<float>* sinks) {
  const auto [rows, q_heads, kv_heads, v_dim] = given.shape;
  const auto view = [&, rows = rows](const Operand& operand, int64_t heads, int64_t dim) {
    return TensorView{const_cast<char*>(at(operand, bases, 0)),
                      operand.dtype,
                      rows,
                      heads,
                      dim,
                      operand.strides[1],
                      operand.strides[2]};
  };
  Attention made;
  made.q = view(given.a, q_heads, given.depth);
  made.k = view(given.b, kv_heads, given.depth);
  made.v = view(given.c, kv_heads, v_dim);
  made.out = view(given.out, q_heads, v_dim);
  if (given.d.base != Operand::kNumber) {
    sinks->resize(static_cast<size_t>(q_heads));
    table.to_float(at(given.d, bases, 0), given.d.dtype, q_heads, sinks->data());
    made.sinks = sinks->data();
  }
  return made;
}

void check(const Operand& operand, std::array<int64_t, 4> shape, const std::vector<int64_t>& bytes,
           const char* name) {
  if (operand.base == Operand::kNumber) return;
  if (operand.base < 0 || static_cast<size_t>(operand.base) >= bytes.size()) {
    throw InvalidArgumentError(str(name, ".base is ", operand.base, "; expected one of ",
                                   bytes.size(), ", or -1 for a number"));
  }
  if (!is_float(operand.dtype)) {
    throw InvalidArgumentError(str(name, ".dtype is ", dtype_name(operand.dtype),
                                   "; expected float32, float16 or bfloat16"));
  }
  if (operand.strides[3] != 0 && operand.strides[3] != 1) {
    throw InvalidArgumentError(
        str(name, ": the last stride is ", operand.strides[3], "; expected 0 or 1"));
  }
  const int64_t size = dtype_bytes(operand.dtype);
  const int64_t there = bytes[static_cast<size_t>(operand.base)];
  int64_t last = 0;
  bool fits = operand.offset >= 0 && operand.offset % size == 0 && operand.offset <= there;
  for (size_t i = 0; fits && i < shape.size(); ++i) {
    int64_t step = 0;
    fits = shape[i] >= 1 && operand.strides[i] >= 0 &&
           !__builtin_mul_overflow(shape[i] - 1, operand.strides[i], &step) &&
           !__builtin_add_overflow(last, step, &last);
  }
  if (!fits || last >= (there - operand.offset) / size) {
    throw InvalidArgumentError(
        str(name, ": elements outside of the ", there, " bytes of memory ", operand.base));
  }
}

void check_attention(const Instruction& given, const std::vector<int64_t>& bytes) {
  const auto [rows, q_heads, kv_heads, v_dim] = given.shape;
  for (const Operand* operand : {&given.out, &given.a, &given.b, &given.c, &given.d}) {
    const bool there = operand->base != Operand::kNumber;
    if (there ? operand->strides[3] != 1 : operand != &given.d) {
      throw InvalidArgumentError("attention: expected memory with contiguous last dimensions");
    }
  }
  check(given.out, {1, rows, q_heads, v_dim}, bytes, "out");
  check(given.a, {1, rows, q_heads, given.depth}, bytes, "a");
  check(given.b, {1, rows, kv_heads, given.depth}, bytes, "b");
  check(given.c, {1, rows, kv_heads, v_dim}, bytes, "c");
  check(given.d, {1, 1, 1, q_heads}, bytes, "d");
}

void check(const Instruction& given, const std::vector<int64_t>& bytes) {
  if (given.operation == Operation::kAttend) return check_attention(given, bytes);
  const bool mean = given.operation == Operation::kMean;
  if (given.operation == Operation::kLinear) {
    const bool same = given.a.dtype == given.out.dtype && given.b.dtype == given.out.dtype &&
                      (given.c.base == Operand::kNumber || given.c.dtype == given.out.dtype);
    const bool rows = given.out.strides[3] == 1 && given.a.strides[3] == 1 &&
                      given.b.strides[3] == 1 && given.a.base >= 0 && given.b.base >= 0 &&
                      (given.c.base == Operand::kNumber || given.c.strides[3] == 1);
    if (!same || !rows || given.shape[0] != 1 || given.shape[1] != 1) {
      throw InvalidArgumentError("a product: expected matrices of one dtype with contiguous rows");
    }
    if (given.shape[2] > 1 && given.out.strides[2] < given.shape[3]) {
      throw InvalidArgumentError(str("out: rows of ", given.shape[3], " elements are ",
                                     given.out.strides[2], " apart; expected at least as many"));
    }
    check(given.a, {1, 1, given.shape[2], given.depth}, bytes, "a");
    check(given.b, {1, 1, given.shape[3], given.depth}, bytes, "b");
    check(given.c, {1, 1, 1, given.shape[3]}, bytes, "c");
    check(given.out, given.shape, bytes, "out");
    return;
  }
  if (given.out.base == Operand::kNumber || given.a.base == Operand::kNumber) {
    throw InvalidArgumentError("out or a is a number; expected memory");
  }
  if (mean && (given.a.dtype != DType::kFloat32 || given.out.dtype != DType::kFloat32 ||
               given.a.strides[3] != 1)) {
    throw InvalidArgumentError("a mean: expected float32 and contiguous rows");
  }
  const std::array<int64_t, 4> rows = {given.shape[0], given.shape[1], given.shape[2], 1};
  if (!mean && given.shape[3] > 1 && given.out.strides[3] != 1) {
    throw InvalidArgumentError("out: the last stride is 0; expected 1");
  }
  check(given.out, mean ? rows : given.shape, bytes, "out");
  check(given.a, given.shape, bytes, "a");
  check(given.b, given.shape, bytes, "b");
}

void check_given(size_t number, const Memory& memory, int64_t bytes, int64_t alignment) {
  if (memory.bytes != bytes) {
    throw InvalidArgumentError(
        str("tensor ", number, " has ", memory.bytes, " bytes; expected ", bytes));
  }
  if (memory.data == nullptr && bytes > 0) {
    throw InvalidArgumentError(
        str("tensor ", number, " has no memory; expected ", bytes, " bytes"));
  }
  if (reinterpret_cast<uintptr_t>(memory.data) % static_cast<uintptr_t>(alignment) != 0) {
    throw InvalidArgumentError(
        str("tensor ", number, " is not aligned to ", alignment, " bytes; pass a copy"));
  }
}

void check_beside(const Instruction& given, const Instruction* before) {
  if (!given.beside) return;
  if (given.operation != Operation::kLinear || before == nullptr ||
      before->operation != Operation::kLinear || before->out.dtype != given.out.dtype ||
      before->shape[2] != given.shape[2]) {
    throw InvalidArgumentError(
        "beside: expected a product after one of the same dtype and number of rows");
  }
}

}  // namespace

Program::Program(std::vector<Instruction> instructions, std::vector<Memory> fixed,
                 std::vector<int64_t> given)
    : instructions_(std::move(instructions)), fixed_(std::move(fixed)), given_(std::move(given)) {
  std::vector<int64_t> bytes;
  for (const Memory& memory : fixed_) bytes.push_back(memory.bytes);
  bytes.insert(bytes.end(), given_.begin(), given_.end());
  for (size_t i = 0; i < instructions_.size(); ++i) {
    check(instructions_[i], bytes);
    check_beside(instructions_[i], i == 0 ? nullptr : &instructions_[i - 1]);
  }
  alignments_.assign(given_.size(), 1);
  const auto first = static_cast<int32_t>(fixed_.size());
  for (const Instruction& one : instructions_) {
    for (const Operand* operand : {&one.out, &one.a, &one.b, &one.c, &one.d}) {
      const auto number = static_cast<size_t>(std::max(-1, operand->base - first));
      if (number >= given_.size()) continue;
      int64_t& alignment = alignments_[number];
      alignment = std::max(alignment, dtype_bytes(operand->dtype));
    }
  }
}

void Program::run(const std::vector<Memory>& given, ThreadPool& pool, const Attend& attend,
                  const CompressedWeights* compressed) const {
  if (given.size() != given_.size()) {
    throw InvalidArgumentError(str(given.size(), " tensors are given; expected ", given_.size()));
  }
  std::vector<void*> bases;
  bases.reserve(fixed_.size() + given.size());
  for (const Memory& memory : fixed_) bases.push_back(memory.data);
  for (size_t i = 0; i < given.size(); ++i) {
    check_given(i, given[i], given_[i], alignments_[i]);
    bases.push_back(given[i].data);
  }
  const KernelTable& table = kernels();
  const ComputeTable& compute = compute_table(table);
  std::vector<LinearParams> products;
  std::vector<float> sinks;
  size_t attentions = 0;
  for (size_t i = 0; i < instructions_.size(); ++i) {
    const Instruction& one = instructions_[i];
    if (one.operation == Operation::kMean) {
      means(compute, one, bases.data());
    } else if (one.operation == Operation::kLinear) {
      products.assign(1, product(one, bases.data()));
      while (i + 1 < instructions_.size() && instructions_[i + 1].beside) {
        products.push_back(product(instructions_[++i], bases.data()));
      }
      linear(products.data(), static_cast<int64_t>(products.size()), pool, compressed);
    } else if (one.operation == Operation::kAttend) {
      if (!attend) throw InvalidArgumentError("attention: expected something that computes it");
      Attention next = attention(table, one, bases.data(), &sinks);
      next.number = attentions++;
      attend(next);
    } else {
      elements(table, compute, one, bases.data());
    }
  }
}

}  // namespace kvpager
