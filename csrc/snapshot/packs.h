// The packs of a manifest, opened. A process holds one descriptor of a pack, however many manifests
// refer to it; it is closed with the last of them.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "kvpager/snapshot.h"
#include "snapshot/input_file.h"

namespace kvpager::snapshot {

// A file chunks are read from: their payload begins at kFrontBytes.
struct ChunkFile {
  std::shared_ptr<const ByteRanges> file;
  uint64_t summaries_at = 0;
};

// 32 hex digits, high half first, and ".kvsnap".
std::string pack_file_name(const Hash128& id);
// ../packs as seen from the manifest.
std::string packs_folder_of(const std::string& manifest);

// Opens and locks every pack of meta and checks that its parts have the sizes meta says: the bytes
// themselves are verified when they are read. StorageError, CorruptSnapshotError or
// UnsupportedVersionError that names pack and manifest. An opener opens them in its own way.
std::vector<ChunkFile> open_packs(const SnapshotMeta& meta, const std::string& folder,
                                  const std::string& manifest, const RangesOpener& opener);

}  // namespace kvpager::snapshot
