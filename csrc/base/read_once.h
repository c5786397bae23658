// Numbers in memory of a caller's, which other threads may write meanwhile: what is checked has to be what is
// used.
#pragma once

#include <cstddef>
#include <vector>

namespace kvpager {

// A copy, of which each element was read exactly once.
template <class T>
std::vector<T> read_once(const T* from, size_t count) {
  std::vector<T> copy(count);
  for (size_t i = 0; i < count; ++i) __atomic_load(from + i, &copy[i], __ATOMIC_RELAXED);
  return copy;
}

}  // namespace kvpager
