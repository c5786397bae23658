// A device that fails at every point where it can, one after the other: each time the pager is as it
// was, and the same call succeeds when the fault is gone.
#include "failing.h"
#include "small_pager.h"

namespace kvpager::pager_test {
namespace {

// Tickets that cannot be had at the moment are taken later, which is no failure.
bool may_be_survived(const std::string& point) { return point == "device.record"; }

template <class Step, class Check>
int64_t fail_at_every_visit(const char* point, const Step& step, const Check& check) {
  return fail_at_visits<DeviceError>(point, 2000, may_be_survived(point), step, check);
}

constexpr const char* kPoints[] = {"device.up",     "device.down",  "device.launch",
                                   "device.record", "device.order", "device.wait"};

PagerOptions options_of(int64_t pool, int64_t host, int64_t disk = 0,
                        const std::string& folder = "") {
  PagerOptions options = top_k(small_options(pool, host, disk, folder), 3, 16);
  options.poison = false;  // a fill that fails is passed over
  options.missed_chunks = "staged";
  return options;
}

// The first of `more` are given, the last one is a row of the model.
void append_given(Pager& pager, Known* known, const std::vector<TokenId>& more) {
  std::vector<TokenId> all = known->tokens;
  all.insert(all.end(), more.begin(), more.end());
  const auto start = static_cast<int64_t>(known->tokens.size());
  const auto count = static_cast<int64_t>(more.size()) - 1;
  const std::vector<uint64_t> history = histories(all);
  std::vector<Rows> rows;
  for (int layer = 0; layer < 2; ++layer) {
    for (const What what : {kKey, kValue}) {
      Rows& to = rows.emplace_back(count, 2, 16, 0.0f);
      for (int64_t i = 0; i < count; ++i) {
        fill_row(history[static_cast<size_t>(start + i)], layer, what, 32, to.row(i));
      }
    }
  }
  pager.begin(
      {{known->id, start, count, RowKind::kGiven}, {known->id, start + count, 1, RowKind::kCommit}},
      {more.back()}, {{more.begin(), more.end() - 1}, true, nullptr});
  try {
    give_on_device(pager, {rows[0].view(), rows[2].view()}, {rows[1].view(), rows[3].view()});
    run_layers(pager, {{known->id, start + count, more.back(), RowKind::kCommit}}, all);
    pager.commit_all();
  } catch (const PagerError&) {
    pager.abort();
    throw;
  }
  known->tokens = std::move(all);
}

DEVICE_TEST(
    "a forward that fails anywhere on the device leaves lengths, ledger and budgets alone") {
  for (const char* point : kPoints) {
    CAPTURE(point);
    Pager pager(options_of(8, 40));
    Known sequence = create(pager, 9 * 16 + 12, 1);
    const Known bystander = create(pager, 33, 2);
    Known grown;
    std::vector<float> outputs;
    int64_t failures = 0;
    const PagerStats before = pager.stats();
    const int64_t visits = fail_at_every_visit(
        point,
        [&] {
          pager.evict_all();
          grown = sequence;
          outputs = append(pager, &grown, some_tokens(10, 3));
        },
        [&] {
          CHECK_FALSE(pager.forward_running());
          if (pager.length(sequence.id) > static_cast<int64_t>(sequence.tokens.size())) {
            pager.trim(sequence.id, static_cast<int64_t>(sequence.tokens.size()));
            return;
          }
          ++failures;
          require_intact(pager, sequence);
          require_intact(pager, bystander);
          const PagerStats now = pager.stats();
          CHECK(now.open_blocks <= before.open_blocks);  // evict_all() pages them out
          CHECK(now.reserved_chunks == before.reserved_chunks);
          CHECK(now.sequences == before.sequences);
          CHECK(now.device_bytes == before.device_bytes);
          CHECK(now.pinned_bytes == before.pinned_bytes);
        });
    CHECK(visits >= 1);
    if (!may_be_survived(point)) CHECK(failures == visits);
    require_intact(pager, grown);
    require_intact(pager, bystander);
    const OnDevice processor("cpu");
    Pager plain(options_of(20, 40));
    Known same = create(plain, 9 * 16 + 12, 1);
    CHECK(same_bits(outputs, append(plain, &same, some_tokens(10, 3))));
  }
}

DEVICE_TEST(
    "a forward of several waves that fails in any of them has the right bits when repeated") {
  PagerOptions options = options_of(5, 200);
  options.selection = Selection();
  options.staging_bytes = 2 * 64 * options.layout.slice_bytes(0);
  const int64_t tokens = 130 * 16;
  const std::vector<float> expected =
      on_processor(options, [&](Pager& pager) { return probe(pager, written(pager, tokens, 1)); });
  for (const char* point : kPoints) {
    CAPTURE(point);
    Pager pager(options);
    const Known sequence = written(pager, tokens, 1);
    std::vector<float> outputs;
    const int64_t slices = pager.stats().slices_staged;
    fail_at_every_visit(
        point,
        [&] {
          pager.evict_all();
          try {
            outputs = probe(pager, sequence);
          } catch (const PagerError&) {
            pager.abort();
            throw;
          }
        },
        [&] { pager.check_invariants(); });
    require_intact(pager, sequence);
    CHECK(same_bits(outputs, expected));
    CHECK(pager.stats().slices_staged - slices >= 2 * 130);
  }
}

DEVICE_TEST(
    "a forward with given positions that fails anywhere on the device is as if never begun") {
  const std::vector<TokenId> more = some_tokens(24, 3);
  for (const char* point : kPoints) {
    CAPTURE(point);
    Pager pager(options_of(10, 40));
    Known sequence = create(pager, 5 * 16 + 12, 1);
    Known grown;
    int64_t failures = 0;
    const PagerStats before = pager.stats();
    const int64_t visits = fail_at_every_visit(
        point,
        [&] {
          grown = sequence;
          append_given(pager, &grown, more);
        },
        [&] {
          CHECK_FALSE(pager.forward_running());
          if (pager.length(sequence.id) > static_cast<int64_t>(sequence.tokens.size())) {
            pager.trim(sequence.id, static_cast<int64_t>(sequence.tokens.size()));
            return;
          }
          ++failures;
          require_intact(pager, sequence);
          const PagerStats now = pager.stats();
          CHECK(now.open_blocks <= before.open_blocks);  // evict_all() pages them out
          CHECK(now.reserved_chunks == before.reserved_chunks);
        });
    CHECK(visits >= 1);
    if (!may_be_survived(point)) CHECK(failures == visits);
    require_intact(pager, grown);
  }
}

DEVICE_TEST("what moves chunks outside of forwards fails as a whole, or not at all") {
  const Folder folder;
  const std::string path = folder.file("turn.kvp");
  {
    Pager pager(options_of(8, 40));
    const Known saved = create(pager, 75, 5);
    save(pager, saved.id, path, kFingerprint);
  }
  for (const char* point : kPoints) {
    CAPTURE(point);
    Pager pager(options_of(8, 30, 0));
    const Known sequence = create(pager, 5 * 16 + 9, 1);
    const auto reader = SnapshotReader::open(path);
    const std::vector<std::function<void()>> steps = {
        [&] { pager.unpin(pager.pin(sequence.id, 0, 30)); },
        [&] { pager.destroy_sequence(pager.fork(sequence.id)); },
        [&] {
          const SequenceId child = pager.fork(sequence.id);
          try {
            pager.trim(child, 20);
          } catch (...) {
            pager.destroy_sequence(child);
            throw;
          }
          pager.destroy_sequence(child);
        },
        [&] { pager.destroy_sequence(restore(pager, reader)); },
        [&] { pager.freeze(sequence.id); },
        [&] {
          std::vector<std::byte> k(5 * 128), v(5 * 128);
          pager.read_kv(sequence.id, 1, 84, 89, k.data(), v.data());
        },
    };
    const PagerStats before = pager.stats();
    for (size_t i = 0; i < steps.size(); ++i) {
      CAPTURE(i);
      const int64_t visits = fail_at_every_visit(
          point,
          [&] {
            pager.evict_all();
            steps[i]();
          },
          [&] {
            require_intact(pager, sequence);
            const PagerStats now = pager.stats();
            CHECK(now.sequences == before.sequences);
            CHECK(now.records == before.records);
            CHECK(now.open_blocks <= before.open_blocks);  // evict_all() pages them out
            CHECK(now.pinned_blocks == before.pinned_blocks);
            CHECK(now.summary_bytes_used == before.summary_bytes_used);
          });
      CHECK(visits >= 0);
    }
  }
}

DEVICE_TEST("a device without the memory gives a CapacityError and keeps nothing") {
  const Disarm disarm;
  const int64_t device = device::total_device_bytes();
  const int64_t pinned = device::total_pinned_bytes();
  for (const char* point : {"device.allocate", "device.pin"}) {
    int64_t nth = 0;
    for (; nth < 100; ++nth) {
      CAPTURE(point);
      CAPTURE(nth);
      fault::arm(point, nth, ENOMEM);
      bool failed = false;
      try {
        const Pager pager(options_of(8, 20));
      } catch (const CapacityError&) {
        failed = true;
      }
      fault::disarm_all();
      CHECK(device::total_device_bytes() == device);
      CHECK(device::total_pinned_bytes() == pinned);
      if (!failed) break;
    }
    CHECK(nth >= 3);
  }
}

DEVICE_TEST("a forward that outgrows its tables and finds no memory for larger ones did not begin" *
            doctest::test_suite("long")) {
  const Disarm disarm;
  Pager pager(small_options(80, 0));
  // One long sequence many times over: 32 rows of chunks seen, each by a sequence of its own.
  const Known trunk = create(pager, 70 * 16, 1);
  std::vector<RowDescriptor> rows;
  for (int i = 0; i < kRows; ++i) {
    const SequenceId child = pager.fork(trunk.id);
    rows.push_back({child, 70 * 16 - 1 - i, 0, RowKind::kRead});
  }
  for (const char* point : {"device.allocate", "device.pin"}) {
    const uint64_t generation = pager.generation();
    fault::arm(point, 0, ENOMEM);
    CHECK_THROWS_AS(pager.begin(rows), CapacityError);
    CHECK(pager.generation() == generation);
    CHECK_FALSE(pager.forward_running());
    fault::disarm_all();
  }
  require_intact(pager, trunk);
  const uint64_t generation = pager.generation();
  const int64_t tables = pager.stats().table_bytes;
  pager.begin(rows);
  CHECK(pager.generation() == generation + 1);
  CHECK(pager.stats().table_bytes > tables);
  const std::vector<float> outputs = run_layers(pager, rows, trunk.tokens);
  pager.commit_all();
  const OnDevice processor("cpu");
  Pager plain(small_options(80, 0));
  const Known same = create(plain, 70 * 16, 1);
  for (RowDescriptor& row : rows) row.sequence = same.id;
  plain.begin(rows);
  CHECK(same_bits(outputs, run_layers(plain, rows, same.tokens)));
}

}  // namespace
}  // namespace kvpager::pager_test
