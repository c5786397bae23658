// Chunks are brought up: from files into memory, from the host into the pool. First there is room for all
// of them, owned by a lease; then their bytes arrive; then the records have them. What throws on the way
// has changed no record but for who is in the pool and which host copies there are; a lease that is
// refused has forgotten no cached chunk either.
//
// Used under the pager's lock.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "pager/lease.h"
#include "pager/readers.h"

namespace kvpager {

// Which slots of the host arena may be room. What finds none there gets a block.
enum class HostRoom : uint8_t {
  kNone,
  kIdle,       // a free one, for a chunk of a snapshot
  kReclaimed,  // also those of copies, and of homes that can go to disk, unless the forward reads them
};
// What becomes of chunks that find no room beside the others.
enum class Lacking : uint8_t {
  kRefuse,  // CapacityError
  kLeave,   // those that found no host slot stay where they are
};
// Whether chunks are read one after another or by all threads, with the system told ahead.
enum class Reading : uint8_t { kInTurn, kTogether };

class RoomLease {
 public:
  // For these chunks, which are not in the pool, and `beside` blocks more, which are the caller's to use.
  // CapacityError naming `action`.
  RoomLease(Pager::Impl& pager, const std::vector<RecordId>& ids, HostRoom host, Lacking lacking,
            const char* action, int64_t beside = 0);
  RoomLease(const RoomLease&) = delete;
  RoomLease& operator=(const RoomLease&) = delete;

  // The chunks are in memory from now on, those that have room; all of them or, if it throws, none.
  void bring_up(Reading reading);
  // After bring_up(): those taken beside.
  BlockLease& blocks() { return *blocks_; }

 private:
  std::optional<SlotId> host_slot(const ChunkRecord& record, HostRoom host);
  void require_blocks(int64_t to_pool, int64_t beside, const char* action) const;

  Pager::Impl& pager_;
  HostSlotLease slots_;
  std::optional<BlockLease> blocks_;
  std::vector<Arrival> arrivals_;  // in the order of slots_, then of blocks_
};

// Whatever the rows of a forward may see stays where it is. What of it is below memory goes to `missing`.
void hold_visible(Pager::Impl& pager, const Forward& forward, Readers* readers,
                  std::vector<RecordId>* missing) KVPAGER_HOLDS(pager.mutex);

}  // namespace kvpager
