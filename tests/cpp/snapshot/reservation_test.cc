// Room for a snapshot is taken when its writer is made, and whoever looks at the temporary can tell
// that its writer lives.
#include <doctest/doctest.h>
#include <fcntl.h>
#include <sched.h>
#include <sys/file.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <memory>

#include "../disarm.h"
#include "content.h"
#include "kvpager/error.h"
#include "kvpager/snapshot.h"

namespace kvpager::snapshot_test {
namespace {

using Where = TestContent::Where;

struct stat status_of(const std::string& path) {
  struct stat status{};
  REQUIRE(::stat(path.c_str(), &status) == 0);
  return status;
}

// The errno of locking the file, from a descriptor of one's own.
int lock_error(const std::string& path) {
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  REQUIRE(fd >= 0);
  const int error = ::flock(fd, LOCK_EX | LOCK_NB) == 0 ? 0 : errno;
  ::close(fd);
  return error;
}

// What the writer does in a process of its own, for which a limit or a mount holds alone; returns
// what it threw.
template <class Run>
std::string in_a_child(const Run& run) {
  int ends[2];
  REQUIRE(::pipe(ends) == 0);
  const pid_t child = ::fork();
  REQUIRE(child >= 0);
  if (child == 0) {
    std::string words = "nothing was thrown";
    try {
      run();
    } catch (const StorageError& e) {
      words = e.what();
    } catch (const std::exception& e) {
      words = std::string("another exception: ") + e.what();
    }
    static_cast<void>(!::write(ends[1], words.data(), words.size()));
    ::_exit(0);
  }
  ::close(ends[1]);
  std::string words(4096, '\0');
  const ssize_t n = ::read(ends[0], words.data(), words.size());
  ::close(ends[0]);
  int status = 0;
  ::waitpid(child, &status, 0);
  CHECK(status == 0);
  words.resize(n > 0 ? static_cast<size_t>(n) : 0);
  return words;
}

TEST_CASE("AReservedTemporaryHasItsSizeAndDiskSpaceAtOnceAndIsCutWhenSealed") {
  const TemporaryFolder folder;
  const Sample sample = content_sample(small_layout(), 53);
  write_sample(folder.file("expected"), sample);
  constexpr int64_t kReserved = 3 << 20;
  {
    SnapshotWriter writer(folder.file("s"), small_layout(), kReserved);
    const std::string temporary = folder.file(folder.names()[0]);
    CHECK(status_of(temporary).st_size == kReserved);
    CHECK(status_of(temporary).st_blocks * 512 >= kReserved);
    add_all(sample, &writer);
    const int64_t bytes = writer.seal(sample.meta);
    CHECK(status_of(temporary).st_size == bytes);
    CHECK(status_of(temporary).st_blocks * 512 < kReserved);
    writer.publish();
  }
  CHECK(folder.names() == std::vector<std::string>{"expected", "s"});
  CHECK(read_bytes(folder.file("s")) == read_bytes(folder.file("expected")));
  CHECK_THROWS_WITH_AS(SnapshotWriter(folder.file("t"), small_layout(), -1),
                       doctest::Contains("reserve_bytes is -1"), InvalidArgumentError);
  CHECK(folder.names().size() == 2);
}

TEST_CASE("AContentLargerThanWhatWasReservedIsWrittenAllTheSame") {
  const TemporaryFolder folder;
  const TestContent content(content_sample(small_layout(), 1600), Where::kInPlace);
  SnapshotWriter writer(folder.file("s"), small_layout(), 5000);
  writer.write_content(content, all_chunks(content), content.meta().fingerprint,
                       content.meta().session, nullptr);
  writer.publish();
  write_sample(folder.file("expected"), content.sample());
  CHECK(read_bytes(folder.file("s")) == read_bytes(folder.file("expected")));
}

TEST_CASE("WhereSpaceCannotBePromisedTheFileStillHasItsSize") {
  const testing::Disarm disarm;
  const TemporaryFolder folder;
  constexpr int64_t kReserved = 3 << 20;
  for (const int error : {EOPNOTSUPP, ENOSYS}) {
    fault::arm("snapshot.reserve", 0, error);
    const SnapshotWriter writer(folder.file("s"), small_layout(), kReserved);
    CHECK_FALSE(fault::any_armed);
    CHECK(status_of(folder.file(folder.names()[0])).st_size == kReserved);
  }
  fault::arm("snapshot.reserve", 0, EOPNOTSUPP);
  fault::arm("snapshot.truncate", 0, EFBIG);
  CHECK_THROWS_WITH_AS(SnapshotWriter(folder.file("s"), small_layout(), kReserved),
                       doctest::Contains("cannot reserve 3145728 bytes: File too large"),
                       StorageError);
  CHECK(folder.names().empty());
}

TEST_CASE("AFullDiskIsKnownWhenTheWriterIsMade") {
  const testing::Disarm disarm;
  const TemporaryFolder folder;
  fault::arm("snapshot.reserve", 0, ENOSPC);
  const std::string path = folder.file("s");
  CHECK_THROWS_WITH_AS(
      SnapshotWriter(path, small_layout(), 123456789),
      doctest::Contains(
          (path + ": cannot reserve 123456789 bytes: No space left on device").c_str()),
      StorageError);
  CHECK(folder.names().empty());
}

// A file system of 4 MiB, where the test may mount one.
TEST_CASE("OnADiskThatIsReallyFullEveryStepFailsClearlyAndLeavesNothing") {
  const TemporaryFolder folder;
  const auto mount_small = [&] {
    if (::unshare(CLONE_NEWNS) != 0 ||
        ::mount("none", "/", nullptr, MS_REC | MS_PRIVATE, nullptr) != 0 ||
        ::mount("none", folder.path().c_str(), "tmpfs", 0, "size=4m") != 0) {
      throw std::runtime_error("not permitted to mount");
    }
  };
  if (in_a_child(mount_small) != "nothing was thrown") {
    MESSAGE("skipped: no file system can be mounted here");
    return;
  }
  const Sample sample = content_sample(large_layout(), 64 * 4);
  const auto empty_afterwards = [&](const std::function<void()>& save) {
    return in_a_child([&] {
      mount_small();
      try {
        save();
      } catch (const StorageError&) {
        if (!folder.names().empty()) throw std::runtime_error("something was left behind");
        throw;
      }
    });
  };
  const std::string path = folder.file("s");
  CHECK(empty_afterwards([&] { SnapshotWriter(path, large_layout(), 64 << 20); }) ==
        path + ": cannot reserve 67108864 bytes: No space left on device");
  CHECK(empty_afterwards([&] {
          save_content(path, TestContent(sample, Where::kInPlace));
        }).find("cannot reserve") != std::string::npos);
  CHECK(empty_afterwards([&] { write_sample(path, sample); }).find("No space left on device") !=
        std::string::npos);
  // What was reserved is there, even if others fill the disk meanwhile.
  CHECK(empty_afterwards([&] {
          const Sample small = content_sample(large_layout(), 64);
          SnapshotWriter writer(path, large_layout(), 3 << 20);
          std::string filler(8 << 20, 'x');
          write_bytes(folder.file("filler"), filler);
          add_all(small, &writer);
          writer.finish(small.meta);
          SnapshotReader::open(path);
        }) == "nothing was thrown");
}

TEST_CASE("AFileSizeLimitIsKnownWhenTheWriterIsMade") {
  const TemporaryFolder folder;
  const std::string words = in_a_child([&] {
    std::signal(SIGXFSZ, SIG_IGN);
    const rlimit low{1 << 20, 1 << 20};
    if (::setrlimit(RLIMIT_FSIZE, &low) != 0) throw std::runtime_error("setrlimit");
    SnapshotWriter(folder.file("s"), small_layout(), 2 << 20);
  });
  CHECK(words == folder.file("s") + ": cannot reserve 2097152 bytes: File too large");
  CHECK(folder.names().empty());
}

TEST_CASE("TheFileIsLockedFromItsFirstMomentUntilItsWriterIsGone") {
  const TemporaryFolder folder;
  const Sample sample = small_sample();
  auto writer = std::make_unique<SnapshotWriter>(folder.file("s"), small_layout());
  const std::string temporary = folder.file(folder.names()[0]);
  CHECK(lock_error(temporary) == EWOULDBLOCK);
  add_all(sample, writer.get());
  writer->seal(sample.meta);
  CHECK(lock_error(temporary) == EWOULDBLOCK);
  writer->publish();
  CHECK(lock_error(folder.file("s")) == EWOULDBLOCK);
  writer.reset();
  CHECK(lock_error(folder.file("s")) == 0);
}

TEST_CASE("ATemporaryWhoseWriterWasKilledCanBeLocked") {
  const TemporaryFolder folder;
  const pid_t child = ::fork();
  REQUIRE(child >= 0);
  if (child == 0) {
    const SnapshotWriter writer(folder.file("s"), small_layout(), 1 << 20);
    ::kill(::getpid(), SIGKILL);
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  CHECK(WIFSIGNALED(status));
  REQUIRE(folder.names().size() == 1);
  CHECK(lock_error(folder.file(folder.names()[0])) == 0);
}

TEST_CASE("ATemporarySweptAwayBeforeItWasLockedIsMadeAgain") {
  const testing::Disarm disarm;
  const TemporaryFolder folder;
  fault::arm("snapshot.lock", 0, EWOULDBLOCK);  // somebody who sweeps holds it
  write_sample(folder.file("s"), small_sample());
  CHECK_FALSE(fault::any_armed);
  CHECK(folder.names() == std::vector<std::string>{"s"});
}

TEST_CASE("AFileSystemWithoutLocksCanBeWrittenTo") {
  const testing::Disarm disarm;
  const TemporaryFolder folder;
  fault::arm("snapshot.lock", 0, EOPNOTSUPP);
  write_sample(folder.file("s"), small_sample());
  CHECK_FALSE(fault::any_armed);
  CHECK(folder.names() == std::vector<std::string>{"s"});
}

TEST_CASE("TheSizeForAReservationIsEnoughAndLittleMore") {
  const TemporaryFolder folder;
  constexpr int64_t kSlack = 8 << 10;
  for (const int64_t tokens : {0, 5, 16, 53, 16 * 300, 16 * 300 + 1}) {
    const TestContent content(content_sample(small_layout(), tokens), Where::kInPlace);
    const SnapshotMeta& meta = content.meta();
    const int64_t sealed = meta.sealed_chunks();
    const bool tail = static_cast<int64_t>(meta.chunks.size()) > sealed;
    const int64_t whole =
        snapshot_file_bytes(meta, sealed, tail, meta.fingerprint, meta.session, 0);
    const int64_t real = save_content(folder.file("s"), content);
    CHECK(real <= whole);
    CHECK(whole <= real + kSlack);
    if (sealed == 0) continue;
    const int64_t manifest =
        snapshot_file_bytes(meta, sealed, tail, meta.fingerprint, meta.session, 1);
    SnapshotWriter writer(folder.file("m"), small_layout());
    const int64_t real_manifest =
        writer.write_manifest(content, one_pack({1, 2}, sealed),
                              summary_checksums(content.sample()), meta.fingerprint, meta.session);
    CHECK(real_manifest <= manifest);
    CHECK(manifest <= real_manifest + kSlack);
  }
}

}  // namespace
}  // namespace kvpager::snapshot_test
