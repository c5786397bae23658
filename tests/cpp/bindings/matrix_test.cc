// Strides as tensors of other libraries have them, against each element's own place in memory.
#include "bindings/matrix.h"

#include <doctest/doctest.h>

#include <cstdint>
#include <limits>
#include <random>
#include <set>
#include <vector>

namespace kvpager {
namespace {

using Numbers = std::vector<int64_t>;

// A tensor of float32 in `memory`, which has to live.
dlpack::Tensor tensor_of(float* memory, Numbers& shape, Numbers& strides) {
  dlpack::Tensor t{};
  t.data = memory;
  t.device = {dlpack::kCpu, 0};
  t.ndim = static_cast<int32_t>(shape.size());
  t.dtype = {dlpack::kFloat, 32, 1};
  t.shape = shape.data();
  t.strides = strides.empty() ? nullptr : strides.data();
  return t;
}

// Offsets of all elements, in the order of indices.
Numbers places_of(const Numbers& shape, const Numbers& strides) {
  Numbers places = {0};
  for (size_t i = 0; i < shape.size(); ++i) {
    Numbers next;
    for (const int64_t place : places) {
      for (int64_t at = 0; at < shape[i]; ++at) next.push_back(place + at * strides[i]);
    }
    places = next;
  }
  return places;
}

TEST_CASE("rows of a matrix are where the tensor's elements are, whatever its strides") {
  std::mt19937 random(7);
  const auto pick = [&](const Numbers& from) { return from[random() % from.size()]; };
  std::vector<float> memory(1 << 16);
  int taken = 0;
  for (int round = 0; round < 200000; ++round) {
    Numbers shape, strides;
    for (uint64_t dims = 1 + random() % 4; dims > 0; --dims) {
      shape.push_back(pick({0, 1, 1, 2, 3, 4}));
      strides.push_back(pick({0, 0, 1, 2, 3, 4, 6, 8, 12, 24, -1}));
    }
    if (random() % 2 == 0) strides.back() = 1;
    dlpack::Tensor t = tensor_of(memory.data() + (1 << 15), shape, strides);
    const auto matrix = matrix_of(t);
    if (!matrix) continue;
    ++taken;
    Numbers places;
    for (int64_t row = 0; row < matrix->rows; ++row) {
      for (int64_t column = 0; column < matrix->columns; ++column) {
        places.push_back(row * matrix->stride + column);
      }
    }
    REQUIRE(places == places_of(shape, strides));
    const std::set<int64_t> distinct(places.begin(), places.end());
    if (matrix->rows_apart()) CHECK(distinct.size() == places.size());
  }
  CHECK(taken > 10000);
}

TEST_CASE("shapes and strides beyond 64 bits make no matrix") {
  constexpr int64_t kMost = std::numeric_limits<int64_t>::max();
  float one = 0;
  const std::pair<Numbers, Numbers> cases[] = {
      {{int64_t{1} << 40, int64_t{1} << 40, 1}, {0, 0, 1}},
      {{kMost, 3, 1}, {0, 0, 1}},
      {{2, kMost, 1}, {0, kMost, 1}},
      {{3, 2, 1}, {kMost, kMost / 2 + 1, 1}},
      {{2, 2}, {std::numeric_limits<int64_t>::min(), 1}},
  };
  for (auto [shape, strides] : cases) CHECK(!matrix_of(tensor_of(&one, shape, strides)));
}

TEST_CASE("what has no memory, another dtype or no dimensions makes no matrix") {
  alignas(4) char bytes[16] = {};
  Numbers shape = {2, 2}, strides = {2, 1};
  dlpack::Tensor t = tensor_of(nullptr, shape, strides);
  CHECK(!matrix_of(t));
  t.data = bytes;
  CHECK(matrix_of(t)->rows == 2);
  t.byte_offset = 1;
  CHECK(!matrix_of(t));
  t.byte_offset = 0;
  t.ndim = 0;
  CHECK(!matrix_of(t));
  t.ndim = 2;
  for (const dlpack::DataType type :
       {dlpack::DataType{dlpack::kInt, 32, 1}, dlpack::DataType{dlpack::kFloat, 64, 1},
        dlpack::DataType{dlpack::kFloat, 32, 2}}) {
    t.dtype = type;
    CHECK(!matrix_of(t));
  }
  shape = {0, 2};
  t = tensor_of(nullptr, shape, strides);
  CHECK(matrix_of(t)->empty());
}

TEST_CASE("matrices that have an element in common may overlap") {
  std::mt19937 random(11);
  std::vector<float> memory(4096);
  int apart = 0;
  for (int round = 0; round < 100000; ++round) {
    const int64_t common = random() % 2 == 0 ? 8 : 0;
    const auto made = [&] {
      Matrix m;
      m.data = memory.data() + random() % 40;
      m.rows = static_cast<int64_t>(random() % 4);
      m.columns = static_cast<int64_t>(random() % 6);
      m.stride = common != 0 ? common : static_cast<int64_t>(random() % 12);
      return m;
    };
    const auto places = [&](const Matrix& m) {
      std::set<int64_t> all;
      for (int64_t row = 0; row < m.rows; ++row) {
        for (int64_t column = 0; column < m.columns; ++column) {
          all.insert(static_cast<float*>(m.data) - memory.data() + row * m.stride + column);
        }
      }
      return all;
    };
    const Matrix a = made(), b = made();
    bool shared = false;
    for (const int64_t place : places(a)) shared = shared || places(b).count(place) > 0;
    if (shared) REQUIRE(may_overlap(a, b));
    // Columns of one larger matrix are told apart exactly.
    if (common != 0 && a.rows > 1 && b.rows > 1 && !shared && !may_overlap(a, b)) ++apart;
  }
  CHECK(apart > 1000);
}

}  // namespace
}  // namespace kvpager
