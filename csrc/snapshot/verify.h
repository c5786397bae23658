// Reading all of a snapshot once, to find what is damaged.
#pragma once

#include <vector>

#include "kvpager/snapshot.h"
#include "snapshot/chunk_source.h"

namespace kvpager::snapshot {

// In the order of the files, in large reads. The calling thread works too, and alone calls progress.
std::vector<SnapshotDamage> verify(const ChunkSource& source, int threads,
                                   const SnapshotProgress& progress);

}  // namespace kvpager::snapshot
