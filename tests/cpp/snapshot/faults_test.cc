// A save that fails, wherever it fails, leaves no file of its own and the snapshot before it as it
// was.
#include <doctest/doctest.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstring>
#include <functional>

#include "../disarm.h"
#include "content.h"
#include "kvpager/error.h"
#include "kvpager/snapshot.h"
#include "sample.h"

namespace kvpager::snapshot_test {
namespace {

// The ways to write a snapshot of a sample to `path`.
using Save = std::function<void(const std::string& path, const Sample& sample)>;

void save_by_chunks(const std::string& path, const Sample& sample) { write_sample(path, sample); }

void save_reserved(const std::string& path, const Sample& sample) {
  SnapshotWriter writer(path, sample.meta.layout, 16 << 20);
  add_all(sample, &writer);
  writer.seal(sample.meta);
  writer.publish();
}

void save_whole(const std::string& path, const Sample& sample) {
  const TestContent content(sample, TestContent::Where::kInPlace);
  save_content(path, content);
  REQUIRE(content.all_given_back());
}

void save_as_manifest(const std::string& path, const Sample& sample) {
  const TestContent content(sample, TestContent::Where::kInPlace);
  SnapshotWriter writer(path, sample.meta.layout, 4 << 20);
  writer.write_manifest(content, one_pack({1, 2}, sample.meta.sealed_chunks()),
                        summary_checksums(sample), "{}", "{}");
  writer.publish();
}

// Saves over nothing, or over an old snapshot, failing at the n-th visit of `point` until none is
// left; returns how many visits there are.
int fail_at_every_visit(const std::string& point, int error, const Save& save, const Sample& sample,
                        bool over_an_old_one) {
  const testing::Disarm disarm;
  const TemporaryFolder folder;
  const std::string path = folder.file("s");
  std::string old;
  if (over_an_old_one) {
    write_sample(path, make_sample(small_layout(), 19));
    old = read_bytes(path);
  }
  const TemporaryFolder elsewhere;
  save(elsewhere.file("expected"), sample);
  for (int n = 0;; ++n) {
    fault::arm(point, n, error);
    try {
      save(path, sample);
    } catch (const StorageError& e) {
      const std::string message = e.what();
      CHECK(message.find(path) == 0);
      CHECK(message.find(std::strerror(error)) != std::string::npos);
      CHECK(folder.names().size() == (over_an_old_one ? 1 : 0));
      if (over_an_old_one) CHECK(read_bytes(path) == old);
      continue;
    }
    CHECK(fault::any_armed);  // the save met no fault: there is no visit left to fail
    fault::disarm_all();
    CHECK(folder.names() == std::vector<std::string>{"s"});
    CHECK((read_bytes(path) == read_bytes(elsewhere.file("expected"))));
    return n;
  }
}

struct Visits {
  std::string point;
  int expected;
};

void check_every_visit(const Save& save, const Sample& sample, const std::vector<Visits>& sites) {
  for (const bool over : {false, true}) {
    for (const Visits& site : sites) {
      CAPTURE(site.point);
      CHECK(fail_at_every_visit(site.point, EIO, save, sample, over) == site.expected);
    }
    CHECK(fail_at_every_visit("snapshot.write", ENOSPC, save, sample, over) > 0);
  }
}

TEST_CASE("AFailureAtAnyStepLeavesNothingAndKeepsTheOldSnapshot") {
  const Sample small = small_sample();
  const Sample large = content_sample(large_layout(), 64 * 3 + 1);
  check_every_visit(save_by_chunks, small,
                    {{"snapshot.create", 1},
                     {"snapshot.lock", 1},
                     {"snapshot.look", 1},
                     {"snapshot.reserve", 0},
                     {"snapshot.write", 2},  // everything, header
                     {"snapshot.truncate", 0},
                     {"snapshot.fsync", 2},  // file, folder
                     {"snapshot.rename", 1}});
  check_every_visit(save_by_chunks, large, {{"snapshot.write", 6}});  // 4 chunks, metadata, header
  check_every_visit(save_reserved, large,
                    {{"snapshot.create", 1},
                     {"snapshot.lock", 1},
                     {"snapshot.look", 1},
                     {"snapshot.reserve", 1},
                     {"snapshot.write", 6},
                     {"snapshot.truncate", 1},
                     {"snapshot.fsync", 2},
                     {"snapshot.rename", 1}});
}

TEST_CASE("AFailureAtAnyStepOfWritingAContentLeavesNothingAndKeepsTheOldSnapshot") {
  const Sample large = content_sample(large_layout(), 64 * 3 + 1);
  check_every_visit(save_whole, large,
                    {{"snapshot.create", 1},
                     {"snapshot.lock", 1},
                     {"snapshot.look", 1},
                     {"snapshot.reserve", 1},
                     {"snapshot.write", 6},  // 4 groups, metadata, header
                     {"snapshot.truncate", 1},
                     {"snapshot.fsync", 2},
                     {"snapshot.rename", 1}});
  check_every_visit(save_as_manifest, large,
                    {{"snapshot.reserve", 1},
                     {"snapshot.write", 3},  // the tail, metadata, header
                     {"snapshot.truncate", 1},
                     {"snapshot.fsync", 2},
                     {"snapshot.rename", 1}});
}

TEST_CASE("AShortWriteGoesOnWhereItStoppedWithinAChunkToo") {
  const testing::Disarm disarm;
  const TemporaryFolder folder;
  const Sample large = content_sample(large_layout(), 64 * 3 + 1);
  const int64_t chunk = large_layout().chunk_bytes();
  for (const Save& save : {Save(save_by_chunks), Save(save_whole)}) {
    save(folder.file("expected"), large);
    const std::string expected = read_bytes(folder.file("expected"));
    for (int visit = 0; visit < 3; ++visit) {
      for (const int64_t bytes :
           {int64_t{1}, int64_t{4095}, chunk - 1, chunk, chunk + 1, chunk + 12345}) {
        fault::arm_short("snapshot.write", visit, bytes);
        save(folder.file("s"), large);
        fault::disarm_all();
        REQUIRE((read_bytes(folder.file("s")) == expected));
      }
    }
  }
}

TEST_CASE("AnInterruptedStepIsTakenAgain") {
  const testing::Disarm disarm;
  const TemporaryFolder folder;
  const Sample sample = content_sample(small_layout(), 53);
  save_whole(folder.file("expected"), sample);
  for (const char* point :
       {"snapshot.create", "snapshot.lock", "snapshot.look", "snapshot.reserve", "snapshot.write",
        "snapshot.truncate", "snapshot.fsync", "snapshot.rename"}) {
    CAPTURE(point);
    fault::arm(point, 0, EINTR);
    save_whole(folder.file("s"), sample);
    CHECK_FALSE(fault::any_armed);
    CHECK(read_bytes(folder.file("s")) == read_bytes(folder.file("expected")));
  }
}

TEST_CASE("AWriterThatFailedRefusesEveryFurtherCall") {
  const testing::Disarm disarm;
  const TemporaryFolder folder;
  const Sample sample = make_sample(large_layout(), 128);
  SnapshotWriter writer(folder.file("s"), sample.meta.layout);
  writer.add_chunk(sample.payload[0].data());
  fault::arm("snapshot.write", 0, ENOSPC);
  CHECK_THROWS_WITH_AS(writer.add_chunk(sample.payload[1].data()),
                       doctest::Contains("No space left on device"), StorageError);
  CHECK_THROWS_AS(writer.add_chunk(sample.payload[1].data()), InvalidArgumentError);
  CHECK_THROWS_AS(writer.add_summary(sample.summaries[0].data(), 40), InvalidArgumentError);
  CHECK_THROWS_AS(writer.finish(sample.meta), InvalidArgumentError);
  CHECK(folder.names() == std::vector<std::string>{writer.temporary()});  // until it is destroyed
}

TEST_CASE("AFailedReadIsAStorageErrorAndTheNextReadWorks") {
  const testing::Disarm disarm;
  const TemporaryFolder folder;
  const Sample sample = small_sample();
  write_sample(folder.file("s"), sample);
  for (const int n : {0, 1}) {
    fault::arm("snapshot.read", n, EIO);
    CHECK_THROWS_WITH_AS(SnapshotReader::open(folder.file("s")), doctest::Contains("error"),
                         StorageError);
  }
  const auto reader = SnapshotReader::open(folder.file("s"));
  std::vector<std::byte> out(2048);
  fault::arm("snapshot.read", 0, EIO);
  CHECK_THROWS_AS(reader->read_chunk(0, out.data()), StorageError);
  reader->read_chunk(0, out.data());
  CHECK(out == sample.payload[0]);
}

TEST_CASE("AnInterruptedReadGoesOn") {
  const testing::Disarm disarm;
  const TemporaryFolder folder;
  const Sample sample = small_sample();
  write_sample(folder.file("s"), sample);
  fault::arm("snapshot.read", 0, EINTR);
  const auto reader = SnapshotReader::open(folder.file("s"));
  fault::arm("snapshot.read", 0, EINTR);
  std::vector<std::byte> out(2048);
  reader->read_chunk(3, out.data());
  CHECK(out == sample.payload[3]);
  CHECK_FALSE(fault::any_armed);
}

TEST_CASE("AFileSizeLimitIsAClearErrorThatLeavesNothing") {
  const TemporaryFolder folder;
  rlimit before;
  REQUIRE(::getrlimit(RLIMIT_FSIZE, &before) == 0);
  const auto handler = std::signal(SIGXFSZ, SIG_IGN);
  rlimit low = before;
  low.rlim_cur = (2 << 20) + 12345;  // within the second chunk: a short write, then the refusal
  REQUIRE(::setrlimit(RLIMIT_FSIZE, &low) == 0);
  CHECK_THROWS_WITH_AS(write_sample(folder.file("s"), make_sample(large_layout(), 256)),
                       doctest::Contains("File too large"), StorageError);
  ::setrlimit(RLIMIT_FSIZE, &before);
  std::signal(SIGXFSZ, handler);
  CHECK(folder.names().empty());
}

TEST_CASE("AMissingOrUnusableTargetIsRefusedBeforeAnyByteIsWritten") {
  const TemporaryFolder folder;
  const auto refused = [&](const std::string& path, const char* words) {
    CHECK_THROWS_WITH_AS(SnapshotWriter(path, small_layout()), doctest::Contains(words),
                         StorageError);
  };
  refused(folder.file("missing/s"), "No such file or directory");
  refused(folder.path(), "Is a directory");
  refused(folder.path() + "/", "Is a directory");
  refused("", "No such file or directory");
  refused(folder.file(std::string(300, 'x')), "File name too long");
  refused("/dev/null", "not a regular file");
  CHECK(folder.names().empty());
  write_bytes(folder.file("file"), "x");
  refused(folder.file("file/s"), "Not a directory");
  CHECK(read_bytes(folder.file("file")) == "x");
}

TEST_CASE("APathWithANulByteIsNotCutShort") {
  const TemporaryFolder folder;
  CHECK_THROWS_WITH_AS(SnapshotWriter(folder.file("s") + std::string("\0tail", 5), small_layout()),
                       doctest::Contains("NUL byte"), InvalidArgumentError);
  CHECK(folder.names().empty());
}

TEST_CASE("AFolderWithoutWritePermissionIsRefused") {
  const TemporaryFolder folder;
  REQUIRE(::chmod(folder.path().c_str(), 0555) == 0);
  const uid_t user = ::geteuid();
  constexpr uid_t kNobody = 65534;
  if (user == 0) REQUIRE(::seteuid(kNobody) == 0);  // root may write anywhere
  CHECK_THROWS_WITH_AS(SnapshotWriter(folder.file("s"), small_layout()),
                       doctest::Contains("Permission denied"), StorageError);
  if (user == 0) REQUIRE(::seteuid(user) == 0);
  ::chmod(folder.path().c_str(), 0755);
  CHECK(folder.names().empty());
}

TEST_CASE("TheLongestNameTheFileSystemTakesCanBeSaved") {
  const TemporaryFolder folder;
  const std::string name(255, 'n');
  write_sample(folder.file(name), small_sample());
  CHECK(folder.names() == std::vector<std::string>{name});
}

}  // namespace
}  // namespace kvpager::snapshot_test
