// The file system fails at every point where it can, one after the other: each time the pager is as
// it was, and the same call succeeds when the fault is gone.
#include "failing.h"
#include "small_pager.h"

namespace kvpager::pager_test {
namespace {

template <class Step, class Check>
int64_t fail_at_every_visit(Pager& pager, const char* point, const Step& step, const Check& check) {
  return fail_at_visits<StorageError>(point, 1000, false, step, [&] {
    CHECK_FALSE(pager.forward_running());
    check();
  });
}

TEST_CASE("a failing write-through aborts the commit at every visit, and the retry succeeds") {
  struct Tier {
    const char* point;
    int64_t host, disk;
    int64_t visits;
  };
  // Two sequences seal one chunk each. Where host memory is full, each one spills another first.
  const Tier tiers[] = {{"host.write", 24, 0, 2},
                        {"disk.write", 0, 24, 2},
                        {"disk.write", 2, 24, 2},
                        {"host.write", 2, 24, 2}};
  for (const Tier& tier : tiers) {
    const Folder folder;
    Pager pager(small_options(6, tier.host, tier.disk, tier.disk > 0 ? folder.path() : ""));
    Known a = create(pager, 40, 1);
    Known b = create(pager, 42, 2);
    Known bystander = create(pager, 33, 3);
    std::vector<TokenId> all_a = a.tokens;
    std::vector<TokenId> all_b = b.tokens;
    std::vector<RowDescriptor> rows;
    for (const TokenId token : some_tokens(8, 4)) {
      rows.push_back({a.id, static_cast<int64_t>(all_a.size()), token, RowKind::kCommit});
      all_a.push_back(token);
      rows.push_back({b.id, static_cast<int64_t>(all_b.size()), token, RowKind::kCommit});
      all_b.push_back(token);
    }
    const auto step = [&] {
      const std::vector<uint64_t> history_a = histories(all_a), history_b = histories(all_b);
      const auto history_of = [&](const RowDescriptor& row) {
        return (row.sequence == a.id ? history_a : history_b)[static_cast<size_t>(row.position)];
      };
      pager.begin(rows);
      run_layers_of(pager, rows, history_of, false);
      pager.commit_all();
    };
    const auto stats = pager.stats();
    const int64_t visits = fail_at_every_visit(pager, tier.point, step, [&] {
      require_intact(pager, a);
      require_intact(pager, b);
      require_intact(pager, bystander);
      const PagerStats now = pager.stats();
      CHECK(now.chunks_sealed == stats.chunks_sealed);
      CHECK(now.records == stats.records);
      CHECK(now.reserved_chunks == stats.reserved_chunks);
      CHECK(now.summary_bytes_used == stats.summary_bytes_used);
      const auto bytes = [](const PagerStats& of) {  // an open chunk is in a block or below
        return of.host_bytes_used + of.disk_bytes_used + of.open_blocks * kChunkBytes;
      };
      CHECK(bytes(now) == bytes(stats));
    });
    CHECK(visits >= 1);
    CHECK(visits <= tier.visits);
    a.tokens = all_a;
    b.tokens = all_b;
    require_intact(pager, a);
    require_intact(pager, b);
    require_intact(pager, bystander);
  }
}

TEST_CASE(
    "a failing read aborts the forward at every visit, promoted or streamed, and the retry has the "
    "same bits") {
  for (const int64_t pool : {4, 20}) {
    const Folder folder;
    Pager pager(small_options(pool, 0, 40, folder.path()));
    Pager plain(small_options(40, 40));
    Known sequence = create(pager, 14 * 16 + 4, 1);
    Known same = create(plain, 14 * 16 + 4, 1);
    const std::vector<TokenId> more = some_tokens(16, 2);
    std::vector<float> outputs;
    Known grown;
    pager.evict_all();
    const int64_t visits = fail_at_every_visit(
        pager, "disk.read",
        [&] {
          grown = sequence;
          outputs = append(pager, &grown, more);
        },
        [&] {
          require_intact(pager, sequence);
          CHECK(pager.stats().open_blocks <= 1);
          CHECK(pager.stats().reserved_chunks == 0);
          pager.evict_all();
        });
    CHECK(visits == (pool == 4 ? 29 : 15));  // the tail, and slices of two layers, or chunks
    require_intact(pager, grown);
    CHECK(same_bits(outputs, append(plain, &same, more)));
  }
}

PAGER_TEST("a failing save leaves no file, the old one untouched and the pager as it was") {
  const Folder folder;
  Pager pager(small_options(6, 24));
  Known sequence = create(pager, 70, 1);
  const std::string path = folder.file("turn.kvp");
  save(pager, sequence.id, path, "{}");
  const Hash128 old = SnapshotReader::open(path)->logical_digest();
  append(pager, &sequence, some_tokens(30, 2));
  for (const char* point : {"snapshot.write", "snapshot.fsync", "snapshot.rename"}) {
    const int64_t visits = fail_at_every_visit(
        pager, point, [&] { save(pager, sequence.id, path, "{}"); },
        [&] {
          require_intact(pager, sequence);
          if (std::string(point) != "snapshot.fsync") {
            CHECK(SnapshotReader::open(path)->logical_digest() == old);
          }
          CHECK(folder.names().size() == 1);
        });
    CHECK(visits >= 1);
    CHECK_FALSE(SnapshotReader::open(path)->logical_digest() == old);
    Known before = forked(pager, sequence);
    pager.trim(before.id, 70);
    save(pager, before.id, path, "{}");
    pager.destroy_sequence(before.id);
    CHECK(SnapshotReader::open(path)->logical_digest() == old);
  }
}

PAGER_TEST(
    "a failing restore leaves the pager as it was, and what a restored sequence cannot read it can "
    "retry") {
  const Folder folder;
  const std::string path = folder.file("turn.kvp");
  Known saved;
  {
    Pager pager(small_options(6, 24));
    saved = create(pager, 90, 1);
    save(pager, saved.id, path, kFingerprint);
  }
  Pager pager(small_options(4, 24));
  Known bystander = create(pager, 50, 2);
  const PagerStats before = pager.stats();
  const auto reader = SnapshotReader::open(path);
  Known restored{SequenceId(), saved.tokens};
  int64_t visits = fail_at_every_visit(
      pager, "snapshot.read", [&] { restored.id = restore(pager, reader); },
      [&] {
        const PagerStats now = pager.stats();
        CHECK(now.sequences == before.sequences);
        CHECK(now.records == before.records);
        CHECK(now.summary_bytes_used == before.summary_bytes_used);
        require_intact(pager, bystander);
      });
  CHECK(visits == 1);  // the tail; sealed chunks wait until they are needed
  std::vector<float> outputs;
  visits = fail_at_every_visit(
      pager, "snapshot.read", [&] { outputs = probe(pager, restored); },
      [&] {
        pager.check_invariants();
        pager.evict_all();
      });
  CHECK(visits ==
        5);  // each chunk once, whole, to a free host slot; the summaries were read before
  Pager plain(small_options(24, 24));
  Known same = create(plain, 90, 1);
  CHECK(same_bits(outputs, probe(plain, same)));
  require_intact(pager, restored);
  require_intact(pager, bystander);
}

PAGER_TEST("a failing restore takes back the references it took to chunks that were here") {
  const Disarm disarm;
  const Folder folder;
  const std::string path = folder.file("turn.kvp");
  Pager pager(small_options(6, 24));
  const Known saved = create(pager, 70, 1);
  const Known closed = create(pager, 50, 2);
  save(pager, closed.id, path, kFingerprint);
  pager.destroy_sequence(closed.id);
  for (const bool cached : {true, false}) {
    if (!cached) save(pager, saved.id, path, kFingerprint);
    const PagerStats before = pager.stats();
    const auto reader = SnapshotReader::open(path);
    fault::arm("snapshot.read", 0, EIO);
    CHECK_THROWS_AS(restore(pager, reader), StorageError);
    require_intact(pager, saved);
    CHECK(pager.ledger(saved.id)[0].references == 1);
    CHECK(pager.stats().cached_records == before.cached_records);
    CHECK(pager.stats().free_blocks >= before.free_blocks);
  }
}

TEST_CASE("a recall ahead of need that fails harms nobody") {
  const Disarm disarm;
  const Folder folder;
  PagerOptions options = small_options(4, 0, 40, folder.path());
  options.recall_chunks = 4;
  Pager pager(options);
  Known sequence = create(pager, 10 * 16, 1);
  pager.evict_all();
  // The forward streams 2 * 10 slices; the read after them is the first recall.
  fault::arm("disk.read", 20, EIO);
  append(pager, &sequence, {5});
  CHECK_FALSE(fault::any_armed.load());
  require_intact(pager, sequence);
}

}  // namespace
}  // namespace kvpager::pager_test
