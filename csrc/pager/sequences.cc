// Sequences: creation, sharing, trimming, admission, pins.
#include <algorithm>

#include "core/chain_hash.h"
#include "kvpager/error.h"
#include "pager/impl.h"

namespace kvpager {

Sequence& Pager::Impl::find(SequenceId id) {
  const auto found = sequences.find(id.value());
  if (found == sequences.end()) {
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
  const SequenceId id(next_sequence);
  Sequence& sequence = sequences[id.value()];
  ++next_sequence;
  sequence.id = id;
  sequence.salt = salt;
  sequence.root = chain_root(options.namespace_key, salt);
  return sequence;
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
    // a child never stays behind without its parent, where nobody could find it.
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
  for (int64_t c = sequence.chunks(); c-- > 0;) {
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

SequenceId Pager::Impl::fork(SequenceId id) {
  const Sequence& parent = find(id);
  require_idle(parent, "fork");
  require_blocks(static_cast<int64_t>(parent.frontier.size()), "fork");
  Sequence& child = create_sequence(parent.salt);
  child.provenance = parent.provenance;
  child.summaries_loaded = parent.summaries_loaded;
  child.length = parent.length;
  child.tokens = parent.tokens;
  child.sealed.reserve(parent.sealed.size());
  for (const ChunkUse& use : parent.sealed) {
    add_reference(use.record);
    child.sealed.push_back({use.record, use.qk_score, 0, use.last_use, 0});
  }
  try {
    for (const ChunkUse& use : parent.frontier) {
      // The parent's tail is open, so taking a block for the copy cannot evict it.
      const BlockId block = *acquire_block();
      const RecordId copy = ledger.create(ChunkState::kOpen);
      ChunkRecord& record = ledger[copy];
      record.references = 1;
      record.index = ledger[use.record].index;
      record.block = block;
      child.frontier.push_back({copy, 0, 0, 0, 0});
      backend->load(ledger[use.record], block);
    }
  } catch (...) {
    destroy_sequence(child.id);
    throw;
  }
  forget_orders();
  return child.id;
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
  const int64_t c = layout.chunk_tokens;
  const int64_t kept = position / c;       // chunks that stay sealed
  const bool partial = position % c != 0;  // chunk `kept` stays in part
  std::optional<RecordId> tail;
  if (partial && kept < sequence.sealed_chunks()) {
    const RecordId source = sequence.use(kept).record;
    ++ledger[source].readers;
    std::optional<BlockId> block;
    try {
      require_blocks(1, "trim");
      block = acquire_block();
      backend->load(ledger[source], *block);
      tail = ledger.create(ChunkState::kOpen);
    } catch (...) {
      if (block) free_block(*block);
      --ledger[source].readers;
      forget_orders();
      throw;
    }
    --ledger[source].readers;
    ledger[*tail].references = 1;
    ledger[*tail].index = kept;
    ledger[*tail].block = *block;
    sequence.frontier.reserve(1);
  }
  const int32_t tail_pins = partial ? sequence.use(kept).pins : 0;
  Provenance worst = partial && !tail ? sequence.provenance : Provenance::kExact;
  for (int64_t chunk = 0; chunk < std::min(kept + (tail ? 1 : 0), sequence.sealed_chunks());
       ++chunk) {
    worst = std::max(worst, ledger[sequence.use(chunk).record].provenance);
  }
  const int64_t first_gone = partial && !tail ? kept + 1 : kept;
  for (int64_t chunk = sequence.chunks(); chunk-- > first_gone;) {
    drop_use_pins(sequence.use(chunk));
    release(sequence.use(chunk).record);
  }
  if (kept < sequence.sealed_chunks()) {
    sequence.sealed.resize(static_cast<size_t>(kept));
    sequence.frontier.clear();
  } else {
    sequence.frontier.resize(partial ? 1 : 0);
  }
  if (tail) {
    sequence.frontier.push_back({*tail, 0, tail_pins, 0, 0});
    ledger.pin(*tail, tail_pins);
  }
  for (auto& [pin_id, range] : pins) {
    if (range.sequence == id) range.end = std::min(range.end, sequence.chunks());
  }
  sequence.length = position;
  sequence.tokens.resize(static_cast<size_t>(position));
  sequence.provenance = worst;
  forget_orders();
}

void Pager::Impl::reserve(Sequence& sequence, int64_t total_tokens) {
  if (total_tokens < sequence.length) {
    throw InvalidArgumentError(str("total_tokens: ", total_tokens, " is below the ",
                                   sequence.length, " positions the sequence already holds"));
  }
  int64_t wanted = total_tokens / layout.chunk_tokens - sequence.sealed_chunks();
  if (sequence.part >= 0) {
    // What a running forward may seal stays promised, and is now the caller's to keep.
    forward->parts[static_cast<size_t>(sequence.part)].promised = 0;
    wanted = std::max(wanted, sequence.reserved);
  }
  if (wanted > sequence.reserved) require_homes(wanted - sequence.reserved, "reserve");
  reserved_homes += wanted - sequence.reserved;
  sequence.reserved = wanted;
}

int64_t Pager::Impl::adopt_prefix(SequenceId id, const std::vector<TokenId>& tokens) {
  Sequence& sequence = find(id);
  require_idle(sequence, "adopt a prefix for");
  if (sequence.length != 0) {
    throw InvalidArgumentError(str("adopt_prefix: sequence ", id.value(), " already holds ",
                                   sequence.length, " positions; only an empty one can adopt"));
  }
  const int64_t c = layout.chunk_tokens;
  Hash128 parent = sequence.root;
  std::vector<ChunkUse> uses;
  uses.reserve(tokens.size() / static_cast<size_t>(c));
  int64_t new_homes = 0;
  for (int64_t end = c; end <= static_cast<int64_t>(tokens.size()); end += c) {
    const TokenId* ids = tokens.data() + (end - c);
    const Hash128 hash = chain_next(parent, ids, c, Provenance::kExact);
    const auto found = ledger.find(hash, parent, ids, c);
    if (!found || ledger[*found].damaged) break;
    const ChunkRecord& record = ledger[*found];
    // A cached chunk that gains a reference can no longer be reclaimed for promises already made.
    // It uses up one of this sequence's own.
    if (record.references == 0 && record.needs_home()) {
      const int64_t own = std::min(sequence.reserved, static_cast<int64_t>(uses.size()) + 1);
      const int64_t taken = referenced_homes + new_homes + 1 + reserved_homes - own;
      if (taken > home_capacity() || taken + restored_records > summary_slots.slots()) break;
      ++new_homes;
    }
    uses.push_back({*found, 0, 0, 0, 0});
    parent = hash;
  }
  const int64_t used_promises = std::min(sequence.reserved, static_cast<int64_t>(uses.size()));
  const int64_t reused = static_cast<int64_t>(uses.size()) * c;
  sequence.tokens.assign(tokens.begin(), tokens.begin() + reused);
  sequence.sealed = std::move(uses);
  for (const ChunkUse& use : sequence.sealed) {
    add_reference(use.record);
    if (ledger[use.record].summary_pending) sequence.summaries_loaded = false;
  }
  sequence.reserved -= used_promises;
  reserved_homes -= used_promises;
  sequence.length = reused;
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
  const PinRange range{id, start / c, (stop + c - 1) / c};
  std::vector<RecordId> fresh;
  for (int64_t chunk = range.begin; chunk < range.end; ++chunk) {
    const RecordId record = sequence.use(chunk).record;
    if (ledger[record].pins == 0) fresh.push_back(record);
  }
  // Invariant 3: a forward must still find blocks for its frontier.
  const int64_t free = options.pool_blocks - ledger.held() - frontier_blocks();
  if (static_cast<int64_t>(fresh.size()) > free) {
    int64_t pinned = 0;
    ledger.each([&](RecordId, const ChunkRecord& record) { pinned += record.pins > 0 ? 1 : 0; });
    const int64_t open = ledger.held() - pinned;
    throw CapacityError(str("pin [", start, ", ", stop, ") needs ", fresh.size(), " chunks; ",
                            std::max<int64_t>(0, free), " of the pool's ", options.pool_blocks,
                            " are free to pin (", pinned, " pinned, ", open, " hold tails, ",
                            frontier_blocks(), " kept for running forwards)"));
  }
  const auto add = [&](int32_t amount) {
    for (int64_t chunk = range.begin; chunk < range.end; ++chunk) {
      sequence.use(chunk).pins += amount;
      ledger.pin(sequence.use(chunk).record, amount);
    }
  };
  add(1);
  try {
    std::vector<RecordId> missing;
    for (const RecordId record : fresh) {
      if (!ledger[record].resident()) missing.push_back(record);
    }
    promote(missing);
    pins[next_pin] = range;
  } catch (...) {
    add(-1);
    forget_orders();
    throw;
  }
  return PinId(next_pin++);
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
}

}  // namespace kvpager
