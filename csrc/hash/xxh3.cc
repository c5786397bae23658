#include "hash/xxh3.h"

#include "base/processor.h"
#include "hash/xxh3_stripes.h"
#include "hash/xxh3_v3.h"
#include "kvpager/require.h"

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "inputs are read as little-endian words");

namespace kvpager {
namespace xxh3 {
namespace {

uint32_t read32(const uint8_t* at) {
  uint32_t value;
  std::memcpy(&value, at, sizeof value);
  return value;
}

uint64_t read64(const uint8_t* at) {
  uint64_t value;
  std::memcpy(&value, at, sizeof value);
  return value;
}

uint64_t rotated(uint64_t x, int bits) { return x << bits | x >> (64 - bits); }

Hash128 product(uint64_t a, uint64_t b) {
  const unsigned __int128 wide = static_cast<unsigned __int128>(a) * b;
  return {static_cast<uint64_t>(wide), static_cast<uint64_t>(wide >> 64)};
}

uint64_t folded_product(uint64_t a, uint64_t b) {
  const Hash128 wide = product(a, b);
  return wide.low ^ wide.high;
}

// The words of the secret at two offsets, combined: the key of short inputs.
uint64_t key(size_t a, size_t b) { return read64(kSecret + a) ^ read64(kSecret + b); }

constexpr uint64_t kMix1 = 0x165667919E3779F9;
constexpr uint64_t kMix2 = 0x9FB21C651E98DF25;

uint64_t avalanche(uint64_t x) {
  x = (x ^ x >> 37) * kMix1;
  return x ^ x >> 32;
}

// The last step of XXH64, which the shortest inputs share.
uint64_t avalanche64(uint64_t x) {
  x = (x ^ x >> 33) * kPrime64[1];
  x = (x ^ x >> 29) * kPrime64[2];
  return x ^ x >> 32;
}

uint64_t mix16(const uint8_t* data, const uint8_t* secret) {
  return folded_product(read64(data) ^ read64(secret), read64(data + 8) ^ read64(secret + 8));
}

// 1 to 3 bytes, spread over 32 bits with their count.
uint32_t spread(const uint8_t* data, size_t bytes) {
  return static_cast<uint32_t>(data[0]) << 16 | static_cast<uint32_t>(data[bytes >> 1]) << 24 |
         static_cast<uint32_t>(data[bytes - 1]) | static_cast<uint32_t>(bytes) << 8;
}

uint64_t hash_to_16(const uint8_t* data, size_t bytes) {
  if (bytes > 8) {
    const uint64_t low = read64(data) ^ key(24, 32);
    const uint64_t high = read64(data + bytes - 8) ^ key(40, 48);
    return avalanche(bytes + __builtin_bswap64(low) + high + folded_product(low, high));
  }
  if (bytes >= 4) {
    const uint64_t both = read32(data + bytes - 4) + (static_cast<uint64_t>(read32(data)) << 32);
    uint64_t x = both ^ key(8, 16);
    x = (x ^ rotated(x, 49) ^ rotated(x, 24)) * kMix2;
    x = (x ^ ((x >> 35) + bytes)) * kMix2;
    return x ^ x >> 28;
  }
  if (bytes > 0) {
    return avalanche64(spread(data, bytes) ^ (read32(kSecret) ^ read32(kSecret + 4)));
  }
  return avalanche64(key(56, 64));
}

// Pairs of 16 bytes from both ends towards the middle.
uint64_t hash_to_128(const uint8_t* data, size_t bytes) {
  uint64_t sum = bytes * kPrime64[0];
  for (size_t i = (bytes - 1) / 32 + 1; i-- > 0;) {
    sum += mix16(data + 16 * i, kSecret + 32 * i);
    sum += mix16(data + bytes - 16 * (i + 1), kSecret + 32 * i + 16);
  }
  return avalanche(sum);
}

uint64_t hash_to_240(const uint8_t* data, size_t bytes) {
  uint64_t sum = bytes * kPrime64[0];
  for (size_t i = 0; i < 8; ++i) sum += mix16(data + 16 * i, kSecret + 16 * i);
  sum = avalanche(sum);
  for (size_t i = 8; i < bytes / 16; ++i) sum += mix16(data + 16 * i, kSecret + 16 * (i - 8) + 3);
  return avalanche(sum + mix16(data + bytes - 16, kSecret + 136 - 17));
}

Hash128 hash128_to_16(const uint8_t* data, size_t bytes) {
  if (bytes > 8) {
    const uint64_t low = read64(data);
    const uint64_t high = read64(data + bytes - 8);
    Hash128 m = product(low ^ high ^ key(32, 40), kPrime64[0]);
    m.low += static_cast<uint64_t>(bytes - 1) << 54;
    const uint64_t keyed = high ^ key(48, 56);
    m.high += keyed + (keyed & 0xFFFFFFFF) * (kPrime32[1] - 1);
    m.low ^= __builtin_bswap64(m.high);
    Hash128 h = product(m.low, kPrime64[1]);
    h.high += m.high * kPrime64[1];
    return {avalanche(h.low), avalanche(h.high)};
  }
  if (bytes >= 4) {
    const uint64_t both = read32(data) + (static_cast<uint64_t>(read32(data + bytes - 4)) << 32);
    Hash128 m = product(both ^ key(16, 24), kPrime64[0] + (static_cast<uint64_t>(bytes) << 2));
    m.high += m.low << 1;
    m.low ^= m.high >> 3;
    m.low = (m.low ^ m.low >> 35) * kMix2;
    m.low ^= m.low >> 28;
    return {m.low, avalanche(m.high)};
  }
  if (bytes > 0) {
    const uint32_t low = spread(data, bytes);
    const uint32_t swapped = __builtin_bswap32(low);
    const uint32_t high = swapped << 13 | swapped >> 19;
    return {avalanche64(low ^ (read32(kSecret) ^ read32(kSecret + 4))),
            avalanche64(high ^ (read32(kSecret + 8) ^ read32(kSecret + 12)))};
  }
  return {avalanche64(key(64, 72)), avalanche64(key(80, 88))};
}

void mix32(Hash128* sum, const uint8_t* a, const uint8_t* b, const uint8_t* secret) {
  sum->low = (sum->low + mix16(a, secret)) ^ (read64(b) + read64(b + 8));
  sum->high = (sum->high + mix16(b, secret + 16)) ^ (read64(a) + read64(a + 8));
}

Hash128 finished(const Hash128& sum, size_t bytes) {
  const uint64_t mixed = sum.low * kPrime64[0] + sum.high * kPrime64[3] + bytes * kPrime64[1];
  return {avalanche(sum.low + sum.high), 0 - avalanche(mixed)};
}

Hash128 hash128_to_128(const uint8_t* data, size_t bytes) {
  Hash128 sum{bytes * kPrime64[0], 0};
  for (size_t i = (bytes - 1) / 32 + 1; i-- > 0;) {
    mix32(&sum, data + 16 * i, data + bytes - 16 * (i + 1), kSecret + 32 * i);
  }
  return finished(sum, bytes);
}

Hash128 hash128_to_240(const uint8_t* data, size_t bytes) {
  Hash128 sum{bytes * kPrime64[0], 0};
  for (size_t i = 0; i < 4; ++i) {
    mix32(&sum, data + 32 * i, data + 32 * i + 16, kSecret + 32 * i);
  }
  sum = {avalanche(sum.low), avalanche(sum.high)};
  for (size_t i = 4; i < bytes / 32; ++i) {
    mix32(&sum, data + 32 * i, data + 32 * i + 16, kSecret + 32 * (i - 4) + 3);
  }
  mix32(&sum, data + bytes - 16, data + bytes - 32, kSecret + 136 - 17 - 16);
  return finished(sum, bytes);
}

void sums_of(const uint8_t* data, size_t bytes, const uint8_t* secret, uint64_t* out) {
#ifdef KVPAGER_HASH_V3
  if (processor().level >= 3) return sum_stripes_v3(data, bytes, secret, out);
#endif
  sum_stripes(data, bytes, secret, out);
}

uint64_t merged(const uint64_t* sums, const uint8_t* secret, uint64_t start) {
  for (int i = 0; i < 4; ++i) {
    start += folded_product(sums[2 * i] ^ read64(secret + 16 * i),
                            sums[2 * i + 1] ^ read64(secret + 16 * i + 8));
  }
  return avalanche(start);
}

uint64_t hash_long(const uint8_t* data, size_t bytes, const uint8_t* secret) {
  uint64_t sums[8];
  sums_of(data, bytes, secret, sums);
  return merged(sums, secret + 11, bytes * kPrime64[0]);
}

Hash128 hash128_long(const uint8_t* data, size_t bytes, const uint8_t* secret) {
  uint64_t sums[8];
  sums_of(data, bytes, secret, sums);
  return {merged(sums, secret + 11, bytes * kPrime64[0]),
          merged(sums, secret + kSecretBytes - kStripe - 11, ~(bytes * kPrime64[1]))};
}

}  // namespace
}  // namespace xxh3

uint64_t xxh3_64(const void* input, size_t bytes) {
  using namespace xxh3;  // NOLINT(google-build-using-namespace)
  const auto* data = static_cast<const uint8_t*>(input);
  if (bytes <= 16) return hash_to_16(data, bytes);
  if (bytes <= 128) return hash_to_128(data, bytes);
  if (bytes <= 240) return hash_to_240(data, bytes);
  return hash_long(data, bytes, kSecret);
}

Hash128 xxh3_128(const void* input, size_t bytes) {
  using namespace xxh3;  // NOLINT(google-build-using-namespace)
  const auto* data = static_cast<const uint8_t*>(input);
  if (bytes <= 16) return hash128_to_16(data, bytes);
  if (bytes <= 128) return hash128_to_128(data, bytes);
  if (bytes <= 240) return hash128_to_240(data, bytes);
  return hash128_long(data, bytes, kSecret);
}

SeededXxh3::SeededXxh3(uint64_t seed) {
  static_assert(sizeof secret_ == xxh3::kSecretBytes);
  for (size_t at = 0; at < sizeof secret_; at += 8) {
    const uint64_t word = xxh3::read64(xxh3::kSecret + at) + (at % 16 == 0 ? seed : 0 - seed);
    std::memcpy(secret_ + at, &word, sizeof word);
  }
}

uint64_t SeededXxh3::hash64(const void* data, size_t bytes) const {
  KVPAGER_REQUIRE(bytes >= kLeastBytes);
  return xxh3::hash_long(static_cast<const uint8_t*>(data), bytes, secret_);
}

Hash128 SeededXxh3::hash128(const void* data, size_t bytes) const {
  KVPAGER_REQUIRE(bytes >= kLeastBytes);
  return xxh3::hash128_long(static_cast<const uint8_t*>(data), bytes, secret_);
}

}  // namespace kvpager
