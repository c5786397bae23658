// A manifest and its packs are one snapshot: the same content as the file that holds everything,
// and whatever is wrong with a pack is said by name, at the latest when the chunk is read.
#include <doctest/doctest.h>
#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <chrono>
#include <cstring>
#include <filesystem>
#include <functional>
#include <thread>

#include "../disarm.h"
#include "kvpager/error.h"
#include "kvpager/snapshot.h"
#include "reseal.h"
#include "sample.h"
#include "stored.h"

namespace kvpager::snapshot_test {
namespace {

using namespace snapshot;  // NOLINT(build/namespaces)

template <class Error>
Error error_of(const std::function<void()>& action) {
  try {
    action();
  } catch (const Error& e) {
    return e;
  }
  FAIL("no error of the expected type");
  throw std::logic_error("unreachable");
}

bool says(const PagerError& error, const std::string& text) {
  return std::string(error.what()).find(text) != std::string::npos;
}

size_t open_descriptors() {
  size_t n = 0;
  for ([[maybe_unused]] const auto& entry : std::filesystem::directory_iterator("/proc/self/fd"))
    ++n;
  return n;
}

// A file of a remote store: its bytes are here, and its reads are counted.
class Remote : public ByteRanges {
 public:
  explicit Remote(std::string path) : path_(std::move(path)), bytes_(read_bytes(path_)) {}
  const std::string& path() const override { return path_; }
  uint64_t bytes() const override { return bytes_.size(); }
  void read(std::byte* out, uint64_t bytes, uint64_t offset,
            const std::function<std::string()>& what) const override {
    if (offset + bytes > bytes_.size()) throw CorruptSnapshotError(path_ + " ends in " + what());
    std::memcpy(out, bytes_.data() + offset, bytes);
    read_ += bytes;
  }
  void will_need(uint64_t bytes, uint64_t) const noexcept override { wanted_ += bytes; }

  static inline uint64_t read_ = 0, wanted_ = 0;

