// XXH3 with seed 0 and the default secret, written from its specification
// (github.com/Cyan4973/xxHash, doc/xxhash_spec.md, XXH3 version 0.8).
#pragma once

#include <cstddef>
#include <cstdint>

#include "kvpager/types.h"

namespace kvpager {

uint64_t xxh3_64(const void* data, size_t bytes);
Hash128 xxh3_128(const void* data, size_t bytes);

}  // namespace kvpager
