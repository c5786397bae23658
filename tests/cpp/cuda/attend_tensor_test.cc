// Attention::kTensor on every device: against float64, and against itself to the bit, whatever else
// is in the launch and however its work is cut.
#include <doctest/doctest.h>

#include <cmath>
#include <cstdlib>
#include <string>
#include <vector>

#include "cuda/kernels.h"
#include "problem.h"
#include "random_problem.h"
#include "special_values.h"

namespace kvpager::testing {
namespace {

using Outputs = std::vector<std::vector<float>>;

constexpr DType kTypes[] = {DType::kBFloat16, DType::kFloat16, DType::kQ8};
constexpr int kDims[] = {64, 96, 128};
bool has_kernel(DType dtype, int dim) { return dtype != DType::kQ8 || dim != 96; }
constexpr int32_t kOnlySmall = 1 << 20;
constexpr int32_t kOnlyLarge = 0;

// How much one item of work walks: follows from the room for states there is.
enum class Cut { kSplits, kGroups, kWalks, kAsAsked };
constexpr Cut kCuts[] = {Cut::kSplits, Cut::kGroups, Cut::kWalks};

int64_t chunks_of(const Shape& shape, const std::vector<Sequence*>& sequences) {
  int64_t tokens = 0;
  for (const Sequence* sequence : sequences) tokens = std::max(tokens, sequence->length());
  return (tokens + shape.tokens - 1) / shape.tokens;
}

ForwardOptions cut_as(ForwardOptions options, Cut cut, const Shape& shape,
                      const std::vector<Sequence*>& sequences, const std::vector<Row>& rows) {
  if (cut == Cut::kAsAsked) return options;
  const int64_t chunks = chunks_of(shape, sequences);
  const int64_t units = cut == Cut::kSplits   ? (chunks + 3) / 4
                        : cut == Cut::kGroups ? (chunks + 63) / 64
                                              : 1;
  int64_t queries = 0;
  for (const Row& row : rows) queries += row.sequence >= 0 ? shape.kv_heads * shape.group : 0;
  options.scratch_bytes = queries * (1 + units) * (shape.v_dim + 8) * 4;  // a total, then states
  return options;
}

Outputs run(device::Device& device, const Shape& shape, const std::vector<Sequence*>& sequences,
            const std::vector<Row>& rows, const ForwardOptions& options = {},
            Cut cut = Cut::kAsAsked) {
  DeviceForward forward(device, shape, sequences, rows,
                        cut_as(options, cut, shape, sequences, rows));
  return forward.attend(gpu::Attention::kTensor);
}

// The rows' outputs, each computed in a forward of its own.
Outputs each_alone(device::Device& device, const Shape& shape,
                   const std::vector<Sequence*>& sequences, const std::vector<Row>& rows,
                   const ForwardOptions& options, Cut cut = Cut::kAsAsked) {
  Outputs result;
  for (const Row& row : rows) {
    result.push_back(run(device, shape, sequences, {row}, options, cut)[0]);
  }
  return result;
}

Shape tensor_shape(DType dtype, int dim) {
  Shape shape;
  shape.dtype = dtype;
  if (dtype == DType::kQ8) shape.io_dtype = DType::kBFloat16;
  shape.k_dim = shape.v_dim = dim;
  shape.tokens = 64;
  return shape;
}

Shape random_tensor_shape(Dice& dice) {
  Shape shape = random_shape(dice);
  shape.dtype = dice.pick({DType::kFloat16, DType::kBFloat16, DType::kQ8});
  const bool codes = shape.dtype == DType::kQ8;
  shape.value_dtype = shape.io_dtype = Shape::kSame;
  if (codes) shape.io_dtype = DType::kBFloat16;
  shape.k_rotated = shape.v_rotated = false;
  shape.k_dim = shape.v_dim = codes ? dice.pick({64, 128}) : dice.pick({64, 64, 96, 128});
  shape.kv_heads = dice.roll(1, 2);
  shape.tokens = 64;
  if (shape.scaling == 0.01f) shape.scaling = 0.25f;
  return shape;
}

// The furthest an output is from float64, as a share of what rounding weights and outputs explains.
double worst_error(const Shape& shape, const std::vector<Sequence*>& sequences,
                   const std::vector<Row>& rows, const Outputs& outputs) {
  const double step = shape.io() == DType::kBFloat16 ? 0x1p-8 : 0x1p-11;
  double worst = 0;
  for (size_t i = 0; i < rows.size(); ++i) {
    if (rows[i].sequence < 0) {
      for (const float x : outputs[i]) worst = std::max(worst, float_bits(x) == 0 ? 0.0 : 1e9);
      continue;
    }
    const Sequence& sequence = *sequences[static_cast<size_t>(rows[i].sequence)];
    const std::vector<double> expected = reference64(shape, sequence, rows[i]);
    for (size_t j = 0; j < expected.size(); ++j) {
      const double error = std::fabs(double{outputs[i][j]} - expected[j]);
      const double share = error / (step * (1.0 + std::fabs(expected[j])));
      worst = share <= worst ? worst : share;  // NaN is worse than anything
    }
  }
  return worst;
}

ForwardOptions with_small_queries(int32_t small) {
  ForwardOptions options;
  options.small_queries = small;
  return options;
}

TEST_CASE("tensor attention is there for usual head dimensions, of 16-bit elements and of q8") {
  const auto shape_of = [](DType stored, DType query, int dim) {
    gpu::Shape shape;
    shape.chunk_tokens = 64;
    shape.k_dim = shape.v_dim = dim;
    shape.k_dtype = shape.v_dtype = stored;
    shape.q_dtype = query;
    return shape;
  };
  constexpr DType kBF16 = DType::kBFloat16, kF16 = DType::kFloat16, kQ8 = DType::kQ8;
  const gpu::Shape floats = shape_of(kBF16, kBF16, 128), codes = shape_of(kQ8, kBF16, 128);
  std::vector<gpu::Shape> without = {shape_of(kBF16, DType::kFloat32, 128),
                                     shape_of(kQ8, kF16, 128), shape_of(kQ8, DType::kFloat32, 128),
                                     shape_of(kQ8, kBF16, 96), shape_of(DType::kQ4, kBF16, 128)};
  for (const int dim : {32, 80, 256, 512}) without.push_back(shape_of(kBF16, kBF16, dim));
  for (const int tokens : {16, 32, 128, 256}) {
    without.push_back(floats);
    without.back().chunk_tokens = tokens;
  }
  without.push_back(floats);
  without.back().v_dim = 64;
  without.push_back(floats);
  without.back().v_dtype = kF16;
  without.push_back(codes);
  without.back().v_dtype = DType::kQ4;
  for_each_device([&](device::Device& device) {
    const auto has = [&](const gpu::Shape& shape) {
      return device.api().tensor_attention_shared_bytes(&shape) > 0;
    };
    CHECK(has(floats));
    CHECK(has(codes));
    for (size_t i = 0; i < without.size(); ++i) {
      CAPTURE(i);
      CHECK(!has(without[i]));
    }
  });
}

TEST_CASE("tensor attention takes the shared memory that it says, and no less will do") {
  if (!tests_shim()) return;
  const std::shared_ptr<device::Device> plain = device::Device::open("shim");
  for (const int dim : kDims) {
    CAPTURE(dim);
    Shape shape = tensor_shape(DType::kBFloat16, dim);
    Sequence sequence(layout_of(shape), 100, 3);
    const gpu::Shape kernel_shape = kernel_shape_of(layout_of(shape), shape.group, shape.io());
    const int64_t bytes = plain->api().tensor_attention_shared_bytes(&kernel_shape);
    ForwardOptions options = with_small_queries(kOnlyLarge);
    for (const int64_t limit : {bytes, bytes - 1}) {
      const Environment shared("KVPAGER_SHIM_SHARED", std::to_string(limit));
      const std::shared_ptr<device::Device> limited = device::Device::open("shim");
      CHECK(limited->info().shared_block_bytes == limit);
      DeviceForward forward(*limited, shape, {&sequence}, rows_at({99}), options);
      const gpu::AttendParams params = forward.attend_params(gpu::Attention::kTensor);
      const int code = limited->api().attend(limited->context(), &params, forward.stream().get());
      CHECK((code == device::kOk) == (limit == bytes));
    }
  }
  device::Device::open("shim");  // has its limit again
}

TEST_CASE("every head dimension and element type is right, for few rows and many") {
  for_each_device([&](device::Device& device) {
    for (const DType dtype : kTypes) {
      for (const int dim : kDims) {
        if (!has_kernel(dtype, dim)) continue;
        CAPTURE(static_cast<int>(dtype));
        CAPTURE(dim);
        Shape shape = tensor_shape(dtype, dim);
        shape.kv_heads = 1;
        shape.group = 3;
        Sequence sequence(layout_of(shape), 307, 3);
        const int64_t n = sequence.length();
        const std::vector<Row> rows = rows_at({n - 1, 0, n / 2, n - 2, 63, 64, n - 9});
        for (const int32_t small : {kOnlySmall, kOnlyLarge}) {
          CAPTURE(small);
          ForwardOptions options = with_small_queries(small);
          CHECK(worst_error(shape, {&sequence}, rows,
                            run(device, shape, {&sequence}, rows, options)) < 2);
        }
      }
    }
  });
}

TEST_CASE("any problem is right, and the same to the bit however its work is cut") {
  for_each_device([&](device::Device& device) {
    for (uint32_t seed = 0; seed < (small_tests() ? 6 : 60); ++seed) {
      CAPTURE(seed);
      Dice dice(seed + 900);
      const Shape shape = random_tensor_shape(dice);
      RandomRows made = random_rows(dice, shape, seed);
      ForwardOptions options;
      options.seed = seed;
      options.layers = dice.roll(1, 3);
      options.layer = dice.roll(0, options.layers - 1);
      options.stride_padding = dice.pick({0, 1, 8});
      options.capture_counts = dice.one_in(3);
      options.stray_selection = dice.one_in(2);
      const Outputs outputs = run(device, shape, made.pointers, made.rows, options);
      CHECK(worst_error(shape, made.pointers, made.rows, outputs) < 3);
      options.pinned_percent = dice.pick({0, 30, 100});
      options.staged_percent = dice.pick({0, 40, 100});
      options.small_queries = dice.pick({kOnlySmall, kOnlyLarge, 20});
      options.seed = seed + 1;
      options.poison = dice.pick({0xFF, 0x00, 0x7F});
      CHECK(differing(outputs, run(device, shape, made.pointers, made.rows, options,
                                   dice.pick({Cut::kSplits, Cut::kGroups, Cut::kWalks}))) == 0);
    }
  });
}

TEST_CASE("waves of staged chunks, each in a call of its own, have the bits of one call") {
  for_each_device([&](device::Device& device) {
    for (const DType dtype : kTypes) {
      for (const int64_t window : {0, 64 * 70}) {
        if (small_tests() && (dtype == DType::kFloat16 || window != 0)) continue;
        CAPTURE(static_cast<int>(dtype));
        CAPTURE(window);
        Shape shape = tensor_shape(dtype, 64);
        shape.kv_heads = 1;
        shape.group = 2;
        shape.window = static_cast<int>(window);
        shape.sinks = window == 0;
        const int64_t length = 64 * 140 + 5;
        Sequence first(layout_of(shape), length, 1), second(layout_of(shape), 64 * 66, 2);
        // Some rows see no chunk of the later waves, and with a window none of the earlier ones.
        std::vector<Row> rows = rows_at({length - 1, length - 2, 64 * 64, 64 * 64 - 1, 40});
        const Row padding = padding_row();
        rows.insert(rows.begin() + 1, padding);
        for (const Row& row : rows_at({64 * 66 - 1, 3}, 1)) rows.push_back(row);
        const Outputs expected = run(device, shape, {&first, &second}, rows);
        uint32_t seed = 0;
        for (const Cut cut : kCuts) {
          for (const int32_t small : {kOnlySmall, kOnlyLarge}) {
            CAPTURE(static_cast<int>(cut));
            CAPTURE(small);
            ForwardOptions options = with_small_queries(small);
            options.staged_percent = 70;
            DeviceForward forward(device, shape, {&first, &second}, rows,
                                  cut_as(options, cut, shape, {&first, &second}, rows));
            const std::vector<gpu::Wave> waves = forward.random_waves(++seed);
            CAPTURE(waves.size());
            CHECK(differing(forward.attend_in_waves(gpu::Attention::kTensor, waves), expected) ==
                  0);
          }
        }
      }
    }
  });
}

// Several groups of splits, and rows in tiles of either size: what is alone against what is together.
void check_row_alone(device::Device& device, const Shape& shape, int64_t length,
                     int rows_together) {
  Sequence sequence(layout_of(shape), length, 21);
  std::vector<int64_t> positions;
  for (int i = 0; i < rows_together; ++i) positions.push_back(length - rows_together + i);
  const std::vector<Row> rows = rows_at(positions);
  const std::vector<Row> some = {rows[0], rows[rows.size() / 2], rows.back()};
  ForwardOptions options = with_small_queries(kOnlySmall);
  const Outputs alone = each_alone(device, shape, {&sequence}, some, options);
  for (const Cut cut : kCuts) {
    for (const int32_t small : {kOnlySmall, kOnlyLarge}) {
      CAPTURE(static_cast<int>(cut));
      CAPTURE(small);
      options.small_queries = small;
      options.seed += 1;
      options.staged_percent = 50;
      const Outputs together = run(device, shape, {&sequence}, rows, options, cut);
      CHECK(differing({together[0], together[rows.size() / 2], together.back()}, alone) == 0);
    }
  }
}

TEST_CASE("a row alone has the bits of the row among others, in tiles of any size and any cut") {
  for_each_device([&](device::Device& device) {
    for (const DType dtype : kTypes) {
      for (const int dim : kDims) {
        if (!has_kernel(dtype, dim)) continue;
        CAPTURE(static_cast<int>(dtype));
        CAPTURE(dim);
        Shape shape = tensor_shape(dtype, dim);
        shape.kv_heads = 1;
        shape.group = dim == 64 ? 8 : 2;
        if (small_tests() && (dim == 96 || dtype == DType::kFloat16)) continue;
        check_row_alone(device, shape, 64 * (small_tests() ? 18 : 66) + 5, dim == 64 ? 12 : 7);
      }
    }
    if (small_tests()) return;
    Shape shape = tensor_shape(DType::kBFloat16, 64);
    shape.kv_heads = 1;
    shape.group = 1;
    check_row_alone(device, shape, 64 * 130 + 40, 40);
  });
}

TEST_CASE("what other rows select or see changes no bit of a row") {
  for_each_device([&](device::Device& device) {
    for (uint32_t seed = 0; seed < (small_tests() ? 3 : 12); ++seed) {
      CAPTURE(seed);
      Dice dice(seed + 77);
      Shape shape = tensor_shape(kTypes[seed / 2 % 3], seed % 3 == 0 ? 128 : 64);
      shape.kv_heads = 2;
      shape.group = dice.pick({1, 2, 5});
      shape.window = seed % 3 == 1 ? 90 : 0;
      shape.sinks = seed % 4 == 1;
      Sequence sequence(layout_of(shape), 64 * 20 + 3, seed);
      std::vector<Row> rows;
      for (int i = 0; i < 20; ++i) {
        Row row;
        row.position = dice.roll(0, static_cast<int>(sequence.length()) - 1);
        row.query_seed = static_cast<uint32_t>(i);
        row.selected = random_selection(dice, shape, row.position);
        rows.push_back(row);
      }
      ForwardOptions options = with_small_queries(kOnlySmall);
      const std::vector<Row> some = {rows[0], rows[7], rows[19]};
      const Outputs alone = each_alone(device, shape, {&sequence}, some, options);
      for (const int32_t small : {kOnlySmall, kOnlyLarge}) {
        CAPTURE(small);
        options.small_queries = small;
        const Outputs together = run(device, shape, {&sequence}, rows, options,
                                     dice.pick({Cut::kSplits, Cut::kGroups, Cut::kWalks}));
        CHECK(differing({together[0], together[7], together[19]}, alone) == 0);
      }
    }
  });
}

TEST_CASE("a weight of zero adds nothing, however large the values of later rows are") {
  for_each_device([&](device::Device& device) {
    for (const DType dtype : {DType::kBFloat16, DType::kFloat16}) {
      CAPTURE(static_cast<int>(dtype));
      const Shape shape = tensor_shape(dtype, 64);
      const float huge = dtype == DType::kFloat16 ? -60000.0f : -0x1p120f;
      const float tiny = dtype == DType::kFloat16 ? 0x1p-14f : 0x1p-100f;
      const int64_t seen = 64 + 17;
      Sequence sequence(layout_of(shape), 128, noisy(1, 1.0f), [&](int64_t t, int head, int d) {
        return t < seen ? noisy(2, tiny)(t, head, d) : huge;
      });
      // A row before the large values, alone, and together with a row after them.
      const std::vector<Row> rows = rows_at({seen - 1, 127});
      for (const int32_t small : {kOnlySmall, kOnlyLarge}) {
        ForwardOptions options = with_small_queries(small);
        const Outputs alone = run(device, shape, {&sequence}, {rows[0]}, options);
        const Outputs together = run(device, shape, {&sequence}, rows, options);
        CHECK(differing({together[0]}, alone) == 0);
        CHECK(count_if({together[0]}, is_not_finite) == 0);
      }
    }
  });
}

TEST_CASE("a zero has one sign, whatever the zeros it is a sum of") {
  for_each_device([&](device::Device& device) {
    Shape shape = tensor_shape(DType::kBFloat16, 64);
    shape.kv_heads = shape.group = 1;
    shape.scaling = 1.0f;
    // Sums of tiny negative values, in a tile, split and group before it, are rescaled to nothing by
    // the key at `top`, whose value is -0; later values, of weight 0, are there for one forward and not
    // for the other.
    const int64_t top = 64 * 73;
    Sequence sequence(
        layout_of(shape), top + 64,
        [&](int64_t t, int, int d) { return t == top && d == 0 ? 200.0f : 0.0f; },
        [&](int64_t t, int, int) { return t < top    ? -0x1p-120f
                                          : t == top ? -0.0f
                                                     : -5.0f; });
    std::vector<Row> rows = rows_at({top, top + 63});
    for (Row& row : rows) row.query.assign(64, 1.0f);
    for (const int32_t small : {kOnlySmall, kOnlyLarge}) {
      ForwardOptions options = with_small_queries(small);
      const Outputs together = run(device, shape, {&sequence}, rows, options);
      const Outputs alone = run(device, shape, {&sequence}, {rows[0]}, options);
      for (const Outputs& outputs : {together, alone}) {
        for (const float x : outputs[0]) CHECK(float_bits(x) == 0);
      }
    }
  });
}

TEST_CASE("chunks that nobody selects may hold anything") {
  for_each_device([&](device::Device& device) {
    for (const int32_t small : {kOnlySmall, kOnlyLarge}) {
      CAPTURE(small);
      Shape shape = tensor_shape(DType::kBFloat16, 64);
      Sequence sequence(layout_of(shape), 64 * 70 + 9, 4);
      std::vector<Row> rows = rows_at({64 * 70 + 8, 64 * 70 + 3, 64 * 40 + 1});
      for (Row& row : rows) {
        row.selected = {{1, 9, 17, 66}, {0, 9, 30}};
        for (auto& list : row.selected) {
          const auto last = static_cast<int32_t>(row.position / 64);
          while (list.back() >= last) list.pop_back();
          list.push_back(last);
        }
      }
      ForwardOptions options = with_small_queries(small);
      const Outputs clean = run(device, shape, {&sequence}, rows, options);
      CHECK(worst_error(shape, {&sequence}, rows, clean) < 2);
      for (int64_t t = 0; t < sequence.length(); ++t) {
        const int64_t c = t / 64;
        const bool used = c <= 1 || c == 9 || c == 17 || c == 30 || c == 40 || c == 66 || c == 70;
        if (!used) spoil(layout_of(shape), sequence, t, 0xFFFFFFFFu);
      }
      CHECK(differing(run(device, shape, {&sequence}, rows, options), clean) == 0);
    }
  });
}

TEST_CASE("groups of 64 chunks that no row selects from, two in a row, are passed over") {
  for_each_device([&](device::Device& device) {
    for (const int dim : kDims) {
      CAPTURE(dim);
      if (small_tests() && dim != 128) continue;
      Shape shape = tensor_shape(DType::kBFloat16, dim);
      shape.kv_heads = 1;
      shape.group = 48;  // queries for several warps of a tile
      Sequence sequence(layout_of(shape), 64 * 200 + 9, 6);
      std::vector<Row> rows = rows_at({64 * 200 + 8, 64 * 199 + 2});
      rows[0].selected = {{1, 9, 63, 192, 198, 200}};
      rows[1].selected = {{0, 9, 40, 195, 199}};
      ForwardOptions options = with_small_queries(kOnlySmall);
      const Outputs expected = run(device, shape, {&sequence}, rows, options);
      CHECK(worst_error(shape, {&sequence}, rows, expected) < 2);
      options.small_queries = kOnlyLarge;
      for (const Cut cut : kCuts) {
        CAPTURE(static_cast<int>(cut));
        CHECK(differing(run(device, shape, {&sequence}, rows, options, cut), expected) == 0);
      }
    }
  });
}

TEST_CASE("a row that sees no key is zeros, with sinks or without") {
  for_each_device([&](device::Device& device) {
    for (const bool sinks : {false, true}) {
      for (const Cut cut : kCuts) {
        for (const int32_t small : {kOnlySmall, kOnlyLarge}) {
          CAPTURE(sinks);
          CAPTURE(small);
          Shape shape = tensor_shape(DType::kFloat16, 64);
          shape.sinks = sinks;
          shape.window = 20;
          Sequence sequence(layout_of(shape), 400, 8);
          std::vector<Row> rows = rows_at({399, 398, 350});
          rows[0].selected = {{6}, {6}};
          rows[1].selected = {{}, {0}};  // nothing, and what is outside the window
          rows[2].selected = {{5}, {}};
          ForwardOptions options = with_small_queries(small);
          options.stray_selection = true;
          const Outputs outputs = run(device, shape, {&sequence}, rows, options, cut);
          for (const float x : outputs[1]) CHECK(float_bits(x) == 0);
          for (size_t j = 128; j < 256; ++j) CHECK(float_bits(outputs[2][j]) == 0);
          CHECK(worst_error(shape, {&sequence}, {rows[0]}, {outputs[0]}) < 2);
          const Outputs alone = run(device, shape, {&sequence}, {rows[2]}, options);
          CHECK(differing({outputs[2]}, alone) == 0);
        }
      }
    }
  });
}

TEST_CASE("a query that is not a number spoils its own output and no other") {
  for_each_device([&](device::Device& device) {
    for (const int32_t small : {kOnlySmall, kOnlyLarge}) {
      const Shape shape = tensor_shape(DType::kBFloat16, 64);
      Sequence sequence(layout_of(shape), 300, 5);
      std::vector<Row> rows = rows_at({299, 298, 297, 150});
      for (Row& row : rows) row.query = noisy_query(shape, row.query_seed, 1.0f);
      ForwardOptions options = with_small_queries(small);
      const Outputs clean = run(device, shape, {&sequence}, rows, options);
      for (float& x : rows[1].query) x = kNaN;
      rows[3].query.assign(rows[3].query.size(), kInfinity);
      const Outputs spoilt = run(device, shape, {&sequence}, rows, options);
      CHECK(differing({spoilt[0], spoilt[2]}, {clean[0], clean[2]}) == 0);
      for (const float x : spoilt[1]) CHECK(std::isnan(x));
      for (const float x : spoilt[3]) CHECK(!std::isfinite(x));
    }
  });
}

TEST_CASE("a launch made for the most rows serves any later forward at the same addresses") {
  for_each_device([&](device::Device& device) {
    Shape shape = tensor_shape(DType::kBFloat16, 64);
    shape.group = 4;
    Sequence first(layout_of(shape), 64 * 70 + 3, 1), second(layout_of(shape), 90, 2);
    std::vector<Row> many = rows_at({4400, 4401, 4402, 4403, 4404, 4405, 4406, 4407, 4408});
    for (const Row& row : rows_at({88, 89, 40}, 1)) many.push_back(row);
    const Row padding = padding_row();
    many.push_back(padding);
    ForwardOptions options;
    options.capture_counts = true;
    DeviceForward forward(device, shape, {&first, &second}, many, options);
    std::vector<std::vector<Row>> forwards = {many, {padding, many[9], padding}, {many[3]}};
    forwards.push_back({padding, padding});
    for (const std::vector<Row>& rows : forwards) {
      CAPTURE(rows.size());
      forward.load(rows, {}, static_cast<uint32_t>(rows.size()));
      const Outputs outputs = forward.attend(gpu::Attention::kTensor);
      CHECK(worst_error(shape, {&first, &second}, rows, outputs) < 2);
      CHECK(differing(outputs, run(device, shape, {&first, &second}, rows)) == 0);
    }
  });
}

}  // namespace
}  // namespace kvpager::testing
