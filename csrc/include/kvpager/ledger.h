// What the ledger tells a user about one chunk of one sequence: a copy, safe to keep.
#pragma once

#include <cstdint>

#include "kvpager/types.h"

namespace kvpager {

// Where a chunk's bytes can be read, as bits: a chunk may be in several places.
enum Tier : uint8_t {
  kTierResident = 1,
  kTierHost = 2,
  kTierDisk = 4,
  kTierSnapshot = 8,
};

struct ChunkInfo {
  int64_t chunk = 0;  // logical index: positions [start, stop)
  int64_t start = 0;
  int64_t stop = 0;
  bool sealed = false;
  bool released = false;    // behind a window: it has no bytes and no record
  bool damaged = false;     // its bytes on disk or in the snapshot are not what was put there
  bool checkpoint = false;  // of recurrent states behind it, which the pager does not keep
  uint8_t tiers = 0;        // of Tier
  BlockId block;            // value -1: not resident
  DType k_dtype = DType::kFloat32;
  DType v_dtype = DType::kFloat32;
  Provenance provenance = Provenance::kExact;
  ChunkName chain_hash;    // none while unsealed
  int32_t references = 0;  // sequences that use this record
  int32_t pins = 0;        // of this sequence
  // Moving average of this chunk's share of attention mass, [0, 1]; of dense attention one layer's.
  double qk_score = 0;
  uint64_t last_use = 0;  // number of the last forward that read it
  uint64_t selected = 0;  // forwards of this sequence that read it
  uint64_t recalled = 0;  // times it was loaded back into the pool
};

}  // namespace kvpager
