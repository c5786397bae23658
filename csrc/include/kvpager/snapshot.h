// Snapshots: what is saved of a sequence, how it is written and how it is read.
// docs/snapshot_format.md is normative; this is its implementation.
//
// A *self-contained* file holds everything. A *manifest* holds tokens, ledger and the tail, and
// names the packs in which a directory store keeps the sealed chunks; a *pack* is an ordinary
// self-contained file of sealed chunks, in any order, whose token ids are theirs.
//
// A writer streams to a temporary name and renames; a reader validates every size before it
// allocates for it (invariant 12), reads metadata at open and payload on demand, and verifies each
// part whenever it is read.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "kvpager/layout.h"
#include "kvpager/shared_array.h"
#include "kvpager/types.h"

namespace kvpager {

inline constexpr uint16_t kSnapshotMajor = 1;
inline constexpr uint16_t kSnapshotMinor = 0;

// What the file says of one chunk. The last one may be partial (the tail): valid < chunk_tokens.
struct SnapshotChunk {
  int32_t valid = 0;  // committed rows, 1..chunk_tokens; the rest of the payload is zero
  Provenance provenance = Provenance::kExact;
  ChunkName chain_hash;                  // of a sealed chunk; zero for the tail
  SharedArray<uint64_t> slice_checksum;  // [layers] XXH3-64 of each layer's slice
  uint64_t summary_checksum = 0;         // XXH3-64 of the summary; zero for the tail

  // Content address: equal for equal payload bytes, chain hash, provenance and valid rows.
  Hash128 content_id() const;
};

// Optional, outside the logical digest: what residency would like to know.
struct SnapshotHints {
  std::vector<double> qk_score;    // [chunks] or empty
  std::vector<uint64_t> last_use;  // [chunks] or empty; age: forwards between that use and the save
};

// Where a manifest's sealed chunks are.
struct SnapshotPacks {
  struct Pack {
    Hash128 id;           // file name: 32 hex digits (high, low) + ".kvsnap", in the packs folder
    uint32_t chunks = 0;  // that it holds
  };
  struct Place {
    uint32_t pack = 0;   // index into packs
    uint32_t chunk = 0;  // index within that pack
  };
  std::vector<Pack> packs;
  std::vector<Place> places;  // [sealed chunks]

  bool empty() const { return packs.empty(); }
};

// The beginning of a text whose chunks were released behind a window: what a content does not have. Its
// chain hashes are computed from this.
struct ReleasedText {
  std::vector<TokenId> tokens;          // a multiple of chunk_tokens
  std::array<int64_t, 3> provenance{};  // chunks that were exact, decode and approximate
  int64_t window = 0;                   // PagerOptions::window of who let them go
};

struct SnapshotMeta {
  Layout layout;
  std::string scorer;              // what made the summaries below: bits2::kName
  int64_t summary_page_bytes = 0;  // of one (chunk, layer, kv head)
  std::string fingerprint;  // UTF-8 JSON object, opaque here; compared field by field by the caller
  std::string session;      // UTF-8 JSON object, opaque here (pending token, sampler)
  SharedArray<TokenId> tokens;  // ids of all committed positions
  // Of a frozen sequence: what came before these. Not written: the caller that saves puts it into `session`.
  ReleasedText before;
  std::vector<SnapshotChunk> chunks;
  SnapshotHints hints;
  SnapshotPacks packs;  // of a manifest; empty: self-contained
  // Sections this version does not know, kept byte for byte so that write(read(x)) == x.
  std::vector<std::pair<uint32_t, std::string>> unknown;

  int64_t sealed_chunks() const {
    return static_cast<int64_t>(tokens.size()) / layout.chunk_tokens;
  }
  int64_t summary_bytes_per_chunk() const {
    return summary_page_bytes * layout.layers * layout.kv_heads;
  }
};

// Called now and then with the payload bytes done so far; may throw to stop, which undoes the call.
using SnapshotProgress = std::function<void(int64_t done_bytes, int64_t total_bytes)>;

// Something whose chunks can be written to a snapshot: a sequence frozen by a pager, or an opened
// snapshot. Thread-safe; immutable for as long as it exists.
class SnapshotContent {
 public:
  virtual ~SnapshotContent() = default;

  // `packs` and `unknown` are the source's own and mean nothing to a copy.
  virtual const SnapshotMeta& meta() const = 0;

  // The payload of a chunk, layout.chunk_bytes(), rows past `valid` zero: either where it is, or
  // copied to scratch[layout.chunk_bytes()]. The address is good until give_back, which must follow.
  virtual const std::byte* borrow_chunk(int64_t chunk, std::byte* scratch) const = 0;
  virtual void give_back_chunk(int64_t chunk) const = 0;
  // The summary of a sealed chunk into out[meta().summary_bytes_per_chunk()].
  virtual void read_summary(int64_t chunk, std::byte* out) const = 0;
};

// Encrypts a file while it is written: its front, then the rest in blocks of one size, the last of them
// shorter. Used by one thread at a time.
class FileCipher {
 public:
  virtual ~FileCipher() = default;

