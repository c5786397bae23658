// One sequence's side of the ledger: which records it uses, in logical order, and what it alone
// knows of them.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "core/chunk_namer.h"
#include "core/token_log.h"
#include "kvpager/require.h"
#include "kvpager/types.h"

namespace kvpager {

struct ChunkUse {
  RecordId record;
  double qk_score = 0;
  int32_t pins = 0;
  uint64_t last_use = 0;
  uint64_t selected = 0;
};

// Released chunks of a sequence, of each Provenance. It never gets better along a sequence, so
// that the counts say which chunks they are.
using ProvenanceCounts = std::array<int64_t, 3>;

//   positions  0        C        2C            length
//              |--------|--------|---------------|- - - - -|
//               released  sealed[0..)  frontier[0..)  rows of a running forward
//   sealed[i] is chunk released + i, frontier[i] is chunk floor(length / C) + i, open, in a block.
//   What is released is behind every window; its bytes are not known here.
struct Sequence {
  explicit Sequence(const ChunkNamer& of_its_chunks) : namer(of_its_chunks) {}

  SequenceId id;
  std::string salt;
  ChunkNamer namer;
  Provenance provenance = Provenance::kExact;  // worst of its chunks: transitive
  int64_t released = 0;                        // chunks
  ProvenanceCounts released_worth{};           // the same chunks, counted by what they were worth
  ChunkName base;      // name of the chunk before sealed[0]; none, if none is released
  int64_t length = 0;  // committed positions
  TokenLog tokens;     // [length]
  std::vector<ChunkUse> sealed;
  std::vector<ChunkUse> frontier;
  int64_t target = 0;    // positions that were reserved last
  int64_t reserved = 0;  // homes for chunks that are not sealed yet
  int64_t reserved_by_forward =
      0;                         // of these, what the running forward gives back if it ends unused
  bool frozen = false;           // a save's view of another sequence, which no caller can name
  int32_t part = -1;             // of the running forward, as a number in Forward::parts; -1: none
  bool dropped = false;          // its owner has gone: it goes when the running forward ends
  bool summaries_loaded = true;  // false: some sealed chunk's summary is still in its snapshot

  // Chunks [0, sealed_chunks()) are full, of which [released, sealed_chunks()) are held.
  int64_t sealed_chunks() const { return released + static_cast<int64_t>(sealed.size()); }
  int64_t chunks() const { return sealed_chunks() + static_cast<int64_t>(frontier.size()); }
  // The record of the last one held; none without one.
  RecordId last_sealed() const { return sealed.empty() ? RecordId() : sealed.back().record; }
  // REQUIRES: released <= chunk < chunks().
  ChunkUse& use(int64_t chunk) {
    KVPAGER_REQUIRE(released <= chunk && chunk < chunks());
    return chunk < sealed_chunks() ? sealed[static_cast<size_t>(chunk - released)]
                                   : frontier[static_cast<size_t>(chunk - sealed_chunks())];
  }
  const ChunkUse& use(int64_t chunk) const { return const_cast<Sequence*>(this)->use(chunk); }
  // The worst of what was released.
  Provenance released_provenance() const {
    return released_worth[2] > 0   ? Provenance::kApproximate
           : released_worth[1] > 0 ? Provenance::kDecode
                                   : Provenance::kExact;
  }
  // Of a released chunk.
  Provenance released_provenance(int64_t chunk) const {
    return chunk < released_worth[0]                       ? Provenance::kExact
           : chunk < released_worth[0] + released_worth[1] ? Provenance::kDecode
                                                           : Provenance::kApproximate;
  }
};

struct PinRange {
  SequenceId sequence;
  int64_t begin = 0;  // chunks [begin, end)
  int64_t end = 0;
};

}  // namespace kvpager
