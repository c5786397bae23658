// What a vector keeps of memory.
#pragma once

#include <cstdint>
#include <vector>

namespace kvpager {

template <class T>
int64_t capacity_bytes(const std::vector<T>& vector) {
  return static_cast<int64_t>(vector.capacity() * sizeof(T));
}

}  // namespace kvpager
