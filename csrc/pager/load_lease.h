// Loads chunks: from files into memory, from the host arena into the pool. First a lease owns room for all
// of them; then their bytes arrive; then the records have them. What throws on the way has changed no
// record but for which chunks are in the pool and which host copies there are; a lease that is refused has
// forgotten no cached chunk either.
//
// Used under the pager's lock.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "pager/lease.h"

namespace kvpager {

// Which slots of the host arena a chunk may be loaded into. A chunk that gets none there gets a block.
enum class HostRoom : uint8_t {
  kNone,
  kIdle,       // a free one, for a chunk of a snapshot
  kReclaimed,  // also those of copies, and of homes that can go to disk, unless the forward reads them
};
// What becomes of chunks for which there is no room beside the others.
enum class NoRoom : uint8_t {
  kRefuse,  // CapacityError
  kSkip,    // those that got no host slot stay where they are
};
// Whether chunks are read one after another or by all threads, with the system told ahead.
enum class Reading : uint8_t { kInTurn, kTogether };

class LoadLease {
 public:
  // For these chunks, which are not in the pool, and `beside` blocks more, which are the caller's to use.
  // CapacityError naming `action`.
  LoadLease(Residency& residency, const std::vector<RecordId>& ids, HostRoom host, NoRoom no_room,
            const char* action, int64_t beside = 0);
  LoadLease(const LoadLease&) = delete;
  LoadLease& operator=(const LoadLease&) = delete;

  // The chunks are in memory from now on, those that have room; all of them or, if it throws, none.
  void load(Reading reading);
  // After load(): those allocated beside.
  BlockLease& blocks() { return *blocks_; }

 private:
  std::optional<SlotId> host_slot(const ChunkRecord& record, HostRoom host);
  void require_blocks(int64_t to_pool, int64_t beside, const char* action);

  Residency& residency_;
  HostSlotLease slots_;
  std::optional<BlockLease> blocks_;
  std::vector<Arrival> arrivals_;  // in the order of slots_, then of blocks_
};

}  // namespace kvpager