 private:
  std::string path_;
  std::string bytes_;
};

TEST_CASE("AManifestAndItsPacksAreReadThroughAnOpenerAsFromFiles") {
  const Sample content = make_sample(small_layout(), 7 * 16 + 5);
  const StoredSample store(content);
  std::vector<std::string> opened;
  const auto opener = [&](const std::string& path) {
    opened.push_back(path);
    return std::make_shared<const Remote>(path);
  };
  const auto local = store.open();
  Remote::read_ = Remote::wanted_ = 0;
  const auto remote = SnapshotReader::open(store.manifest(), "", opener);
  CHECK(opened.size() == 1 + remote->meta().packs.packs.size());
  CHECK(opened.front() == store.manifest());
  const uint64_t metadata = Remote::read_;
  const auto chunk = static_cast<uint64_t>(content.meta.layout.chunk_bytes());
  std::vector<std::byte> out(chunk);
  remote->will_need(2);
  remote->read_chunk(2, out.data());
  CHECK(Remote::wanted_ == chunk);
  CHECK(Remote::read_ == metadata + chunk);
  CHECK(read_all(*remote).payload == read_all(*local).payload);
  CHECK(read_all(*remote).summaries == read_all(*local).summaries);
  CHECK(remote->verify(2, {}).empty());
  const auto gathered = SnapshotReader::gather({{remote, 3}, {local, 4}}, "both");
  CHECK(gathered->verify(1, {}).empty());
}

TEST_CASE("AManifestReadsAsTheFileThatHoldsEverything") {
  for (const int64_t tokens : {7 * 16 + 5, 7 * 16, 2 * 16 + 1, 2 * 16}) {
    for (const int64_t summary_bytes : {40, 0}) {
      Sample content = make_sample(small_layout(), tokens, summary_bytes);
      content.meta.hints.last_use.assign(content.meta.chunks.size(), 3);
      content.meta.unknown = {{0x0001FFFFu, "a section from the future"}};
      const StoredSample store(content);
      const auto whole = SnapshotReader::open(store.self_contained());
      const auto manifest = store.open();
      const Sample a = read_all(*whole);
      const Sample b = read_all(*manifest);
      CHECK(a.payload == b.payload);
      CHECK(a.summaries == b.summaries);
      CHECK(a.meta.tokens == b.meta.tokens);
      CHECK(a.meta.hints.last_use == b.meta.hints.last_use);
      CHECK(a.meta.unknown == b.meta.unknown);
      CHECK(whole->logical_digest() == manifest->logical_digest());
      CHECK(manifest->file_bytes() ==
            static_cast<int64_t>(std::filesystem::file_size(store.manifest())));
      CHECK(manifest->verify(2, {}).empty());
    }
  }
}

TEST_CASE("WritingAManifestThatWasReadGivesTheSameBytes") {
  const StoredSample store;
  const auto reader = store.open();
  const Sample read = read_all(*reader);
  const std::string again = store.folder() + "/snapshots/again.kvsnap";
  write_manifest(again, read, reader->meta().packs);
  CHECK(read_bytes(again) == read_bytes(store.manifest()));
}

TEST_CASE("AManifestHasOneTo256PacksAndNoMoreThanSealedChunks") {
  const auto check = [](uint32_t count, int64_t sealed) {
    SnapshotPacks packs;
    for (uint32_t p = 0; p < count; ++p) packs.packs.push_back({{p, 1}, 1000});
    for (uint32_t c = 0; c < sealed; ++c) packs.places.push_back({std::min(c, count - 1), c});
    return check_packs(packs, sealed);
  };
  const auto refused = [&](uint32_t count, int64_t sealed) {
    const auto problem = check(count, sealed);
    CHECK((problem && problem->field == "packs.count"));
  };
  CHECK_FALSE(check(1, 1));
  CHECK_FALSE(check(256, 256));
  CHECK_FALSE(check(256, 300));
  refused(257, 300);
  refused(0, 3);
  refused(0, 0);
  refused(4, 3);
}

TEST_CASE("OpeningTakesTwoReadsAndOneOfEachPackHoweverManyChunksThereAre") {
  const testing::Disarm disarm;
  for (const int64_t tokens : {2 * 16, 50 * 16}) {
    const StoredSample store(make_sample(small_layout(), tokens));
    fault::arm("snapshot.read", 4, EIO);
    CHECK_NOTHROW(store.open());
    CHECK(fault::any_armed);
    fault::arm("snapshot.read", 3, EIO);
    CHECK_THROWS_AS(store.open(), StorageError);
  }
}

TEST_CASE("SummariesOfNeighboursAreOneRead") {
  const testing::Disarm disarm;
  const StoredSample store;  // packs alternate: no two chunks are neighbours
  const auto manifest = store.open();
  const auto whole = SnapshotReader::open(store.self_contained());
  std::vector<std::byte> out(7 * store.sample.summaries[0].size());
  const auto reads = [&](const SnapshotReader& reader, int64_t first, int64_t count) {
    constexpr int64_t kMany = 1000;
    fault::arm("snapshot.read", kMany, EIO);
    reader.read_summaries(first, count, out.data());
    // What is left of the thousand says how many there were.
    for (int64_t left = 0;; ++left) {
      if (fault::visit("snapshot.read") != 0) return kMany - left;
    }
  };
  CHECK(reads(*whole, 0, 7) == 1);
  CHECK(reads(*manifest, 0, 7) == 7);
  CHECK(reads(*whole, 3, 2) == 1);
  CHECK(std::memcmp(out.data(), store.sample.summaries[3].data(), 160) == 0);
  CHECK(std::memcmp(out.data() + 160, store.sample.summaries[4].data(), 160) == 0);
  CHECK(reads(*whole, 7, 0) == 0);
  CHECK_THROWS_AS(whole->read_summaries(7, 1, out.data()), InvalidArgumentError);
  CHECK_THROWS_AS(whole->read_summaries(-1, 1, out.data()), InvalidArgumentError);
  CHECK_THROWS_AS(whole->read_summaries(0, INT64_MAX, out.data()), InvalidArgumentError);
}

TEST_CASE("AProcessHoldsOneDescriptorOfAPackHoweverManyManifestsReferToIt") {
  const StoredSample store;
  const size_t before = open_descriptors();
  {
    std::vector<std::shared_ptr<SnapshotReader>> readers;
    for (int i = 0; i < 10; ++i) readers.push_back(store.open());
    CHECK(open_descriptors() == before + 10 + 2);
    readers.erase(readers.begin(), readers.begin() + 9);
    CHECK(open_descriptors() == before + 1 + 2);
    CHECK(readers[0]->verify(1, {}).empty());
  }
  CHECK(open_descriptors() == before);
}

TEST_CASE("APackThatIsMissingIsAStorageErrorThatNamesPackAndManifest") {
  const StoredSample store;
  std::filesystem::remove(store.pack(1));
  const auto error = error_of<StorageError>([&] { store.open(); });
  CHECK(says(error, store.manifest()));
  CHECK(says(error, pack_file_name(store.packs.packs[1].id)));
  CHECK(says(error, "No such file or directory"));
  CHECK_THROWS_AS(SnapshotReader::open(store.manifest(), store.folder() + "/nowhere"),
                  StorageError);
}

TEST_CASE("PacksAreFoundBesideTheManifestOrInTheFolderThatIsNamed") {
  const StoredSample store;
  std::filesystem::rename(store.folder() + "/packs", store.folder() + "/moved");
  CHECK_THROWS_AS(store.open(), StorageError);
  const auto reader = SnapshotReader::open(store.manifest(), store.folder() + "/moved");
  CHECK(read_all(*reader).payload == store.sample.payload);
  std::filesystem::rename(store.folder() + "/moved", store.folder() + "/packs");
}

TEST_CASE("APackThatIsNotWhatTheManifestSaysIsRefusedWhenOpenedByName") {
  const StoredSample store;
  const std::string sound = read_bytes(store.pack(0));
  const auto refused = [&](const std::string& text, const auto& change) {
    change();
    try {
      store.open();
      FAIL("opened with ", text);
    } catch (const PagerError& e) {
      CHECK_MESSAGE(says(e, text), e.what());
      CHECK_MESSAGE(says(e, store.manifest()), e.what());
      CHECK_MESSAGE(says(e, pack_file_name(store.packs.packs[0].id)), e.what());
    }
    write_bytes(store.pack(0), sound);
  };
  const auto instead = [&](const Sample& sample) { write_sample(store.pack(0), sample); };
  refused("file_bytes", [&] { write_bytes(store.pack(0), sound.substr(0, sound.size() - 1)); });
  refused("file_bytes", [&] { write_bytes(store.pack(0), sound + "x"); });
  refused("file size", [&] { write_bytes(store.pack(0), ""); });
  refused("header.magic", [&] { write_bytes(store.pack(0), std::string(sound.size(), 'x')); });
  refused("tokens.size", [&] { instead(part_of(store.sample, {0, 2, 4})); });
  refused("tokens.size", [&] { instead(part_of(store.sample, {0, 1, 2, 3, 4})); });
  refused("tokens.size", [&] { instead(part_of(store.sample, {0, 2, 4, 7})); });  // with a tail
  refused("payload.size", [&] {
    Layout layout = small_layout();
    layout.v_dim = 64;
    instead(make_sample(layout, 4 * 16));
  });
  refused("chunks.size", [&] {
    Layout layout = small_layout();
    layout.layers = 1;
    instead(make_sample(layout, 4 * 16));
  });
  refused("summaries.size", [&] { instead(make_sample(small_layout(), 4 * 16, 41)); });
  refused("a manifest", [&] { write_bytes(store.pack(0), read_bytes(store.manifest())); });
  refused("header.version is 2.0, expected 1.0", [&] {
    std::string bytes = sound;
    put<uint16_t>(&bytes, kMajorAt, 2);
    reseal(&bytes);
    write_bytes(store.pack(0), bytes);
  });
  for (size_t at = 0; at < 64 + 7 * 32; ++at) {
    refused("", [&] {
      std::string bytes = sound;
      bytes[at] = static_cast<char>(bytes[at] ^ 4);
      write_bytes(store.pack(0), bytes);
    });
  }
  CHECK(read_all(*store.open()).payload == store.sample.payload);
}

TEST_CASE("PacksThatWereSwappedAreFoundWhenASliceIsReadAndTheErrorSaysWhere") {
  const StoredSample store(make_sample(small_layout(), 6 * 16 + 5));  // packs of one size
  std::filesystem::rename(store.pack(0), store.folder() + "/packs/aside");
  std::filesystem::rename(store.pack(1), store.pack(0));
  std::filesystem::rename(store.folder() + "/packs/aside", store.pack(1));
  const auto reader = store.open();
  std::vector<std::byte> out(2048);
  const auto error = error_of<CorruptSnapshotError>([&] { reader->read_slice(3, 1, out.data()); });
  CHECK(error.chunk == 3);
  CHECK(error.layer == 1);
  CHECK(says(error, "chunk 3 (tokens [48, 64)), layer 1"));
  CHECK(says(error, pack_file_name(store.packs.packs[1].id)));
  CHECK(says(error, store.manifest()));
  const auto summary =
      error_of<CorruptSnapshotError>([&] { reader->read_summaries(2, 1, out.data()); });
  CHECK(summary.chunk == 2);
  CHECK(summary.layer == -1);
  CHECK(summary.start == 32);
  CHECK(summary.stop == 48);
  CHECK(says(summary, "the summary of chunk 2 (tokens [32, 48))"));
  reader->read_chunk(6, out.data());  // the tail is in the manifest
  CHECK(out == store.sample.payload[6]);
  CHECK(reader->verify(2, {}).size() == 6 * 3);
}

TEST_CASE("APackThatShrinksWhileItIsReadFailsTheChunksThatAreGone") {
  const StoredSample store;
  const auto reader = store.open();
  std::filesystem::resize_file(store.pack(0), kFrontBytes + 2048);
  std::vector<std::byte> out(4096);
  reader->read_chunk(0, out.data());
  reader->read_chunk(1, out.data());
  const auto error = error_of<CorruptSnapshotError>([&] { reader->read_chunk(2, out.data()); });
  CHECK(error.chunk == 2);
  CHECK(says(error, "became shorter after it was opened"));
  CHECK(says(error, store.manifest()));
  const auto summaries =
      error_of<CorruptSnapshotError>([&] { reader->read_summaries(1, 3, out.data()); });
  CHECK(summaries.chunk == 2);
  CHECK_THROWS_AS(store.open(), CorruptSnapshotError);  // the shared descriptor hides nothing
}

TEST_CASE("APackThatIsReplacedIsOpenedAnewAndTheOldOneStaysReadable") {
  const StoredSample store;
  const auto before = store.open();
  const std::string bytes = read_bytes(store.pack(0));
  std::filesystem::remove(store.pack(0));
  CHECK(read_all(*before).payload == store.sample.payload);
  CHECK_THROWS_AS(store.open(), StorageError);
  std::string other = bytes;
  other[kFrontBytes] ^= 1;
  write_bytes(store.pack(0), other);
  CHECK_FALSE(store.open()->verify(1, {}).empty());
  CHECK(before->verify(1, {}).empty());
}

class ExclusiveLock {
 public:
  explicit ExclusiveLock(const std::string& path)
      : fd_(::open(path.c_str(), O_RDONLY | O_CLOEXEC)),
        taken_(::flock(fd_, LOCK_EX | LOCK_NB) == 0) {}
  ~ExclusiveLock() { ::close(fd_); }
  bool taken() const { return taken_; }

