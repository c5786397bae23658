// Little-endian integers in byte buffers. Callers have checked the bounds: sizes are validated once
// per section.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <type_traits>

#include "kvpager/large_memory.h"

namespace kvpager::snapshot {

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__,
              "the snapshot format is little-endian and is read and written by memcpy");

template <class T>
T load(const std::byte* from) {
  static_assert(std::is_trivially_copyable_v<T>);
  T value;
  std::memcpy(&value, from, sizeof(T));
  return value;
}

template <class T>
void store(void* to, T value) {
  static_assert(std::is_trivially_copyable_v<T>);
  std::memcpy(to, &value, sizeof(T));
}

template <class T>
void append(std::string* to, T value) {
  static_assert(std::is_trivially_copyable_v<T>);
  to->append(reinterpret_cast<const char*>(&value), sizeof(T));
}

constexpr uint64_t align_up(uint64_t offset, uint64_t alignment) {
  return (offset + alignment - 1) / alignment * alignment;
}

inline bool all_zero(const std::byte* data, size_t bytes) {
  for (size_t i = 0; i < bytes; ++i) {
    if (data[i] != std::byte{0}) return false;
  }
  return true;
}

}  // namespace kvpager::snapshot
