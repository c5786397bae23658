// The part of XXH3 that long inputs spend their time in: eight sums over stripes of 64 bytes. It is
// compiled once per instruction set, so that each file that includes it has to have its own: hence
// the namespace without a name.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace kvpager::xxh3 {
namespace {

constexpr size_t kStripe = 64;
constexpr size_t kSecretBytes = 192;
constexpr size_t kStripesPerBlock = (kSecretBytes - kStripe) / 8;
constexpr size_t kBlock = kStripesPerBlock * kStripe;

constexpr uint64_t kPrime32[] = {0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D};
constexpr uint64_t kPrime64[] = {0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9,
                                 0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5};

alignas(64) constexpr uint8_t kSecret[kSecretBytes] = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c,
    0xde, 0xd4, 0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f,
    0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21,
    0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c,
    0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3,
    0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8,
    0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d,
    0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64,
    0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb,
    0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e,
    0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce,
    0x45, 0xcb, 0x3a, 0x8f, 0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e,
};

// The eight sums. Each operation reads one stripe's worth of input or of the secret.
#if defined(__AVX2__)

class Sums {
 public:
  explicit Sums(const uint64_t* sums) : lanes_{load(sums), load(sums + 4)} {}
  void store(uint64_t* sums) const {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(sums), lanes_[0]);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(sums + 4), lanes_[1]);
  }
  void add(const uint8_t* stripe, const uint8_t* secret) {
    for (int i = 0; i < 2; ++i) {
      const __m256i data = load(stripe + 32 * i);
      const __m256i key = _mm256_xor_si256(data, load(secret + 32 * i));
      const __m256i product = _mm256_mul_epu32(key, _mm256_srli_epi64(key, 32));
      const __m256i neighbours = _mm256_shuffle_epi32(data, _MM_SHUFFLE(1, 0, 3, 2));
      lanes_[i] = _mm256_add_epi64(_mm256_add_epi64(lanes_[i], neighbours), product);
    }
  }
  void scramble(const uint8_t* secret) {
    const __m256i prime = _mm256_set1_epi32(static_cast<int>(kPrime32[0]));
    for (int i = 0; i < 2; ++i) {
      const __m256i mixed = _mm256_xor_si256(_mm256_srli_epi64(lanes_[i], 47), lanes_[i]);
      const __m256i key = _mm256_xor_si256(mixed, load(secret + 32 * i));
      const __m256i high = _mm256_mul_epu32(_mm256_srli_epi64(key, 32), prime);
      lanes_[i] = _mm256_add_epi64(_mm256_mul_epu32(key, prime), _mm256_slli_epi64(high, 32));
    }
  }

 private:
  static __m256i load(const void* at) {
    return _mm256_loadu_si256(static_cast<const __m256i*>(at));
  }
  __m256i lanes_[2];
};

#else

class Sums {
 public:
  explicit Sums(const uint64_t* sums) { std::memcpy(lanes_, sums, sizeof lanes_); }
  void store(uint64_t* sums) const { std::memcpy(sums, lanes_, sizeof lanes_); }
  void add(const uint8_t* stripe, const uint8_t* secret) {
    for (int i = 0; i < 8; ++i) {
      const uint64_t data = load(stripe + 8 * i);
      const uint64_t key = data ^ load(secret + 8 * i);
      lanes_[i ^ 1] += data;
      lanes_[i] += (key & 0xFFFFFFFF) * (key >> 32);
    }
  }
  void scramble(const uint8_t* secret) {
    for (int i = 0; i < 8; ++i) {
      lanes_[i] = (lanes_[i] ^ (lanes_[i] >> 47) ^ load(secret + 8 * i)) * kPrime32[0];
    }
  }

 private:
  static uint64_t load(const uint8_t* at) {
    uint64_t value;
    std::memcpy(&value, at, sizeof value);
    return value;
  }
  uint64_t lanes_[8];
};

#endif

// The sums of an input of more than a stripe, with a secret of kSecretBytes.
inline void sum_stripes(const uint8_t* data, size_t bytes, const uint8_t* secret, uint64_t* out) {
  const uint64_t start[8] = {kPrime32[2], kPrime64[0], kPrime64[1], kPrime64[2],
                             kPrime64[3], kPrime32[1], kPrime64[4], kPrime32[0]};
  Sums sums(start);
  const auto add_some = [&](const uint8_t* at, size_t stripes) {
    for (size_t i = 0; i < stripes; ++i) {
      __builtin_prefetch(at + i * kStripe + 6 * kStripe);
      sums.add(at + i * kStripe, secret + 8 * i);
    }
  };
  const size_t blocks = (bytes - 1) / kBlock;
  for (size_t block = 0; block < blocks; ++block) {
    add_some(data + block * kBlock, kStripesPerBlock);
    sums.scramble(secret + kSecretBytes - kStripe);
  }
  const uint8_t* rest = data + blocks * kBlock;
  add_some(rest, (bytes - 1 - blocks * kBlock) / kStripe);
  sums.add(data + bytes - kStripe, secret + kSecretBytes - kStripe - 7);
  sums.store(out);
}

}  // namespace
}  // namespace kvpager::xxh3
