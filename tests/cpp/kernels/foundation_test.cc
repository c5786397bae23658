#include <doctest/doctest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <ctime>
#include <memory>
#include <set>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "base/processor.h"
#include "kernels/kernel_table.h"
#include "kvpager/attention.h"
#include "kvpager/error.h"
#include "kvpager/layout.h"
#include "kvpager/thread_pool.h"

namespace kvpager {
namespace {

Layout good_layout() {
  Layout layout;
  layout.layers = 2;
  layout.kv_heads = 2;
  layout.k_dim = 64;
  layout.v_dim = 128;
  return layout;
}

TEST_CASE("a layout out of range is refused by the name of its first bad field") {
  good_layout().validate();
  const auto refused = [](auto change, const char* words) {
    Layout layout = good_layout();
    change(layout);
    CHECK_THROWS_WITH_AS(layout.validate(), doctest::Contains(words), InvalidArgumentError);
  };
  refused([](Layout& l) { l.layers = 0; }, "layout.layers is 0");
  refused([](Layout& l) { l.layers = 1025; }, "layout.layers is 1025");
  refused([](Layout& l) { l.kv_heads = -1; }, "layout.kv_heads is -1");
  refused([](Layout& l) { l.chunk_tokens = 48; }, "layout.chunk_tokens is 48");
  refused([](Layout& l) { l.k_dim = 72; }, "layout.k_dim is 72; expected a multiple of 16");
  refused([](Layout& l) { l.v_dim = 528; }, "layout.v_dim is 528");
  refused([](Layout& l) { l.k_dtype = DType::kFloat8E4M3; }, "layout.k_dtype is float8_e4m3");
  refused([](Layout& l) { l.k_dtype = DType::kQ4, l.k_dim = 48; },
          "layout.k_dtype is q4 and k_dim is 48; expected a multiple of 32");
  refused([](Layout& l) { l.v_dtype = DType::kFloat8E4M3; }, "layout.v_dtype is float8_e4m3");
}

TEST_CASE("dtypes and provenances have the names users see") {
  CHECK(std::string(dtype_name(DType::kFloat32)) == "float32");
  CHECK(std::string(dtype_name(DType::kFloat16)) == "float16");
  CHECK(std::string(dtype_name(DType::kBFloat16)) == "bfloat16");
  CHECK(std::string(provenance_name(Provenance::kExact)) == "exact");
  CHECK(std::string(provenance_name(Provenance::kDecode)) == "decode");
  CHECK(std::string(provenance_name(Provenance::kApproximate)) == "approximate");
}

TEST_CASE("every item runs exactly once, on a thread of the pool") {
  for (const int threads : {1, 2, 5}) {
    ThreadPool pool(threads);
    CHECK(pool.threads() == threads);
    for (const int64_t items : {0, 1, 2, 7, 1000}) {
      for (int round = 0; round < 20; ++round) {
        std::vector<std::atomic<int>> runs(static_cast<size_t>(items));
        std::atomic<int> strangers{0};
        pool.run(items, [&](int64_t item, int thread) {
          ++runs[static_cast<size_t>(item)];
          strangers += thread < 0 || thread >= threads;
        });
        for (const auto& count : runs) CHECK(count == 1);
        CHECK(strangers == 0);
      }
    }
  }
}

// Items that wait for each other: how many of them met, each on a thread of its own.
class Meeting {
 public:
  explicit Meeting(int expected) : expected_(expected) {}
  void attend() {
    ++arrived_;
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(20);
    while (arrived_ < expected_ && std::chrono::steady_clock::now() < deadline) {
      std::this_thread::yield();
    }
    if (arrived_ == expected_) ++met_;
  }
  int met() const { return met_; }

