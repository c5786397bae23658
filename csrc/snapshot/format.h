// The front of a snapshot file: header and section table, the first kFrontBytes bytes.
// docs/snapshot_format.md is normative; the numbers here are its constants.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "kvpager/error.h"

namespace kvpager::snapshot {

inline constexpr char kMagic[8] = {'\x89', 'K', 'V', 'S', 'N', 'A', 'P', '\n'};
inline constexpr uint64_t kHeaderBytes = 64;
inline constexpr uint64_t kEntryBytes = 32;
inline constexpr uint64_t kFrontBytes = 4096;  // header, table, zeros; the payload starts here
inline constexpr uint64_t kSectionAlignment = 64;
inline constexpr uint32_t kMaxSections = 64;
inline constexpr uint64_t kMaxMetadataBytes = uint64_t{1} << 30;
inline constexpr uint64_t kMaxJsonBytes = uint64_t{16} << 20;
inline constexpr uint64_t kMaxScorerBytes = 255;
inline constexpr uint64_t kMaxPacks = 256;  // a reader holds a descriptor of each

static_assert(kHeaderBytes + kMaxSections * kEntryBytes <= kFrontBytes);

// Field offsets in the header.
inline constexpr size_t kMajorAt = 8;
inline constexpr size_t kMinorAt = 10;
inline constexpr size_t kHeaderBytesAt = 12;
inline constexpr size_t kSectionCountAt = 16;
inline constexpr size_t kEntryBytesAt = 20;
inline constexpr size_t kFileBytesAt = 24;
inline constexpr size_t kTableChecksumAt = 32;
inline constexpr size_t kReservedAt = 40;
inline constexpr size_t kHeaderChecksumAt = 56;

// A file holds its sections in ascending order of type; the first kRequiredSections are always
// present, kPacks is in manifests.
enum SectionType : uint16_t {
  kPayload = 1,
  kSummaries = 2,
  kLayout = 3,
  kFingerprint = 4,
  kSession = 5,
  kTokens = 6,
  kChunks = 7,
  kHints = 8,
  kPacks = 9,
};
inline constexpr uint16_t kRequiredSections = 7;
inline constexpr uint8_t kSectionVersion = 1;  // of every section above
inline constexpr uint8_t kFlagRequired = 1;

struct SectionEntry {
  uint16_t type = 0;
  uint8_t version = kSectionVersion;
  uint8_t flags = 0;
  uint64_t offset = 0;
  uint64_t size = 0;
  uint64_t checksum = 0;

  bool required() const { return (flags & kFlagRequired) != 0; }
  bool known() const { return type <= kPacks && version == kSectionVersion; }
  // Type, version and flags as the table's first four bytes: what identifies a section this version
  // does not know.
  uint32_t tag() const {
    return uint32_t{type} | (uint32_t{version} << 16) | (uint32_t{flags} << 24);
  }
  static SectionEntry from_tag(uint32_t tag);
  uint64_t end() const { return offset + size; }
};

// "payload", "tokens" ... or "section 77".
std::string section_name(uint16_t type);

// Throws CorruptSnapshotError: "<path>: corrupt snapshot: <field> is <value>, expected <expected>".
template <class Value, class... Expected>
[[noreturn]] void corrupt(const std::string& path, const std::string& field, const Value& value,
                          const Expected&... expected) {
  throw CorruptSnapshotError(
      str(path, ": corrupt snapshot: ", field, " is ", value, ", expected ", expected...));
}

// Writes header and table of entries that already carry offset, size and checksum. kFrontBytes
// long.
std::string encode_front(const std::vector<SectionEntry>& entries);

struct Front {
  std::vector<SectionEntry> entries;

  const SectionEntry& operator[](SectionType required) const { return entries[required - 1]; }
  // The file names packs in which its sealed chunks are.
  bool manifest() const;
};

// Checks the front against the file's real size: ascending types, every required section there, no
// gap, overlap or trailing byte. CorruptSnapshotError or UnsupportedVersionError, naming `path`.
// REQUIRES: front holds kFrontBytes bytes.
Front decode_front(const std::byte* front, uint64_t real_file_bytes, const std::string& path);

}  // namespace kvpager::snapshot
