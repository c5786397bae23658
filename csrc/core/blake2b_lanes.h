// Several messages of equal length at a time, where the processor has 256-bit integers.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kvpager {

inline constexpr size_t kBlake2bLanes = 4;

// Goes on from start[8], before which `counted` bytes were hashed; out[kBlake2bLanes][8].
// REQUIRES: bytes > 0, and a processor of x86-64-v3.
void blake2b_lanes_v3(const uint64_t* start, uint64_t counted, const void* const* messages,
                      size_t bytes, uint64_t* out);

}  // namespace kvpager
