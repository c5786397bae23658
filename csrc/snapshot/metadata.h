// What the metadata sections say: their bytes, and the rules that tie them to each other and to
// payload and summaries. The same rules bind writer (InvalidArgumentError) and reader
// (CorruptSnapshotError).
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "kvpager/snapshot.h"
#include "snapshot/format.h"

namespace kvpager::snapshot {

// What the layout section says: a layout that holds everywhere (Layout::broken_rule), and summaries of a size
// such that every size of a chunk fits 63 bits.
std::optional<BrokenRule> check_geometry(const Layout& layout, int64_t summary_page_bytes);
// Chunks against tokens: count, valid rows, hashes, one checksum per layer.
// REQUIRES: check_geometry holds.
std::optional<BrokenRule> check_chunks(const Layout& layout, uint64_t tokens,
                                       const std::vector<SnapshotChunk>& chunks);
std::optional<BrokenRule> check_hints(const SnapshotHints& hints, size_t chunks);
// Of a manifest: packs in the order of their first use, each one once and used, every sealed chunk
// in a place of its own.
std::optional<BrokenRule> check_packs(const SnapshotPacks& packs, int64_t sealed);

int64_t chunk_count(const Layout& layout, uint64_t tokens);
// Of one chunk's summary, all layers and heads.
uint64_t summary_bytes_per_chunk(const Layout& layout, int64_t summary_page_bytes);
uint64_t chunk_entry_bytes(const Layout& layout);

// The chunks whose payload and summaries the file itself holds: of a manifest the tail alone.
struct OwnChunks {
  size_t first = 0;   // up to the end
  size_t sealed = 0;  // of these
};
OwnChunks own_chunks(const SnapshotMeta& meta);

std::string encode_layout(const SnapshotMeta& meta);
std::string encode_chunks(const std::vector<SnapshotChunk>& chunks);
std::string encode_hints(const SnapshotHints& hints);
std::string encode_packs(const SnapshotPacks& packs);

// The checksums that stand in the section table for payload and summaries: hashes of hashes, so
// that `open` can tie them to the chunk table without reading either.
uint64_t payload_checksum(const std::vector<SnapshotChunk>& chunks, const OwnChunks& own);
uint64_t summaries_checksum(const std::vector<SnapshotChunk>& chunks, const OwnChunks& own);

// XXH3-128 over the sections that say what the content is.
Hash128 logical_digest(const SnapshotMeta& meta, const std::vector<SnapshotChunk>& chunks);

// A section as read, as aligned as in the file; data is null where `open` does not read it (payload,
// summaries).
struct Section {
  SectionEntry entry;
  const std::byte* data = nullptr;
};

// Decodes and cross-checks everything. `sections` holds every entry of the table; data is null for
// payload and summaries. No allocation exceeds what the sizes in the (already validated) table pay
// for. `bytes` keeps what the sections point at: token ids and checksums stay there.
SnapshotMeta decode_metadata(const std::vector<Section>& sections,
                             const std::shared_ptr<const std::byte>& bytes,
                             const std::string& path);

}  // namespace kvpager::snapshot
