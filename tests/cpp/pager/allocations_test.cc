// Memory runs out at each allocation of each mutator, one after the other: either the call is done, or
// the pager is as it was and the same call succeeds.
#include <algorithm>
#include <memory>
#include <new>

#include "failing_new.h"
#include "small_pager.h"
#include "snapshot/byte_watch.h"

namespace kvpager::pager_test {
namespace {

constexpr int64_t kMostAllocations = 2000;

// What a refused call leaves alone.
struct Books {
  explicit Books(const PagerStats& s)
      : counts{s.sequences,       s.records,       s.cached_records, s.reserved_chunks,
               s.open_blocks,     s.pinned_blocks, s.chunks_sealed,  s.rows_committed,
               s.chunks_released, s.chunks_shared} {}
  std::vector<int64_t> counts;
};

// A pager made anew for each try, and the sequences whose bytes are known.
struct Scene {
  std::unique_ptr<Pager> pager;
  std::vector<Known> known;
  std::function<void()> step = [] {};   // the call that fails
  std::function<void()> again = [] {};  // the same, with what has to come before it
  std::function<void()> done = [] {};   // what then holds
};

// Makes the scene's step fail at its nth allocation for n = 0, 1, ... until it meets none; how often
// it failed.
int64_t fail_at_every_allocation(const std::function<void(Scene&)>& make) {
  int64_t failures = 0;
  for (int64_t nth = 0; nth < kMostAllocations; ++nth) {
    CAPTURE(nth);
    Scene scene;
    make(scene);
    Pager& pager = *scene.pager;
    const std::vector<int64_t> before = Books(pager.stats()).counts;
    const bool in_forward = pager.forward_running();
    bool failed = false;
    bool met = false;
    {
      const FailingNew failing(nth);
      try {
        scene.step();
      } catch (const std::bad_alloc&) {
        failed = true;
      }
      met = failing.met();
    }
    pager.check_invariants();
    if (failed) {
      ++failures;
      REQUIRE(met);
      if (in_forward) pager.abort();
      CHECK_FALSE(pager.forward_running());
      if (!in_forward) CHECK(Books(pager.stats()).counts == before);
      for (const Known& sequence : scene.known) require_intact(pager, sequence);
      scene.again();
      pager.check_invariants();
    }
    scene.done();
    if (!met) return failures;
  }
  FAIL("allocations never end");
  return failures;
}

PagerOptions roomy() { return small_options(12, 40); }

// A file of five chunks and a tail.
std::shared_ptr<SnapshotReader> saved_turn(const Folder& folder) {
  Pager first(roomy());
  save(first, create(first, 5 * 16 + 3, 2).id, folder.file("turn"), kFingerprint);
  return SnapshotReader::open(folder.file("turn"));
}
Known restored_turn(Pager& pager, const std::shared_ptr<SnapshotReader>& reader) {
  return {restore(pager, reader), some_tokens(5 * 16 + 3, 2)};
}

PAGER_TEST("a sequence is created, forked and closed, or nothing is, at every allocation") {
  const std::string salt(100, 's');
  CHECK(fail_at_every_allocation([&](Scene& scene) {
          scene.pager = std::make_unique<Pager>(roomy());
          Pager& pager = *scene.pager;
          scene.step = scene.again = [&pager, salt] { pager.create_sequence(salt); };
          scene.done = [&pager] { CHECK(pager.stats().sequences == 1); };
        }) > 0);
  CHECK(fail_at_every_allocation([&](Scene& scene) {
          scene.pager = std::make_unique<Pager>(roomy());
          Pager& pager = *scene.pager;
          scene.known = {create(pager, 40, 1, salt)};
          const auto child = std::make_shared<Known>(scene.known[0]);
          scene.step =
              scene.again = [&pager, child, id = child->id] { child->id = pager.fork(id); };
          scene.done = [&pager, child] { require_intact(pager, *child); };
        }) > 0);
  CHECK(fail_at_every_allocation([&](Scene& scene) {
          scene.pager = std::make_unique<Pager>(roomy());
          Pager& pager = *scene.pager;
          const SequenceId id = create(pager, 40, 1).id;
          scene.step = [&pager, id] { pager.destroy_sequence(id); };
        }) == 0);
}

PAGER_TEST("a forward begins or does not, at every allocation" * doctest::test_suite("long")) {
  const Folder folder;
  const auto reader = saved_turn(folder);
  const auto more = some_tokens(14, 9);
  for (const int64_t host_chunks : {40, 0}) {
    CAPTURE(host_chunks);  // 0: blocks are the only room for what is in the file
    const int64_t failures = fail_at_every_allocation([&](Scene& scene) {
      PagerOptions options = top_k(small_options(12, host_chunks), 2, 16);
      options.summary_bytes = 1 << 20;
      scene.pager = std::make_unique<Pager>(options);
      Pager& pager = *scene.pager;
      const Known a = create(pager, 30, 1);
      const Known b = restored_turn(pager, reader);
      scene.known = {a};  // the other's chunks are in the file
      std::vector<RowDescriptor> rows = commit_rows(a.id, 30, more.data(), 14, 14);
      rows.push_back({b.id, 5 * 16 + 2, 0, RowKind::kRead});
      rows.push_back({b.id, 5 * 16 + 3, 7, RowKind::kCommit});
      scene.step = scene.again = [&pager, rows] { pager.begin(rows); };
      scene.done = [&pager, a, b] {
        CHECK(pager.forward_running());
        pager.abort();
        require_intact(pager, a);
        require_intact(pager, b);
      };
    });
    CHECK(failures > 0);
  }
}

PAGER_TEST("a layer is attended to or the forward ends, at every allocation") {
  const Folder folder;
  const auto reader = saved_turn(folder);
  const auto more = some_tokens(14, 9);
  for (const bool in_file : {false, true}) {
    CAPTURE(in_file);  // chunks that come up into host slots, or from the disk tier into blocks
    const int64_t failures = fail_at_every_allocation([&](Scene& scene) {
      scene.pager = std::make_unique<Pager>(in_file ? small_options(12, 4)
                                                    : small_options(12, 0, 40, folder.path()));
      Pager& pager = *scene.pager;
      const Known a = in_file ? restored_turn(pager, reader) : create(pager, 5 * 16, 1);
      pager.evict_all();
      scene.known = {a};
      const auto rows = a.rows(more);
      pager.begin(rows);
      const auto tensors = std::make_shared<Tensors>(kRows);
      for (int64_t i = 0; i < 14; ++i) tensors->fill(i, static_cast<uint64_t>(i), 0);
      const auto attend = [&pager, tensors] {
        AttendOptions options;
        options.scaling = 0.25f;
        tensors->attend(pager, 0, options);
      };
      scene.step = attend;
      scene.again = [&pager, rows, attend] {
        pager.begin(rows);
        attend();
      };
      scene.done = [&pager, a] {
        pager.abort();
        require_intact(pager, a);
      };
    });
    CHECK(failures > 0);
  }
}

PAGER_TEST("rows become positions or none does, at every allocation of a commit" *
           doctest::test_suite("long")) {
  const auto more = some_tokens(16, 9);
  for (const int kind : {0, 1, 2, 3}) {
    CAPTURE(kind);  // the first seal; one that spills; a shared chunk; recalls
    const Folder folder;
    const int64_t failures = fail_at_every_allocation([&](Scene& scene) {
      PagerOptions options = kind == 1 ? small_options(12, 3, 40, folder.path()) : roomy();
      if (kind == 3) {
        options.recall_chunks = 4;
        options.pool_blocks = 5;
      }
      scene.pager = std::make_unique<Pager>(options);
      Pager& pager = *scene.pager;
      const int64_t length = kind == 1 || kind == 3 ? 8 * 16 + 2 : 18;
      const Known a = create(pager, length, 1);
      scene.known = {a};
      if (kind == 2) {  // somebody has the same chunk already
        Known other = create(pager, length, 1);
        append(pager, &other, more);
        pager.evict_all();
        scene.known.push_back(other);
      }
      run_to_commit(pager, a, more);
      scene.step = [&pager] { pager.commit_all(); };
      scene.again = [&pager, a, more] {
        run_to_commit(pager, a, more);
        pager.commit_all();
      };
      scene.done = [&pager, a, more] {
        CHECK_FALSE(pager.forward_running());
        require_intact(pager, a.with(more));
      };
    });
    CHECK(failures > 0);
  }
}

PAGER_TEST("the index of names grows at a commit or the commit is none") {
  // The forward found room for its two chunks in the first index, half of whose 64 places are used at
  // most. Then a restore takes that room: 26 chunks, 5 and 2.
  const auto more = some_tokens(2 * 16, 9);
  const int64_t chunks = 26;
  const OnDevice processor("cpu");
  PagerOptions options = small_options(8, 64);
  options.rows = 32;
  options.smaller_rows = {16};
  const Folder folder;
  const auto reader = saved_turn(folder);
  bool failed = true;
  for (int64_t nth = 0; failed; ++nth) {
    REQUIRE(nth < kMostAllocations);
    Pager pager(options);
    const Known a = create(pager, chunks * 16, 1);
    run_to_commit(pager, a, more);
    const Known b = restored_turn(pager, reader);
    failed = false;
    {
      const FailingNew failing(nth);
      try {
        pager.commit_all();
      } catch (const std::bad_alloc&) {
        failed = true;
      }
    }
    if (failed) {
      pager.abort();
      require_intact(pager, a);
      run_to_commit(pager, a, more);
      pager.commit_all();
    }
    require_intact(pager, a.with(more));
    require_intact(pager, b);
    CHECK(pager.adopt_prefix(pager.create_sequence(""), a.with(more).tokens) == (chunks + 2) * 16);
  }
}

PAGER_TEST("chunks of a file are pinned or none is, at every allocation") {
  const Folder folder;
  const auto reader = saved_turn(folder);
  CHECK(fail_at_every_allocation([&](Scene& scene) {
          scene.pager = std::make_unique<Pager>(roomy());
          Pager& pager = *scene.pager;
          const Known a = restored_turn(pager, reader);
          scene.step = scene.again = [&pager, a] { pager.pin(a.id, 0, 64); };
          scene.done = [&pager, a] {
            CHECK(pager.stats().pinned_blocks == 4);
            require_intact(pager, a);
          };
        }) > 0);
}

PAGER_TEST("positions are trimmed, reserved, pinned and evicted or not, at every allocation") {
  const auto scene_of = [](Scene& scene) -> Known {
    scene.pager = std::make_unique<Pager>(roomy());
    scene.known = {create(*scene.pager, 70, 1)};
    scene.pager->evict_all();
    return scene.known[0];
  };
  CHECK(fail_at_every_allocation([&](Scene& scene) {
          Known a = scene_of(scene);
          Pager& pager = *scene.pager;
          scene.step = scene.again = [&pager, a] { pager.trim(a.id, 37); };
          scene.done = [&pager, a]() mutable {
            a.tokens.resize(37);
            require_intact(pager, a);
          };
        }) > 0);
  CHECK(fail_at_every_allocation([&](Scene& scene) {
          const Known a = scene_of(scene);
          Pager& pager = *scene.pager;
          scene.step = scene.again = [&pager, a] { pager.reserve(a.id, 200); };
          scene.done = [&pager] { CHECK(pager.stats().reserved_chunks == 8); };
        }) == 0);
  CHECK(fail_at_every_allocation([&](Scene& scene) {
          const Known a = scene_of(scene);
          Pager& pager = *scene.pager;
          scene.step = scene.again = [&pager, a] { pager.pin(a.id, 0, 64); };
          scene.done = [&pager, a] {
            CHECK(pager.stats().pinned_blocks == 4);
            require_intact(pager, a);
          };
        }) > 0);
  CHECK(fail_at_every_allocation([&](Scene& scene) {
          const Known a = scene_of(scene);
          Pager& pager = *scene.pager;
          const PinId pin = pager.pin(a.id, 0, 64);
          scene.step = [&pager, pin] { pager.unpin(pin); };
          scene.done = [&pager, a] { require_intact(pager, a); };
        }) == 0);
  CHECK(fail_at_every_allocation([&](Scene& scene) {
          const Known a = scene_of(scene);
          Pager& pager = *scene.pager;
          pager.unpin(pager.pin(a.id, 0, 64));
          scene.step = scene.again = [&pager] { pager.evict_all(); };
          scene.done = [&pager, a] { require_intact(pager, a); };
        }) > 0);
}

PAGER_TEST("a snapshot is restored or nothing of it, at every allocation") {
  const Folder folder;
  const auto reader = saved_turn(folder);
  for (const bool shared : {false, true}) {
    CAPTURE(shared);
    const int64_t failures = fail_at_every_allocation([&](Scene& scene) {
      scene.pager = std::make_unique<Pager>(roomy());
      Pager& pager = *scene.pager;
      if (shared) {
        pager.destroy_sequence(create(pager, 2 * 16, 2).id);  // cached from now on
        scene.known = {create(pager, 20, 1)};
      }
      const auto restored = std::make_shared<Known>();
      restored->tokens = some_tokens(5 * 16 + 3, 2);
      scene.step =
          scene.again = [&pager, restored, reader] { restored->id = restore(pager, reader); };
      scene.done = [&pager, restored] { require_intact(pager, *restored); };
    });
    CHECK(failures > 0);
  }
}

PAGER_TEST("a sequence is frozen or not, and thawed, at every allocation") {
  CHECK(fail_at_every_allocation([&](Scene& scene) {
          scene.pager = std::make_unique<Pager>(roomy());
          Pager& pager = *scene.pager;
          const Known a = create(pager, 70, 1);
          scene.known = {a};
          const auto frozen = std::make_shared<std::shared_ptr<SnapshotContent>>();
          scene.step = scene.again = [&pager, a, frozen] { *frozen = pager.freeze(a.id); };
          scene.done = [&pager, a, frozen] {
            CHECK(pager.ledger(a.id)[0].references == 2);
            {
              const FailingNew failing(0);
              frozen->reset();
              CHECK_FALSE(failing.met());
            }
            CHECK(pager.ledger(a.id)[0].references == 1);
            require_intact(pager, a);
          };
        }) > 0);
}

TEST_CASE("memory that runs out among threads ends no process: a call is done or refused") {
  // Many blocks, and enough pieces for every thread.
  const std::vector<std::byte> weights(size_t{40} << 20);
  const Folder folder;
  PagerOptions options = small_options(300, 0);
  {
    Pager pager(options);
    save(pager, create(pager, 200 * 16, 2).id, folder.file("turn"), kFingerprint);
  }
  const auto reader = SnapshotReader::open(folder.file("turn"));
  const auto refused_at_most = [](const std::function<void()>& call) {
    for (int64_t nth = 0; nth < kMostAllocations; ++nth) {
      CAPTURE(nth);
      bool refused = false, met = false;
      {
        const FailingNew failing(nth);
        try {
          call();
        } catch (const std::bad_alloc&) {
          refused = true;
        }
        met = failing.met();
      }
      if (refused) REQUIRE(met);
      if (!met) return;
    }
    FAIL("allocations never end");
  };
  refused_at_most([&] {
    snapshot::ByteWatch watch({{weights.data(), static_cast<int64_t>(weights.size())}}, 4, 1);
    if (watch.sweep(watch.total_bytes()) != -1) throw InvariantError("bytes have not changed");
  });
  refused_at_most([&] {
    if (!reader->verify(4, {}).empty()) throw InvariantError("nothing is damaged");
  });
}

PAGER_TEST("a prefix is adopted or not, and rows are given or not, at every allocation") {
  CHECK(fail_at_every_allocation([&](Scene& scene) {
          scene.pager = std::make_unique<Pager>(roomy());
          Pager& pager = *scene.pager;
          const Known a = create(pager, 64, 1);
          const SequenceId empty = pager.create_sequence("");
          scene.known = {a, {empty, {}}};
          scene.step = scene.again = [&pager, a, empty] { pager.adopt_prefix(empty, a.tokens); };
          scene.known.pop_back();
          scene.done = [&pager, a, empty] { require_intact(pager, {empty, a.tokens}); };
        }) > 0);
  CHECK(fail_at_every_allocation([&](Scene& scene) {
          scene.pager = std::make_unique<Pager>(roomy());
          Pager& pager = *scene.pager;
          const Known a = create(pager, 10, 1);
          scene.known = {a};
          const auto more = some_tokens(20, 3);
          const auto rows = std::make_shared<std::vector<Rows>>(4, Rows(20, 2, 16, 0));
          const auto tokens = a.with(more).tokens;
          const auto history = histories(tokens);
          for (int layer = 0; layer < 2; ++layer) {
            for (int64_t i = 0; i < 20; ++i) {
              const uint64_t h = history[static_cast<size_t>(10 + i)];
              fill_row(h, layer, kKey, 32, (*rows)[static_cast<size_t>(layer)].row(i));
              fill_row(h, layer, kValue, 32, (*rows)[static_cast<size_t>(2 + layer)].row(i));
            }
          }
          const auto begin = [&pager, a, more] {
            pager.begin(std::vector<RowSpan>{{a.id, 10, 20, RowKind::kGiven}}, {},
                        ForwardOptions{more, true, nullptr});
          };
          const std::vector<TensorView> k = {(*rows)[0].view(), (*rows)[1].view()};
          const std::vector<TensorView> v = {(*rows)[2].view(), (*rows)[3].view()};
          begin();
          scene.step = [&pager, rows, k, v] { give_on_device(pager, k, v); };
          scene.again = [&pager, rows, k, v, begin] {
            begin();
            give_on_device(pager, k, v);
          };
          scene.done = [&pager, a, tokens] {
            pager.commit_all();
            require_intact(pager, {a.id, tokens});
          };
        }) > 0);
}

}  // namespace
}  // namespace kvpager::pager_test
