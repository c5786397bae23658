// Problems drawn at random, for tests that hold kernels against a reference.
#pragma once

#include <algorithm>
#include <initializer_list>
#include <random>
#include <utility>
#include <vector>

#include "attend_problem.h"

namespace kvpager::testing {

class Dice {
 public:
  explicit Dice(uint32_t seed) : random_(seed) {}
  // In [low, high].
  int roll(int low, int high) {
    return low + static_cast<int>(random_() % static_cast<uint32_t>(high - low + 1));
  }
  bool one_in(int n) { return roll(1, n) == 1; }
  template <class T>
  T pick(std::initializer_list<T> values) {
    return *(values.begin() + roll(0, static_cast<int>(values.size()) - 1));
  }
  template <class T>
  void shuffle(std::vector<T>* values) {
    for (size_t i = values->size(); i > 1; --i) {
      std::swap((*values)[i - 1], (*values)[static_cast<size_t>(roll(0, static_cast<int>(i) - 1))]);
    }
  }

 private:
  std::mt19937 random_;
};

inline Shape random_shape(Dice& dice) {
  const auto dtype = [&] {
    return dice.pick({DType::kFloat32, DType::kFloat16, DType::kBFloat16});
  };
  const auto stored = [&](int* dim) {
    if (dice.one_in(2)) return dtype();
    const DType codes = dice.pick({DType::kQ8, DType::kQ4});
    if (codes == DType::kQ4) *dim = (*dim + kQ4Group - 1) / kQ4Group * kQ4Group;
    return codes;
  };
  Shape shape;
  shape.kv_heads = dice.roll(1, 4);
  shape.group = dice.roll(1, 8);
  shape.tokens = 16 << dice.roll(0, 2);
  shape.k_dim = 16 * dice.roll(1, 6);
  shape.v_dim = 16 * dice.roll(1, 6);
  shape.dtype = stored(&shape.k_dim);
  shape.value_dtype = stored(&shape.v_dim);
  shape.io_dtype = dtype();
  shape.k_rotated = is_coded(shape.dtype) && dice.one_in(2);
  shape.v_rotated = is_coded(shape.values()) && dice.one_in(2);
  if (dice.one_in(3)) shape.window = dice.roll(1, 200);
  if (dice.one_in(3)) shape.softcap = dice.pick({0.5f, 5.0f, 50.0f});
  shape.sinks = dice.one_in(3);
  if (dice.one_in(3)) shape.scaling = dice.pick({0.01f, 1.0f, 8.0f});
  return shape;
}

inline std::vector<std::vector<int32_t>> random_selection(Dice& dice, const Shape& shape,
                                                          int64_t position) {
  const int one_in = dice.roll(1, 6);
  std::vector<std::vector<int32_t>> lists(static_cast<size_t>(shape.kv_heads));
  for (auto& list : lists) {
    for (int32_t c = 0; c < position / shape.tokens; ++c) {
      if (dice.one_in(one_in)) list.push_back(c);
    }
    list.push_back(static_cast<int32_t>(position / shape.tokens));
  }
  return lists;
}

inline void select_at_random(const Shape& shape, std::vector<Row>* rows) {
  Dice dice(static_cast<uint32_t>(rows->size()));
  for (Row& row : *rows) row.selected = random_selection(dice, shape, row.position);
}

// Rows of one to three sequences in any order among padding.
struct RandomRows {
  std::vector<Sequence> sequences;
  std::vector<Sequence*> pointers;
  std::vector<Row> rows;
};

inline RandomRows random_rows(Dice& dice, const Shape& shape, uint32_t seed) {
  RandomRows made;
  const int count = dice.roll(1, 3);
  made.sequences.reserve(static_cast<size_t>(count));
  for (int i = 0; i < count; ++i) {
    const int64_t length = dice.roll(1, shape.tokens * dice.roll(1, 20));
    made.sequences.emplace_back(layout_of(shape), length, seed * 7 + static_cast<uint32_t>(i),
                                dice.one_in(2));
    made.pointers.push_back(&made.sequences.back());
  }
  const bool selecting = dice.one_in(2);
  const int total = dice.one_in(4) ? dice.roll(17, 40) : dice.roll(1, 8);
  for (int i = 0; i < total; ++i) {
    Row row;
    row.sequence = dice.one_in(6) ? -1 : dice.roll(0, count - 1);
    if (row.sequence >= 0) {
      const Sequence& sequence = made.sequences[static_cast<size_t>(row.sequence)];
      row.position = dice.roll(0, static_cast<int>(sequence.length()) - 1);
      row.query_seed = static_cast<uint32_t>(i);
      if (selecting) row.selected = random_selection(dice, shape, row.position);
    }
    made.rows.push_back(row);
  }
  dice.shuffle(&made.rows);
  return made;
}

}  // namespace kvpager::testing