 private:
  const int expected_;
  std::atomic<int> arrived_{0};
  std::atomic<int> met_{0};
};

TEST_CASE("two items of a pool of two run at the same time") {
  ThreadPool pool(2);
  Meeting meeting(2);
  pool.run(2, [&](int64_t, int) { meeting.attend(); });
  CHECK(meeting.met() == 2);
}

TEST_CASE("as many threads as are wanted come, whether they were awake or asleep") {
  constexpr std::chrono::microseconds kPauses[] = {
      std::chrono::microseconds(0), std::chrono::microseconds(2), std::chrono::microseconds(5),
      std::chrono::microseconds(50), std::chrono::milliseconds(5)};
  ThreadPool pool(4);
  for (int round = 0; round < 60; ++round) {
    const int wanted = 2 + round % 3;
    CAPTURE(round);
    Meeting meeting(wanted);
    pool.run(wanted, [&](int64_t, int) { meeting.attend(); }, wanted);
    REQUIRE(meeting.met() == wanted);
    const auto until = std::chrono::steady_clock::now() + kPauses[round % 5];
    while (std::chrono::steady_clock::now() < until) std::this_thread::yield();
  }
}

TEST_CASE("workers that are called ahead of a run come to it, sooner or later than it does") {
  constexpr std::chrono::microseconds kPauses[] = {
      std::chrono::microseconds(0), std::chrono::microseconds(20), std::chrono::microseconds(60),
      std::chrono::milliseconds(5)};
  ThreadPool pool(4);
  for (int round = 0; round < 60; ++round) {
    const int wanted = 1 + round % 4;
    CAPTURE(round);
    const ThreadPool::Awake awake(pool, wanted);
    for (int run = 0; run < 3; ++run) {
      std::this_thread::sleep_for(kPauses[(round + run) % 4]);
      Meeting meeting(4);
      pool.run(4, [&](int64_t, int) { meeting.attend(); });
      REQUIRE(meeting.met() == 4);
    }
  }
}

TEST_CASE("workers that are called ahead of a run that does not come go to sleep") {
  ThreadPool pool(4);
  const auto spent = [] {
    return static_cast<double>(std::clock()) / CLOCKS_PER_SEC;  // by all threads
  };
  const double before = spent();
  {
    const ThreadPool::Awake awake(pool, 4);
    std::this_thread::sleep_for(std::chrono::milliseconds(300));
  }
  CHECK(spent() - before < 0.1);
}

// As an OpenMP runtime's GOMP_parallel: the caller is one of the threads.
void run_in_threads(void (*function)(void*), void* data, unsigned threads, unsigned) {
  std::vector<std::thread> others;
  for (unsigned i = 1; i < threads; ++i) others.emplace_back(function, data);
  function(data);
  for (std::thread& thread : others) thread.join();
}

TEST_CASE("a pool in a runtime's threads runs every item once, in as many threads as it has") {
  ThreadPool pool(3, ThreadPool::Runtime{&run_in_threads});
  CHECK(pool.threads() == 3);
  for (const int64_t items : {1, 2, 3, 1000}) {
    std::vector<std::atomic<int>> runs(static_cast<size_t>(items));
    std::atomic<bool> known{true};
    pool.run(items, [&](int64_t item, int thread) {
      runs[static_cast<size_t>(item)]++;
      if (thread < 0 || thread >= 3) known = false;
    });
    CHECK(known);
    CHECK(std::all_of(runs.begin(), runs.end(), [](const std::atomic<int>& n) { return n == 1; }));
  }
  Meeting meeting(3);
  pool.run(3, [&](int64_t, int) { meeting.attend(); });
  CHECK(meeting.met() == 3);
  const ThreadPool::Awake awake(pool, 3);  // nothing to wake
  pool.run(3, [&](int64_t, int) {});
}

TEST_CASE("an exception in a runtime's thread comes to the caller, and later runs work") {
  ThreadPool pool(3, ThreadPool::Runtime{&run_in_threads});
  CHECK_THROWS_WITH(pool.run(100,
                             [](int64_t item, int) {
                               if (item == 7) throw std::runtime_error("seven");
                             }),
                    "seven");
  std::atomic<int> done{0};
  pool.run(100, [&](int64_t, int) { done++; });
  CHECK(done == 100);
}

TEST_CASE("two threads may run a pool at the same time, with workers or in a runtime's threads") {
  for (const bool own : {true, false}) {
    std::unique_ptr<ThreadPool> pool =
        own ? std::make_unique<ThreadPool>(3)
            : std::make_unique<ThreadPool>(3, ThreadPool::Runtime{&run_in_threads});
    std::atomic<int64_t> sum{0};
    const auto caller = [&] {
      for (int round = 0; round < 300; ++round) {
        std::vector<int> seen(20);
        pool->run(20, [&](int64_t item, int) { seen[static_cast<size_t>(item)]++; });
        sum += std::count(seen.begin(), seen.end(), 1);
      }
    };
    std::thread other(caller);
    caller();
    other.join();
    CHECK(sum == 2 * 300 * 20);
  }
}

TEST_CASE("a run that opens while a worker goes to sleep is not missed") {
  ThreadPool pool(2);
  for (int round = 0; round < 3000; ++round) {
    Meeting meeting(2);
    pool.run(2, [&](int64_t, int) { meeting.attend(); });
    REQUIRE(meeting.met() == 2);
    for (int i = 0; i < round % 200; ++i) std::this_thread::yield();  // up to tens of microseconds
  }
}

TEST_CASE("a run ends when the last of its items has, whichever thread it is on") {
  ThreadPool pool(3);
  for (int round = 0; round < 5; ++round) {
    Meeting meeting(3);
    std::atomic<int> done{0};
    pool.run(3, [&](int64_t, int thread) {
      meeting.attend();
      if (thread != 0) std::this_thread::sleep_for(std::chrono::milliseconds(20));
      ++done;
    });
    CHECK(done == 3);
  }
}

TEST_CASE("an exception is rethrown once, and the pool works on") {
  ThreadPool pool(3);
  for (int round = 0; round < 50; ++round) {
    std::atomic<int> after{0};
    CHECK_THROWS_AS(pool.run(100,
                             [&](int64_t item, int) {
                               if (item == 5) throw std::out_of_range("item 5");
                               ++after;
                             }),
                    std::out_of_range);
    CHECK(after < 100);
    std::atomic<int> ran{0};
    pool.run(10, [&](int64_t, int) { ++ran; });
    CHECK(ran == 10);
  }
  CHECK_THROWS_AS(ThreadPool(0), InvalidArgumentError);
}

TEST_CASE("work too small to wake anybody for stays on the thread that brings it") {
  ThreadPool pool(4, 1000);
  CHECK(pool.worth_waking(0) == 1);
  CHECK(pool.worth_waking(1999) == 1);
  CHECK(pool.worth_waking(2000) == 2);
  CHECK(pool.worth_waking(3500) == 3);
  CHECK(pool.worth_waking(int64_t{1} << 60) == 4);
  CHECK(ThreadPool(4, 0).worth_waking(0) == 4);
  const std::thread::id caller = std::this_thread::get_id();
  bool elsewhere = false;
  pool.run(
      100,
      [&](int64_t, int thread) {
        elsewhere = elsewhere || thread != 0 || std::this_thread::get_id() != caller;
      },
      pool.worth_waking(1500));
  CHECK_FALSE(elsewhere);
}

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
TEST_CASE("the processor is asked as the compiler's own library asks it") {
  __builtin_cpu_init();
  const Processor found = ask_processor();
  CHECK((found.level >= 3) == (__builtin_cpu_supports("x86-64-v3") != 0));
  CHECK((found.level >= 4) == (__builtin_cpu_supports("x86-64-v4") != 0));
  CHECK((found.level >= 4 && found.vnni) ==
        (found.level >= 4 && __builtin_cpu_supports("avx512vnni") != 0));
  CHECK(found.bf16 == (found.vnni && __builtin_cpu_supports("avx512bf16") != 0));
}
#endif

TEST_CASE("KVPAGER_ISA chooses a tier, downwards only, and refuses words it does not know") {
  CHECK(choose_level(nullptr, 4) == 4);
  CHECK(choose_level("", 3) == 3);
  CHECK(choose_level("base", 4) == 1);
  CHECK(choose_level("v3", 4) == 3);
  CHECK(choose_level("v4", 4) == 4);
  CHECK_THROWS_WITH_AS(choose_level("avx2", 4), doctest::Contains("avx2"), InvalidArgumentError);
  CHECK_THROWS_WITH_AS(choose_level("v4", 3), doctest::Contains("cannot run"),
                       InvalidArgumentError);
  CHECK(std::string(isa_name()) == kernels().name);
}

}  // namespace
}  // namespace kvpager
