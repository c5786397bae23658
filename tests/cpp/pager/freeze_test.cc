// What a save writes from: fixed at one moment, whatever the sequence and the pager do next.
#include <atomic>
#include <memory>
#include <thread>

#include "failing_new.h"
#include "small_pager.h"

namespace kvpager::pager_test {
namespace {

using testing::read_bytes;

Known prefix_of(Pager& pager, const Known& whole, int64_t length) {
  Known known{pager.create_sequence(""), {}};
  append(pager, &known, cut(whole.tokens, 0, length));
  return known;
}

PAGER_TEST("what is frozen stays as it was while the sequence goes on, is trimmed and closed") {
  const Folder folder;
  Pager pager(small_options(6, 40));
  Known sequence = create(pager, 90, 1);
  save(pager, sequence.id, folder.file("then"), kFingerprint);
  const auto frozen = pager.freeze(sequence.id);
  append(pager, &sequence, some_tokens(40, 2));
  pager.trim(sequence.id, 10);
  pager.destroy_sequence(sequence.id);
  create(pager, 200, 3);
  pager.evict_all();
  save(*frozen, folder.file("later"), kFingerprint);
  CHECK(read_bytes(folder.file("then")) == read_bytes(folder.file("later")));
  pager.check_invariants();
}

PAGER_TEST("the first positions of a sequence are saved as if it had never held more") {
  const Folder folder;
  Pager pager(small_options(6, 200));
  const Known whole = create(pager, 90, 1);
  for (const int64_t upto : {1, 15, 16, 17, 40, 64, 80, 81, 89, 90}) {
    CAPTURE(upto);
    pager.evict_all();
    save(pager, whole.id, folder.file("part"), kFingerprint, upto);
    Pager other(small_options(6, 200));
    const Known same = prefix_of(other, whole, upto);
    save(other, same.id, folder.file("same"), kFingerprint);
    const auto part = SnapshotReader::open(folder.file("part"));
    CHECK(part->logical_digest() == SnapshotReader::open(folder.file("same"))->logical_digest());
    require_intact(other, {other.restore(part, "", Provenance::kExact, kFingerprint), same.tokens});
  }
  for (const int64_t upto : {int64_t{0}, int64_t{91}}) {
    CHECK(contains(error_of<InvalidArgumentError>(pager, [&] { pager.freeze(whole.id, upto); }),
                   "expected 1 to 90"));
  }
  require_intact(pager, whole);
}

PAGER_TEST("a tail cut out of a chunk that is only on disk or in a snapshot is the same tail") {
  const Folder folder;
  Pager pager(small_options(on_device() ? 12 : 4, 0, 40, folder.path()));
  const Known whole = create(pager, 160, 1);
  pager.evict_all();
  save(pager, whole.id, folder.file("disk"), kFingerprint, 40);
  save(pager, whole.id, folder.file("all"), kFingerprint);
  Pager second(small_options(4, 4));
  const Known restored{restore(second, folder.file("all")), whole.tokens};
  save(second, restored.id, folder.file("snapshot"), kFingerprint, 40);
  CHECK(SnapshotReader::open(folder.file("disk"))->logical_digest() ==
        SnapshotReader::open(folder.file("snapshot"))->logical_digest());
}

PAGER_TEST("freezing takes no block, no home and no summary, and is no sequence to anybody") {
  Pager pager(small_options(4, 40));
  const Known sequence = create(pager, 100, 1);
  const PagerStats before = pager.stats();
  const auto frozen = pager.freeze(sequence.id);
  const PagerStats after = pager.stats();
  CHECK(after.free_blocks == before.free_blocks);
  CHECK(after.host_bytes_used == before.host_bytes_used);
  CHECK(after.summary_bytes_used == before.summary_bytes_used);
  CHECK(after.records == before.records);
  CHECK(after.sequences == before.sequences);
  CHECK(after.chunks_evicted == before.chunks_evicted);
  CHECK(pager.ledger(sequence.id)[0].references == 2);
}

PAGER_TEST("what a save writes from is no sequence that a number names") {
  const Folder folder;
  Pager pager(small_options(4, 40));
  const Known sequence = create(pager, 100, 1);
  save(pager, sequence.id, folder.file("before"), kFingerprint);
  {
    const auto frozen = pager.freeze(sequence.id);
    const SequenceId next = pager.create_sequence("");
    const SequenceId its(next.value() - 1);  // numbers are given out in order
    const auto refused = [&](const std::function<void()>& step) {
      CHECK(contains(error_of<InvalidArgumentError>(pager, step), "does not exist or is closed"));
    };
    refused([&] { pager.destroy_sequence(its); });
    pager.drop_sequence(its);  // as of any that is closed
    refused([&] { pager.fork(its); });
    refused([&] { pager.trim(its, 3); });
    refused([&] { pager.reserve(its, 200); });
    refused([&] { pager.pin(its, 0, 16); });
    refused([&] { pager.freeze(its); });
    refused([&] { pager.length(its); });
    refused([&] { pager.begin(commit_rows(its, 96, sequence.tokens.data(), 1)); });
    save(*frozen, folder.file("after"), kFingerprint);
  }
  CHECK(read_bytes(folder.file("before")) == read_bytes(folder.file("after")));
  require_intact(pager, sequence);
}

PAGER_TEST("frozen content outlives its pager") {
  const Folder folder;
  auto pager = std::make_unique<Pager>(small_options(4, 40));
  const Known sequence = create(*pager, 100, 1);
  save(*pager, sequence.id, folder.file("before"), kFingerprint);
  const auto frozen = pager->freeze(sequence.id);
  pager.reset();
  save(*frozen, folder.file("after"), kFingerprint);
  CHECK(read_bytes(folder.file("before")) == read_bytes(folder.file("after")));
}

// Borrows every chunk at once, which is more than any writer does.
void borrow_all_while(Pager& pager, const Known& sequence, const std::function<void()>& action) {
  const auto frozen = pager.freeze(sequence.id);
  const auto count = static_cast<int64_t>(frozen->meta().chunks.size());
  std::vector<std::vector<std::byte>> scratch(static_cast<size_t>(count));
  std::vector<const std::byte*> borrowed;
  std::vector<std::vector<std::byte>> copies;
  for (int64_t c = 0; c < count; ++c) {
    auto& mine = scratch[static_cast<size_t>(c)];
    mine.resize(static_cast<size_t>(kChunkBytes));
    borrowed.push_back(frozen->borrow_chunk(c, mine.data()));
    copies.emplace_back(borrowed.back(), borrowed.back() + kChunkBytes);
  }
  action();
  pager.check_invariants();
  for (int64_t c = 0; c < count; ++c) {
    const auto i = static_cast<size_t>(c);
    CHECK(std::memcmp(borrowed[i], copies[i].data(), copies[i].size()) == 0);
    frozen->give_back_chunk(c);
  }
  CHECK_THROWS_AS(frozen->borrow_chunk(count, scratch[0].data()), InvalidArgumentError);
  CHECK_THROWS_AS(frozen->read_summary(count, scratch[0].data()), InvalidArgumentError);
}

PAGER_TEST("a save in progress makes no forward wait for room, and nothing it reads moves") {
  const Folder folder;
  for (const int tiers : {0, 1, 2, 3, 7}) {
    CAPTURE(tiers);
    const bool host = (tiers & 1) != 0, disk = (tiers & 2) != 0, tiny = (tiers & 4) != 0;
    // With both, every host slot is lent, and all that is sealed meanwhile has to go to disk.
    const int64_t host_chunks = !host ? 0 : disk ? tiny ? 1 : 4 : 40;
    const bool pool = tiers == 0 || (on_device() && disk);  // what a forward sees is in memory
    PagerOptions options =
        small_options(pool ? 40 : 4, host_chunks, disk ? 40 : 0, disk ? folder.path() : "");
    options.policy = Policy::kLru;  // what was borrowed is the oldest
    Pager pager(options);
    const Known sequence = create(pager, disk && host ? host_chunks * 16 : 9 * 16 + 5, 1);
    Known other = create(pager, 5, 2);
    borrow_all_while(pager, sequence, [&] {
      append(pager, &other, some_tokens(20 * 16, 3));
      pager.evict_all();
    });
    require_intact(pager, sequence);
    require_intact(pager, other);
  }
}

PAGER_TEST("a host copy of a snapshot's chunk gives way to a home while a save reads it") {
  const Folder folder;
  Pager first(small_options(4, 40));
  const Known saved = create(first, 8 * 16, 1);
  save(first, saved.id, folder.file("turn"), kFingerprint);
  Pager pager(small_options(4, 8));
  const Known restored{restore(pager, folder.file("turn")), saved.tokens};
  probe(pager, restored);
  REQUIRE(pager.stats().host_bytes_used == 8 * kChunkBytes);
  Known other = create(pager);
  borrow_all_while(pager, restored, [&] { append(pager, &other, some_tokens(6 * 16, 2)); });
  require_intact(pager, restored);
  require_intact(pager, other);
}

PAGER_TEST("a tail is worth what its rows are worth, wherever it is cut") {
  Pager pager(small_options(4, 40));
  Known sequence = create(pager, 16, 1);
  append(pager, &sequence, some_tokens(20, 2), Provenance::kDecode);
  for (const int64_t upto : {20, 34}) {
    CHECK(pager.freeze(sequence.id, upto)->meta().chunks.back().provenance == Provenance::kDecode);
  }
  CHECK(pager.freeze(sequence.id, 10)->meta().chunks.back().provenance == Provenance::kExact);
}

PAGER_TEST("a chunk is lent without an allocation, so that no loan can be forgotten") {
  Pager pager(small_options(4, 40));
  const Known sequence = create(pager, 100, 1);
  const auto frozen = pager.freeze(sequence.id);
  std::vector<std::byte> scratch(static_cast<size_t>(kChunkBytes));
  const FailingNew failing(0);
  for (int64_t chunk = 0; chunk < frozen->meta().sealed_chunks(); ++chunk) {
    frozen->borrow_chunk(chunk, scratch.data());
  }
  CHECK_FALSE(failing.met());
}

PAGER_TEST("a chunk that is borrowed and never given back is returned with the frozen sequence") {
  Pager pager(small_options(4, 40));
  const Known sequence = create(pager, 100, 1);
  {
    const auto frozen = pager.freeze(sequence.id);
    std::vector<std::byte> scratch(static_cast<size_t>(kChunkBytes));
    frozen->borrow_chunk(0, scratch.data());
    frozen->borrow_chunk(0, scratch.data());
    frozen->borrow_chunk(3, scratch.data());
  }
  pager.destroy_sequence(sequence.id);
  pager.check_invariants();
  create(pager, 40 * 16, 4);  // needs every home: nothing is still lent
}

PAGER_TEST("saves on other threads write what was frozen while forwards, evictions and trims run") {
  const Folder folder;
  PagerOptions options = small_options(5, 24, 60, folder.path());
  options.threads = 2;
  Pager pager(options);
  Known sequence = create(pager, 150, 1);
  std::vector<std::thread> savers;
  std::vector<std::string> expected;
  for (int i = 0; i < 6; ++i) {
    append(pager, &sequence, some_tokens(20, static_cast<uint64_t>(10 + i)));
    const std::string name = folder.file("sync" + std::to_string(i));
    save(pager, sequence.id, name, kFingerprint);
    expected.push_back(read_bytes(name));
    savers.emplace_back(
        [frozen = pager.freeze(sequence.id), path = folder.file("async" + std::to_string(i))] {
          save(*frozen, path, kFingerprint);
        });
    pager.evict_all();
    Known child = forked(pager, sequence);
    pager.trim(child.id, 33);
    pager.destroy_sequence(child.id);
  }
  for (std::thread& saver : savers) saver.join();
  for (int i = 0; i < 6; ++i) {
    CHECK(read_bytes(folder.file("async" + std::to_string(i))) == expected[static_cast<size_t>(i)]);
  }
  require_intact(pager, sequence);
}

}  // namespace
}  // namespace kvpager::pager_test
