// Small operations of a decoder on the CPU, one after the other in one call: what torch computes with
// a call of its own for each. Every operation has the bits of torch's: elements are computed in float32,
// rounded to nearest once, a mean is summed in the order that torch sums in, and SiLU and GELU have the
// exponential and the tangent that torch's vectors have. Attention is that of whoever runs the program.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <vector>

#include "kvpager/linear.h"
#include "kvpager/tensor.h"
#include "kvpager/thread_pool.h"
#include "kvpager/types.h"

namespace kvpager {

enum class Operation : uint8_t {
  kCopy,
  kAdd,
  kSubtract,
  kMultiply,
  kNegate,
  kSquare,
  kReciprocalSqrt,
  kSilu,      // x / (1 + e^-x)
  kGeluTanh,  // x / 2 (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3)))
  kMean,      // of the last dimension, float32
  kLinear,    // a times b transposed, plus c: kvpager/linear.h
  kAttend,    // of queries a, keys b and values c, with sinks d, by run()'s `attend`
};

// Where the elements of one operand are: those of memory `base`, or one number.
struct Operand {
  static constexpr int32_t kNumber = -1;
  int32_t base = kNumber;
  int64_t offset = 0;  // bytes
  DType dtype = DType::kFloat32;
  std::array<int64_t, 4> strides{};  // elements; of the last dimension 0 or 1
  float number = 0.0f;
};

// out[i][j][k][l] = operation(a[i][j][k][l], b[i][j][k][l]).
// kMean: out[i][j][k] = mean over l of a. kLinear: shape is [1][1][rows][outputs]; a [rows][depth], b
// [outputs][depth], c [outputs] or none, by their strides of the third and the last dimension.
// kAttend: shape is [rows][q_heads][kv_heads][v_dim]; out [rows][q_heads][v_dim], a [rows][q_heads][depth],
// b [rows][kv_heads][depth], c [rows][kv_heads][v_dim], by their last three strides; d [q_heads] or none.
struct Instruction {
  Operation operation = Operation::kCopy;
  std::array<int64_t, 4> shape{1, 1, 1, 1};
  int64_t depth = 0;  // of kLinear and kAttend
  Operand out, a, b, c, d;
  // A product that is computed at the same time as the one before it, and neither reads nor writes
  // what that one writes.
  bool beside = false;
};

struct Memory {
  void* data = nullptr;
  int64_t bytes = 0;
};

// One attention of a program. sinks: [q_heads], or null.
struct Attention {
  size_t number = 0;  // of those of the program, from 0
  TensorView q, k, v, out;
  const float* sinks = nullptr;
};
using Attend = std::function<void(const Attention&)>;

class Program {
 public:
  // Throws InvalidArgumentError for an operand that is not within its memory or that an operation
  // cannot have, and for what cannot be computed beside the instruction before it. Bases from
  // `fixed.size()` on are given to run(), with the bytes in `given`.
  Program(std::vector<Instruction> instructions, std::vector<Memory> fixed,
          std::vector<int64_t> given);

  // given: memory of as many bytes as were told, aligned to what is in it; InvalidArgumentError where it
  // is not. An operation reads what those before it have written.
  // attend: computes every attention, in order; what it throws ends the run.
  // compressed: as linear() takes it.
  void run(const std::vector<Memory>& given, ThreadPool& pool, const Attend& attend = {},
           const CompressedWeights* compressed = nullptr) const;

  const std::vector<int64_t>& given() const { return given_; }
  const std::vector<Instruction>& instructions() const { return instructions_; }

 private:
  std::vector<Instruction> instructions_;
  std::vector<Memory> fixed_;
  std::vector<int64_t> given_;
  std::vector<int64_t> alignments_;  // of what is given
};

}  // namespace kvpager
