// Rows of elements of a program's operations: kvpager/program.h. Every tier has the same bits, and torch
// has: the operations are correctly rounded, and a function is a fixed order of such.
#include "compute/functions_isa.h"
#include "compute/gelu_isa.h"
#include "kernels/vec_isa.h"

namespace kvpager {
namespace KVPAGER_ISA_NS {
namespace {

// Of functions that have no other order for one number than for lanes.
template <class OfLanes>
KVPAGER_INLINE void each_alone(const float* a, int64_t count, float* out, OfLanes of_lanes) {
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) store(out + i, of_lanes(load(a + i)));
  float last[kLanes] = {};
  const size_t bytes = static_cast<size_t>(count - i) * sizeof(float);
  std::memcpy(last, a + i, bytes);
  store(last, of_lanes(load(last)));
  std::memcpy(out + i, last, bytes);
}

template <class OfLanes, class OfOne>
KVPAGER_INLINE void each(const float* a, const float* b, bool b_is_one, int64_t count, float* out,
                         OfLanes of_lanes, OfOne of_one) {
  int64_t i = 0;
  const Vec one = splat(*b);
  for (; i + kLanes <= count; i += kLanes) {
    store(out + i, of_lanes(load(a + i), b_is_one ? one : load(b + i)));
  }
  for (; i < count; ++i) out[i] = of_one(a[i], b[b_is_one ? 0 : i]);
}

// x / (1 + e^-x), in the steps that torch's vectors take: the exponential is SLEEF's with an error of 1 ulp
// (Shibata and Petrogalli, IEEE TPDS 31, 2020), n = round(t / ln 2), a polynomial in t - n ln 2, times 2^n.
// Beyond the bounds e^-x is so small that the sum is 1, or it is infinite.
KVPAGER_INLINE Vec silu(Vec x) {
  const Vec t = max(negative(max(x, splat(-100.0f))), splat(-104.0f));
  const Vec magic = splat(12582912.0f);
  const Vec n = sub(add(mul(t, splat(1.44269504f)), magic), magic);
  Vec r = fma(n, splat(-0.693145751953125f), t);
  r = fma(n, splat(-1.428606765330187045e-06f), r);
  Vec p = splat(0.000198527617612853646278381f);
  p = fma(p, r, splat(0.00139304355252534151077271f));
  p = fma(p, r, splat(0.00833336077630519866943359f));
  p = fma(p, r, splat(0.0416664853692054748535156f));
  p = fma(p, r, splat(0.166666671633720397949219f));
  p = fma(p, r, splat(0.5f));
  p = add(fma(mul(r, r), p, r), splat(1.0f));
  // In two steps: 2^n itself may be infinite where the product is not.
  const Vec half = add(mul(n, splat(0.5f)), magic);
  const Vec other = add(sub(n, sub(half, magic)), magic);
  const Vec e = mul(mul(p, power_of_two(half)), power_of_two(other));
  return div(x, add(e, splat(1.0f)));
}

// Vectors of eight lanes, four at a time, in levels: the order of torch's multi_row_sum and row_sum
// (aten/src/ATen/native/cpu/SumKernel.cpp) for rows of at least eight numbers.
float cascade(const float* x, int64_t count) {
  constexpr int kWidth = 8;
  constexpr int kAtOnce = 4;
  constexpr int kLevels = 4;
  constexpr int kRow = kAtOnce * kWidth;
  const int64_t vectors = count / kWidth;
  const int64_t rows = vectors / kAtOnce;
  int64_t bits = 0;
  while ((int64_t{1} << bits) < rows) ++bits;
  const int64_t power = bits / kLevels > 4 ? bits / kLevels : 4;
  const int64_t step = int64_t{1} << power;
  float sums[kLevels][kRow] = {};
  const auto add_row = [&](int64_t row) {
    for (int i = 0; i < kRow; ++i) sums[0][i] += x[row * kRow + i];
  };
  int64_t row = 0;
  while (row + step <= rows) {
    for (int64_t end = row + step; row < end; ++row) add_row(row);
    for (int level = 1; level < kLevels; ++level) {
      for (int i = 0; i < kRow; ++i) {
        sums[level][i] += sums[level - 1][i];
        sums[level - 1][i] = 0.0f;
      }
      if ((row & ((step - 1) << (level * power))) != 0) break;
    }
  }
  for (; row < rows; ++row) add_row(row);
  for (int level = 1; level < kLevels; ++level) {
    for (int i = 0; i < kRow; ++i) sums[0][i] += sums[level][i];
  }
  float* lanes = sums[0];
  for (int64_t vector = rows * kAtOnce; vector < vectors; ++vector) {
    for (int i = 0; i < kWidth; ++i) lanes[i] += x[vector * kWidth + i];
  }
  for (int k = 1; k < kAtOnce; ++k) {
    for (int i = 0; i < kWidth; ++i) lanes[i] += lanes[k * kWidth + i];
  }
  float sum = 0.0f;
  for (int64_t i = vectors * kWidth; i < count; ++i) sum += x[i];
  for (int i = 0; i < kWidth; ++i) sum += lanes[i];
  return sum;
}

}  // namespace

void combine(Operation operation, const float* a, const float* b, bool b_is_one, int64_t count,
             float* out) {
  switch (operation) {
    case Operation::kAdd:
      return each(
          a, b, b_is_one, count, out, [](Vec x, Vec y) { return add(x, y); },
          [](float x, float y) { return x + y; });
    case Operation::kSubtract:
      return each(
          a, b, b_is_one, count, out, [](Vec x, Vec y) { return sub(x, y); },
          [](float x, float y) { return x - y; });
    case Operation::kMultiply:
      return each(
          a, b, b_is_one, count, out, [](Vec x, Vec y) { return mul(x, y); },
          [](float x, float y) { return x * y; });
    case Operation::kNegate:
      return each(
          a, a, false, count, out, [](Vec x, Vec) { return negative(x); },
          [](float x, float) { return -x; });
    case Operation::kSquare:
      return each(
          a, a, false, count, out, [](Vec x, Vec) { return mul(x, x); },
          [](float x, float) { return x * x; });
    case Operation::kReciprocalSqrt:
      for (int64_t i = 0; i < count; ++i) out[i] = 1.0f / __builtin_sqrtf(a[i]);
      return;
    case Operation::kSilu:
      return each_alone(a, count, out, [](Vec x) { return silu(x); });
    case Operation::kGeluTanh:
      return each_alone(a, count, out, [](Vec x) { return gelu_tanh(x); });
    case Operation::kCopy:
      std::memcpy(out, a, static_cast<size_t>(count) * sizeof(float));
      return;
    case Operation::kMean:
    case Operation::kLinear:
    case Operation::kAttend:
      return;
  }
}

float mean(const float* x, int64_t count) { return cascade(x, count) / static_cast<float>(count); }

}  // namespace KVPAGER_ISA_NS
}  // namespace kvpager
