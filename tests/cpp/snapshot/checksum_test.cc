// The hash is compiled for several instruction sets; the file format knows one.
#include "snapshot/checksum.h"

#include <cstddef>
#include <cstdint>
#include <random>
#include <vector>

#include "doctest.h"

#define XXH_INLINE_ALL  // the baseline's, whatever the room picks on this processor
#include "xxhash.h"

TEST_CASE("the hash that this processor gets is XXH3-64, at every length and alignment") {
  std::vector<uint8_t> bytes(70000);
  std::mt19937 random(1);
  for (uint8_t& byte : bytes) byte = static_cast<uint8_t>(random());
  const auto same = [&](size_t at, size_t size) {
    return kvpager::snapshot::xxh3_64(bytes.data() + at, size) ==
           XXH3_64bits(bytes.data() + at, size);
  };
  for (size_t size = 0; size < 2100; ++size) CHECK(same(size % 64, size));
  for (const size_t size : {4096, 8192, 65535, 65536, 65537}) {
    for (const size_t at : {0, 1, 32, 63}) CHECK(same(at, size));
  }
}
