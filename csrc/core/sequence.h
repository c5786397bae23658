// One sequence's side of the ledger: which records it uses, in logical order, and what it alone
// knows of them.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "core/token_log.h"
#include "kvpager/types.h"

namespace kvpager {

struct ChunkUse {
  RecordId record;
  double qk_score = 0;
  int32_t pins = 0;
  uint64_t last_use = 0;
  uint64_t selected = 0;
};

//   positions  0        C        2C            length
//              |--------|--------|---------------|- - - - -|
//               sealed uses[0..s)   frontier[0..)   rows of a running forward
//   s = floor(length / C); frontier[i] is chunk s + i, open, in a block.
struct Sequence {
  SequenceId id;
  std::string salt;
  Provenance provenance = Provenance::kExact;  // worst of its chunks: transitive
  Hash128 root;                                // chain hash before the first chunk
  int64_t length = 0;                          // committed positions
  TokenLog tokens;                             // [length]
  std::vector<ChunkUse> sealed;
  std::vector<ChunkUse> frontier;
  int64_t reserved = 0;          // homes promised to chunks that are not sealed yet
  bool frozen = false;           // a save's view of another sequence; nobody else knows it
  int32_t part = -1;             // of the running forward, as a number in Forward::parts; -1: none
  bool summaries_loaded = true;  // false: some sealed chunk's summary is still in its snapshot

  int64_t sealed_chunks() const { return static_cast<int64_t>(sealed.size()); }
  int64_t chunks() const { return sealed_chunks() + static_cast<int64_t>(frontier.size()); }
  ChunkUse& use(int64_t chunk) {
    return chunk < sealed_chunks() ? sealed[static_cast<size_t>(chunk)]
                                   : frontier[static_cast<size_t>(chunk - sealed_chunks())];
  }
  const ChunkUse& use(int64_t chunk) const { return const_cast<Sequence*>(this)->use(chunk); }
};

struct PinRange {
  SequenceId sequence;
  int64_t begin = 0;  // chunks [begin, end)
  int64_t end = 0;
};

}  // namespace kvpager
