#pragma once

#include <cstddef>
#include <cstdint>

namespace kvpager::snapshot {

// REQUIRES: an x86-64-v3 processor.
uint64_t xxh3_64_v3(const void* data, size_t bytes);

}  // namespace kvpager::snapshot
