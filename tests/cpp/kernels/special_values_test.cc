// Attention over denormals, zeros of either sign, extreme scores and bytes that nobody wrote: every
// tier, in every mode of the calling thread, against the scalar reference of the documented order.
#include "special_values.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "kernels/kernel_table.h"
#include "tiers.h"

namespace kvpager::testing {
namespace {

// Holds every tier in every mode against the reference; returns the expected outputs.
std::vector<std::vector<float>> check_everywhere(const Shape& shape, Sequence& sequence,
                                                 const std::vector<Row>& rows) {
  const auto expected = reference_in_order(shape, sequence, rows);
  in_every_tier([&](const KernelTable&) {
    for (const NamedMode& mode : kModes) {
      CAPTURE(std::string(mode.name));
      RunOptions options;
      options.mode = mode.bits;
      const auto together = attend(shape, {&sequence}, rows, options);
      int64_t wrong = 0;
      for (size_t i = 0; i < rows.size(); ++i) wrong += differing(together[i], expected[i]);
      CHECK(wrong == 0);
      // A row alone reads 16-bit tiles where they lie, and two threads take its splits apart.
      options.threads = 2;
      const auto alone = attend(shape, {&sequence}, {rows.back()}, options);
      CHECK(differing(alone[0], expected.back()) == 0);
    }
  });
  return expected;
}

TEST_CASE("denormal keys, queries and products count in full, whatever the caller flushes") {
  for (const DType dtype : {DType::kFloat32, DType::kFloat16, DType::kBFloat16}) {
    CAPTURE(std::string(dtype_name(dtype)));
    Shape shape = small_shape(dtype);
    const float tiny = least_normal(dtype) / 2;
    const float wide = dtype == DType::kFloat16 ? 0x1p14f : 0x1p120f;
    struct Scales {
      std::string what;
      float key, query, scaling;
    };
    for (const Scales& scales :
         {Scales{"denormal keys", tiny, 1.0f, 4.0f / tiny},
          Scales{"denormal queries", 1.0f, tiny, 4.0f / tiny},
          Scales{"denormal keys, large queries", tiny, wide, 4.0f / (tiny * wide)},
          Scales{"denormal products", 0x1p-10f, 0x1p-14f, 0x1p24f},
          Scales{"products far below one", dtype == DType::kFloat16 ? tiny : 0x1p-70f,
                 dtype == DType::kFloat16 ? tiny : 0x1p-66f, 0x1p127f}}) {
      CAPTURE(scales.what);
      shape.scaling = std::isfinite(scales.scaling) ? scales.scaling : kMax;
      Sequence sequence(layout_of(shape), kLength, noisy(1, scales.key), noisy(2, 1.0f));
      const auto outputs = check_everywhere(shape, sequence, rows_of(shape, scales.query));
      CHECK(count_if(outputs, is_not_finite) == 0);
      // If the products were flushed, all weights would be alike.
      Sequence flushed(layout_of(shape), kLength, constant(0.0f), noisy(2, 1.0f));
      Row last = rows_of(shape, scales.query).back();
      CHECK(differing_bits(outputs.back(), reference_in_order(shape, flushed, last)) > 100);
    }
  }
}

TEST_CASE("denormal values come out as denormals, whatever the caller flushes") {
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    CAPTURE(std::string(dtype_name(dtype)));
    const Shape shape = small_shape(dtype);
    Sequence sequence(layout_of(shape), kLength, noisy(1, 1.0f), noisy(2, 0x1p-127f));
    const auto outputs = check_everywhere(shape, sequence, rows_of(shape, 2.0f));
    CHECK(count_if(outputs, is_denormal) > 1000);
  }
  const Shape shape = small_shape(DType::kFloat16);
  Sequence sequence(layout_of(shape), kLength, noisy(1, 1.0f), noisy(2, 0x1p-15f));
  const auto outputs = check_everywhere(shape, sequence, rows_of(shape, 2.0f));
  CHECK(count_if(outputs, [](float x) { return x != 0 && std::fabs(x) < 0x1p-14f; }) > 1000);
}

TEST_CASE("zeros of either sign in queries, keys and values keep the signs IEEE gives them") {
  const auto zero = [](uint64_t what) {
    return [=](int64_t t, int head, int d) {
      return noise(what, static_cast<uint64_t>(t), static_cast<uint64_t>(head),
                   static_cast<uint64_t>(d)) < 0
                 ? -0.0f
                 : 0.0f;
    };
  };
  for (const DType dtype : {DType::kFloat32, DType::kFloat16, DType::kBFloat16}) {
    CAPTURE(std::string(dtype_name(dtype)));
    const Shape shape = small_shape(dtype);
    Sequence zeros(layout_of(shape), kLength, zero(1), zero(2));
    auto outputs = check_everywhere(shape, zeros, rows_of(shape, 1.0f));
    CHECK(count_if(outputs, [](float x) { return x != 0; }) == 0);
    // A query of zeros weighs all keys alike.
    std::vector<Row> rows = rows_of(shape, 1.0f);
    for (Row& row : rows) {
      for (size_t i = 0; i < row.query.size(); ++i) row.query[i] = i % 3 == 0 ? -0.0f : 0.0f;
    }
    Sequence noise_values(layout_of(shape), kLength, noisy(1, 1.0f), noisy(2, 1.0f));
    check_everywhere(shape, noise_values, rows);
  }
  // Values that vanish when they are weighed leave a zero of their sign.
  const Shape shape = small_shape();
  Sequence vanishing(layout_of(shape), kLength, noisy(1, 1.0f),
                     [](int64_t, int, int d) { return (d & 1) != 0 ? -0x1p-149f : 0x1p-149f; });
  const auto outputs = check_everywhere(shape, vanishing, rows_of(shape, 8.0f));
  CHECK(count_if(outputs, is_negative_zero) > 10);
}

TEST_CASE("softmax that saturates, underflows or is flat has the documented bits") {
  struct Scales {
    std::string what;
    float key, query, scaling, value;
  };
  for (const Scales& scales :
       {Scales{"one key takes all", 30.0f, 30.0f, 1.0f, 1.0f},
        Scales{"weights that underflow meet values near the greatest", 6.0f, 6.0f, 1.0f, 0x1p120f},
        Scales{"scores near the greatest float", 0x1p60f, 0x1p60f, 0x1p4f, 1.0f},
        Scales{"all scores equal", 0.0f, 1.0f, 1.0f, 1.0f},
        Scales{"scaling as small as can be", 1.0f, 1.0f, 0x1p-149f, 1.0f}}) {
    CAPTURE(scales.what);
    for (const bool sinks : {false, true}) {
      Shape shape = small_shape();
      shape.scaling = scales.scaling;
      shape.sinks = sinks;
      Sequence sequence(layout_of(shape), kLength, noisy(1, scales.key), noisy(2, scales.value));
      const auto outputs = check_everywhere(shape, sequence, rows_of(shape, scales.query));
      CHECK(count_if(outputs, is_not_finite) == 0);
    }
  }
}

TEST_CASE("scores whose difference overflows float32 leave all weight with the greater ones") {
  Shape shape = small_shape();
  shape.scaling = 1.0f;
  Sequence sequence(
      layout_of(shape), kLength,
      [](int64_t t, int, int) { return t % 3 == 1 ? 0x1p61f : -0x1p61f; }, noisy(2, 1.0f));
  std::vector<Row> rows = rows_of(shape, 0.0f);
  for (Row& row : rows) row.query.assign(row.query.size(), 0x1.Cp61f);  // scores are +-0x1.Cp127
  const auto outputs = check_everywhere(shape, sequence, rows);
  CHECK(count_if(outputs, is_not_finite) == 0);
  double mean = 0;
  for (int64_t t = 1; t < 16; t += 3) mean += double{sequence.v(t, 0)[0]} / 5;
  CHECK(std::fabs(double{outputs[2][0]} - mean) < 1e-6);
}

TEST_CASE("scores all far below zero weigh their keys as scores near zero do") {
  // Every key has the same dominant dimension, which the query counts against.
  Shape shape = small_shape();
  shape.scaling = 1.0f;
  Sequence sequence(
      layout_of(shape), kLength,
      [](int64_t t, int head, int d) { return d == 0 ? 1e19f : noisy(1, 1.0f)(t, head, d); },
      noisy(2, 1.0f));
  std::vector<Row> rows = rows_of(shape, 0.0f);
  for (Row& row : rows) {
    for (size_t i = 0; i < row.query.size(); i += static_cast<size_t>(shape.k_dim)) {
      row.query[i] = -3e19f;
    }
  }
  const auto outputs = check_everywhere(shape, sequence, rows);
  CHECK(count_if(outputs, is_not_finite) == 0);
  CHECK(count_if(outputs, [](float x) { return x == 0; }) == 0);
}

TEST_CASE("one key alone gives its value in every bit, however extreme its score") {
  for (const float query : {1.0f, -1.0f, 1e30f, -1e30f, 1e-42f}) {
    Shape shape = small_shape();
    shape.scaling = 1.0f;
    Sequence sequence(layout_of(shape), 1, constant(1.0f), noisy(2, 1e30f));
    Row row;
    row.query.assign(static_cast<size_t>(4 * shape.k_dim), query);
    const auto outputs = check_everywhere(shape, sequence, {row});
    for (int h = 0; h < 4; ++h) {
      for (int d = 0; d < shape.v_dim; ++d) {
        CHECK(float_bits(outputs[0][static_cast<size_t>(h * shape.v_dim + d)]) ==
              float_bits(sequence.v(0, h / 2)[d]));
      }
    }
  }
}

TEST_CASE("soft caps from the least to the greatest float, over scores of every size") {
  for (const float softcap :
       {std::numeric_limits<float>::denorm_min(), 1e-20f, 0.5f, 30.0f, 1e20f, kMax}) {
    for (const float size : {1e-20f, 1.0f, 1e4f, 1e18f}) {
      CAPTURE(softcap);
      CAPTURE(size);
      Shape shape = small_shape();
      shape.softcap = softcap;
      shape.scaling = 1.0f;
      Sequence sequence(layout_of(shape), 40, noisy(1, size), noisy(2, 1.0f));
      std::vector<Row> rows = rows_of(shape, size);
      rows.erase(rows.begin() + 4, rows.end());
      const auto outputs = check_everywhere(shape, sequence, rows);
      CHECK(count_if(outputs, is_not_finite) == 0);
    }
  }
}

TEST_CASE("attention sinks from minus infinity to the greatest float") {
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    Shape shape = small_shape(dtype);
    shape.sinks = true;
    shape.sink_logits = {-kInfinity, kMax, -0.0f, 1e-42f};
    Sequence sequence(layout_of(shape), kLength, noisy(1, 1.0f), noisy(2, 1.0f));
    const auto outputs = check_everywhere(shape, sequence, rows_of(shape, 1.0f));
    CHECK(count_if(outputs, is_not_finite) == 0);
    shape.sink_logits = {-kMax, -1e4f, 88.0f, 1e4f};
    const auto others = check_everywhere(shape, sequence, rows_of(shape, 1.0f));
    Shape without = shape;
    without.sinks = false;
    for (size_t i = 0; i < others.size(); ++i) {
      const Row row = rows_of(shape, 1.0f)[i];
      const auto plain = reference_in_order(without, sequence, row);
      const size_t v_dim = static_cast<size_t>(shape.v_dim);
      for (size_t d = 0; d < v_dim; ++d) {
        // A sink far below takes nothing, one far above takes all.
        CHECK(float_bits(outputs[i][d]) == float_bits(plain[d]));
        CHECK(float_bits(others[i][d]) == float_bits(plain[d]));
        CHECK(outputs[i][v_dim + d] == 0.0f);
        CHECK(others[i][3 * v_dim + d] == 0.0f);
      }
    }
  }
}

