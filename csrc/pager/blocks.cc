#include <algorithm>
#include <utility>

#include "kvpager/error.h"
#include "kvpager/require.h"
#include "pager/residency.h"

namespace kvpager {

// Whether some chunk may have a copy below the pool, so that it can be evicted without being forgotten.
bool Residency::lower_copies() const { return !config_.blocks_are_homes() || budget_.restored > 0; }

bool Residency::can_allocate_blocks(int64_t count) {
  int64_t more = count - blocks_.free() - (config_.blocks_are_homes() ? ledger_.cached() : 0);
  if (more > 0 && lower_copies()) more -= eviction_.victims(more);
  return more <= 0 || idle_tails(more) == more;
}

int64_t Residency::idle_tails(int64_t most) {
  if (config_.blocks_are_homes()) return 0;
  most = std::min(most, budget_.homes_left());
  return most > 0 ? eviction_.tails(most) : 0;
}

void Residency::require_blocks(int64_t count, const char* action) {
  if (can_allocate_blocks(count)) return;
  int64_t available = blocks_.free() + idle_tails(config_.slots.pool);
  int64_t open = 0;
  int64_t pinned = 0;
  ledger_.each([&](RecordId, const ChunkRecord& record) {
    available += evictable(record) || (record.cached && record.resident()) ? 1 : 0;
    open += record.state == ChunkState::kOpen && record.resident() ? 1 : 0;
    pinned += record.pins > 0 && record.resident() ? 1 : 0;
  });
  throw CapacityError(str(action, ": needs ", count, " blocks of the pool, ", available,
                          " can be had (pool ", config_.slots.pool, " blocks, ", open,
                          " hold unsealed tails, ", pinned,
                          " are pinned). Raise pool_tokens, release pins or close sessions."));
}

std::optional<BlockId> Residency::allocate_block() {
  if (const auto block = blocks_.take()) return block;
  const auto victim = lower_copies() ? eviction_.next_victim() : std::optional<VictimFacts>();
  // A copy costs more than the nothing that an eviction costs, and less than reading a chunk in use from
  // below again and again.
  const bool tail_first = victim && host_slots_.free() > 0 && idle_tails(1) > 0 &&
                          ledger_[*eviction_.next_tail()].last_use < victim->last_use;
  if (victim && !tail_first) {
    evict(victim->record);
    return blocks_.take();
  }
  if (tail_first || idle_tails(1) > 0) {
    page_out(*eviction_.next_tail());
    return blocks_.take();
  }
  // Where cached chunks count as room, because a block is all that they have.
  if (!reclaim_cached()) return std::nullopt;
  return blocks_.take();
}

void Residency::free_block(BlockId block) {
  blocks_.give_back(block);
  backend_.freed(block);
}

// Invariant 4: a clean chunk has a copy below, so that leaving the pool moves no bytes. One that is
// still on its way is waited for.
void Residency::evict(RecordId id) {
  ChunkRecord& record = ledger_[id];
  KVPAGER_REQUIRE(evictable(record));
  backend_.wait_for_home(record);
  free_block(record.block);
  record.block = BlockId();
  ++counters_.chunks_evicted;
}

// An idle sequence's open chunk moves to a home, every byte of it, and its block is free. REQUIRES: a home is
// left for it.
void Residency::page_out(RecordId id) {
  KVPAGER_REQUIRE(ledger_[id].readers == 0 && ledger_[id].resident() && budget_.homes_left() > 0);
  const Home home = allocate_home();
  ChunkRecord& record = ledger_[id];
  try {
    // What comes back from disk is compared with them.
    if (home.disk.value() >= 0) record.checksums = backend_.checksums(record.block);
    backend_.write_home(record.block, home, &record.checksums);
    record.host = home.host;
    record.disk = home.disk;
    backend_.wait_for_home(record);
  } catch (...) {
    record.host = record.disk = SlotId();
    record.checksums = {};
    free_home(home);
    throw;
  }
  free_block(std::exchange(record.block, BlockId()));
  ledger_.page(id, true);
  ++budget_.paged_out;
  ++counters_.tails_paged_out;
  eviction_.note(id);
}

// Its bytes have arrived in a block, and rows may be written to it: it has no other copy.
void Residency::paged_in(RecordId id) {
  ChunkRecord& record = ledger_[id];
  KVPAGER_REQUIRE(record.resident());
  free_home({std::exchange(record.host, SlotId()), std::exchange(record.disk, SlotId())});
  record.checksums = {};
  ledger_.page(id, false);
  --budget_.paged_out;
}

int64_t Residency::evict_all() {
  std::vector<RecordId> victims;
  ledger_.each([&](RecordId id, const ChunkRecord& record) {
    if (evictable(record)) victims.push_back(id);
  });
  for (const RecordId id : victims) evict(id);
  auto count = static_cast<int64_t>(victims.size());
  // On a device each would have to be waited for: there they leave when their blocks are needed.
  for (; !backend_.reads_all() && idle_tails(1) > 0; ++count) page_out(*eviction_.next_tail());
  return count;
}

void Residency::free_host_slot(SlotId slot) {
  host_slots_.give_back(slot);
  backend_.freed(slot);
}

std::optional<SlotId> Residency::reclaim_host_slot(HostReaders readers) {
  for (;;) {
    if (const auto slot = host_slots_.take()) return slot;
    if (drop_host_copy(readers)) continue;
    if (disk_slots_.free() == 0 || !spill_one(readers)) return std::nullopt;
  }
}

// Moves the host chunk that is valued least to disk; false if there is none. REQUIRES: a free disk slot.
bool Residency::spill_one(HostReaders readers) {
  KVPAGER_REQUIRE(disk_slots_.free() > 0);
  const auto victim = eviction_.next_to_spill(readers);
  if (!victim) return false;
  ChunkRecord& record = ledger_[*victim];
  const SlotId slot = *disk_slots_.take();
  try {
    checksums(*victim);  // what comes back is compared with them
    files_.write_slot(slot, backend_.home(record));
  } catch (...) {
    disk_slots_.give_back(slot);
    throw;
  }
  free_host_slot(record.host);
  record.host = SlotId();
  record.disk = slot;
  ++counters_.chunks_spilled;
  counters_.bytes_paged_out += layout_.chunk_bytes();
  return true;
}

// Host slots that are not needed as homes hold copies of what is below, so that a file is read once.
// Dropping one moves no bytes.
bool Residency::drop_host_copy(HostReaders readers) {
  const auto copy = eviction_.next_host_copy(readers);
  if (!copy) return false;
  free_host_slot(ledger_[*copy].host);
  ledger_[*copy].host = SlotId();
  return true;
}

}  // namespace kvpager
