// Sequences: creation, sharing, trimming, admission, pins.
#include <algorithm>
#include <utility>

#include "core/chunk_namer.h"
#include "core/unique_number.h"
#include "kvpager/error.h"
#include "kvpager/require.h"
#include "pager/impl.h"
#include "pager/room.h"

namespace kvpager {

Sequence& Pager::Impl::find(SequenceId id) {
  const auto found = sequences.find(id.value());
  if (found == sequences.end() || found->second.frozen) {
    throw InvalidArgumentError(str("sequence ", id.value(), " does not exist or is closed"));
  }
  return found->second;
}

const Sequence& Pager::Impl::find(SequenceId id) const { return const_cast<Impl*>(this)->find(id); }

void Pager::Impl::require_idle(const Sequence& sequence, const char* action) const {
  if (sequence.part >= 0) {
    throw InvalidArgumentError(str("cannot ", action, " sequence ", sequence.id.value(),
                                   " while it is in a running forward"));
  }
}

Sequence& Pager::Impl::create_sequence(const std::string& salt) {
  Sequence sequence(ChunkNamer(options.namespace_key, salt));
  sequence.salt = salt;
  return keep(std::move(sequence));
}

// Gives it a number and a place, or throws bad_alloc. It may name records: who calls this counts their
// references when nothing can fail any more.
Sequence& Pager::Impl::keep(Sequence sequence) {
  const SequenceId id(unique_number());
  sequence.id = id;
  return sequences.emplace(id.value(), std::move(sequence)).first->second;
}

void Pager::Impl::add_reference(RecordId id) {
  ChunkRecord& record = ledger[id];
  if (record.references++ > 0) return;
  if (record.needs_home()) ++referenced_homes;
  if (record.cached) ledger.uncache(id);
}

void Pager::Impl::release(RecordId id) {
  ChunkRecord& record = ledger[id];
  if (--record.references > 0) return;
  if (record.needs_home()) --referenced_homes;
  // Kept for prefix reuse: exact, findable, and with a home of its own.
  if (record.needs_home() && ledger.published(id)) {
    record.score = 0;  // a sequence that is gone steers nobody's eviction
    record.last_use = clock;
    forget_orders();
    // Whoever lets a chain go begins at its end; what is forgotten first was let go first, so that
    // a child never stays behind without its parent, where nobody could find it. Behind a window
    // the first ones go first: nobody needs them to find the others.
    ledger.cache(id);
    return;
  }
  drop_record(id);
}

void Pager::Impl::drop_use_pins(ChunkUse& use) {
  if (use.pins > 0) ledger.pin(use.record, -use.pins);
  use.pins = 0;
}

void Pager::Impl::destroy_sequence(SequenceId id) {
  Sequence& sequence = find(id);
  require_idle(sequence, "close");
  end(sequence);
}

// REQUIRES: it is in no running forward.
void Pager::Impl::end(Sequence& sequence) noexcept {
  KVPAGER_REQUIRE(sequence.part < 0);
  const SequenceId id = sequence.id;
  for (int64_t c = sequence.chunks(); c-- > sequence.released;) {
    drop_use_pins(sequence.use(c));
    release(sequence.use(c).record);
  }
  reserved_homes -= sequence.reserved;
  for (auto it = pins.begin(); it != pins.end();) {
    it = it->second.sequence == id ? pins.erase(it) : std::next(it);
  }
  sequences.erase(id.value());
  forget_orders();
}

// A sequence of the running forward stays until that has ended.
void Pager::Impl::drop_sequence(SequenceId id) {
  const auto found = sequences.find(id.value());
  if (found == sequences.end() || found->second.frozen) return;
  if (found->second.part >= 0) {
    found->second.dropped = true;
  } else {
    end(found->second);
  }
}

void Pager::Impl::destroy_dropped(const Forward& ended) {
  for (const ForwardPart& part : ended.parts) {
    if (part.sequence->dropped) end(*part.sequence);
  }
}

SequenceId Pager::Impl::fork(SequenceId id) {
  Sequence& parent = find(id);
  require_idle(parent, "fork");
  // What the two share comes free only when both have let go of it: the parent was promised more.
  const int64_t more = parent.target / layout.chunk_tokens - parent.sealed_chunks();
  const int64_t promised = homes_to_promise(std::max<int64_t>(0, more), 0);
  const int64_t shared = options.window == 0 ? 0 : std::max<int64_t>(0, promised - parent.reserved);
  if (shared > 0) require_homes(shared, "fork");
  const auto open = static_cast<int64_t>(parent.frontier.size());
  BlockLease copies(*this, open, "fork");
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
    backend->load(ledger[parent.frontier[static_cast<size_t>(i)].record], copies[i]);
  }
  child.frontier.reserve(parent.frontier.size());
  ledger.expect(open);
  Sequence& kept = keep(std::move(child));
  // Nothing below fails.
  for (const ChunkUse& use : kept.sealed) add_reference(use.record);
  for (const ChunkUse& use : parent.frontier) {
    const RecordId copy = ledger.create(ChunkState::kOpen);
    ChunkRecord& record = ledger[copy];
    record.references = 1;
    record.index = ledger[use.record].index;
    record.block = copies.release();
    kept.frontier.push_back({copy, 0, 0, 0, 0});
  }
  parent.reserved += shared;
  reserved_homes += shared;
  forget_orders();
  return kept.id;
}

