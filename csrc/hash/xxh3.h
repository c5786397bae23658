// XXH3, written from its specification (github.com/Cyan4973/xxHash, doc/xxhash_spec.md, version 0.8).
#pragma once

#include <cstddef>
#include <cstdint>

#include "kvpager/types.h"

namespace kvpager {

// With seed 0 and the default secret.
uint64_t xxh3_64(const void* data, size_t bytes);
Hash128 xxh3_128(const void* data, size_t bytes);

// With a seed, of long inputs.
class SeededXxh3 {
 public:
  static constexpr size_t kLeastBytes = 241;

  explicit SeededXxh3(uint64_t seed);
  uint64_t hash64(const void* data, size_t bytes) const;  // hash128(data, bytes).low
  Hash128 hash128(const void* data, size_t bytes) const;

 private:
  uint8_t secret_[192];
};

}  // namespace kvpager
