#include "snapshot/format.h"

#include <algorithm>
#include <cstring>

#include "kvpager/snapshot.h"
#include "snapshot/bytes.h"
#include "snapshot/checksum.h"

namespace kvpager::snapshot {

namespace {

std::string hex(uint64_t value) {
  std::ostringstream out;
  out << "0x" << std::hex << value;
  return out.str();
}

template <class T>
void expect_field(const std::byte* front, size_t at, T expected, const char* field,
                  const std::string& path) {
  const T value = load<T>(front + at);
  if (value != expected) corrupt(path, str("header.", field), uint64_t{value}, uint64_t{expected});
}

// Magic, checksum and version come first: this much has the same shape in every version.
void check_identity(const std::byte* front, const std::string& path) {
  if (std::memcmp(front, kMagic, sizeof(kMagic)) != 0) {
    throw CorruptSnapshotError(
        str(path,
            std::memcmp(front, "KVPCRYPT", 8) == 0
                ? ": this file is encrypted; open it through its store, with the store's key"
                : ": not a kvpager snapshot",
            ": header.magic is ", hex(load<uint64_t>(front)), ", expected ",
            hex(load<uint64_t>(reinterpret_cast<const std::byte*>(kMagic)))));
  }
  const uint64_t stored = load<uint64_t>(front + kHeaderChecksumAt);
  const uint64_t computed = xxh3_64(front, kHeaderChecksumAt);
  if (stored != computed) corrupt(path, "header.checksum", hex(stored), hex(computed));
  const auto major = load<uint16_t>(front + kMajorAt);
  const auto minor = load<uint16_t>(front + kMinorAt);
  if (major != kSnapshotMajor || minor != kSnapshotMinor) {
    throw UnsupportedVersionError(
        str(path, ": header.version is ", major, ".", minor, ", expected ", kSnapshotMajor, ".",
            kSnapshotMinor,
            ", the version that this reader reads; compute the text again and save it, or use the "
            "release that saved it"));
  }
}

SectionEntry decode_entry(const std::byte* from) {
  SectionEntry entry = SectionEntry::from_tag(load<uint32_t>(from));
  entry.offset = load<uint64_t>(from + 8);
  entry.size = load<uint64_t>(from + 16);
  entry.checksum = load<uint64_t>(from + 24);
  return entry;
}

void check_known(const SectionEntry& entry, const std::string& name, const std::string& path) {
  if ((entry.flags & ~kFlagRequired) != 0) {
    corrupt(path, name + ".flags", int{entry.flags}, "0 or 1");
  }
  if (!entry.known() && entry.required()) {
    throw UnsupportedVersionError(str(path, ": ", name, ".version is ", int{entry.version},
                                      " and the section is required; this reader does not know it "
                                      "(it knows format version ",
                                      kSnapshotMajor, ".", kSnapshotMinor, ")"));
  }
  const bool always = entry.type <= kRequiredSections;
  const bool must = always || entry.type == kPacks;
  if (always && !entry.known()) {
    corrupt(path, name + ".version", int{entry.version}, int{kSectionVersion});
  }
  if (entry.known() && entry.required() != must) {
    corrupt(path, name + ".flags", int{entry.flags}, int{must});
  }
}

}  // namespace

SectionEntry SectionEntry::from_tag(uint32_t tag) {
  SectionEntry entry;
  entry.type = static_cast<uint16_t>(tag & 0xFFFF);
  entry.version = static_cast<uint8_t>((tag >> 16) & 0xFF);
  entry.flags = static_cast<uint8_t>(tag >> 24);
  return entry;
}

std::string section_name(uint16_t type) {
  static constexpr const char* kNames[] = {"payload",     "summaries", "layout",
                                           "fingerprint", "session",   "tokens",
                                           "chunks",      "hints",     "packs"};
  if (type >= kPayload && type <= kPacks) return kNames[type - 1];
  return str("section ", type);
}

bool Front::manifest() const {
  const auto packs = [](const SectionEntry& e) { return e.type == kPacks && e.known(); };
  return std::any_of(entries.begin(), entries.end(), packs);
}

std::string encode_front(const std::vector<SectionEntry>& entries) {
  std::string front(kFrontBytes, '\0');
  char* table = front.data() + kHeaderBytes;
  for (size_t i = 0; i < entries.size(); ++i) {
    char* to = table + i * kEntryBytes;
    store(to, entries[i].tag());
    store(to + 8, entries[i].offset);
    store(to + 16, entries[i].size);
    store(to + 24, entries[i].checksum);
  }
  char* header = front.data();
  std::memcpy(header, kMagic, sizeof(kMagic));
  store(header + kMajorAt, kSnapshotMajor);
  store(header + kMinorAt, kSnapshotMinor);
  store(header + kHeaderBytesAt, static_cast<uint32_t>(kHeaderBytes));
  store(header + kSectionCountAt, static_cast<uint32_t>(entries.size()));
  store(header + kEntryBytesAt, static_cast<uint32_t>(kEntryBytes));
  store(header + kFileBytesAt, entries.back().end());
  store(header + kTableChecksumAt, xxh3_64(table, entries.size() * kEntryBytes));
  store(header + kHeaderChecksumAt, xxh3_64(header, kHeaderChecksumAt));
  return front;
}

Front decode_front(const std::byte* front, uint64_t real_file_bytes, const std::string& path) {
  check_identity(front, path);
  expect_field(front, kHeaderBytesAt, static_cast<uint32_t>(kHeaderBytes), "header_bytes", path);
  expect_field(front, kEntryBytesAt, static_cast<uint32_t>(kEntryBytes), "entry_bytes", path);
  expect_field(front, kFileBytesAt, real_file_bytes, "file_bytes", path);
  if (!all_zero(front + kReservedAt, kHeaderChecksumAt - kReservedAt)) {
    corrupt(path, "header.reserved", "not zero", "zero");
  }
  const auto count = load<uint32_t>(front + kSectionCountAt);
  if (count < kRequiredSections || count > kMaxSections) {
    corrupt(path, "header.section_count", count, kRequiredSections, "..", kMaxSections);
  }
  const std::byte* table = front + kHeaderBytes;
  const size_t table_bytes = count * kEntryBytes;
  const uint64_t stored = load<uint64_t>(front + kTableChecksumAt);
  const uint64_t computed = xxh3_64(table, table_bytes);
  if (stored != computed) corrupt(path, "header.table_checksum", hex(stored), hex(computed));
  if (!all_zero(table + table_bytes, kFrontBytes - kHeaderBytes - table_bytes)) {
    corrupt(path, "padding after the section table", "not zero", "zero");
  }

  Front out;
  std::vector<SectionEntry>& entries = out.entries;
  entries.resize(count);
  uint64_t end = kFrontBytes;
  for (uint32_t i = 0; i < count; ++i) {
    const std::byte* from = table + i * kEntryBytes;
    SectionEntry& entry = entries[i];
    entry = decode_entry(from);
    const std::string name = section_name(entry.type);
    if (i < kRequiredSections && entry.type != i + 1) {
      corrupt(path, str("table[", i, "].type"), entry.type, i + 1, " (", section_name(i + 1), ")");
    }
    if (i > 0 && entry.type <= entries[i - 1].type) {
      corrupt(path, str("table[", i, "].type"), entry.type, "more than ", entries[i - 1].type,
              " (ascending, no duplicates)");
    }
    check_known(entry, name, path);
    if (load<uint32_t>(from + 4) != 0) {
      corrupt(path, name + ".reserved", load<uint32_t>(from + 4), 0);
    }
    const uint64_t expected_offset = align_up(end, kSectionAlignment);
    if (entry.offset != expected_offset) {
      corrupt(path, name + ".offset", entry.offset, expected_offset,
              " (sections follow each other without gap or overlap)");
    }
    if (entry.offset > real_file_bytes || entry.size > real_file_bytes - entry.offset) {
      corrupt(path, name + ".size", entry.size, "at most ",
              real_file_bytes - std::min(entry.offset, real_file_bytes), " (the file has ",
              real_file_bytes, " bytes)");
    }
    end = entry.end();
  }
  if (end != real_file_bytes) {
    corrupt(path, "file size", real_file_bytes, end, " (the end of the last section)");
  }
  const uint64_t metadata = real_file_bytes - entries[kSummaries - 1].end();
  if (metadata > kMaxMetadataBytes) {
    corrupt(path, "metadata size", metadata, "at most ", kMaxMetadataBytes);
  }
  return out;
}

}  // namespace kvpager::snapshot
