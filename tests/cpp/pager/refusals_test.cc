// What is refused for want of room leaves everything as it was: promises, cached chunks and the order
// in which they are forgotten.
#include <limits>
#include <memory>

#include "small_pager.h"

namespace kvpager::pager_test {
namespace {

// Blocks are homes: nothing below the pool but snapshots.
PagerOptions pool_alone(int64_t blocks) {
  PagerOptions options = small_options(blocks, 0);
  options.summary_bytes = 1 << 20;
  return options;
}

// Chunks of a sequence that is closed.
std::vector<TokenId> cache_chunks(Pager& pager, int64_t chunks, uint64_t seed) {
  const Known closed = create(pager, chunks * 16, seed);
  pager.destroy_sequence(closed.id);
  return closed.tokens;
}

int64_t adoptable(Pager& pager, const std::vector<TokenId>& tokens) {
  const SequenceId id = pager.create_sequence("");
  const int64_t found = pager.adopt_prefix(id, tokens);
  pager.destroy_sequence(id);
  return found;
}

// A file of that many positions, made elsewhere.
void save_elsewhere(const std::string& path, int64_t positions, uint64_t seed) {
  Pager elsewhere(small_options(8, 64));
  save(elsewhere, create(elsewhere, positions, seed).id, path, kFingerprint);
}

PAGER_TEST("a restore does not count the cached chunks it is about to use as room for its tail") {
  const Folder folder;
  Pager pager(pool_alone(6));
  const Known saved = create(pager, 3 * 16 + 2, 1);
  save(pager, saved.id, folder.file("turn"), kFingerprint);
  pager.destroy_sequence(saved.id);
  for (uint64_t seed = 2; seed < 5; ++seed) create(pager, 2, seed);
  REQUIRE(pager.stats().cached_records == 3);
  REQUIRE(pager.stats().free_blocks == 0);
  const auto reader = SnapshotReader::open(folder.file("turn"));
  const std::string message = error_of<CapacityError>(pager, [&] { restore(pager, reader); });
  CHECK(contains(message, "restore: needs 1 blocks"));
  CHECK(pager.stats().sequences == 3);
  CHECK(pager.stats().cached_records == 3);
  CHECK(adoptable(pager, saved.tokens) == 3 * 16);
  create(pager, 2, 5);  // makes room: the end of the chain goes first
  CHECK(adoptable(pager, saved.tokens) == 2 * 16);
}

PAGER_TEST("a restore that cannot read its tail leaves the cached chunks in their order") {
  const Disarm disarm;
  const Folder folder;
  Pager pager(pool_alone(6));
  const Known saved = create(pager, 3 * 16 + 2, 1);
  save(pager, saved.id, folder.file("turn"), kFingerprint);
  pager.destroy_sequence(saved.id);
  const auto reader = SnapshotReader::open(folder.file("turn"));
  fault::arm("snapshot.read", 0, EIO);
  CHECK_THROWS_AS(restore(pager, reader), StorageError);
  for (uint64_t seed = 2; seed < 6; ++seed) create(pager, 2, seed);
  CHECK(adoptable(pager, saved.tokens) == 2 * 16);
}

DEVICE_TEST("a refused begin forgets no cached chunk, wherever homes are") {
  const Folder folder;
  for (const bool lower : {true, false}) {
    CAPTURE(lower);
    auto pager =
        std::make_unique<Pager>(lower ? small_options(6, 4, 60, folder.path()) : pool_alone(8));
    const std::vector<TokenId> kept = cache_chunks(*pager, 3, 1);
    Known sequence;
    if (lower) {  // more on disk than fits in memory
      sequence = create(*pager);
      error_of<CapacityError>(*pager, [&] { append(*pager, &sequence, some_tokens(20 * 16, 2)); });
    } else {
      save_elsewhere(folder.file("turn"), 9 * 16, 2);
      const auto reader = SnapshotReader::open(folder.file("turn"));
      sequence = {pager->restore(reader, "", Provenance::kExact, kFingerprint),
                  some_tokens(9 * 16, 2)};
      CHECK(contains(error_of<CapacityError>(*pager, [&] { probe(*pager, sequence); }), "begin: "));
    }
    CHECK_FALSE(pager->forward_running());
    CHECK(pager->stats().cached_records == 3);
    CHECK(pager->stats().reserved_chunks == 0);
    pager->destroy_sequence(sequence.id);
    CHECK(adoptable(*pager, kept) == 3 * 16);
  }
}

DEVICE_TEST("a refused begin forgets none for the rows that it would have added") {
  const Folder folder;
  save_elsewhere(folder.file("turn"), 5 * 16, 2);
  Pager pager(pool_alone(8));
  const std::vector<TokenId> kept = cache_chunks(pager, 3, 1);
  for (uint64_t seed = 3; seed < 8; ++seed) create(pager, 2, seed);
  REQUIRE(pager.stats().free_blocks == 0);
  const auto reader = SnapshotReader::open(folder.file("turn"));
  Known restored{restore(pager, reader), some_tokens(5 * 16, 2)};
  CHECK(
      contains(error_of<CapacityError>(pager, [&] { append(pager, &restored, some_tokens(2, 9)); }),
               "5 of them"));
  CHECK(pager.stats().cached_records == 3);
  CHECK(adoptable(pager, kept) == 3 * 16);
}

PAGER_TEST("a refused pin forgets no cached chunk") {
  const Folder folder;
  save_elsewhere(folder.file("turn"), 10 * 16, 2);
  Pager pager(pool_alone(8));
  cache_chunks(pager, 3, 1);
  create(pager, 4 * 16, 3);
  const auto reader = SnapshotReader::open(folder.file("turn"));
  const SequenceId restored = restore(pager, reader);
  CHECK(contains(error_of<CapacityError>(pager, [&] { pager.pin(restored, 0, 5 * 16); }),
                 "pin: needs 5 blocks"));
  CHECK(pager.stats().cached_records == 3);
  pager.pin(restored, 0, 4 * 16);  // for so many there is room: those that nobody uses go
  CHECK(pager.stats().cached_records == 0);
}

PAGER_TEST("a refused reserve leaves what the running forward was promised") {
  Pager pager(small_options(6, 8));
  const Known sequence = create(pager, 10, 1);
  const auto tokens = some_tokens(10, 2);
  pager.begin(commit_rows(sequence.id, 10, tokens.data(), 10));
  REQUIRE(pager.stats().reserved_chunks == 1);
  CHECK(contains(error_of<CapacityError>(pager, [&] { pager.reserve(sequence.id, 16 * 100); }),
                 "reserve: "));
  CHECK(pager.stats().reserved_chunks == 1);
  pager.abort();
  CHECK(pager.stats().reserved_chunks == 0);
  require_intact(pager, sequence);
}

PAGER_TEST("room that no number of bytes can express is refused as such") {
  for (const int64_t window : {0, 32}) {
    PagerOptions options = small_options(6, 8);
    options.window = window;
    Pager pager(options);
    const Known sequence = create(pager, 40, 1);
    const PagerStats before = pager.stats();
    for (const int64_t tokens : {int64_t{1} << 62, std::numeric_limits<int64_t>::max()}) {
      const std::string message =
          error_of<CapacityError>(pager, [&] { pager.reserve(sequence.id, tokens); });
      if (window > 0) {  // which never holds more than a few chunks at a time
        CHECK(message == "no error");
        pager.reserve(sequence.id, 40);
      } else {
        CHECK(contains(message, "more than 9223372036854775807 bytes"));
        CHECK_FALSE(message.find(" 0 bytes") != std::string::npos);
        CHECK_FALSE(message.find('-') != std::string::npos);
      }
    }
    CHECK(pager.stats().reserved_chunks == before.reserved_chunks);
    require_intact(pager, sequence);
  }
}

}  // namespace
}  // namespace kvpager::pager_test
