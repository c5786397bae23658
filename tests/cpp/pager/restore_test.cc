// Sequences from snapshots; the format has tests of its own.
#include "small_pager.h"

namespace kvpager::pager_test {
namespace {

Known restore_as(Pager& pager, const Saved& saved, Provenance provenance = Provenance::kExact) {
  const auto reader = SnapshotReader::open(saved.path);
  return {pager.restore(reader, "", provenance, kFingerprint), saved.known.tokens};
}

PagerOptions two_best(int64_t pool, int64_t host) {
  return top_k(small_options(pool, host), 2, 16);
}

PAGER_TEST(
    "a restored sequence has the same bytes, attends with the same bits and goes on like the "
    "first") {
  for (const int64_t length : {1, 15, 16, 17, 64, 200}) {
    CAPTURE(length);
    Saved first(two_best(5, 64), length);
    first.pager.evict_all();
    save(first.pager, first.known.id, first.path, kFingerprint);
    require_intact(first.pager, first.known);
    Pager second(two_best(4, 64));
    Known saved = first.known, restored = restore_as(second, first);
    second.check_invariants();
    CHECK(same_bits(probe(second, restored), probe(first.pager, saved)));
    const std::vector<TokenId> more = some_tokens(40, 9);
    CHECK(same_bits(append(second, &restored, more), append(first.pager, &saved, more)));
    require_intact(second, restored);
    const std::string again = first.folder.file("again.kvp");
    save(first.pager, saved.id, first.path, kFingerprint);
    save(second, restored.id, again, kFingerprint);
    CHECK(SnapshotReader::open(first.path)->logical_digest() ==
          SnapshotReader::open(again)->logical_digest());
  }
}

PAGER_TEST("pinning a restored sequence reads each of its chunks once" *
           doctest::test_suite("long")) {
  const int64_t chunks = (int64_t{5} << 19) / kChunkBytes;  // 2.5 MiB
  Saved first(small_options(5, chunks + 8), chunks * 16);
  for (const int threads : {1, 3}) {
    PagerOptions options = small_options(chunks + 8, 0);
    options.threads = threads;
    Pager second(options);
    const auto reader = SnapshotReader::open(first.path);
    const Known restored{restore(second, reader), first.known.tokens};
    second.pin(restored.id, 5 * 16, 6 * 16);
    second.pin(restored.id, 0, chunks * 16);
    CHECK(reader->payload_bytes_read() == chunks * kChunkBytes);
    CHECK(second.stats().bytes_paged_in == chunks * kChunkBytes);
    CHECK(same_bits(probe(second, restored), probe(first.pager, first.known)));
    require_intact(second, restored);
  }
}

PAGER_TEST("a restore reads the tail and nothing else until chunks are needed") {
  Saved first(small_options(5, 64), 20 * 16 + 3);
  Pager second(small_options(5, 64));
  const auto reader = SnapshotReader::open(first.path);
  CHECK(reader->payload_bytes_read() == 0);
  const Known restored{restore(second, reader), first.known.tokens};
  CHECK(reader->payload_bytes_read() == kChunkBytes);
  for (const ChunkInfo& info : second.ledger(restored.id)) {
    CHECK(info.tiers == (info.sealed ? kTierSnapshot : kTierResident));
  }
  second.pin(restored.id, 0, 16);
  CHECK(reader->payload_bytes_read() == 2 * kChunkBytes);
  require_intact(second, restored);
}

PAGER_TEST(
    "restored chunks are shared with those computed here, and their summaries are loaded before "
    "they score") {
  Saved first(two_best(8, 64), 160);
  // The restored sequence never runs, so that its summaries are still in the file when another
  // seals the same.
  Pager second(two_best(8, 64));
  const Known restored = restore_as(second, first);
  Known computed = create(second, 160, 1);
  CHECK(second.stats().chunks_shared == 10);
  CHECK(second.stats().bytes_written_through == 0);  // what the file has needs no home
  CHECK(same_bits(probe(second, computed), probe(first.pager, first.known)));
  require_intact(second, computed);
  second.destroy_sequence(restored.id);
  require_intact(second, computed);
  Known adopter = create(second);
  CHECK(second.adopt_prefix(adopter.id, first.known.tokens) == 160);
  adopter.tokens = first.known.tokens;
  CHECK(same_bits(probe(second, adopter), probe(first.pager, first.known)));
}

PAGER_TEST("a prefix adopted from a restored sequence that never ran has its summaries") {
  Saved first(two_best(8, 64), 160);
  Pager second(two_best(8, 64));
  const Known restored = restore_as(second, first);
  Known adopter = create(second);
  CHECK(second.adopt_prefix(adopter.id, first.known.tokens) == 160);
  adopter.tokens = first.known.tokens;
  const Known child{second.fork(adopter.id), first.known.tokens};
  CHECK(same_bits(probe(second, child), probe(first.pager, first.known)));
  CHECK(same_bits(probe(second, adopter), probe(first.pager, first.known)));
  require_intact(second, restored);
}

TEST_CASE("a snapshot's chunk is read from its file once, into host memory nobody needs") {
  Saved first(small_options(5, 64), 20 * 16 + 3);
  Pager second(small_options(5, 24));
  const auto reader = SnapshotReader::open(first.path);
  const Known restored{restore(second, reader), first.known.tokens};
  const std::vector<float> expected = probe(first.pager, first.known);
  CHECK(same_bits(probe(second, restored), expected));
  const int64_t once = reader->payload_bytes_read();
  CHECK(once >= 21 * kChunkBytes);
  second.evict_all();
  CHECK(same_bits(probe(second, restored), expected));
  CHECK(reader->payload_bytes_read() == once);
  CHECK(second.stats().host_bytes_used == 20 * kChunkBytes);

  // Homes come first.pager: another sequence may fill the arena, and the copies make way.
  Known other = create(second, 24 * 16, 2);
  CHECK(second.stats().host_bytes_used == 24 * kChunkBytes);
  CHECK(same_bits(probe(second, restored), expected));
  CHECK(reader->payload_bytes_read() > once);
  require_intact(second, restored);
  require_intact(second, other);
}

PAGER_TEST("restoring what is here already shares it, twice over") {
  Saved saved(small_options(6, 64), 70);
  Pager& pager = saved.pager;
  const Known a = restore_as(pager, saved);
  const Known b = restore_as(pager, saved);
  CHECK(pager.ledger(saved.known.id)[0].references == 3);
  pager.destroy_sequence(saved.known.id);
  require_intact(pager, a);
  pager.destroy_sequence(a.id);
  require_intact(pager, b);
}

PAGER_TEST("scores come back with the snapshot, and the next forward uses them") {
  Saved first(two_best(8, 64), 160);
  for (int i = 0; i < 4; ++i) probe(first.pager, first.known);
  save(first.pager, first.known.id, first.path, kFingerprint);
  const std::vector<ChunkInfo> before = first.pager.ledger(first.known.id);
  Pager second(two_best(8, 64));
  const Known restored = restore_as(second, first);
  const std::vector<ChunkInfo> after = second.ledger(restored.id);
  double sum = 0;
  for (size_t i = 0; i < before.size(); ++i) {
    CHECK(after[i].qk_score == before[i].qk_score);
    sum += after[i].qk_score;
  }
  CHECK(sum > 0.5);
  probe(first.pager, first.known);
  probe(second, restored);
  for (size_t i = 0; i < before.size(); ++i) {
    CHECK(second.ledger(restored.id)[i].qk_score == first.pager.ledger(first.known.id)[i].qk_score);
  }
}

PAGER_TEST(
    "scores that came with the snapshot decide what leaves before any forward made new ones") {
  Saved first(small_options(8, 64), 96);
  for (int i = 0; i < 4; ++i) probe(first.pager, first.known);
  save(first.pager, first.known.id, first.path, kFingerprint);
  Pager second(small_options(6, 64));
  const Known restored = restore_as(second, first);
  second.unpin(
      second.pin(restored.id, 0, 64));  // chunks 0 to 3 are in the pool; two blocks are free
  std::vector<std::pair<double, int64_t>> order;
  for (int64_t c = 0; c < 4; ++c) {
    order.emplace_back(second.ledger(restored.id)[static_cast<size_t>(c)].qk_score, c);
  }
  std::sort(order.begin(), order.end());
  REQUIRE(order[0].second != 0);  // or the order of records would do
  const Known tails[] = {create(second, 1, 5), create(second, 1, 6), create(second, 1, 7)};
  for (const auto& [score, chunk] : order) {
    const uint8_t tiers = second.ledger(restored.id)[static_cast<size_t>(chunk)].tiers;
    CHECK(((tiers & kTierResident) != 0) == (chunk != order[0].second));
  }
  require_intact(second, tails[2]);
}

PAGER_TEST(
    "another salt, fingerprint or layout is refused, naming what differs, and nothing changes") {
  Saved first(small_options(6, 64), 70, 1, "alice");
  const auto refusal = [&](PagerOptions options, const std::string& salt, const std::string& key) {
    Pager pager(options);
    const std::string message = error_of<FingerprintMismatchError>(pager, [&] {
      pager.restore(SnapshotReader::open(first.path), salt, Provenance::kExact, key);
    });
    if (message != "no error") {
      CHECK(pager.stats().sequences == 0);
      CHECK(pager.stats().records == 0);
      CHECK(pager.stats().free_blocks == options.pool_blocks);
    }
    return message;
  };
  CHECK(contains(refusal(small_options(6, 64), "carol", kFingerprint), "salt"));
  CHECK(contains(refusal(small_options(6, 64), "", kFingerprint), "salt"));
  CHECK(contains(refusal(small_options(6, 64), "alice", "{}"), "fingerprint"));
  PagerOptions other = small_options(6, 64);
  other.layout.v_dtype = DType::kFloat16;
  CHECK(contains(refusal(other, "alice", kFingerprint), "layout"));
  CHECK(refusal(small_options(6, 64), "alice", kFingerprint) == "no error");
}

PAGER_TEST("a restore that the budgets cannot hold is refused with the bytes") {
  Saved first(small_options(6, 64), 10 * 16 + 2);
  PagerOptions options = small_options(4, 64);
  options.summary_bytes = 9 * first.pager.stats().summary_bytes_per_chunk;
  Pager summaries(options);
  CHECK(contains(error_of<CapacityError>(summaries, [&] { restore_as(summaries, first); }),
                 "summaries of 10 more chunks"));
  Pager pool(small_options(3, 64));
  create(pool, 2, 5);
  create(pool, 2, 6);
  create(pool, 2, 7);
  with_every_home(pool);
  CHECK(contains(error_of<CapacityError>(pool, [&] { restore_as(pool, first); }),
                 "restore: needs 1 blocks"));
  CHECK(pool.stats().sequences == 4);
  CHECK(pool.stats().records == 3);
}

PAGER_TEST("what is restored as approximate is never served as exact, nor what follows it") {
  Saved first(small_options(6, 64), 70);
  PagerOptions options = small_options(6, 64);
  options.namespace_key = "{\"model\":\"other\"}";
  Pager second(options);
  Known restored = restore_as(second, first, Provenance::kApproximate);
  append(second, &restored, some_tokens(30, 3));
  for (const ChunkInfo& info : second.ledger(restored.id)) {
    CHECK(info.provenance == Provenance::kApproximate);
  }
  CHECK(second.adopt_prefix(create(second).id, restored.tokens) == 0);
  require_intact(second, restored);
}

PAGER_TEST("an empty sequence and an impossible path are refused") {
  Pager pager(small_options(6, 64));
  const Known empty = create(pager);
  CHECK(contains(error_of<InvalidArgumentError>(pager, [&] { save(pager, empty.id, "x", "{}"); }),
                 "empty"));
  const Known held = create(pager, 5, 1);
  CHECK_THROWS_AS(save(pager, held.id, "/nowhere/at/all/x.kvp", "{}"), StorageError);
  require_intact(pager, held);
}

}  // namespace
}  // namespace kvpager::pager_test
