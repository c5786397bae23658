// Verifying finds all damage there is, in order, and nothing else.
#include <doctest/doctest.h>

#include <cerrno>
#include <filesystem>

#include "base/fault.h"
#include "kvpager/error.h"
#include "kvpager/snapshot.h"
#include "sample.h"
#include "snapshot/format.h"
#include "stored.h"

namespace kvpager::snapshot_test {
namespace {

using snapshot::kFrontBytes;
using Where = std::vector<std::pair<int64_t, int>>;

Where where(const std::vector<SnapshotDamage>& damage) {
  Where out;
  for (const SnapshotDamage& d : damage) out.emplace_back(d.chunk, d.layer);
  return out;
}

void flip(const std::string& path, size_t at) {
  std::string bytes = read_bytes(path);
  bytes[at] = static_cast<char>(bytes[at] ^ 1);
  write_bytes(path, bytes);
}

// Slices of 5 MiB: a piece is less than a chunk.
Layout huge_slices() {
  Layout layout = large_layout();
  layout.layers = 3;
  layout.kv_heads = 40;
  return layout;
}

TEST_CASE("AllDamageIsListedInOrderByAnyNumberOfThreads") {
  const StoredSample store(make_sample(small_layout(), 21 * 16 + 5));
  flip(store.pack(0), kFrontBytes + 3 * 2048 + 1024);          // chunk 6, layer 1
  flip(store.pack(0), kFrontBytes + 3 * 2048);                 // chunk 6, layer 0
  flip(store.pack(0), kFrontBytes + 11 * 2048 + 160 * 9 + 3);  // the summary of chunk 18
  flip(store.pack(1), kFrontBytes + 9 * 2048 + 2047);          // chunk 19, layer 1
  flip(store.pack(1), kFrontBytes + 10 * 2048);                // the summary of chunk 1
  flip(store.manifest(), kFrontBytes + 1025);                  // the tail, chunk 21, layer 1
  const Where expected = {{1, -1}, {6, 0}, {6, 1}, {18, -1}, {19, 1}, {21, 1}};
  const auto reader = store.open();
  for (const int threads : {1, 2, 3, 64}) {
    const int64_t before = reader->payload_bytes_read();
    CHECK(where(reader->verify(threads, {})) == expected);
    CHECK(reader->payload_bytes_read() - before == 22 * 2048 + 21 * 160);
  }
  const auto damage = reader->verify(1, {});
  CHECK(damage[3].message.find("the summary of chunk 18 (tokens [288, 304))") != std::string::npos);
  CHECK(damage[3].message.find(store.pack(0).substr(store.pack(0).rfind('/'))) !=
        std::string::npos);
}

TEST_CASE("SlicesLargerThanAReadAreVerifiedOneByOneAndSmallChunksManyAtATime") {
  const TemporaryFolder folder;
  for (const Layout& layout : {huge_slices(), large_layout(), small_layout()}) {
    const Sample sample = make_sample(layout, layout.chunk_tokens * 6 + 1);
    write_sample(folder.file("a"), sample);
    CHECK(SnapshotReader::open(folder.file("a"))->verify(2, {}).empty());
    const auto at = [&](int64_t chunk, int layer) {
      return kFrontBytes +
             static_cast<size_t>(chunk * layout.chunk_bytes() + layout.slice_offset(layer) + 7);
    };
    const int last = layout.layers - 1;
    for (const auto& [chunk, layer] : Where{{0, 0}, {3, last}, {6, 0}}) {
      flip(folder.file("a"), at(chunk, layer));
    }
    const auto reader = SnapshotReader::open(folder.file("a"));
    CHECK(where(reader->verify(2, {})) == Where{{0, 0}, {3, last}, {6, 0}});
  }
}

TEST_CASE("DamageInTheFirstAndLastOfEachReadIsFoundAndWhatIsLeftForAShortLastReadToo") {
  const TemporaryFolder folder;
  Layout halves = large_layout();  // slices of half a read: five of them are two reads and a rest
  halves.layers = 5;
  const Layout small = small_layout();  // chunks of 2 KiB: 512 of them are a read
  struct Case {
    Layout layout;
    int64_t chunks;
    Where flipped;
  };
  const Case cases[] = {
      {halves, 2, {{0, 0}, {0, 1}, {0, 2}, {0, 3}, {0, 4}, {1, 4}}},
      {small, 1027, {{0, 0}, {511, 1}, {512, 0}, {1023, 1}, {1024, 0}, {1026, 1}}},
  };
  for (const Case& c : cases) {
    CAPTURE(c.chunks);
    write_sample(folder.file("a"), make_sample(c.layout, c.chunks * c.layout.chunk_tokens));
    for (const auto& [chunk, layer] : c.flipped) {
      flip(folder.file("a"), kFrontBytes + static_cast<size_t>(chunk * c.layout.chunk_bytes() +
                                                               c.layout.slice_offset(layer) + 7));
    }
    const auto reader = SnapshotReader::open(folder.file("a"));
    for (const int threads : {1, 3}) CHECK(where(reader->verify(threads, {})) == c.flipped);
  }
}

TEST_CASE("WhatIsGoneFromAFileThatShrankIsListedSliceBySlice") {
  const TemporaryFolder folder;
  write_sample(folder.file("a"), make_sample(small_layout(), 4 * 16));
  const auto reader = SnapshotReader::open(folder.file("a"));
  std::filesystem::resize_file(folder.file("a"), kFrontBytes + 2 * 2048 + 1400);
  CHECK(where(reader->verify(2, {})) ==
        Where{{0, -1}, {1, -1}, {2, -1}, {2, 1}, {3, -1}, {3, 0}, {3, 1}});
}

TEST_CASE("WhatTheSystemCannotReadIsListedAndTheRestIsVerified") {
  const TemporaryFolder folder;
  write_sample(folder.file("a"), make_sample(small_layout(), 4 * 16));
  const auto reader = SnapshotReader::open(folder.file("a"));
  fault::arm("snapshot.read", 0, EIO);  // a large read fails, each of its parts can be read
  CHECK(reader->verify(1, {}).empty());
  CHECK_FALSE(fault::any_armed);
}

TEST_CASE("ProgressEndsAtTheTotalAndWhatItThrowsEndsTheCall") {
  const TemporaryFolder folder;
  const Sample sample = make_sample(large_layout(), 64 * 30);
  write_sample(folder.file("a"), sample);
  const auto reader = SnapshotReader::open(folder.file("a"));
  const int64_t bytes =
      30 * (large_layout().chunk_bytes() + static_cast<int64_t>(sample.summaries[0].size()));
  for (const int threads : {1, 2}) {
    std::vector<int64_t> seen;
    reader->verify(threads, [&](int64_t done, int64_t total) {
      CHECK(total == bytes);
      seen.push_back(done);
    });
    REQUIRE_FALSE(seen.empty());
    CHECK(std::is_sorted(seen.begin(), seen.end()));
    CHECK(seen.back() == bytes);
  }
  struct Stop {};
  int calls = 0;
  const auto stop = [&](int64_t, int64_t) {
    ++calls;
    throw Stop();
  };
  const int64_t before = reader->payload_bytes_read();
  CHECK_THROWS_AS(reader->verify(1, stop), Stop);
  CHECK(calls == 1);
  CHECK(reader->payload_bytes_read() - before < bytes / 2);
  CHECK_THROWS_AS(reader->verify(3, stop), Stop);
  CHECK_THROWS_AS(reader->verify(0, {}), InvalidArgumentError);
}

TEST_CASE("AnEmptySnapshotHasNothingToVerify") {
  const TemporaryFolder folder;
  write_sample(folder.file("a"), make_sample(small_layout(), 0));
  int calls = 0;
  const auto count = [&](int64_t done, int64_t total) { calls += done == 0 && total == 0 ? 1 : 0; };
  CHECK(SnapshotReader::open(folder.file("a"))->verify(4, count).empty());
  CHECK(calls == 1);
}

}  // namespace
}  // namespace kvpager::snapshot_test
