#include <algorithm>

#include "core/unique_number.h"
#include "kvpager/error.h"
#include "pager/load_lease.h"
#include "pager/sequences.h"

namespace kvpager {

// Invariant 3: beside the pinned chunks a forward still finds blocks for its frontier.
void Sequences::require_unpinned(int64_t chunks, int64_t start, int64_t stop) const {
  int64_t free = options_.pool_blocks - ledger_.held() - config_.frontier_blocks();
  if (chunks > free) free += residency_.idle_tails(chunks - free);
  if (chunks <= free) return;
  int64_t pinned = 0;
  ledger_.each([&](RecordId, const ChunkRecord& record) { pinned += record.pins > 0 ? 1 : 0; });
  const int64_t open = ledger_.held() - pinned;
  throw CapacityError(str("pin [", start, ", ", stop, ") needs ", chunks, " chunks; ",
                          std::max<int64_t>(0, free), " of the pool's ", options_.pool_blocks,
                          " are free to pin (", pinned, " pinned, ", open, " hold tails, ",
                          config_.frontier_blocks(), " kept for running forwards)"));
}

void Sequences::add_pins(Sequence& sequence, const PinRange& range, int32_t amount) {
  for (int64_t chunk = range.begin; chunk < range.end; ++chunk) {
    sequence.use(chunk).pins += amount;
    ledger_.pin(sequence.use(chunk).record, amount);
  }
}

PinId Sequences::pin(SequenceId id, int64_t start, int64_t stop) {
  Sequence& sequence = find(id);
  if (start < 0 || stop <= start || stop > sequence.length) {
    throw InvalidArgumentError(str("pin range [", start, ", ", stop,
                                   "): expected 0 <= start < stop <= ", sequence.length,
                                   ", the positions this sequence holds"));
  }
  const int64_t c = layout_.chunk_tokens;
  require_held(sequence, start, str("pin range [", start, ", ", stop, ")"));
  const PinRange range{id, start / c, (stop + c - 1) / c};
  std::vector<RecordId> fresh;
  for (int64_t chunk = range.begin; chunk < range.end; ++chunk) {
    const RecordId record = sequence.use(chunk).record;
    if (ledger_[record].pins == 0) fresh.push_back(record);
  }
  require_unpinned(static_cast<int64_t>(fresh.size()), start, stop);
  const PinId number(unique_number());
  add_pins(sequence, range, 1);
  try {
    std::vector<RecordId> missing;
    for (const RecordId record : fresh) {
      if (!ledger_[record].resident()) missing.push_back(record);
    }
    LoadLease(residency_, missing, HostRoom::kNone, NoRoom::kRefuse, "pin").load(Reading::kInTurn);
    pins_[number.value()] = range;
  } catch (...) {
    add_pins(sequence, range, -1);
    residency_.invalidate_eviction();
    throw;
  }
  return number;
}

void Sequences::unpin(PinId id) {
  const auto found = pins_.find(id.value());
  if (found == pins_.end()) return;  // its sequence was closed first
  const PinRange range = found->second;
  Sequence& sequence = find(range.sequence);
  for (int64_t chunk = range.begin; chunk < range.end; ++chunk) {
    --sequence.use(chunk).pins;
    ledger_.pin(sequence.use(chunk).record, -1);
    residency_.note_evictable(sequence.use(chunk).record);
  }
  pins_.erase(found);
  if (sequence.part >= 0) return;
  release_behind_window(sequence);
  reserve_again(sequence);
}

}  // namespace kvpager
