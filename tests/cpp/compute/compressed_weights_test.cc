// Lossless copies of weights in 12 bits: products of them have the bits of the weights' own.
#include "kvpager/compressed_weights.h"

#include <doctest/doctest.h>

#include <array>
#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "compute/compute_table.h"
#include "kvpager/program.h"
#include "linear_problem.h"

namespace kvpager::testing {
namespace {

constexpr DType kCompressible[] = {DType::kFloat32, DType::kBFloat16};

// Weights as in a checkpoint of bfloat16.
Problem narrow_problem(DType dtype, int64_t rows, int64_t outputs, int64_t depth, int64_t gap = 0) {
  Problem problem(dtype, rows, outputs, depth, gap, rows % 2 == 0);
  std::mt19937 random(static_cast<unsigned>(depth));
  std::normal_distribution<float> normal(0.0f, 0.03f);
  problem.w.fill([&] { return bfloat16_to_float(float_to_bfloat16(normal(random))); });
  return problem;
}

bool add(CompressedWeights& copies, const Problem& of, int threads = 1) {
  ThreadPool pool(threads, 0);
  return copies.add(of.w.data(), of.w.dtype, of.outputs, of.depth, of.w.stride, pool);
}

void poke(Problem& problem, int64_t output, int64_t k, float value) {
  round_to(problem.w.dtype, value, problem.w.data(), output * problem.w.stride + k);
}

// The bfloat16 whose bits these are, as a NaN is not to be rounded.
void poke_bits(Problem& problem, int64_t output, int64_t k, uint16_t bits) {
  const int64_t at = output * problem.w.stride + k;
  if (problem.w.dtype == DType::kBFloat16) {
    problem.w.words()[at] = bits;
  } else {
    problem.w.words()[2 * at] = 0;
    problem.w.words()[2 * at + 1] = bits;
  }
}

int64_t marks(const CompressedWeights& copies, const Problem& of) {
  Matrix y(of.x.dtype, of.rows, of.outputs);
  const CompressedRows rows = copies.find(of.params(y));
  int64_t marked = 0;
  for (int64_t i = 0; i < of.outputs * mark_words(rows.of_row); ++i) {
    marked += __builtin_popcountll(rows.marked[i]);
  }
  return marked;
}

TEST_CASE("products of copies have the order of operations that is written down, in every tier") {
  in_linear_tiers([&](const KernelTable&) {
    for (const DType dtype : kCompressible) {
      CAPTURE(std::string(dtype_name(dtype)));
      for (const int64_t depth : {64, 65, 95, 127, 128, 200, 1030, 2085, 4225}) {
        CAPTURE(depth);
        for (const int64_t rows : {1, 2, 3, 4, 6, 7, 12, 13}) {
          CAPTURE(rows);
          const Problem problem = narrow_problem(dtype, rows, 11, depth, depth % 3);
          CompressedWeights copies;
          REQUIRE(add(copies, problem));
          CHECK(wrong_elements(problem, problem.run(1, &copies)) == 0);
        }
      }
    }
  });
}

TEST_CASE("copies are read in place of the weights, by few rows") {
  in_linear_tiers([&](const KernelTable& table) {
    for (const DType dtype : kCompressible) {
      const int64_t most = compute_table(table).linear_compressed_rows(dtype);
      for (const int64_t rows : {int64_t{1}, most, most + 1}) {
        Problem problem = narrow_problem(dtype, rows, 24, 256);
        CompressedWeights copies;
        REQUIRE(add(copies, problem));
        const std::string before = problem.run().bytes();
        problem.w.fill([] { return 1.0f; });
        CHECK((problem.run(1, &copies).bytes() == before) == (rows <= most));
      }
    }
  });
}

TEST_CASE("a group with a weight that 12 bits cannot hold is read from the weights") {
  const float tiny = std::ldexp(1.0f, -80), huge = std::ldexp(1.0f, 60);
  const float infinite = std::numeric_limits<float>::infinity();
  in_linear_tiers([&](const KernelTable&) {
    for (const DType dtype : kCompressible) {
      CAPTURE(std::string(dtype_name(dtype)));
      for (const int64_t rows : {1, 3, 8}) {
        Problem problem = narrow_problem(dtype, rows, 20, 64 * 70 + 9);
        std::mt19937 random(7);
        problem.w.fill([&] {  // sixteen high bytes, so that no other finds a place
          const float size = std::ldexp(1.0f, 2 * static_cast<int>(random() % 8) - 16);
          return random() % 2 == 0 ? size : -size;
        });
        int64_t odd = 0;
        for (const float value : {tiny, -tiny, huge, -huge, infinite}) {
          poke(problem, odd, 64 * odd, value);                   // the first group
          poke(problem, odd + 5, 64 * 69 + 63, value);           // the last
          poke(problem, odd + 10, 64 * (60 + odd) + 31, value);  // on either side of a word's end
          odd += 1;
        }
        int64_t expected_marks = 15;
        if (dtype == DType::kFloat32) {  // none of whose bits may be lost
          poke(problem, 17, 640, std::nextafter(problem.w.at(17, 640), 9.0f));
          ++expected_marks;
        }
        CompressedWeights copies;
        REQUIRE(add(copies, problem));
        CHECK(marks(copies, problem) == expected_marks);
        CHECK(problem.run(1, &copies).bytes() == problem.run().bytes());
      }
    }
  });
}

TEST_CASE("every finite bfloat16 survives, zeros and denormals too") {
  in_linear_tiers([&](const KernelTable&) {
    for (const DType dtype : kCompressible) {
      CAPTURE(std::string(dtype_name(dtype)));
      // Sixteen high bytes to an output, each with every low byte, in another order everywhere.
      Problem problem(dtype, 1, 16, 16 * 256, 0, false);
      for (int64_t output = 0; output < 16; ++output) {
        for (int64_t k = 0; k < 16 * 256; ++k) {
          const auto code = static_cast<uint16_t>((output * 16 + (k + k / 16) % 16) << 8 | k / 16);
          const bool finite = (code & 0x7F80) != 0x7F80;
          poke_bits(problem, output, k, finite ? code : code & 0xFF7F);
        }
      }
      CompressedWeights copies;
      REQUIRE(add(copies, problem));
      CHECK(marks(copies, problem) == 0);
      // One row of x at a time has a one where a weight is to be seen.
      for (int64_t k = 0; k < 16 * 256; k += 5) {
        problem.x.fill([] { return 0.0f; });
        round_to(dtype, 1.0f, problem.x.data(), k);
        const Matrix own = problem.run(), read = problem.run(1, &copies);
        REQUIRE(own.bytes() == read.bytes());
      }
    }
  });
}

TEST_CASE("every infinity and NaN survives") {
  in_linear_tiers([&](const KernelTable&) {
    for (const DType dtype : kCompressible) {
      // One to an output: of several NaNs a sum has the payload of any.
      Problem problem(dtype, 1, 256, 64, 0, false);
      problem.x.fill([] { return 1.0f; });
      problem.w.fill([] { return 1.0f; });
      for (int64_t output = 0; output < 256; ++output) {
        const auto high = static_cast<uint16_t>(output < 128 ? 0x7F80 : 0xFF80);
        poke_bits(problem, output, output % 64, static_cast<uint16_t>(high | output % 128));
      }
      CompressedWeights copies;
      REQUIRE(add(copies, problem));
      CHECK(marks(copies, problem) == 0);
      const Matrix own = problem.run(), read = problem.run(1, &copies);
      CHECK(std::isinf(own.at(0, 0)));
      CHECK(std::isnan(own.at(0, 255)));
      CHECK(own.bytes() == read.bytes());
    }
  });
}

TEST_CASE("weights of too many sizes, too few or of another dtype get no copies") {
  ThreadPool pool(1);
  CompressedWeights copies;
  const KernelOverride tier(*runnable_kernels().back());
  const Problem full(DType::kFloat32, 1, 40, 256);  // float32 with all its bits
  CHECK_FALSE(add(copies, full));
  Problem wide(DType::kBFloat16, 1, 40, 256);
  std::mt19937 random(1);
  wide.w.fill([&] { return std::ldexp(1.0f, static_cast<int>(random() % 200) - 100); });
  CHECK_FALSE(add(copies, wide));
  CHECK_FALSE(add(copies, narrow_problem(DType::kBFloat16, 1, 40, 63)));
  CHECK_FALSE(add(copies, Problem(DType::kFloat16, 1, 40, 256)));
  CHECK(copies.bytes() == 0);
  CHECK(copies.weight_bytes() == 0);
  const Problem narrow = narrow_problem(DType::kBFloat16, 1, 40, 256);
  REQUIRE(add(copies, narrow));
  CHECK(copies.weight_bytes() == 40 * 256 * 2);
  CHECK(copies.bytes() == 40 * (256 * 3 / 2 + 16 + 8));
  copies.clear();
  CHECK(copies.bytes() == 0);
  CHECK(narrow.run(1, &copies).bytes() == narrow.run().bytes());
}

TEST_CASE("rows that are in one place or overlap get no copies, and are multiplied as they lie") {
  for (const DType dtype : kCompressible) {
    for (const int64_t stride : {0, 1, 127}) {
      const Problem problem = narrow_problem(dtype, 2, 40, 128);
      ThreadPool pool(2, 0);
      CompressedWeights copies;
      CHECK_FALSE(copies.add(problem.w.data(), dtype, 40, 128, stride, pool));
      CHECK(copies.bytes() == 0);
      Matrix y(dtype, 2, 40);
      LinearParams params = problem.params(y);
      params.w_stride = stride;
      CHECK(copies.find(params).groups == nullptr);
    }
  }
}

TEST_CASE("copies are those of some rows of a matrix, and of nothing else") {
  const KernelOverride tier(*runnable_kernels().back());
  const Problem problem = narrow_problem(DType::kBFloat16, 1, 40, 256, 4);
  const Problem other = narrow_problem(DType::kBFloat16, 1, 8, 256);
  CompressedWeights copies;
  REQUIRE(add(copies, problem));
  Matrix y(DType::kBFloat16, 1, 40);
  const LinearParams all = problem.params(y);
  CHECK(copies.find(all).groups != nullptr);
  CHECK(copies.find(other.params(y)).groups == nullptr);
  const auto moved = [&](int64_t elements, int64_t outputs) {
    LinearParams part = all;
    part.w = static_cast<const uint16_t*>(all.w) + elements;
    part.outputs = outputs;
    return part;
  };
  const int64_t row = problem.w.stride;
  CHECK(copies.find(moved(3 * row, 37)).groups == copies.find(all).from(3).groups);
  CHECK(copies.find(moved(3 * row, 38)).groups == nullptr);
  CHECK(copies.find(moved(1, 1)).groups == nullptr);
  CHECK(copies.find(moved(-row, 1)).groups == nullptr);
  LinearParams changed = all;
  changed.depth = 255;
  CHECK(copies.find(changed).groups == nullptr);
  changed = all;
  changed.w_stride += 1;
  CHECK(copies.find(changed).groups == nullptr);
  changed = all;
  changed.dtype = DType::kFloat16;
  CHECK(copies.find(changed).groups == nullptr);
}

TEST_CASE("threads change no bit of copies, nor of products of them") {
  in_linear_tiers([&](const KernelTable&) {
    for (const DType dtype : kCompressible) {
      for (const int64_t rows : {1, 3, 9}) {
        const Problem problem = narrow_problem(dtype, rows, 700, 192, 5);
        const Matrix alone = problem.run();
        for (const int threads : {1, 2, 5}) {
          CompressedWeights copies;
          REQUIRE(add(copies, problem, threads));
          CHECK(problem.run(threads, &copies).bytes() == alone.bytes());
        }
      }
    }
  });
}

TEST_CASE("of products that are computed at once some may have copies") {
  in_linear_tiers([&](const KernelTable&) {
    for (const DType dtype : kCompressible) {
      CAPTURE(std::string(dtype_name(dtype)));
      for (const int64_t rows : {1, 3, 5, 8}) {
        CAPTURE(rows);
        const std::vector<Problem> all = {narrow_problem(dtype, rows, 30, 192),
                                          Problem(dtype, rows, 21, 100),
                                          narrow_problem(dtype, rows, 13, 320)};
        CompressedWeights copies;
        REQUIRE(add(copies, all[0]));
        REQUIRE(add(copies, all[2]));
        for (const std::vector<size_t>& order :
             {std::vector<size_t>{0, 1, 2}, {1, 0, 2}, {2, 1}, {1}}) {
          std::vector<Matrix> written;
          std::vector<LinearParams> products;
          for (const size_t i : order) written.emplace_back(dtype, rows, all[i].outputs, 3);
          for (size_t i = 0; i < order.size(); ++i) {
            products.push_back(all[order[i]].params(written[i]));
          }
          ThreadPool pool(2, 0);
          linear(products.data(), static_cast<int64_t>(products.size()), pool, &copies);
          for (size_t i = 0; i < order.size(); ++i) {
            CHECK(wrong_elements(all[order[i]], written[i]) == 0);
          }
        }
      }
    }
  });
}

TEST_CASE("experts and programs read copies, too") {
  const int64_t experts = 4, outputs = 24, depth = 192;
  in_linear_tiers([&](const KernelTable&) {
    ThreadPool pool(1);
    for (const DType dtype : kCompressible) {
      Problem all = narrow_problem(dtype, 3, experts * outputs, depth);
      all.biased = false;
      CompressedWeights copies;
      REQUIRE(add(copies, all));
      const auto by_experts = [&](const CompressedWeights* read) {
        Matrix y(dtype, 3, outputs);
        ExpertsParams params;
        params.all = all.params(y);
        params.all.outputs = outputs;
        params.experts = experts;
        const int64_t chosen[] = {2, 0, 2};
        params.chosen = chosen;
        linear_of_experts(params, pool, read);
        return y.bytes();
      };
      const auto by_program = [&](const CompressedWeights* read) {
        Matrix y(dtype, 3, experts * outputs);
        const auto operand = [&](int32_t base, int64_t stride) {
          Operand made;
          made.base = base;
          made.dtype = dtype;
          made.strides = {0, 0, stride, 1};
          return made;
        };
        Instruction one;
        one.operation = Operation::kLinear;
        one.shape = {1, 1, 3, experts * outputs};
        one.depth = depth;
        one.out = operand(0, y.stride);
        one.a = operand(1, all.x.stride);
        one.b = operand(2, all.w.stride);
        const auto memory = [](const Matrix& of) {
          return Memory{const_cast<void*>(of.data()), static_cast<int64_t>(of.bytes().size())};
        };
        const Program program({one}, {memory(y), memory(all.x), memory(all.w)}, {});
        program.run({}, pool, {}, read);
        return y.bytes();
      };
      const std::string experts_before = by_experts(nullptr), before = by_program(nullptr);
      CHECK(by_experts(&copies) == experts_before);
      CHECK(by_program(&copies) == before);
      all.w.fill([] { return 1.0f; });  // of which the copies know nothing
      CHECK(by_experts(nullptr) != experts_before);
      CHECK(by_experts(&copies) == experts_before);
      CHECK(by_program(&copies) == before);
    }
  });
}

}  // namespace
}  // namespace kvpager::testing