  virtual uint64_t block_bytes() const = 0;   // of plain text: a power of two, at most 1 MiB
  virtual uint64_t header_bytes() const = 0;  // at the beginning of the file
  virtual uint64_t tag_bytes() const = 0;     // by which each block grows
  // The header of a file of so many plain bytes.
  virtual std::string header(uint64_t plain_bytes) = 0;
  // Writes the cipher text of consecutive blocks to `out`, one tag_bytes() longer for each. `first`: number
  // of the first one; the front is block 0, alone.
  virtual void encrypt(uint64_t first, const std::byte* plain, uint64_t bytes, std::byte* out) = 0;
};

// Streams chunks out in order, then summaries, then metadata:
//   (add_chunk)* (add_summary)* seal publish     or     write_content  (all of it, but publish)
// Destroying an unpublished writer removes the temporary file, also of one that has failed, so that a
// store can do it under its lock. Errors are StorageError with the path and the system's words (disk
// full, read-only...).
class SnapshotWriter {
 public:
  // Refuses an existing directory, a missing parent folder and an unwritable one before any byte is
  // written. reserve_bytes > 0: the temporary file is given that size at once (disk space included,
  // where the file system can), so that "disk full" is known now and a store can count it; seal()
  // cuts what was not needed. The temporary is flock()ed exclusively for as long as it exists, and
  // the published file until this writer is destroyed, so that others can tell whether its writer
  // lives. mode: the file's permissions, 0600 and more bits of 0666; a file that has the name keeps
  // those that it lacks. With a cipher no plain byte is written; sizes are those of the encrypted file,
  // but for reserve_bytes, which is of plain bytes.
  explicit SnapshotWriter(const std::string& path, const Layout& layout, int64_t reserve_bytes = 0,
                          uint32_t mode = 0600, std::shared_ptr<FileCipher> cipher = nullptr);
  ~SnapshotWriter();
  SnapshotWriter(const SnapshotWriter&) = delete;
  SnapshotWriter& operator=(const SnapshotWriter&) = delete;

  // payload: layout.chunk_bytes(), rows past `valid` already zero.
  void add_chunk(const std::byte* payload);
  // Writes summaries ([sealed chunks][layers][kv_heads][summary_page_bytes], contiguous, one call
  // per chunk, in order, after the last add_chunk) as they stream in.
  void add_summary(const std::byte* summary, int64_t bytes);

  // Metadata, header, fsync. meta.chunks must match what was added: of a self-contained file all
  // chunks, of a manifest (meta.packs not empty) the tail alone, if there is one. Chunks given with
  // checksums are checked against the bytes that were added. Returns the file's size in bytes.
  int64_t seal(const SnapshotMeta& meta);
  // Rename, fsync of the folder. InvalidArgumentError unless it is sealed.
  void publish();
  // seal, publish.
  int64_t finish(const SnapshotMeta& meta);

  // Writes the chunks `which` of `content` (ascending; a tail last) and the summaries of the sealed
  // ones: large writes straight from where the bytes are, checksums beside them. Then seals:
  //   a self-contained file, whose tokens, chunk records and hints are those of `which`, with the
  //   given fingerprint and session. Returns the file's size in bytes.
  int64_t write_content(const SnapshotContent& content, const std::vector<int64_t>& which,
                        const std::string& fingerprint, const std::string& session,
                        const SnapshotProgress& progress);
  // Writes and seals a manifest of `content`: its tail, if it has one, and where its sealed chunks
  // are. summary_checksum[i] is that of sealed chunk i, as the pack's chunk table has it. Hints and
  // records are the content's. Returns the file's size in bytes.
  int64_t write_manifest(const SnapshotContent& content, const SnapshotPacks& packs,
                         const std::vector<uint64_t>& summary_checksum,
                         const std::string& fingerprint, const std::string& session);
  // Of what write_content wrote: the records of `which`, checksums filled in.
  const std::vector<SnapshotChunk>& written() const;
  // SnapshotReader::logical_digest of the file, known before it has its name.
  // InvalidArgumentError before seal.
  Hash128 logical_digest() const;
  // Name of the temporary file, in the folder of the path; empty once there is none.
  const std::string& temporary() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// The file that write_content would write of all chunks of a content, in pieces that are made when they
// are read: there is neither a file nor a copy of the whole. Thread-safe; the content stays as long
// as this.
class SnapshotImage {
 public:
  // Reads every chunk and summary once, for their checksums, which the front has. Throws what
  // write_content throws, but for StorageError of a disk.
  SnapshotImage(std::shared_ptr<const SnapshotContent> content, const std::string& fingerprint,
                const std::string& session);
  ~SnapshotImage();
  SnapshotImage(const SnapshotImage&) = delete;
  SnapshotImage& operator=(const SnapshotImage&) = delete;