// Sealed bytes never change (invariant 4): when p falls inside a sealed chunk, its kept rows are
// copied into a private frontier chunk first, which is all that can fail.
void Pager::Impl::trim(SequenceId id, int64_t position) {
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
            sequence.released * layout.chunk_tokens, ") were let go behind the window of ",
            options.window, " tokens (rewind=", options.rewind, "); expected 0 or ",
            earliest_trim(sequence), " to ", sequence.length));
  }
  const int64_t c = layout.chunk_tokens;
  const int64_t kept = position / c;       // chunks that stay sealed
  const bool partial = position % c != 0;  // chunk `kept` stays in part
  std::optional<RecordId> tail;
  if (partial && kept < sequence.sealed_chunks()) {
    const RecordId source = sequence.use(kept).record;
    Readers reading(ledger);
    try {
      reading.add(source);
      sequence.frontier.reserve(1);
      BlockLease block(*this, 1, "trim");
      backend->load(ledger[source], block[0]);
      tail = ledger.create(ChunkState::kOpen);
      ledger[*tail].block = block.release();
    } catch (...) {
      forget_orders();
      throw;
    }
    ledger[*tail].references = 1;
    ledger[*tail].index = kept;
  }
  const int32_t tail_pins = partial ? sequence.use(kept).pins : 0;
  Provenance worst = partial && !tail ? sequence.provenance : Provenance::kExact;
  if (position > 0) worst = std::max(worst, sequence.released_provenance());
  for (int64_t chunk = sequence.released;
       chunk < std::min(kept + (tail ? 1 : 0), sequence.sealed_chunks()); ++chunk) {
    worst = std::max(worst, ledger[sequence.use(chunk).record].provenance);
  }
  const int64_t first_gone = std::max(partial && !tail ? kept + 1 : kept, sequence.released);
  for (int64_t chunk = sequence.chunks(); chunk-- > first_gone;) {
    drop_use_pins(sequence.use(chunk));
    release(sequence.use(chunk).record);
  }
  if (kept < sequence.sealed_chunks()) {
    sequence.sealed.resize(static_cast<size_t>(std::max<int64_t>(0, kept - sequence.released)));
    sequence.frontier.clear();
  } else {
    sequence.frontier.resize(partial ? 1 : 0);
  }
  if (tail) {
    sequence.frontier.push_back({*tail, 0, tail_pins, 0, 0});
    ledger.pin(*tail, tail_pins);
  }
  if (position == 0) {
    sequence.released = 0;
    sequence.released_worth = {};
    sequence.base = ChunkName();
  }
  for (auto& [pin_id, range] : pins) {
    if (range.sequence == id) range.end = std::min(range.end, sequence.chunks());
  }
  sequence.length = position;
  sequence.tokens.resize(static_cast<size_t>(position));
  sequence.provenance = worst;
  forget_orders();
}

