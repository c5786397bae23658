// seal and publish: a file is whole before it has its name, and a process that dies anywhere on the
// way leaves the old file or the new one.
#include <doctest/doctest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>

#include "base/fault.h"
#include "content.h"
#include "kvpager/error.h"
#include "kvpager/snapshot.h"

namespace kvpager::snapshot_test {
namespace {

using Where = TestContent::Where;

TEST_CASE("ASealedFileIsWholeAndHasNoNameYet") {
  const TemporaryFolder folder;
  const Sample sample = small_sample();
  write_sample(folder.file("s"), make_sample(small_layout(), 19));
  const std::string old = read_bytes(folder.file("s"));
  std::string sealed;
  {
    SnapshotWriter writer(folder.file("s"), small_layout());
    add_all(sample, &writer);
    const int64_t bytes = writer.seal(sample.meta);
    CHECK(read_bytes(folder.file("s")) == old);
    REQUIRE(folder.names().size() == 2);
    const std::string temporary = folder.file(folder.names()[0]);
    sealed = read_bytes(temporary);
    CHECK(static_cast<int64_t>(sealed.size()) == bytes);
    CHECK(read_all(*SnapshotReader::open(temporary)).payload == sample.payload);
  }
  // Destroyed before it was published: as if it had never been.
  CHECK(folder.names() == std::vector<std::string>{"s"});
  CHECK(read_bytes(folder.file("s")) == old);

  SnapshotWriter writer(folder.file("s"), small_layout());
  add_all(sample, &writer);
  writer.seal(sample.meta);
  writer.publish();
  CHECK(folder.names() == std::vector<std::string>{"s"});
  CHECK(read_bytes(folder.file("s")) == sealed);
}

TEST_CASE("CallsOutOfTurnAreRefusedAndChangeNothing") {
  const TemporaryFolder folder;
  const Sample sample = small_sample();
  SnapshotWriter writer(folder.file("s"), small_layout());
  CHECK_THROWS_AS(writer.publish(), InvalidArgumentError);
  add_all(sample, &writer);
  CHECK_THROWS_AS(writer.publish(), InvalidArgumentError);
  writer.seal(sample.meta);
  CHECK_THROWS_AS(writer.seal(sample.meta), InvalidArgumentError);
  CHECK_THROWS_AS(writer.finish(sample.meta), InvalidArgumentError);
  CHECK_THROWS_AS(writer.add_chunk(sample.payload[0].data()), InvalidArgumentError);
  CHECK_THROWS_AS(writer.add_summary(sample.summaries[0].data(), 1), InvalidArgumentError);
  writer.publish();
  CHECK_THROWS_AS(writer.publish(), InvalidArgumentError);
  CHECK_THROWS_AS(writer.add_chunk(sample.payload[0].data()), InvalidArgumentError);
  CHECK(read_all(*SnapshotReader::open(folder.file("s"))).payload == sample.payload);
}

// Dies at the n-th visit of a point, for every n; returns how many visits there are. In the child,
// no exception passes: it ends before.
int die_at_every_visit(const char* point, const TestContent& content, bool over) {
  const TemporaryFolder folder;
  const std::string path = folder.file("s");
  std::string old;
  if (over) {
    write_sample(path, make_sample(small_layout(), 19));
    old = read_bytes(path);
  }
  const TemporaryFolder elsewhere;
  save_content(elsewhere.file("expected"), content);
  const std::string expected = read_bytes(elsewhere.file("expected"));
  for (int n = 0;; ++n) {
    const pid_t child = ::fork();
    REQUIRE(child >= 0);
    if (child == 0) {
      fault::arm(point, n, fault::kKill);
      try {
        SnapshotWriter writer(path, content.meta().layout, 1 << 20);
        writer.write_content(content, all_chunks(content), content.meta().fingerprint,
                             content.meta().session, nullptr);
        writer.publish();
      } catch (...) {
        ::_exit(1);
      }
      ::_exit(0);
    }
    int status = 0;
    ::waitpid(child, &status, 0);
    const bool finished = WIFEXITED(status) && WEXITSTATUS(status) == 0;
    CHECK((finished || (WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL)));
    bool named = false;
    for (const std::string& name : folder.names()) {
      if (name == "s") {
        named = true;
      } else {
        CHECK(name.find(".kvsnap-") == 0);
        ::unlink(folder.file(name).c_str());
      }
    }
    CHECK((named || (!over && !finished)));
    if (named) {
      const std::string now = read_bytes(path);
      CHECK((now == expected || (!finished && now == old)));
    }
    if (finished) return n;
  }
}

TEST_CASE("AProcessThatDiesAtAnyStepLeavesTheOldSnapshotOrTheNewOne") {
  for (const bool over : {false, true}) {
    const TestContent content(content_sample(large_layout(), 64 * 3 + 1), Where::kInPlace);
    CHECK(die_at_every_visit("snapshot.create", content, over) == 1);
    CHECK(die_at_every_visit("snapshot.lock", content, over) == 1);
    CHECK(die_at_every_visit("snapshot.reserve", content, over) == 2);  // asked for, needed
    CHECK(die_at_every_visit("snapshot.write", content, over) == 6);    // 4 groups, metadata, front
    CHECK(die_at_every_visit("snapshot.truncate", content, over) == 1);
    CHECK(die_at_every_visit("snapshot.fsync", content, over) == 2);  // file, folder
    CHECK(die_at_every_visit("snapshot.rename", content, over) == 1);
  }
}

}  // namespace
}  // namespace kvpager::snapshot_test
