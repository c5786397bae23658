// One layer of a forward recorded into a graph and replayed for other forwards, whose tables lie at the
// same addresses: the bits of launches made one by one.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "kvpager/selection.h"
#include "problem.h"
#include "random_problem.h"
#include "shim_hooks.h"

namespace kvpager::testing {
namespace {

constexpr int kMaxRows = 20;  // few enough for splits to be computed apart

Shape graph_shape(DType dtype, int tokens) {
  Shape shape;
  shape.dtype = dtype;
  shape.kv_heads = 2;
  shape.group = 4;
  shape.tokens = tokens;
  shape.k_dim = 64;
  shape.v_dim = 64;
  return shape;
}

// Rows that write the next tokens of up to three sequences, and padding.
struct Forward {
  std::vector<Row> rows;
  std::vector<char> commit;
};
Forward random_forward(Dice& dice, const std::vector<Sequence>& sequences) {
  Forward forward;
  for (size_t s = 0; s < sequences.size(); ++s) {
    if (s > 0 && dice.one_in(3)) continue;
    const int count = dice.pick({1, 1, 2, 6});
    const int first = dice.roll(0, static_cast<int>(sequences[s].length()) - count);
    for (int i = 0; i < count; ++i) {
      Row row;
      row.sequence = static_cast<int>(s);
      row.position = first + i;
      row.query_seed = static_cast<uint32_t>(dice.roll(0, 1000));
      forward.rows.push_back(row);
    }
  }
  for (int padding = dice.roll(0, 2); padding > 0; --padding) {
    forward.rows.emplace_back();
    forward.rows.back().sequence = -1;
  }
  dice.shuffle(&forward.rows);
  for (const Row& row : forward.rows) forward.commit.push_back(row.sequence >= 0);
  return forward;
}

// What one layer launches, with parameters that no later forward changes.
struct LayerLaunches {
  gpu::WriteParams write;
  gpu::SelectParams select;
  gpu::AttendParams attend;

  LayerLaunches(DeviceForward& forward, int64_t summary_page_bytes, device::Memory& scratch,
                gpu::Attention attention) {
    write = forward.write_params();
    select.shape = forward.kernel_shape();
    select.tables = forward.tables();
    select.counts = forward.counts();
    select.summary_page_bytes = summary_page_bytes;
    select.layer = write.layer;
    attend = forward.attend_params(attention);
    select.q = attend.q;
    select.scaling = attend.scaling;
    select.window = attend.window;
    select.k = 2;
    select.sinks = 16;
    select.recent = 48;
    select.selected = forward.selected();
    select.selected_stride = forward.selected_stride();
    select.scratch = scratch.data();
    select.scratch_bytes = scratch.bytes();
    attend.selected = forward.selected();
  }

  void launch(device::Device& device, device::Stream stream) const {
    const device::Api& api = device.api();
    device.check(api.write_rows(device.context(), &write, stream), "write_rows");
    device.check(api.select(device.context(), &select, stream), "select");
    device.check(api.attend(device.context(), &attend, stream), "attend");
  }
};

struct Setup {
  Setup(DType dtype, gpu::Attention attention, int64_t window, int64_t scratch_bytes)
      : attention(attention),
        shape(graph_shape(dtype, attention == gpu::Attention::kTensor ? 64 : 16)) {
    shape.window = window;
    layout = layout_of(shape);
    layout.layers = 2;
    sequences.reserve(3);
    for (const int64_t length : {shape.tokens * 30 + 3, shape.tokens * 11, shape.tokens * 19 + 9}) {
      sequences.emplace_back(layout_of(shape), length, static_cast<uint32_t>(length));
      pointers.push_back(&sequences.back());
    }
    summary_page_bytes = bits2::summary_bytes(layout);
    options.layers = 2;
    options.layer = 1;
    options.max_rows = kMaxRows;
    options.capture_counts = true;
    options.summary_page_bytes = summary_page_bytes;
    options.scratch_bytes = scratch_bytes;
  }