// Whether a chunk that was found by its name, at its place in a text, may be shared there. `previous` is
// the record that the text has for the chunk before it, or none where there is none.
//
// Names find, and identity decides: the chunk must have been computed after that very record, and so on
// to the beginning, so that all token ids before it were compared. With a window the chunks before may be
// gone, in the text or in the ledger. There the name alone says what they were, which is sound as far as
// BLAKE2b has no collisions.
bool Pager::Impl::continues(RecordId found, int64_t chunk, RecordId previous) const {
  if (ledger[found].index != chunk) return false;
  if (chunk == 0 || previous.value() >= 0) {
    if (ledger.follows(found, previous)) return true;
    return chunk > 0 && options.window > 0 && ledger.orphaned(found);
  }
  return options.window > 0;
}

// With a window only the chunks that the next rows see have to be there.
int64_t Pager::Impl::adopt_prefix(SequenceId id, const std::vector<TokenId>& tokens) {
  Sequence& sequence = find(id);
  require_idle(sequence, "adopt a prefix for");
  if (sequence.length != 0) {
    throw InvalidArgumentError(str("adopt_prefix: sequence ", id.value(), " already holds ",
                                   sequence.length, " positions; only an empty one can adopt"));
  }
  const int64_t c = layout.chunk_tokens;
  struct Link {
    RecordId record;  // -1: none
    ChunkName name;
    int64_t run = 0;    // the first chunk from which on none is missing up to this one
    int64_t homes = 0;  // that chunks up to this one would take: see below
  };
  std::vector<Link> chain;
  chain.reserve(tokens.size() / static_cast<size_t>(c));
  ChunkName name;
  RecordId previous;
  int64_t run = 0;
  int64_t homes = 0;
  for (int64_t end = c; end <= static_cast<int64_t>(tokens.size()); end += c) {
    const TokenId* ids = tokens.data() + (end - c);
    name = sequence.namer.next(name, ids, c, Provenance::kExact);
    auto found = ledger.find(name, ids, c);
    if (found && !continues(*found, end / c - 1, previous)) found.reset();
    previous = found.value_or(RecordId());
    if (found && ledger[*found].damaged) found.reset();
    if (!found && options.window == 0) break;
    if (!found) {
      run = static_cast<int64_t>(chain.size()) + 1;
    } else if (ledger[*found].references == 0 && ledger[*found].needs_home()) {
      // A cached chunk that gains a reference can no longer be reclaimed for promises already made.
      // It uses up one of this sequence's own.
      ++homes;
    }
    chain.push_back({found.value_or(RecordId()), name, run, homes});
  }
  int64_t first = 0;
  auto last = static_cast<int64_t>(chain.size());
  const auto can_adopt = [&] {
    mutex.held();
    const Link& link = chain[static_cast<size_t>(last - 1)];
    if (link.record.value() < 0 || link.run > behind(last * c, 0)) return false;
    first = std::max(link.run, behind(last * c, options.rewind));
    const int64_t more = link.homes - (first > 0 ? chain[static_cast<size_t>(first - 1)].homes : 0);
    const int64_t own = std::min(sequence.reserved, last - first);
    const int64_t taken = referenced_homes + more + reserved_homes - own;
    return more == 0 ||
           (taken <= config.home_capacity() && taken + restored_records <= summary_slots.slots());
  };
  while (last > 0 && !can_adopt()) --last;
  if (last == 0) return 0;

  std::vector<ChunkUse> uses;
  uses.reserve(static_cast<size_t>(last - first));
  for (int64_t chunk = first; chunk < last; ++chunk) {
    uses.push_back({chain[static_cast<size_t>(chunk)].record, 0, 0, 0, 0});
  }
  const int64_t used_promises = std::min(sequence.reserved, last - first);
  const int64_t reused = last * c;
  sequence.tokens.assign(tokens.begin(), tokens.begin() + reused);
  sequence.sealed = std::move(uses);
  for (size_t i = 0; i < sequence.sealed.size(); ++i) {
    const RecordId record = sequence.sealed[i].record;
    add_reference(record);
    if (i > 0) ledger.adopt_orphan(record, sequence.sealed[i - 1].record);
    if (ledger[record].summary_pending) sequence.summaries_loaded = false;
  }
  sequence.released = first;
  sequence.released_worth = {first, 0, 0};
  sequence.base = first == 0 ? ChunkName() : chain[static_cast<size_t>(first - 1)].name;
  sequence.reserved -= used_promises;
  reserved_homes -= used_promises;
  sequence.length = reused;
  promise_again(sequence);
  counters.prefix_tokens_reused += reused;
  forget_orders();
  return reused;
}

