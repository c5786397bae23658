#include "pager/chunk_files.h"

namespace kvpager {

ChunkFiles::ChunkFiles(const Config& config)
    : layout_(config.layout),
      disk_(config.options.disk_path, config.slots.disk, config.layout.chunk_bytes()) {}

// A snapshot without the beginning of a text numbers its chunks from 0 on.
CorruptSnapshotError damage_of_chunk(const CorruptSnapshotError& error, int64_t in_file,
                                     int64_t chunk, int64_t chunk_tokens) {
  if (error.chunk < 0 || in_file == chunk) return error;
  return {str(error.what(), "; chunk ", in_file, " of the file is chunk ", chunk, " of the text"),
          chunk, error.layer, chunk * chunk_tokens, error.stop - error.start};
}

namespace {

// Reads from a record's snapshot, which verifies what it reads.
template <class Read>
void read_source(const Layout& layout, const ChunkRecord& record, const Read& read) {
  try {
    read();
  } catch (const CorruptSnapshotError& error) {
    record.damaged = true;
    throw damage_of_chunk(error, record.source_chunk, record.index, layout.chunk_tokens);
  }
}

}  // namespace

// The spill file is verified here. As with a snapshot's chunk, the record remembers the damage:
// no sequence adopts it, and a sequence that computes it again heals it.
void ChunkFiles::require_as_written(const ChunkRecord& record, int layer,
                                    const std::byte* slice) const {
  const uint64_t written = record.checksums[static_cast<size_t>(layer)];
  if (slice_checksum(slice, layout_.slice_bytes(layer)) != written) {
    record.damaged = true;
    throw StorageError(str("disk spill: chunk ", record.index, " layer ", layer,
                           " came back with other bytes than were written"));
  }
}

void ChunkFiles::read_chunk(const ChunkRecord& record, std::byte* out) const {
  if (!record.on_disk()) {
    read_source(layout_, record, [&] { record.source->read_chunk(record.source_chunk, out); });
    record.damaged = false;
    return;
  }
  disk_.read(record.disk.value(), 0, layout_.chunk_bytes(), out);
  for (int layer = 0; layer < layout_.layers; ++layer) {
    require_as_written(record, layer, out + layout_.slice_offset(layer));
  }
  record.damaged = false;
}

void ChunkFiles::read_slice(const ChunkRecord& record, int layer, std::byte* out) const {
  if (!record.on_disk()) {
    read_source(layout_, record,
                [&] { record.source->read_slice(record.source_chunk, layer, out); });
    return;
  }
  disk_.read(record.disk.value(), layout_.slice_offset(layer), layout_.slice_bytes(layer), out);
  require_as_written(record, layer, out);
}

void ChunkFiles::will_need(const ChunkRecord& record) const {
  if (!record.on_disk()) record.source->will_need(record.source_chunk);
}

std::vector<uint64_t> slice_checksums(const Layout& layout, const std::byte* chunk,
                                      ThreadPool& threads) {
  std::vector<uint64_t> sums(static_cast<size_t>(layout.layers));
  threads.run(layout.layers, [&](int64_t item, int) {
    const int layer = static_cast<int>(item);
    sums[static_cast<size_t>(item)] =
        slice_checksum(chunk + layout.slice_offset(layer), layout.slice_bytes(layer));
  });
  return sums;
}

}  // namespace kvpager
