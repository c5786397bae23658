// write_content and write_manifest: the same bytes as chunk by chunk, with little memory, and
// nothing kept or left when something goes wrong.
#include <doctest/doctest.h>

#include <filesystem>
#include <fstream>
#include <sstream>

#include "../disarm.h"
#include "content.h"
#include "kvpager/error.h"
#include "kvpager/snapshot.h"

namespace kvpager::snapshot_test {
namespace {

using Where = TestContent::Where;

// 24 chunks of 2 MiB and a tail: a dozen groups, hence a thread of its own prepares them.
Sample many_groups() { return content_sample(large_layout(), 64 * 24 + 5); }

TEST_CASE("TheFileIsTheSameWhetherItsChunksAreAddedOrItsContentIsWritten") {
  const TemporaryFolder folder;
  const Sample samples[] = {content_sample(small_layout(), 0), content_sample(small_layout(), 3),
                            content_sample(small_layout(), 16 * 5000 + 3), many_groups()};
  for (const Sample& sample : samples) {
    const int64_t bytes = write_sample(folder.file("added"), sample);
    const std::string expected = read_bytes(folder.file("added"));
    REQUIRE(static_cast<int64_t>(expected.size()) == bytes);
    for (const Where where : {Where::kInPlace, Where::kInScratch}) {
      TestContent content(sample, where);
      CHECK(save_content(folder.file("written"), content) == bytes);
      CHECK((read_bytes(folder.file("written")) == expected));
      CHECK(content.all_given_back());
      // Checksums nobody knew yet are computed.
      for (SnapshotChunk& chunk : content.sample().meta.chunks) chunk.slice_checksum = {};
      CHECK(save_content(folder.file("written"), content) == bytes);
      CHECK((read_bytes(folder.file("written")) == expected));
    }
  }
}

TEST_CASE("AnImageIsTheSameFileInPieces") {
  const TemporaryFolder folder;
  const Sample samples[] = {content_sample(small_layout(), 0), content_sample(small_layout(), 3),
                            content_sample(small_layout(), 16 * 50), many_groups()};
  for (const Sample& sample : samples) {
    const int64_t bytes = write_sample(folder.file("added"), sample);
    for (const Where where : {Where::kInPlace, Where::kInScratch}) {
      const auto content = std::make_shared<TestContent>(sample, where);
      const SnapshotImage image(content, sample.meta.fingerprint, sample.meta.session);
      CHECK(image.file_bytes() == bytes);
      std::string read;
      for (int64_t piece = 0; piece < image.pieces(); ++piece) {
        std::string part(static_cast<size_t>(image.piece_bytes(piece)), 'x');
        image.read_piece(piece, reinterpret_cast<std::byte*>(part.data()));
        read += part;
      }
      CHECK((read == read_bytes(folder.file("added"))));
      CHECK(image.logical_digest() == SnapshotReader::open(folder.file("added"))->logical_digest());
      CHECK(content->all_given_back());
      CHECK_THROWS_AS(image.piece_bytes(image.pieces()), InvalidArgumentError);
      CHECK_THROWS_AS(image.piece_bytes(-1), InvalidArgumentError);
    }
  }
}

TEST_CASE("OfAContentAnyAscendingChunksCanBeWrittenAsAPack") {
  const TemporaryFolder folder;
  const TestContent content(content_sample(small_layout(), 16 * 6 + 5), Where::kInPlace);
  const std::vector<int64_t> which = {1, 2, 5, 6};
  SnapshotWriter writer(folder.file("pack"), small_layout());
  writer.write_content(content, which, "{\"f\":1}", "{\"pack\": true}", nullptr);
  const std::vector<SnapshotChunk> written = writer.written();
  writer.publish();

  const Sample pack = read_all(*SnapshotReader::open(folder.file("pack")));
  CHECK(pack.meta.fingerprint == "{\"f\":1}");
  CHECK(pack.meta.session == "{\"pack\": true}");
  const Sample& sample = content.sample();
  const std::vector<uint64_t> summaries = summary_checksums(sample);
  std::vector<TokenId> tokens;
  REQUIRE(pack.payload.size() == which.size());
  REQUIRE(written.size() == which.size());
  for (size_t i = 0; i < which.size(); ++i) {
    const auto c = static_cast<size_t>(which[i]);
    CHECK(pack.payload[i] == sample.payload[c]);
    CHECK(pack.meta.chunks[i].slice_checksum == sample.meta.chunks[c].slice_checksum);
    CHECK(pack.meta.chunks[i].content_id() == sample.meta.chunks[c].content_id());
    CHECK(pack.meta.hints.last_use[i] == c);
    CHECK(written[i].content_id() == sample.meta.chunks[c].content_id());
    CHECK(written[i].summary_checksum == (c < 6 ? summaries[c] : 0));
    CHECK(pack.meta.chunks[i].summary_checksum == written[i].summary_checksum);
    for (int32_t t = 0; t < sample.meta.chunks[c].valid; ++t) {
      tokens.push_back(sample.meta.tokens[c * 16 + static_cast<size_t>(t)]);
    }
  }
  CHECK(pack.meta.tokens.to_vector() == tokens);
  CHECK(pack.summaries[2] == sample.summaries[5]);
}

TEST_CASE("AManifestHoldsTheTailAndSaysWhereTheOtherChunksAre") {
  const TemporaryFolder folder;
  for (const int64_t tokens : {int64_t{16 * 3}, int64_t{16 * 3 + 5}}) {
    const TestContent content(content_sample(small_layout(), tokens), Where::kInPlace);
    const std::vector<uint64_t> summaries = summary_checksums(content.sample());
    const Hash128 id{0x0123456789abcdef, 0xfedcba9876543210};
    const std::string pack = "fedcba98765432100123456789abcdef.kvsnap";
    save_content(folder.file("whole"), content);
    {
      SnapshotWriter writer(folder.file(pack), small_layout());
      writer.write_content(content, {0, 1, 2}, "{}", "{\"pack\": true}", nullptr);
      writer.publish();
    }
    SnapshotWriter writer(folder.file("manifest"), small_layout());
    const int64_t bytes = writer.write_manifest(content, one_pack(id, 3), summaries,
                                                content.meta().fingerprint, content.meta().session);
    writer.publish();
    CHECK(static_cast<int64_t>(read_bytes(folder.file("manifest")).size()) == bytes);
    CHECK(content.all_given_back());

    const auto manifest = SnapshotReader::open(folder.file("manifest"), folder.path());
    CHECK(manifest->meta().packs.places.size() == 3);
    const auto whole = SnapshotReader::open(folder.file("whole"));
    CHECK(manifest->logical_digest() == whole->logical_digest());
    const Sample read = read_all(*manifest);
    CHECK(read.payload == content.sample().payload);
    CHECK(read.summaries == content.sample().summaries);
    CHECK(read.meta.hints.qk_score == content.meta().hints.qk_score);
  }
}

TEST_CASE("AManifestOfATailAloneIsAnOrdinaryFile") {
  const TemporaryFolder folder;
  const TestContent content(content_sample(small_layout(), 5), Where::kInPlace);
  save_content(folder.file("whole"), content);
  SnapshotWriter writer(folder.file("manifest"), small_layout());
  writer.write_manifest(content, {}, {}, content.meta().fingerprint, content.meta().session);
  writer.publish();
  CHECK(read_bytes(folder.file("manifest")) == read_bytes(folder.file("whole")));
}

TEST_CASE("ArgumentsThatDoNotFitAreRefusedAndTheWriterCanStillBeUsed") {
  const TemporaryFolder folder;
  const TestContent content(content_sample(small_layout(), 53), Where::kInPlace);
  SnapshotWriter writer(folder.file("s"), small_layout());
  const auto refused = [&](const std::vector<int64_t>& which, const char* words) {
    CHECK_THROWS_WITH_AS(writer.write_content(content, which, "{}", "{}", nullptr),
                         doctest::Contains(words), InvalidArgumentError);
  };
  refused({0, 1, 4}, "which[2] is 4");
  refused({-1}, "which[0] is -1");
  refused({1, 0}, "which[1] is 0");
  refused({1, 1}, "which[1] is 1");
  CHECK_THROWS_WITH_AS(
      writer.write_content(content, {0}, std::string((16 << 20) + 1, ' '), "{}", nullptr),
      doctest::Contains("fingerprint"), InvalidArgumentError);
  CHECK_THROWS_WITH_AS(writer.publish(), doctest::Contains("not sealed"), InvalidArgumentError);
  const std::vector<uint64_t> summaries = summary_checksums(content.sample());
  const auto manifest = [&](const SnapshotPacks& packs, const std::vector<uint64_t>& checksums) {
    writer.write_manifest(content, packs, checksums, "{}", "{}");
  };
  CHECK_THROWS_WITH_AS(manifest(one_pack({1, 2}, 3), {1, 2}), doctest::Contains("summary_checksum"),
                       InvalidArgumentError);
  CHECK_THROWS_WITH_AS(manifest(one_pack({1, 2}, 2), summaries), doctest::Contains("packs.places"),
                       InvalidArgumentError);
  CHECK_THROWS_WITH_AS(manifest({}, summaries), doctest::Contains("packs.count"),
                       InvalidArgumentError);
  writer.write_content(content, {0, 3}, "{}", "{}", nullptr);
  writer.publish();
  CHECK(SnapshotReader::open(folder.file("s"))->meta().tokens.size() == 21);

  SnapshotWriter another(folder.file("s"), large_layout());
  CHECK_THROWS_WITH_AS(another.write_content(content, {0}, "{}", "{}", nullptr),
                       doctest::Contains("layout"), InvalidArgumentError);
  SnapshotWriter begun(folder.file("s"), small_layout());
  begun.add_chunk(content.sample().payload[0].data());
  CHECK_THROWS_WITH_AS(begun.write_content(content, {0}, "{}", "{}", nullptr),
                       doctest::Contains("after add_chunk"), InvalidArgumentError);
}

TEST_CASE("ProgressIsReportedOnTheWayAndEndsAtTheTotal") {
  const TemporaryFolder folder;
  const TestContent content(many_groups(), Where::kInPlace);
  std::vector<int64_t> done;
  const int64_t total = 25 * large_layout().chunk_bytes();
  save_content(folder.file("s"), content, [&](int64_t bytes, int64_t of) {
    CHECK(of == total);
    done.push_back(bytes);
  });
  CHECK(done.size() >= 3);
  CHECK(std::is_sorted(done.begin(), done.end()));
  CHECK(done.back() == total);
}

// Whatever throws on the way: no file, no chunk kept, the old file as it was; and the temporary stays
// until the writer is destroyed, as a store does under its lock.
void check_undone(const TestContent& content, const SnapshotProgress& progress,
                  const std::string& words) {
  const TemporaryFolder folder;
  for (const bool over : {false, true}) {
    if (over) write_sample(folder.file("s"), small_sample());
    const std::string old = over ? read_bytes(folder.file("s")) : "";
    {
      SnapshotWriter writer(folder.file("s"), content.meta().layout);
      CHECK_THROWS_WITH(writer.write_content(content, all_chunks(content), "{}", "{}", progress),
                        doctest::Contains(words.c_str()));
      CHECK(content.all_given_back());
      CHECK(folder.names().size() == (over ? 2 : 1));
      CHECK(std::filesystem::exists(folder.file(writer.temporary())));
      CHECK_THROWS_AS(writer.publish(), InvalidArgumentError);
      CHECK_THROWS_AS(writer.write_content(content, {0}, "{}", "{}", nullptr),
                      InvalidArgumentError);
    }
    CHECK(folder.names().size() == (over ? 1 : 0));
    if (over) CHECK(read_bytes(folder.file("s")) == old);
  }
}

TEST_CASE("AProgressCallbackThatThrowsUndoesTheSave") {
  const TestContent content(many_groups(), Where::kInScratch);
  int calls = 0;
  check_undone(
      content,
      [&](int64_t, int64_t) {
        if (++calls % 2 == 0) throw std::runtime_error("the user pressed a key");
      },
      "the user pressed a key");
}

TEST_CASE("AChunkThatCannotBeBorrowedUndoesTheSave") {
  for (const int64_t chunk : {0, 1, 7, 24}) {
    TestContent content(many_groups(), Where::kInPlace);
    content.fail_at(chunk);
    check_undone(content, nullptr, "this chunk cannot be borrowed");
  }
}

TEST_CASE("AWriteThatFailsGivesEveryChunkBack") {
  const testing::Disarm disarm;
  const TestContent content(many_groups(), Where::kInPlace);
  const TemporaryFolder folder;
  for (const int n : {0, 1, 5, 12}) {
    fault::arm("snapshot.write", n, ENOSPC);
    CHECK_THROWS_WITH_AS(save_content(folder.file("s"), content),
                         doctest::Contains("No space left on device"), StorageError);
    CHECK_FALSE(fault::any_armed);
    CHECK(content.all_given_back());
    CHECK(folder.names().empty());
  }
}

TEST_CASE("BytesThatAreNotThoseTheChecksumsWereTakenOfAreNotSaved") {
  for (const size_t c : {size_t{0}, size_t{13}, size_t{24}}) {
    TestContent content(many_groups(), Where::kInPlace);
    const Layout& layout = content.meta().layout;
    content.sample().payload[c][static_cast<size_t>(layout.slice_offset(2)) + 77] ^= std::byte{1};
    check_undone(content, nullptr, str("not saved: chunk ", c, ", layer 2"));
    const TemporaryFolder folder;
    try {
      save_content(folder.file("s"), content);
      FAIL("nothing was noticed");
    } catch (const CorruptSnapshotError& e) {
      CHECK(e.chunk == static_cast<int64_t>(c));
      CHECK(e.layer == 2);
      CHECK(e.start == static_cast<int64_t>(c) * layout.chunk_tokens);
      CHECK(e.stop == e.start + content.meta().chunks[c].valid);
    }
  }
}

TEST_CASE("ASummaryThatIsNotTheOneItsChecksumWasTakenOfIsNotSaved") {
  TestContent content(content_sample(small_layout(), 53), Where::kInPlace);
  const std::vector<uint64_t> right = summary_checksums(content.sample());
  for (size_t c = 0; c < right.size(); ++c) {
    content.sample().meta.chunks[c].summary_checksum = right[c];
  }
  const TemporaryFolder folder;
  save_content(folder.file("s"), content);
  content.sample().meta.chunks[1].summary_checksum += 1;
  check_undone(content, nullptr, "the summary of chunk 1");
}

TEST_CASE("NoMoreThanAFewGroupsOfChunksAreBorrowedAtOnce") {
  const TemporaryFolder folder;
  const TestContent large(many_groups(), Where::kInPlace);
  save_content(folder.file("s"), large);
  CHECK(large.most_borrowed() <= 3 * 2);  // three groups of 4 MiB
  const TestContent small(content_sample(small_layout(), 16 * 5000), Where::kInPlace);
  save_content(folder.file("s"), small);
  CHECK(small.most_borrowed() <= 3 * 256);
}

// Chunks that are made when they are asked for: a content of any size that takes no memory.
class MadeContent final : public SnapshotContent {
 public:
  MadeContent(const Layout& layout, int64_t chunks) {
    meta_.layout = layout;
    meta_.scorer = "minmax";
    meta_.summary_page_bytes = 40;
    meta_.tokens = std::vector<TokenId>(static_cast<size_t>(chunks * layout.chunk_tokens), 1);
    for (int64_t c = 0; c < chunks; ++c) {
      meta_.chunks.push_back({layout.chunk_tokens, Provenance::kExact, {1, uint64_t(c)}, {}, 0});
    }
  }
  const SnapshotMeta& meta() const override { return meta_; }
  const std::byte* borrow_chunk(int64_t chunk, std::byte* scratch) const override {
    std::memset(scratch, static_cast<int>(chunk % 251),
                static_cast<size_t>(meta_.layout.chunk_bytes()));
    return scratch;
  }
  void give_back_chunk(int64_t) const override {}
  void read_summary(int64_t, std::byte* out) const override {
    std::memset(out, 3, static_cast<size_t>(meta_.summary_bytes_per_chunk()));
  }

