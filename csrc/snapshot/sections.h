// What a file says in front of its payload and behind its summaries: the section table and the
// metadata.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "kvpager/snapshot.h"
#include "snapshot/format.h"
#include "snapshot/metadata.h"

namespace kvpager::snapshot {

// The sections in file order: what the table says of them, and the bytes of those that follow the
// summaries.
struct Sections {
  uint64_t metadata_at;
  std::vector<SectionEntry> entries;
  std::string metadata;

  void describe(uint32_t tag, uint64_t offset, uint64_t size, uint64_t checksum);
  void add(uint32_t tag, const void* data, size_t bytes);
  void add(uint32_t tag, const std::string& text) { add(tag, text.data(), text.size()); }
};

Sections lay_out(const SnapshotMeta& meta, const std::vector<SnapshotChunk>& chunks,
                 uint64_t payload_and_summaries_end);

// What a self-contained file says of these chunks of a content alone.
SnapshotMeta meta_of(const SnapshotMeta& content, const std::vector<int64_t>& which,
                     const std::string& fingerprint, const std::string& session);

// Gives a record the checksum of its summary; CorruptSnapshotError if it has another one already.
// `chunk` is its number in the content, `path` is for the message.
void note_summary(uint64_t computed, int64_t chunk, const Layout& layout, const std::string& path,
                  SnapshotChunk* record);

// InvalidArgumentError, here and below: the scorer's name, fingerprint or session cannot be written.
void check_texts(const SnapshotMeta& meta);
// Chunks (of `meta`, with their checksums), hints or packs break a rule.
void check_sound(const SnapshotMeta& meta, const std::vector<SnapshotChunk>& chunks);
void refuse_longer(const char* field, uint64_t bytes, uint64_t limit);
void refuse_broken(const std::optional<BrokenRule>& rule);
[[noreturn]] void refuse(const BrokenRule& problem);

}  // namespace kvpager::snapshot
