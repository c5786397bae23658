// y = x W^T + b, held against its order of operations written down once more, in every tier.
#include "kvpager/linear.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstring>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "../kernels/float_mode.h"
#include "base/half.h"
#include "base/workspaces.h"
#include "compute/compute_table.h"
#include "kvpager/attention.h"
#include "kvpager/error.h"
#include "kvpager/thread_pool.h"
#include "linear_problem.h"

namespace kvpager::testing {
namespace {

TEST_CASE("every element has the order of operations that is written down, in every tier") {
  in_linear_tiers([&](const KernelTable&) {
    for (const DType dtype : kDTypes) {
      CAPTURE(std::string(dtype_name(dtype)));
      for (const int64_t depth : {1, 15, 16, 31, 33, 64, 100, 257}) {
        CAPTURE(depth);
        for (const int64_t rows : {1, 2, 5, 6, 7, 13, 25}) {
          const Problem problem(dtype, rows, 11, depth, depth % 3, rows % 2 == 0);
          CHECK(wrong_elements(problem, problem.run()) == 0);
        }
      }
    }
  });
}

TEST_CASE("the base tier has no products of its own: those of v3 are taken") {
  const KernelTable& base = *runnable_kernels().front();
  const KernelOverride tier(base);
  CHECK((compute_table(base).linear_panel == nullptr));
  CHECK(&linear_kernels() == &isa_v3::compute_table(Extensions::kNone));
  CHECK(std::string(kernels().name) == "base");
}

TEST_CASE("of a pair of bfloat16 the odd element is first, in every tier") {
  for (const int64_t rows : {3, 14}) {
    Problem problem(DType::kBFloat16, rows, 8, 64, 0, false);
    // Of each lane -2^26, then 1 and 2^26, in which the 1 is lost: 0, or 1 the other way around.
    const auto fill = [](Matrix& matrix, float first) {
      int64_t k = 0;
      matrix.fill([&] {
        const int64_t at = k++ % 64;
        if (at < 32) return at % 2 == 1 ? first : 0.0f;
        return at % 2 == 1 ? 1.0f : 8192.0f;
      });
    };
    fill(problem.x, -8192.0f);
    fill(problem.w, 8192.0f);
    REQUIRE(expected_element(problem, 0, 0) == 0.0f);
    in_linear_tiers(
        [&](const KernelTable&) { CHECK(wrong_elements(problem, problem.run()) == 0); });
  }
}

TEST_CASE("so it is where rows, outputs and the depth take several blocks of the caches") {
  for (const DType dtype : kDTypes) {
    CAPTURE(std::string(dtype_name(dtype)));
    for (const auto& [rows, outputs, depth] : {std::array<int64_t, 3>{303, 53, 2085},
                                               {290, 100, 1030},
                                               {100, 53, 3185},
                                               {10, 53, 2085}}) {
      CAPTURE(depth);
      const Problem problem(dtype, rows, outputs, depth);
      in_linear_tiers(
          [&](const KernelTable&) { CHECK(wrong_elements(problem, problem.run()) == 0); });
    }
  }
}

TEST_CASE("several products at once have the bits of each alone, whose input each of them reads") {
  const int64_t outputs = 40;
  for (const DType dtype : kDTypes) {
    CAPTURE(std::string(dtype_name(dtype)));
    for (const int64_t rows : {3, 20}) {
      CAPTURE(rows);
      const Problem a(dtype, rows, outputs, 90), c(dtype, rows, outputs, 50);
      Problem b = a;
      b.x.fill([n = 0]() mutable { return static_cast<float>(++n % 7) - 3.0f; });
      b.w.fill([n = 0]() mutable { return static_cast<float>(++n % 5) - 1.0f; });
      std::vector<Matrix> written(5, Matrix(dtype, rows, outputs));
      std::vector<LinearParams> products = {a.params(written[0]), b.params(written[1]),
                                            b.params(written[2]), c.params(written[3]),
                                            a.params(written[4])};
      products[1].x = products[0].x;  // with weights of their own
      products[1].x_stride = products[0].x_stride;
      products[4].w = products[1].w;
      products[4].w_stride = products[1].w_stride;
      products[4].bias = products[1].bias;
      in_linear_tiers([&](const KernelTable&) {
        for (const int threads : {1, 3}) {
          ThreadPool pool(threads);
          linear(products.data(), 5, pool);
          CHECK(wrong_elements(a, written[0]) == 0);
          CHECK(wrong_elements(b, written[2]) == 0);
          CHECK(wrong_elements(c, written[3]) == 0);
          for (int64_t i = 0; i < rows * outputs; ++i) {
            const int64_t row = i / outputs, output = i % outputs;
            REQUIRE(float_bits(written[1].at(row, output)) ==
                    float_bits(written[4].at(row, output)));
          }
        }
      });
    }
  }
}

TEST_CASE("a row has the same bits among any number of rows, at any place, in any tier") {
  const int64_t most = 256, outputs = 37, depth = 200;
  for (const DType dtype : kDTypes) {
    CAPTURE(std::string(dtype_name(dtype)));
    const Problem all(dtype, most, outputs, depth);
    const Matrix whole = all.run();
    in_linear_tiers([&](const KernelTable&) {
      for (const int64_t rows : {1, 2, 3, 4, 5, 7, 8, 16, 24, 25, 64, 255, 256}) {
        CAPTURE(rows);
        for (const int64_t first : {int64_t{0}, (most - rows) / 2, most - rows}) {
          ThreadPool pool(1);
          Matrix y(dtype, rows, outputs);
          LinearParams params = all.params(y);
          params.rows = rows;
          params.x = static_cast<const char*>(params.x) + first * all.x.stride * dtype_bytes(dtype);
          linear(params, pool);
          int different = 0;
          for (int64_t i = 0; i < rows * outputs; ++i) {
            different += float_bits(y.at(i / outputs, i % outputs)) !=
                         float_bits(whole.at(first + i / outputs, i % outputs));
          }
          CHECK(different == 0);
        }
      }
    });
  }
}

TEST_CASE("threads change no bit, and nothing is written between rows") {
  for (const DType dtype : kDTypes) {
    for (const int64_t rows : {1, 9, 40}) {
      const Problem problem(dtype, rows, 700, 96, 5);
      const Matrix alone = problem.run(1);
      for (const int threads : {2, 3, 8}) CHECK(problem.run(threads).bytes() == alone.bytes());
    }
  }
}

TEST_CASE("the calling thread's floating-point mode changes no bit") {
  for (const DType dtype : kDTypes) {
    Problem problem(dtype, 3, 9, 64);
    std::mt19937 random(5);
    std::uniform_real_distribution<float> small(-1e-19f, 1e-19f);  // products are denormal
    problem.x.fill([&] { return small(random); });
    problem.w.fill([&] { return small(random); });
    problem.bias.fill([&] { return 1e-39f; });
    in_linear_tiers([&](const KernelTable&) {
      for (const NamedMode& mode : kModes) {
        CAPTURE(std::string(mode.name));
        Matrix y(dtype, 3, 9, 3);
        {
          ThreadPool pool(1);
          const FloatMode floats(mode.bits);
          linear(problem.params(y), pool);
        }
        CHECK(wrong_elements(problem, y) == 0);
      }
    });
  }
}

TEST_CASE(
    "bfloat16 of every exponent has the same bits in every tier, denormals and infinities too") {
  Problem problem(DType::kBFloat16, 7, 64, 96, 0, false);
  std::mt19937 random(9);
  for (int round = 0; round < 200; ++round) {
    CAPTURE(round);
    const unsigned base = static_cast<unsigned>(random() % 256);
    const unsigned width = 1 + static_cast<unsigned>(random() % 40);
    const auto code = [&](unsigned middle) {
      const unsigned exponent = std::min(254u, middle + static_cast<unsigned>(random() % width));
      return static_cast<uint16_t>((random() & 0x807F) | (exponent << 7));
    };
    // Products about the least normal number for half of the rounds.
    const unsigned other = round % 2 == 0 ? 127u - std::min(127u, base) : random() % 256;
    for (int64_t i = 0; i < 7 * 96; ++i) problem.x.words()[i] = code(base);
    for (int64_t i = 0; i < 64 * 96; ++i) problem.w.words()[i] = code(other);
    const auto codes_of = [&](const auto& at) {
      std::string codes;
      for (int64_t row = 0; row < 7; ++row) {
        for (int64_t n = 0; n < 64; ++n) {  // a NaN's payload is nobody's promise
          const float value = at(row, n);
          const uint32_t bits = std::isnan(value) ? 0x7FC00000u : float_bits(value);
          codes.append(reinterpret_cast<const char*>(&bits), sizeof bits);
        }
      }
      return codes;
    };
    const std::string written =
        codes_of([&](int64_t row, int64_t n) { return expected_element(problem, row, n); });
    in_linear_tiers([&](const KernelTable&) {
      const Matrix y = problem.run();
      const bool same = codes_of([&](int64_t row, int64_t n) { return y.at(row, n); }) == written;
      CHECK(same);
    });
  }
}

TEST_CASE("a row times the matrix that it chose has the bits of that product alone") {
  const int64_t experts = 5, outputs = 21, depth = 90;
  for (const DType dtype : kDTypes) {
    CAPTURE(std::string(dtype_name(dtype)));
    for (const auto& [inputs, choices] :
         {std::pair<int64_t, int64_t>{1, 1}, {1, 3}, {7, 2}, {40, 1}, {60, 3}}) {
      CAPTURE(inputs);
      CAPTURE(choices);
      // Its matrix is that of all experts, one below the other.
      const Problem all(dtype, inputs, experts * outputs, depth, 2);
      const Matrix whole = all.run();
      const int64_t rows = inputs * choices;
      std::mt19937 random(static_cast<unsigned>(rows));
      std::vector<int64_t> chosen(static_cast<size_t>(rows));
      for (int64_t& one : chosen) one = static_cast<int64_t>(random() % (experts - 1));  // not all
      for (const int threads : {1, 3}) {
        ThreadPool pool(threads, 0);
        Matrix y(dtype, rows, outputs, 3);
        ExpertsParams params;
        params.all = all.params(y);
        params.all.rows = rows;
        params.all.outputs = outputs;
        params.experts = experts;
        params.choices = choices;
        params.chosen = chosen.data();
        linear_of_experts(params, pool);
        int different = 0;
        for (int64_t row = 0; row < rows; ++row) {
          for (int64_t output = 0; output < outputs; ++output) {
            const int64_t column = chosen[static_cast<size_t>(row)] * outputs + output;
            different +=
                float_bits(y.at(row, output)) != float_bits(whole.at(row / choices, column));
          }
        }
        CHECK(different == 0);
        const std::string between =
            y.bytes().substr(static_cast<size_t>(outputs * dtype_bytes(dtype)),
                             static_cast<size_t>(3 * dtype_bytes(dtype)));
        CHECK(between.find_first_not_of('\x7f') == std::string::npos);
      }
    }
  }
}

TEST_CASE("an expert that is not there is refused before anything is written") {
  ThreadPool pool(1);
  const Problem all(DType::kFloat32, 3, 8, 16);
  Matrix y(DType::kFloat32, 3, 4);
  const std::string before = y.bytes();
  ExpertsParams params;
  params.all = all.params(y);
  params.all.outputs = 4;
  params.experts = 2;
  for (const int64_t wrong : {int64_t{-1}, int64_t{2}}) {
    const int64_t chosen[] = {0, 1, wrong};
    params.chosen = chosen;
    CHECK_THROWS_WITH(linear_of_experts(params, pool),
                      str("row 2 chose expert ", wrong, "; expected 0 to 1").c_str());
  }
  CHECK(y.bytes() == before);
  params.all.rows = 0;
  linear_of_experts(params, pool);
}

TEST_CASE("experts that another thread rewrites are those that were checked, or are refused") {
  const int64_t rows = 64, experts = 4;
  const Problem all(DType::kFloat32, rows, experts * 4, 16);
  Matrix y(DType::kFloat32, rows, 4);
  std::vector<int64_t> chosen(static_cast<size_t>(rows), 0);
  ThreadPool pool(1);
  ExpertsParams params;
  params.all = all.params(y);
  params.all.outputs = 4;
  params.experts = experts;
  params.chosen = chosen.data();
  std::atomic<bool> done{false};
  std::thread writer([&] {
    for (uint64_t i = 0; !done; ++i) {
      const int64_t one =
          i % 2 == 0 ? int64_t{1} << 40 : 1;  // far outside of all memory, or an expert
      __atomic_store_n(&chosen[i / 2 % chosen.size()], one, __ATOMIC_RELAXED);
    }
  });
  int taken = 0, refused = 0;
  const auto end = std::chrono::steady_clock::now() + std::chrono::milliseconds(150);
  while (std::chrono::steady_clock::now() < end) {
    try {
      linear_of_experts(params, pool);
      ++taken;
    } catch (const InvalidArgumentError&) {
      ++refused;
    }
  }
  done = true;
  writer.join();
  CHECK(taken + refused > 0);
}

// A product of experts that copies this many rows of so many numbers.
void run_experts(ThreadPool& pool, int64_t rows, int64_t depth) {
  const Problem all(DType::kFloat32, rows, 4, depth);
  Matrix y(DType::kFloat32, rows, 2);
  const std::vector<int64_t> chosen(static_cast<size_t>(rows), 1);
  ExpertsParams params;
  params.all = all.params(y);
  params.all.outputs = 2;
  params.experts = 2;
  params.chosen = chosen.data();
  linear_of_experts(params, pool);
}

TEST_CASE("what products need while they run is counted, bounded together and kept for the next") {
  ThreadPool pool(2, 0);
  CHECK(pool.workspace_bytes() == 0);
  run_experts(pool, 1, 64);
  CHECK(pool.workspace_bytes() == 0);  // one row is read and written where it is
  run_experts(pool, 8, 64);
  const int64_t few = pool.workspace_bytes();
  CHECK(few >= 8 * 64 * 4);
  run_experts(pool, 8, 64);
  CHECK(pool.workspace_bytes() == few);

  const int64_t most = Workspaces::kKeptBytes, depth = 32768;
  run_experts(pool, most / depth / 4 + 8, depth);  // more than is kept
  CHECK(pool.workspace_bytes() <= most / 8);       // of what threads multiply with

  std::vector<std::thread> threads;
  for (int i = 0; i < 3; ++i) {
    threads.emplace_back([&] { run_experts(pool, most / depth / 4 / 2, depth); });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK(pool.workspace_bytes() >= most / 2);
  CHECK(pool.workspace_bytes() <= most);
}

TEST_CASE("a workspace is the smallest that is kept, and the largest ones stay") {
  Workspaces all;
  const int64_t quarter = Workspaces::kKeptBytes / 4 / 4;  // floats
  const float* small = nullptr;
  const float* large = nullptr;
  {
    const Workspace a(all, 100), b(all, quarter);
    small = a.data();
    large = b.data();
    CHECK(all.bytes() == (100 + quarter) * 4);
    CHECK(Workspace(all, 0).data() == nullptr);
  }
  CHECK(all.bytes() == (100 + quarter) * 4);
  {
    const Workspace a(all, 50), b(all, 101);
    CHECK(a.data() == small);
    CHECK(b.data() == large);
  }
  {
    const Workspace a(all, 2 * quarter), b(all, quarter), c(all, quarter), d(all, 50);
    CHECK(b.data() == large);
    CHECK(d.data() == small);
  }
  CHECK(all.bytes() == 4 * quarter * 4);  // the smallest went
  {
    const Workspace a(all, 4 * quarter + 1);
  }
  CHECK(all.bytes() == 4 * quarter * 4);
}

TEST_CASE("no row and no output is no work, and a dtype of codes is refused") {
  ThreadPool pool(1);
  LinearParams params;
  params.rows = 0;
  linear(params, pool);
  params.dtype = DType::kQ8;
  CHECK_THROWS_WITH(linear(params, pool), "x is q8; expected float32, float16 or bfloat16");
}

}  // namespace
}  // namespace kvpager::testing