TEST_CASE("head dimensions from 16 to 256 and chunks of every size, in every tier") {
  for (const DType dtype : {DType::kFloat32, DType::kFloat16, DType::kBFloat16}) {
    for (int dim = 16; dim <= 256; dim += 16) {
      Shape shape;
      shape.dtype = dtype;
      shape.kv_heads = 1;
      shape.group = 1 + dim / 16 % 4;
      shape.tokens = 16 << dim / 16 % 5;
      shape.k_dim = dim;
      shape.v_dim = 272 - dim;
      shape.window = dim % 64 == 0 ? 1 + dim : 0;
      CAPTURE(std::string(dtype_name(dtype)));
      CAPTURE(dim);
      const int64_t length = shape.tokens * (shape.tokens == 256 ? 2 : 9) + 3;
      Sequence sequence(layout_of(shape), length, 3 + static_cast<uint32_t>(dim));
      const std::vector<Row> rows =
          rows_at({0, length - 1, length - 2, length - 3, length - 4, length - 5, length - 6});
      const auto expected = reference_in_order(shape, sequence, rows);
      in_every_tier([&](const KernelTable&) {
        const auto got = attend(shape, {&sequence}, rows);
        CHECK(differing_bits(got, expected) == 0);
        CHECK(differing_bits(attend(shape, {&sequence}, {rows[3]})[0], expected[3]) == 0);
      });
    }
  }
}

