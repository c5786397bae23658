// Memory of a few hundred pages or more, as huge pages where the system has them: a fault for each
// small one costs several times what is then done with it.
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>

#include "kvpager/require.h"

namespace kvpager {

inline constexpr size_t kHugePage = size_t{2} << 20;

// Uninitialised, given back with std::free. REQUIRES: alignment is a power of two of at most
// kHugePage.
inline void* allocate_large(size_t alignment, size_t bytes) {
  KVPAGER_REQUIRE(alignment > 0 && (alignment & (alignment - 1)) == 0 && alignment <= kHugePage);
  const bool huge = bytes >= kHugePage / 4;
  const size_t unit = huge ? kHugePage : alignment;
  const size_t rounded = (bytes == 0 ? 1 : bytes) + unit - 1;
  void* memory = std::aligned_alloc(unit, rounded - rounded % unit);
  if (memory == nullptr) throw std::bad_alloc();
  if (huge) ::madvise(memory, rounded - rounded % unit, MADV_HUGEPAGE);  // a hint
  return memory;
}

struct FreeBytes {
  void operator()(std::byte* p) const { std::free(p); }
};
using AlignedBytes = std::unique_ptr<std::byte, FreeBytes>;

// As allocate_large; at least one byte.
inline AlignedBytes aligned_bytes(uint64_t alignment, uint64_t bytes) {
  return AlignedBytes(static_cast<std::byte*>(allocate_large(alignment, bytes)));
}

}  // namespace kvpager
