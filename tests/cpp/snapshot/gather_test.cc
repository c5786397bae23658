// A snapshot can be put together from sealed chunks of others; it is the one that would have been
// saved of these tokens.
#include <doctest/doctest.h>

#include <cstring>

#include "kvpager/error.h"
#include "kvpager/snapshot.h"
#include "sample.h"
#include "stored.h"

namespace kvpager::snapshot_test {
namespace {

using Chunks = std::vector<std::pair<std::shared_ptr<SnapshotReader>, int64_t>>;

TEST_CASE("WhatIsGatheredFromPacksIsThePrefixOfTheSnapshotTheyWereSavedFrom") {
  const StoredSample store;
  const std::shared_ptr<SnapshotReader> packs[] = {SnapshotReader::open(store.pack(0)),
                                                   SnapshotReader::open(store.pack(1))};
  Chunks chunks;
  for (int64_t c = 0; c < 5; ++c) chunks.emplace_back(packs[c % 2], c / 2);
  const auto gathered = SnapshotReader::gather(chunks, "the prefix");

  const Sample expected = part_of(store.sample, {0, 1, 2, 3, 4});
  const TemporaryFolder folder;
  write_sample(folder.file("a"), expected);
  const auto whole = SnapshotReader::open(folder.file("a"));
  CHECK(gathered->path() == "the prefix");
  CHECK(gathered->meta().tokens == expected.meta.tokens);
  CHECK(gathered->meta().chunks.size() == 5);
  CHECK(gathered->meta().sealed_chunks() == 5);
  CHECK(gathered->meta().fingerprint == store.sample.meta.fingerprint);
  CHECK(gathered->meta().session == "{}");
  CHECK(gathered->meta().hints.qk_score.empty());
  CHECK(gathered->meta().hints.last_use.empty());
  CHECK(gathered->meta().packs.empty());
  CHECK(gathered->logical_digest() == whole->logical_digest());
  const Sample read = read_all(*gathered);
  CHECK(read.payload == expected.payload);
  CHECK(read.summaries == expected.summaries);
  CHECK(gathered->verify(2, {}).empty());
}

TEST_CASE("ChunksCanBeGatheredFromManifestsFilesAndGatheredOnesAndTwice") {
  const StoredSample store;
  const auto manifest = store.open();
  const auto whole = SnapshotReader::open(store.self_contained());
  const auto first = SnapshotReader::gather({{manifest, 2}, {whole, 3}}, "first");
  const auto second =
      SnapshotReader::gather({{first, 1}, {manifest, 6}, {first, 0}, {first, 0}}, "");
  const Sample read = read_all(*second);
  const size_t expected[] = {3, 6, 2, 2};
  for (size_t i = 0; i < 4; ++i) {
    CHECK(read.payload[i] == store.sample.payload[expected[i]]);
    CHECK(read.summaries[i] == store.sample.summaries[expected[i]]);
    CHECK(std::memcmp(read.meta.tokens.data() + 16 * i,
                      store.sample.meta.tokens.data() + 16 * expected[i], 64) == 0);
  }
  CHECK(second->verify(1, {}).empty());
}

TEST_CASE("ChunksWithNeighbouringNumbersInDifferentFilesAreNoNeighbours") {
  const StoredSample store;
  const auto a = SnapshotReader::open(store.pack(0));
  const auto b = SnapshotReader::open(store.pack(1));
  const auto gathered = SnapshotReader::gather({{a, 0}, {b, 1}, {a, 2}}, "g");
  CHECK(gathered->verify(1, {}).empty());
  CHECK(SnapshotReader::gather({{a, 0}, {b, 1}}, "two")->verify(1, {}).empty());
  const Sample read = read_all(*gathered);
  CHECK(read.payload[1] == store.sample.payload[3]);
  CHECK(read.summaries[1] == store.sample.summaries[3]);
  CHECK(read.summaries[2] == store.sample.summaries[4]);
}

TEST_CASE("AGatheredSnapshotOutlivesTheReadersItCameFrom") {
  const StoredSample store;
  std::shared_ptr<SnapshotReader> gathered;
  {
    const auto manifest = store.open();
    gathered = SnapshotReader::gather({{manifest, 0}, {manifest, 1}}, "g");
  }
  std::vector<std::byte> out(2048);
  gathered->read_chunk(1, out.data());
  CHECK(out == store.sample.payload[1]);
}

TEST_CASE("DamageOfAGatheredChunkNamesItsPlaceHereAndItsFile") {
  const StoredSample store;
  std::string bytes = read_bytes(store.pack(1));
  bytes[4096 + 2048] ^= 1;
  write_bytes(store.pack(1), bytes);
  const auto pack = SnapshotReader::open(store.pack(1));
  const auto gathered = SnapshotReader::gather({{pack, 0}, {pack, 2}, {pack, 1}}, "the prefix");
  std::vector<std::byte> out(2048);
  gathered->read_chunk(1, out.data());
  try {
    gathered->read_chunk(2, out.data());
    FAIL("a damaged chunk was read");
  } catch (const CorruptSnapshotError& e) {
    const std::string message = e.what();
    CHECK(e.chunk == 2);
    CHECK(e.layer == 0);
    CHECK(message.find("the prefix: ") == 0);
    CHECK(message.find("chunk 2 (tokens [32, 48)), layer 0 (chunk 1 of " + store.pack(1)) !=
          std::string::npos);
  }
}

TEST_CASE("WhatCannotBeOneSnapshotIsNotGathered") {
  const StoredSample store;
  const TemporaryFolder folder;
  const auto pack = SnapshotReader::open(store.pack(0));
  const auto refused = [&](const Chunks& chunks) {
    CHECK_THROWS_AS(SnapshotReader::gather(chunks, "g"), InvalidArgumentError);
  };
  refused({});
  refused({{nullptr, 0}});
  refused({{pack, -1}});
  refused({{pack, 4}});
  refused({{pack, 0}, {store.open(), 7}});  // a tail
  const auto other = [&](const Sample& sample) {
    write_sample(folder.file("other"), sample);
    return SnapshotReader::open(folder.file("other"));
  };
  Layout layout = small_layout();
  layout.v_dtype = DType::kFloat16;
  refused({{pack, 0}, {other(make_sample(layout, 8)), 0}});
  refused({{pack, 0}, {other(make_sample(small_layout(), 16, 48)), 0}});
  Sample scorer = make_sample(small_layout(), 16);
  scorer.meta.scorer = "mean";
  refused({{pack, 0}, {other(scorer), 0}});
  Sample fingerprint = make_sample(small_layout(), 16);
  fingerprint.meta.fingerprint = "{}";
  const auto gathered = SnapshotReader::gather({{pack, 0}, {other(fingerprint), 0}}, "g");
  CHECK(gathered->meta().fingerprint == store.sample.meta.fingerprint);
}

}  // namespace
}  // namespace kvpager::snapshot_test
