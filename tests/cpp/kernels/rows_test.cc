#include <doctest/doctest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "kernels/half.h"
#include "kernels/kernel_table.h"
#include "kvpager/attention.h"
#include "kvpager/error.h"
#include "read_row.h"

namespace kvpager::testing {
namespace {

Layout small_layout(DType dtype) {
  Layout layout;
  layout.layers = 2;
  layout.kv_heads = 3;
  layout.chunk_tokens = 16;
  layout.k_dim = 32;
  layout.v_dim = 16;
  layout.k_dtype = layout.v_dtype = dtype;
  return layout;
}

TensorView view_of(std::vector<float>& data, int64_t rows, int64_t heads, int64_t dim) {
  return {data.data(), DType::kFloat32, rows, heads, dim, heads * dim, dim};
}

TEST_CASE("every 16-bit pattern survives the way to float32 and back, in every tier") {
  for (const KernelTable* table : runnable_kernels()) {
    CAPTURE(table->name);
    std::vector<uint16_t> all(65536);
    for (size_t i = 0; i < all.size(); ++i) all[i] = static_cast<uint16_t>(i);
    std::vector<float> wide(all.size());
    std::vector<uint16_t> back(all.size());
    for (const DType dtype : {DType::kFloat16, DType::kBFloat16}) {
      table->to_float(all.data(), dtype, 65536, wide.data());
      table->from_float(wide.data(), dtype, 65536, back.data());
      int64_t wrong = 0;
      for (size_t i = 0; i < all.size(); ++i) {
        if (std::isnan(wide[i])) {
          const float again =
              dtype == DType::kFloat16 ? float16_to_float(back[i]) : bfloat16_to_float(back[i]);
          wrong += !std::isnan(again);
        } else {
          wrong += back[i] != all[i];
        }
      }
      CHECK(wrong == 0);
      CHECK(wide[1] == (dtype == DType::kFloat16 ? std::ldexp(1.0f, -24) : std::ldexp(1.0f, -133)));
    }
  }
}

TEST_CASE("float32 is rounded to the nearest 16-bit value, ties to even, the same in every tier") {
  std::mt19937 random(2);
  std::vector<float> wide;
  for (int i = 0; i < 20000; ++i) {
    wide.push_back(
        std::ldexp(static_cast<float>(random()) - 2e9f, static_cast<int>(random() % 60) - 60));
  }
  for (int i = 0; i < 2000; ++i) {  // half-way cases and denormals of float16
    wide.push_back(static_cast<float>(2 * i + 1) * std::ldexp(1.0f, -25));
    wide.push_back(1.0f + static_cast<float>(2 * i + 1) * std::ldexp(1.0f, -11));
    wide.push_back(1.0f + static_cast<float>(2 * i + 1) * std::ldexp(1.0f, -8));
  }
  wide.push_back(65519.9f);
  wide.push_back(65520.0f);
  const int64_t count = static_cast<int64_t>(wide.size());
  for (const KernelTable* table : runnable_kernels()) {
    CAPTURE(table->name);
    std::vector<uint16_t> half(wide.size());
    std::vector<uint16_t> bfloat(wide.size());
    table->from_float(wide.data(), DType::kFloat16, count, half.data());
    table->from_float(wide.data(), DType::kBFloat16, count, bfloat.data());
    int64_t wrong = 0;
    for (size_t i = 0; i < wide.size(); ++i) {
      const double x = double{wide[i]};
      // The nearest multiple of the format's step at x, by the definition.
      int exponent;
      std::frexp(x, &exponent);
      const double half_step = std::ldexp(1.0, std::max(exponent, -13) - 11);
      const double bfloat_step = std::ldexp(1.0, exponent - 8);
      double half_expected = std::nearbyint(x / half_step) * half_step;
      if (std::fabs(half_expected) > 65504)
        half_expected = std::copysign(std::numeric_limits<double>::infinity(), x);
      wrong += double{float16_to_float(half[i])} != half_expected;
      wrong +=
          double{bfloat16_to_float(bfloat[i])} != std::nearbyint(x / bfloat_step) * bfloat_step;
    }
    CHECK(wrong == 0);
  }
}

TEST_CASE("rows come back as they were written, whatever runs they were written in") {
  for (const DType dtype : {DType::kFloat32, DType::kFloat16, DType::kBFloat16}) {
    const Layout layout = small_layout(dtype);
    const int64_t rows = 20;
    std::vector<float> k(static_cast<size_t>(rows * 3 * 32));
    std::vector<float> v(static_cast<size_t>(rows * 3 * 16));
    for (size_t i = 0; i < k.size(); ++i)
      k[i] = static_cast<float>(static_cast<int>(i % 251) - 125) / 16;
    for (size_t i = 0; i < v.size(); ++i)
      v[i] = static_cast<float>(static_cast<int>(i % 127) - 60) / 8;
    std::vector<std::byte> memory(static_cast<size_t>(3 * layout.slice_bytes(0)), std::byte{0x11});
    const std::vector<std::byte> before = memory;
    std::vector<WriteRow> where(static_cast<size_t>(rows));
    for (int64_t i = 0; i < 9; ++i)
      where[static_cast<size_t>(i)] = {memory.data(), static_cast<int32_t>(7 + i)};
    for (int64_t i = 9; i < 14; ++i) {
      where[static_cast<size_t>(i)] = {memory.data() + layout.slice_bytes(0),
                                       static_cast<int32_t>(i - 9)};
    }
    where[16] = {memory.data() + layout.slice_bytes(0), 12};  // 14, 15 and 17.. are not written
    write_rows(layout, view_of(k, rows, 3, 32), view_of(v, rows, 3, 16), where.data(), rows);
    int64_t written = 0;
    for (int64_t i = 0; i < rows; ++i) {
      if (where[static_cast<size_t>(i)].slice == nullptr) continue;
      for (int head = 0; head < 3; ++head) {
        float got_k[32];
        float got_v[16];
        read_row(layout, where[static_cast<size_t>(i)].slice, head,
                 where[static_cast<size_t>(i)].offset, got_k, got_v);
        CHECK(std::memcmp(got_k, k.data() + (i * 3 + head) * 32, sizeof got_k) == 0);
        CHECK(std::memcmp(got_v, v.data() + (i * 3 + head) * 16, sizeof got_v) == 0);
        written += 32 + 16;
      }
    }
    int64_t changed = 0;
    for (size_t i = 0; i < memory.size(); ++i) changed += memory[i] != before[i];
    CHECK(changed <= written * dtype_bytes(dtype));
    CHECK(std::memcmp(memory.data() + 2 * layout.slice_bytes(0),
                      before.data() + 2 * layout.slice_bytes(0),
                      static_cast<size_t>(layout.slice_bytes(0))) == 0);
  }
}

TEST_CASE("rows outside a chunk or of another shape are refused") {
  const Layout layout = small_layout(DType::kFloat32);
  std::vector<float> k(2 * 3 * 32);
  std::vector<float> v(2 * 3 * 16);
  std::vector<std::byte> memory(static_cast<size_t>(layout.slice_bytes(0)));
  const WriteRow rows[2] = {{memory.data(), 15}, {memory.data(), 16}};
  CHECK_THROWS_AS(write_rows(layout, view_of(k, 2, 3, 32), view_of(v, 2, 3, 16), rows, 2),
                  InvariantError);
  CHECK_THROWS_AS(write_rows(layout, view_of(k, 2, 3, 16), view_of(v, 2, 3, 16), rows, 2),
                  InvalidArgumentError);
}

TEST_CASE(
    "the first row that is not finite is found, and rows that are not written are not looked at") {
  for (const KernelTable* table : runnable_kernels()) {
    const KernelOverride tier(*table);
    for (const float bad :
         {std::numeric_limits<float>::infinity(), -std::numeric_limits<float>::infinity(),
          std::numeric_limits<float>::quiet_NaN()}) {
      std::vector<float> k(6 * 3 * 32, 3.4e38f);
      std::vector<float> v(6 * 3 * 16, -1e-42f);
      std::byte slice{};
      std::vector<WriteRow> rows(6, WriteRow{&slice, 0});
      const Layout layout = small_layout(DType::kFloat32);
      const auto find = [&] {
        return find_non_finite(layout, view_of(k, 6, 3, 32), view_of(v, 6, 3, 16), rows.data(), 6);
      };
      CHECK(find() == -1);
      v[5 * 3 * 16 + 47] = bad;
      CHECK(find() == 5);
      k[2 * 3 * 32 + 31] = bad;
      CHECK(find() == 2);
      rows[2].slice = nullptr;
      CHECK(find() == 5);
    }
  }
}

TEST_CASE("the first query row that is not finite is found, of the rows that are some part's") {
  constexpr int kRows = 7;
  for (const KernelTable* table : runnable_kernels()) {
    const KernelOverride tier(*table);
    for (const int dim : {16, 24, 40, 64}) {
      const size_t row_floats = 3 * static_cast<size_t>(dim);
      for (const float bad :
           {std::numeric_limits<float>::infinity(), -std::numeric_limits<float>::infinity(),
            std::numeric_limits<float>::quiet_NaN()}) {
        for (size_t row = 0; row < kRows; ++row) {
          for (const size_t place : {size_t{0}, row_floats / 2, row_floats - 1}) {
            std::vector<float> q(kRows * row_floats, -3.4e38f);
            std::vector<int32_t> part(kRows, 0);
            const auto find = [&] {
              return find_non_finite(view_of(q, kRows, 3, dim), part.data());
            };
            CHECK(find() == -1);
            q[row * row_floats + place] = bad;
            CHECK(find() == static_cast<int64_t>(row));
            part[row] = -1;  // padding may hold anything
            CHECK(find() == -1);
            part[row] = 5;
            q[0] = bad;
            CHECK(find() == 0);
            part[0] = -1;
            CHECK(find() == (row == 0 ? -1 : static_cast<int64_t>(row)));
          }
        }
      }
    }
  }
}

TEST_CASE("rows after the valid ones become zero and the valid ones stay") {
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    const Layout layout = small_layout(dtype);
    for (const int valid : {0, 1, 9, 16}) {
      std::vector<std::byte> chunk(static_cast<size_t>(layout.chunk_bytes()), std::byte{0x11});
      zero_rows_after(layout, chunk.data(), valid);
      float kept = 0.0f;
      std::memset(&kept, 0x11, sizeof kept);
      if (dtype == DType::kBFloat16) kept = bfloat16_to_float(0x1111);
      for (int layer = 0; layer < 2; ++layer) {
        for (int head = 0; head < 3; ++head) {
          for (int t = 0; t < 16; ++t) {
            float k[32];
            float v[16];
            read_row(layout, chunk.data() + layout.slice_offset(layer), head, t, k, v);
            for (const float x : k) CHECK(float_bits(x) == float_bits(t < valid ? kept : 0.0f));
            for (const float x : v) CHECK(float_bits(x) == float_bits(t < valid ? kept : 0.0f));
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace kvpager::testing
