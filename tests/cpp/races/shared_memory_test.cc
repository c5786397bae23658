// Which accesses to shared memory the checking shim calls a race: exactly those that no barrier of
// threads of both orders, whatever the order they happened in.
#include <doctest/doctest.h>

#include <cstdlib>
#include <cstring>
#include <string>

#include "cuda/portable.h"
#include "died.h"

namespace kvpager::gpu {
namespace {

enum class Step {
  kBlockBarrier,
  kWarpBarrier,
  kShuffle,
  kNothing,
};

struct Exchange {
  const uint32_t* in;  // [4] of one copy
  uint32_t* out;       // [threads]
  Step step = Step::kNothing;
  int distance = 1;  // between the threads that write a word and read it
  bool waits = true;
};

KVP_DEVICE void take(Step step) {
  if (step == Step::kBlockBarrier) sync_block();
  if (step == Step::kWarpBarrier) sync_warp();
  if (step == Step::kShuffle) shuffle(1, 0);
}

KVP_DEVICE uint32_t* words() { return reinterpret_cast<uint32_t*>(shared_memory()); }

KVP_KERNEL write_then_read(const Exchange p) {
  const int thread = thread_index();
  words()[thread] = static_cast<uint32_t>(thread);
  take(p.step);
  p.out[thread] = words()[(thread + p.distance) % block_threads()];
}

KVP_KERNEL read_then_write(const Exchange p) {
  const int thread = thread_index();
  p.out[thread] = words()[(thread + p.distance) % block_threads()];
  take(p.step);
  words()[thread] = static_cast<uint32_t>(thread);
}

// Every order gives the same words, so that no comparison of results finds it.
KVP_KERNEL all_write_one(const Exchange p) {
  words()[0] = 7;
  take(p.step);
  if (thread_index() == 0) p.out[0] = words()[0];
}

KVP_KERNEL neighbouring_bytes(const Exchange p) {
  shared_memory()[thread_index()] = static_cast<unsigned char>(thread_index());
  p.out[thread_index()] = shared_memory()[thread_index()];
}

KVP_KERNEL count_together(const Exchange p) {
  int32_t* const count = reinterpret_cast<int32_t*>(shared_memory());
  if (thread_index() == 0) *count = 0;
  sync_block();
  atomic_add(count, 1);
  take(p.step);
  p.out[thread_index()] = static_cast<uint32_t>(*count);
}

KVP_KERNEL read_by_one_lane(const Exchange p) {
  uint32_t* const shared = words();
  const int thread = thread_index();
  if (thread % 32 < 4) copy_async16(shared + 4 * (thread % 32 + thread / 32 * 4), p.in, true);
  copy_async_commit();
  if (p.waits) copy_async_wait<0>();
  take(p.step);
  p.out[thread] = shared[(thread % 32 / 8 + thread / 32 * 4) * 4];
}

KVP_KERNEL load_rows(const Exchange p) {
  const int lane = lane_index();
  for (int i = 0; i < 4; ++i) words()[4 * lane + i] = static_cast<uint32_t>(lane);
  take(p.step);
  uint32_t fragment[4];
  load_matrix_x4(fragment, words() + 4 * lane);
  take(p.step);
  words()[4 * (31 - lane)] = fragment[0];
  p.out[lane] = fragment[1];
}

// How a process ends that runs the kernel.
testing::Ending ending_of(void (*kernel)(Exchange), Exchange p, int threads) {
  return testing::ending_of([&] {
    alignas(16) static uint32_t in[4];
    static uint32_t out[1024];
    p.in = in;
    p.out = out;
    launch(kernel, {2, threads, 4096, nullptr}, p);
  });
}

bool has_race(void (*kernel)(Exchange), Step step, int distance = 1, int threads = 64,
              bool waits = true) {
  Exchange p{};
  p.step = step;
  p.distance = distance;
  p.waits = waits;
  const auto [text, ended] = ending_of(kernel, p, threads);
  CAPTURE(text);
  CHECK(ended == (text.find("race on byte") != std::string::npos));
  return ended;
}

TEST_CASE("a block barrier orders all threads, a warp barrier those of the warp, a shuffle none") {
  for (const auto kernel : {write_then_read, read_then_write}) {
    CHECK_FALSE(has_race(kernel, Step::kNothing, 0));
    CHECK(has_race(kernel, Step::kNothing));
    CHECK(has_race(kernel, Step::kShuffle));
    CHECK(has_race(kernel, Step::kWarpBarrier));
    CHECK_FALSE(has_race(kernel, Step::kWarpBarrier, 1, 32));
    CHECK_FALSE(has_race(kernel, Step::kBlockBarrier));
  }
}

TEST_CASE("writes of the same word are a race even where all write the same") {
  CHECK(has_race(all_write_one, Step::kNothing));
  CHECK(has_race(all_write_one, Step::kBlockBarrier, 1, 32));
}

TEST_CASE("bytes beside each other are no race") {
  CHECK_FALSE(has_race(neighbouring_bytes, Step::kNothing));
}

TEST_CASE("atomic operations race with plain accesses and not with each other") {
  CHECK(has_race(count_together, Step::kNothing));
  CHECK_FALSE(has_race(count_together, Step::kBlockBarrier));
}

TEST_CASE("a background copy is its thread's after a wait and the others' after a barrier too") {
  CHECK(has_race(read_by_one_lane, Step::kWarpBarrier, 1, 64, false));
  CHECK(has_race(read_by_one_lane, Step::kNothing));
  CHECK(has_race(read_by_one_lane, Step::kShuffle));
  CHECK_FALSE(has_race(read_by_one_lane, Step::kWarpBarrier));
}

TEST_CASE("the rows of a matrix load are read by the lanes that name them") {
  CHECK(has_race(load_rows, Step::kNothing, 1, 32));
  CHECK_FALSE(has_race(load_rows, Step::kWarpBarrier, 1, 32));
}

TEST_CASE("a race is reported with its kernel, both threads and both lines") {
  Exchange p{};
  p.distance = 32;
  const auto [text, ended] = ending_of(write_then_read, p, 64);
  CAPTURE(text);
  CHECK(ended);
  CHECK(text.find(" of 2, warp ") != std::string::npos);
  CHECK(text.find(" of 4096 of shared memory: thread ") != std::string::npos);
  CHECK(text.find("  in the kernel\n") != std::string::npos);
  if (std::system("addr2line --version >/dev/null 2>&1") != 0) return;
  CHECK(text.find("write_then_read") != std::string::npos);
  CHECK(text.find("shared_memory_test.cc:") != std::string::npos);
}

}  // namespace
}  // namespace kvpager::gpu
