// Writes and attention of a forward as a graph: captured once, replayed for other forwards.
#include "../cuda/shim_hooks.h"
#include "small_pager.h"

namespace kvpager::pager_test {
namespace {

// The tensors of a forward at addresses that are the same in each one.
struct Inputs {
  Inputs() : layers(2, Tensors(kRows)) {}

  void fill(const std::vector<RowDescriptor>& rows, const std::vector<TokenId>& all) {
    const std::vector<uint64_t> history = histories(all);
    layers.assign(2, Tensors(kRows));
    for (int layer = 0; layer < 2; ++layer) {
      for (size_t i = 0; i < rows.size(); ++i) {
        if (rows[i].kind == RowKind::kPadding) continue;
        layers[static_cast<size_t>(layer)].fill(
            static_cast<int64_t>(i), history[static_cast<size_t>(rows[i].position)], layer);
      }
    }
  }
  void upload() {
    Caller& caller = Caller::current();
    caller.finish();
    device.clear();
    for (Tensors& t : layers) {
      device.push_back({caller.upload(t.q.view()), caller.upload(t.k.view()),
                        caller.upload(t.v.view()), caller.upload(t.out.view())});
    }
  }
  void launch(Pager& pager) {
    AttendOptions options;
    options.scaling = 0.25f;
    options.stream = Caller::current().stream();
    for (int layer = 0; layer < 2; ++layer) {
      const auto& t = device[static_cast<size_t>(layer)];
      pager.attend(layer, t[0], t[1], t[2], t[3], options);
    }
  }
  std::vector<float> outputs() {
    Caller& caller = Caller::current();
    for (size_t i = 0; i < layers.size(); ++i) {
      caller.download(device[i][3], layers[i].out.view());
    }
    caller.finish();
    std::vector<float> all;
    for (const Tensors& t : layers) all.insert(all.end(), t.out.data.begin(), t.out.data.end());
    return all;
  }

  std::vector<Tensors> layers;
  std::vector<std::vector<TensorView>> device;
};

struct Graph {
  explicit Graph(const testing::ShimHooks& with) : hooks(with) {}
  ~Graph() {
    if (graph != nullptr) hooks.release(graph);
  }
  template <class Step>
  void capture(const Step& step) {
    void* const stream = Caller::current().stream();
    REQUIRE(hooks.begin_capture(stream) == 0);
    step();
    REQUIRE(hooks.end_capture(stream, &graph) == 0);
  }
  void replay() { REQUIRE(hooks.replay(graph, Caller::current().stream()) == 0); }
  const testing::ShimHooks& hooks;
  void* graph = nullptr;
};

TEST_CASE("a graph captured in one forward is every later forward's attention") {
  if (!has_shim()) return;
  const OnDevice on("shim");
  for (const Selection::Kind kind : {Selection::Kind::kDense, Selection::Kind::kTopK}) {
    PagerOptions options = small_options(9, 60);
    options.selection.kind = kind;
    options.selection.chunks = 2;
    options.missed_chunks = "staged";  // which a graph does without
    Pager pager(options);
    const testing::ShimHooks hooks;
    Known a = create(pager, 50, 1);
    Known b = create(pager, 90, 2);
    Inputs inputs;
    Graph graph(hooks);
    std::vector<std::vector<float>> outputs;
    uint64_t generation = 0;
    for (int round = 0; round < 8; ++round) {
      CAPTURE(round);
      Known& known = round % 2 == 0 ? a : b;
      const auto more = some_tokens(round % 3 == 0 ? 16 : 1 + round, 100 + round);
      const auto rows = known.rows(more);
      const std::vector<TokenId> all = joined(known.tokens, more);
      inputs.fill(rows, all);
      inputs.upload();
      if (round % 3 == 1) pager.evict_all();
      pager.begin(rows, Caller::current().stream());
      if (round == 0) {
        generation = pager.generation();
        graph.capture([&] {
          inputs.launch(pager);
          CHECK_THROWS_AS(pager.commit_all(), InvalidArgumentError);
        });
        CHECK(contains(error_of<InvalidArgumentError>(pager, [&] { pager.commit_all(); }),
                       "never written"));
        CHECK(pager.forward_running());
      }
      graph.replay();
      pager.mark_replayed(generation, Caller::current().stream());
      pager.commit_all();
      known.tokens = all;
      outputs.push_back(inputs.outputs());
      require_intact(pager, known);
    }
    const OnDevice processor("cpu");
    PagerOptions plain = options;
    plain.device = "cpu";
    Pager other(plain);
    Known same_a = create(other, 50, 1);
    Known same_b = create(other, 90, 2);
    for (int round = 0; round < 8; ++round) {
      const auto more = some_tokens(round % 3 == 0 ? 16 : 1 + round, 100 + round);
      CHECK(same_bits(outputs[static_cast<size_t>(round)],
                      append(other, round % 2 == 0 ? &same_a : &same_b, more)));
    }
  }
}

TEST_CASE("a graph of memory that is gone is refused, and so is a begin inside a capture" *
          doctest::test_suite("long")) {
  if (!has_shim()) return;
  const OnDevice on("shim");
  Pager pager(small_options(80, 0));
  const testing::ShimHooks hooks;
  const Known trunk = create(pager, 70 * 16, 1);
  const uint64_t generation = pager.generation();
  std::vector<RowDescriptor> rows;
  for (int i = 0; i < kRows; ++i) {
    rows.push_back({pager.fork(trunk.id), 70 * 16 - 1, 0, RowKind::kRead});
  }
  pager.begin(rows);
  CHECK(contains(error_of<InvalidArgumentError>(pager, [&] { pager.mark_replayed(generation); }),
                 "capture the graph again"));
  pager.abort();
  Graph graph(hooks);
  graph.capture([&] {
    CHECK(contains(error_of<InvalidArgumentError>(
                       pager, [&] { pager.begin(rows, Caller::current().stream()); }),
                   "captured"));
  });
  const OnDevice processor("cpu");
  Pager plain(small_options(6, 8));
  CHECK(contains(error_of<InvalidArgumentError>(plain, [&] { plain.mark_replayed(0); }),
                 "no forward is running"));
}

}  // namespace
}  // namespace kvpager::pager_test