PinId Pager::Impl::pin(SequenceId id, int64_t start, int64_t stop) {
  Sequence& sequence = find(id);
  if (start < 0 || stop <= start || stop > sequence.length) {
    throw InvalidArgumentError(str("pin range [", start, ", ", stop,
                                   "): expected 0 <= start < stop <= ", sequence.length,
                                   ", the positions this sequence holds"));
  }
  const int64_t c = layout.chunk_tokens;
  require_held(sequence, start, str("pin range [", start, ", ", stop, ")"));
  const PinRange range{id, start / c, (stop + c - 1) / c};
  std::vector<RecordId> fresh;
  for (int64_t chunk = range.begin; chunk < range.end; ++chunk) {
    const RecordId record = sequence.use(chunk).record;
    if (ledger[record].pins == 0) fresh.push_back(record);
  }
  // Invariant 3: a forward must still find blocks for its frontier.
  const int64_t free = options.pool_blocks - ledger.held() - config.frontier_blocks();
  if (static_cast<int64_t>(fresh.size()) > free) {
    int64_t pinned = 0;
    ledger.each([&](RecordId, const ChunkRecord& record) { pinned += record.pins > 0 ? 1 : 0; });
    const int64_t open = ledger.held() - pinned;
    throw CapacityError(str("pin [", start, ", ", stop, ") needs ", fresh.size(), " chunks; ",
                            std::max<int64_t>(0, free), " of the pool's ", options.pool_blocks,
                            " are free to pin (", pinned, " pinned, ", open, " hold tails, ",
                            config.frontier_blocks(), " kept for running forwards)"));
  }
  const auto add = [&](int32_t amount) {
    mutex.held();
    for (int64_t chunk = range.begin; chunk < range.end; ++chunk) {
      sequence.use(chunk).pins += amount;
      ledger.pin(sequence.use(chunk).record, amount);
    }
  };
  const PinId number(unique_number());
  add(1);
  try {
    std::vector<RecordId> missing;
    for (const RecordId record : fresh) {
      if (!ledger[record].resident()) missing.push_back(record);
    }
    RoomLease(*this, missing, HostRoom::kNone, Lacking::kRefuse, "pin").bring_up(Reading::kInTurn);
    pins[number.value()] = range;
  } catch (...) {
    add(-1);
    forget_orders();
    throw;
  }
  return number;
}

void Pager::Impl::unpin(PinId id) {
  const auto found = pins.find(id.value());
  if (found == pins.end()) return;  // its sequence was closed first
  const PinRange range = found->second;
  Sequence& sequence = find(range.sequence);
  for (int64_t chunk = range.begin; chunk < range.end; ++chunk) {
    --sequence.use(chunk).pins;
    ledger.pin(sequence.use(chunk).record, -1);
    may_leave(sequence.use(chunk).record);
  }
  pins.erase(found);
  if (sequence.part >= 0) return;
  let_go(sequence);
  promise_again(sequence);
}

}  // namespace kvpager
