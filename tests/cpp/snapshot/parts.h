// A snapshot file in pieces, to be put together again with every offset, size and checksum right:
// what remains wrong is what a test put into a section.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <optional>
#include <string>
#include <vector>

#include "kvpager/snapshot.h"
#include "reseal.h"
#include "snapshot/bytes.h"
#include "snapshot/format.h"

namespace kvpager::snapshot_test {

struct Part {
  uint16_t type = 0;
  uint8_t version = 1;
  uint8_t flags = 1;
  std::string bytes;
};

struct Parts {
  uint16_t minor = kSnapshotMinor;
  std::vector<Part> parts;

  // Null where there is no section of this type.
  Part* find(uint16_t type) {
    const auto at = std::find_if(parts.begin(), parts.end(),
                                 [type](const Part& part) { return part.type == type; });
    return at == parts.end() ? nullptr : &*at;
  }
};

// Nothing where the table does not describe the bytes.
inline std::optional<Parts> take_apart(const std::string& file) {
  using namespace snapshot;  // NOLINT(build/namespaces)
  if (file.size() < kFrontBytes) return std::nullopt;
  const auto count = get<uint32_t>(file, kSectionCountAt);
  if (count > kMaxSections) return std::nullopt;
  Parts out;
  out.minor = get<uint16_t>(file, kMinorAt);
  for (size_t i = 0; i < count; ++i) {
    const SectionEntry entry = entry_of(file, i);
    if (!inside(file, entry)) return std::nullopt;
    out.parts.push_back(
        {entry.type, entry.version, entry.flags, file.substr(entry.offset, entry.size)});
  }
  return out;
}

inline std::string put_together(const Parts& parts) {
  using namespace snapshot;  // NOLINT(build/namespaces)
  std::string out(kFrontBytes, '\0');
  const size_t count = std::min<size_t>(parts.parts.size(), kMaxSections);
  for (size_t i = 0; i < count; ++i) {
    const Part& part = parts.parts[i];
    out.resize(align_up(out.size(), kSectionAlignment), '\0');
    put<uint16_t>(&out, entry_at(i), part.type);
    put<uint8_t>(&out, entry_at(i) + 2, part.version);
    put<uint8_t>(&out, entry_at(i) + 3, part.flags);
    put<uint64_t>(&out, entry_at(i) + 8, out.size());
    put<uint64_t>(&out, entry_at(i) + 16, part.bytes.size());
    out += part.bytes;
  }
  std::memcpy(out.data(), kMagic, sizeof(kMagic));
  put(&out, kMajorAt, uint16_t{1});
  put(&out, kMinorAt, parts.minor);
  put(&out, kHeaderBytesAt, static_cast<uint32_t>(kHeaderBytes));
  put(&out, kSectionCountAt, static_cast<uint32_t>(count));
  put(&out, kEntryBytesAt, static_cast<uint32_t>(kEntryBytes));
  put<uint64_t>(&out, kFileBytesAt, out.size());
  reseal(&out);
  return out;
}

}  // namespace kvpager::snapshot_test
