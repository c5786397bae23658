// Attention::kReference on every device, to the bit against the CPU's kernels.
#include <doctest/doctest.h>

#include <cmath>
#include <initializer_list>
#include <string>
#include <vector>

#include "problem.h"
#include "random_problem.h"
#include "shim_hooks.h"
#include "special_values.h"

namespace kvpager::testing {
namespace {

constexpr DType kStored[] = {DType::kFloat32, DType::kFloat16, DType::kBFloat16, DType::kQ8,
                             DType::kQ4};

// The ways the kernels can go about it: which one is taken follows from the scratch they are given.
enum class Way { kWalk, kOneRound, kManyRounds };
constexpr Way kWays[] = {Way::kWalk, Way::kOneRound, Way::kManyRounds};

ForwardOptions with_scratch(ForwardOptions options, Way way, const Shape& shape, size_t rows) {
  const int64_t states = static_cast<int64_t>(rows) * shape.kv_heads * shape.group;
  const int64_t state = (shape.v_dim + 2) * static_cast<int64_t>(sizeof(float));
  if (way == Way::kWalk) options.scratch_bytes = states * state;            // totals
  if (way == Way::kManyRounds) options.scratch_bytes = 2 * states * state;  // one split and totals
  return options;
}

// The values of a test, or the first of them where time is short.
template <class T>
std::vector<T> some_of(std::initializer_list<T> values) {
  const size_t count = small_tests() ? std::min<size_t>(2, values.size()) : values.size();
  return std::vector<T>(values.begin(), values.begin() + static_cast<int64_t>(count));
}

// Holds every device, in every way, against the CPU; returns what the CPU computes.
std::vector<std::vector<float>> check_everywhere(const Shape& shape,
                                                 const std::vector<Sequence*>& sequences,
                                                 const std::vector<Row>& rows,
                                                 const ForwardOptions& options = {}) {
  const auto expected = attend(shape, sequences, rows);
  for_each_device([&](device::Device& device) {
    for (const Way way : kWays) {
      CAPTURE(static_cast<int>(way));
      DeviceForward forward(device, shape, sequences, rows,
                            with_scratch(options, way, shape, rows.size()));
      CHECK(differing(forward.attend(), expected) == 0);
    }
  });
  return expected;
}

int64_t count_not_finite(const std::vector<std::vector<float>>& outputs) {
  return count_if(outputs, is_not_finite);
}

Shape wide_random_shape(Dice& dice) {
  Shape shape = random_shape(dice);
  if (dice.one_in(4)) shape.tokens = dice.pick({16, 48, 80, 128, 256});
  if (dice.one_in(6)) shape.k_dim = 16 * dice.roll(7, 32);
  if (dice.one_in(6)) shape.v_dim = 16 * dice.roll(7, 32);
  if (dice.one_in(6)) {
    shape.group = dice.roll(9, 20);
    shape.kv_heads = dice.roll(1, 2);
  }
  if (shape.dtype == DType::kQ4) shape.k_dim = (shape.k_dim + 31) / 32 * 32;
  if (shape.values() == DType::kQ4) shape.v_dim = (shape.v_dim + 31) / 32 * 32;
  shape.k_rotated = shape.v_rotated = false;  // queries and outputs are rotated around attention
  return shape;
}

TEST_CASE("any problem has the CPU's bits, wherever its chunks are and however its splits are cut" *
          doctest::test_suite("long")) {
  for_each_device([&](device::Device& device) {
    for (uint32_t seed = 0; seed < (small_tests() ? 8 : 120); ++seed) {
      CAPTURE(seed);
      Dice dice(seed + 5000);
      const Shape shape = wide_random_shape(dice);
      RandomRows made = random_rows(dice, shape, seed);
      ForwardOptions options;
      options.seed = seed;
      options.layers = dice.roll(1, 3);
      options.layer = dice.roll(0, options.layers - 1);
      options.pinned_percent = dice.pick({0, 30, 100});
      options.staged_percent = dice.pick({0, 40, 100});
      options.stride_padding = dice.pick({0, 1, 8});
      options.max_rows = dice.pick({0, 50});
      options.capture_counts = dice.one_in(3);
      options.stray_selection = dice.one_in(2);
      options.small_queries = dice.pick({16, 32, 100});
      options.poison = dice.pick({0xFF, 0x00, 0x7F});
      const Way way = dice.pick({Way::kWalk, Way::kOneRound, Way::kManyRounds});
      const size_t most_rows =
          options.capture_counts ? std::max<size_t>(50, made.rows.size()) : made.rows.size();
      DeviceForward forward(device, shape, made.pointers, made.rows,
                            with_scratch(options, way, shape, most_rows));
      const auto expected = forward.on_cpu();
      CHECK(differing(forward.attend(), expected) == 0);
      CHECK(
          differing(forward.attend_in_waves(gpu::Attention::kReference, forward.random_waves(seed)),
                    expected) == 0);
    }
  });
}

TEST_CASE("waves of staged chunks, each in a call of its own, have the bits of one call") {
  for (const int window : {0, 16 * 70}) {
    CAPTURE(window);
    Shape shape = small_shape(DType::kBFloat16);
    shape.tokens = 16;
    shape.window = window;
    shape.sinks = window == 0;
    const int64_t length = 16 * 150 + 3;
    Sequence first(layout_of(shape), length, 1), second(layout_of(shape), 16 * 66, 2);
    // Some rows see no chunk of the later waves, and with a window none of the earlier ones.
    std::vector<Row> rows = rows_at({length - 1, length - 2, 16 * 64, 40});
    rows.insert(rows.begin() + 1, padding_row());
    for (const Row& row : rows_at({16 * 66 - 1, 3}, 1)) rows.push_back(row);
    const auto expected = attend(shape, {&first, &second}, rows);
    for_each_device([&](device::Device& device) {
      for (const Way way : kWays) {
        CAPTURE(static_cast<int>(way));
        ForwardOptions options;
        options.staged_percent = 70;
        DeviceForward forward(device, shape, {&first, &second}, rows,
                              with_scratch(options, way, shape, rows.size()));
        for (const uint32_t seed : some_of({uint32_t{1}, uint32_t{2}, uint32_t{3}, uint32_t{4}})) {
          const std::vector<gpu::Wave> waves = forward.random_waves(seed);
          CAPTURE(waves.size());
          CHECK(differing(forward.attend_in_waves(gpu::Attention::kReference, waves), expected) ==
                0);
        }
      }
    });
  }
}

TEST_CASE("keys, values and queries of any dtypes, head dimensions to 512 and chunks to 256") {
  int at = 0;
  for (const DType keys : kStored) {
    for (const DType values : kStored) {
      for (const DType io : kDTypes) {
        Shape shape;
        shape.dtype = keys;
        shape.value_dtype = values;
        shape.io_dtype = io;
        shape.kv_heads = 1 + at % 2;
        shape.group = std::vector<int>{1, 2, 3, 4, 7}[static_cast<size_t>(at % 5)];
        shape.tokens = std::vector<int>{16, 32, 64, 256}[static_cast<size_t>(at % 4)];
        shape.k_dim = std::vector<int>{16, 64, 80, 192, 512}[static_cast<size_t>(at % 5)];
        shape.v_dim =
            std::vector<int>{512, 16, 144, 64, 128, 272, 256}[static_cast<size_t>(at % 7)];
        if (keys == DType::kQ4) shape.k_dim = (shape.k_dim + 31) / 32 * 32;
        if (values == DType::kQ4) shape.v_dim = (shape.v_dim + 31) / 32 * 32;
        ++at;
        if (small_tests() && at % 9 != 0) continue;
        CAPTURE(at);
        const int64_t length = shape.tokens * (shape.tokens == 256 ? 9 : 17) + 5;
        Sequence sequence(layout_of(shape), length, static_cast<uint32_t>(at));
        check_everywhere(shape, {&sequence}, rows_at({length - 1, 0, length / 2}));
      }
    }
  }
}

TEST_CASE("a row alone has the bits of the row among sixty-four, at other addresses") {
  for (const DType dtype : kDTypes) {
    Shape shape;
    shape.dtype = dtype;
    shape.tokens = 16;
    shape.group = 4;
    shape.window = dtype == DType::kFloat16 ? 75 : 0;
    Sequence sequence(layout_of(shape), 16 * 20 + 5, 6);
    const std::vector<Row> rows = last_rows(sequence, 64);
    for_each_device([&](device::Device& device) {
      DeviceForward many(device, shape, {&sequence}, rows);
      const auto together = many.attend();
      CHECK(differing(together, many.on_cpu()) == 0);
      for (const size_t i : some_of({size_t{0}, size_t{17}, size_t{63}})) {
        ForwardOptions options;
        options.seed = 100 + static_cast<uint32_t>(i);
        DeviceForward one(device, shape, {&sequence}, {rows[i]}, options);
        CHECK(differing_bits(one.attend()[0], together[i]) == 0);
      }
    });
  }
}

TEST_CASE("chunks in the pool, in pinned memory and in staging give the same bits") {
  Shape shape = small_shape(DType::kBFloat16);
  Sequence sequence(layout_of(shape), kLength, noisy(1, 1.0f), noisy(2, 1.0f));
  const std::vector<Row> rows = rows_of(shape, 1.0f);
  for (const int pinned : some_of({50, 0, 100})) {
    for (const int staged : some_of({50, 0, 100})) {
      ForwardOptions options;
      options.pinned_percent = pinned;
      options.staged_percent = staged;
      options.layers = 2;
      options.layer = 1;
      check_everywhere(shape, {&sequence}, rows, options);
    }
  }
}

TEST_CASE("rows without keys, padding and forwards without rows are zeros and nothing else") {
  for (const bool sinks : {false, true}) {
    Shape shape = small_shape();
    shape.sinks = sinks;
    Sequence sequence(layout_of(shape), kLength, noisy(1, 1.0f), noisy(2, 1.0f));
    std::vector<Row> rows = rows_of(shape, 1.0f);
    for (Row& row : rows) row.selected = {{}, {static_cast<int32_t>(row.position / shape.tokens)}};
    const Row padding = padding_row();
    rows.insert(rows.begin() + 3, padding);
    const auto outputs = check_everywhere(shape, {&sequence}, rows);
    for (size_t i = 0; i < rows.size(); ++i) {
      for (size_t j = 0; j < outputs[i].size(); ++j) {
        const bool none = i == 3 || j < outputs[i].size() / 2;
        if (none) CHECK(float_bits(outputs[i][j]) == 0);
      }
    }
    check_everywhere(shape, {&sequence}, {padding, padding});
    for_each_device([&](device::Device& device) {
      ForwardOptions options;
      options.max_rows = 4;
      DeviceForward none(device, shape, {&sequence}, {}, options);
      CHECK(none.attend().empty());
    });
  }
}

TEST_CASE(
    "few rows are computed split by split, many each by one walk, a little scratch in rounds") {
  if (!tests_shim()) return;
  const ShimHooks shim;
  const Environment environment("KVPAGER_SHIM_SEED", "1");  // nothing runs before it has to
  Shape shape = small_shape();
  Sequence sequence(layout_of(shape), kLength, noisy(1, 1.0f), noisy(2, 1.0f));  // three splits
  const auto device = device::Device::open("shim");
  const auto launches = [&](const std::vector<Row>& rows, Way way, int64_t window) {
    Shape windowed = shape;
    windowed.window = window;
    DeviceForward forward(*device, windowed, {&sequence}, rows,
                          with_scratch({}, way, windowed, rows.size()));
    const gpu::AttendParams params = forward.attend_params();
    device->check(device->api().attend(device->context(), &params, forward.stream().get()), "");
    const int64_t count = shim.unfinished();
    forward.stream().synchronize();
    return count;
  };
  const std::vector<Row> few = {rows_of(shape, 1.0f).back()};
  CHECK(launches(few, Way::kOneRound, 0) == 2);
  CHECK(launches(few, Way::kManyRounds, 0) == 6);
  CHECK(launches(few, Way::kManyRounds, 100) == 4);  // spans two splits at most
  CHECK(launches(few, Way::kWalk, 0) == 1);
  CHECK(launches(std::vector<Row>(64, few[0]), Way::kOneRound, 0) == 1);
}

TEST_CASE("every order in which the shim runs warps and blocks gives the CPU's bits") {
  Shape shape = small_shape(DType::kFloat16);
  shape.group = 7;
  Sequence sequence(layout_of(shape), kLength, noisy(1, 1.0f), noisy(2, 1.0f));
  if (!tests_shim()) return;
  for (const char* seed : {"2", "3", "4", "17", "90001"}) {
    CAPTURE(std::string(seed));
    const Environment environment("KVPAGER_SHIM_SEED", seed);
    check_everywhere(shape, {&sequence}, rows_of(shape, 1.0f));
  }
}

TEST_CASE("reference attention is softmax attention in binary64 within rounding") {
  for (const DType dtype : kDTypes) {
    for (const bool capped : {false, true}) {
      Shape shape = small_shape(dtype);
      shape.softcap = capped ? 5.0f : 0.0f;
      shape.sinks = capped;
      shape.window = capped ? 100 : 0;
      shape.v_dim = 160;
      Sequence sequence(layout_of(shape), kLength, noisy(1, 1.0f), noisy(2, 1.0f));
      const std::vector<Row> rows = rows_of(shape, 2.0f);
      const double tolerance = dtype == DType::kFloat32   ? 2e-6
                               : dtype == DType::kFloat16 ? 1e-3
                                                          : 8e-3;
      for_each_device([&](device::Device& device) {
        DeviceForward forward(device, shape, {&sequence}, rows);
        const auto got = forward.attend();
        double worst = 0;
        for (size_t i = 0; i < rows.size(); ++i) {
          const std::vector<double> exact = reference64(shape, sequence, rows[i]);
          for (size_t j = 0; j < exact.size(); ++j) {
            const double error = std::fabs(double{got[i][j]} - exact[j]);
            worst = std::max(worst, error / (1 + std::fabs(exact[j])));
          }
        }
        CHECK(worst < tolerance);
      });
    }
  }
}

TEST_CASE("denormals in queries, keys, values and outputs count in full on a device") {
  for (const DType dtype : kDTypes) {
    CAPTURE(std::string(dtype_name(dtype)));
    Shape shape = small_shape(dtype);
    const float tiny = least_normal(dtype) / 2;
    struct Scales {
      float key, query, scaling, value;
    };
    const bool half = dtype == DType::kFloat16;
    for (const Scales& scales :
         {Scales{tiny, 1.0f, 4.0f / tiny, 1.0f}, Scales{1.0f, tiny, 4.0f / tiny, 1.0f},
          Scales{half ? tiny : 0x1p-70f, half ? tiny : 0x1p-66f, 0x1p127f, 1.0f},
          Scales{1.0f, 2.0f, 0.0f, half ? 0x1p-15f : 0x1p-127f},
          Scales{1.0f, 8.0f, 0.0f, half ? 0x1p-24f : 0x1p-133f}}) {
      CAPTURE(scales.scaling);
      shape.scaling = std::isfinite(scales.scaling) ? scales.scaling : kMax;
      Sequence sequence(layout_of(shape), kLength, noisy(1, scales.key), noisy(2, scales.value));
      const auto outputs = check_everywhere(shape, {&sequence}, rows_of(shape, scales.query));
      CHECK(count_not_finite(outputs) == 0);
      if (scales.value < 1.0f && !half) CHECK(count_if(outputs, is_denormal) > 300);
    }
  }
}

TEST_CASE("how the calling thread rounds and flushes changes no bit on a device") {
  Shape shape = small_shape();
  shape.softcap = 3.0f;
  Sequence sequence(layout_of(shape), kLength, noisy(1, 1.0f), noisy(2, 0x1p-127f));
  const std::vector<Row> rows = rows_of(shape, 2.0f);
  const auto expected = attend(shape, {&sequence}, rows);
  for_each_device([&](device::Device& device) {
    DeviceForward forward(device, shape, {&sequence}, rows);
    const gpu::AttendParams params = forward.attend_params();
    for (const NamedMode& mode : kModes) {
      CAPTURE(std::string(mode.name));
      forward.load(rows);
      {
        const FloatMode set(mode.bits);
        device.check(device.api().attend(device.context(), &params, forward.stream().get()), "");
        forward.stream().synchronize();
      }
      CHECK(differing(forward.read_out(), expected) == 0);
    }
  });
}

TEST_CASE("zeros keep the signs IEEE gives them on a device") {
  const auto zero = [](int64_t t, int head, int d) {
    return noise(5, static_cast<uint64_t>(t), static_cast<uint64_t>(head),
                 static_cast<uint64_t>(d)) < 0
               ? -0.0f
               : 0.0f;
  };
  for (const DType dtype : kDTypes) {
    const Shape shape = small_shape(dtype);
    Sequence zeros(layout_of(shape), kLength, zero, zero);
    check_everywhere(shape, {&zeros}, rows_of(shape, 1.0f));
    Sequence minus(layout_of(shape), kLength, noisy(1, 1.0f), constant(-0.0f));
    check_everywhere(shape, {&minus}, rows_of(shape, 1.0f));
  }
  Sequence vanishing(layout_of(small_shape()), kLength, noisy(1, 1.0f),
                     [](int64_t, int, int d) { return (d & 1) != 0 ? -0x1p-149f : 0x1p-149f; });
  const auto outputs = check_everywhere(small_shape(), {&vanishing}, rows_of(small_shape(), 8.0f));
  CHECK(count_if(outputs, is_negative_zero) > 10);
}

TEST_CASE("softmax that saturates, underflows, overflows or is flat has the CPU's bits") {
  struct Scales {
    float key, query, scaling, value;
  };
  for (const Scales& scales :
       {Scales{30.0f, 30.0f, 1.0f, 1.0f}, Scales{6.0f, 6.0f, 1.0f, 0x1p120f},
        Scales{0x1p60f, 0x1p60f, 0x1p4f, 1.0f}, Scales{0.0f, 1.0f, 1.0f, 1.0f},
        Scales{1.0f, 1.0f, 0x1p-149f, 1.0f}, Scales{0x1p66f, 0x1p66f, 1.0f, 1.0f}}) {
    CAPTURE(scales.key);
    for (const bool sinks : {false, true}) {
      Shape shape = small_shape();
      shape.scaling = scales.scaling;
      shape.sinks = sinks;
      Sequence sequence(layout_of(shape), kLength, noisy(1, scales.key), noisy(2, scales.value));
      check_everywhere(shape, {&sequence}, rows_of(shape, scales.query));
    }
  }
  const Shape shape = small_shape();
  Sequence great(layout_of(shape), kLength, noisy(1, 1.0f), [](int64_t t, int head, int d) {
    return d < 16 ? (d & 1 ? -kMax : kMax) : noisy(2, 1.0f)(t, head, d);
  });
  CHECK(count_not_finite(check_everywhere(shape, {&great}, rows_of(shape, 0.25f))) > 0);
}

TEST_CASE("soft caps and attention sinks of every size have the CPU's bits") {
  for (const float softcap :
       some_of({std::numeric_limits<float>::denorm_min(), 30.0f, 1e-20f, 0.5f, 1e20f, kMax})) {
    for (const float size : some_of({1.0f, 1e18f, 1e-20f, 1e4f})) {
      CAPTURE(softcap);
      CAPTURE(size);
      Shape shape = small_shape();
      shape.softcap = softcap;
      shape.scaling = 1.0f;
      Sequence sequence(layout_of(shape), 40, noisy(1, size), noisy(2, 1.0f));
      std::vector<Row> rows = rows_of(shape, size);
      rows.erase(rows.begin() + 4, rows.end());
      check_everywhere(shape, {&sequence}, rows);
    }
  }
  Shape shape = small_shape();
  shape.sinks = true;
  Sequence sequence(layout_of(shape), kLength, noisy(1, 1.0f), noisy(2, 1.0f));
  for (const std::vector<float>& sinks :
       {std::vector<float>{-kInfinity, kMax, -0.0f, 1e-42f}, {-kMax, -1e4f, 88.0f, 1e4f}}) {
    shape.sink_logits = sinks;
    check_everywhere(shape, {&sequence}, rows_of(shape, 1.0f));
  }
}

TEST_CASE("windows of every reach around a chunk's and a split's borders have the CPU's bits") {
  for (const int window : some_of({17, 129, 1, 2, 15, 16, 31, 127, 128, 130, 255, 257, 1000})) {
    CAPTURE(window);
    Shape shape = small_shape(DType::kBFloat16);
    shape.window = window;
    Sequence sequence(layout_of(shape), kLength, noisy(1, 1.0f), noisy(2, 1.0f));
    check_everywhere(shape, {&sequence}, rows_of(shape, 1.0f));
  }
}

TEST_CASE("bytes a row does not see cannot reach it on a device, whatever they are") {
  for (const DType dtype : kDTypes) {
    for (const uint32_t junk :
         some_of({0xFFFFFFFFu, 0x7F800001u, 0x7F800000u, 0xFC00FC00u, 0x7F7FFFFFu, 0x00010001u})) {
      CAPTURE(junk);
      Shape shape = small_shape(dtype);
      shape.window = 40;
      Sequence sequence(layout_of(shape), kLength, noisy(1, 1.0f), noisy(2, 1.0f));
      // All in one chunk.
      const std::vector<Row> rows =
          noisy_rows(shape, {131, 132, 133, 134, 135, 136, 137, 138}, 1.0f);
      const auto expected = attend(shape, {&sequence}, rows);
      for (int64_t t = 0; t <= rows.front().position - shape.window; ++t) {
        spoil(layout_of(shape), sequence, t, junk);
      }
      for (int64_t t = rows[3].position + 1; t < kLength; ++t) {  // what only later rows see
        spoil(layout_of(shape), sequence, t, junk);
      }
      const auto spoiled = check_everywhere(shape, {&sequence}, rows);
      for (size_t i = 0; i < 4; ++i) CHECK(differing_bits(spoiled[i], expected[i]) == 0);
    }
    // A chunk that only a neighbour selects.
    Shape shape = small_shape(dtype);
    Sequence sequence(layout_of(shape), kLength, noisy(1, 1.0f), noisy(2, 1.0f));
    std::vector<Row> rows = rows_of(shape, 1.0f);
    rows.erase(rows.begin(), rows.begin() + 6);
    const int32_t own = static_cast<int32_t>(rows[1].position / shape.tokens);
    rows[0].selected = {{0, 3, own - 1}, {2, own - 1}};
    rows[1].selected = {{0, 5, own}, {2, 5, 9, own}};
    const auto expected = attend(shape, {&sequence}, rows);
    for (int64_t t = 5 * 16; t < 6 * 16; ++t) spoil(layout_of(shape), sequence, t, 0x7FC07FC0u);
    const auto spoiled = check_everywhere(shape, {&sequence}, rows);
    CHECK(differing_bits(spoiled[0], expected[0]) == 0);
    CHECK(count_not_finite({spoiled[1]}) == static_cast<int64_t>(spoiled[1].size()));
  }
}

TEST_CASE("a query that is not finite spoils its own row as on the CPU, and no other") {
  for (const float bad : {kNaN, kInfinity, -kInfinity}) {
    // A window of one leaves one key to each row, at every place of a vector's lanes in turn: what
    // then becomes of NaN is decided by the order of a maximum's operands.
    for (const int window : some_of({1, 70, 2, 9, 0})) {
      CAPTURE(window);
      Shape shape = small_shape();
      shape.sinks = window == 70;
      shape.window = window;
      Sequence sequence(layout_of(shape), kLength, noisy(1, 1.0f), noisy(2, 1.0f));
      std::vector<Row> rows = rows_of(shape, 1.0f);
      std::vector<int64_t> more(16);
      std::iota(more.begin(), more.end(), 200);
      for (const Row& row : noisy_rows(shape, more, 1.0f)) rows.push_back(row);
      const auto expected = attend(shape, {&sequence}, rows);
      const auto is_bad = [&](size_t i) { return i % 2 == 0 || i > 12; };
      for (size_t i = 0; i < rows.size(); ++i) {
        if (is_bad(i)) rows[i].query[3 + i] = bad;
      }
      const auto got = check_everywhere(shape, {&sequence}, rows);
      for (size_t i = 0; i < rows.size(); ++i) {
        CHECK((differing_bits(got[i], expected[i]) > 0) == is_bad(i));
      }
    }
  }
}

}  // namespace
}  // namespace kvpager::testing
