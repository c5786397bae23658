// Keys and values in fewer bits: kvpager/codes.h, held against what it says.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "attend_problem.h"
#include "kernels/kernel_table.h"
#include "kvpager/attention.h"
#include "kvpager/error.h"
#include "tiers.h"

namespace kvpager::testing {
namespace {

constexpr int kDim = 64;
constexpr DType kCodes[] = {DType::kQ8, DType::kQ4};

Layout layout_in(DType dtype) {
  Layout layout;
  layout.layers = 1;
  layout.kv_heads = 2;
  layout.chunk_tokens = 16;
  layout.k_dim = layout.v_dim = kDim;
  layout.k_dtype = layout.v_dtype = dtype;
  return layout;
}

TensorView view_of(std::vector<float>& data, const Layout& layout) {
  const int64_t row = int64_t{layout.kv_heads} * kDim;
  return {data.data(),
          DType::kFloat32,
          static_cast<int64_t>(data.size()) / row,
          layout.kv_heads,
          kDim,
          row,
          kDim};
}

std::vector<float> normal_numbers(size_t count, uint32_t seed, float spread = 1.0f) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal(0.0f, spread);
  std::vector<float> numbers(count);
  for (float& x : numbers) x = normal(random);
  return numbers;
}

struct Encoded {
  std::vector<uint8_t> codes;
  std::vector<uint16_t> scales;
};

Encoded encoded(const KernelTable& table, const std::vector<float>& row, DType dtype) {
  const auto dim = static_cast<int64_t>(row.size());
  Encoded out;
  out.codes.resize(row.size());
  out.scales.resize(static_cast<size_t>(code_scales(dtype, dim)));
  table.encode(row.data(), dtype, dim, out.codes.data(), out.scales.data());
  return out;
}

float stored(const Encoded& row, DType dtype, size_t i) {
  if (dtype == DType::kQ8) {
    return static_cast<float>(static_cast<int8_t>(row.codes[i])) * bfloat16_to_float(row.scales[0]);
  }
  return static_cast<float>(kQ4Levels[row.codes[i]]) * bfloat16_to_float(row.scales[i / kQ4Group]);
}

TEST_CASE("a row's codes depend on its own numbers alone, whatever is written with it and where") {
  for (const DType dtype : kCodes) {
    CAPTURE(std::string(dtype_name(dtype)));
    const Layout layout = layout_in(dtype);
    const int64_t rows = 16;
    std::vector<float> k = normal_numbers(static_cast<size_t>(rows * 2 * kDim), 1);
    std::vector<float> v = normal_numbers(k.size(), 2);
    const auto bytes = static_cast<size_t>(layout.slice_bytes(0));
    std::vector<std::byte> together(bytes);
    std::vector<std::byte> apart(bytes);
    std::vector<WriteRow> where;
    for (int32_t i = 0; i < rows; ++i) where.push_back({together.data(), i});
    write_rows(layout, view_of(k, layout), view_of(v, layout), where.data(), rows);
    // One at a time, the last one first, each in company of rows that are not written.
    for (int32_t i = rows - 1; i >= 0; --i) {
      std::vector<WriteRow> one(static_cast<size_t>(rows));
      one[static_cast<size_t>(i)] = {apart.data(), i};
      write_rows(layout, view_of(k, layout), view_of(v, layout), one.data(), rows);
    }
    CHECK(together == apart);
  }
}

TEST_CASE("rows are read back as the numbers that their codes stand for") {
  for (const DType dtype : kCodes) {
    const Layout layout = layout_in(dtype);
    const int64_t rows = 11;
    std::vector<float> k = normal_numbers(static_cast<size_t>(rows * 2 * kDim), 3);
    std::vector<float> v = normal_numbers(k.size(), 4);
    std::vector<std::byte> slice(static_cast<size_t>(layout.slice_bytes(0)), std::byte{0xFF});
    std::vector<WriteRow> where;
    for (int32_t i = 0; i < rows; ++i) where.push_back({slice.data(), i});
    write_rows(layout, view_of(k, layout), view_of(v, layout), where.data(), rows);
    in_every_tier([&](const KernelTable&) {
      std::vector<float> read_k(static_cast<size_t>(5 * 2 * kDim));
      std::vector<float> read_v(read_k.size());
      read_rows(layout, slice.data(), 4, 9, reinterpret_cast<std::byte*>(read_k.data()),
                reinterpret_cast<std::byte*>(read_v.data()));
      int64_t wrong = 0;
      for (int t = 0; t < 5; ++t) {
        for (int head = 0; head < 2; ++head) {
          float key[kDim];
          float value[kDim];
          read_row(layout, slice.data(), head, t + 4, key, value);
          const size_t at = static_cast<size_t>((t * 2 + head) * kDim);
          wrong += std::memcmp(&read_k[at], key, sizeof key) != 0;
          wrong += std::memcmp(&read_v[at], value, sizeof value) != 0;
        }
      }
      CHECK(wrong == 0);
    });
  }
}

TEST_CASE("eight bits: the largest number has the last level, the others the nearest") {
  for (uint32_t seed = 0; seed < 50; ++seed) {
    const float spread = std::ldexp(1.0f, static_cast<int>(seed * 4) - 90);
    const std::vector<float> row = normal_numbers(kDim, seed, spread);
    const Encoded out = encoded(kernels(), row, DType::kQ8);
    const float scale = bfloat16_to_float(out.scales[0]);
    const auto by_magnitude = [](float a, float b) { return std::fabs(a) < std::fabs(b); };
    const auto largest = std::max_element(row.begin(), row.end(), by_magnitude);
    CHECK(out.scales[0] == float_to_bfloat16(std::fabs(*largest) / 127));
    CHECK(std::abs(static_cast<int8_t>(out.codes[static_cast<size_t>(largest - row.begin())])) ==
          127);
    int64_t wrong = 0;
    for (size_t i = 0; i < row.size(); ++i) {
      const double off = std::fabs(double{stored(out, DType::kQ8, i)} - double{row[i]});
      wrong += off > 0.5000001 * double{scale};
    }
    CHECK(wrong == 0);
  }
}

TEST_CASE("four bits: the nearest level, and no scale that was tried would be nearer") {
  for (uint32_t seed = 0; seed < 50; ++seed) {
    const std::vector<float> row = normal_numbers(kQ4Group, seed, 1.0f + static_cast<float>(seed));
    const Encoded out = encoded(kernels(), row, DType::kQ4);
    const auto squared_error = [&](double scale) {
      double sum = 0;
      for (const float x : row) {
        double least = std::numeric_limits<double>::infinity();
        for (const int8_t level : kQ4Levels) {
          least = std::min(least, std::fabs(double{x} - scale * level));
        }
        sum += least * least;
      }
      return sum;
    };
    const auto scale = double{bfloat16_to_float(out.scales[0])};
    double sum = 0;
    for (size_t i = 0; i < row.size(); ++i) {
      const double off = double{stored(out, DType::kQ4, i)} - double{row[i]};
      sum += off * off;
    }
    CHECK(sum <= squared_error(scale) * (1 + 1e-5));
    float top = 0.0f;
    for (const float x : row) top = std::fabs(x) > std::fabs(top) ? x : top;
    for (const int end : {0, 15}) {
      for (const float stretch : {1.0f, 1.05f}) {
        const float tried = top / (static_cast<float>(kQ4Levels[end]) * stretch);
        CHECK(sum <=
              squared_error(double{bfloat16_to_float(float_to_bfloat16(tried))}) * (1 + 1e-5));
      }
    }
  }
}

TEST_CASE("what codes stand for has these codes again") {
  for (const DType dtype : kCodes) {
    for (uint32_t seed = 0; seed < 500; ++seed) {
      CAPTURE(seed);
      const float spread = std::ldexp(1.0f, static_cast<int>(seed % 60) - 30);
      const Encoded once = encoded(kernels(), normal_numbers(kDim, seed, spread), dtype);
      std::vector<float> numbers;
      for (size_t i = 0; i < kDim; ++i) numbers.push_back(stored(once, dtype, i));
      const Encoded again = encoded(kernels(), numbers, dtype);
      CHECK(again.codes == once.codes);
      CHECK(again.scales == once.scales);
    }
  }
}

TEST_CASE("every tier makes the same codes, whatever the numbers and the thread's mode") {
  std::vector<std::vector<float>> rows = {
      std::vector<float>(kDim, 0.0f), std::vector<float>(kDim, -0.0f),
      std::vector<float>(kDim, 1e-31f), std::vector<float>(kDim, 1e-45f),
      std::vector<float>(kDim, 0x1.FFFFFEp116f)};
  for (uint32_t seed = 0; seed < 200; ++seed) {
    std::vector<float> row =
        normal_numbers(kDim, seed, std::ldexp(1.0f, static_cast<int>(seed % 200) - 100));
    if (seed % 3 == 0) row[seed % kDim] *= 1000.0f;  // an outlier
    if (seed % 5 == 0) std::fill(row.begin(), row.begin() + kQ4Group, 0.0f);
    if (seed % 7 == 0) {
      for (float& x : row) x = std::nearbyint(x * 2) / 2;  // ties
    }
    rows.push_back(row);
  }
  for (const std::vector<float>& row : rows) {
    for (const DType dtype : kCodes) {
      const Encoded expected = encoded(kernels(), row, dtype);
      in_every_tier([&](const KernelTable& table) {
        const Encoded out = encoded(table, row, dtype);
        CHECK(out.codes == expected.codes);
        CHECK(out.scales == expected.scales);
      });
    }
  }
}

TEST_CASE("what is too small for a scale is kept as +0") {
  for (const DType dtype : kCodes) {
    for (const float x : {0.0f, -0.0f, 9e-31f, -9e-31f, 1e-45f}) {
      const Encoded out = encoded(kernels(), std::vector<float>(kDim, x), dtype);
      for (size_t i = 0; i < kDim; ++i) CHECK(float_bits(stored(out, dtype, i)) == 0);
    }
  }
}

TEST_CASE("a number that no scale reaches does not fit, and is found by its row") {
  for (const DType dtype : kCodes) {
    const Layout layout = layout_in(dtype);
    std::vector<float> k(3 * 2 * kDim, 1.0f);
    std::vector<float> v = k;
    std::vector<std::byte> slice(static_cast<size_t>(layout.slice_bytes(0)));
    const std::vector<WriteRow> where = {{slice.data(), 0}, {slice.data(), 1}, {slice.data(), 2}};
    const auto found = [&] {
      return find_non_finite(layout, view_of(k, layout), view_of(v, layout), where.data(), 3);
    };
    CHECK(found() == -1);
    k[2 * kDim + 5] = 0x1.FFFFFEp116f;
    CHECK(found() == -1);
    for (const float bad : {0x1p117f, -0x1p117f, std::numeric_limits<float>::infinity(),
                            std::numeric_limits<float>::quiet_NaN()}) {
      v[2 * 2 * kDim + 1] = bad;
      CHECK(found() == 2);
    }
  }
}

TEST_CASE("rows past the valid ones are zeros, the others what they were") {
  for (const DType dtype : kCodes) {
    const Layout layout = layout_in(dtype);
    std::vector<float> k = normal_numbers(16 * 2 * kDim, 5);
    std::vector<float> v = normal_numbers(k.size(), 6);
    std::vector<std::byte> chunk(static_cast<size_t>(layout.chunk_bytes()));
    std::vector<WriteRow> where;
    for (int32_t i = 0; i < 16; ++i) where.push_back({chunk.data(), i});
    write_rows(layout, view_of(k, layout), view_of(v, layout), where.data(), 16);
    for (const int valid : {1, 6, 7, 15}) {
      CAPTURE(valid);
      // As if no other row had ever been written.
      std::vector<std::byte> expected(chunk.size());
      for (WriteRow& row : where) row.slice = expected.data();
      write_rows(layout, view_of(k, layout), view_of(v, layout), where.data(), valid);
      std::vector<std::byte> cut = chunk;
      zero_rows_after(layout, cut.data(), valid);
      CHECK(cut == expected);
    }
  }
}

TEST_CASE("queries become integers of 16 bits, and one that is not finite spoils its own row") {
  in_every_tier([&](const KernelTable& table) {
    std::vector<float> q = normal_numbers(kDim, 7, 3.0f);
    std::vector<int16_t> integers(kDim);
    const float unit = table.round_query(q.data(), kDim, integers.data());
    const Rounded expected(q);
    CHECK(unit == expected.unit);
    for (size_t i = 0; i < kDim; ++i) CHECK(integers[i] == expected.integers[i]);
    for (const float bad :
         {std::numeric_limits<float>::infinity(), std::numeric_limits<float>::quiet_NaN()}) {
      q[3] = bad;
      CHECK(std::isnan(table.round_query(q.data(), kDim, integers.data())));
    }
  });
  for (const DType dtype : kCodes) {
    Shape shape;
    shape.dtype = dtype;
    shape.io_dtype = DType::kFloat32;
    Sequence sequence(layout_of(shape), 200, 9);
    std::vector<Row> rows(2);
    rows[0].position = rows[1].position = 199;
    rows[0].query = rows[1].query =
        normal_numbers(static_cast<size_t>(shape.kv_heads * shape.group * shape.k_dim), 10);
    const auto sound = attend(shape, {&sequence}, rows);
    rows[0].query[0] = std::numeric_limits<float>::quiet_NaN();
    const auto got = attend(shape, {&sequence}, rows);
    CHECK(differing_bits(got[1], sound[1]) == 0);
    CHECK(differing_bits(got[0], sound[0]) > 0);
  }
}

TEST_CASE("a row is rotated as the text says, in every tier, and twice is once but for rounding") {
  for (const size_t dim : {16u, 32u, 48u, 80u, 96u, 128u, 192u, 256u, 512u}) {
    CAPTURE(dim);
    const std::vector<float> row = normal_numbers(dim, static_cast<uint32_t>(dim));
    const std::vector<float> expected = rotated(row);
    in_every_tier([&](const KernelTable& table) {
      std::vector<float> x = row;
      table.rotate(x.data(), static_cast<int64_t>(dim));
      CHECK(differing_bits(x, expected) == 0);
      table.rotate(x.data(), static_cast<int64_t>(dim));
      double worst = 0;
      for (size_t i = 0; i < dim; ++i) {
        worst = std::max(worst, std::fabs(double{x[i]} - double{row[i]}));
      }
      CHECK(worst < 2e-6);
    });
  }
}

TEST_CASE(
    "rotated rows are read back near what was written, an outlier spreads over its neighbours") {
  for (const DType dtype : kCodes) {
    CAPTURE(std::string(dtype_name(dtype)));
    const int64_t rows = 3;
    std::vector<float> k = normal_numbers(static_cast<size_t>(rows * 2 * kDim), 21);
    std::vector<float> v = normal_numbers(k.size(), 22);
    for (size_t i = 0; i < k.size(); i += kDim) k[i] = v[i + 7] = 60.0f;
    const auto error = [&](bool rotate) {
      Layout layout = layout_in(dtype);
      layout.k_rotated = layout.v_rotated = rotate;
      std::vector<std::byte> slice(static_cast<size_t>(layout.slice_bytes(0)));
      std::vector<WriteRow> where;
      for (int32_t i = 0; i < rows; ++i) where.push_back({slice.data(), i});
      write_rows(layout, view_of(k, layout), view_of(v, layout), where.data(), rows);
      std::vector<float> read_k(k.size());
      std::vector<float> read_v(v.size());
      read_rows(layout, slice.data(), 0, rows, reinterpret_cast<std::byte*>(read_k.data()),
                reinterpret_cast<std::byte*>(read_v.data()));
      double sum = 0;
      for (size_t i = 0; i < k.size(); ++i) {
        sum += std::pow(double{read_k[i]} - double{k[i]}, 2);
        sum += std::pow(double{read_v[i]} - double{v[i]}, 2);
      }
      return sum;
    };
    CHECK(error(true) < 0.6 * error(false));
  }
}

TEST_CASE("layers in a float dtype have pages of their own, and the others theirs") {
  Layout layout = layout_in(DType::kQ4);
  layout.layers = 5;
  layout.k_rotated = layout.v_rotated = true;
  const Layout coded = layout;
  layout.float_layers.add(0);
  layout.float_layers.add(3);
  layout.float_dtype = DType::kBFloat16;
  layout.validate();
  Layout wide = layout_in(DType::kBFloat16);
  int64_t offset = 0;
  for (int layer = 0; layer < layout.layers; ++layer) {
    CAPTURE(layer);
    const bool is_wide = layer == 0 || layer == 3;
    const Layout of_layer = layout.of_layer(layer);
    const Layout expected = is_wide ? wide : coded.of_layer(layer);
    CHECK(of_layer == expected);
    CHECK(layout.slice_offset(layer) == offset);
    CHECK(layout.slice_bytes(layer) == expected.slice_bytes(0));
    CHECK(layout.page_offset(layer, 1) == offset + expected.page_bytes());
    offset += layout.slice_bytes(layer);
  }
  CHECK(layout.chunk_bytes() == offset);
  CHECK(layout.largest_slice_bytes() == wide.slice_bytes(0));
  CHECK(layout.token_bytes() == 2 * (wide.token_bytes()) + 3 * coded.of_layer(1).token_bytes());
  CHECK(layout.slice_offset(1) % kTileAlignment == 0);
}

TEST_CASE("a layout that says nothing clear of its codes is refused by the field's name") {
  const auto refused = [](const auto& change) {
    Layout layout = layout_in(DType::kQ4);
    layout.layers = 3;
    change(layout);
    try {
      layout.validate();
    } catch (const InvalidArgumentError& error) {
      return std::string(error.what());
    }
    return std::string();
  };
  const auto names = [](const std::string& message, const std::string& field) {
    return message.find(field) != std::string::npos;
  };
  CHECK(refused([](Layout&) {}).empty());
  CHECK(names(refused([](Layout& l) {
                l.k_dtype = DType::kFloat32;
                l.k_rotated = true;
              }),
              "layout.k_rotated"));
  CHECK(names(refused([](Layout& l) {
                l.v_dtype = DType::kFloat16;
                l.v_rotated = true;
              }),
              "layout.v_rotated"));
  CHECK(names(refused([](Layout& l) { l.float_layers.add(3); }), "layout.float_layers"));
  CHECK(names(refused([](Layout& l) { l.float_dtype = DType::kFloat16; }), "layout.float_dtype"));
  CHECK(names(refused([](Layout& l) {
                l.float_layers.add(0);
                l.float_dtype = DType::kQ8;
              }),
              "layout.float_dtype"));
  CHECK(names(refused([](Layout& l) {
                l.k_dtype = l.v_dtype = DType::kFloat32;
                l.float_layers.add(0);
              }),
              "layout.float_layers"));
}

TEST_CASE("rows past the valid ones are zeros in every layer, whatever its dtype") {
  Layout layout = layout_in(DType::kQ4);
  layout.layers = 3;
  layout.float_layers.add(1);
  std::vector<std::byte> chunk(static_cast<size_t>(layout.chunk_bytes()), std::byte{0x11});
  zero_rows_after(layout, chunk.data(), 0);
  for (const std::byte byte : chunk) CHECK(byte == std::byte{0});
}

TEST_CASE("attention over codes is near attention over the numbers themselves") {
  for (const DType dtype : kCodes) {
    CAPTURE(std::string(dtype_name(dtype)));
    Shape shape;
    shape.dtype = dtype;
    shape.io_dtype = DType::kFloat32;
    shape.k_rotated = shape.v_rotated = dtype == DType::kQ4;
    Sequence sequence(layout_of(shape), 1000, 11);
    Row row;
    row.position = 999;
    const auto got = attend(shape, {&sequence}, {row});
    const std::vector<double> exact = reference64(shape, sequence, row);  // over what is stored
    double worst = 0;
    for (size_t j = 0; j < exact.size(); ++j) {
      worst = std::max(worst, std::fabs(double{got[0][j]} - exact[j]));
    }
    CHECK(worst < 2e-5);
  }
}

}  // namespace
}  // namespace kvpager::testing
