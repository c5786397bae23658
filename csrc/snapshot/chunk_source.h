// What is behind a SnapshotReader: metadata, and reads of chunks and summaries from the files they
// are in, verified on every read. Immutable once opened; thread-safe.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "kvpager/error.h"
#include "kvpager/snapshot.h"
#include "snapshot/packs.h"

namespace kvpager::snapshot {

struct ChunkSource {
  struct Place {
    uint32_t file = 0;   // index into files
    uint32_t chunk = 0;  // index within that file
  };

  std::string name;  // the snapshot's path, for messages
  SnapshotMeta meta;
  int64_t file_bytes = 0;
  std::vector<ChunkFile> files;
  std::vector<Place> places;  // [chunks]
  mutable std::atomic<int64_t> bytes_read{0};

  const Layout& layout() const { return meta.layout; }
  Hash128 logical_digest() const;  // computed once, when it is first asked for
  int64_t summary_bytes() const { return meta.summary_bytes_per_chunk(); }
  const SnapshotChunk& record(int64_t chunk) const {
    return meta.chunks[static_cast<size_t>(chunk)];
  }
  const Place& place(int64_t chunk) const { return places[static_cast<size_t>(chunk)]; }
  // How many chunks from `first` on, at most `count`, lie behind each other in one file.
  int64_t neighbours(int64_t first, int64_t count) const;

  // Reads and counts; verifies nothing. `slices` of them from a layer of a chunk on, over the end of
  // the chunk into its neighbours; summaries of neighbours. CorruptSnapshotError where the file has
  // ended before.
  void fetch_slices(int64_t chunk, int layer, int64_t slices, std::byte* out) const;
  void fetch_summaries(int64_t first, int64_t count, std::byte* out) const;

  void will_need(int64_t chunk) const noexcept;

  // Empty, or what is wrong with these bytes.
  std::string slice_damage(int64_t chunk, int layer, const std::byte* slice) const;
  std::string summary_damage(int64_t chunk, const std::byte* summary) const;

  // Reads and verifies.
  void read_slice(int64_t chunk, int layer, std::byte* out) const;
  void read_chunk(int64_t chunk, std::byte* out) const;
  void read_summaries(int64_t first, int64_t count, std::byte* out) const;

 private:
  std::string describe(int64_t chunk) const;  // with its tokens
  CorruptSnapshotError damage(const std::string& message, int64_t chunk, int layer) const;
  std::string checksum_damage(int64_t chunk, const std::string& what, uint64_t computed,
                              uint64_t expected) const;
  template <class Describe>
  void fetch(int64_t chunk, int layer, uint64_t bytes, uint64_t offset, const Describe& what,
             std::byte* out) const;

  mutable std::once_flag digest_once_;
  mutable Hash128 digest_;
};

}  // namespace kvpager::snapshot