TEST_CASE("windows of every reach around a chunk's borders see their keys and no others") {
  for (const int64_t window : {1, 2, 15, 16, 17, 31, 33, 128, 129, 1000}) {
    CAPTURE(window);
    Shape shape = small_shape(DType::kBFloat16);
    shape.window = window;
    Sequence sequence(layout_of(shape), kLength, noisy(1, 1.0f), noisy(2, 1.0f));
    check_everywhere(shape, sequence, rows_of(shape, 1.0f));
  }
}

TEST_CASE("NaN, infinities and denormals in keys a row does not see cannot reach it") {
  for (const DType dtype : {DType::kFloat32, DType::kFloat16, DType::kBFloat16}) {
    for (const uint32_t junk : {0xFFFFFFFFu, 0x7F800001u, 0x7F800000u, 0xFF800000u, 0x7C007C00u,
                                0xFC00FC00u, 0x7F7FFFFFu, 0x00010001u}) {
      CAPTURE(std::string(dtype_name(dtype)));
      CAPTURE(junk);
      Shape shape = small_shape(dtype);
      shape.window = 40;
      Sequence sequence(layout_of(shape), kLength, noisy(1, 1.0f), noisy(2, 1.0f));
      // All in one chunk.
      const std::vector<Row> rows =
          noisy_rows(shape, {131, 132, 133, 134, 135, 136, 137, 138}, 1.0f);
      const auto expected = reference_in_order(shape, sequence, rows);
      // Before the first row's window, and after the last row.
      for (int64_t t = 0; t <= rows.front().position - shape.window; ++t) {
        spoil(layout_of(shape), sequence, t, junk);
      }
      for (int64_t t = rows.back().position + 1; t < kLength; ++t) {
        spoil(layout_of(shape), sequence, t, junk);
      }
      in_every_tier([&](const KernelTable&) {
        const auto got = attend(shape, {&sequence}, rows);
        CHECK(differing_bits(got, expected) == 0);
      });
      // What only later rows see spoils those and leaves the first ones alone.
      spoil(layout_of(shape), sequence, rows[3].position + 1, junk);
      in_every_tier([&](const KernelTable&) {
        for (const int threads : {1, 3}) {
          const auto got = attend(shape, {&sequence}, rows, {threads, {}});
          for (size_t i = 0; i < 4; ++i) CHECK(differing_bits(got[i], expected[i]) == 0);
          for (size_t i = 4; i < 8; ++i) CHECK(differing_bits(got[i], expected[i]) > 0);
        }
      });
    }
  }
}

