// Windowed layers: what is behind the window is let go, its room is promised to others, and nothing
// else changes.
#include <map>

#include "stress.h"

namespace kvpager::pager_test {
namespace {

constexpr int64_t kWindow = 40;
constexpr int64_t kLength = 20 * 16 + 5;

PagerOptions windowed(int64_t pool, int64_t host, int64_t disk = 0, const std::string& folder = "",
                      int64_t rewind = 0) {
  PagerOptions options = small_options(pool, host, disk, folder);
  options.window = kWindow;
  options.rewind = rewind;
  return options;
}

// The most sealed chunks a sequence of windowed() holds at a time.
int64_t most(int64_t rewind = 0) { return (kWindow + rewind + kRows) / 16 + 1; }

int64_t behind(int64_t length, int64_t rewind = 0) {
  return std::max<int64_t>(0, length - kWindow - rewind) / 16 * 16;
}

// Outputs of the same text, forward by forward, by a pager that keeps all of it.
std::map<int64_t, std::vector<float>> kept_outputs() {
  PagerOptions options = windowed(40, 40);
  options.rewind = kLength;
  Pager pager(options);
  Known sequence = create(pager);
  const std::vector<TokenId> text = some_tokens(kLength, 1);
  std::map<int64_t, std::vector<float>> outputs;
  for (int64_t at = 0; at < kLength; at += kRows) {
    const int64_t stop = std::min(at + kRows, kLength);
    outputs[at] = append(pager, &sequence, cut(text, at, stop));
  }
  REQUIRE(pager.released(sequence.id) == 0);
  return outputs;
}

struct Seen {
  std::vector<std::vector<int64_t>> chunks;
  std::vector<TokenId> tokens;
  int64_t released, earliest, records, reserved, homes, free;
};

Seen look(const Pager& pager, SequenceId id) {
  Seen seen;
  for (const ChunkInfo& info : pager.ledger(id)) {
    seen.chunks.push_back({info.chunk, info.start, info.stop, info.sealed, info.released,
                           info.tiers, info.block.value(), info.references, info.pins});
  }
  const PagerStats stats = pager.stats();
  seen.tokens = pager.tokens(id);
  seen.released = pager.released(id);
  seen.earliest = pager.earliest_trim(id);
  seen.records = stats.records;
  seen.reserved = stats.reserved_chunks;
  seen.homes = stats.host_bytes_used + stats.disk_bytes_used;
  seen.free = stats.free_blocks;
  return seen;
}

bool same(const Seen& a, const Seen& b) {
  return a.chunks == b.chunks && a.tokens == b.tokens && a.released == b.released &&
         a.earliest == b.earliest && a.records == b.records && a.reserved == b.reserved &&
         a.homes == b.homes && a.free == b.free;
}

PAGER_TEST("outputs are those of a pager that keeps all, in every tier") {
  const auto expected = kept_outputs();
  const Folder folder;
  const int64_t pools[4][3] = {{9, 9, 0}, {9, 60, 0}, {9, 4, 9}, {30, 0, 0}};
  for (const auto& [pool, host, disk] : pools) {
    CAPTURE(pool);
    CAPTURE(host);
    Pager pager(windowed(pool, host, disk, disk > 0 ? folder.path() : ""));
    Known sequence = create(pager);
    const std::vector<TokenId> text = some_tokens(kLength, 1);
    for (const auto& [at, outputs] : expected) {
      if (at % 48 == 0) pager.evict_all();
      const int64_t stop = std::min<int64_t>(at + kRows, kLength);
      CHECK(same_bits(append(pager, &sequence, cut(text, at, stop)), outputs));
      CHECK(pager.released(sequence.id) == behind(stop));
    }
    require_intact(pager, sequence);
    CHECK(pager.stats().chunks_released == behind(kLength) / 16);
  }
}

PAGER_TEST("a trim goes back to every position that the window and the rewind leave, or to none" *
           doctest::test_suite("long")) {
  for (const int64_t rewind : {int64_t{0}, int64_t{16}, int64_t{50}}) {
    CAPTURE(rewind);
    for (int64_t position = 0; position <= 7 * 16 + 3; ++position) {
      CAPTURE(position);
      Pager pager(windowed(12, 24, 0, "", rewind));
      Known sequence = create(pager, 7 * 16 + 3, 1);
      const int64_t earliest = pager.earliest_trim(sequence.id);
      CHECK(earliest <= 7 * 16 + 3 - rewind);
      if (position > 0 && position < earliest) {
        const Seen before = look(pager, sequence.id);
        CHECK(contains(
            error_of<InvalidArgumentError>(pager, [&] { pager.trim(sequence.id, position); }),
            str("expected 0 or ", earliest, " to ", 7 * 16 + 3)));
        CHECK(same(look(pager, sequence.id), before));
      } else {
        trim(pager, &sequence, position);
        CHECK(pager.released(sequence.id) == (position == 0 ? 0 : behind(7 * 16 + 3, rewind)));
      }
      require_intact(pager, sequence);
      append(pager, &sequence, some_tokens(30, 2));
      require_intact(pager, sequence);
    }
  }
}

PAGER_TEST("room is promised for what a sequence holds at a time, and the promise is kept") {
  const Folder folder;
  const int64_t tiers[3][3] = {{9, most(), 0}, {9, 2, most() - 2}, {most() + 2, 0, 0}};
  for (const auto& [pool, host, disk] : tiers) {
    CAPTURE(pool);
    if (on_device() && host == 0) continue;  // a device keeps its homes on the host
    Pager pager(windowed(pool, host, disk, disk > 0 ? folder.path() : ""));
    Known sequence = create(pager);
    pager.reserve(sequence.id, int64_t{1} << 30);
    CHECK(pager.stats().reserved_chunks == most());
    CHECK(pager.stats().home_chunks == most());
    const std::vector<TokenId> text = some_tokens(50 * 16, 1);
    for (int64_t at = 0; at < 50 * 16; at += 7) {
      const int64_t stop = std::min<int64_t>(at + 7, 50 * 16);
      append(pager, &sequence, cut(text, at, stop));
    }
    require_intact(pager, sequence);
    Known other = create(pager);
    CHECK_THROWS_AS(pager.reserve(other.id, 16), CapacityError);
    pager.reserve(sequence.id, 50 * 16);
    CHECK(pager.stats().reserved_chunks == 0);
    pager.reserve(other.id, 16);
  }
}

PAGER_TEST("two sequences that part keep their promises; a fork that would break one is refused") {
  Pager tight(windowed(12, most() + 1));
  Known parent = create(tight);
  tight.reserve(parent.id, 40 * 16);
  append(tight, &parent, some_tokens(9 * 16, 1));
  const Seen before = look(tight, parent.id);
  CHECK(contains(error_of<CapacityError>(tight, [&] { tight.fork(parent.id); }), "fork: "));
  CHECK(same(look(tight, parent.id), before));
  append(tight, &parent, some_tokens(20 * 16, 2));
  require_intact(tight, parent);

  Pager roomy(windowed(12, 2 * most()));
  parent = create(roomy);
  roomy.reserve(parent.id, 40 * 16);
  append(roomy, &parent, some_tokens(9 * 16, 1));
  Known child = forked(roomy, parent);
  append(roomy, &parent, some_tokens(20 * 16, 2));
  require_intact(roomy, parent);
  require_intact(roomy, child);
  CHECK(roomy.released(child.id) == behind(9 * 16));
  append(roomy, &child, some_tokens(20 * 16, 3));
  require_intact(roomy, child);
}

PAGER_TEST("what a sequence lets go is cached, found while it is there, and gives way to others") {
  Pager pager(windowed(9, 12));
  Known sequence = create(pager, kLength, 1);
  const PagerStats stats = pager.stats();
  CHECK(stats.cached_records > 0);
  CHECK(stats.chunks_forgotten > 0);
  Known twin = create(pager);
  const int64_t adopted = pager.adopt_prefix(twin.id, sequence.tokens);
  CHECK(adopted == kLength / 16 * 16);
  CHECK(pager.released(twin.id) == behind(adopted));
  twin.tokens = cut(sequence.tokens, 0, adopted);
  require_intact(pager, twin);
  Known others = create(pager, 6 * 16, 8);
  require_intact(pager, others);
}

PAGER_TEST("a pinned chunk and all that follow it stay until it is unpinned") {
  Pager pager(windowed(20, 40));
  Known sequence = create(pager, 4 * 16, 1);
  const int64_t held = pager.released(sequence.id);
  const PinId first = pager.pin(sequence.id, held, held + 1);
  const PinId last = pager.pin(sequence.id, 4 * 16 - 1, 4 * 16);
  append(pager, &sequence, some_tokens(10 * 16, 2));
  CHECK(pager.released(sequence.id) == held);
  pager.unpin(first);
  CHECK(pager.released(sequence.id) == 3 * 16);
  require_intact(pager, sequence);
  append(pager, &sequence, some_tokens(16, 3));
  CHECK(pager.released(sequence.id) == 3 * 16);
  pager.unpin(last);
  CHECK(pager.released(sequence.id) == behind(15 * 16));
  require_intact(pager, sequence);
}

PAGER_TEST("a chunk that is pinned while a forward runs is let go after it") {
  Pager pager(windowed(20, 40));
  Known sequence = create(pager, 4 * 16, 1);
  const int64_t held = pager.released(sequence.id);
  const PinId pin = pager.pin(sequence.id, held, held + 1);
  append(pager, &sequence, some_tokens(9 * 16, 2));
  const std::vector<TokenId> more = some_tokens(5, 3);
  const auto length = static_cast<int64_t>(sequence.tokens.size());
  const auto rows = commit_rows(sequence.id, length, more.data(), 5);
  sequence = sequence.with(more);
  pager.begin(rows);
  pager.unpin(pin);
  CHECK(pager.released(sequence.id) == held);
  run_layers(pager, rows, sequence.tokens);
  pager.commit_all();
  CHECK(pager.released(sequence.id) == behind(length + 5));
  require_intact(pager, sequence);
}

PAGER_TEST("an aborted forward, and rows that were not accepted, let go of nothing") {
  Pager pager(windowed(12, 24));
  Known sequence = create(pager, 6 * 16 + 7, 1);
  const int64_t held = pager.released(sequence.id);
  const std::vector<TokenId> more = some_tokens(kRows, 2);
  const std::vector<TokenId> all = joined(sequence.tokens, more);
  const auto rows = commit_rows(sequence.id, 6 * 16 + 7, more.data(), kRows);
  pager.begin(rows);
  run_layers(pager, rows, all);
  pager.abort();
  CHECK(pager.released(sequence.id) == held);
  pager.begin(rows);
  run_layers(pager, rows, all);
  pager.commit({sequence.id}, {0});
  CHECK(pager.released(sequence.id) == held);
  require_intact(pager, sequence);
}

PAGER_TEST("a frozen sequence keeps what it had; a snapshot of it goes on as it would have") {
  const auto expected = kept_outputs();
  const Folder folder;
  Pager pager(windowed(12, 24));
  const std::vector<TokenId> text = some_tokens(kLength, 1);
  Known sequence = create(pager);
  append(pager, &sequence, cut(text, 0, 12 * 16));
  const auto frozen = pager.freeze(sequence.id);
  const int64_t released = pager.released(sequence.id);
  const ReleasedText before = frozen->meta().before;
  CHECK(before.tokens == cut(text, 0, released));
  CHECK(before.provenance == std::array<int64_t, 3>{released / 16, 0, 0});
  CHECK(before.window == kWindow);
  append(pager, &sequence, cut(text, 12 * 16));
  save(*frozen, folder.file("turn"), kFingerprint);

  Pager other(windowed(9, 12));
  const auto reader = SnapshotReader::open(folder.file("turn"));
  Known restored{restore(other, reader, -1, before), cut(text, 0, 12 * 16)};
  CHECK(other.released(restored.id) == released);
  require_intact(other, restored);
  for (int64_t at = 12 * 16; at < kLength; at += kRows) {
    const int64_t stop = std::min(at + kRows, kLength);
    const auto outputs = append(other, &restored, cut(text, at, stop));
    CHECK(same_bits(outputs, expected.at(at)));
  }
  require_intact(other, restored);

  std::vector<ReleasedText> wrong(5, before);
  wrong[0].tokens.pop_back();
  wrong[1].provenance[0] += 1;
  wrong[2].provenance = {-1, released / 16 + 1, 0};
  wrong[3].tokens[3] = -1;
  wrong[4].provenance = {int64_t{1} << 62, int64_t{1} << 62, 0};
  for (const ReleasedText& one : wrong) {
    CHECK(contains(error_of<InvalidArgumentError>(other, [&] { restore(other, reader, -1, one); }),
                   "released tokens"));
  }
  require_intact(other, restored);
}

PAGER_TEST("a frozen sequence is sound wherever its sealed chunks end") {
  for (int64_t length = 5 * 16; length <= 7 * 16; ++length) {
    CAPTURE(length);
    Pager pager(windowed(12, 24));
    const Known sequence = create(pager, length, 1);
    const auto frozen = pager.freeze(sequence.id);
    pager.check_invariants();
    const SnapshotMeta& meta = frozen->meta();
    const auto held = static_cast<int64_t>(meta.tokens.size());
    CHECK(held == length - pager.released(sequence.id));
    CHECK(static_cast<int64_t>(meta.chunks.size()) == (held + 15) / 16);
  }
}

PAGER_TEST("a life with a window does not depend on the pool, and keeps within it" *
           doctest::test_suite("long")) {
  const Folder folder;
  const std::string sample = folder.file("sample");
  {
    Pager pager(small_options(20, 20));
    const Known known = create(pager, 100, 77);
    save(pager, known.id, sample, pager.options().namespace_key);
  }
  for (uint64_t seed = 1; seed <= 8; ++seed) {
    CAPTURE(seed);
    PagerOptions small = windowed(16, 30, 40, folder.path(), static_cast<int64_t>(seed % 3) * 16);
    small.recall_chunks = 4;
    if (seed == 8) small.window = 1;  // no row sees another one's keys
    PagerOptions large = small;
    large.pool_blocks = 80;
    large.host_bytes = 80 * kChunkBytes;
    if (seed % 2 == 0) {
      for (PagerOptions* options : {&small, &large}) {
        options->selection.kind = Selection::Kind::kTopK;
        options->selection.chunks = 1;
        options->selection.recent = 16;
      }
    }
    Life one(small, seed, sample);
    Life two(large, seed, sample);
    CHECK(same_trace(one.run(80), two.run(80)));
    one.pager().check_invariants();
    CHECK(one.pager().stats().chunks_released > 0);
  }
}

PAGER_TEST("shares of attention are told of what is held, wherever they are computed") {
  std::vector<std::vector<double>> scores;
  for (const std::string& name : {std::string("cpu"), test_device()}) {
    const OnDevice on(name);
    for (const Selection::Kind kind : {Selection::Kind::kDense, Selection::Kind::kTopK}) {
      PagerOptions options = windowed(12, 24);
      options.selection.kind = kind;
      options.selection.chunks = 2;
      Pager pager(options);
      const Known sequence = create(pager, kLength, 1);
      std::vector<double>& told = scores.emplace_back();
      double sum = 0;
      for (const ChunkInfo& info : pager.ledger(sequence.id)) {
        told.push_back(info.qk_score);
        sum += info.qk_score;
        if (info.released) CHECK(info.qk_score == 0);
      }
      CHECK(sum > 0.3);
      CHECK(sum < 1.01);
    }
  }
  for (size_t kind = 0; kind < 2; ++kind) {
    for (size_t i = 0; i < scores[kind].size(); ++i) {
      CHECK(std::abs(scores[kind][i] - scores[kind + 2][i]) < 1e-4);
    }
  }
}

TEST_CASE("a text of a million tokens is kept in books of a bounded length" *
          doctest::test_suite("long")) {
  PagerOptions options = windowed(most() + 2, most());
  options.device = "meta";
  options.poison = false;
  Pager pager(options);
  const SequenceId id = pager.create_sequence("");
  pager.reserve(id, 1 << 20);
  for (int64_t at = 0; at < (1 << 20); at += kRows) {
    pager.begin({RowSpan{id, at, kRows, RowKind::kCommit}}, some_tokens(kRows, 3));
    pager.mark_replayed(pager.generation());
    pager.commit_all();
  }
  CHECK(pager.length(id) == 1 << 20);
  CHECK(pager.released(id) == behind(1 << 20));
  CHECK(pager.stats().records <= most() + 1);
  pager.check_invariants();
}

TEST_CASE("a window or rewind out of range is refused") {
  for (const int64_t tokens : {int64_t{-1}, (int64_t{1} << 40) + 1}) {
    PagerOptions options = small_options(6, 6);
    options.window = tokens;
    CHECK_THROWS_AS(Pager pager(options), InvalidArgumentError);
    options.window = kWindow;
    options.rewind = tokens;
    CHECK_THROWS_AS(Pager pager(options), InvalidArgumentError);
  }
}

}  // namespace
}  // namespace kvpager::pager_test
