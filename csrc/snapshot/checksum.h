// The hashes of the snapshot format; the only place that knows xxHash.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "kvpager/types.h"

namespace kvpager::snapshot {

// XXH3-64, seed 0.
uint64_t xxh3_64(const void* data, size_t bytes);

// XXH3-128, seed 0, of parts that are each preceded by their length, so that no two lists of parts
// collide by concatenation.
class Digest128 {
 public:
  Digest128();
  ~Digest128();
  Digest128(const Digest128&) = delete;
  Digest128& operator=(const Digest128&) = delete;
  void add(const void* data, size_t bytes);
  Hash128 value() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace kvpager::snapshot
