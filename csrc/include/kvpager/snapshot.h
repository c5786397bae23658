// The snapshot file: write and read. docs/snapshot_format.md is normative; this is its
// implementation.
//
// A writer streams to a temporary name and renames; a reader validates every size before it
// allocates for it (invariant 12), reads metadata at open and payload on demand, and verifies each
// part when it is first read.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "kvpager/layout.h"
#include "kvpager/types.h"

namespace kvpager {

inline constexpr uint16_t kSnapshotMajor = 1;
inline constexpr uint16_t kSnapshotMinor = 0;

// What the file says of one chunk. The last one may be partial (the tail): valid < chunk_tokens.
struct SnapshotChunk {
  int32_t valid = 0;  // committed rows, 1..chunk_tokens; the rest of the payload is zero
  Provenance provenance = Provenance::kExact;
  Hash128 chain_hash;                    // of a sealed chunk; zero for the tail
  std::vector<uint64_t> slice_checksum;  // [layers] XXH3-64 of each layer's slice
};

// Optional, outside the logical digest: what residency would like to know.
struct SnapshotHints {
  std::vector<double> qk_score;    // [chunks] or empty
  std::vector<uint64_t> last_use;  // [chunks] or empty
};

struct SnapshotMeta {
  Layout layout;
  std::string scorer;              // name; summaries below were made by it
  int64_t summary_page_bytes = 0;  // of one (chunk, layer, kv head)
  std::string fingerprint;  // UTF-8 JSON object, opaque here; compared field by field by the caller
  std::string session;      // UTF-8 JSON object, opaque here (pending token, sampler)
  std::vector<TokenId> tokens;  // ids of all committed positions
  std::vector<SnapshotChunk> chunks;
  SnapshotHints hints;
  // Sections this version does not know, kept byte for byte so that write(read(x)) == x.
  std::vector<std::pair<uint32_t, std::string>> unknown;

  int64_t sealed_chunks() const {
    return static_cast<int64_t>(tokens.size()) / layout.chunk_tokens;
  }
};

// Streams chunks out in order, then metadata. (add_chunk | add_tail)* finish. Destroying an
// unfinished writer removes the temporary file. Errors are StorageError with the path and the
// system's words (disk full, read-only...).
class SnapshotWriter {
 public:
  // Refuses an existing directory, a missing parent folder and an unwritable one before any byte is
  // written.
  explicit SnapshotWriter(const std::string& path, const Layout& layout);
  ~SnapshotWriter();
  SnapshotWriter(const SnapshotWriter&) = delete;
  SnapshotWriter& operator=(const SnapshotWriter&) = delete;

  // payload: layout.chunk_bytes(), rows past `valid` already zero.
  void add_chunk(const std::byte* payload);
  // Writes summaries ([sealed chunks][layers][kv_heads][summary_page_bytes], contiguous, one call
  // per chunk, in order, after the last add_chunk) as they stream in.
  void add_summary(const std::byte* summary, int64_t bytes);
  // Metadata, header, fsync, rename, fsync of the folder. meta.chunks must match what was added.
  // Returns the file's size in bytes.
  int64_t finish(const SnapshotMeta& meta);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// An opened file. Holds the descriptor, never a mapping: a file that shrinks or rots underneath
// gives CorruptSnapshotError, not a signal. Thread-safe for reads.
class SnapshotReader {
 public:
  // Reads and verifies header, section table and metadata (not payload, not summaries).
  // CorruptSnapshotError, UnsupportedVersionError or StorageError, with the path and what is wrong.
  static std::shared_ptr<SnapshotReader> open(const std::string& path);
  ~SnapshotReader();

  const std::string& path() const;
  const SnapshotMeta& meta() const;
  // A digest of the logical section (layout, fingerprint, tokens, provenance, payload checksums,
  // summaries' checksum): equal for equal content, whatever the hints.
  Hash128 logical_digest() const;

  // One layer's slice of a chunk into out[layout.slice_bytes()], verified. Names chunk, token range
  // and layer.
  void read_slice(int64_t chunk, int layer, std::byte* out) const;
  // All slices of a chunk into out[layout.chunk_bytes()], verified, one read.
  void read_chunk(int64_t chunk, std::byte* out) const;
  // All summaries of the sealed chunks, [sealed][layers][kv_heads][summary_page_bytes], one read,
  // verified.
  void read_summaries(std::byte* out) const;

  // Payload and summary bytes read so far, for "restore reads what it needs".
  int64_t payload_bytes_read() const;

 private:
  SnapshotReader();
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// XXH3-64 of a slice, as stored in ledger and file.
uint64_t slice_checksum(const std::byte* data, int64_t bytes);

}  // namespace kvpager
