#include "pager/sequences.h"

#include <algorithm>
#include <set>
#include <utility>
#include <vector>

#include "core/chunk_namer.h"
#include "core/unique_number.h"
#include "kvpager/error.h"
#include "kvpager/require.h"
#include "pager/lease.h"
#include "pager/readers.h"

namespace kvpager {

Sequences::Sequences(const PagerParts& parts, Residency& residency)
    : PagerParts(parts), residency_(residency) {}

Sequence& Sequences::find(SequenceId id) {
  const auto found = sequences_.find(id.value());
  if (found == sequences_.end() || found->second.frozen) {
    throw InvalidArgumentError(str("sequence ", id.value(), " does not exist or is closed"));
  }
  return found->second;
}

const Sequence& Sequences::frozen(SequenceId id) const {
  const auto found = sequences_.find(id.value());
  KVPAGER_REQUIRE(found != sequences_.end() && found->second.frozen);
  return found->second;
}

const Sequence* Sequences::lookup(SequenceId id) const {
  const auto found = sequences_.find(id.value());
  return found == sequences_.end() ? nullptr : &found->second;
}

void Sequences::require_idle(const Sequence& sequence, const char* action) const {
  if (sequence.part >= 0) {
    throw InvalidArgumentError(str("cannot ", action, " sequence ", sequence.id.value(),
                                   " while it is in a running forward"));
  }
}

Sequence& Sequences::create(const std::string& salt) {
  Sequence sequence(ChunkNamer(options_.namespace_key, salt));
  sequence.salt = salt;
  return add(std::move(sequence));
}

Sequence& Sequences::add(Sequence sequence) {
  const SequenceId id(unique_number());
  sequence.id = id;
  return sequences_.emplace(id.value(), std::move(sequence)).first->second;
}

void Sequences::drop_use_pins(ChunkUse& use) {
  if (use.pins > 0) ledger_.pin(use.record, -use.pins);
  use.pins = 0;
}

void Sequences::close(SequenceId id, bool forget) {
  Sequence& sequence = find(id);
  require_idle(sequence, "close");
  const std::vector<RecordId> cached = forget ? cached_after(sequence) : std::vector<RecordId>();
  // Nothing below fails.
  erase(sequence, forget);
  for (auto it = cached.rbegin(); it != cached.rend(); ++it) residency_.forget(*it);
}

// Cached chunks that were computed after chunks which this sequence alone uses: of forks that are closed.
// Those before come first.
std::vector<RecordId> Sequences::cached_after(const Sequence& sequence) const {
  std::set<decltype(ChunkName::words)> names;
  for (const ChunkUse& use : sequence.sealed) {
    const ChunkRecord& record = ledger_[use.record];
    if (record.references == 1) names.insert(record.name.words);
  }
  std::vector<RecordId> cached;
  for (RecordId id = ledger_.oldest_cached().value_or(RecordId()); id.value() >= 0;
       id = ledger_[id].newer)
    cached.push_back(id);
  std::sort(cached.begin(), cached.end(),
            [&](RecordId a, RecordId b) { return ledger_[a].index < ledger_[b].index; });
  std::vector<RecordId> after;
  for (const RecordId id : cached) {
    const ChunkRecord& record = ledger_[id];
    if (names.count(record.previous.words) == 0) continue;
    names.insert(record.name.words);
    after.push_back(id);
  }
  return after;
}

void Sequences::drop(SequenceId id) {
  const auto found = sequences_.find(id.value());
  if (found == sequences_.end() || found->second.frozen) return;
  if (found->second.part >= 0) {
    found->second.dropped = true;
  } else {
    erase(found->second);
  }
}

void Sequences::erase(Sequence& sequence, bool forget) noexcept {
  KVPAGER_REQUIRE(sequence.part < 0);
  const SequenceId id = sequence.id;
  release_from(sequence, sequence.released, forget);
  set_reserved(sequence, 0);
  for (auto it = pins_.begin(); it != pins_.end();) {
    it = it->second.sequence == id ? pins_.erase(it) : std::next(it);
  }
  sequences_.erase(id.value());
  residency_.invalidate_eviction();
}

void Sequences::thaw(SequenceId id) noexcept {
  const auto found = sequences_.find(id.value());
  KVPAGER_REQUIRE(found != sequences_.end() && found->second.frozen);
  erase(found->second);
}

// Gives up the records of the last chunks, from `chunk` on; the caller forgets the uses.
void Sequences::release_from(Sequence& sequence, int64_t chunk, bool forget) {
  for (int64_t c = sequence.chunks(); c-- > chunk;) {
    drop_use_pins(sequence.use(c));
    const RecordId id = sequence.use(c).record;
    if (forget) {
      residency_.release_and_forget(id);
    } else {
      residency_.release(id);
    }
  }
}

SequenceId Sequences::fork(SequenceId id) {
  Sequence& parent = find(id);
  require_idle(parent, "fork");
  // What the two share comes free only when both have released it: the parent's reservation grows.
  const int64_t more = parent.target / layout_.chunk_tokens - parent.sealed_chunks();
  const int64_t wanted = homes_to_reserve(std::max<int64_t>(0, more), 0);
  const int64_t shared = options_.window == 0 ? 0 : std::max<int64_t>(0, wanted - parent.reserved);
  const HomesAside homes(residency_.budget(), shared, "fork");
  const auto open = static_cast<int64_t>(parent.frontier.size());
  BlockLease copies(residency_, open, "fork");
  Sequence child(parent.namer);
  child.salt = parent.salt;
  child.provenance = parent.provenance;
  child.summaries_loaded = parent.summaries_loaded;
  child.released = parent.released;
  child.released_worth = parent.released_worth;
  child.base = parent.base;
  child.length = parent.length;
  child.tokens = parent.tokens;
  child.sealed.reserve(parent.sealed.size());
  for (const ChunkUse& use : parent.sealed) {
    child.sealed.push_back({use.record, use.qk_score, 0, use.last_use, 0});
  }
  for (int64_t i = 0; i < open; ++i) {
    backend_.load(ledger_[parent.frontier[static_cast<size_t>(i)].record], copies[i]);
  }
  child.frontier.reserve(parent.frontier.size());
  ledger_.expect(open);
  Sequence& kept = add(std::move(child));
  // Nothing below fails.
  for (const ChunkUse& use : kept.sealed) residency_.add_reference(use.record);
  for (const ChunkUse& use : parent.frontier) {
    const int64_t index = ledger_[use.record].index;
    kept.frontier.push_back({residency_.create_open(index, copies.release()), 0, 0, 0, 0});
  }
  set_reserved(parent, parent.reserved + shared);
  residency_.invalidate_eviction();
  return kept.id;
}

// Sealed bytes never change (invariant 4): where a trim keeps a part of a sealed chunk, these rows are
// copied into an open one.
std::optional<RecordId> Sequences::copy_tail(Sequence& sequence, int64_t chunk) {
  const RecordId source = sequence.use(chunk).record;
  Readers reading(ledger_);
  try {
    reading.add(source);
    sequence.frontier.reserve(1);
    if (!residency_.can_allocate_blocks(1) && !sequence.frontier.empty() &&
        !ledger_[sequence.frontier.back().record].paged_out && ledger_[source].in_memory()) {
      // The trim gives up the open tail, and its block is enough. Nothing is read that could fail.
      ledger_.expect(1);
      ChunkRecord& open = ledger_[sequence.frontier.back().record];
      const BlockId block = open.block;
      backend_.load(ledger_[source], block);
      open.block = BlockId();
      return residency_.create_open(chunk, block);
    }
    BlockLease block(residency_, 1, "trim");
    backend_.load(ledger_[source], block[0]);
    ledger_.expect(1);
    return residency_.create_open(chunk, block.release());
  } catch (...) {
    residency_.invalidate_eviction();
    throw;
  }
}

void Sequences::trim(SequenceId id, int64_t position) {
  Sequence& sequence = find(id);
  require_idle(sequence, "trim");
  if (position < 0 || position > sequence.length) {
    throw InvalidArgumentError(str("trim position: ", position, " is not in [0, ", sequence.length,
                                   "], the positions this sequence holds"));
  }
  if (position == sequence.length) return;
  if (position > 0 && position < earliest_trim(sequence)) {
    throw InvalidArgumentError(
        str("trim position: ", position, " of sequence ", id.value(), ", whose positions [0, ",
            sequence.released * layout_.chunk_tokens, ") were let go behind the window of ",
            options_.window, " tokens (rewind=", options_.rewind, "); expected 0 or ",
            earliest_trim(sequence), " to ", sequence.length));
  }
  const int64_t c = layout_.chunk_tokens;
  const int64_t kept = position / c;       // chunks that stay sealed
  const bool partial = position % c != 0;  // chunk `kept` stays in part
  std::optional<RecordId> tail;
  if (partial && kept < sequence.sealed_chunks()) tail = copy_tail(sequence, kept);
  // Nothing below fails.
  const int32_t tail_pins = partial ? sequence.use(kept).pins : 0;
  Provenance worst = partial && !tail ? sequence.provenance : Provenance::kExact;
  if (position > 0) worst = std::max(worst, sequence.released_provenance());
  const int64_t sealed = std::min(kept + (tail ? 1 : 0), sequence.sealed_chunks());
  for (int64_t chunk = sequence.released; chunk < sealed; ++chunk) {
    worst = std::max(worst, ledger_[sequence.use(chunk).record].provenance);
  }
  release_from(sequence, std::max(partial && !tail ? kept + 1 : kept, sequence.released));
  if (kept < sequence.sealed_chunks()) {
    sequence.sealed.resize(static_cast<size_t>(std::max<int64_t>(0, kept - sequence.released)));
    sequence.frontier.clear();
  } else {
    sequence.frontier.resize(partial ? 1 : 0);
  }
  if (tail) {
    sequence.frontier.push_back({*tail, 0, tail_pins, 0, 0});
    ledger_.pin(*tail, tail_pins);
  }
  if (position == 0) {
    sequence.released = 0;
    sequence.released_worth = {};
    sequence.base = ChunkName();
  }
  for (auto& [pin_id, range] : pins_) {
    if (range.sequence == id) range.end = std::min(range.end, sequence.chunks());
  }
  sequence.length = position;
  sequence.tokens.resize(static_cast<size_t>(position));
  sequence.provenance = worst;
  residency_.invalidate_eviction();
}

void Sequences::load_summaries(Sequence& sequence) {
  if (sequence.summaries_loaded) return;
  std::vector<RecordId> ids;
  for (const ChunkUse& use : sequence.sealed) ids.push_back(use.record);
  residency_.load_summaries(ids);
  sequence.summaries_loaded = true;
}

std::vector<uint8_t> Sequences::sheltered() const {
  std::vector<uint8_t> records;
  const auto mark = [&](const ChunkUse& use) {
    const size_t i = static_cast<size_t>(use.record.value());
    if (i >= records.size()) records.resize(i + 1, 0);
    records[i] = 1;
  };
  const int64_t c = layout_.chunk_tokens;
  const int64_t sinks = (options_.selection.sinks + c - 1) / c;
  const int64_t recent = (options_.selection.recent + c - 1) / c;
  for (const auto& [id, sequence] : sequences_) {
    if (sequence.frozen) continue;
    const int64_t count = sequence.sealed_chunks();
    for (int64_t i = sequence.released; i < std::min(sinks, count); ++i) mark(sequence.use(i));
    for (int64_t i = std::max(sequence.released, count - recent); i < count; ++i) {
      mark(sequence.use(i));
    }
  }
  return records;
}

void Sequences::add_to(PagerStats* stats) const {
  for (const auto& [id, sequence] : sequences_) stats->sequences += sequence.frozen ? 0 : 1;
}

}  // namespace kvpager