  // Of the file, and as SnapshotReader will say of it.
  int64_t file_bytes() const;
  Hash128 logical_digest() const;

  // How many pieces there are; one behind the other they are the file. None is larger than a chunk, a
  // summary, the front or the metadata.
  int64_t pieces() const;
  int64_t piece_bytes(int64_t piece) const;
  // Into out[piece_bytes(piece)]. CorruptSnapshotError for a chunk that is no longer what it was.
  void read_piece(int64_t piece, std::byte* out) const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// Size in bytes of the file that write_content would make of `chunks` chunks with these JSON texts,
// and of a manifest with `packs` packs; upper bounds, for reservations. InvalidArgumentError if the
// content has fewer sealed chunks, or those fewer than there are packs.
int64_t snapshot_file_bytes(const SnapshotMeta& meta, int64_t sealed, bool tail,
                            const std::string& fingerprint, const std::string& session,
                            int64_t packs);

// What verify found to be damaged.
struct SnapshotDamage {
  int64_t chunk = -1;
  int layer = -1;  // -1: the summary
  std::string message;
};

// The bytes of a file that never changes, read by range: a local file, an object of a remote store, the
// plain text of an encrypted file. Thread-safe.
class ByteRanges {
 public:
  virtual ~ByteRanges() = default;

  virtual const std::string& path() const = 0;  // for messages
  virtual uint64_t bytes() const = 0;           // in all
  // Copies bytes [offset, offset + bytes) to `out`. `what` names them in messages.
  // StorageError if they cannot be read, CorruptSnapshotError if the file ends before.
  virtual void read(std::byte* out, uint64_t bytes, uint64_t offset,
                    const std::function<std::string()>& what) const = 0;
  // A hint that these bytes will be read soon. Does not block.
  virtual void will_need(uint64_t bytes, uint64_t offset) const noexcept = 0;
};

// Opens a file by its path. Throws StorageError if there is none.
using RangesOpener = std::function<std::shared_ptr<const ByteRanges>(const std::string& path)>;

// An opened snapshot. Holds descriptors, never a mapping: a file that shrinks or rots underneath
// gives CorruptSnapshotError, not a signal. Thread-safe for reads.
class SnapshotReader : public SnapshotContent {
 public:
  // Reads and verifies header, section table and metadata (not payload, not summaries).
  // CorruptSnapshotError, UnsupportedVersionError or StorageError, with the path and what is wrong.
  // A manifest's packs are opened too, in `packs_folder`, by default ../packs as seen from the
  // manifest, and held with a shared flock; their sizes are checked, their bytes when they are read.
  // With an opener, snapshot and packs are read through what it returns for their paths, and nothing is
  // locked.
  static std::shared_ptr<SnapshotReader> open(const std::string& path,
                                              const std::string& packs_folder = "",
                                              const RangesOpener& opener = {});
  // A snapshot put together from sealed chunks of opened files, in this order: (file, chunk). Layout
  // and scorer must agree (InvalidArgumentError); the fingerprint is the first one's.
  static std::shared_ptr<SnapshotReader> gather(
      const std::vector<std::pair<std::shared_ptr<SnapshotReader>, int64_t>>& chunks,
      const std::string& name);
  ~SnapshotReader() override;

  const std::string& path() const;
  const SnapshotMeta& meta() const override;
  int64_t file_bytes() const;  // of the file itself, without packs
  // A digest of the logical section (layout, fingerprint, tokens, provenance, payload checksums,
  // summaries' checksum): equal for equal content, whatever the hints and wherever the chunks are.
  // Computed when it is first asked for.
  Hash128 logical_digest() const;

  // One layer's slice of a chunk into out[layout.slice_bytes()], verified. Names chunk, token range
  // and layer.
  void read_slice(int64_t chunk, int layer, std::byte* out) const;
  // All slices of a chunk into out[layout.chunk_bytes()], verified, one read.
  void read_chunk(int64_t chunk, std::byte* out) const;
  // Tells the system that this chunk will be read soon, so that several can be on their way at once.
  void will_need(int64_t chunk) const;
  // Summaries of the sealed chunks [first, first + count), [count][layers][kv_heads]
  // [summary_page_bytes], verified; one read per run of neighbours in a file.
  void read_summaries(int64_t first, int64_t count, std::byte* out) const;

  const std::byte* borrow_chunk(int64_t chunk, std::byte* scratch) const override;
  void give_back_chunk(int64_t chunk) const override;
  void read_summary(int64_t chunk, std::byte* out) const override;

  // Reads everything once, with `threads` threads, and returns all damage there is, in order.
  std::vector<SnapshotDamage> verify(int threads, const SnapshotProgress& progress) const;

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
