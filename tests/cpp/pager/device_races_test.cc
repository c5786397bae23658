// Nothing but a named wait keeps a copy or kernel from running when it may not. Each wait is left out
// in turn, and what comes out is then wrong for some seed of the shim's scheduler.
#include <set>

#include "../cuda/shim_hooks.h"
#include "../device/devices.h"
#include "stress.h"

namespace kvpager::pager_test {
namespace {

using device::LeaveOut;

constexpr int kSteps = 60;

// Host memory, host memory and disk, disk alone.
PagerOptions options_of(uint64_t seed, const std::string& folder) {
  const int64_t chunks[3][3] = {{14, 70, 0}, {18, 12, 90}, {44, 0, 90}};  // pool, host, disk
  const auto& tiers = chunks[seed % 3];
  PagerOptions options =
      top_k(small_options(tiers[0], tiers[1], tiers[2], tiers[2] > 0 ? folder : ""), 2);
  options.poison = seed % 2 == 0;
  options.recall_chunks = 4;
  options.policy = seed % 4 < 2 ? Policy::kLru : Policy::kQk;
  options.missed_chunks = seed % 4 == 1 ? "direct" : "staged";
  if (seed % 5 < 3) {
  }
  if (seed % 4 == 3) options.window = 40;
  return options;
}

void save_sample(const std::string& path) {
  const OnDevice on("cpu");
  PagerOptions options = small_options(20, 20);
  Pager pager(options);
  const Known sample = create(pager, 100, 77);
  save(pager, sample.id, path, options.namespace_key);
}

Trace expected(uint64_t seed, const std::string& folder, const std::string& sample) {
  const OnDevice on("cpu");
  PagerOptions options = options_of(seed, folder);
  options.pool_blocks = 60;
  return Life(options, seed, sample).run(kSteps);
}

// How late the shim runs what was enqueued.
testing::Environment lateness(uint64_t seed) { return {"KVPAGER_SHIM_SEED", str(seed)}; }

// Whether the device gives what the processor gives.
bool holds(uint64_t seed, const std::string& folder, const std::string& sample,
           const Trace& wanted) {
  const auto environment = lateness(seed);
  try {
    Life life(options_of(seed, folder), seed, sample);
    REQUIRE(life.pager().device_place().name != "cpu");
    return same_trace(life.run(kSteps), wanted);
  } catch (const PagerError&) {
    return false;
  }
}

TEST_CASE("a life on the device has the processor's bits, however late copies and kernels run" *
          doctest::test_suite("long")) {
  const Folder folder;
  const std::string sample = folder.file("sample");
  save_sample(sample);
  for (const std::string& name : device_plugins()) {
    const OnDevice on(name);
    for (uint64_t seed = 1; seed <= 12; ++seed) {
      CAPTURE(seed);
      CHECK(holds(seed, folder.path(), sample, expected(seed, folder.path(), sample)));
    }
  }
}

// Names of waits that no life above can miss.
const std::set<std::string> kElsewhere = {
    "down writes after up read", "down reads after up", "host reads results after compute",
    "host writes after compute read",
    // Before memory is released, and of constants when a pager is made: nothing looks at it after.
    "host finishes", "host starts",
    // A block whose write-through is under way leaves its record after a wait, or together with the
    // home the bytes go to: what a late copy then reads is nobody's.
    "compute writes after down read", "up writes after down read"};

TEST_CASE("each wait is needed: without it some life goes wrong" * doctest::test_suite("long")) {
  if (!has_shim()) return;
  const Folder folder;
  const std::string sample = folder.file("sample");
  save_sample(sample);
  const OnDevice on("shim");
  constexpr uint64_t kSeeds = 12;
  std::vector<Trace> wanted;
  for (uint64_t seed = 1; seed <= kSeeds; ++seed) {
    wanted.push_back(expected(seed, folder.path(), sample));
    REQUIRE(holds(seed, folder.path(), sample, wanted.back()));
  }
  const std::vector<std::string> names = device::waits_seen();
  CHECK(names.size() > kElsewhere.size());
  for (const std::string& name : names) {
    if (kElsewhere.count(name) != 0) continue;
    CAPTURE(name);
    bool noticed = false;
    for (uint64_t seed = 1; seed <= kSeeds && !noticed; ++seed) {
      const LeaveOut out(name);
      noticed = !holds(seed, folder.path(), sample, wanted[static_cast<size_t>(seed - 1)]);
    }
    CHECK(noticed);
  }
}

// Runs `step` as it is, then with each of these waits left out: true, then false.
void require_needed(const std::vector<std::string>& names, const std::function<bool()>& step) {
  if (!has_shim()) return;
  const OnDevice on("shim");
  const auto environment = lateness(1);
  CHECK(step());
  std::vector<std::unique_ptr<LeaveOut>> out;
  for (const std::string& name : names) out.push_back(std::make_unique<LeaveOut>(name));
  CHECK_FALSE(step());
}

TEST_CASE("a tail that is still being copied is read when it has arrived") {
  require_needed({"down reads after up"}, [] {
    Pager pager(small_options(8, 20));
    const Known parent = create(pager, 27, 1);
    return wrong_bytes(pager, forked(pager, parent)) == "";
  });
}

TEST_CASE("a wave is attended to when it has arrived, and its half filled again after that") {
  PagerOptions options = small_options(5, 200);
  options.missed_chunks = "staged";
  options.staging_bytes = 2 * 64 * options.layout.slice_bytes(0);
  // Neighbouring slots are one piece of work, which may be far ahead of the kernels.
  options.shuffle_seed = 0;
  const auto outputs = [](Pager& pager) {
    const Known sequence = written(pager, 140 * 16, 1);
    pager.evict_all();
    return probe(pager, sequence);
  };
  const std::vector<float> expected = on_processor(options, outputs);
  options.device = "shim";
  for (const char* name : {"compute reads after up", "up writes after compute read"}) {
    CAPTURE(std::string(name));
    require_needed({name}, [&] {
      bool same = true;
      for (uint64_t seed = 1; seed <= 6; ++seed) {
        const auto environment = lateness(seed);
        Pager pager(options);
        same = same && same_bits(outputs(pager), expected);
      }
      return same;
    });
  }
}

TEST_CASE("a host slot is written again when the copy that brings its chunk up has read it") {
  require_needed({"down writes after up read"}, [] {
    const Folder folder;
    PagerOptions options = small_options(12, 2, 40, folder.path());
    options.policy = Policy::kLru;
    options.poison = false;
    Pager pager(options);
    const Known oldest = create(pager, 16, 1);
    pager.evict_all();
    pager.pin(oldest.id, 0, 16);
    create(pager, 4 * 16, 2);  // seals into the slots there are: the oldest goes to disk
    return wrong_bytes(pager, oldest) == "";
  });
}

TEST_CASE(
    "keys that are not finite are found out before the commit, however late the kernel runs") {
  require_needed({"host reads results after compute"}, [] {
    Pager pager(small_options(6, 16));
    const Known known = create(pager, 20, 1);
    const TokenId token = 5;
    Caller& caller = Caller::current();
    pager.begin(commit_rows(known.id, 20, &token, 1), caller.stream());
    Tensors t(kRows);  // of NaN
    for (int layer = 0; layer < 2; ++layer) {
      pager.write(layer, caller.upload(t.k.view()), caller.upload(t.v.view()), caller.stream());
    }
    bool refused = false;
    try {
      pager.commit_all();
    } catch (const NonFiniteError&) {
      refused = true;
    }
    caller.finish();
    return refused;
  });
}

TEST_CASE("a block that is cleared late does not lose the rows that were written meanwhile") {
  require_needed({"compute reads after up", "compute writes after up wrote"}, [] {
    Pager pager(small_options(3, 16));  // poisoned: blocks are filled when they are freed
    pager.destroy_sequence(create(pager, 40, 1).id);
    const Known known = create(pager, 40, 2);
    testing::ShimHooks().drain();
    return wrong_bytes(pager, known) == "";
  });
}

// Gives an empty sequence its tokens' keys and values, all at once.
void give_all(Pager& pager, const Known& known) {
  Caller& caller = Caller::current();
  const auto count = static_cast<int64_t>(known.tokens.size());
  const std::vector<uint64_t> history = histories(known.tokens);
  std::vector<TensorView> views[2];
  for (int layer = 0; layer < 2; ++layer) {
    for (const What what : {kKey, kValue}) {
      Rows rows(count, 2, 16, 0.0f);
      for (int64_t i = 0; i < count; ++i) {
        fill_row(history[static_cast<size_t>(i)], layer, what, 32, rows.row(i));
      }
      views[what == kValue].push_back(caller.upload(rows.view()));
    }
  }
  pager.begin({{known.id, 0, count, RowKind::kGiven}}, {}, {known.tokens, false, caller.stream()});
  pager.give(views[0], views[1], caller.stream());
  pager.commit_all();
}

TEST_CASE("blocks that are cleared late do not lose what was given meanwhile") {
  require_needed({"compute reads after up", "compute writes after up wrote"}, [] {
    Pager pager(small_options(3, 16));
    pager.destroy_sequence(create(pager, 40, 1).id);
    for (uint64_t round = 0; round < 8; ++round) {
      const Known known{pager.create_sequence(""), some_tokens(40, 2 + round)};
      give_all(pager, known);
      testing::ShimHooks().drain();
      if (wrong_bytes(pager, known) != "") return false;
      Caller::current().finish();
      pager.destroy_sequence(known.id);
    }
    return true;
  });
}

TEST_CASE("the tables of a forward stay until they are on the device, however many are begun") {
  require_needed({"host writes after compute read"}, [] {
    std::vector<std::vector<float>> wanted;
    std::deque<std::vector<float>> outputs;
    for (const char* name : {"cpu", "shim"}) {
      const OnDevice on(name);
      Pager pager(small_options(30, 40));
      std::vector<Known> known;
      for (uint64_t i = 0; i < 6; ++i) {
        known.push_back(create(pager, 20 + 9 * static_cast<int64_t>(i), i));
      }
      for (const Known& each : known) {
        const auto length = static_cast<int64_t>(each.tokens.size());
        std::vector<RowDescriptor> rows(kRows);
        rows[0] = {each.id, length - 1, 0, RowKind::kRead};
        Tensors t(kRows);
        fill_row(7, 0, kQuery, 64, t.q.row(0));
        if (!on_device()) {
          pager.begin(rows);
          pager.attend(0, t.q.view(), t.k.view(), t.v.view(), t.out.view(), {});
          pager.abort();
          wanted.push_back(t.out.data);
          continue;
        }
        Caller& caller = Caller::current();
        outputs.push_back(t.out.data);
        TensorView out = t.out.view();
        out.data = outputs.back().data();
        AttendOptions options;
        options.stream = caller.stream();
        pager.begin(rows, caller.stream());
        const TensorView result = caller.upload(out);
        pager.attend(0, caller.upload(t.q.view()), caller.upload(t.k.view()),
                     caller.upload(t.v.view()), result, options);
        caller.download(result, out);
        pager.abort();
      }
      if (on_device()) Caller::current().finish();
    }
    for (size_t i = 0; i < wanted.size(); ++i) {
      if (!same_bits(wanted[i], outputs[i])) return false;
    }
    return true;
  });
}

TEST_CASE("what is saved from host memory has arrived there") {
  require_needed({"host reads after down"}, [] {
    Pager pager(small_options(8, 16));
    const Known known = create(pager, 48, 1);
    const auto frozen = pager.freeze(known.id);
    std::vector<std::byte> scratch(static_cast<size_t>(kChunkBytes));
    const Folder folder;
    const OnDevice processor("cpu");
    Pager plain(small_options(8, 16));
    const Known same = create(plain, 48, 1);
    const auto wanted = plain.freeze(same.id);
    for (int64_t c = 0; c < 3; ++c) {
      const std::byte* bytes = frozen->borrow_chunk(c, scratch.data());
      const bool right = slice_checksum(bytes, small_layout().slice_bytes(0)) ==
                         wanted->meta().chunks[static_cast<size_t>(c)].slice_checksum[0];
      frozen->give_back_chunk(c);
      if (!right) return false;
    }
    return true;
  });
}

TEST_CASE("a chunk whose copy below is on its way leaves the pool when that has arrived") {
  require_needed({"host reads after down"}, [] {
    Pager pager(small_options(3, 16));
    const Known known = create(pager, 6 * 16, 1);
    try {
      pager.evict_all();
      return wrong_bytes(pager, known) == "";
    } catch (const InvariantError&) {  // checking builds see it first
      return false;
    }
  });
}

}  // namespace
}  // namespace kvpager::pager_test
