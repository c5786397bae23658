// The hashes of the snapshot format.
#pragma once

#include <cstddef>
#include <vector>

#include "hash/xxh3.h"

namespace kvpager::snapshot {

// XXH3-128 of parts that are each preceded by their length, so that no two lists of parts collide by
// concatenation.
class Digest128 {
 public:
  // expected: about so many bytes will be added.
  explicit Digest128(size_t expected) { parts_.reserve(expected + kRoom); }
  void add(const void* data, size_t bytes);
  Hash128 value() const { return xxh3_128(parts_.data(), parts_.size()); }

 private:
  static constexpr size_t kRoom = 256;  // for lengths, and what is small
  std::vector<char> parts_;
};

}  // namespace kvpager::snapshot
