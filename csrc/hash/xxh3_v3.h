#pragma once

#include <cstddef>
#include <cstdint>

namespace kvpager::xxh3 {

// sum_stripes with 256-bit integers. REQUIRES: an x86-64-v3 processor.
void sum_stripes_v3(const uint8_t* data, size_t bytes, const uint8_t* secret, uint64_t* out);

}  // namespace kvpager::xxh3
