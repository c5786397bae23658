#include <utility>

#include "kvpager/error.h"
#include "kvpager/require.h"
#include "pager/residency.h"

namespace kvpager {

// Whether some chunk may have a copy below the pool, so that it can be evicted without being forgotten.
bool Residency::lower_copies() const { return !config_.blocks_are_homes() || budget_.restored > 0; }

bool Residency::can_allocate_blocks(int64_t count) {
  const int64_t more = count - blocks_.free() - (config_.blocks_are_homes() ? ledger_.cached() : 0);
  return more <= 0 || (lower_copies() && eviction_.can_evict(more));
}

void Residency::require_blocks(int64_t count, const char* action) {
  if (can_allocate_blocks(count)) return;
  int64_t available = blocks_.free();
  int64_t open = 0;
  int64_t pinned = 0;
  ledger_.each([&](RecordId, const ChunkRecord& record) {
    available += evictable(record) || (record.cached && record.resident()) ? 1 : 0;
    open += record.state == ChunkState::kOpen ? 1 : 0;
    pinned += record.pins > 0 && record.resident() ? 1 : 0;
  });
  throw CapacityError(str(action, ": needs ", count, " blocks of the pool, ", available,
                          " can be had (pool ", config_.slots.pool, " blocks, ", open,
                          " hold unsealed tails, ", pinned,
                          " are pinned). Raise pool_tokens, release pins or close sessions."));
}

std::optional<BlockId> Residency::allocate_block() {
  if (const auto block = blocks_.take()) return block;
  if (lower_copies()) {
    if (const auto victim = eviction_.next_victim()) {
      evict(victim->record);
      return blocks_.take();
    }
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

int64_t Residency::evict_all() {
  std::vector<RecordId> victims;
  ledger_.each([&](RecordId id, const ChunkRecord& record) {
    if (evictable(record)) victims.push_back(id);
  });
  for (const RecordId id : victims) evict(id);
  return static_cast<int64_t>(victims.size());
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
