// The ledger: one record per chunk that exists, however many sequences use it. Integers and facts; no bytes are
// moved here.
//
//        create_open                 seal                     drop (references = 0)
//   (none) ------> open ----------------------------> sealed ------------------> (none)
//                   |  drop (trim, abort, rejected)     ^ restore creates sealed records directly
//                   +------------------------------> (none)
//
//   open    private to one sequence, rows may still change; in a block, or paged out while the sequence
//           is idle: then its bytes are in a home, as a sealed chunk's
//   sealed  bytes never change again; name, checksums and summary are set; may be in any set of
//           tiers, at least one of them; in the index of names when exact
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "kvpager/require.h"
#include "kvpager/shared_array.h"
#include "kvpager/snapshot.h"
#include "kvpager/types.h"

namespace kvpager {

enum class ChunkState : uint8_t { kFree, kOpen, kSealed };

struct ChunkRecord {
  ChunkState state = ChunkState::kFree;
  Provenance provenance = Provenance::kExact;
  int32_t references = 0;  // uses by sequences; a sealed record with 0 is cached for prefix reuse
  int32_t pins = 0;        // over all uses; changed by Ledger::pin
  int32_t readers = 0;     // attention calls reading it now: its block is in flight, never a victim
  int32_t borrows = 0;     // saves writing from its home, which stays where it is
  int64_t index = 0;       // logical chunk index, the same in every sequence that shares it

  BlockId block;                           // resident copy
  SlotId host;                             // host copy
  SlotId disk;                             // disk copy
  std::shared_ptr<SnapshotReader> source;  // a snapshot that has this chunk, or null
  int64_t source_chunk = -1;
  mutable bool name_checked = false;  // by check_invariants
  mutable bool damaged =
      false;  // the last read from `disk` or `source` found other bytes than were
              // put there

  SlotId summary;                // slot of the summary slab; sealed records only
  bool summary_pending = false;  // still in `source`; loaded before any row can score it

  ChunkName name;      // sealed records only
  ChunkName previous;  // that of the chunk before; empty: this is a text's first
  // Sealed: chunk_tokens ids. A restored record's, like its checksums, are the snapshot's own, which
  // `source` keeps: they are replaced when that is reset or replaced.
  SharedArray<TokenId> tokens;
  // Sealed: one per layer slice. Of a chunk sealed on a device none until they are first asked for;
  // its bytes are in memory until then.
  SharedArray<uint64_t> checksums;

  double score = 0;       // residency's view: the newest QK share any user saw
  uint64_t last_use = 0;  // forward number
  uint64_t recalled = 0;

  // Among the cached records, in the order in which they were released: see Ledger::cache.
  RecordId older;
  RecordId newer;
  bool cached = false;
  bool published = false;  // in the index of names
  bool paged_out = false;  // open, and in a home instead of a block; changed by Ledger::page

  bool resident() const { return block.value() >= 0; }
  bool on_host() const { return host.value() >= 0; }
  bool on_disk() const { return disk.value() >= 0; }
  bool in_memory() const { return resident() || on_host(); }
  bool has_lower_copy() const { return on_host() || on_disk() || source != nullptr; }
  // The host copy is the chunk's home, or only a copy of what is on disk or in a snapshot.
  bool home_on_host() const { return on_host() && !on_disk() && source == nullptr; }
  bool host_copy() const { return on_host() && !home_on_host(); }
  // Occupies a home: a lower-tier slot of its own, or its block where there are no lower tiers.
  bool needs_home() const { return state == ChunkState::kSealed && source == nullptr; }
  // Stays in its block whatever residency would like.
  bool held() const { return (state == ChunkState::kOpen && !paged_out) || pins > 0; }
};

class Ledger {
 public:
  RecordId create(ChunkState state);
  // Room for `more` records, so that creating them allocates nothing here.
  void expect(int64_t more);
  // The record leaves the index and is free for reuse. REQUIRES: it owns no block, slot or summary
  // any more, and has no reader.
  void drop(RecordId id);

  void seal(RecordId id);            // open -> sealed. REQUIRES: it is open
  void page(RecordId id, bool out);  // REQUIRES: it is open, and on the other side
  // That many pins more, or less. REQUIRES: no fewer than none are left.
  void pin(RecordId id, int32_t amount);
  int64_t held() const { return held_; }  // records that are open in a block, or pinned

  ChunkRecord& operator[](RecordId id) { return records_[static_cast<size_t>(id.value())]; }
  const ChunkRecord& operator[](RecordId id) const {
    return records_[static_cast<size_t>(id.value())];
  }

  // Makes an exact sealed record findable by its name. An equal name already there stays (first
  // come). REQUIRES: it is exact and sealed.
  void publish(RecordId id);
  // A published record with this name and these tokens. The name stands for all tokens before them.
  std::optional<RecordId> find(const ChunkName& name, const TokenId* tokens, int64_t count) const;

  bool published(RecordId id) const { return (*this)[id].published; }

  // Cached records: sealed ones that no sequence uses, kept for prefix reuse. Oldest first is the
  // order in which they are forgotten. REQUIRES of both: what the name says has not been done yet; of
  // cache(): the record is sealed, and no sequence uses it.
  void cache(RecordId id);
  void uncache(RecordId id);
  std::optional<RecordId> oldest_cached() const;
  int64_t cached() const { return cached_; }

  int64_t live() const { return live_; }
  // Calls fn(RecordId, record) for every live record.
  template <class Fn>
  void each(Fn fn) const {
    for (size_t i = 0; i < records_.size(); ++i) {
      if (records_[i].state != ChunkState::kFree)
        fn(RecordId(static_cast<int32_t>(i)), records_[i]);
    }
  }

 private:
  // A place of the index. The tag is a part of the name: where the search begins, and most of the
  // comparison, without a look at the record.
  struct Entry {
    RecordId record;  // -1: empty
    uint32_t tag = 0;
  };

  static uint32_t tag_of(const ChunkName& name) { return static_cast<uint32_t>(name.words[0]); }
  // Where the search for a tag begins. REQUIRES: index_ is not empty.
  size_t home_of(uint32_t tag) const {
    KVPAGER_REQUIRE(!index_.empty());
    return tag & (index_.size() - 1);
  }
  size_t after(size_t place) const { return (place + 1) & (index_.size() - 1); }
  // The place of the record with this name, or the empty one at which the search for it ends.
  size_t place_of(const ChunkName& name) const;
  void grow(size_t records);
  void make_room(size_t published);
  void withdraw(const ChunkRecord& record);  // REQUIRES: it is published

  std::vector<ChunkRecord> records_;
  std::vector<RecordId> free_;
  // Published records by the name in the record, which is as good as random: open addressing, at
  // most half full, a power of two long. Nothing is allocated for a record.
  std::vector<Entry> index_;
  size_t published_ = 0;
  int64_t live_ = 0;
  int64_t held_ = 0;
  RecordId oldest_, newest_;
  int64_t cached_ = 0;
};

}  // namespace kvpager
