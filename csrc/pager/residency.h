// Where the bytes of chunks are: which block, host slot, disk slot and summary slot each record has, within
// budgets that were mapped up front. Nothing here can change a result.
//
//   residency.cc  records and homes
//   blocks.cc     blocks of the pool and slots of the host arena: allocate, evict, spill
//   load.cc       from files and the host arena into memory, all chunks or none
//   summaries.cc  summaries that a restore left in their snapshot
//
// A sealed record's bytes, and what moves them:
//
//   resident + home     --evict, 0 bytes-->               home
//   home or snapshot    --promote, recall, pin-->         resident + it
//   snapshot            --first read, a slot is free-->   snapshot + host copy
//   snapshot + copy     --a home needs the slot-->        snapshot
//   host                --spill, the arena is full-->     disk
//
// An open record's, whose sequence is idle: block --page out--> home --page in--> block, one copy at a time.
//
// Invariants 1 to 4: a block or slot is free or has one owner; every use is within its budget and a sum over
// records; what is pinned stays; nothing leaves the pool without a copy below it.
//
// Used under the pager's lock.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "core/ledger.h"
#include "core/slot_pool.h"
#include "kvpager/pager.h"
#include "kvpager/thread_pool.h"
#include "pager/backend.h"
#include "pager/chunk_files.h"
#include "pager/config.h"
#include "pager/eviction.h"
#include "pager/home.h"
#include "pager/home_budget.h"

namespace kvpager {

// What the classes of a pager share, which derive from it.
struct PagerParts {
  const Config& config_;
  const PagerOptions& options_;
  const Layout& layout_;
  Ledger& ledger_;
  Backend& backend_;
  ChunkFiles& files_;
  ThreadPool& threads_;
  PagerStats& counters_;
};

class Residency : PagerParts {
 public:
  Residency(const PagerParts& parts, Eviction::Sheltered sheltered);

  // --- Records.
  // An open chunk in this block, which one sequence uses. Allocates nothing where the ledger expects it.
  RecordId create_open(int64_t index, BlockId block);
  // A sealed chunk that is in a snapshot and has no summary in memory yet. Likewise.
  RecordId create_restored(const std::shared_ptr<SnapshotReader>& reader, int64_t in_file,
                           SlotId summary);
  void add_reference(RecordId id);
  // One reference less. A record without any is cached where it can be found again, else dropped.
  void release(RecordId id);
  // The same, but a record without any is dropped, and the memory below the pool goes back to the system.
  void release_and_forget(RecordId id);
  // Drops a record that no sequence uses, likewise.
  void forget(RecordId id);
  void drop(RecordId id);
  // One per layer. Where they were put off they are computed, from the bytes in memory.
  const SharedArray<uint64_t>& checksums(RecordId id);
  // A chunk's bytes for a save: their address, counted in ChunkRecord::borrows, or a copy in scratch, or
  // null if they are below memory.
  const std::byte* lend(RecordId id, std::byte* scratch);

  // Forwards begun, by which uses are dated.
  uint64_t clock() const { return clock_; }
  void tick() { ++clock_; }

  // --- Homes.
  HomeBudget& budget() { return budget_; }
  const HomeBudget& budget() const { return budget_; }
  // A slot below the pool; none where blocks are homes. REQUIRES: it was reserved.
  Home allocate_home();
  void free_home(const Home& home);
  // The sealed chunk has this home from now on. REQUIRES: it is in use and had no copy below the pool.
  void set_home(RecordId id, const Home& home);
  // A chunk whose snapshot is damaged was computed again, with the bytes its checksums say: it has this
  // home instead.
  void heal_by_home(RecordId id, const Home& home, SharedArray<TokenId> tokens,
                    SharedArray<uint64_t> checksums);
  // A damaged chunk was found in a sound snapshot: it is read from there, and gives its disk slot back.
  void heal_by_source(RecordId id, const std::shared_ptr<SnapshotReader>& reader, int64_t in_file);

  // --- Blocks.
  // Whether allocate_block() succeeds `count` times: free ones, those of evictable chunks, those of idle
  // sequences' open chunks as far as there are homes, and where blocks are homes those of cached chunks.
  bool can_allocate_blocks(int64_t count);
  // How many open chunks can be paged out, counted up to `most`.
  int64_t idle_tails(int64_t most);
  // CapacityError naming `action` unless it does.
  void require_blocks(int64_t count, const char* action);
  std::optional<BlockId> allocate_block();
  void free_block(BlockId block);
  // Evicts every chunk that can be evicted, and but for a device pages out the open ones that can be; returns
  // how many.
  int64_t evict_all();

  // --- Slots of the host arena, for copies of what is below.
  // A free one.
  std::optional<SlotId> allocate_host_slot() { return host_slots_.take(); }
  // A free one, or one of a copy, or of a home that can go to disk, unless it is read.
  std::optional<SlotId> reclaim_host_slot(HostReaders readers);
  void free_host_slot(SlotId slot);

  // --- Summaries.
  // REQUIRES: it was reserved.
  SlotId allocate_summary();
  void free_summary(SlotId slot) { summary_slots_.give_back(slot); }
  // Loads those of these records that are still in their snapshots. Damaged ones are made again from the
  // chunks. All or none.
  void load_summaries(const std::vector<RecordId>& ids);

  // --- Loading chunks.
  // Loads a few chunks ahead of need, which the last forward read and which are not in the pool: those that
  // the policy values most, where they are worth more than the chunks they replace. Errors end it.
  void recall(const std::vector<RecordId>& missed);

  // What may be evicted has changed.
  void invalidate_eviction() { eviction_.invalidate(); }
  void note_evictable(RecordId id) { eviction_.note(id); }

  void add_to(PagerStats* stats) const;
  void check_invariants() const;

 private:
  friend class LoadLease;

  void check_slots() const;
  void check_cached() const;
  void check_record(RecordId id, const ChunkRecord& record) const;
  bool lower_copies() const;
  void evict(RecordId id);
  void page_out(RecordId id);
  void paged_in(RecordId id);
  bool reclaim_cached();
  bool spill_one(HostReaders readers);
  bool drop_host_copy(HostReaders readers);
  void set_source(ChunkRecord* record, const std::shared_ptr<SnapshotReader>& reader,
                  int64_t in_file);
  int64_t read_or_rebuild(SnapshotReader* reader, int64_t first,
                          const std::vector<ChunkRecord*>& records, std::byte* out) const;

  HomeBudget budget_;
  SlotPool<BlockId> blocks_;
  SlotPool<SlotId> host_slots_;
  SlotPool<SlotId> disk_slots_;
  SlotPool<SlotId> summary_slots_;
  Eviction eviction_;
  uint64_t clock_ = 0;
};

}  // namespace kvpager
