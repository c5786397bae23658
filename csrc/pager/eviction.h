// Which chunk gives way next: from a block of the pool, sealed or open, from a home in the host arena (to disk), or a
// mere copy in the host arena.
//
// The orders are kept as notes that go out of date (core/eviction_order.h): a question looks at what has
// become of the first ones. A chunk that may give way from now on has to be noted, or everything
// invalidated; nothing has to be done for a chunk that may not any more.
//
// Used under the pager's lock.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

#include "core/eviction_order.h"
#include "core/ledger.h"
#include "core/policy.h"
#include "pager/backend.h"
#include "pager/config.h"

namespace kvpager {

// Whether a chunk can leave the pool. Invariants 3 (pins) and 5 (readers) are the first two conditions;
// the last one keeps the only copy of a chunk.
bool evictable(const ChunkRecord& record);

// Which readers of a chunk read its slot of the host arena: all of them may, or only those of a chunk
// that is not in the pool.
enum class HostReaders : uint8_t { kAll, kOfMissing };

class Eviction {
 public:
  // [records] whether a chunk is a sink or in the recent window of some sequence, so that the next row
  // reads it for certain; records beyond its end are not.
  using Sheltered = std::function<std::vector<uint8_t>()>;

  Eviction(const Config& config, const Ledger& ledger, Backend& backend, Sheltered sheltered);

  // Scores, uses or what is sheltered have changed, or many chunks can give way that could not.
  void invalidate();
  // The chunk has got a block or a copy in the host arena, or lost the last pin that kept it there.
  void note(RecordId id);

  // The chunk that leaves the pool next. One whose home has not arrived yet would have to be waited for:
  // it leaves after all others, and among its like the one that arrives first.
  std::optional<VictimFacts> next_victim();
  // How many chunks can leave the pool, counted up to `most`.
  int64_t victims(int64_t most);
  // The open chunk that was used longest ago and whose sequence is idle; none if there is none.
  std::optional<RecordId> next_tail();
  // How many of them there are, counted up to `most`.
  int64_t tails(int64_t most);
  // The host chunk that goes to disk next; none if all are in use.
  std::optional<RecordId> next_to_spill(HostReaders readers);
  // The host copy that was used longest ago; none if all are in use.
  std::optional<RecordId> next_host_copy(HostReaders readers);

  // The `count` of these chunks, which are not in the pool, that the policy values most, best first.
  std::vector<VictimFacts> most_valued(const std::vector<RecordId>& ids, int64_t count);

  // How often an order was made of all records.
  int64_t orders_made() const { return orders_made_; }

  // What can give way is noted as it is, so that the first one noted is the one that the policy names.
  void check_invariants() const;

 private:
  VictimFacts facts(RecordId id) const;
  VictimFacts use_alone(RecordId id) const;  // what decides among copies
  void refresh_victims();
  void refresh_tails();
  Verdict judge_tail(const VictimFacts& note) const;
  // How many notes `judge` lets go, up to `most`.
  template <class Judge>
  static int64_t count(EvictionOrder* order, int64_t most, const Judge& judge);

  const Config& config_;
  const Ledger& ledger_;
  Backend& backend_;
  const Sheltered sheltered_now_;

  EvictionOrder victims_;
  EvictionOrder tails_;
  EvictionOrder spills_;
  EvictionOrder host_copies_;
  int64_t orders_made_ = 0;
  std::vector<uint8_t> sheltered_;  // by which the first two orders were noted
};

}  // namespace kvpager
