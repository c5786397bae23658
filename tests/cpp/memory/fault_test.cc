#include "kvpager/fault.h"

#include <cerrno>
#include <thread>
#include <vector>

#include "doctest.h"

namespace kvpager {
namespace {

struct Disarm {
  ~Disarm() { fault::disarm_all(); }
};

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
