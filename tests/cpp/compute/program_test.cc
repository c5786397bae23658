// Programs of small operations, held against one element after the other, in every tier.
#include "kvpager/program.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#include "../kernels/elements.h"
#include "../kernels/tiers.h"
#include "compute/compute_table.h"
#include "kvpager/error.h"
#include "kvpager/thread_pool.h"

namespace kvpager::testing {
namespace {

std::vector<std::byte> numbers(DType dtype, int64_t count, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  std::vector<std::byte> made(static_cast<size_t>(count * dtype_bytes(dtype)));
  for (int64_t i = 0; i < count; ++i) {
    round_to(dtype, std::ldexp(normal(random), static_cast<int>(random() % 9) - 4), made.data(), i);
  }
  return made;
}

float expected(Operation operation, float a, float b) {
  switch (operation) {
    case Operation::kAdd:
      return a + b;
    case Operation::kSubtract:
      return a - b;
    case Operation::kMultiply:
      return a * b;
    case Operation::kNegate:
      return -a;
    case Operation::kSquare:
      return a * a;
    case Operation::kReciprocalSqrt:
      return 1.0f / std::sqrt(a);
    default:
      return a;
  }
}

Memory of(std::vector<std::byte>& bytes) {
  return {bytes.data(), static_cast<int64_t>(bytes.size())};
}

void run(const Instruction& one, std::vector<Memory> memory, int threads = 1) {
  ThreadPool pool(threads, 0);
  Program({one}, std::move(memory), {}).run({}, pool);
}

std::vector<std::byte> rounded(DType dtype, const std::vector<float>& values) {
  std::vector<std::byte> made(values.size() * static_cast<size_t>(dtype_bytes(dtype)));
  for (size_t i = 0; i < values.size(); ++i) {
    round_to(dtype, values[i], made.data(), static_cast<int64_t>(i));
  }
  return made;
}

// What an operation makes of each number of a row.
std::vector<std::byte> made_of(Operation operation, DType dtype, std::vector<std::byte>& x,
                               DType made) {
  const auto count = static_cast<int64_t>(x.size()) / dtype_bytes(dtype);
  auto out = numbers(made, count, 17);
  Instruction one;
  one.operation = operation;
  one.shape = {1, 1, 1, count};
  one.out = {0, 0, made, {0, 0, 0, 1}};
  one.a = {1, 0, dtype, {0, 0, 0, 1}};
  run(one, {of(out), of(x)});
  return out;
}

}  // namespace

TEST_CASE("every operation computes in float32 and rounds once, in every tier and dtype") {
  constexpr int64_t kRows = 3, kGap = 5;
  in_every_tier([&](const KernelTable& table) {
    for (const DType left : kDTypes) {
      for (const DType right : kDTypes) {
        for (const DType made : kDTypes) {
          for (const int64_t columns : {1, 15, 16, 33, 2100}) {
            for (int kind = 0; kind <= static_cast<int>(Operation::kReciprocalSqrt); ++kind) {
              const auto operation = static_cast<Operation>(kind);
              auto a = numbers(left, kRows * (columns + kGap), 1);
              auto b = numbers(right, columns, 2);  // one row for all
              auto out = numbers(made, kRows * columns, 3);
              auto right_out = out;
              Instruction one;
              one.operation = operation;
              one.shape = {1, 1, kRows, columns};
              one.out = {0, 0, made, {0, 0, columns, 1}};
              one.a = {1, 0, left, {0, 0, columns + kGap, 1}};
              one.b = {2, 0, right, {0, 0, 0, 1}};
              run(one, {of(out), of(a), of(b)});
              for (int64_t i = 0; i < kRows * columns; ++i) {
                const float x = widen(left, a.data(), i / columns * (columns + kGap) + i % columns);
                const float y = widen(right, b.data(), i % columns);
                const float z = expected(operation, x, y);
                round_to(made, z, right_out.data(), i);
                if (std::isnan(z)) round_to(made, 0.0f, right_out.data(), i);
                if (std::isnan(widen(made, out.data(), i))) round_to(made, 0.0f, out.data(), i);
              }
              INFO(table.name, " operation ", kind, " columns ", columns);
              CHECK(out == right_out);
            }
          }
        }
      }
    }
  });
}

TEST_CASE("a number and an element of stride 0 stand for a whole row, on either side") {
  auto row = numbers(DType::kFloat32, 20, 4), one_element = numbers(DType::kFloat32, 1, 5);
  auto out = numbers(DType::kFloat32, 20, 6);
  const float element = widen(DType::kFloat32, one_element.data(), 0);
  Instruction one;
  one.operation = Operation::kSubtract;
  one.shape = {1, 1, 1, 20};
  one.out = {0, 0, DType::kFloat32, {0, 0, 0, 1}};
  const Operand whole = {1, 0, DType::kFloat32, {0, 0, 0, 1}};
  const Operand repeated = {2, 0, DType::kFloat32, {0, 0, 0, 0}};
  const auto check = [&](auto of_row) {
    run(one, {of(out), of(row), of(one_element)});
    for (int64_t i = 0; i < 20; ++i) {
      CHECK(widen(DType::kFloat32, out.data(), i) == of_row(widen(DType::kFloat32, row.data(), i)));
    }
  };
  one.a = whole;
  one.b = repeated;
  check([&](float x) { return x - element; });
  one.a = repeated;
  one.b = whole;
  check([&](float x) { return element - x; });
  one.a = whole;
  one.b = Operand{};
  one.b.number = 0.375f;
  check([&](float x) { return x - 0.375f; });
}

TEST_CASE("SiLU has the bits of its written order in every tier, and at most 3 ulp of error") {
  const auto written = [](float x) {
    const float t = std::max(-std::max(x, -100.0f), -104.0f);
    const float n = std::rint(t * 1.44269504f);
    const float r = std::fma(n, -1.428606765330187045e-06f, std::fma(n, -0.693145751953125f, t));
    float p = 0.000198527617612853646278381f;
    for (const float term : {0.00139304355252534151077271f, 0.00833336077630519866943359f,
                             0.0416664853692054748535156f, 0.166666671633720397949219f, 0.5f}) {
      p = std::fma(p, r, term);
    }
    const float e = std::ldexp(std::fma(r * r, p, r) + 1.0f, static_cast<int>(n));
    return x / (e + 1.0f);
  };
  std::vector<float> edges = {0.0f, -0.0f, 1e-40f, -1e-40f, 3e38f, -3e38f, 104.0f, -104.0f};
  for (float x = -110.0f; x < 110.0f; x += 0.0078125f) edges.push_back(x);
  edges.push_back(INFINITY);
  for (const DType dtype : kDTypes) {
    const auto count = static_cast<int64_t>(edges.size());
    auto x = rounded(dtype, edges);
    in_every_tier([&](const KernelTable& table) {
      const auto out = made_of(Operation::kSilu, dtype, x, dtype);
      auto right = out;
      for (int64_t i = 0; i < count; ++i) {
        const float of = widen(dtype, x.data(), i);
        const float made = written(of);
        round_to(dtype, made, right.data(), i);
        const double exact = double{of} / (1.0 + std::exp(-double{of}));
        if (of > -88.0f && std::isfinite(of)) {
          CHECK(std::abs(double{made} - exact) <= 3 * 0x1p-24 * std::abs(exact) + 0x1p-149);
        }
      }
      INFO(table.name, " ", dtype_name(dtype));
      CHECK(out == right);
    });
  }
}

TEST_CASE("GELU has the same bits in every tier, and an error of few last places of its argument") {
  std::vector<float> edges = {0.0f, -0.0f, 1e-40f, -1e-40f, 1e-20f, 3e38f, 104.0f, -104.0f};
  for (float x = -7.0f; x < 7.0f; x += 0.0009765625f) edges.push_back(x);
  edges.push_back(INFINITY);
  for (const DType dtype : kDTypes) {
    auto x = rounded(dtype, edges);
    const auto made_by = [&](const KernelTable& table) {
      const KernelOverride use(table);
      return made_of(Operation::kGeluTanh, dtype, x, DType::kFloat32);
    };
    const auto first = made_by(*runnable_kernels()[0]);
    for (int64_t i = 0; i < static_cast<int64_t>(edges.size()); ++i) {
      const double of = double{widen(dtype, x.data(), i)};
      const double made = double{widen(DType::kFloat32, first.data(), i)};
      if (!std::isfinite(of)) continue;
      const double inner = std::sqrt(2 / std::acos(-1.0)) * (of + 0.044715 * of * of * of);
      const double exact = of / 2 * (1 + std::tanh(inner));
      CHECK(std::abs(made - exact) <= 3 * 0x1p-24 * std::abs(of) + 0x1p-149);
    }
    for (const KernelTable* table : runnable_kernels()) {
      INFO(table->name, " ", dtype_name(dtype));
      CHECK(made_by(*table) == first);
    }
  }
}

TEST_CASE(
    "attention gets an instruction's tensors and sinks, in order, and its error ends the run") {
  constexpr int64_t kRows = 3, kHeads = 4, kKvHeads = 2, kDim = 8, kOutDim = 5;
  auto memory = numbers(DType::kFloat32, 400, 18);
  auto sinks = numbers(DType::kBFloat16, kHeads, 19);
  auto given = numbers(DType::kFloat16, kRows * kKvHeads * kOutDim, 20);
  Instruction one;
  one.operation = Operation::kAttend;
  one.shape = {kRows, kHeads, kKvHeads, kOutDim};
  one.depth = kDim;
  one.out = {0, 0, DType::kFloat32, {0, kHeads * kOutDim, kOutDim, 1}};
  one.a = {0, 400, DType::kFloat32, {0, kDim, kRows * kDim, 1}};  // heads first
  one.b = {0, 800, DType::kFloat32, {0, 0, kDim, 1}};             // one row for all
  one.c = {2, 0, DType::kFloat16, {0, kKvHeads * kOutDim, kOutDim, 1}};
  Instruction other = one;
  other.d = {1, 0, DType::kBFloat16, {0, 0, 0, 1}};
  Instruction after;
  after.operation = Operation::kNegate;
  after.shape = {1, 1, 1, 1};
  after.out = {0, 240, DType::kFloat32, {0, 0, 0, 1}};
  after.a = {0, 0, DType::kFloat32, {0, 0, 0, 1}};
  const auto bytes = static_cast<int64_t>(given.size());
  const Program program({one, other, after}, {of(memory), of(sinks)}, {bytes});
  ThreadPool pool(1);
  size_t calls = 0;
  const std::byte* const at = memory.data();
  program.run({of(given)}, pool, [&](const Attention& call) {
    CHECK(call.number == calls++);
    CHECK(call.q.data == at + 400);
    CHECK(call.q.row_stride == kDim);
    CHECK(call.q.head_stride == kRows * kDim);
    CHECK(call.k.data == at + 800);
    CHECK(call.k.row_stride == 0);
    CHECK(call.v.data == given.data());
    CHECK(call.v.dtype == DType::kFloat16);
    CHECK(call.out.data == at);
    for (const TensorView& view : {call.q, call.k, call.v, call.out}) CHECK(view.rows == kRows);
    CHECK(call.q.heads == kHeads);
    CHECK(call.k.heads == kKvHeads);
    CHECK(call.v.heads == kKvHeads);
    CHECK(call.out.heads == kHeads);
    CHECK(call.q.dim == kDim);
    CHECK(call.k.dim == kDim);
    CHECK(call.v.dim == kOutDim);
    CHECK(call.out.dim == kOutDim);
    REQUIRE((call.sinks != nullptr) == (call.number == 1));
    for (int64_t i = 0; call.sinks != nullptr && i < kHeads; ++i) {
      CHECK(call.sinks[i] == widen(DType::kBFloat16, sinks.data(), i));
    }
    *static_cast<float*>(call.out.data) = 2.0f;
  });
  CHECK(calls == 2);
  CHECK(widen(DType::kFloat32, memory.data(), 60) == -2.0f);  // read what attention had written
  *reinterpret_cast<float*>(memory.data() + 240) = 7.0f;
  CHECK_THROWS_AS(
      program.run({of(given)}, pool, [](const Attention&) { throw CapacityError("full"); }),
      CapacityError);
  CHECK_THROWS_AS(program.run({of(given)}, pool), InvalidArgumentError);
  CHECK(widen(DType::kFloat32, memory.data(), 60) == 7.0f);
  const auto refused = [&](auto change) {
    Instruction bad = other;
    change(bad);
    CHECK_THROWS_AS(Program({bad}, {of(memory), of(sinks)}, {bytes}), InvalidArgumentError);
  };
  refused([](Instruction& bad) { bad.shape[0] = 100; });
  refused([](Instruction& bad) { bad.shape[1] = 5; });  // more heads than sinks
  refused([](Instruction& bad) { bad.shape[2] = 3; });
  refused([](Instruction& bad) { bad.shape[3] = 6; });
  refused([](Instruction& bad) { bad.depth = 400; });
  refused([](Instruction& bad) { bad.depth = 0; });
  refused([](Instruction& bad) { bad.a.strides[3] = 0; });
  refused([](Instruction& bad) { bad.b = Operand{}; });
  refused([](Instruction& bad) { bad.out.offset = 1600; });
}

TEST_CASE("a mean has the same bits in every tier") {
  for (const int64_t count : {8, 31, 32, 100, 128, 1024, 5120, 40000}) {
    auto x = numbers(DType::kFloat32, 2 * count, 7);
    std::vector<std::byte> first;
    in_every_tier([&](const KernelTable& table) {
      auto out = numbers(DType::kFloat32, 2, 8);
      Instruction one;
      one.operation = Operation::kMean;
      one.shape = {1, 1, 2, count};
      one.out = {0, 0, DType::kFloat32, {0, 0, 1, 0}};
      one.a = {1, 0, DType::kFloat32, {0, 0, count, 1}};
      run(one, {of(out), of(x)});
      if (first.empty()) first = out;
      INFO(table.name, " count ", count);
      CHECK(out == first);
      double sum = 0.0;
      for (int64_t i = 0; i < count; ++i) sum += double{widen(DType::kFloat32, x.data(), i)};
      const double mean = sum / static_cast<double>(count);
      CHECK(double{widen(DType::kFloat32, out.data(), 0)} == doctest::Approx(mean).epsilon(1e-4));
    });
  }
}

TEST_CASE("a mean is summed in eight lanes, of four vectors at a time") {
  constexpr int64_t kMeans = 50, kCount = 128;
  auto x = numbers(DType::kFloat32, kMeans * kCount, 14);
  auto out = numbers(DType::kFloat32, kMeans, 15);
  Instruction one;
  one.operation = Operation::kMean;
  one.shape = {1, 1, kMeans, kCount};
  one.out = {0, 0, DType::kFloat32, {0, 0, 1, 0}};
  one.a = {1, 0, DType::kFloat32, {0, 0, kCount, 1}};
  run(one, {of(out), of(x)});
  for (int64_t row = 0; row < kMeans; ++row) {
    float sum = 0.0f;
    for (int lane = 0; lane < 8; ++lane) {
      float of_lane = 0.0f;
      for (int vector = 0; vector < 4; ++vector) {
        float of_vector = 0.0f;
        for (int i = 0; i < 4; ++i) {
          of_vector += widen(DType::kFloat32, x.data(), row * kCount + i * 32 + vector * 8 + lane);
        }
        of_lane = vector == 0 ? of_vector : of_lane + of_vector;
      }
      sum += of_lane;
    }
    CHECK(widen(DType::kFloat32, out.data(), row) == sum / 128.0f);
  }
}

TEST_CASE("products are computed beside one another with the bits of each alone") {
  constexpr int64_t kRows = 3, kDepth = 130;
  for (const DType dtype : kDTypes) {
    auto x = numbers(dtype, kRows * kDepth, 9), bias = numbers(dtype, 40, 10);
    std::vector<std::vector<std::byte>> weights, together, alone;
    std::vector<Instruction> all;
    const int64_t outputs[] = {40, 1, 333};
    for (int32_t i = 0; i < 3; ++i) {
      weights.push_back(numbers(dtype, outputs[i] * kDepth, 20 + static_cast<unsigned>(i)));
      together.push_back(numbers(dtype, kRows * outputs[i], 30));
    }
    alone = together;
    std::vector<Memory> memory = {of(x), of(bias)};
    for (auto& each : weights) memory.push_back(of(each));
    for (auto& each : together) memory.push_back(of(each));
    for (int32_t i = 0; i < 3; ++i) {
      Instruction one;
      one.operation = Operation::kLinear;
      one.shape = {1, 1, kRows, outputs[i]};
      one.depth = kDepth;
      one.out = {5 + i, 0, dtype, {0, 0, outputs[i], 1}};
      one.a = {0, 0, dtype, {0, 0, kDepth, 1}};
      one.b = {2 + i, 0, dtype, {0, 0, kDepth, 1}};
      if (i == 0) one.c = {1, 0, dtype, {0, 0, 0, 1}};
      one.beside = i > 0;
      all.push_back(one);
    }
    ThreadPool pool(2, 0);
    Program(all, memory, {}).run({}, pool);
    for (int32_t i = 0; i < 3; ++i) {
      memory[static_cast<size_t>(5 + i)] = of(alone[static_cast<size_t>(i)]);
      Instruction one = all[static_cast<size_t>(i)];
      one.beside = false;
      Program({one}, memory, {}).run({}, pool);
    }
    CHECK(together == alone);
  }
}

TEST_CASE("memory that is given to a run is read and written where an operation says") {
  auto out = numbers(DType::kFloat32, 8, 11);
  auto given = numbers(DType::kBFloat16, 16, 12);
  Instruction one;
  one.shape = {1, 1, 1, 8};
  one.out = {0, 0, DType::kFloat32, {0, 0, 0, 1}};
  one.a = {1, 16, DType::kBFloat16, {0, 0, 0, 1}};
  ThreadPool pool(1);
  Program({one}, {of(out)}, {32}).run({of(given)}, pool);
  for (int64_t i = 0; i < 8; ++i) {
    CHECK(widen(DType::kFloat32, out.data(), i) == widen(DType::kBFloat16, given.data(), 8 + i));
  }
}

TEST_CASE("a run is refused, and computes nothing, unless it is given what the program expects") {
  auto out = numbers(DType::kFloat32, 8, 11);
  auto given = numbers(DType::kFloat32, 12, 12);
  Instruction one;
  one.shape = {1, 1, 1, 8};
  one.out = {0, 0, DType::kFloat32, {0, 0, 0, 1}};
  one.a = {1, 0, DType::kFloat32, {0, 0, 0, 1}};
  ThreadPool pool(1);
  const Program program({one}, {of(out)}, {32});
  const auto before = out;
  const Memory whole{given.data(), 32};
  const auto refused = [&](const std::vector<Memory>& memory, const char* words) {
    try {
      program.run(memory, pool);
      FAIL("it ran");
    } catch (const InvalidArgumentError& error) {
      CHECK(std::string(error.what()).find(words) != std::string::npos);
    }
    CHECK(out == before);
  };
  refused({}, "0 tensors are given; expected 1");
  refused({whole, whole}, "2 tensors are given; expected 1");
  refused({{given.data(), 28}}, "tensor 0 has 28 bytes; expected 32");
  refused({{given.data(), 36}}, "tensor 0 has 36 bytes; expected 32");
  refused({{nullptr, 32}}, "tensor 0 has no memory");
  refused({{given.data() + 2, 32}}, "tensor 0 is not aligned to 4 bytes");
  program.run({whole}, pool);
  CHECK(std::memcmp(out.data(), given.data(), 32) == 0);
}

TEST_CASE("operands outside of their memory are refused, and those that an operation cannot have") {
  auto bytes = numbers(DType::kFloat32, 32, 13);
  Instruction good;
  good.shape = {1, 1, 2, 16};
  good.out = {0, 0, DType::kFloat32, {0, 0, 16, 1}};
  good.a = {0, 0, DType::kFloat32, {0, 0, 16, 1}};
  CHECK_NOTHROW(Program({good}, {of(bytes)}, {}));
  const auto refused = [&](auto change) {
    Instruction bad = good;
    change(bad);
    CHECK_THROWS_AS(Program({bad}, {of(bytes)}, {}), InvalidArgumentError);
  };
  refused([](Instruction& one) { one.a.offset = 4; });
  refused([](Instruction& one) { one.a.offset = 2; });
  refused([](Instruction& one) { one.a.offset = -64; });
  refused([](Instruction& one) { one.out.base = 1; });
  refused([](Instruction& one) { one.a.base = -2; });
  refused([](Instruction& one) { one.a.base = Operand::kNumber; });
  refused([](Instruction& one) { one.a.strides[2] = 17; });
  refused([](Instruction& one) { one.a.strides[2] = -16; });
  refused([](Instruction& one) { one.a.strides[2] = INT64_MAX / 2; });
  refused([](Instruction& one) { one.a.strides[3] = 2; });
  refused([](Instruction& one) { one.out.strides[3] = 0; });
  refused([](Instruction& one) { one.shape[2] = 3; });
  refused([](Instruction& one) { one.shape[0] = 0; });
  refused([](Instruction& one) { one.a.dtype = DType::kQ8; });
  refused([](Instruction& one) { one.beside = true; });
  refused([](Instruction& one) {
    one.operation = Operation::kMean;
    one.a.dtype = DType::kBFloat16;
  });
  refused([](Instruction& one) {
    one.operation = Operation::kLinear;
    one.b = one.a;
    one.depth = 17;
  });
  refused([](Instruction& one) {
    one.operation = Operation::kLinear;
    one.b = one.a;
    one.depth = 16;
    one.b.dtype = DType::kFloat16;
  });
  refused([](Instruction& one) {
    one.operation = Operation::kLinear;
    one.shape = {1, 1, 1, 2};
    one.b = one.a;
    one.depth = 16;
    one.c = {0, 124, DType::kFloat32, {0, 0, 0, 0}};
  });
  Instruction product = good;
  product.operation = Operation::kLinear;
  product.shape = {1, 1, 1, 1};
  product.depth = 8;
  product.b = product.a;
  Instruction beside = product;
  beside.beside = true;
  CHECK_NOTHROW(Program({product, beside}, {of(bytes)}, {}));
  CHECK_THROWS_AS(Program({beside}, {of(bytes)}, {}), InvalidArgumentError);
  CHECK_THROWS_AS(Program({good, beside}, {of(bytes)}, {}), InvalidArgumentError);
  beside.shape[2] = 2;
  CHECK_THROWS_AS(Program({product, beside}, {of(bytes)}, {}), InvalidArgumentError);
}

}  // namespace kvpager::testing