TEST_CASE("a chunk that only a neighbour selects cannot reach a row, whatever is in it") {
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    Shape shape = small_shape(dtype);
    Sequence sequence(layout_of(shape), kLength, noisy(1, 1.0f), noisy(2, 1.0f));
    std::vector<Row> rows = rows_of(shape, 1.0f);
    rows.erase(rows.begin(), rows.begin() + 6);  // the last two
    const int32_t own = static_cast<int32_t>(rows[1].position / shape.tokens);
    rows[0].selected = {{0, 3, own - 1}, {2, own - 1}};
    rows[1].selected = {{0, 5, own}, {2, 5, 9, own}};
    const auto expected = reference_in_order(shape, sequence, rows[0]);
    for (int64_t t = 5 * 16; t < 6 * 16; ++t) {
      spoil(layout_of(shape), sequence, t, 0x7FC07FC0u);
    }
    in_every_tier([&](const KernelTable&) {
      const auto got = attend(shape, {&sequence}, rows);
      CHECK(differing_bits(got[0], expected) == 0);
      CHECK(std::count_if(got[1].begin(), got[1].end(), is_not_finite) ==
            static_cast<int64_t>(got[1].size()));
    });
  }
}

TEST_CASE("a query that is not finite spoils its own row and no other") {
  for (const float bad : {kNaN, kInfinity, -kInfinity}) {
    const Shape shape = small_shape();
    Sequence sequence(layout_of(shape), kLength, noisy(1, 1.0f), noisy(2, 1.0f));
    std::vector<Row> rows = rows_of(shape, 1.0f);
    const auto expected = reference_in_order(shape, sequence, rows);
    rows[5].query[3] = bad;
    in_every_tier([&](const KernelTable&) {
      for (const NamedMode& mode : kModes) {
        CAPTURE(std::string(mode.name));
        RunOptions options;
        options.mode = mode.bits;
        const auto got = attend(shape, {&sequence}, rows, options);
        for (size_t i = 0; i < rows.size(); ++i) {
          if (i != 5) CHECK(differing_bits(got[i], expected[i]) == 0);
        }
        CHECK(differing_bits(got[5], expected[5]) > 0);
      }
    });
  }
}