 private:
  SnapshotMeta meta_;
};

// VmHWM or VmRSS of this process, in bytes.
int64_t memory_line(const std::string& name) {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);) {
    if (line.compare(0, name.size(), name) != 0) continue;
    std::istringstream words(line.substr(name.size() + 1));
    int64_t kib = 0;
    words >> kib;
    return kib * 1024;
  }
  return -1;
}

// Three groups of 4 MiB are scratch; a sanitizer keeps up to four times that beside it.
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
constexpr int64_t kAllowance = int64_t{96} << 20;
#else
constexpr int64_t kAllowance = int64_t{24} << 20;
#endif

TEST_CASE("SavingTakesTheSameLittleMemoryHoweverLargeTheContentIs") {
  const TemporaryFolder folder;
  const MadeContent content(large_layout(), 192);
  const int64_t total = 192 * large_layout().chunk_bytes();  // 384 MiB
  // The peak counts from here, where the system allows that to be asked for.
  if (!(std::ofstream("/proc/self/clear_refs") << "5" << std::flush)) {
    MESSAGE("skipped: the peak of this process cannot be reset");
    return;
  }
  const int64_t before = memory_line("VmRSS:");
  save_content(folder.file("s"), content);
  const int64_t peak = memory_line("VmHWM:");
  REQUIRE(before > 0);
  REQUIRE(peak >= before);
  INFO("peak ", (peak - before) >> 20, " MiB more than before, for ", total >> 20, " MiB");
  CHECK(peak - before < kAllowance);

  const auto reader = SnapshotReader::open(folder.file("s"));
  std::vector<std::byte> chunk(static_cast<size_t>(large_layout().chunk_bytes()));
  for (const int64_t c : {0, 100, 191}) {
    reader->read_chunk(c, chunk.data());
    CHECK(std::count(chunk.begin(), chunk.end(), std::byte(c % 251)) == int64_t(chunk.size()));
  }
}

}  // namespace
}  // namespace kvpager::snapshot_test
