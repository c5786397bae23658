#include "snapshot/checksum.h"

#include "kvpager/snapshot.h"

namespace kvpager {

uint64_t slice_checksum(const std::byte* data, int64_t bytes) {
  return xxh3_64(data, static_cast<size_t>(bytes));
}

namespace snapshot {

void Digest128::add(const void* data, size_t bytes) {
  const uint64_t length = bytes;
  const auto* prefix = reinterpret_cast<const char*>(&length);
  const auto* part = static_cast<const char*>(data);
  parts_.insert(parts_.end(), prefix, prefix + sizeof(length));
  parts_.insert(parts_.end(), part, part + bytes);
}

}  // namespace snapshot
}  // namespace kvpager
