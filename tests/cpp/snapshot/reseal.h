// Recomputes the checksums of a damaged snapshot, so that damage gets past them to the checks
// behind.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "snapshot/bytes.h"
#include "snapshot/checksum.h"
#include "snapshot/format.h"

namespace kvpager::snapshot_test {

template <class T>
T get(const std::string& bytes, size_t at) {
  return snapshot::load<T>(reinterpret_cast<const std::byte*>(bytes.data()) + at);
}

template <class T>
void put(std::string* bytes, size_t at, T value) {
  snapshot::store(bytes->data() + at, value);
}

inline size_t entry_at(size_t index) {
  return snapshot::kHeaderBytes + index * snapshot::kEntryBytes;
}

inline snapshot::SectionEntry entry_of(const std::string& bytes, size_t index) {
  auto entry = snapshot::SectionEntry::from_tag(get<uint32_t>(bytes, entry_at(index)));
  entry.offset = get<uint64_t>(bytes, entry_at(index) + 8);
  entry.size = get<uint64_t>(bytes, entry_at(index) + 16);
  entry.checksum = get<uint64_t>(bytes, entry_at(index) + 24);
  return entry;
}

inline bool inside(const std::string& bytes, const snapshot::SectionEntry& entry) {
  return entry.offset <= bytes.size() && entry.size <= bytes.size() - entry.offset;
}

inline void reseal_header(std::string* bytes) {
  using namespace snapshot;  // NOLINT(build/namespaces)
  const size_t count = std::min(get<uint32_t>(*bytes, kSectionCountAt), kMaxSections);
  put(bytes, kTableChecksumAt, xxh3_64(bytes->data() + kHeaderBytes, count * kEntryBytes));
  put(bytes, kHeaderChecksumAt, xxh3_64(bytes->data(), kHeaderChecksumAt));
}

inline bool is_manifest(const std::string& bytes) {
  const size_t count =
      std::min(get<uint32_t>(bytes, snapshot::kSectionCountAt), snapshot::kMaxSections);
  for (size_t i = 0; i < count; ++i) {
    const snapshot::SectionEntry entry = entry_of(bytes, i);
    if (entry.type == snapshot::kPacks && entry.known()) return true;
  }
  return false;
}

// Payload and summary checksums of the table, from the chunk table: of all chunks, or of a manifest
// of the tail, which alone is in the file.
inline void reseal_bulk(std::string* bytes) {
  using namespace snapshot;  // NOLINT(build/namespaces)
  const SectionEntry layout = entry_of(*bytes, kLayout - 1);
  const SectionEntry chunks = entry_of(*bytes, kChunks - 1);
  if (!inside(*bytes, layout) || layout.size < 12 || !inside(*bytes, chunks)) return;
  const auto layers = get<uint32_t>(*bytes, layout.offset);
  const auto chunk_tokens = get<uint32_t>(*bytes, layout.offset + 8);
  const size_t fixed = 48;
  const uint64_t stride = fixed + uint64_t{8} * layers;
  const bool manifest = is_manifest(*bytes);
  std::string slices;
  std::string summaries;
  for (uint64_t at = 0; at + stride <= chunks.size; at += stride) {
    const size_t from = chunks.offset + at;
    const bool sealed = get<uint32_t>(*bytes, from) == chunk_tokens;
    if (sealed && manifest) continue;
    slices.append(*bytes, from + fixed, stride - fixed);
    if (sealed) summaries.append(*bytes, from + fixed - 8, 8);
  }
  put(bytes, entry_at(kPayload - 1) + 24, xxh3_64(slices.data(), slices.size()));
  put(bytes, entry_at(kSummaries - 1) + 24, xxh3_64(summaries.data(), summaries.size()));
}

inline void reseal(std::string* bytes) {
  using namespace snapshot;  // NOLINT(build/namespaces)
  if (bytes->size() < kFrontBytes) return;
  const size_t count = std::min(get<uint32_t>(*bytes, kSectionCountAt), kMaxSections);
  for (size_t i = kSummaries; i < count; ++i) {
    const SectionEntry entry = entry_of(*bytes, i);
    if (!inside(*bytes, entry)) continue;
    put(bytes, entry_at(i) + 24, xxh3_64(bytes->data() + entry.offset, entry.size));
  }
  reseal_bulk(bytes);
  reseal_header(bytes);
}

}  // namespace kvpager::snapshot_test
