// Selections made on a device are select_chunks() of the processor's scores, to the last chunk.
#include <algorithm>
#include <limits>
#include <string>
#include <vector>

#include "../device/devices.h"
#include "cuda/select_keys.cuh"
#include "selection_problem.h"

namespace kvpager::testing {
namespace {

Layout layout_of(int tokens, int k_dim, int kv_heads = 2, DType dtype = DType::kFloat16) {
  return key_layout(tokens, k_dim, dtype, kv_heads);
}

Selection top_k(int32_t chunks, int64_t sinks, int64_t recent) {
  Selection selection;
  selection.kind = Selection::Kind::kTopK;
  selection.chunks = chunks;
  selection.sinks = sinks;
  selection.recent = recent;
  return selection;
}

// The last `count` rows of a sequence.
void add_rows(SelectionProblem* problem, int sequence, int64_t count) {
  const int64_t length = problem->lengths[static_cast<size_t>(sequence)];
  for (int64_t i = length - count; i < length; ++i) problem->rows.push_back({sequence, i});
}

bool same_score(double a, double b) { return a == b || (a != a && b != b); }

void check(device::Device& device, const SelectionProblem& problem) {
  SelectionRun run(device, problem);
  const Selected got = run.on_device();
  const Selected expected = run.on_cpu();
  if (problem.selection.kind == Selection::Kind::kTopK && !got.scores.empty()) {
    int64_t wrong = 0;
    for (size_t i = 0; i < run.order().size(); ++i) {
      for (int head = 0; head < run.heads(); ++head) {
        for (int64_t c = 0; c < run.header().max_visible; ++c) {
          const size_t at = (i * static_cast<size_t>(run.heads()) + static_cast<size_t>(head)) *
                                static_cast<size_t>(run.scores_stride()) +
                            static_cast<size_t>(c);
          if (!run.is_scored(run.order()[i], c)) continue;
          wrong += same_score(got.scores[at], expected.scores[at]) ? 0 : 1;
        }
      }
    }
    CHECK(wrong == 0);
  }
  CHECK(got.bits == expected.bits);
  CHECK(got.read == expected.read);
  double worst = 0;
  for (size_t i = 0; i < got.mass.size(); ++i) {
    const double share = static_cast<double>(got.mass[i] - SelectionRun::kMassBefore) * 0x1p-40;
    worst = std::max(worst, std::fabs(share - run.shares()[i]));
    if (run.shares()[i] == 0.0) CHECK(got.mass[i] == SelectionRun::kMassBefore);
  }
  CHECK(worst < 1e-5 * run.heads());
  for (const gpu::Part& part : run.parts()) {
    double sum = 0;
    double wanted = 0;
    for (int64_t c = part.first; c < part.first + part.visible; ++c) {
      const size_t at = static_cast<size_t>(c);
      sum += static_cast<double>(got.mass[at] - SelectionRun::kMassBefore) * 0x1p-40;
      wanted += run.shares()[at];
    }
    CHECK(sum == doctest::Approx(wanted).epsilon(1e-6));
  }
}

TEST_CASE("scores on a device are the processor's, in every shape and group") {
  for_each_device([](device::Device& device) {
    uint32_t seed = 0;
    for (const int tokens : {16, 32, 64, 128, 256}) {
      for (const int k_dim : {16, 48, 64, 96, 128, 160, 256, 512}) {
        ++seed;
        if (tokens * k_dim > 16384 && seed % 3 != 0) continue;
        if (small_tests() && (tokens > 64 || (k_dim != 48 && k_dim != 128))) continue;
        SelectionProblem problem;
        problem.layout = layout_of(tokens, k_dim);
        problem.group = 1 + static_cast<int>(seed % 5);
        problem.q_dtype = kDTypes[seed % 3];
        problem.stride_padding = static_cast<int>(seed % 2) * 3;
        problem.selection = top_k(3, 16, tokens);
        problem.lengths = {tokens * 12 + 5};
        add_rows(&problem, 0, 1 + seed % 4);
        problem.distinct = 6;
        problem.seed = seed;
        CAPTURE(tokens);
        CAPTURE(k_dim);
        CAPTURE(problem.group);
        check(device, problem);
      }
    }
  });
}

TEST_CASE("queries of any size, special ones among them, are scored as on the processor") {
  const float inf = std::numeric_limits<float>::infinity();
  const float nan = std::numeric_limits<float>::quiet_NaN();
  for_each_device([&](device::Device& device) {
    uint32_t seed = 0;
    for (const float scale : {0.0f, 1.0f, 0x1p-140f, 1e-30f, 3e38f}) {
      if (small_tests() && scale != 1.0f) continue;
      for (const std::vector<float>& sprinkled :
           {std::vector<float>{}, {0.0f, -0.0f}, {nan, 1.0f}, {inf, nan, -inf, 0.5f}}) {
        SelectionProblem problem;
        problem.layout = layout_of(32, 48);
        problem.group = 3;
        problem.q_scale = scale;
        problem.q_sprinkled = sprinkled;
        problem.selection = top_k(4, 0, 32);
        problem.lengths = {32 * 40};
        add_rows(&problem, 0, 3);
        problem.distinct = 10;
        problem.seed = ++seed;
        CAPTURE(scale);
        CAPTURE(sprinkled.size());
        check(device, problem);
      }
    }
  });
}

// With one dimension that counts and one key per chunk, a score is the key, rounded.
float near_ties(uint64_t summary, int64_t page, int64_t dim, int64_t) {
  if (dim != 0) return 0.0f;
  const float steps = static_cast<float>(static_cast<int64_t>((summary * 7 + 3) % 11) - 5);
  return page == 0 ? 1.0f + steps * 0x1p-23f : steps * 0x1p-149f;
}
float all_equal(uint64_t, int64_t, int64_t, int64_t) { return 0.75f; }
float wide_range(uint64_t summary, int64_t page, int64_t dim, int64_t) {
  const float sign = summary % 2 == 0 ? 1.0f : -1.0f;
  const int exponent = static_cast<int>(summary * 37 % 270) - 140;
  return dim == 0 ? std::ldexp(sign, exponent) : page == 1 ? 0.0f : std::ldexp(sign, -149);
}
float zeros(uint64_t summary, int64_t, int64_t, int64_t) {
  return summary % 3 == 0 ? 0.0f : summary % 3 == 1 ? -0.0f : -1.0f;
}
float one_of_two(uint64_t summary, int64_t, int64_t dim, int64_t) {
  return dim == 0 ? (summary % 5 == 0 ? 2.0f : -2.0f) : 0.0f;
}
float ascending(uint64_t summary, int64_t, int64_t dim, int64_t) {
  return dim == 0 ? static_cast<float>(summary) : 0.0f;
}

TEST_CASE("of equal and nearly equal scores the same chunks are chosen as on the processor") {
  for_each_device([](device::Device& device) {
    for (const auto key : {near_ties, all_equal, wide_range, zeros, one_of_two, ascending}) {
      for (const int32_t k : {1, 2, 7, 40, 81, 95, 96, 97, 1000}) {
        if (small_tests() && k != 7 && k != 97) continue;
        SelectionProblem problem;
        problem.layout = layout_of(16, 16, 2, DType::kFloat32);
        problem.selection = top_k(k, 16, 16);
        problem.lengths = {16 * 99};
        problem.q_sprinkled = {1.0f};
        add_rows(&problem, 0, 2);
        problem.distinct = key == ascending ? 0 : 97;
        problem.key = key;
        problem.seed = static_cast<uint32_t>(k);
        problem.score_rows = {key == wide_range ? -1 : -2};
        CAPTURE(k);
        CAPTURE(static_cast<int>(key == near_ties) + 2 * static_cast<int>(key == all_equal) +
                4 * static_cast<int>(key == wide_range) + 8 * static_cast<int>(key == zeros) +
                16 * static_cast<int>(key == one_of_two) + 32 * static_cast<int>(key == ascending));
        check(device, problem);
      }
    }
  });
}

TEST_CASE("keys of scores have the order of select_chunks, and a key for each") {
  using gpu::scoring::order_of;
  const double inf = std::numeric_limits<double>::infinity();
  const double nan = std::numeric_limits<double>::quiet_NaN();
  const double tiny = std::numeric_limits<double>::denorm_min();
  CHECK(order_of(-0.0) == order_of(0.0));
  CHECK(order_of(nan) == order_of(-nan));
  uint64_t before = order_of(nan);
  for (const double score :
       {-inf, -1e300, -1.0, -tiny, 0.0, tiny, 1.0, 1.0 + 0x1p-52, 1e300, inf}) {
    CHECK(order_of(score) > before);
    before = order_of(score);
  }
}

TEST_CASE("rows, parts, windows and always ranges drawn at random select as on the processor") {
  for_each_device([](device::Device& device) {
    std::mt19937 random(3);
    const auto below = [&](uint32_t n) { return static_cast<int64_t>(random() % n); };
    for (int round = 0; round < (small_tests() ? 15 : 120); ++round) {
      SelectionProblem problem;
      const int tokens = random() % 3 == 0 ? 32 : 16;
      problem.layout = layout_of(tokens, 16 * static_cast<int>(1 + below(5)),
                                 static_cast<int>(1 + below(3)), kDTypes[below(3)]);
      problem.layout.layers = static_cast<int>(1 + below(3));
      problem.layer = static_cast<int>(below(static_cast<uint32_t>(problem.layout.layers)));
      problem.group = static_cast<int>(1 + below(6));
      problem.q_dtype = kDTypes[below(3)];
      problem.selection = top_k(static_cast<int32_t>(1 + below(12)), below(100), 16 + below(150));
      if (round % 5 == 3) problem.selection.kind = Selection::Kind::kWindow;
      if (round % 5 == 4) problem.selection.kind = Selection::Kind::kDense;
      int64_t at = below(400);
      for (int64_t i = below(5); i > 0; --i) {
        const int64_t length = 1 + below(90);
        problem.selection.always.emplace_back(at, at + length);
        at += length + below(60);
      }
      if (random() % 2 == 0) problem.window = 1 + below(700);
      const int64_t parts = 1 + below(5);
      for (int64_t s = 0; s < parts; ++s) problem.lengths.push_back(1 + below(1500));
      // At most 16 rows a part, mixed, some padding: `recent` covers what is not sealed.
      for (int64_t s = 0; s < parts; ++s) {
        add_rows(&problem, static_cast<int>(s),
                 std::min(problem.lengths[static_cast<size_t>(s)], 1 + below(16)));
        if (random() % 3 == 0) problem.rows.push_back({-1, 0});
      }
      std::shuffle(problem.rows.begin(), problem.rows.end(), random);
      for (int64_t s = 0; s < parts; ++s) problem.score_rows.push_back(random() % 4 == 0 ? -1 : -2);
      problem.distinct = static_cast<int>(5 + below(60));
      problem.spare = random() % 2 == 0 ? static_cast<int>(below(70)) : 0;
      if (random() % 3 == 0) problem.scratch_slots = 1 + below(5);
      problem.mass = random() % 4 != 0;
      problem.read = random() % 4 != 0;
      problem.selected = problem.selection.kind != Selection::Kind::kDense || random() % 2 == 0;
      problem.seed = static_cast<uint32_t>(round) + 1;
      CAPTURE(round);
      check(device, problem);
    }
  });
}

TEST_CASE("two hundred and fifty-six rows of three sequences share tiles and select each its own") {
  for_each_device([](device::Device& device) {
    if (small_tests()) return;
    SelectionProblem problem;
    problem.layout = layout_of(16, 64, 2, DType::kBFloat16);
    problem.group = 4;
    problem.q_dtype = DType::kBFloat16;
    problem.selection = top_k(8, 32, 256);
    problem.lengths = {16 * 120, 16 * 33 + 7, 600};
    add_rows(&problem, 0, 100);
    add_rows(&problem, 1, 100);
    add_rows(&problem, 2, 56);
    problem.distinct = 50;
    check(device, problem);
  });
}

TEST_CASE("rows of seventy sequences, more than a warp counts at once, select each its own") {
  for_each_device([](device::Device& device) {
    for (const Selection::Kind kind : {Selection::Kind::kTopK, Selection::Kind::kDense}) {
      SelectionProblem problem;
      problem.layout = layout_of(16, 32);
      problem.selection = top_k(2, 16, 32);
      problem.selection.kind = kind;
      for (int s = 0; s < 70; ++s) {
        problem.lengths.push_back(100 + 7 * s);
        add_rows(&problem, s, 1);
      }
      problem.distinct = 40;
      CAPTURE(static_cast<int>(kind));
      check(device, problem);
    }
  });
}

TEST_CASE(
    "rows of a sequence with heads of 128 dimensions, one and many, select as on the processor") {
  for_each_device([](device::Device& device) {
    for (const int64_t rows : {1, 2, 41}) {
      SelectionProblem problem;
      problem.layout = layout_of(64, 128, 2, DType::kBFloat16);
      problem.layout.layers = 2;
      problem.layer = 1;
      problem.group = 4;
      problem.q_dtype = DType::kBFloat16;
      problem.selection = top_k(16, 64, 256);
      problem.lengths = {64 * (small_tests() ? 40 : 150) + 11};
      add_rows(&problem, 0, rows);
      problem.distinct = 33;
      CAPTURE(rows);
      check(device, problem);
    }
  });
}

TEST_CASE("rows whose scores do not fit scratch are selected in turn, with the same outcome") {
  for_each_device([](device::Device& device) {
    for (const Selection::Kind kind : {Selection::Kind::kTopK, Selection::Kind::kDense}) {
      for (const int64_t slots : {1, 2, 5, 22}) {
        SelectionProblem problem;
        problem.layout = layout_of(16, 32);
        problem.selection = top_k(4, 16, 32);
        problem.selection.kind = kind;
        problem.lengths = {700, 800, 900};
        for (int s = 0; s < 3; ++s) add_rows(&problem, s, 7);
        problem.scratch_slots = slots;
        CAPTURE(slots);
        check(device, problem);
      }
    }
  });
}

TEST_CASE("four thousand and ninety-six chunks, and more than the kernel keeps, are chosen from") {
  for_each_device([](device::Device& device) {
    for (const int64_t chunks : {4096, 4700}) {
      if (small_tests() && chunks != 4700) continue;
      SelectionProblem problem;
      problem.layout = layout_of(16, 16, 1, DType::kFloat32);
      problem.selection = top_k(64, 0, 64);
      problem.selection.always = {{16 * 900, 16 * 1000}};
      problem.lengths = {16 * chunks};
      add_rows(&problem, 0, 1);
      problem.distinct = 3000;
      CAPTURE(chunks);
      check(device, problem);
      problem.layout = layout_of(16, 32, 1, DType::kBFloat16);
      problem.distinct = 500;
      check(device, problem);
    }
  });
}

TEST_CASE("selections do not depend on the order in which threads get their turn") {
  if (!tests_shim()) return;
  for (uint64_t seed = 1; seed <= 8; ++seed) {
    CAPTURE(seed);
    const std::shared_ptr<device::Device> device = shim(seed);
    SelectionProblem problem;
    problem.layout = layout_of(16, 48);
    problem.group = 3;
    problem.selection = top_k(5, 16, 48);
    problem.selection.always = {{100, 140}};
    problem.lengths = {1200, 700};
    add_rows(&problem, 0, 6);
    add_rows(&problem, 1, 1);
    problem.distinct = 9;
    check(*device, problem);
  }
}

TEST_CASE("nothing is written for a forward of padding alone, and nothing runs without outputs") {
  for_each_device([](device::Device& device) {
    SelectionProblem problem;
    problem.layout = layout_of(16, 32);
    problem.selection = top_k(4, 16, 32);
    problem.lengths = {};
    problem.rows = {{-1, 0}, {-1, 0}};
    check(device, problem);
    problem.lengths = {400};
    add_rows(&problem, 0, 3);
    problem.selection.kind = Selection::Kind::kDense;
    problem.selected = problem.mass = problem.read = false;
    check(device, problem);
  });
}

}  // namespace
}  // namespace kvpager::testing
