// The order in which the shim runs things: everything a barrier allows, over the seeds, and nothing it
// forbids; what would hang or be undefined on a GPU ends the process with a message.
#include <doctest/doctest.h>

#include <algorithm>
#include <cstring>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "../device/devices.h"
#include "cuda/portable.h"
#include "died.h"

namespace kvpager::gpu {
namespace {

constexpr uint64_t kSeeds = 50;

// A tiled kernel as kernels here are: tiles come by asynchronous copies into two buffers, each warp
// turns its part through shared memory of its own, and the block adds up what other warps made.
struct Tiled {
  const uint32_t* in;  // [blocks][kTiles][kTileWords]
  uint32_t* out;       // [blocks][kTileWords]
  bool wait = true, arrive = true, release = true, turn = true, turned = true;
};
constexpr int kTiles = 4;
constexpr int kTiledThreads = 128;
constexpr int kTileWords = 4 * kTiledThreads;

KVP_DEVICE void fetch_tile(const Tiled& p, uint32_t* buffer, int tile) {
  const int64_t first = (block_index() * kTiles + tile) * kTileWords;
  copy_async16(buffer + 4 * thread_index(), p.in + first + 4 * thread_index(), true);
}

KVP_KERNEL tiled(const Tiled p) {
  uint32_t* const buffers = reinterpret_cast<uint32_t*>(shared_memory());
  uint32_t* const own = buffers + 2 * kTileWords + 32 * warp_index();
  const int thread = thread_index();
  uint32_t sums[4] = {0, 0, 0, 0};
  fetch_tile(p, buffers, 0);
  copy_async_commit();
  for (int tile = 0; tile < kTiles; ++tile) {
    if (tile + 1 < kTiles) fetch_tile(p, buffers + (tile + 1) % 2 * kTileWords, tile + 1);
    copy_async_commit();
    if (p.wait) copy_async_wait<1>();
    if (p.arrive) sync_block();
    const uint32_t* const buffer = buffers + tile % 2 * kTileWords;
    for (int i = 0; i < 4; ++i) {
      // A word that another warp copied, by way of another lane.
      own[lane_index()] = buffer[(i * kTiledThreads + thread + 45) % kTileWords];
      if (p.turn) sync_warp();
      sums[i] += own[31 - lane_index()] * static_cast<uint32_t>(tile + 1);
      if (p.turned) sync_warp();
    }
    if (p.release) sync_block();
  }
  for (int i = 0; i < 4; ++i)
    p.out[block_index() * kTileWords + i * kTiledThreads + thread] = sums[i];
}

bool tiled_is_right(Tiled p, uint64_t seed) {
  constexpr int kBlocks = 2;
  alignas(16) static uint32_t in[kBlocks * kTiles * kTileWords];
  for (uint32_t i = 0; i < std::size(in); ++i) in[i] = i * 2654435761u + 12345;
  std::vector<uint32_t> out(kBlocks * kTileWords), expected(out.size());
  for (size_t block = 0; block < kBlocks; ++block) {
    for (size_t i = 0; i < kTileWords; ++i) {
      const size_t thread = i % kTiledThreads;
      const size_t partner = thread / 32 * 32 + 31 - thread % 32;
      const size_t word = (i / kTiledThreads * kTiledThreads + partner + 45) % kTileWords;
      for (size_t tile = 0; tile < kTiles; ++tile) {
        expected[block * kTileWords + i] +=
            in[(block * kTiles + tile) * kTileWords + word] * static_cast<uint32_t>(tile + 1);
      }
    }
  }
  p.in = in;
  p.out = out.data();
  shim::set_seed(seed);
  const int64_t shared = (2 * kTileWords + kTiledThreads) * int64_t{sizeof(uint32_t)};
  REQUIRE(launch(tiled, {kBlocks, kTiledThreads, shared, nullptr}, p) == 0);
  return out == expected;
}

TEST_CASE("a kernel with its barriers is right in every seed, and wrong without any one of them") {
  for (uint64_t seed = 0; seed < kSeeds; ++seed) CHECK(tiled_is_right({}, seed));
  bool Tiled::* const barriers[] = {&Tiled::wait, &Tiled::arrive, &Tiled::release, &Tiled::turn,
                                    &Tiled::turned};
  for (size_t i = 0; i < std::size(barriers); ++i) {
    Tiled without{};
    without.*barriers[i] = false;
    int wrong = 0;
    for (uint64_t seed = 0; seed < kSeeds; ++seed) wrong += !tiled_is_right(without, seed);
    CAPTURE(i);
    CHECK(wrong >= static_cast<int>(kSeeds) * 9 / 10);
  }
}

struct Trace {
  int32_t* next;
  int32_t* order;  // [threads of the grid] when each passed
};

KVP_KERNEL trace(const Trace p) {
  const int64_t at = block_index() * block_threads() + thread_index();
  p.order[at] = atomic_add(p.next, 1);
  sync_warp();
  p.order[grid_blocks() * block_threads() + at] = atomic_add(p.next, 1);
}

std::vector<int32_t> order_of(uint64_t seed) {
  int32_t next = 0;
  std::vector<int32_t> order(2 * 4 * 128);
  shim::set_seed(seed);
  REQUIRE(launch(trace, {4, 128, 0, nullptr}, Trace{&next, order.data()}) == 0);
  return order;
}

TEST_CASE("a seed stands for one order, and different seeds for different ones") {
  std::set<std::vector<int32_t>> orders;
  std::set<int32_t> first_block, first_warp, first_lane;
  for (uint64_t seed = 0; seed < kSeeds; ++seed) {
    const std::vector<int32_t> order = order_of(seed);
    CHECK(order_of(seed) == order);
    orders.insert(order);
    const auto first =
        static_cast<int32_t>(std::find(order.begin(), order.end(), 0) - order.begin());
    first_block.insert(first / 128);
    first_warp.insert(first / 32 % 4);
    first_lane.insert(first % 32);
  }
  CHECK(orders.size() == kSeeds);
  CHECK(first_block.size() == 4);
  CHECK(first_warp.size() == 4);
  CHECK(first_lane.size() >= 16);
}

TEST_CASE("a warp may be far ahead of another, or side by side with it, between block barriers") {
  bool ahead = false, between = false;
  for (uint64_t seed = 0; seed < kSeeds; ++seed) {
    const std::vector<int32_t> order = order_of(seed);
    const int32_t* second = &order[4 * 128];
    for (size_t warp = 0; warp < 16; ++warp) {
      const size_t other = warp / 4 * 4 + (warp + 1) % 4;
      // Before the other has begun, this one is through; or it has only begun.
      ahead = ahead || second[32 * warp] < order[32 * other];
      between = between ||
                (order[32 * warp] < order[32 * other] && order[32 * other] < second[32 * warp]);
    }
  }
  CHECK(ahead);
  CHECK(between);
}

struct Words {
  uint32_t* words = nullptr;
  int kind = 0;
};

KVP_KERNEL early_return(const Words p) {
  uint32_t* const shared = reinterpret_cast<uint32_t*>(shared_memory());
  if (thread_index() % 3 == 0) return;
  shared[thread_index()] = 1;
  sync_block();
  if (warp_index() == 1) return;
  sync_block();
  uint32_t sum = 0;
  for (int i = 0; i < block_threads(); ++i) sum += i % 3 == 0 ? 0 : shared[i];
  p.words[thread_index()] = sum;
}

TEST_CASE("sync_block waits for the threads that have not returned") {
  for (uint64_t seed = 0; seed < kSeeds; ++seed) {
    shim::set_seed(seed);
    std::vector<uint32_t> words(96);
    REQUIRE(launch(early_return, {1, 96, 96 * 4, nullptr}, Words{words.data()}) == 0);
    for (size_t i = 0; i < 96; ++i) CHECK(words[i] == (i % 3 == 0 || i / 32 == 1 ? 0u : 64u));
  }
}

KVP_KERNEL look_at_shared(const Words p) {
  for (int i = 0; i < 16; ++i) p.words[block_index()] += shared_memory()[16 * thread_index() + i];
  std::memset(shared_memory() + 16 * thread_index(), 0, 16);
}

TEST_CASE("shared memory is new in every block: aligned, and no byte is what somebody wrote") {
  std::vector<uint32_t> words(5);
  REQUIRE(launch(look_at_shared, {5, 32, 512, nullptr}, Words{words.data()}) == 0);
  CHECK(words == std::vector<uint32_t>(5, 512 * 255));
}

KVP_KERNEL deep(const Words p) {
  volatile unsigned char frame[40 * 1024];
  for (size_t i = 0; i < sizeof frame; i += 64)
    frame[i] = static_cast<unsigned char>(thread_index());
  sync_warp();
  uint32_t same = 0;
  for (size_t i = 0; i < sizeof frame; i += 64) same += frame[i] == (thread_index() & 0xFF);
  p.words[thread_index()] = same;
}

TEST_CASE("a thread has a stack of its own, of tens of kilobytes") {
  std::vector<uint32_t> words(1024);
  REQUIRE(launch(deep, {1, 1024, 0, nullptr}, Words{words.data()}) == 0);
  CHECK(words == std::vector<uint32_t>(1024, 640));
}

TEST_CASE("host threads run kernels at the same time") {
  std::vector<std::thread> threads;
  std::vector<char> right(4, 1);
  for (size_t i = 0; i < right.size(); ++i) {
    threads.emplace_back([&, i] {
      for (int round = 0; round < 20; ++round) {
        std::vector<uint32_t> words(96);
        shim::Launch direct;  // without the runtime, which runs one at a time
        const Words params{words.data()};
        direct.blocks = 1;
        direct.threads = 96;
        direct.shared_bytes = 96 * 4;
        direct.closure = &params;
        direct.body = [](const void* closure) {
          early_return(*static_cast<const Words*>(closure));
        };
        shim::run_blocks(direct, static_cast<uint64_t>(round));
        right[i] = right[i] != 0 && words[95] == 64;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK(right == std::vector<char>(4, 1));
}

KVP_KERNEL misbehave(const Words p) {
  const int lane = lane_index();
  uint32_t fragment[4] = {0, 0, 0, 0};
  switch (p.kind) {
    case 0:  // half the warp shuffles, the other half has returned
      if (lane < 16) return;
      shuffle(lane, 0);
      break;
    case 1:  // two collectives at a time
      if (lane < 16) {
        sync_warp();
      } else {
        ballot(true);
      }
      break;
    case 2:  // a block barrier and a warp's
      if (lane < 16) {
        sync_block();
      } else {
        sync_warp();
      }
      break;
    case 3:  // the same collective in two places
      if (lane < 16) {
        sync_warp();
      } else {
        sync_warp();
      }
      break;
    case 4:
      load_matrix_x4(fragment, shared_memory() + 8);
      break;
    case 5:
      load_matrix_x4(fragment, shared_memory() + 512);
      break;
    case 6:
      copy_async16(shared_memory() + 504, p.words, true);
      break;
    case 7:
      copy_async16(shared_memory(), p.words + 1, true);
      break;
    case 8:
      copy_async16(p.words, p.words, true);
      break;
    case 9:
      shared_memory()[512 + thread_index()] = 1;
      break;
  }
}

// How a process ends that runs the kernel.
testing::Ending ending_of(int kind) {
  return testing::ending_of([&] {
    alignas(16) static uint32_t words[8];
    launch(misbehave, {1, 32, 512, nullptr}, Words{words, kind});
  });
}

TEST_CASE("what would hang or go unnoticed on a GPU ends the process and says where") {
  const std::vector<std::string> kinds = testing::test_devices();
  if (std::find(kinds.begin(), kinds.end(), "shim") == kinds.end()) return;  // tools follow forks
  const char* const needles[] = {
      "a shuffle",   "ballot",       "sync_block", "sync_warp",    "load_matrix",
      "load_matrix", "copy_async16", "misaligned", "copy_async16", ""};
  for (size_t kind = 0; kind < std::size(needles); ++kind) {
    const auto [text, ended] = ending_of(static_cast<int>(kind));
    CAPTURE(kind);
    CAPTURE(text);
    CHECK(ended);
    CHECK(text.find(needles[kind]) != std::string::npos);
    if (kind < 9) CHECK(text.find("shim_order_test.cc:") != std::string::npos);
    if (kind == 9) {
      CHECK((text.find("outside of its 512 bytes of shared memory") != std::string::npos ||
             text.find("heap-buffer-overflow") != std::string::npos));
    }
  }
}

}  // namespace
}  // namespace kvpager::gpu
