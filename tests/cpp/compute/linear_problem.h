// Products of linear layers for tests: x, W and b of random numbers, and where y is written.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "../kernels/elements.h"
#include "../kernels/tiers.h"
#include "base/half.h"
#include "compute/compute_table.h"
#include "kvpager/linear.h"
#include "kvpager/thread_pool.h"

namespace kvpager::testing {

// in_every_tier, of those that multiply linear layers.
template <class Step>
void in_linear_tiers(const Step& step) {
  in_every_tier([&](const KernelTable& table) {
    if (compute_table(table).linear_panel != nullptr) step(table);
  });
}

// Numbers of a dtype, with room between rows.
class Matrix {
 public:
  Matrix(DType dtype, int64_t rows, int64_t columns, int64_t gap = 0)
      : dtype(dtype),
        stride(columns + gap),
        bytes_(static_cast<size_t>(rows * stride * dtype_bytes(dtype)), '\x7f') {}  // NaN, or huge

  template <class Draw>
  void fill(Draw draw) {
    const int64_t count = static_cast<int64_t>(bytes_.size()) / dtype_bytes(dtype);
    for (int64_t i = 0; i < count; ++i) round_to(dtype, draw(), bytes_.data(), i);
  }
  uint16_t* words() { return reinterpret_cast<uint16_t*>(bytes_.data()); }
  void* data() { return bytes_.data(); }
  const void* data() const { return bytes_.data(); }
  float at(int64_t row, int64_t column) const {
    return widen(dtype, data(), row * stride + column);
  }
  const std::string& bytes() const { return bytes_; }

  DType dtype;
  int64_t stride;

 private:
  std::string bytes_;
};

struct Problem {
  Problem(DType dtype, int64_t rows, int64_t outputs, int64_t depth, int64_t gap = 0,
          bool biased = true)
      : x(dtype, rows, depth, gap),
        w(dtype, outputs, depth, gap),
        bias(dtype, 1, outputs),
        rows(rows),
        outputs(outputs),
        depth(depth),
        biased(biased) {
    std::mt19937 random(static_cast<unsigned>(rows * 131 + outputs * 17 + depth));
    std::normal_distribution<float> normal;
    const auto draw = [&] { return normal(random); };
    x.fill(draw);
    w.fill(draw);
    bias.fill(draw);
  }

  LinearParams params(Matrix& y) const {
    return {x.dtype,  rows,     outputs,
            depth,    x.data(), x.stride,
            w.data(), w.stride, biased ? bias.data() : nullptr,
            y.data(), y.stride};
  }
  Matrix run(int threads = 1, const CompressedWeights* compressed = nullptr) const {
    ThreadPool pool(threads, 0);
    Matrix y(x.dtype, rows, outputs, 3);
    linear(params(y), pool, compressed);
    return y;
  }

  // From now on the products of each element are of many sizes and cancel one another, so that all
  // that is left of a sum is its rounding: another order of additions gives other bits.
  void cancel() {
    std::mt19937 random(static_cast<unsigned>(depth));
    std::normal_distribution<float> normal;
    std::vector<int64_t> places(static_cast<size_t>(depth));
    std::iota(places.begin(), places.end(), int64_t{0});
    std::shuffle(places.begin(), places.end(), random);
    const auto fill = [&](Matrix& matrix, int64_t count, float sign) {
      for (int64_t row = 0; row < count; ++row) {
        for (size_t i = 0; i + 1 < places.size(); i += 2) {
          const float value = std::ldexp(normal(random), static_cast<int>(random() % 11) - 5);
          round_to(x.dtype, value, matrix.data(), row * matrix.stride + places[i]);
          round_to(x.dtype, sign * value, matrix.data(), row * matrix.stride + places[i + 1]);
        }
      }
    };
    fill(x, rows, -1.0f);
    fill(w, outputs, 1.0f);
    biased = false;
  }

  Matrix x, w, bias;
  int64_t rows, outputs, depth;
  bool biased;
};

inline float flushed(float a) {
  return std::fpclassify(a) == FP_SUBNORMAL ? std::copysign(0.0f, a) : a;
}

// One element, as kvpager/linear.h says.
inline float expected_element(const Problem& problem, int64_t row, int64_t output) {
  const bool bf16 = problem.x.dtype == DType::kBFloat16;
  const int64_t step = bf16 ? 32 : 16;
  const int64_t steps = (problem.depth + step - 1) / step;
  float lanes[16] = {};
  const auto add = [&](int64_t k, float& lane) {
    const bool there = k < problem.depth;
    const float a = there ? problem.x.at(row, k) : 0.0f;
    const float b = there ? problem.w.at(output, k) : 0.0f;
    lane = bf16 ? flushed(std::fma(flushed(a), flushed(b), lane)) : std::fma(a, b, lane);
  };
  for (int64_t j = 0; j < steps; ++j) {
    for (int i = 0; i < 16; ++i) {
      if (bf16) {
        add(32 * j + 2 * i + 1, lanes[i]);
        add(32 * j + 2 * i, lanes[i]);
      } else {
        add(16 * j + i, lanes[i]);
      }
    }
  }
  for (int width = 8; width >= 1; width /= 2) {
    for (int i = 0; i < width; ++i) {
      lanes[i] += lanes[i + width];
      if (bf16) lanes[i] = flushed(lanes[i]);
    }
  }
  float sum = lanes[0];
  if (problem.biased) {
    const float bias = problem.bias.at(0, output);
    sum = bf16 ? flushed(sum + flushed(bias)) : sum + bias;
  }
  if (problem.x.dtype == DType::kFloat16) return float16_to_float(float_to_float16(sum));
  return bf16 ? bfloat16_to_float(float_to_bfloat16(sum)) : sum;
}

inline int wrong_elements(const Problem& problem, const Matrix& y) {
  int wrong = 0;
  for (int64_t row = 0; row < problem.rows; ++row) {
    for (int64_t output = 0; output < problem.outputs; ++output) {
      wrong += float_bits(y.at(row, output)) != float_bits(expected_element(problem, row, output));
    }
  }
  return wrong;
}

}  // namespace kvpager::testing
