#include <doctest/doctest.h>

#include <string>

#include "kernels/kernel_table.h"
#include "kvpager/error.h"
#include "random_problem.h"
#include "tiers.h"

namespace kvpager::testing {
namespace {

std::vector<Shape> shapes() {
  std::vector<Shape> all;
  for (const DType dtype : kDTypes) {
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

TEST_CASE("attention equals the documented order in every bit and binary64 within tolerance") {
  for (const Shape& shape : shapes()) {
    CAPTURE(name_of(shape));
    Sequence sequence(layout_of(shape), 13 * shape.tokens + 21, 5);
    for (const bool selecting : {false, true}) {
      CAPTURE(selecting);
      const int64_t c = shape.tokens;
      std::vector<Row> rows = rows_at({0, c - 1, c, 8 * c - 1, 8 * c, sequence.length() - 1});
      if (selecting) select_at_random(shape, &rows);
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
      std::vector<Row> rows = last_rows(sequence, 64);
      if (selecting) select_at_random(shape, &rows);
      const auto together = attend(shape, {&sequence}, rows);
      for (const size_t i : {size_t{0}, size_t{1}, size_t{31}, size_t{62}, size_t{63}}) {
        CHECK(differing_bits(attend(shape, {&sequence}, {rows[i]})[0], together[i]) == 0);
      }
      std::vector<Row> shuffled = rows;
      std::mt19937 random(1);
      std::shuffle(shuffled.begin(), shuffled.end(), random);
      const auto other_order = attend(shape, {&sequence}, shuffled, {3, {}});
      for (size_t i = 0; i < shuffled.size(); ++i) {
        CHECK(differing_bits(
                  other_order[i],
                  together[static_cast<size_t>(shuffled[i].position - rows[0].position)]) == 0);
      }
      for (const int threads : {2, 8}) {
        const auto threaded = attend(shape, {&sequence}, rows, {threads, {}});
        CHECK(differing_bits(threaded, together) == 0);
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
    const std::vector<Row> rows = last_rows(sequence, 1);
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
    const std::vector<Row> rows = last_rows(first, 5);
    const auto plain = attend(shape, {&first}, rows);
    const auto waves = attend(shape, {&first}, rows, {1, {1, 2}});
    const auto elsewhere = attend(shape, {&moved}, rows, {2, {2}});
    std::vector<Row> mixed;
    for (size_t i = 0; i < rows.size(); ++i) {
      mixed.push_back(rows_at({static_cast<int64_t>(i) * 3}, 1)[0]);
      mixed.push_back(rows[i]);
      mixed.push_back(padding_row());
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
    const std::vector<Row> rows = last_rows(sequence, 9);
    std::vector<std::vector<float>> expected;
    {
      const KernelOverride tier(*tables.front());
      expected = attend(shape, {&sequence}, rows);
    }
    in_every_tier([&](const KernelTable& table) {
      CHECK(std::string(isa_name()) == table.name);
      const auto got = attend(shape, {&sequence}, rows);
      CHECK(differing_bits(got, expected) == 0);
    });
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

}  // namespace
}  // namespace kvpager::testing
