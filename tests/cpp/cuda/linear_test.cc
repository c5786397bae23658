// Products of linear layers on a device: float32 has the processor's bits, 16-bit dtypes the order of
// cuda/linear_tensor.cuh, and a row of either the same bits among any number of rows.
#include <doctest/doctest.h>

#include <cmath>
#include <cstdlib>
#include <limits>
#include <string>
#include <vector>

#include "linear_problem.h"
#include "problem.h"

namespace kvpager::testing {
namespace {

constexpr DType kHalves[] = {DType::kFloat16, DType::kBFloat16};

// Where a problem's matrices lie in device memory.
struct Placement {
  int64_t offset = 0;  // elements from a multiple of 256 bytes to the first of x and of W
  int64_t first = 0;   // row of the problem
  int64_t rows = 0;    // 0: all
};

// The product on a device. What lies between rows of y is nobody's to write.
Matrix on_device(device::Device& device, const Problem& problem, const Placement& at = {}) {
  const DType dtype = problem.x.dtype;
  const int64_t element = dtype_bytes(dtype);
  const int64_t rows = at.rows == 0 ? problem.rows : at.rows;
  Matrix y(dtype, rows, problem.outputs, 3);
  const Matrix untouched = y;
  const auto bytes = [](const Matrix& matrix) {
    return static_cast<int64_t>(matrix.bytes().size());
  };
  const device::Memory x = device.allocate("x", bytes(problem.x) + at.offset * element);
  const device::Memory w = device.allocate("w", bytes(problem.w) + at.offset * element);
  const device::Memory bias = device.allocate("bias", bytes(problem.bias));
  const device::Memory out = device.allocate("y", bytes(y));
  TestStream stream(device);
  stream.upload(x.data() + at.offset * element, problem.x.data(), bytes(problem.x));
  stream.upload(w.data() + at.offset * element, problem.w.data(), bytes(problem.w));
  stream.upload(bias.data(), problem.bias.data(), bytes(problem.bias));
  stream.upload(out.data(), y.data(), bytes(y));
  LinearParams params = problem.params(y);
  params.rows = rows;
  params.x = x.data() + (at.offset + at.first * problem.x.stride) * element;
  params.w = w.data() + at.offset * element;
  if (params.bias != nullptr) params.bias = bias.data();
  params.y = out.data();
  device.check(device.api().multiply(device.context(), &params, stream.get()), "multiply");
  stream.download(y.data(), out.data(), bytes(y));
  int64_t strays = 0;
  for (int64_t i = 0; i < rows * y.stride; ++i) {
    if (i % y.stride < problem.outputs) continue;
    strays += std::memcmp(y.bytes().data() + i * element, untouched.bytes().data() + i * element,
                          static_cast<size_t>(element)) != 0;
  }
  CHECK(strays == 0);
  return y;
}

// Elements of rows [first, first + rows of `some`) of `all` that have other bits in `some`.
int64_t differing(const Matrix& all, int64_t first, const Matrix& some, int64_t rows,
                  int64_t outputs) {
  int64_t count = 0;
  for (int64_t i = 0; i < rows * outputs; ++i) {
    count += float_bits(all.at(first + i / outputs, i % outputs)) !=
             float_bits(some.at(i / outputs, i % outputs));
  }
  return count;
}

// A device's tensor cores as cuda/linear_tensor.cuh says, with sums that are added one after the other
// in float32: what the shim does, unless it is asked for other sums.
float expected(const Problem& problem, int64_t row, int64_t output) {
  const auto product = [&](int64_t k) {
    return k < problem.depth ? problem.x.at(row, k) * problem.w.at(output, k) : 0.0f;  // exact
  };
  float total = 0.0f;
  for (int64_t split = 0; split < problem.depth; split += 256) {
    float sum = 0.0f;
    for (int64_t k = split; k < split + 256 && k < problem.depth; k += 32) {
      for (const int second : {0, 4}) {
        for (const int high : {0, 2}) {
          for (int t = 0; t < 4; ++t) {
            for (const int j : {0, 1}) sum += product(k + 8 * t + second + high + j);
          }
        }
      }
    }
    total += sum;
  }
  if (problem.biased) total += problem.bias.at(0, output);
  return problem.x.dtype == DType::kFloat16 ? float16_to_float(float_to_float16(total))
                                            : bfloat16_to_float(float_to_bfloat16(total));
}

// Shapes that take every kernel and edge: several tiles of rows and outputs, splits, a short last one.
struct Size {
  int64_t rows, outputs, depth;
};
std::vector<Size> sizes() {
  std::vector<Size> all = {{1, 5, 8},    {3, 17, 264},  {16, 33, 40}, {17, 40, 72},
                           {64, 9, 520}, {65, 70, 104}, {2, 9, 2312}};
  if (!small_tests()) {
    const Size large[] = {{1, 64, 2312}, {40, 24, 4360}, {130, 65, 776}, {300, 130, 96}};
    all.insert(all.end(), std::begin(large), std::end(large));
  }
  return all;
}

TEST_CASE("float32 on a device has the bits of the processor's products") {
  for_each_device([](device::Device& device) {
    for (Size size : sizes()) {
      size.depth -= size.rows % 2;  // not in whole lanes
      CAPTURE(size.rows);
      CAPTURE(size.depth);
      const Problem problem(DType::kFloat32, size.rows, size.outputs, size.depth, size.rows % 3,
                            size.rows % 2 == 0);
      const Matrix found = on_device(device, problem);
      CHECK(differing(problem.run(), 0, found, size.rows, size.outputs) == 0);
    }
  });
}

TEST_CASE("16-bit dtypes have the order of operations that is written down") {
  if (!tests_shim() || std::getenv("KVPAGER_SHIM_MMA") != nullptr) return;  // sums of its own
  for_each_device([](device::Device& device) {
    if (!device.api().host_can_read) return;
    for (const DType dtype : kHalves) {
      CAPTURE(std::string(dtype_name(dtype)));
      for (const Size& size : sizes()) {
        CAPTURE(size.rows);
        CAPTURE(size.depth);
        Problem problem(dtype, size.rows, size.outputs, size.depth, 8 * (size.rows % 3),
                        size.rows % 2 == 0);
        for (const bool cancels : {false, true}) {
          CAPTURE(cancels);
          if (cancels) problem.cancel();
          const Matrix y = on_device(device, problem);
          int64_t wrong = 0;
          for (int64_t i = 0; i < size.rows * size.outputs; ++i) {
            const int64_t row = i / size.outputs, output = i % size.outputs;
            wrong += float_bits(y.at(row, output)) != float_bits(expected(problem, row, output));
          }
          CHECK(wrong == 0);
        }
      }
    }
  });
}

TEST_CASE("16-bit dtypes are as near to float64 as float32 sums are") {
  for_each_device([](device::Device& device) {
    for (const DType dtype : kHalves) {
      CAPTURE(std::string(dtype_name(dtype)));
      for (const Size& size : sizes()) {
        CAPTURE(size.rows);
        CAPTURE(size.depth);
        const Problem problem(dtype, size.rows, size.outputs, size.depth);
        const Matrix y = on_device(device, problem);
        const double unit = dtype == DType::kFloat16 ? 0x1p-11 : 0x1p-8;
        int64_t wrong = 0;
        for (int64_t row = 0; row < size.rows; ++row) {
          for (int64_t output = 0; output < size.outputs; ++output) {
            double sum = double{problem.bias.at(0, output)};
            double magnitude = std::abs(sum);
            for (int64_t k = 0; k < size.depth; ++k) {
              const double product = double{problem.x.at(row, k)} * double{problem.w.at(output, k)};
              sum += product;
              magnitude += std::abs(product);
            }
            const double error = std::abs(double{y.at(row, output)} - sum);
            wrong += !(error <= unit * std::abs(sum) + 0x1p-20 * magnitude);
          }
        }
        CHECK(wrong == 0);
      }
    }
  });
}

TEST_CASE("a row has the same bits on a device among any number of rows, at any place") {
  for_each_device([](device::Device& device) {
    const int64_t most = small_tests() ? 80 : 200;
    for (const DType dtype : kDTypes) {
      CAPTURE(std::string(dtype_name(dtype)));
      Problem problem(dtype, most, 21, 296);
      problem.cancel();
      const Matrix all = on_device(device, problem);
      for (const int64_t rows : {1, 2, 7, 8, 9, 16, 17, 33, 64, 65}) {
        CAPTURE(rows);
        for (const int64_t first : {int64_t{0}, (most - rows) / 2, most - rows}) {
          const Matrix some = on_device(device, problem, {0, first, rows});
          CHECK(differing(all, first, some, rows, 21) == 0);
        }
      }
    }
  });
}

TEST_CASE("a product whose rows cannot be read 16 bytes at a time has the same bits") {
  for_each_device([](device::Device& device) {
    for (const DType dtype : kHalves) {
      CAPTURE(std::string(dtype_name(dtype)));
      for (const int64_t rows : {3, 40, 70}) {
        CAPTURE(rows);
        Problem problem(dtype, rows, 11, 296);
        problem.cancel();
        const Matrix plain = on_device(device, problem);
        CHECK(differing(plain, 0, on_device(device, problem, {1, 0, 0}), rows, 11) == 0);
        // As deep, with elements of 0 after an odd depth.
        Problem odd(dtype, rows, 11, 293, 2);
        odd.cancel();
        Problem padded(dtype, rows, 11, 296);
        for (int64_t row = 0; row < std::max<int64_t>(rows, 11); ++row) {
          for (int64_t k = 0; k < 296; ++k) {
            for (const auto matrix : {&Problem::x, &Problem::w}) {
              if (row >= (matrix == &Problem::x ? rows : 11)) continue;
              const uint16_t code =
                  k < 293 ? (odd.*matrix).words()[row * (odd.*matrix).stride + k] : uint16_t{0};
              (padded.*matrix).words()[row * (padded.*matrix).stride + k] = code;
            }
          }
        }
        padded.biased = false;
        CHECK(differing(on_device(device, padded), 0, on_device(device, odd), rows, 11) == 0);
      }
    }
  });
}

TEST_CASE("what is not a number in one row is in no other row") {
  for_each_device([](device::Device& device) {
    for (const DType dtype : kDTypes) {
      CAPTURE(std::string(dtype_name(dtype)));
      for (const int64_t rows : {2, 40, 70}) {
        CAPTURE(rows);
        Problem problem(dtype, rows, 9, 72);
        const Matrix before = on_device(device, problem);
        const float bad[] = {std::numeric_limits<float>::quiet_NaN(),
                             std::numeric_limits<float>::infinity()};
        for (int64_t k = 0; k < 72; ++k) {
          round_to(dtype, bad[k % 2], problem.x.data(), problem.x.stride + k);  // of row 1
        }
        const Matrix after = on_device(device, problem);
        CHECK(differing(before, 0, after, 1, 9) == 0);
        CHECK(std::isnan(after.at(1, 0)));
        const Matrix rest = on_device(device, problem, {0, 2, rows - 2 > 0 ? rows - 2 : 1});
        if (rows > 2) CHECK(differing(before, 2, rest, rows - 2, 9) == 0);
      }
    }
  });
}

TEST_CASE("no row and no output is no work, and no depth is the bias") {
  for_each_device([](device::Device& device) {
    LinearParams params;
    CHECK(device.api().multiply(device.context(), &params, nullptr) == device::kOk);
    for (const DType dtype : kDTypes) {
      for (const int64_t rows : {1, 70}) {
        const Problem problem(dtype, rows, 3, 0);
        const Matrix y = on_device(device, problem);
        for (int64_t i = 0; i < rows * 3; ++i) {
          CHECK(y.at(i / 3, i % 3) == problem.bias.at(0, i % 3));
        }
      }
    }
  });
}

}  // namespace
}  // namespace kvpager::testing
