// Commit: rows become positions, chunks that fill up are sealed. Everything that can fail is prepared
// for all chunks before the first is applied (invariant 6).
#include <algorithm>
#include <new>

#include "core/chunk_namer.h"
#include "kvpager/error.h"
#include "kvpager/require.h"
#include "pager/impl.h"

namespace kvpager {
namespace {

// Room for `size` elements, growing geometrically: reserve() alone would copy everything at every
// forward.
template <class T>
void grow(std::vector<T>* vector, int64_t size) {
  const size_t wanted = static_cast<size_t>(size);
  if (wanted > vector->capacity()) vector->reserve(std::max(wanted, vector->capacity() * 2));
}

}  // namespace

void Pager::Impl::commit_all(Provenance provenance) {
  if (!forward) throw InvalidArgumentError("commit: no forward is running");
  std::vector<int64_t> count;
  count.reserve(forward->parts.size());
  bool any = false;
  for (const ForwardPart& part : forward->parts) {
    count.push_back(part.commit_count);
    any = any || part.commit_count > 0;
  }
  if (any) require_layers_written();
  commit_rows(count, provenance);
}

void Pager::Impl::commit(const std::vector<SequenceId>& ids, const std::vector<int64_t>& accepted,
                         Provenance provenance) {
  if (!forward) throw InvalidArgumentError("commit: no forward is running");
  commit_rows(accepted_rows(ids, accepted), provenance);
}

// How many rows of each part are accepted, after checking that the forward can be committed.
std::vector<int64_t> Pager::Impl::accepted_rows(const std::vector<SequenceId>& ids,
                                                const std::vector<int64_t>& accepted) const {
  if (ids.size() != accepted.size()) {
    throw InvalidArgumentError(
        str("accepted: ", accepted.size(), " counts for ", ids.size(), " sequences"));
  }
  std::vector<int64_t> count(forward->parts.size(), 0);
  std::vector<uint8_t> named(forward->parts.size(), 0);
  bool any = false;
  for (size_t i = 0; i < ids.size(); ++i) {
    const auto known = sequences.find(ids[i].value());
    if (known == sequences.end() || known->second.part < 0) {
      throw InvalidArgumentError(
          str("commit: sequence ", ids[i].value(), " is not in this forward"));
    }
    const size_t p = static_cast<size_t>(known->second.part);
    const int64_t rows = forward->parts[p].commit_count;
    if (accepted[i] < 0 || accepted[i] > rows) {
      throw InvalidArgumentError(str("accepted: ", accepted[i], " rows of sequence ",
                                     ids[i].value(), ", expected 0 to ", rows));
    }
    if (named[p]) {
      throw InvalidArgumentError(str("commit: sequence ", ids[i].value(), " is named twice"));
    }
    named[p] = 1;
    count[p] = accepted[i];
    any = any || accepted[i] > 0;
  }
  if (any) require_layers_written();
  return count;
}

void Pager::Impl::require_layers_written() const {
  if (forward->given_count > 0 && !forward->given_written) {
    throw InvalidArgumentError(str("commit: the keys and values of ", forward->given_count,
                                   " given positions are missing; hand them in with give"));
  }
  if (forward->row_count() == 0) return;
  for (int layer = 0; layer < layout.layers; ++layer) {
    if (!forward->layer_written[static_cast<size_t>(layer)]) {
      throw InvalidArgumentError(
          str("commit: layer ", layer, " was never written in this forward"));
    }
  }
}

// Without rows of the model there is nothing whose bits their number could change.
bool Pager::Impl::exact_row_count(int64_t rows) const {
  return options.exact &&
         (rows == options.rows || rows == 0 ||
          std::binary_search(options.smaller_rows.begin(), options.smaller_rows.end(), rows));
}

// Commits the first count[p] rows of each part.
void Pager::Impl::commit_rows(const std::vector<int64_t>& count, Provenance provenance) {
  if (!exact_row_count(forward->row_count())) {
    provenance = std::max(provenance, Provenance::kDecode);
  }
  const ScopedTimer timer(&counters.seconds_seal);
  std::vector<Seal> seals;
  try {
    backend->finish();
    held.release();
    for (size_t p = 0; p < forward->parts.size(); ++p) {
      prepare_seals(forward->parts[p], count[p], provenance, &seals);
    }
    if (!seals.empty()) ledger.expect(static_cast<int64_t>(seals.size()));
  } catch (...) {
    for (size_t i = seals.size(); i-- > 0;) {  // a chain's end first, as whoever closes it does
      const Seal& seal = seals[i];
      if (seal.has_home) give_back(seal.home);
      if (seal.existing) release(*seal.existing);
      if (seal.summary.value() >= 0) summary_slots.give_back(seal.summary);
    }
    abort();
    throw;
  }
  // Nothing below fails: what it needs memory for was had above.
  for (size_t i = 0; i < seals.size();) {
    Sequence& sequence = *seals[i].sequence;
    const size_t first = i;
    for (; i < seals.size() && seals[i].sequence == &sequence; ++i) {
      apply_seal(seals[i], sequence.frontier[i - first]);
    }
    sequence.frontier.erase(sequence.frontier.begin(),
                            sequence.frontier.begin() + static_cast<int64_t>(i - first));
  }
  for (size_t p = 0; p < forward->parts.size(); ++p) {
    advance(forward->parts[p], count[p], provenance);
  }
  backend->end();
  held.release();
  disband(&*forward);
  for (const ForwardPart& part : forward->parts) {
    let_go(*part.sequence);
    promise_again(*part.sequence);
  }
  try {
    recall_ahead();
  } catch (const std::bad_alloc&) {  // only ahead of need
  }
  destroy_dropped(*forward);
  forward.reset();
  running = 0;
}

// The ids of chunks [first, last) of a part that commits: positions before its rows, then theirs.
SharedArray<TokenId> Pager::Impl::tokens_to_seal(const ForwardPart& part, int64_t first,
                                                 int64_t last) const {
  const Sequence& sequence = *part.sequence;
  const int64_t c = layout.chunk_tokens;
  const int64_t stop = last * c;
  std::vector<TokenId> ids(static_cast<size_t>(stop - first * c));
  sequence.tokens.copy(static_cast<size_t>(first * c), static_cast<size_t>(sequence.length),
                       ids.data());
  int64_t at = sequence.length;
  for (const TokenRange& rows : part.commits) {
    const int64_t count = std::min(rows.count, stop - at);
    std::copy_n(forward->tokens.begin() + rows.first, count, ids.begin() + (at - first * c));
    at += count;
  }
  return SharedArray(std::move(ids));
}

// One Seal for every chunk of the part that `count` more rows fill. What it took is in *seals at
// every moment.
void Pager::Impl::prepare_seals(const ForwardPart& part, int64_t count, Provenance provenance,
                                std::vector<Seal>* seals) {
  Sequence& sequence = *part.sequence;
  const int64_t c = layout.chunk_tokens;
  sequence.tokens.grow(static_cast<size_t>(sequence.length + count));
  const int64_t first = sequence.sealed_chunks();
  const int64_t last = (sequence.length + count) / c;
  if (first == last) return;
  grow(&sequence.sealed, last - sequence.released);
  grow(seals, static_cast<int64_t>(seals->size()) + last - first);
  const SharedArray<TokenId> ids = tokens_to_seal(part, first, last);
  RecordId previous = sequence.last_sealed();
  ChunkName name = previous.value() < 0 ? sequence.base : ledger[previous].name;
  for (int64_t chunk = first; chunk < last; ++chunk) {
    Seal& seal = seals->emplace_back();
    seal.sequence = &sequence;
    seal.open = sequence.use(chunk).record;
    seal.tokens = ids.part(static_cast<size_t>((chunk - first) * c), static_cast<size_t>(c));
    seal.provenance = std::max(sequence.provenance, provenance);
    name = sequence.namer.next(name, seal.tokens.data(), c, seal.provenance);
    seal.name = name;
    const BlockId block = ledger[seal.open].block;
    seal.checksums = backend->checksums(block);
    if (seal.provenance == Provenance::kExact) {
      const auto found = ledger.find(seal.name, seal.tokens.data(), c);
      const bool same_text =
          found && (continues(*found, chunk, previous) || ledger.orphaned(*found));
      // One name, other bytes: some forward was not what it claimed. Nobody's K/V is swapped.
      if (same_text && checksums(*found) == checksums(&seal)) {
        add_reference(*found);  // so that making room for the next chunk cannot forget it
        seal.existing = found;
        if (ledger[*found].damaged && ledger[*found].on_disk()) rewrite_spilled(&seal, block);
        seal.heals = ledger[*found].damaged;
      }
    }
    previous = seal.existing.value_or(seal.open);
    if (seal.existing && !seal.heals) continue;
    if (!seal.heals) {
      seal.summary = take_summary_slot();
      backend->summarize(block, seal.summary);
    } else if (ledger[*seal.existing].summary_pending) {  // nobody reads that slot yet
      backend->summarize(block, ledger[*seal.existing].summary);
    }
    seal.home = take_home();
    seal.has_home = true;
    backend->write_home(block, seal.home, &seal.checksums);
  }
}

// These are the bytes that a chunk on disk had, as its checksums say. They go to where it is, whatever
// becomes of this forward. REQUIRES: seal->existing is on disk.
void Pager::Impl::rewrite_spilled(Seal* seal, BlockId block) {
  KVPAGER_REQUIRE(seal->existing && ledger[*seal->existing].on_disk());
  const ChunkRecord& record = ledger[*seal->existing];
  backend->write_home(block, Home{SlotId(), record.disk}, &seal->checksums);
  record.damaged = false;
  ++counters.chunks_healed;
  counters.bytes_written_through += layout.chunk_bytes();
}

// Of what is in memory, computed where they were put off.
const SharedArray<uint64_t>& Pager::Impl::checksums(RecordId id) {
  ChunkRecord& record = ledger[id];
  if (record.checksums.empty()) record.checksums = checksums_in_memory(record);
  return record.checksums;
}

const SharedArray<uint64_t>& Pager::Impl::checksums(Seal* seal) {
  if (seal->checksums.empty()) seal->checksums = checksums_in_memory(ledger[seal->open]);
  return seal->checksums;
}

std::vector<uint64_t> Pager::Impl::checksums_in_memory(const ChunkRecord& record) {
  return slice_checksums(layout, backend->view(record, 0, layout.chunk_bytes()), threads);
}

// The frontier's first chunk becomes the sequence's next sealed one.
void Pager::Impl::apply_seal(Seal& seal, ChunkUse use) {
  Sequence& sequence = *seal.sequence;
  if (sequence.reserved > 0) {
    --sequence.reserved;
    --reserved_homes;
  }
  const RecordId previous = sequence.last_sealed();
  if (seal.existing) {
    // Somebody computed the same chunk, bit for bit. Keep their record; if its bytes are not
    // resident, this block becomes its resident copy, so that what is pinned stays where it is.
    ChunkRecord& kept = ledger[*seal.existing];
    ledger.pin(use.record, -use.pins);
    if (!kept.resident()) std::swap(kept.block, ledger[use.record].block);
    if (seal.heals && kept.source == nullptr) {
      give_back(seal.home);   // another sequence of this forward has healed it
    } else if (seal.heals) {  // proved by the checksums: these are the bytes the snapshot had
      kept.source.reset();
      kept.source_chunk = -1;
      kept.tokens = std::move(seal.tokens);  // not the snapshot's any more
      kept.checksums = std::move(seal.checksums);
      kept.damaged = false;
      kept.summary_pending = false;
      if (kept.on_host()) {
        give_back(seal.home);
      } else {
        kept.host = seal.home.host;
        kept.disk = seal.home.disk;
      }
      --restored_records;
      ++referenced_homes;
      ++counters.chunks_healed;
      if (kept.has_lower_copy()) counters.bytes_written_through += layout.chunk_bytes();
    }
    drop_record(use.record);
    use.record = *seal.existing;
    if (previous.value() >= 0) ledger.adopt_orphan(use.record, previous);
    ledger.pin(use.record, use.pins);
    if (kept.summary_pending) sequence.summaries_loaded = false;
    ++counters.chunks_shared;
  } else {
    ChunkRecord& record = ledger[seal.open];
    ledger.seal(seal.open);
    record.provenance = seal.provenance;
    record.host = seal.home.host;
    record.disk = seal.home.disk;
    record.summary = seal.summary;
    record.name = seal.name;
    if (previous.value() >= 0) record.previous = ledger.ref(previous);
    record.tokens = std::move(seal.tokens);
    record.checksums = std::move(seal.checksums);
    record.last_use = clock;
    ++referenced_homes;
    if (seal.provenance == Provenance::kExact) publish(seal.open, previous);
    if (record.has_lower_copy()) counters.bytes_written_through += layout.chunk_bytes();
    ++counters.chunks_sealed;
  }
  use.last_use = clock;
  sequence.sealed.push_back(use);
}

// Of sequences that seal the same text in one forward, each has a record of its own, and the first one's
// is found. The others' are told to be of the same text, so that what is sealed behind them is found too.
void Pager::Impl::publish(RecordId id, RecordId previous) {
  ledger.publish(id);
  if (ledger.published(id)) return;
  ChunkRecord& record = ledger[id];
  const auto found = ledger.find(record.name, record.tokens.data(), layout.chunk_tokens);
  if (!found || !continues(*found, record.index, previous)) return;
  const SharedArray<uint64_t>& theirs = ledger[*found].checksums;
  const bool known = !theirs.empty() && !record.checksums.empty();
  if (!known || theirs == record.checksums) record.serial = ledger[*found].serial;
}

// Rows become positions; what the forward read and scored goes into the ledger.
void Pager::Impl::advance(ForwardPart& part, int64_t count, Provenance provenance) {
  Sequence& sequence = *part.sequence;
  int64_t left = count;
  for (const TokenRange& rows : part.commits) {
    const int64_t more = std::min(rows.count, left);
    sequence.tokens.append(forward->tokens.data() + rows.first, static_cast<size_t>(more));
    left -= more;
  }
  sequence.length += count;
  if (count > 0) sequence.provenance = std::max(sequence.provenance, provenance);
  counters.rows_committed += count;
  drop_surplus(part);
  // A moving average of each chunk's share of attention mass, for residency and for people.
  const double shares = static_cast<double>(config.scored_layers(forward->dense) * layout.kv_heads);
  const auto known = static_cast<int64_t>(part.read.size());  // none where nothing is computed
  for (int64_t chunk = sequence.released; chunk < std::min(known, sequence.chunks()); ++chunk) {
    const size_t i = static_cast<size_t>(chunk);
    ChunkUse& use = sequence.use(chunk);
    if (part.scored) {
      use.qk_score = 0.75 * use.qk_score + 0.25 * part.mass[i] / shares;
      ledger[use.record].score = use.qk_score;
    }
    if (part.read[i]) {
      use.last_use = clock;
      ++use.selected;
      ledger[use.record].last_use = clock;
    }
  }
}

}  // namespace kvpager
