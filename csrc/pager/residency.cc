// Where bytes live: blocks, homes, victims, recalls. Nothing here can change a result.
#include <algorithm>
#include <limits>
#include <utility>

#include "kvpager/error.h"
#include "kvpager/require.h"
#include "pager/impl.h"
#include "pager/room.h"

namespace kvpager {

namespace {

// What so many chunks take, as messages say it.
std::string bytes_of(int64_t chunks, int64_t each) {
  constexpr int64_t kMost = std::numeric_limits<int64_t>::max();
  if (chunks > kMost / each) return str("more than ", kMost, " bytes");
  return str(chunks * each, " bytes");
}

// The sum of two counts, or the largest there is.
int64_t total_of(int64_t a, int64_t b) {
  constexpr int64_t kMost = std::numeric_limits<int64_t>::max();
  return a > kMost - b ? kMost : a + b;
}

}  // namespace

// Invariant 2. Homes of referenced chunks and homes promised to coming ones never exceed what there
// is; cached chunks nobody references give theirs up when asked.
void Pager::Impl::require_homes(int64_t more, const char* action) const {
  const int64_t committed = referenced_homes + reserved_homes;
  const int64_t all = total_of(committed, more);
  if (all > config.home_capacity()) {
    const std::string bytes = bytes_of(all, layout.chunk_bytes());
    const bool lower = host_slots.slots() + disk_slots.slots() > 0;
    throw CapacityError(
        str(action, ": ", more, " more chunks need ", bytes_of(more, layout.chunk_bytes()),
            "; with the ", committed, " chunks already promised that is ", bytes,
            ", and there is room for ", config.home_capacity() * layout.chunk_bytes(),
            " (host_bytes=", options.host_bytes, ", disk_bytes=", options.disk_bytes, "). ",
            lower ? "Raise host_bytes" : "Give a host_bytes", " to at least ", bytes,
            ", or configure disk_path and disk_bytes, or close sessions."));
  }
  const int64_t summaries_used = committed + restored_records;
  const int64_t summaries = total_of(summaries_used, more);
  if (summaries > summary_slots.slots()) {
    throw CapacityError(str(action, ": summaries of ", summaries, " chunks need ",
                            bytes_of(summaries, config.summary_slot_bytes),
                            "; summary_bytes=", summary_slots.slots() * config.summary_slot_bytes,
                            ". Raise summary_bytes or close sessions."));
  }
}

// Invariant 3 (pins) and 5 (readers) are the first two conditions; the last keeps the only copy of
// a chunk.
bool Pager::Impl::evictable(const ChunkRecord& record) const {
  return record.state == ChunkState::kSealed && record.resident() && record.pins == 0 &&
         record.readers == 0 && record.has_lower_copy();
}

// Whether some chunk may have a copy below the pool, so that its block can be had without forgetting
// it.
bool Pager::Impl::lower_copies() const {
  return host_slots.slots() + disk_slots.slots() > 0 || restored_records > 0;
}

// Whether acquire_block() can be had `count` times: free ones, those of evictable chunks, and where
// blocks are homes those of cached chunks, which nobody uses.
bool Pager::Impl::blocks_to_be_had(int64_t count) const {
  int64_t more = count - blocks.free() - (config.blocks_are_homes() ? ledger.cached() : 0);
  if (more <= 0) return true;
  if (!lower_copies()) return false;
  note_victims();
  return victims
      .first([&](const VictimFacts& note) {
        mutex.held();
        if (!evictable(ledger[note.record]) || !(facts(note.record) == note)) return Verdict::kGone;
        return --more == 0 ? Verdict::kLeaves : Verdict::kStays;
      })
      .has_value();
}

void Pager::Impl::require_blocks(int64_t count, const char* action) const {
  if (blocks_to_be_had(count)) return;
  int64_t available = blocks.free();
  int64_t open = 0;
  int64_t pinned = 0;
  ledger.each([&](RecordId, const ChunkRecord& record) {
    available += evictable(record) || (record.cached && record.resident()) ? 1 : 0;
    open += record.state == ChunkState::kOpen ? 1 : 0;
    pinned += record.pins > 0 && record.resident() ? 1 : 0;
  });
  throw CapacityError(str(action, ": needs ", count, " blocks of the pool, ", available,
                          " can be had (pool ", options.pool_blocks, " blocks, ", open,
                          " hold unsealed tails, ", pinned,
                          " are pinned). Raise pool_tokens, release pins or close sessions."));
}

// Sinks and the recent window of any sequence are needed by the next row for certain.
std::vector<uint8_t> Pager::Impl::sheltered_records() const {
  std::vector<uint8_t> records;
  const auto mark = [&](const ChunkUse& use) {
    const size_t i = static_cast<size_t>(use.record.value());
    if (i >= records.size()) records.resize(i + 1, 0);
    records[i] = 1;
  };
  const int64_t c = layout.chunk_tokens;
  const int64_t sinks = (options.selection.sinks + c - 1) / c;
  const int64_t recent = (options.selection.recent + c - 1) / c;
  for (const auto& [id, sequence] : sequences) {
    if (sequence.frozen) continue;
    const int64_t count = sequence.sealed_chunks();
    for (int64_t i = sequence.released; i < std::min(sinks, count); ++i) mark(sequence.use(i));
    for (int64_t i = std::max(sequence.released, count - recent); i < count; ++i) {
      mark(sequence.use(i));
    }
  }
  return records;
}

VictimFacts Pager::Impl::facts(RecordId id) const {
  const ChunkRecord& record = ledger[id];
  const size_t i = static_cast<size_t>(id.value());
  return {id, i < sheltered.size() && sheltered[i] != 0, record.score, record.last_use};
}

// What decides among copies.
VictimFacts Pager::Impl::use_alone(RecordId id) const {
  return {id, false, 0, ledger[id].last_use};
}

// Scores, uses or what is sheltered have changed, or many chunks may leave that could not.
void Pager::Impl::forget_orders() {
  victims.forget();
  spills.forget();
  host_copies.forget();
}

// The chunk has got a block, or lost the last that kept it there.
void Pager::Impl::may_leave(RecordId id) {
  if (!victims.stale() && evictable(ledger[id])) victims.add(facts(id));
}

namespace {

// Notes everybody of whom may_leave(record) holds, as facts_of(id) has them.
template <class MayLeave, class FactsOf>
void note_all(const Ledger& ledger, LeaveOrder* order, const MayLeave& may_leave,
              const FactsOf& facts_of) {
  std::vector<VictimFacts> notes;
  ledger.each([&](RecordId id, const ChunkRecord& record) {
    if (may_leave(record)) notes.push_back(facts_of(id));
  });
  order->fill(std::move(notes));
}

}  // namespace

// Every chunk that may leave the pool is noted, and what is sheltered is what it was noted by.
void Pager::Impl::note_victims() const {
  if (!victims.stale()) return;
  sheltered = sheltered_records();
  spills.forget();  // noted by what was sheltered before
  note_all(
      ledger, &victims, [&](const ChunkRecord& record) { return evictable(record); },
      [&](RecordId id) {
        mutex.held();
        return facts(id);
      });
}

// A chunk whose home has not arrived yet would have to be waited for: it leaves after all others, and
// among its like the one that arrives first.
std::optional<VictimFacts> Pager::Impl::next_victim() const {
  if (!lower_copies()) return std::nullopt;
  note_victims();
  std::optional<VictimFacts> soonest;
  uint64_t soonest_arrives = 0;
  const auto found = victims.first([&](const VictimFacts& note) {
    mutex.held();
    const ChunkRecord& record = ledger[note.record];
    if (!evictable(record) || !(facts(note.record) == note)) return Verdict::kGone;
    const uint64_t arrives = backend->arriving(record);
    if (arrives == 0) return Verdict::kLeaves;
    if (!soonest || arrives < soonest_arrives) {  // notes come in the policy's order
      soonest = note;
      soonest_arrives = arrives;
    }
    return Verdict::kStays;
  });
  return found ? found : soonest;
}

std::optional<BlockId> Pager::Impl::acquire_block() {
  if (const auto block = blocks.take()) return block;
  if (const auto victim = next_victim()) {
    evict(victim->record);
    return blocks.take();
  }
  // What nobody uses is forgotten where that gives a block. Elsewhere a cached chunk's block can be
  // had without that, or it has none.
  if (!config.blocks_are_homes() || !reclaim_cached()) return std::nullopt;
  return blocks.take();
}

// Invariant 4: a clean chunk has a copy below, so that leaving the pool moves no bytes. One that is
// still on its way is waited for.
void Pager::Impl::evict(RecordId id) {
  ChunkRecord& record = ledger[id];
  KVPAGER_REQUIRE(evictable(record));
  backend->wait_for_home(record);
  free_block(record.block);
  record.block = BlockId();
  ++counters.chunks_evicted;
}

void Pager::Impl::free_block(BlockId block) {
  blocks.give_back(block);
  backend->freed(block);
}

void Pager::Impl::free_host_slot(SlotId slot) {
  host_slots.give_back(slot);
  backend->freed(slot);
}

void Pager::Impl::drop_record(RecordId id) {
  ChunkRecord& record = ledger[id];
  if (record.resident()) free_block(std::exchange(record.block, BlockId()));
  if (record.on_host()) free_host_slot(std::exchange(record.host, SlotId()));
  if (record.on_disk()) disk_slots.give_back(std::exchange(record.disk, SlotId()));
  if (record.summary.value() >= 0) {
    summary_slots.give_back(std::exchange(record.summary, SlotId()));
  }
  if (record.source != nullptr) --restored_records;
  ledger.drop(id);
}

// Forgets the chunk that no sequence has referenced for longest.
bool Pager::Impl::reclaim_cached() {
  const auto oldest = ledger.oldest_cached();
  if (!oldest) return false;
  drop_record(*oldest);
  ++counters.chunks_forgotten;
  return true;
}

SlotId Pager::Impl::take_summary_slot() {
  do {
    if (const auto slot = summary_slots.take()) return *slot;
  } while (reclaim_cached());
  throw CapacityError(str("no summary slot is free: summary_bytes=",
                          summary_slots.slots() * config.summary_slot_bytes, " is full"));
}

Home Pager::Impl::take_home() {
  if (config.blocks_are_homes()) return {};
  for (;;) {
    if (const auto slot = host_slots.take()) return {*slot, SlotId()};
    if (drop_host_copy()) continue;
    if (disk_slots.free() > 0 && spill_one()) continue;
    if (const auto slot = disk_slots.take()) return {SlotId(), *slot};
    if (!reclaim_cached()) {
      throw CapacityError("no home is free for a sealed chunk, though one was reserved");
    }
  }
}

void Pager::Impl::give_back(const Home& home) {
  if (home.host.value() >= 0) free_host_slot(home.host);
  if (home.disk.value() >= 0) disk_slots.give_back(home.disk);
}

namespace {

bool host_read(const ChunkRecord& record, HostReaders readers) {
  return record.readers > 0 && !(readers == HostReaders::kOfBlocks && record.resident());
}

}  // namespace

// The host chunk that residency values least; none if all are in use.
std::optional<RecordId> Pager::Impl::next_to_spill(HostReaders readers) const {
  note_victims();  // by what is sheltered now
  if (spills.stale()) {
    note_all(
        ledger, &spills, [](const ChunkRecord& record) { return record.home_on_host(); },
        [&](RecordId id) {
          mutex.held();
          return facts(id);
        });
  }
  const auto found = spills.first([&](const VictimFacts& note) {
    mutex.held();
    const ChunkRecord& record = ledger[note.record];
    if (!record.home_on_host() || !(facts(note.record) == note)) return Verdict::kGone;
    const bool in_use = record.borrows > 0 || host_read(record, readers);
    return in_use ? Verdict::kStays : Verdict::kLeaves;
  });
  return found ? std::optional(found->record) : std::nullopt;
}

// Moves it to disk; false if there is none. REQUIRES: a free disk slot.
bool Pager::Impl::spill_one(HostReaders readers) {
  KVPAGER_REQUIRE(disk_slots.free() > 0);
  const auto victim = next_to_spill(readers);
  if (!victim) return false;
  ChunkRecord& record = ledger[*victim];
  const SlotId slot = *disk_slots.take();
  try {
    checksums(*victim);  // what comes back is compared with them
    files.write_slot(slot, backend->home(record));
  } catch (...) {
    disk_slots.give_back(slot);
    throw;
  }
  free_host_slot(record.host);
  record.host = SlotId();
  record.disk = slot;
  ++counters.chunks_spilled;
  counters.bytes_paged_out += layout.chunk_bytes();
  return true;
}

// The host copy that nobody has used for longest; none if all are in use.
std::optional<RecordId> Pager::Impl::next_host_copy(HostReaders readers) const {
  if (host_copies.stale()) {
    note_all(
        ledger, &host_copies, [](const ChunkRecord& record) { return record.host_copy(); },
        [&](RecordId id) {
          mutex.held();
          return use_alone(id);
        });
  }
  const auto found = host_copies.first([&](const VictimFacts& note) {
    mutex.held();
    const ChunkRecord& record = ledger[note.record];
    if (!record.host_copy() || !(use_alone(note.record) == note)) return Verdict::kGone;
    return host_read(record, readers) ? Verdict::kStays : Verdict::kLeaves;
  });
  return found ? std::optional(found->record) : std::nullopt;
}

// Host slots nobody needs as homes hold copies of what is below, so that a file is read once. They
// cost nothing to drop.
bool Pager::Impl::drop_host_copy(HostReaders readers) {
  const auto copy = next_host_copy(readers);
  if (!copy) return false;
  free_host_slot(ledger[*copy].host);
  ledger[*copy].host = SlotId();
  return true;
}

// After a forward: what its rows selected is what the next ones are likely to select. Brings the
// best of it back, a few chunks at a time, where that beats what is resident.
void Pager::Impl::recall_ahead() {
  if (options.recall_chunks == 0) return;
  const ScopedTimer timer(&counters.seconds_recall);
  std::vector<RecordId> missed;
  for (const ForwardPart& part : forward->parts) {
    if (std::find(part.read.begin(), part.read.end(), 1) == part.read.end()) continue;
    for (int64_t c = part.sequence->released;
         c < std::min<int64_t>(part.visible, part.sequence->sealed_chunks()); ++c) {
      const RecordId id = part.sequence->use(c).record;
      if (part.read[static_cast<size_t>(c)] && !ledger[id].resident()) missed.push_back(id);
    }
  }
  if (missed.empty()) return;
  note_victims();  // what is sheltered is a fact too
  std::vector<VictimFacts> wanted;
  for (const RecordId id : missed) wanted.push_back(facts(id));
  const size_t count = std::min(wanted.size(), static_cast<size_t>(options.recall_chunks));
  std::partial_sort(wanted.begin(), wanted.begin() + static_cast<int64_t>(count), wanted.end(),
                    [&](const VictimFacts& a, const VictimFacts& b) {
                      return leaves_before(options.policy, b, a);
                    });
  for (size_t i = 0; i < count; ++i) {
    if (ledger[wanted[i].record].resident()) continue;  // shared by two sequences of this forward
    if (blocks.free() == 0) {
      const auto victim = next_victim();
      if (!victim || !worth_recalling(options.policy, options.hysteresis, wanted[i], *victim) ||
          backend->arriving(ledger[victim->record]) > 0) {
        return;
      }
    }
    try {
      RoomLease(*this, {wanted[i].record}, HostRoom::kNone, Lacking::kRefuse, "recall")
          .bring_up(Reading::kInTurn);
    } catch (const PagerError&) {
      return;  // only ahead of need: whoever needs the chunk will meet the error
    }
  }
}

int64_t Pager::Impl::evict_all() {
  std::vector<RecordId> victims;
  ledger.each([&](RecordId id, const ChunkRecord& record) {
    if (evictable(record)) victims.push_back(id);
  });
  for (const RecordId id : victims) evict(id);
  return static_cast<int64_t>(victims.size());
}

}  // namespace kvpager