TEST_CASE("sums that overflow float32 are infinite or NaN in the same elements in every tier") {
  const Shape shape = small_shape();
  Sequence sequence(layout_of(shape), kLength, noisy(1, 1.0f), [](int64_t t, int head, int d) {
    return d < 16 ? (d & 1 ? -kMax : kMax) : noisy(2, 1.0f)(t, head, d);
  });
  const auto outputs = check_everywhere(shape, sequence, rows_of(shape, 0.25f));
  CHECK(count_if(outputs, is_not_finite) > 0);
  CHECK(count_if(outputs, [](float x) { return std::isfinite(x); }) >
        static_cast<int64_t>(8 * 4 * 32 - 1));
}

TEST_CASE("what an earlier call left in the scratch memory reaches no result") {
  Shape large = small_shape(DType::kBFloat16);
  large.group = 4;
  large.tokens = 64;
  large.k_dim = large.v_dim = 128;
  const Element bad = constant(kNaN);
  Sequence poison(layout_of(large), 64 * 20, bad, bad);
  std::vector<Row> poisonous = last_rows(poison, 40);
  for (Row& row : poisonous) {
    row.query.assign(static_cast<size_t>(large.kv_heads * large.group * large.k_dim), kNaN);
  }
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    const Shape shape = small_shape(dtype);
    Sequence sequence(layout_of(shape), kLength, noisy(1, 1.0f), noisy(2, 1.0f));
    const std::vector<Row> rows = rows_of(shape, 1.0f);
    in_every_tier([&](const KernelTable&) {
      for (const int threads : {1, 3}) {
        for (const size_t used : {size_t{1}, rows.size()}) {
          AttendWorkspace workspace;
          RunOptions options;
          options.threads = threads;
          options.workspace = &workspace;
          const auto spoiled = attend(large, {&poison}, poisonous, options);
          CHECK(is_not_finite(spoiled[0][0]));
          const std::vector<Row> some(rows.end() - static_cast<int64_t>(used), rows.end());
          const auto got = attend(shape, {&sequence}, some, options);
          for (size_t i = 0; i < some.size(); ++i) {
            CHECK(differing_bits(got[i], reference_in_order(shape, sequence, some[i])) == 0);
          }
        }
      }
    });
  }
}

}  // namespace
}  // namespace kvpager::testing
