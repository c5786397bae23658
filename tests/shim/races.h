// Races on the shared memory of a block: two threads access the same byte, at least one of them writes
// (or both unless both are atomic), and no barrier lies between. Aborts with the kernel, the byte and
// both threads. Finds them in any order of the fibers, also where each order gives the right result.
//
// In the library kvpager_shim_races alone (KVPAGER_SHIM_RACES), whose kernels are compiled with
// -fsanitize=thread and linked to the functions in races.cc instead of ThreadSanitizer's runtime.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kvpager::shim {

struct Warp;

enum class Access : uint8_t { kRead, kWrite, kAtomic };

#ifdef KVPAGER_SHIM_RACES
inline constexpr bool kFindsRaces = true;
#else
inline constexpr bool kFindsRaces = false;
#endif

// By the running thread, if it is of shared memory; `code` is the instruction after it.
void note_access(const void* address, size_t bytes, Access access, const void* code);
// A background copy of 16 bytes: from here to note_copied not even its own thread may touch them.
void note_copy(const void* address, const void* code);
void note_copied(const void* address, const void* code);
void note_block_begins(int64_t shared_bytes, const void* kernel);
void note_block_barrier();
void note_warp_barrier(Warp& warp);

}  // namespace kvpager::shim
