#include <doctest/doctest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "base/half.h"
#include "kernels/kernel_table.h"
#include "kvpager/attention.h"
#include "kvpager/error.h"
#include "read_row.h"
#include "tiers.h"

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

TEST_CASE("the first query row that is not finite is found, of the rows that are some part's") {
  constexpr int kRows = 7;
  in_every_tier([&](const KernelTable&) {
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
  });
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
