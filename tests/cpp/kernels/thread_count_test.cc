// The number of threads, of rows and of waves decides which way the work is cut, never a bit: walks
// that merge as they go, splits computed apart, waves cut in halves to bound the memory of those.
#include <doctest/doctest.h>

#include <chrono>
#include <numeric>
#include <string>
#include <thread>
#include <vector>

#include "kernels/kernel_table.h"
#include "kvpager/error.h"
#include "random_problem.h"

namespace kvpager::testing {
namespace {

constexpr int kRows = 40;

TEST_CASE("any number of threads and rows, in any waves, gives a row the same bits") {
  std::vector<Shape> shapes(3);
  shapes[0].kv_heads = 1;  // few walks: splits are computed apart
  shapes[0].group = 1;
  shapes[0].sinks = true;
  shapes[1].kv_heads = 8;  // many walks: each merges as it goes
  shapes[1].group = 2;
  shapes[1].dtype = DType::kBFloat16;
  shapes[2].kv_heads = 2;
  shapes[2].group = 7;
  shapes[2].window = 60;  // begins in one split for the first rows, in the next for the others
  for (Shape& shape : shapes) {
    shape.tokens = 16;
    shape.k_dim = 32;
    shape.v_dim = 48;
    CAPTURE(shape.kv_heads);
    Sequence sequence(layout_of(shape), 16 * 29 + 7, 4);
    for (const bool selecting : {false, true}) {
      CAPTURE(selecting);
      std::vector<Row> all = last_rows(sequence, kRows);
      if (selecting) select_at_random(shape, &all);
      const auto expected = reference_in_order(shape, sequence, all);
      AttendWorkspace workspace;  // one for all: its sizes change from call to call
      for (const int threads : {1, 2, 3, 7}) {
        for (int count = 1; count <= kRows; count += threads == 1 ? 1 : 3) {
          const std::vector<Row> rows(all.end() - count, all.end());
          int64_t wrong = 0;
          for (const std::vector<int64_t>& cuts :
               {std::vector<int64_t>{}, std::vector<int64_t>{1, 2, 3}}) {
            RunOptions options;
            options.threads = threads;
            options.cuts = cuts;
            options.workspace = &workspace;
            const auto got = attend(shape, {&sequence}, rows, options);
            for (size_t i = 0; i < rows.size(); ++i) {
              wrong += differing_bits(got[i], expected[static_cast<size_t>(kRows - count) + i]);
            }
          }
          CAPTURE(threads);
          CAPTURE(count);
          CHECK(wrong == 0);
        }
      }
    }
  }
}

const KernelTable* plain = nullptr;
const void* slow_tile = nullptr;

void delay_one(const TileParams& params) {
  if (params.k == slow_tile) std::this_thread::sleep_for(std::chrono::milliseconds(30));
  plain->attend_tile(params);
}

TEST_CASE("splits that are done before those ahead of them wait to be merged") {
  Shape shape;
  shape.kv_heads = 1;
  shape.tokens = 16;
  Sequence sequence(layout_of(shape), 16 * 8 * 20, 5);
  const Row row = last_rows(sequence, 1)[0];
  const std::vector<float> expected = reference_in_order(shape, sequence, row);
  plain = &kernels();
  KernelTable delaying = *plain;
  delaying.attend_tile = delay_one;
  const KernelOverride on(delaying);
  for (const int chunk : {0, 40, 100, 8 * 20 - 1}) {  // whose tile takes longer than all others
    slow_tile = sequence.table().slices[chunk];
    for (const int threads : {2, 3, 7}) {
      RunOptions options;
      options.threads = threads;
      CAPTURE(chunk);
      CAPTURE(threads);
      CHECK(differing_bits(attend(shape, {&sequence}, {row}, options)[0], expected) == 0);
    }
  }
}

TEST_CASE("splits computed apart that would take too much memory are taken in parts, same bits") {
  Shape shape;
  shape.kv_heads = 1;
  shape.group = 8;
  shape.tokens = 16;
  shape.k_dim = 16;
  shape.v_dim = 512;
  shape.dtype = DType::kBFloat16;
  // 32 rows x 8 heads x 130 splits x 528 floats are 70 MB of states; the bound is 64 MiB.
  Sequence sequence(layout_of(shape), 16 * 8 * 130, 4);
  std::vector<Row> rows = last_rows(sequence, 32);
  for (int i = 0; i < 32; ++i) {
    std::vector<int32_t>& chunks = rows[static_cast<size_t>(i)].selected.emplace_back();
    for (int32_t split = 0; split < 130; ++split) {
      chunks.push_back(split * 8 + (split == 129 ? 7 : (split + i) % 8));
    }
  }
  const auto one = attend(shape, {&sequence}, rows);
  for (const size_t i : {size_t{0}, size_t{31}}) {
    CHECK(differing_bits(one[i], reference_in_order(shape, sequence, rows[i])) == 0);
  }
  AttendWorkspace workspace;
  RunOptions options;
  options.threads = 7;
  options.workspace = &workspace;
  const auto seven = attend(shape, {&sequence}, rows, options);
  CHECK(differing_bits(seven, one) == 0);
  CHECK(workspace.bytes() < int64_t{66} << 20);
  CHECK(workspace.bytes() > int64_t{30} << 20);  // it was the way this test is about
}

TEST_CASE("a wave with more threads than the call began with is refused") {
  const Shape shape;
  const Layout layout = layout_of(shape);
  std::vector<float> q(static_cast<size_t>(4 * shape.k_dim));
  std::vector<float> out(static_cast<size_t>(4 * shape.v_dim));
  Sequence sequence(layout, 5, 1);
  const ChunkTableView table = sequence.table();
  const AttendRow row{3, 0};
  AttendParams params;
  params.layout = &layout;
  params.q_heads = 4;
  params.rows = 1;
  params.row = &row;
  params.tables = &table;
  params.q = {q.data(), DType::kFloat32, 1, 4, shape.k_dim, 4 * shape.k_dim, shape.k_dim};
  params.out = {out.data(), DType::kFloat32, 1, 4, shape.v_dim, 4 * shape.v_dim, shape.v_dim};
  ThreadPool two(2);
  ThreadPool three(3);
  AttendWorkspace workspace;
  attend_begin(params, workspace, two);
  CHECK_THROWS_WITH_AS(attend_wave(params, 0, 1, workspace, three),
                       doctest::Contains("3 threads after attend_begin with 2"), InvariantError);
  attend_wave(params, 0, 1, workspace, two);
}

// Calls attend with these views of q and out; K/V are the sequence's.
void attend_views(const Shape& shape, Sequence& sequence, const std::vector<AttendRow>& rows,
                  const TensorView& q, const TensorView& out, int threads) {
  const Layout layout = layout_of(shape);
  const ChunkTableView table = sequence.table();
  AttendParams params;
  params.layout = &layout;
  params.q_heads = shape.kv_heads * shape.group;
  params.rows = static_cast<int64_t>(rows.size());
  params.row = rows.data();
  params.tables = &table;
  params.q = q;
  params.out = out;
  params.scaling = scaling_of(shape);
  ThreadPool pool(threads);
  AttendWorkspace workspace;
  attend_begin(params, workspace, pool);
  attend_wave(params, 0, int64_t{1} << 40, workspace, pool);
  attend_finish(params, workspace, pool);
}

TEST_CASE("strides, odd addresses and an output in place of the queries change no bit") {
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    Shape shape;
    shape.dtype = dtype;
    shape.tokens = 16;
    shape.k_dim = shape.v_dim = 32;
    Sequence sequence(layout_of(shape), 16 * 12, 9);
    const int64_t count = 5;
    const int64_t heads = 4;
    const size_t element = static_cast<size_t>(dtype_bytes(dtype));
    const std::vector<Row> given = rows_at({30, 60, 90, 120, 150});
    const auto expected = reference_in_order(shape, sequence, given);
    std::vector<AttendRow> rows;
    std::vector<std::vector<float>> queries;
    for (const Row& row : given) {
      rows.push_back({row.position, 0});
      queries.push_back(query_of(shape, row));
    }
    struct Strides {
      int64_t row, head;
    };
    const Strides all[] = {
        {heads * 32, 32}, {heads * 37, 37}, {32, count * 32}, {33, count * 33 + 5}};
    for (const Strides& strides : all) {
      for (const size_t offset : {size_t{0}, size_t{1}, size_t{3}}) {  // elements past a cache line
        for (const bool in_place : {false, true}) {
          CAPTURE(strides.row);
          CAPTURE(offset);
          CAPTURE(in_place);
          std::vector<std::byte> q_bytes(4096 * element, std::byte{0xFF});
          std::vector<std::byte> out_bytes(4096 * element, std::byte{0xFF});
          std::byte* q = q_bytes.data() + offset * element;
          std::byte* out = in_place ? q : out_bytes.data() + offset * element;
          const auto at = [&](int64_t row, int64_t head, int64_t d) {
            return static_cast<size_t>(row * strides.row + head * strides.head + d) * element;
          };
          for (int64_t i = 0; i < count; ++i) {
            for (int64_t h = 0; h < heads; ++h) {
              for (int64_t d = 0; d < 32; ++d) {
                round_to(dtype, queries[static_cast<size_t>(i)][static_cast<size_t>(h * 32 + d)],
                         q + at(i, h, d), 0);
              }
            }
          }
          std::vector<std::byte> before = in_place ? q_bytes : out_bytes;
          const TensorView view = {q, dtype, count, heads, 32, strides.row, strides.head};
          TensorView to = view;
          to.data = out;
          attend_views(shape, sequence, rows, view, to, in_place ? 2 : 1);
          int64_t wrong = 0;
          for (int64_t i = 0; i < count; ++i) {
            for (int64_t h = 0; h < heads; ++h) {
              for (int64_t d = 0; d < 32; ++d) {
                wrong +=
                    float_bits(widen(dtype, out + at(i, h, d), 0)) !=
                    float_bits(expected[static_cast<size_t>(i)][static_cast<size_t>(h * 32 + d)]);
                std::memcpy(before.data() + offset * element + at(i, h, d), out + at(i, h, d),
                            element);
              }
            }
          }
          CHECK(wrong == 0);
          CHECK((before == (in_place ? q_bytes : out_bytes)));  // nothing between the heads
        }
      }
    }
  }
}

}  // namespace
}  // namespace kvpager::testing
