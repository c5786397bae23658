// What is written is what is read, and what is read can be written again to the byte.
#include <doctest/doctest.h>

#include <atomic>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <functional>
#include <random>
#include <thread>

#include "base/fault.h"
#include "kvpager/error.h"
#include "kvpager/snapshot.h"
#include "reseal.h"
#include "sample.h"
#include "stored.h"

namespace kvpager::snapshot_test {
namespace {

std::vector<uint64_t> bits(const std::vector<double>& values) {
  std::vector<uint64_t> out;
  for (const double value : values) {
    out.emplace_back();
    std::memcpy(&out.back(), &value, sizeof(value));
  }
  return out;
}

void check_equal(const Sample& a, const Sample& b) {
  CHECK(a.meta.layout == b.meta.layout);
  CHECK(a.meta.scorer == b.meta.scorer);
  CHECK(a.meta.summary_page_bytes == b.meta.summary_page_bytes);
  CHECK(a.meta.fingerprint == b.meta.fingerprint);
  CHECK(a.meta.session == b.meta.session);
  CHECK(a.meta.tokens == b.meta.tokens);
  REQUIRE(a.meta.chunks.size() == b.meta.chunks.size());
  for (size_t c = 0; c < a.meta.chunks.size(); ++c) {
    CHECK(a.meta.chunks[c].valid == b.meta.chunks[c].valid);
    CHECK(a.meta.chunks[c].provenance == b.meta.chunks[c].provenance);
    CHECK(a.meta.chunks[c].chain_hash == b.meta.chunks[c].chain_hash);
    CHECK(a.meta.chunks[c].slice_checksum == b.meta.chunks[c].slice_checksum);
  }
  CHECK(bits(a.meta.hints.qk_score) == bits(b.meta.hints.qk_score));
  CHECK(a.meta.hints.last_use == b.meta.hints.last_use);
  CHECK(a.meta.unknown == b.meta.unknown);
  CHECK(a.payload == b.payload);
  CHECK(a.summaries == b.summaries);
}

Hash128 digest_of(const TemporaryFolder& folder, const Sample& sample) {
  write_sample(folder.file("digest"), sample);
  return SnapshotReader::open(folder.file("digest"))->logical_digest();
}

TEST_CASE("EverythingWrittenIsReadBack") {
  const TemporaryFolder folder;
  const Sample sample = small_sample();
  const int64_t bytes = write_sample(folder.file("a"), sample);
  CHECK(bytes == static_cast<int64_t>(read_bytes(folder.file("a")).size()));
  CHECK(folder.names() == std::vector<std::string>{"a"});
  const auto reader = SnapshotReader::open(folder.file("a"));
  CHECK(reader->path() == folder.file("a"));
  check_equal(read_all(*reader), sample);
}

TEST_CASE("WritingWhatWasReadGivesTheSameBytesForEveryTailAndShape") {
  const TemporaryFolder folder;
  const auto rewritten_equals = [&](const Sample& sample) {
    write_sample(folder.file("a"), sample);
    write_sample(folder.file("b"), read_all(*SnapshotReader::open(folder.file("a"))));
    CHECK(read_bytes(folder.file("a")) == read_bytes(folder.file("b")));
  };
  rewritten_equals(small_sample());
  rewritten_equals(make_sample(large_layout(), 64 * 3 + 1));
  for (int64_t tokens = 0; tokens <= 25; ++tokens) {
    rewritten_equals(make_sample(small_layout(), tokens));
    rewritten_equals(make_sample(small_layout(), tokens, 0));
    rewritten_equals(make_sample(small_layout(), tokens, 3));
  }
  Sample bare = make_sample(small_layout(), 17);
  bare.meta.fingerprint.clear();
  bare.meta.session.clear();
  bare.meta.scorer.clear();
  rewritten_equals(bare);
  for (const bool scores : {false, true}) {
    Sample hints = make_sample(small_layout(), 17);
    if (scores) hints.meta.hints.qk_score = {1.0, 2.0};
    if (!scores) hints.meta.hints.last_use = {1, 2};
    rewritten_equals(hints);
  }
}

TEST_CASE("GoldenFilesAreReadAndWrittenAgainToTheByte") {
  const std::string here = __FILE__;
  const std::string golden = here.substr(0, here.rfind("cpp/snapshot/")) + "golden/";
  const TemporaryFolder folder;
  int files = 0;
  for (const auto& entry : std::filesystem::recursive_directory_iterator(golden)) {
    if (entry.path().extension() != ".kvsnap") continue;
    const auto reader = SnapshotReader::open(entry.path().string());
    const SnapshotPacks& packs = reader->meta().packs;
    const Sample sample = read_all(*reader);
    if (packs.empty()) {
      write_sample(folder.file("again"), sample);
    } else {
      write_manifest(folder.file("again"), sample, packs);
    }
    CHECK((read_bytes(folder.file("again")) == read_bytes(entry.path().string())));
    CHECK(reader->verify(1, {}).empty());
    ++files;
  }
  CHECK(files == 6);
}

TEST_CASE("ALayoutWithCodesSaysWhatIsRotatedAndWhichLayersAreFloats") {
  const TemporaryFolder folder;
  const Sample sample = make_sample(mixed_layout(), 3 * 16 + 5);
  write_sample(folder.file("a"), sample);
  const auto reader = SnapshotReader::open(folder.file("a"));
  check_equal(read_all(*reader), sample);
  CHECK(reader->verify(2, {}).empty());
  const Layout& layout = reader->meta().layout;
  for (int64_t c = 0; c < 4; ++c) {
    for (int layer = 0; layer < layout.layers; ++layer) {
      std::vector<std::byte> slice(static_cast<size_t>(layout.slice_bytes(layer)));
      reader->read_slice(c, layer, slice.data());
      CHECK(std::memcmp(slice.data(),
                        sample.payload[static_cast<size_t>(c)].data() + layout.slice_offset(layer),
                        slice.size()) == 0);
    }
  }
  const Hash128 digest = reader->logical_digest();
  for (const auto& change : std::vector<std::function<void(Layout*)>>{
           [](Layout* l) { l->v_rotated = false; }, [](Layout* l) { l->k_rotated = true; },
           [](Layout* l) { l->float_dtype = DType::kFloat16; }}) {
    Sample other = sample;
    change(&other.meta.layout);
    CHECK_FALSE(digest_of(folder, other) == digest);
  }
}

TEST_CASE("OpeningReadsNoPayloadAndReadsAreCounted") {
  const TemporaryFolder folder;
  const Sample sample = small_sample();
  const Layout& layout = sample.meta.layout;
  write_sample(folder.file("a"), sample);
  const auto reader = SnapshotReader::open(folder.file("a"));
  CHECK(reader->payload_bytes_read() == 0);
  std::vector<std::byte> out(static_cast<size_t>(layout.chunk_bytes()));
  reader->read_slice(1, 1, out.data());
  CHECK(reader->payload_bytes_read() == layout.slice_bytes(0));
  reader->read_chunk(2, out.data());
  CHECK(reader->payload_bytes_read() == layout.slice_bytes(0) + layout.chunk_bytes());
  std::vector<std::byte> summaries(3 * sample.summaries[0].size());
  reader->read_summaries(0, 3, summaries.data());
  CHECK(reader->payload_bytes_read() ==
        layout.slice_bytes(0) + layout.chunk_bytes() + static_cast<int64_t>(summaries.size()));
}

TEST_CASE("OpeningTakesTwoReadsAndEveryChunkOrSetOfSummariesOne") {
  const TemporaryFolder folder;
  const Sample sample = small_sample();
  write_sample(folder.file("a"), sample);
  // The third read of all would fail if there were one.
  const auto reads_at_most = [](int64_t reads, const auto& action) {
    fault::arm("snapshot.read", reads, EIO);
    CHECK_NOTHROW(action());
    fault::disarm_all();
    fault::arm("snapshot.read", reads - 1, EIO);
    CHECK_THROWS_AS(action(), StorageError);
    fault::disarm_all();
  };
  reads_at_most(2, [&] { SnapshotReader::open(folder.file("a")); });
  const auto reader = SnapshotReader::open(folder.file("a"));
  std::vector<std::byte> out(4096);
  reads_at_most(1, [&] { reader->read_chunk(0, out.data()); });
  reads_at_most(1, [&] { reader->read_slice(0, 1, out.data()); });
  reads_at_most(1, [&] { reader->read_summaries(0, 3, out.data()); });
}

TEST_CASE("TheLogicalDigestFollowsContentAndIgnoresHintsSessionAndUnknownParts") {
  const TemporaryFolder folder;
  const Sample sample = make_sample(small_layout(), 53);
  const Hash128 digest = digest_of(folder, sample);
  CHECK_FALSE(digest == Hash128{});

  CHECK(digest_of(folder, small_sample()) == digest);
  Sample same = sample;
  same.meta.session = "{}";
  CHECK(digest_of(folder, same) == digest);

  const auto changed = [&](const auto& change) {
    Sample other = sample;
    change(&other);
    for (auto& chunk : other.meta.chunks) chunk.slice_checksum = {};
    CHECK_FALSE(digest_of(folder, other) == digest);
  };
  changed([](Sample* s) { edit(&s->meta.tokens, [](auto* ids) { (*ids)[28] ^= 1; }); });
  changed([](Sample* s) { s->meta.fingerprint += " "; });
  changed([](Sample* s) { s->meta.scorer = "mean"; });
  changed([](Sample* s) { s->meta.layout.v_dtype = DType::kFloat16; });
  changed([](Sample* s) { s->meta.chunks[0].provenance = Provenance::kDecode; });
  changed([](Sample* s) { s->meta.chunks[1].chain_hash.words[1] ^= 1; });
  changed([](Sample* s) { s->payload[3][1023] ^= std::byte{1}; });
  changed([](Sample* s) { s->summaries[2][0] ^= std::byte{1}; });
}

TEST_CASE("AContentIdFollowsPayloadHashProvenanceAndRowsAndNothingElse") {
  const Sample sample = make_sample(small_layout(), 32);
  const SnapshotChunk chunk = sample.meta.chunks[0];
  const Hash128 id = chunk.content_id();
  SnapshotChunk same = chunk;
  same.summary_checksum = 77;
  CHECK(same.content_id() == id);
  const auto differs = [&](const auto& change) {
    SnapshotChunk other = chunk;
    change(&other);
    CHECK_FALSE(other.content_id() == id);
  };
  const auto differs_in_sums = [&](const auto& change) {
    differs([&](SnapshotChunk* c) { edit(&c->slice_checksum, change); });
  };
  differs_in_sums([](auto* sums) { (*sums)[1] ^= 1; });
  differs_in_sums([](auto* sums) { std::swap((*sums)[0], (*sums)[1]); });
  differs_in_sums([](auto* sums) { sums->pop_back(); });
  differs([](SnapshotChunk* c) { c->chain_hash.words[0] ^= 1; });
  differs([](SnapshotChunk* c) { c->chain_hash.words[1] ^= 1; });
  differs([](SnapshotChunk* c) { c->provenance = Provenance::kApproximate; });
  differs([](SnapshotChunk* c) { c->valid = 7; });
}

TEST_CASE("AChunkWithoutChecksumsTakesThoseOfItsBytes") {
  const TemporaryFolder folder;
  const Sample sample = small_sample();
  Sample without = sample;
  for (auto& chunk : without.meta.chunks) chunk.slice_checksum = {};
  write_sample(folder.file("a"), sample);
  write_sample(folder.file("b"), without);
  CHECK(read_bytes(folder.file("a")) == read_bytes(folder.file("b")));
}

TEST_CASE("AWriterRefusesMetadataThatDoesNotMatchAndCanStillFinish") {
  const TemporaryFolder folder;
  const Sample sample = small_sample();
  SnapshotWriter writer(folder.file("a"), sample.meta.layout);
  add_all(sample, &writer);
  const auto refused = [&](const char* field, const auto& change) {
    SnapshotMeta meta = sample.meta;
    change(&meta);
    try {
      writer.finish(meta);
      FAIL("accepted a wrong ", field);
    } catch (const InvalidArgumentError& e) {
      const std::string message = e.what();
      CHECK_MESSAGE(message.find(field) != std::string::npos, message);
    }
    CHECK(folder.names().size() == 1);  // the temporary alone
  };
  refused("layout", [](SnapshotMeta* m) { m->layout.k_dim = 5; });
  refused("chunks is 3", [](SnapshotMeta* m) { m->chunks.pop_back(); });
  refused("chunks is 4, expected 3", [](SnapshotMeta* m) { m->tokens = m->tokens.first(48); });
  refused("summaries", [](SnapshotMeta* m) { m->tokens = m->tokens.first(32); });
  refused("summary bytes", [](SnapshotMeta* m) { m->summary_page_bytes = 41; });
  refused("summary_page_bytes", [](SnapshotMeta* m) { m->summary_page_bytes = -1; });
  refused("chunks[3].valid is 16", [](SnapshotMeta* m) { m->chunks[3].valid = 16; });
  refused("chunks[0].chain_hash", [](SnapshotMeta* m) { m->chunks[0].chain_hash = {}; });
  refused("chunks[3].chain_hash", [](SnapshotMeta* m) { m->chunks[3].chain_hash = {1, 1}; });
  refused("chunks[1].provenance", [](SnapshotMeta* m) { m->chunks[1].provenance = Provenance(3); });
  refused("chunks[2].slice_checksum[1]", [](SnapshotMeta* m) {
    edit(&m->chunks[2].slice_checksum, [](auto* sums) { (*sums)[1] ^= 1; });
  });
  refused("chunks[2].slice_checksum", [](SnapshotMeta* m) {
    edit(&m->chunks[2].slice_checksum, [](auto* sums) { sums->pop_back(); });
  });
  refused("hints.qk_score", [](SnapshotMeta* m) { m->hints.qk_score.pop_back(); });
  refused("hints.qk_score[1]", [](SnapshotMeta* m) { m->hints.qk_score[1] = NAN; });
  refused("hints.last_use", [](SnapshotMeta* m) { m->hints.last_use.push_back(1); });
  refused("scorer", [](SnapshotMeta* m) { m->scorer.assign(256, 'x'); });
  refused("unknown", [](SnapshotMeta* m) { m->unknown.emplace_back(m->unknown[0]); });
  refused("unknown", [](SnapshotMeta* m) { m->unknown[0].first = 6; });
  refused("unknown", [](SnapshotMeta* m) { m->unknown[0].first = 0x01010009u; });
  refused("unknown", [](SnapshotMeta* m) {
    m->unknown.clear();
    for (uint32_t t = 100; t < 200; ++t) m->unknown.emplace_back(t, "x");
  });
  CHECK_THROWS_AS(writer.add_chunk(sample.payload[0].data()), InvalidArgumentError);
  CHECK_THROWS_AS(writer.add_summary(sample.summaries[0].data(), 1), InvalidArgumentError);

  writer.finish(sample.meta);
  check_equal(read_all(*SnapshotReader::open(folder.file("a"))), sample);
  CHECK_THROWS_AS(writer.finish(sample.meta), InvalidArgumentError);
  CHECK_THROWS_AS(writer.add_chunk(sample.payload[0].data()), InvalidArgumentError);
}

TEST_CASE("AWriterRefusesALayoutThatNoFileCanHold") {
  const TemporaryFolder folder;
  Layout layout = small_layout();
  layout.layers = 0;
  CHECK_THROWS_AS(SnapshotWriter(folder.file("a"), layout), InvalidArgumentError);
  layout.layers = 1 << 30;
  CHECK_THROWS_AS(SnapshotWriter(folder.file("a"), layout), InvalidArgumentError);
  CHECK(folder.names().empty());
}

TEST_CASE("AnUnfinishedWriterLeavesNothing") {
  const TemporaryFolder folder;
  const Sample sample = small_sample();
  {
    SnapshotWriter writer(folder.file("a"), sample.meta.layout);
    add_all(sample, &writer);
    CHECK(folder.names().size() == 1);
    CHECK(folder.names()[0] != "a");
  }
  CHECK(folder.names().empty());
}

TEST_CASE("TwoWritersOfOneNameDoNotMeet") {
  const TemporaryFolder folder;
  const Sample first = small_sample();
  const Sample second = make_sample(small_layout(), 32);
  SnapshotWriter a(folder.file("x"), first.meta.layout);
  SnapshotWriter b(folder.file("x"), second.meta.layout);
  add_all(first, &a);
  add_all(second, &b);
  a.finish(first.meta);
  const auto reader = SnapshotReader::open(folder.file("x"));
  b.finish(second.meta);
  check_equal(read_all(*reader), first);  // the replaced file stays readable for whoever holds it
  check_equal(read_all(*SnapshotReader::open(folder.file("x"))), second);
  CHECK(folder.names() == std::vector<std::string>{"x"});
}

TEST_CASE("AReaderRefusesChunksAndLayersOutOfRange") {
  const TemporaryFolder folder;
  write_sample(folder.file("a"), small_sample());
  const auto reader = SnapshotReader::open(folder.file("a"));
  std::vector<std::byte> out(4096);
  CHECK_THROWS_AS(reader->read_chunk(-1, out.data()), InvalidArgumentError);
  CHECK_THROWS_AS(reader->read_chunk(4, out.data()), InvalidArgumentError);
  CHECK_THROWS_AS(reader->read_chunk(INT64_MAX, out.data()), InvalidArgumentError);
  CHECK_THROWS_AS(reader->read_slice(4, 0, out.data()), InvalidArgumentError);
  CHECK_THROWS_AS(reader->read_slice(0, 2, out.data()), InvalidArgumentError);
  CHECK_THROWS_AS(reader->read_slice(0, -1, out.data()), InvalidArgumentError);
  CHECK(reader->payload_bytes_read() == 0);
}

TEST_CASE("ManyThreadsReadOneReader") {
  const TemporaryFolder folder;
  const Sample sample = small_sample();
  const Layout& layout = sample.meta.layout;
  write_sample(folder.file("a"), sample);
  const auto reader = SnapshotReader::open(folder.file("a"));
  constexpr int kThreads = 4;
  constexpr int kReads = 500;
  std::atomic<int> wrong{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      std::mt19937 random(static_cast<unsigned>(t));
      std::vector<std::byte> out(static_cast<size_t>(layout.slice_bytes(0)));
      for (int i = 0; i < kReads; ++i) {
        const auto chunk = random() % sample.payload.size();
        const int layer = static_cast<int>(random() % 2);
        reader->read_slice(static_cast<int64_t>(chunk), layer, out.data());
        const std::byte* expected = sample.payload[chunk].data() + layout.slice_offset(layer);
        if (std::memcmp(out.data(), expected, out.size()) != 0) ++wrong;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK(wrong == 0);
  CHECK(reader->payload_bytes_read() == kThreads * kReads * layout.slice_bytes(0));
}

}  // namespace
}  // namespace kvpager::snapshot_test