 private:
  int fd_;
  bool taken_;
};

TEST_CASE("APackCannotBeLockedExclusivelyWhileASnapshotThatNeedsItIsOpen") {
  const StoredSample store;
  {
    const auto reader = store.open();
    CHECK_FALSE(ExclusiveLock(store.pack(0)).taken());
    CHECK_FALSE(ExclusiveLock(store.pack(1)).taken());
    // What is gathered from a snapshot keeps its packs as well.
    const auto gathered = SnapshotReader::gather({{reader, 1}}, "gathered");
    CHECK(gathered->payload_bytes_read() == 0);
  }
  CHECK(ExclusiveLock(store.pack(0)).taken());
  std::shared_ptr<SnapshotReader> gathered;
  {
    const auto reader = store.open();
    gathered = SnapshotReader::gather({{reader, 1}}, "gathered");
  }
  CHECK(ExclusiveLock(store.pack(0)).taken());
  CHECK_FALSE(ExclusiveLock(store.pack(1)).taken());
}

TEST_CASE("OpeningWaitsForAPackThatIsLockedAMomentAndGivesUpOnOneThatStaysLocked") {
  const StoredSample store;
  {
    auto lock = std::make_unique<ExclusiveLock>(store.pack(0));
    REQUIRE(lock->taken());
    std::thread release([&] {
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
      lock.reset();
    });
    CHECK_NOTHROW(store.open());
    release.join();
  }
  const ExclusiveLock lock(store.pack(0));
  REQUIRE(lock.taken());
  const auto error = error_of<StorageError>([&] { store.open(); });
  CHECK(says(error, "lock the file for reading"));
  CHECK(says(error, pack_file_name(store.packs.packs[0].id)));
}

TEST_CASE("APackOnAFileSystemWithoutLocksIsReadWithoutOne") {
  const testing::Disarm disarm;
  const StoredSample store;
  fault::arm("snapshot.share", 0, ENOLCK);
  CHECK(read_all(*store.open()).payload == store.sample.payload);
  CHECK_FALSE(fault::any_armed);
}

TEST_CASE("AReadThatGivesLessThanWasAskedForGoesOn") {
  const testing::Disarm disarm;
  const StoredSample store;
  const auto reader = store.open();
  std::vector<std::byte> out(2048);
  fault::arm_short("snapshot.read", 0, 100);
  reader->read_chunk(4, out.data());
  CHECK(out == store.sample.payload[4]);
  CHECK_FALSE(fault::any_armed);
}

}  // namespace
}  // namespace kvpager::snapshot_test