  gpu::Attention attention;
  Shape shape;
  Layout layout;
  std::vector<Sequence> sequences;
  std::vector<Sequence*> pointers;
  int64_t summary_page_bytes = 0;
  ForwardOptions options;
};

device::Memory select_scratch(device::Device& device, const DeviceForward& forward) {
  const gpu::Shape shape = forward.kernel_shape();
  const int64_t bytes = device.api().select_scratch_bytes(&shape, &forward.bounds());
  return device.allocate("select scratch", std::max<int64_t>(256, bytes));
}

void replays_equal_launches(const Setup& setup) {
  const ShimHooks shim;
  const auto device = device::Device::open("shim");
  Dice dice(11);
  DeviceForward captured(*device, setup.shape, setup.pointers, {}, setup.options);
  DeviceForward direct(*device, setup.shape, setup.pointers, {}, setup.options);
  device::Memory captured_scratch = select_scratch(*device, captured);
  device::Memory direct_scratch = select_scratch(*device, direct);
  const LayerLaunches nodes(captured, setup.summary_page_bytes, captured_scratch, setup.attention);
  const LayerLaunches launches(direct, setup.summary_page_bytes, direct_scratch, setup.attention);

  // Captured while the tables hold a forward of its own, none of which runs.
  const Forward first = random_forward(dice, setup.sequences);
  captured.load(first.rows, first.commit, 1);
  void* graph = nullptr;
  device->check(shim.begin_capture(captured.stream().get()), "begin");
  nodes.launch(*device, captured.stream().get());
  device->check(shim.end_capture(captured.stream().get(), &graph), "end");
  int64_t ran = 0;
  for (const auto& row : captured.read_out()) {
    for (const float x : row) ran += !std::isnan(x);  // not the poison that load() left
  }
  CHECK(ran == 0);

  for (uint32_t i = 0; i < 12; ++i) {
    CAPTURE(i);
    const Forward forward = random_forward(dice, setup.sequences);
    captured.load(forward.rows, forward.commit, 10 + i);
    captured.summarize(setup.summary_page_bytes);
    device->check(shim.replay(graph, captured.stream().get()), "replay");
    const auto replayed = captured.read_out();
    CHECK(captured.read_status() == gpu::kNoFailure);

    direct.load(forward.rows, forward.commit, 50 + i);
    direct.summarize(setup.summary_page_bytes);
    launches.launch(*device, direct.stream().get());
    const auto launched = direct.read_out();
    int64_t wrong = 0;
    for (size_t row = 0; row < launched.size(); ++row) {
      wrong += differing_bits(replayed[row], launched[row]);
    }
    CHECK(wrong == 0);

    if (setup.attention != gpu::Attention::kReference) continue;
    const auto expected = attend(setup.shape, setup.pointers, captured.rows_as_selected());
    for (size_t row = 0; row < launched.size(); ++row) {
      wrong += differing_bits(replayed[row], expected[row]);
    }
    CHECK(wrong == 0);
  }
  shim.release(graph);
}

TEST_CASE("a captured layer, replayed for other rows, positions and chunks, has the CPU's bits" *
          doctest::test_suite("long")) {
  if (!tests_shim()) return;
  for (const char* seed : {"1", "2", "5"}) {
    const Environment environment("KVPAGER_SHIM_SEED", seed);
    for (const int64_t window : {0, 100}) {
      CAPTURE(window);
      // All splits at once, a walk, and waves of two splits.
      const int64_t states = kMaxRows * 8 * (64 + 2) * int64_t{sizeof(float)};
      for (const int64_t scratch : {int64_t{-1}, int64_t{0}, 3 * states}) {
        CAPTURE(scratch);
        replays_equal_launches(Setup(DType::kFloat32, gpu::Attention::kReference, window, scratch));
      }
    }
  }
}

TEST_CASE("a captured layer of tensor attention gives the bits of its launches") {
  if (!tests_shim()) return;
  const auto device = device::Device::open("shim");
  Setup setup(DType::kBFloat16, gpu::Attention::kTensor, 0, -1);
  DeviceForward forward(*device, setup.shape, setup.pointers, {}, setup.options);
  const gpu::Shape shape = forward.kernel_shape();
  REQUIRE(device->api().tensor_attention_shared_bytes(&shape) > 0);
  replays_equal_launches(setup);
}

TEST_CASE("a host wait or an allocation among a layer's launches makes its capture fail") {
  const ShimHooks shim;
  const auto device = device::Device::open("shim");
  const device::Api& api = device->api();
  Setup setup(DType::kFloat32, gpu::Attention::kReference, 0, -1);
  DeviceForward forward(*device, setup.shape, setup.pointers, {}, setup.options);
  device::Memory scratch = select_scratch(*device, forward);
  const LayerLaunches launches(forward, setup.summary_page_bytes, scratch, setup.attention);
  device::Event event = nullptr;
  device->check(api.create_event(device->context(), &event), "event");
  for (const bool waits : {false, true}) {
    void* graph = nullptr;
    device->check(shim.begin_capture(forward.stream().get()), "begin");
    launches.launch(*device, forward.stream().get());
    if (waits) {
      CHECK(api.synchronize(device->context(), event) != device::kOk);
    } else {
      void* memory = nullptr;
      CHECK(api.allocate(device->context(), 256, &memory) != device::kOk);
    }
    CHECK(shim.end_capture(forward.stream().get(), &graph) != device::kOk);
    CHECK(graph == nullptr);
  }
  api.destroy_event(device->context(), event);
}

}  // namespace
}  // namespace kvpager::testing
