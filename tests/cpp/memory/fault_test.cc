#include "base/fault.h"

#include <doctest/doctest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <thread>
#include <vector>

#include "../disarm.h"

namespace kvpager {
namespace {

using testing::Disarm;

TEST_CASE("nothing armed: every visit passes") {
  CHECK_FALSE(fault::any_armed.load());
  CHECK(fault::visit("disk.write") == 0);
}

TEST_CASE("the nth visit of a point fails once with the given errno") {
  const Disarm disarm;
  for (int64_t after = 0; after < 4; ++after) {
    fault::arm("disk.write", after, ENOSPC);
    for (int64_t i = 0; i < after; ++i) CHECK(fault::visit("disk.write") == 0);
    CHECK(fault::visit("disk.write") == ENOSPC);
    CHECK(fault::visit("disk.write") == 0);
    CHECK_FALSE(fault::any_armed.load());
  }
}

TEST_CASE("points count their own visits alone") {
  const Disarm disarm;
  fault::arm("disk.write", 1, EIO);
  fault::arm("disk.read", 0, EACCES);
  CHECK(fault::visit("host.write") == 0);
  CHECK(fault::visit("disk.read") == EACCES);
  CHECK(fault::any_armed.load());
  CHECK(fault::visit("disk.read") == 0);
  CHECK(fault::visit("disk.write") == 0);
  CHECK(fault::visit("disk.write") == EIO);
}

TEST_CASE("disarming takes everything back, arming again replaces") {
  const Disarm disarm;
  fault::arm("disk.write", 0, EIO);
  fault::disarm_all();
  CHECK(fault::visit("disk.write") == 0);
  fault::arm("disk.write", 0, EIO);
  fault::arm("disk.write", 1, ENOSPC);
  CHECK(fault::visit("disk.write") == 0);
  CHECK(fault::visit("disk.write") == ENOSPC);
}

TEST_CASE("a short transfer moves some bytes, at least one, once") {
  const Disarm disarm;
  CHECK(fault::visit_transfer("snapshot.write", 100) == 100);
  fault::arm_short("snapshot.write", 1, 30);
  CHECK(fault::visit_transfer("snapshot.write", 100) == 100);
  CHECK(fault::visit_transfer("snapshot.write", 100) == 30);
  CHECK(fault::visit_transfer("snapshot.write", 100) == 100);
  fault::arm_short("snapshot.write", 0, 0);
  CHECK(fault::visit_transfer("snapshot.write", 100) == 1);
  fault::arm_short("snapshot.write", 0, 1000);
  CHECK(fault::visit_transfer("snapshot.write", 100) == 100);
  CHECK_FALSE(fault::any_armed.load());
}

TEST_CASE("a transfer meets an armed errno as a negative number of bytes") {
  const Disarm disarm;
  fault::arm("snapshot.write", 0, ENOSPC);
  CHECK(fault::visit_transfer("snapshot.write", 100) == -ENOSPC);
  CHECK(fault::visit_transfer("snapshot.write", 100) == 100);
}

TEST_CASE("an armed kill ends the process at that visit") {
  const pid_t child = fork();
  REQUIRE(child >= 0);
  if (child == 0) {
    fault::arm("snapshot.fsync", 1, fault::kKill);
    if (fault::visit("snapshot.fsync") != 0) _exit(1);
    fault::visit("snapshot.fsync");
    _exit(2);
  }
  int status = 0;
  waitpid(child, &status, 0);
  CHECK(WIFSIGNALED(status));
  CHECK(WTERMSIG(status) == SIGKILL);
}

TEST_CASE("of many threads exactly one meets the fault") {
  const Disarm disarm;
  fault::arm("disk.read", 50, EIO);
  std::vector<int> failures(4, 0);
  std::vector<std::thread> threads;
  for (int& count : failures) {
    threads.emplace_back([&count] {
      for (int i = 0; i < 100; ++i) count += fault::visit("disk.read") != 0 ? 1 : 0;
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK(failures[0] + failures[1] + failures[2] + failures[3] == 1);
}

}  // namespace
}  // namespace kvpager
