#include "snapshot/byte_watch.h"

#include <doctest/doctest.h>

#include <cstring>
#include <vector>

namespace kvpager::snapshot {
namespace {

std::vector<std::byte> bytes(size_t count, unsigned seed) {
  std::vector<std::byte> made(count);
  for (size_t i = 0; i < count; ++i) made[i] = static_cast<std::byte>((i * 31 + seed * 7) & 255);
  return made;
}

TEST_CASE("every byte of every region is seen by a sweep over all of it, and by none before it") {
  // Ends of regions, blocks and stretches of blocks.
  std::vector<std::vector<std::byte>> memory = {bytes(1, 1), bytes(1024, 2), bytes(5 << 20, 3),
                                                bytes(0, 4), bytes(1025, 5), bytes(3000, 6)};
  for (int threads : {1, 3}) {
    std::vector<ByteWatch::Region> regions;
    for (const auto& part : memory)
      regions.push_back({part.data(), static_cast<int64_t>(part.size())});
    ByteWatch watch(regions, threads, 1);
    REQUIRE(watch.sweep(watch.total_bytes()) == -1);
    REQUIRE(watch.sample(3) == -1);
    for (size_t i = 0; i < memory.size(); ++i) {
      for (size_t at : {size_t{0}, memory[i].size() / 2, memory[i].size() - 1}) {
        if (memory[i].empty()) continue;
        memory[i][at] ^= std::byte{1};
        CHECK(watch.sweep(watch.total_bytes()) == static_cast<int64_t>(i));
        memory[i][at] ^= std::byte{1};
        CHECK(watch.sweep(watch.total_bytes()) == -1);
      }
    }
  }
}

TEST_CASE("small sweeps add up to one of everything") {
  std::vector<std::byte> memory = bytes(100000, 1);
  ByteWatch watch({{memory.data(), 70000}, {memory.data() + 70000, 30000}}, 1, 1);
  for (size_t at : {size_t{0}, size_t{69999}, size_t{70000}, size_t{99999}}) {
    memory[at] ^= std::byte{128};
    int64_t found = -1;
    int calls = 0;
    while (found < 0 && calls < 101) {
      found = watch.sweep(1000);
      ++calls;
    }
    CHECK(found == (at < 70000 ? 0 : 1));
    memory[at] ^= std::byte{128};
  }
}

TEST_CASE("a sample reads of every region, elsewhere each time") {
  std::vector<std::byte> large = bytes(1 << 20, 1), small = bytes(64, 2);
  ByteWatch watch({{large.data(), 1 << 20}, {small.data(), 64}}, 1, 1);
  small[63] ^= std::byte{1};
  CHECK(watch.sample(1) == 1);  // its only block
  small[63] ^= std::byte{1};
  for (int64_t block = 0; block < 1024; block += 2)
    large[static_cast<size_t>(block) * 1024] ^= std::byte{1};
  int calls = 1;
  while (watch.sample(1) != 0) REQUIRE(++calls < 100);  // half of its blocks
  large[1] ^= std::byte{0};
  for (int64_t block = 0; block < 1024; block += 2)
    large[static_cast<size_t>(block) * 1024] ^= std::byte{1};
  large[5] ^= std::byte{1};
  calls = 0;
  while (watch.sample(4) != 0) REQUIRE(++calls < 10000);  // one of 1024
}

TEST_CASE("a digest of each MiB tells of its bytes and the seed, and of nothing else") {
  const auto digests = [](const std::vector<std::byte>& of, int threads = 1, uint64_t seed = 1) {
    const std::vector<std::byte> before(7);
    const ByteWatch watch({{before.data(), 7}, {of.data(), 0}, {of.data(), int64_t(of.size())}},
                          threads, seed);
    CHECK(watch.digests(1).empty());
    return watch.digests(2);
  };
  std::vector<std::byte> memory = bytes((2 << 20) + 1500, 1);
  const std::vector<Hash128> expected = digests(memory);
  REQUIRE(expected.size() == 3);
  CHECK(digests(std::vector<std::byte>(memory), 4) == expected);
  const std::vector<Hash128> other = digests(memory, 1, 2);
  for (size_t piece = 0; piece < 3; ++piece) CHECK_FALSE(other[piece] == expected[piece]);
  for (const size_t at : {size_t{0}, size_t{1} << 20, (size_t{2} << 20) + 1499}) {
    CAPTURE(at);
    memory[at] ^= std::byte{1};
    const std::vector<Hash128> now = digests(memory);
    for (size_t piece = 0; piece < 3; ++piece) {
      CHECK((now[piece] == expected[piece]) == (piece != at >> 20));
    }
    memory[at] ^= std::byte{1};
  }
  const std::vector<Hash128> first = digests({memory.begin(), memory.begin() + (1 << 20)});
  CHECK(first == std::vector<Hash128>{expected[0]});
}

TEST_CASE("nothing to watch is never changed") {
  ByteWatch watch({}, 2, 1);
  CHECK(watch.sweep(100) == -1);
  CHECK(watch.sample(4) == -1);
  CHECK(watch.total_bytes() == 0);
}

}  // namespace
}  // namespace kvpager::snapshot
