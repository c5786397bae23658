// A snapshot that rots under a restored sequence: what is damaged is named, the rest stays usable,
// and recomputing the damaged chunk's tokens heals it.
#include <fcntl.h>

#include <memory>

#include "small_pager.h"

namespace kvpager::pager_test {
namespace {

constexpr int64_t kPayloadAt = 4096;

// Flips a bit of a file in place, as a disk would.
void flip(const std::string& path, int64_t offset) {
  const int file = ::open(path.c_str(), O_RDWR);
  REQUIRE(file >= 0);
  unsigned char byte = 0;
  REQUIRE(::pread(file, &byte, 1, offset) == 1);
  byte ^= 4;
  REQUIRE(::pwrite(file, &byte, 1, offset) == 1);
  ::close(file);
}

int64_t payload_at(int64_t chunk, int layer = 0) {
  return kPayloadAt + chunk * kChunkBytes + small_layout().slice_offset(layer) + 100;
}

PagerOptions options_of(int64_t pool, int64_t host, int64_t disk = 0,
                        const std::string& folder = "") {
  return top_k(small_options(pool, host, disk, folder), 20, 16);
}

struct Victim : Saved {
  explicit Victim(int64_t length)
      : Saved(options_of(6, 200), length, 1), expected(probe(pager, known)) {}
  const std::vector<float> expected;
};

Known restore_saved(Pager& pager, const Victim& saved, int64_t upto = -1) {
  return {restore(pager, SnapshotReader::open(saved.path), upto), saved.known.tokens};
}

std::vector<int64_t> damaged(Pager& pager, const Known& known) {
  std::vector<int64_t> chunks;
  for (const ChunkInfo& info : pager.ledger(known.id)) {
    if (info.damaged) chunks.push_back(info.chunk);
  }
  return chunks;
}

// What a runtime does: the tokens of one chunk again, in a fork that ends before it.
void recompute(Pager& pager, const Known& known, int64_t chunk) {
  Known fork = forked(pager, known);
  trim(pager, &fork, chunk * 16);
  append(pager, &fork, cut(known.tokens, chunk * 16, (chunk + 1) * 16));
  pager.destroy_sequence(fork.id);
}

// Probes until nothing is damaged any more; `heal` gets each chunk that was.
template <class Heal>
void heal_all(Pager& pager, const Known& known, const std::vector<float>& expected,
              const Heal& heal) {
  for (;;) {
    try {
      REQUIRE(same_bits(probe(pager, known), expected));
      return;
    } catch (const CorruptSnapshotError&) {
      const std::vector<int64_t> bad = damaged(pager, known);
      REQUIRE_FALSE(bad.empty());
      for (const int64_t chunk : bad) heal(chunk);
    }
  }
}

PAGER_TEST("a damaged chunk is named with its layer, and only what needs it fails") {
  Victim saved(10 * 16 + 3);
  Pager pager(options_of(6, 40));
  const Known restored = restore_saved(pager, saved);
  flip(saved.path, payload_at(4, 1));
  for (int again = 0; again < 2; ++again) {
    try {
      probe(pager, restored);
      FAIL("a damaged chunk was attended to");
    } catch (const CorruptSnapshotError& error) {
      CHECK(error.chunk == 4);
      CHECK(error.layer == 1);
      CHECK(error.start == 64);
      CHECK(error.stop == 80);
      CHECK(contains(error.what(), "tokens [64, 80)"));
    }
    pager.check_invariants();
    CHECK(!pager.forward_running());
    CHECK(damaged(pager, restored) == std::vector<int64_t>{4});
  }
  // What lies before it is as good as ever.
  Known before = forked(pager, restored);
  trim(pager, &before, 64);
  require_intact(pager, before);
  probe(pager, before);
}

PAGER_TEST("recomputing a damaged chunk gives it a home of its own, with the same bits") {
  Folder spill;
  for (const int tiers : {0, 1, 2, 3}) {
    CAPTURE(tiers);
    Victim saved(10 * 16 + 3);
    const bool host = (tiers & 1) != 0, disk = (tiers & 2) != 0;
    // On a device all that a forward may see is in the pool or the host arena.
    const bool pool = tiers == 0 || (on_device() && !host);
    Pager pager(options_of(pool ? 20 : 5,
                           !host         ? 0
                           : on_device() ? 12
                                         : 6,
                           disk ? 40 : 0, disk ? spill.path() : ""));
    const Known restored = restore_saved(pager, saved);
    for (const int64_t chunk : {0, 4, 5}) flip(saved.path, payload_at(chunk));
    int healed = 0;
    heal_all(pager, restored, saved.expected, [&](int64_t chunk) {
      recompute(pager, restored, chunk);
      ++healed;
    });
    CHECK(healed == 3);
    CHECK(pager.stats().chunks_healed == 3);
    for (const ChunkInfo& info : pager.ledger(restored.id)) {
      const bool was_damaged = info.chunk == 0 || info.chunk == 4 || info.chunk == 5;
      CHECK(((info.tiers & kTierSnapshot) != 0) == (info.sealed && !was_damaged));
    }
    pager.evict_all();
    require_intact(pager, restored);
    CHECK(same_bits(probe(pager, restored), saved.expected));
    pager.destroy_sequence(restored.id);
    pager.check_invariants();
  }
}

PAGER_TEST("two sequences that heal the same chunk in one forward heal it once") {
  Victim saved(4 * 16 + 3);
  Pager pager(options_of(12, 40));
  const Known restored = restore_saved(pager, saved);
  flip(saved.path, payload_at(1));
  CHECK_THROWS_AS(probe(pager, restored), CorruptSnapshotError);
  Known forks[2];
  std::vector<RowDescriptor> rows;
  for (Known& fork : forks) {
    fork = {pager.fork(restored.id), restored.tokens};
    trim(pager, &fork, 16);
    append(pager, &fork, cut(saved.known.tokens, 16, 24));
    for (int64_t i = 24; i < 32; ++i) {
      rows.push_back({fork.id, i, saved.known.tokens[static_cast<size_t>(i)], RowKind::kCommit});
    }
  }
  run_forward(pager, rows, saved.known.tokens);
  pager.check_invariants();
  CHECK(pager.stats().chunks_healed == 1);
  CHECK(same_bits(probe(pager, restored), saved.expected));
  for (Known& fork : forks) {
    fork.tokens.assign(saved.known.tokens.begin(), saved.known.tokens.begin() + 32);
    require_intact(pager, fork);
  }
}

PAGER_TEST("a damaged chunk is not handed to anybody as a known prefix") {
  Victim saved(10 * 16);
  Pager pager(options_of(6, 40));
  const Known restored = restore_saved(pager, saved);
  flip(saved.path, payload_at(4));
  CHECK_THROWS_AS(probe(pager, restored), CorruptSnapshotError);
  Known adopter = create(pager);
  CHECK(pager.adopt_prefix(adopter.id, saved.known.tokens) == 64);
  adopter.tokens.assign(saved.known.tokens.begin(), saved.known.tokens.begin() + 64);
  append(pager, &adopter, cut(saved.known.tokens, 64));
  CHECK(damaged(pager, restored).empty());  // whoever computes it heals it for all
  CHECK(same_bits(probe(pager, restored), saved.expected));
}

PAGER_TEST("restoring a sound copy of the file makes a damaged chunk readable again") {
  Victim saved(10 * 16);
  const std::string copy = saved.folder.file("copy");
  {
    const auto reader = SnapshotReader::open(saved.path);
    save(*reader, copy, kFingerprint);
  }
  Pager pager(options_of(6, 40));
  const Known restored = restore_saved(pager, saved);
  flip(saved.path, payload_at(4));
  CHECK_THROWS_AS(probe(pager, restored), CorruptSnapshotError);
  const SequenceId again = restore(pager, copy);
  CHECK(damaged(pager, restored).empty());
  CHECK(same_bits(probe(pager, restored), saved.expected));
  pager.destroy_sequence(again);
  require_intact(pager, restored);
}

// Content of a file as somebody else would have written it: other metadata, chunks or summaries, and
// checksums to match.
struct OtherContent : SnapshotContent {
  explicit OtherContent(const std::string& path)
      : content(SnapshotReader::open(path)), changed(content->meta()) {}
  const SnapshotMeta& meta() const override { return changed; }
  const std::byte* borrow_chunk(int64_t chunk, std::byte* scratch) const override {
    const std::byte* bytes = content->borrow_chunk(chunk, scratch);
    REQUIRE(bytes == scratch);
    // The sign of an element of a key: large enough to be seen in what attends to it.
    if (chunk == other_chunk) scratch[103] ^= std::byte{0x80};
    return bytes;
  }
  void give_back_chunk(int64_t chunk) const override { content->give_back_chunk(chunk); }
  void read_summary(int64_t chunk, std::byte* out) const override {
    content->read_summary(chunk, out);
    if (other_summaries) out[0] ^= std::byte{1};
  }

