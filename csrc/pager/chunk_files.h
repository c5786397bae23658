// Chunks below memory: in slots of the spill file and in snapshots. What is read is compared with its
// checksums, and a record remembers in `damaged` what was found.
//
// Thread-safe for different records; one record is read by one thread at a time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "core/ledger.h"
#include "kvpager/error.h"
#include "kvpager/shared_array.h"
#include "kvpager/thread_pool.h"
#include "memory/disk_spill.h"
#include "pager/config.h"

namespace kvpager {

class ChunkFiles {
 public:
  // Opens the spill file where there is to be one. StorageError.
  explicit ChunkFiles(const Config& config);

  // All of a chunk, or one layer of it. REQUIRES: it is on disk or in a snapshot. StorageError or
  // CorruptSnapshotError where other bytes come back than were written.
  void read_chunk(const ChunkRecord& record, std::byte* out) const;
  void read_slice(const ChunkRecord& record, int layer, std::byte* out) const;
  // Tells the system that a chunk will be read: a cold disk reads many as fast as one.
  void will_need(const ChunkRecord& record) const;

  // REQUIRES: the slot is taken, and its record will have the checksums of these bytes.
  void write_slot(SlotId slot, const std::byte* chunk) { disk_.write(slot.value(), chunk); }

 private:
  void require_as_written(const ChunkRecord& record, int layer, const std::byte* slice) const;

  const Layout& layout_;
  DiskSpill disk_;
};

// One per layer of a chunk.
std::vector<uint64_t> slice_checksums(const Layout& layout, const std::byte* chunk,
                                      ThreadPool& threads);

// The same damage, to chunk `in_file` of a file, said of chunk `chunk` of the text it is from.
CorruptSnapshotError damage_of_chunk(const CorruptSnapshotError& error, int64_t in_file,
                                     int64_t chunk, int64_t chunk_tokens);

}  // namespace kvpager
