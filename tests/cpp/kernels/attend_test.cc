#include <doctest/doctest.h>

#include <string>

#include "attend_problem.h"
#include "kernels/kernel_table.h"
#include "kvpager/error.h"

namespace kvpager::testing {
namespace {

constexpr DType kDtypes[] = {DType::kFloat32, DType::kFloat16, DType::kBFloat16};

std::vector<Shape> shapes() {
  std::vector<Shape> all;
  for (const DType dtype : kDtypes) {
    for (const int group : {1, 2, 3, 4, 7, 8}) {
      Shape shape;
      shape.dtype = dtype;
      shape.group = group;
      shape.kv_heads = group == 1 ? 3 : 2;
      shape.k_dim = group == 3 ? 80 : 64;
      shape.v_dim = group == 2 ? 48 : group == 7 ? 176 : 64;
      shape.tokens = group == 4 ? 16 : group == 8 ? 128 : group == 3 ? 32 : 64;
      shape.window = group == 2 || group == 8 ? 75 : 0;
      shape.softcap = group == 3 || group == 8 ? 5.0f : 0.0f;
      shape.sinks = group == 4 || group == 7;
      all.push_back(shape);
    }
  }
  Shape large;
  large.tokens = 256;
  large.k_dim = 512;
  large.v_dim = 16;
  all.push_back(large);
  return all;
}

std::string name_of(const Shape& shape) {
  return std::string(dtype_name(shape.dtype)) + " group " + std::to_string(shape.group) + " C " +
         std::to_string(shape.tokens) + " dims " + std::to_string(shape.k_dim) + "/" +
         std::to_string(shape.v_dim);
}

// Random ascending lists that hold the row's own chunk, per kv head.
std::vector<std::vector<int32_t>> random_selection(const Shape& shape, int64_t position,
                                                   uint32_t seed) {
  std::mt19937 random(seed);
  std::vector<std::vector<int32_t>> lists(static_cast<size_t>(shape.kv_heads));
  const int32_t own = static_cast<int32_t>(position / shape.tokens);
  for (auto& list : lists) {
    for (int32_t c = 0; c < own; ++c) {
      if (random() % 3 == 0) list.push_back(c);
    }
    list.push_back(own);
  }
  return lists;
}

std::vector<Row> prefill_rows(const Sequence& sequence, int count) {
  std::vector<Row> rows;
  for (int i = 0; i < count; ++i) {
    Row row;
    row.position = sequence.length() - count + i;
    row.query_seed = static_cast<uint32_t>(i);
    rows.push_back(row);
  }
  return rows;
}

TEST_CASE("attention equals the documented order in every bit and binary64 within tolerance") {
  for (const Shape& shape : shapes()) {
    CAPTURE(name_of(shape));
    Sequence sequence(layout_of(shape), 13 * shape.tokens + 21, 5);
    for (const bool selecting : {false, true}) {
      CAPTURE(selecting);
      std::vector<Row> rows;
      for (const int64_t position :
           {int64_t{0}, int64_t{shape.tokens} - 1, int64_t{shape.tokens},
            8 * int64_t{shape.tokens} - 1, 8 * int64_t{shape.tokens}, sequence.length() - 1}) {
        Row row;
        row.position = position;
        row.query_seed = static_cast<uint32_t>(position);
        if (selecting)
          row.selected = random_selection(shape, position, 11 + static_cast<uint32_t>(position));
        rows.push_back(row);
      }
      const auto got = attend(shape, {&sequence}, rows);
      const double tolerance = shape.dtype == DType::kFloat32   ? 2e-5
                               : shape.dtype == DType::kFloat16 ? 2e-3
                                                                : 1.6e-2;
      for (size_t i = 0; i < rows.size(); ++i) {
        CAPTURE(rows[i].position);
        CHECK(differing_bits(got[i], reference_in_order(shape, sequence, rows[i])) == 0);
        const std::vector<double> exact = reference64(shape, sequence, rows[i]);
        double worst = 0;
        for (size_t j = 0; j < exact.size(); ++j) {
          worst =
              std::max(worst, std::fabs(double{got[i][j]} - exact[j]) / (1 + std::fabs(exact[j])));
        }
        CHECK(worst < tolerance);
      }
    }
  }
}

TEST_CASE(
    "a row alone equals the row among sixty-four, in any order and on any number of threads") {
  for (const Shape& shape : shapes()) {
    CAPTURE(name_of(shape));
    Sequence sequence(layout_of(shape), 11 * shape.tokens + 5, 6);
    for (const bool selecting : {false, true}) {
      CAPTURE(selecting);
      std::vector<Row> rows = prefill_rows(sequence, 64);
      for (Row& row : rows) {
        if (selecting) row.selected = random_selection(shape, row.position, row.query_seed + 3);
      }
      const auto together = attend(shape, {&sequence}, rows);
      for (const size_t i : {size_t{0}, size_t{1}, size_t{31}, size_t{62}, size_t{63}}) {
        CHECK(differing_bits(attend(shape, {&sequence}, {rows[i]})[0], together[i]) == 0);
      }
      std::vector<Row> shuffled = rows;
      std::mt19937 random(1);
      std::shuffle(shuffled.begin(), shuffled.end(), random);
      const auto other_order = attend(shape, {&sequence}, shuffled, {3, {}});
      for (size_t i = 0; i < shuffled.size(); ++i) {
        CHECK(differing_bits(other_order[i], together[shuffled[i].query_seed]) == 0);
      }
      for (const int threads : {2, 8}) {
        const auto threaded = attend(shape, {&sequence}, rows, {threads, {}});
        for (size_t i = 0; i < rows.size(); ++i)
          CHECK(differing_bits(threaded[i], together[i]) == 0);
      }
    }
  }
}

TEST_CASE("one row on many threads has its splits computed apart and the same bits") {
  Shape shape;
  shape.kv_heads = 1;
  shape.tokens = 16;
  Sequence sequence(layout_of(shape), 16 * 100 + 3, 7);
  for (const bool sinks : {false, true}) {
    shape.sinks = sinks;
    const std::vector<Row> rows = prefill_rows(sequence, 1);
    const auto one = attend(shape, {&sequence}, rows);
    CHECK(differing_bits(one[0], reference_in_order(shape, sequence, rows[0])) == 0);
    for (const int threads : {2, 3, 8}) {
      CHECK(differing_bits(attend(shape, {&sequence}, rows, {threads, {}})[0], one[0]) == 0);
      CHECK(differing_bits(attend(shape, {&sequence}, rows, {threads, {1, 2, 7}})[0], one[0]) == 0);
    }
  }
}

TEST_CASE("waves, block addresses and neighbours of other sequences change no bit") {
  for (const Shape& shape : shapes()) {
    CAPTURE(name_of(shape));
    const Layout layout = layout_of(shape);
    Sequence first(layout, 18 * shape.tokens + 9, 8);
    Sequence moved(layout, 18 * shape.tokens + 9, 8, true);
    Sequence other(layout, 3 * shape.tokens + 1, 9);
    const std::vector<Row> rows = prefill_rows(first, 5);
    const auto plain = attend(shape, {&first}, rows);
    const auto waves = attend(shape, {&first}, rows, {1, {1, 2}});
    const auto elsewhere = attend(shape, {&moved}, rows, {2, {2}});
    std::vector<Row> mixed;
    for (size_t i = 0; i < rows.size(); ++i) {
      Row padding;
      padding.sequence = -1;
      Row neighbour;
      neighbour.position = static_cast<int64_t>(i) * 3;
      neighbour.query_seed = 99;
      neighbour.sequence = 1;
      mixed.push_back(neighbour);
      mixed.push_back(rows[i]);
      mixed.push_back(padding);
    }
    const auto packed = attend(shape, {&first, &other}, mixed);
    for (size_t i = 0; i < rows.size(); ++i) {
      CHECK(differing_bits(waves[i], plain[i]) == 0);
      CHECK(differing_bits(elsewhere[i], plain[i]) == 0);
      CHECK(differing_bits(packed[3 * i + 1], plain[i]) == 0);
      for (const float x : packed[3 * i + 2]) CHECK(float_bits(x) == 0);
    }
  }
}

TEST_CASE("every instruction-set tier gives the same bits") {
  const auto tables = runnable_kernels();
  for (Shape shape : shapes()) {
    CAPTURE(name_of(shape));
    if (shape.tokens == 256) shape.k_dim = 64;
    Sequence sequence(layout_of(shape), 9 * shape.tokens + 5, 10);
    const std::vector<Row> rows = prefill_rows(sequence, 9);
    std::vector<std::vector<float>> expected;
    {
      const KernelOverride tier(*tables.front());
      expected = attend(shape, {&sequence}, rows);
    }
    for (const KernelTable* table : tables) {
      CAPTURE(table->name);
      const KernelOverride tier(*table);
      CHECK(std::string(isa_name()) == table->name);
      const auto got = attend(shape, {&sequence}, rows);
      for (size_t i = 0; i < rows.size(); ++i) CHECK(differing_bits(got[i], expected[i]) == 0);
    }
  }
}

TEST_CASE("a selected chunk that was not made readable is an invariant error") {
  const Shape shape;
  const Layout layout = layout_of(shape);
  std::vector<float> q(static_cast<size_t>(4 * shape.k_dim));
  std::vector<float> out(static_cast<size_t>(4 * shape.v_dim));
  const std::byte* slices[1] = {nullptr};
  const ChunkTableView table{slices, 1};
  const AttendRow row{3, 0};
  AttendParams params;
  params.layout = &layout;
  params.q_heads = 4;
  params.rows = 1;
  params.row = &row;
  params.tables = &table;
  params.q = {q.data(), DType::kFloat32, 1, 4, shape.k_dim, 4 * shape.k_dim, shape.k_dim};
  params.out = {out.data(), DType::kFloat32, 1, 4, shape.v_dim, 4 * shape.v_dim, shape.v_dim};
  ThreadPool pool(1);
  AttendWorkspace workspace;
  attend_begin(params, workspace, pool);
  CHECK_THROWS_AS(attend_wave(params, 0, 1, workspace, pool), InvariantError);
  params.q_heads = 3;
  CHECK_THROWS_AS(attend_begin(params, workspace, pool), InvalidArgumentError);
}

TEST_CASE("exp of zero is one, far below it is zero, and it is close and never rises in between") {
  for (const KernelTable* table : runnable_kernels()) {
    CAPTURE(table->name);
    std::vector<float> x = {0.0f,    -0.0f,  -86.99f,
                            -87.01f, -1e30f, -std::numeric_limits<float>::infinity()};
    for (int i = 1; i < 20000; ++i) x.push_back(-0.0045f * static_cast<float>(i));
    std::vector<float> y(x.size());
    table->exp(x.data(), y.data(), static_cast<int64_t>(x.size()));
    CHECK(float_bits(y[0]) == float_bits(1.0f));
    CHECK(float_bits(y[1]) == float_bits(1.0f));
    CHECK(y[2] > 0.0f);
    for (int i = 3; i < 6; ++i) CHECK(float_bits(y[static_cast<size_t>(i)]) == 0);
    double worst = 0;
    for (size_t i = 6; i < x.size() && x[i] > -87.0f; ++i) {
      const double exact = std::exp(double{x[i]});
      worst = std::max(worst, std::fabs(double{y[i]} - exact) / exact);
      CHECK(float_bits(y[i]) == float_bits(scalar_exp(x[i])));
      if (i > 6) CHECK(y[i] <= y[i - 1]);
    }
    CHECK(worst < 2.5e-7);
  }
}

}  // namespace
}  // namespace kvpager::testing
