#include <algorithm>
#include <utility>

#include "kvpager/error.h"
#include "pager/load_lease.h"
#include "pager/scoped_timer.h"

namespace kvpager {

LoadLease::LoadLease(Residency& residency, const std::vector<RecordId>& ids, HostRoom host,
                     NoRoom no_room, const char* action, int64_t beside)
    : residency_(residency), slots_(residency) {
  std::vector<RecordId> rest;
  arrivals_.reserve(ids.size());
  for (const RecordId id : ids) {
    if (const auto slot = host_slot(residency.ledger_[id], host)) {
      slots_.add(*slot);
      arrivals_.push_back({id, *slot, BlockId()});
    } else {
      rest.push_back(id);
    }
  }
  if (no_room == NoRoom::kSkip &&
      !residency.can_allocate_blocks(static_cast<int64_t>(rest.size()) + beside)) {
    rest.clear();
  }
  const auto to_pool = static_cast<int64_t>(rest.size());
  if (host != HostRoom::kNone && to_pool > 0) require_blocks(to_pool, beside, action);
  blocks_.emplace(residency, to_pool + beside, action);
  for (int64_t i = 0; i < to_pool; ++i) {
    arrivals_.push_back({rest[static_cast<size_t>(i)], SlotId(), (*blocks_)[i]});
  }
}

std::optional<SlotId> LoadLease::host_slot(const ChunkRecord& record, HostRoom host) {
  switch (host) {
    case HostRoom::kNone:
      return std::nullopt;
    case HostRoom::kIdle:
      return record.source != nullptr ? residency_.allocate_host_slot() : std::nullopt;
    case HostRoom::kReclaimed:
      return residency_.reclaim_host_slot(HostReaders::kOfMissing);
  }
  return std::nullopt;
}

// If the chunks find no room, the message is about them; a frontier that finds none is refused like any
// other user of blocks.
void LoadLease::require_blocks(int64_t to_pool, int64_t beside, const char* action) {
  if (residency_.can_allocate_blocks(to_pool + beside) || !residency_.can_allocate_blocks(beside)) {
    return;
  }
  const Config& config = residency_.config_;
  const int64_t each = config.layout.chunk_bytes();
  throw CapacityError(str(action, ": ", slots_.count() + to_pool,
                          " chunks that this forward may read are on disk or in a "
                          "snapshot and have to be in memory meanwhile; ",
                          to_pool, " of them, ", to_pool * each,
                          " bytes, find no room beside what else it reads (pool ",
                          config.slots.pool, " blocks, host_bytes=", config.options.host_bytes,
                          "). Raise host_bytes to at least ", (config.slots.host + to_pool) * each,
                          ", or close sessions."));
}

// A cold file is read by one thread where the system is not told ahead: two make two streams of it,
// which disks have read at a third of the rate of one.
void LoadLease::load(Reading reading) {
  if (arrivals_.empty()) return;
  Residency& to = residency_;
  if (reading == Reading::kTogether) {
    for (const Arrival& arrival : arrivals_) {
      const ChunkRecord& record = to.ledger_[arrival.record];
      if (!record.on_host()) to.files_.will_need(record);
    }
  }
  to.backend_.load(arrivals_, reading == Reading::kTogether ? to.threads_.threads() : 1);
  for (const Arrival& arrival : arrivals_) {
    ChunkRecord& record = to.ledger_[arrival.record];
    if (!slots_.empty()) {
      record.host = slots_.release();
    } else {
      record.block = blocks_->release();
      if (record.paged_out) to.paged_in(arrival.record);
      ++record.recalled;
      ++to.counters_.chunks_recalled;
      to.counters_.bytes_paged_in += to.layout_.chunk_bytes();
    }
    to.eviction_.note(arrival.record);
  }
  arrivals_.clear();
}

// What rows of a forward selected is what the next ones are likely to select.
void Residency::recall(const std::vector<RecordId>& missed) {
  if (missed.empty()) return;
  const PagerOptions& options = config_.options;
  for (const VictimFacts& wanted : eviction_.most_valued(missed, options.recall_chunks)) {
    if (ledger_[wanted.record].resident()) continue;  // shared by two sequences of this forward
    if (blocks_.free() == 0) {
      const auto victim = lower_copies() ? eviction_.next_victim() : std::optional<VictimFacts>();
      if (!victim || !worth_recalling(options.policy, options.hysteresis, wanted, *victim) ||
          backend_.arriving(ledger_[victim->record]) > 0) {
        return;
      }
    }
    try {
      LoadLease(*this, {wanted.record}, HostRoom::kNone, NoRoom::kRefuse, "recall")
          .load(Reading::kInTurn);
    } catch (const PagerError&) {
      return;  // only ahead of need: a forward that needs the chunk meets the error
    }
  }
}

}  // namespace kvpager