  std::shared_ptr<SnapshotReader> content;
  SnapshotMeta changed;
  int64_t other_chunk = -1;
  bool other_summaries = false;
};

PAGER_TEST("a file with other bytes under the same names heals nothing and is itself restored") {
  Victim saved(10 * 16);
  const std::string other = saved.folder.file("other");
  OtherContent content(saved.path);
  content.other_chunk = 4;
  content.changed.chunks[4].slice_checksum = {};
  save(content, other, kFingerprint);
  Pager pager(options_of(6, 40));
  const Known restored = restore_saved(pager, saved);
  flip(saved.path, payload_at(4));
  CHECK_THROWS_AS(probe(pager, restored), CorruptSnapshotError);
  const Known again{restore(pager, other), saved.known.tokens};
  pager.check_invariants();
  CHECK(damaged(pager, restored) == std::vector<int64_t>{4});
  CHECK_THROWS_AS(probe(pager, restored), CorruptSnapshotError);
  CHECK_FALSE(same_bits(probe(pager, again), saved.expected));
  CHECK(damaged(pager, again).empty());
  pager.destroy_sequence(again.id);
  recompute(pager, restored, 4);
  CHECK(same_bits(probe(pager, restored), saved.expected));
}

PAGER_TEST("summaries of a scorer that there is no more are refused with the one that there is") {
  Victim saved(10 * 16);
  const std::string other = saved.folder.file("other");
  OtherContent content(saved.path);
  content.changed.scorer = "minmax";
  save(content, other, kFingerprint);
  Pager pager(options_of(6, 40));
  const std::string message =
      error_of<FingerprintMismatchError>(pager, [&] { restore(pager, other); });
  CHECK(message.find("scorer: ") == 0);
  CHECK(message.find("'minmax'") != std::string::npos);
  CHECK(message.find("this version has 'bits2'") != std::string::npos);
}

// What only the snapshot's readers and what is shared with them keep alive.
struct Held {
  explicit Held(const std::shared_ptr<SnapshotReader>& reader)
      : file(reader), metadata(reader->meta().tokens.watch()) {}
  bool nothing() const { return file.expired() && metadata.expired(); }
  std::weak_ptr<SnapshotReader> file;
  std::weak_ptr<const TokenId> metadata;
};

PAGER_TEST("chunks that were computed anew hold on to nothing of the snapshot that rotted") {
  Victim saved(4 * 16);
  Pager pager(options_of(12, 40));
  std::shared_ptr<SnapshotReader> reader = SnapshotReader::open(saved.path);
  const Held held(reader);
  const Known restored{restore(pager, std::move(reader)), saved.known.tokens};
  for (int64_t chunk = 0; chunk < 4; ++chunk) flip(saved.path, payload_at(chunk));
  heal_all(pager, restored, saved.expected,
           [&](int64_t chunk) { recompute(pager, restored, chunk); });
  CHECK(pager.stats().chunks_healed == 4);
  CHECK(held.file.expired());
  CHECK_FALSE(held.nothing());  // the sequence's token ids are the snapshot's
  pager.destroy_sequence(restored.id);
  CHECK(held.nothing());
  const Known adopter = create(pager);
  CHECK(pager.adopt_prefix(adopter.id, saved.known.tokens) == 64);
  require_intact(pager, {adopter.id, saved.known.tokens});
}

PAGER_TEST("chunks that are read from a sound copy hold on to nothing of the file that rotted") {
  Victim saved(4 * 16);
  const std::string copy = saved.folder.file("copy");
  save(*SnapshotReader::open(saved.path), copy, kFingerprint);
  Pager pager(options_of(12, 40));
  std::shared_ptr<SnapshotReader> reader = SnapshotReader::open(saved.path);
  const Held held(reader);
  const Known restored{restore(pager, std::move(reader)), saved.known.tokens};
  for (int64_t chunk = 0; chunk < 4; ++chunk) flip(saved.path, payload_at(chunk));
  Known again;
  heal_all(pager, restored, saved.expected,
           [&](int64_t) { again = {restore(pager, copy), saved.known.tokens}; });
  pager.destroy_sequence(restored.id);
  CHECK(held.nothing());
  require_intact(pager, again);
}

PAGER_TEST("a damaged summary is made again from its chunk, and proved by its checksum") {
  Victim saved(10 * 16 + 3);
  const auto reader = SnapshotReader::open(saved.path);
  const int64_t each = reader->meta().summary_bytes_per_chunk();
  const int64_t summaries_at = kPayloadAt + 11 * kChunkBytes;
  for (const int64_t chunk : {0, 7}) flip(saved.path, summaries_at + chunk * each + 5);
  {
    Pager pager(options_of(6, 40));
    const Known restored = restore_saved(pager, saved);
    CHECK(same_bits(probe(pager, restored), saved.expected));
    CHECK(pager.stats().summaries_rebuilt == 2);
    CHECK(damaged(pager, restored).empty());
  }
  flip(saved.path, payload_at(7));
  Pager pager(options_of(6, 40));
  const Known restored = restore_saved(pager, saved);
  CHECK_THROWS_AS(probe(pager, restored), CorruptSnapshotError);
  CHECK(damaged(pager, restored) == std::vector<int64_t>{7});
  recompute(pager, restored, 7);
  CHECK(same_bits(probe(pager, restored), saved.expected));
}

PAGER_TEST("a summary that cannot be made again to the bit is not replaced by another one") {
  Victim saved(10 * 16 + 3);
  {
    OtherContent content(saved.path);
    content.other_summaries = true;
    for (SnapshotChunk& chunk : content.changed.chunks) chunk.summary_checksum = 0;
    save(content, saved.path, kFingerprint);
  }
  flip(saved.path, kPayloadAt + 11 * kChunkBytes + 5);
  Pager pager(options_of(6, 40));
  const Known restored = restore_saved(pager, saved);
  CHECK(
      contains(error_of<CorruptSnapshotError>(pager, [&] { probe(pager, restored); }), "summary"));
  CHECK(pager.stats().summaries_rebuilt == 0);
}

PAGER_TEST(
    "a damaged tail leaves the pager as it was, and what is whole can be restored without it") {
  Victim saved(3 * 16 + 3);
  flip(saved.path, payload_at(3));
  Pager pager(options_of(6, 40));
  try {
    restore_saved(pager, saved);
    FAIL("a damaged tail was restored");
  } catch (const CorruptSnapshotError& error) {
    CHECK(error.chunk == 3);
  }
  pager.check_invariants();
  CHECK(pager.stats().sequences == 0);
  Known whole = restore_saved(pager, saved, 48);
  whole.tokens.resize(48);
  append(pager, &whole, cut(saved.known.tokens, 48));
  CHECK(same_bits(probe(pager, whole), saved.expected));
}

PAGER_TEST("any first part of a snapshot can be restored, with the same bits") {
  Victim saved(5 * 16 + 3);
  for (const int64_t upto : {0, 1, 15, 16, 17, 48, 70, 80, 81, 83}) {
    CAPTURE(upto);
    Pager pager(options_of(6, 40));
    Known part = restore_saved(pager, saved, upto);
    part.tokens.resize(static_cast<size_t>(upto));
    require_intact(pager, part);
    append(pager, &part, cut(saved.known.tokens, upto));
    CHECK(same_bits(probe(pager, part), saved.expected));
  }
  Pager pager(options_of(6, 40));
  CHECK(contains(error_of<InvalidArgumentError>(pager, [&] { restore_saved(pager, saved, 84); }),
                 "expected 0 to 83"));
}

}  // namespace
}  // namespace kvpager::pager_test
