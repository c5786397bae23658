// The published test vectors, and digests of many lengths that the reference implementation gave.
#include "hash/xxh3.h"

#include <doctest/doctest.h>

#include <vector>

#include "base/processor.h"
#include "hash/xxh3_stripes.h"
#include "hash/xxh3_v3.h"

namespace kvpager {
namespace {

// The buffer of xxHash's own sanity check.
std::vector<uint8_t> sanity_buffer(size_t bytes) {
  std::vector<uint8_t> out(bytes);
  uint64_t state = 2654435761;
  for (uint8_t& byte : out) {
    byte = static_cast<uint8_t>(state >> 56);
    state *= 11400714785074694797ull;
  }
  return out;
}

struct Vector {
  size_t bytes;
  uint64_t hash64;
  Hash128 hash128;
};

// xxHash's tests/sanity_test_vectors.h: the ones with seed 0.
const Vector kVectors[] = {
    {0, 0x2D06800538D394C2, {0x6001C324468D497F, 0x99AA06D3014798D8}},
    {1, 0xC44BDFF4074EECDB, {0xC44BDFF4074EECDB, 0xA6CD5E9392000F6A}},
    {6, 0x27B56A84CD2D7325, {0x3E7039BDDA43CFC6, 0x082AFE0B8162D12A}},
    {12, 0xA713DAF0DFBB77E7, {0x061A192713F69AD9, 0x6E3EFD8FC7802B18}},
    {24, 0xA3FE70BF9D3510EB, {0x1E7044D28B1B901D, 0x0CE966E4678D3761}},
    {48, 0x397DA259ECBA1F11, {0xF942219AED80F67B, 0xA002AC4E5478227E}},
    {80, 0xBCDEFBBB2C47C90A, {0x454AE6BF7A8A532D, 0xFDF2CEFDE9EAAC8A}},
    {195, 0xCD94217EE362EC3A, {0x3FB593C086A66075, 0x7729543A26B207EE}},
    {403, 0xCDEB804D65C6DEA4, {0xCDEB804D65C6DEA4, 0x1B6DE21E332DD73D}},
    {512, 0x617E49599013CB6B, {0x617E49599013CB6B, 0x18D2D110DCC9BCA1}},
    {2048, 0xDD59E2C3A5F038E0, {0xDD59E2C3A5F038E0, 0xF736557FD47073A5}},
    {2240, 0x6E73A90539CF2948, {0x6E73A90539CF2948, 0xCCB134FBFA7CE49D}},
    {2367, 0xCB37AEB9E5D361ED, {0xCB37AEB9E5D361ED, 0xE89C0F6FF369B427}},
};

TEST_CASE("the published vectors") {
  const std::vector<uint8_t> data = sanity_buffer(2367);
  for (const Vector& vector : kVectors) {
    CAPTURE(vector.bytes);
    CHECK(xxh3_64(data.data(), vector.bytes) == vector.hash64);
    CHECK(xxh3_128(data.data(), vector.bytes) == vector.hash128);
  }
}

TEST_CASE("the published vectors of long inputs with a seed") {
  const Vector vectors[] = {
      {241, 0xDDA9B0A161D4829A, {0xDDA9B0A161D4829A, 0xEC64AFAE6A137582}},
      {403, 0x6259F6ECFD6443FD, {0x6259F6ECFD6443FD, 0xBED311971E0BE8F2}},
      {1024, 0xEF368A8A2EBABAEF, {0xEF368A8A2EBABAEF, 0x17600EFE2B493A18}},
      {2367, 0xD2DB3415B942B42A, {0xD2DB3415B942B42A, 0xCCB7A94CCA1A6496}},
  };
  const std::vector<uint8_t> data = sanity_buffer(2367);
  const SeededXxh3 seeded(0x9E3779B185EBCA8D);
  for (const Vector& vector : vectors) {
    CAPTURE(vector.bytes);
    CHECK(seeded.hash64(data.data(), vector.bytes) == vector.hash64);
    CHECK(seeded.hash128(data.data(), vector.bytes) == vector.hash128);
  }
}

TEST_CASE("every length and alignment has the hash that the reference implementation gives") {
  const std::vector<uint8_t> data = sanity_buffer(9064);
  std::vector<size_t> lengths;
  for (size_t bytes = 0; bytes < 2100; ++bytes) lengths.push_back(bytes);
  for (const size_t bytes : {4096, 8191, 8192, 8193, 9000}) lengths.push_back(bytes);
  const auto folded = [](uint64_t sum, uint64_t value) { return (sum ^ value) * 0x100000001B3; };
  uint64_t sum64 = 0xCBF29CE484222325;
  uint64_t sum128 = sum64;
  for (const size_t bytes : lengths) {
    const uint8_t* at = data.data() + bytes % 64;
    sum64 = folded(sum64, xxh3_64(at, bytes));
    const Hash128 hash = xxh3_128(at, bytes);
    sum128 = folded(folded(sum128, hash.low), hash.high);
  }
  CHECK(sum64 == 0xD3926702F228ED32);
  CHECK(sum128 == 0x226554741FE90D39);
}

#if defined(__x86_64__)
// This file is compiled for every processor, the room's for those of today.
TEST_CASE("the sums of long inputs are those of a processor without wide integers") {
  if (processor().level < 3) return;
  const std::vector<uint8_t> data = sanity_buffer(9064);
  for (size_t bytes = 241; bytes < 9000; bytes += 61) {
    CAPTURE(bytes);
    uint64_t plain[8], wide[8];
    xxh3::sum_stripes(data.data() + bytes % 64, bytes, xxh3::kSecret, plain);
    xxh3::sum_stripes_v3(data.data() + bytes % 64, bytes, xxh3::kSecret, wide);
    CHECK(std::memcmp(plain, wide, sizeof plain) == 0);
  }
}
#endif

}  // namespace
}  // namespace kvpager
