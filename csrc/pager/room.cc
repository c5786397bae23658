#include "pager/room.h"

#include <algorithm>

#include "kvpager/error.h"

namespace kvpager {

RoomLease::RoomLease(Pager::Impl& pager, const std::vector<RecordId>& ids, HostRoom host,
                     Lacking lacking, const char* action, int64_t beside)
    : pager_(pager), slots_(pager) {
  std::vector<RecordId> rest;
  arrivals_.reserve(ids.size());
  for (const RecordId id : ids) {
    if (const auto slot = host_slot(pager.ledger[id], host)) {
      slots_.add(*slot);
      arrivals_.push_back({id, *slot, BlockId()});
    } else {
      rest.push_back(id);
    }
  }
  if (lacking == Lacking::kLeave &&
      !pager.blocks_to_be_had(static_cast<int64_t>(rest.size()) + beside)) {
    rest.clear();
  }
  const auto to_pool = static_cast<int64_t>(rest.size());
  if (host != HostRoom::kNone && to_pool > 0) require_blocks(to_pool, beside, action);
  blocks_.emplace(pager, to_pool + beside, action);
  for (int64_t i = 0; i < to_pool; ++i) {
    arrivals_.push_back({rest[static_cast<size_t>(i)], SlotId(), (*blocks_)[i]});
  }
}

std::optional<SlotId> RoomLease::host_slot(const ChunkRecord& record, HostRoom host) {
  pager_.mutex.held();
  if (host == HostRoom::kNone) return std::nullopt;
  if (host == HostRoom::kIdle) {
    return record.source != nullptr ? pager_.host_slots.take() : std::nullopt;
  }
  for (;;) {
    if (const auto slot = pager_.host_slots.take()) return slot;
    if (pager_.drop_host_copy(HostReaders::kOfBlocks)) continue;
    if (pager_.disk_slots.free() == 0 || !pager_.spill_one(HostReaders::kOfBlocks)) {
      return std::nullopt;
    }
  }
}

// Where the chunks find no room, they are what is named; a frontier that finds none is refused as any
// other taker of blocks.
void RoomLease::require_blocks(int64_t to_pool, int64_t beside, const char* action) const {
  pager_.mutex.held();
  if (pager_.blocks_to_be_had(to_pool + beside) || !pager_.blocks_to_be_had(beside)) return;
  const int64_t each = pager_.layout.chunk_bytes();
  const int64_t bytes = (pager_.host_slots.slots() + to_pool) * each;
  throw CapacityError(str(action, ": ", slots_.count() + to_pool,
                          " chunks that this forward may read are on disk or in a "
                          "snapshot and have to be in memory meanwhile; ",
                          to_pool, " of them, ", to_pool * each,
                          " bytes, find no room beside what else it reads (pool ",
                          pager_.options.pool_blocks,
                          " blocks, host_bytes=", pager_.options.host_bytes,
                          "). Raise host_bytes to at least ", bytes, ", or close sessions."));
}

// A cold file is read by one thread where the system is not told ahead: two make two streams of it,
// which disks have read at a third of the rate of one.
void RoomLease::bring_up(Reading reading) {
  pager_.mutex.held();
  if (arrivals_.empty()) return;
  if (reading == Reading::kTogether) {
    for (const Arrival& arrival : arrivals_) {
      const ChunkRecord& record = pager_.ledger[arrival.record];
      if (!record.on_host()) pager_.files.will_need(record);
    }
  }
  pager_.backend->load(arrivals_, reading == Reading::kTogether ? pager_.threads.threads() : 1);
  for (const Arrival& arrival : arrivals_) {
    ChunkRecord& record = pager_.ledger[arrival.record];
    if (!slots_.empty()) {
      record.host = slots_.release();
      continue;
    }
    record.block = blocks_->release();
    ++record.recalled;
    ++pager_.counters.chunks_recalled;
    pager_.counters.bytes_paged_in += pager_.layout.chunk_bytes();
    pager_.may_leave(arrival.record);
  }
  arrivals_.clear();
}

void hold_visible(Pager::Impl& pager, const Forward& forward, Readers* readers,
                  std::vector<RecordId>* missing) {
  for (const ForwardPart& part : forward.parts) {
    const int64_t end = std::min(part.visible, part.sequence->chunks());
    for (int64_t c = part.sequence->released; c < end; ++c) {
      const RecordId id = part.sequence->use(c).record;
      const ChunkRecord& record = pager.ledger[id];
      if (readers->add(id) && !record.resident() && !record.on_host()) missing->push_back(id);
    }
  }
}

}  // namespace kvpager
