// Restore: a sequence whose chunks are still in a snapshot. Nothing of the history of the pager that
// saved it is needed.
#include <algorithm>
#include <atomic>
#include <cstring>

#include "core/chunk_namer.h"
#include "core/legacy_chain.h"
#include "kvpager/error.h"
#include "pager/impl.h"
#include "pager/lease.h"

namespace kvpager {

namespace {

// Throws unless `before` is the beginning of a text of which a pager with these options can do without
// the chunks, given the `saved` positions behind it.
void require_released(const ReleasedText& before, const PagerOptions& options, int64_t saved,
                      const std::string& path) {
  const auto count = static_cast<int64_t>(before.tokens.size());
  if (count == 0) return;
  const int64_t c = options.layout.chunk_tokens;
  int64_t chunks = 0;
  bool counts_sound = true;
  for (const int64_t of_one : before.provenance) {
    counts_sound = counts_sound && of_one >= 0 && of_one <= count / c;
    chunks += counts_sound ? of_one : 0;
  }
  if (count % c != 0 || !counts_sound || chunks != count / c) {
    throw InvalidArgumentError(str("released tokens of ", path, ": ", count,
                                   ", expected whole chunks of ", c,
                                   " tokens, as many as their provenance counts"));
  }
  for (const TokenId id : before.tokens) {
    if (id < 0) throw InvalidArgumentError(str("released tokens of ", path, ": id ", id));
  }
  if (options.window == 0 || options.window > before.window) {
    throw FingerprintMismatchError(
        str("window: ", path, " holds no more than a window of ", before.window,
            " tokens shows, this pager's is ", options.window, options.window == 0 ? " (none)" : "",
            "; compute the text anew, or use a pager whose window is not wider"));
  }
  if (saved < options.window) {
    throw FingerprintMismatchError(str("window: ", path, " holds ", saved, " positions behind the ",
                                       count, " that were let go, expected at least the ",
                                       options.window, " of this pager's window"));
  }
}

// The counts of chunks that are worth `worst` at best.
ProvenanceCounts at_best(const ProvenanceCounts& counts, Provenance worst) {
  ProvenanceCounts lowered{};
  for (size_t i = 0; i < counts.size(); ++i) {
    lowered[std::max(i, static_cast<size_t>(worst))] += counts[i];
  }
  return lowered;
}

// The name or hash of the last released chunk. next(before, ids, provenance) makes each from the one
// before.
template <class Name, class Next>
Name chain_over(Name name, const std::vector<TokenId>& tokens, const ProvenanceCounts& counts,
                int64_t c, const Next& next) {
  const TokenId* ids = tokens.data();
  for (size_t i = 0; i < counts.size(); ++i) {
    for (int64_t n = counts[i]; n-- > 0; ids += c) {
      name = next(name, ids, static_cast<Provenance>(i));
    }
  }
  return name;
}

[[noreturn]] void refuse_link(const SnapshotReader& reader, int64_t chunk) {
  throw FingerprintMismatchError(
      str("salt: chunk ", chunk, " of ", reader.path(),
          " has a chain hash that this fingerprint, salt and its token ids do not give"));
}

// The chain proves that tokens, order, fingerprint and salt are those the first `sealed` chunks were
// computed under. Each link is taken from the name before it as the file has it, which the link before
// has proved, so that none waits for another.
void verify_names(const SnapshotReader& reader, int64_t sealed, const ChunkName& base,
                  const ChunkNamer& namer) {
  constexpr int64_t kMost = 4;
  const SnapshotMeta& meta = reader.meta();
  const int64_t c = meta.layout.chunk_tokens;
  const auto name = [&](int64_t i) -> const ChunkName& {
    return i < 0 ? base : meta.chunks[static_cast<size_t>(i)].chain_hash;
  };
  for (int64_t first = 0; first < sealed; first += kMost) {
    const int64_t count = std::min(kMost, sealed - first);
    ChunkNamer::Link links[kMost];
    ChunkName names[kMost];
    for (int64_t i = 0; i < count; ++i) {
      const int64_t chunk = first + i;
      links[i] = {&name(chunk - 1), meta.tokens.data() + chunk * c,
                  meta.chunks[static_cast<size_t>(chunk)].provenance};
    }
    namer.next_of_each(links, static_cast<size_t>(count), c, names);
    for (int64_t i = 0; i < count; ++i) {
      if (names[i] != name(first + i)) refuse_link(reader, first + i);
    }
  }
}

// The same of a file of before version 1.2.
void verify_hashes(const SnapshotReader& reader, int64_t sealed, Hash128 hash) {
  const SnapshotMeta& meta = reader.meta();
  const int64_t c = meta.layout.chunk_tokens;
  for (int64_t i = 0; i < sealed; ++i) {
    const SnapshotChunk& chunk = meta.chunks[static_cast<size_t>(i)];
    hash = legacy_next(hash, meta.tokens.data() + i * c, c, chunk.provenance);
    if (!(hash == legacy_hash(chunk.chain_hash))) refuse_link(reader, i);
  }
}

// Neighbours in one snapshot, whose summaries are one read.
struct SummaryRun {
  SnapshotReader* reader;
  int64_t first;
  std::vector<ChunkRecord*> records;
};

// What is read and verified at a time: it is still in the cache when it is hashed.
constexpr int64_t kSummaryReadBytes = int64_t{1} << 20;

// Says that a record is chunk `i` of a snapshot. Its token ids and checksums are views that the
// reader keeps, without a count for each: there are thousands of records.
void name_source(ChunkRecord* record, const std::shared_ptr<SnapshotReader>& reader, int64_t i) {
  const SnapshotMeta& meta = reader->meta();
  const auto c = static_cast<size_t>(meta.layout.chunk_tokens);
  record->source = reader;
  record->source_chunk = i;
  record->tokens = meta.tokens.borrow(static_cast<size_t>(i) * c, c);
  record->checksums = meta.chunks[static_cast<size_t>(i)].slice_checksum.borrow();
}

// Whether the rooms of summaries [first, first + count) lie behind each other.
bool contiguous(const std::vector<std::byte*>& room, size_t first, size_t count, int64_t each) {
  for (size_t i = 1; i < count; ++i) {
    if (room[first + i] != room[first] + static_cast<int64_t>(i) * each) return false;
  }
  return true;
}

}  // namespace

// Brings the summaries a restore left in the file. Invariant 9: after this no sealed chunk of the
// sequence is without one.
void Pager::Impl::load_summaries(Sequence& sequence) {
  if (sequence.summaries_loaded) return;
  const int64_t each = config.summary_slot_bytes;
  const size_t longest = static_cast<size_t>(std::max<int64_t>(1, kSummaryReadBytes / each));
  std::vector<SummaryRun> runs;
  for (const ChunkUse& use : sequence.sealed) {
    ChunkRecord& record = ledger[use.record];
    if (!record.summary_pending) continue;
    const bool next = !runs.empty() && runs.back().reader == record.source.get() &&
                      runs.back().records.size() < longest &&
                      runs.back().records.back()->source_chunk + 1 == record.source_chunk;
    if (!next) runs.push_back({record.source.get(), record.source_chunk, {}});
    runs.back().records.push_back(&record);
  }
  std::vector<SlotId> slots;
  for (const SummaryRun& run : runs) {
    for (const ChunkRecord* record : run.records) slots.push_back(record->summary);
  }
  const std::vector<std::byte*> room = backend->summary_room(slots);
  std::vector<size_t> first_room;
  for (size_t i = 0, next = 0; i < runs.size(); next += runs[i++].records.size()) {
    first_room.push_back(next);
  }
  std::atomic<int64_t> rebuilt{0};
  threads.run(static_cast<int64_t>(runs.size()), [&](int64_t i, int) {
    const SummaryRun& run = runs[static_cast<size_t>(i)];
    const auto count = static_cast<int64_t>(run.records.size());
    const size_t first = first_room[static_cast<size_t>(i)];
    const bool straight = contiguous(room, first, run.records.size(), each);
    std::unique_ptr<std::byte[]> apart;
    if (!straight) apart.reset(new std::byte[static_cast<size_t>(count * each)]);
    std::byte* bytes = straight ? room[first] : apart.get();
    try {
      run.reader->read_summaries(run.first, count, bytes);
    } catch (const CorruptSnapshotError&) {
      rebuilt += read_or_rebuild(run.reader, run.first, run.records, bytes);
    }
    if (straight) return;
    for (int64_t c = 0; c < count; ++c) {
      std::memcpy(room[first + static_cast<size_t>(c)], bytes + c * each,
                  static_cast<size_t>(each));
    }
  });
  backend->summaries_written(slots);
  counters.summaries_rebuilt += rebuilt;
  for (const SummaryRun& run : runs) {
    for (ChunkRecord* record : run.records) record->summary_pending = false;
  }
  sequence.summaries_loaded = true;
}

// Summaries one by one; those that are damaged are made again from the chunk's payload. The checksum
// in the ledger section proves that they are what was saved.
int64_t Pager::Impl::read_or_rebuild(SnapshotReader* reader, int64_t first,
                                     const std::vector<ChunkRecord*>& records,
                                     std::byte* out) const {
  const int64_t each = config.summary_slot_bytes;
  std::vector<std::byte> chunk(static_cast<size_t>(layout.chunk_bytes()));
  int64_t rebuilt = 0;
  for (size_t i = 0; i < records.size(); ++i) {
    const int64_t index = first + static_cast<int64_t>(i);
    std::byte* summary = out + static_cast<int64_t>(i) * each;
    try {
      reader->read_summaries(index, 1, summary);
    } catch (const CorruptSnapshotError& error) {
      files.read_chunk(*records[i], chunk.data());
      // One by one: this runs on a thread of the pool already.
      for (int64_t page = 0; page < int64_t{layout.layers} * layout.kv_heads; ++page) {
        config.summarize_page(chunk.data(), page, summary);
      }
      const auto& saved = reader->meta().chunks[static_cast<size_t>(index)];
      if (slice_checksum(summary, each) != saved.summary_checksum) {
        throw damage_of_chunk(error, index, records[i]->index);
      }
      ++rebuilt;
    }
  }
  return rebuilt;
}

SequenceId Pager::Impl::restore(std::shared_ptr<SnapshotReader> reader, const std::string& salt,
                                Provenance provenance, const std::string& file_namespace,
                                int64_t upto, const ReleasedText& released_text) {
  const SnapshotMeta& meta = reader->meta();
  if (!(meta.layout == layout)) {
    throw FingerprintMismatchError(
        str("layout: ", reader->path(), " holds chunks of another shape or dtype"));
  }
  const std::vector<std::string> known = scorer_names();
  if (std::find(known.begin(), known.end(), meta.scorer) == known.end()) {
    std::string names;
    for (const std::string& name : known) names += (names.empty() ? "" : ", ") + name;
    throw FingerprintMismatchError(str("scorer: ", reader->path(), " has summaries of '",
                                       meta.scorer, "', which this version has not (it has ", names,
                                       "); prefill the text again"));
  }
  if (meta.scorer != options.scorer || meta.summary_page_bytes != config.summary_page_bytes) {
    throw FingerprintMismatchError(str("scorer: ", reader->path(), " has summaries of '",
                                       meta.scorer, "' (", meta.summary_page_bytes,
                                       " bytes), this pager uses '", options.scorer, "' (",
                                       config.summary_page_bytes, " bytes)"));
  }
  require_released(released_text, options, static_cast<int64_t>(meta.tokens.size()),
                   reader->path());
  // Nothing of the text: nothing came before it either.
  const ReleasedText nothing;
  const ReleasedText& before = upto == 0 ? nothing : released_text;
  const auto released = static_cast<int64_t>(before.tokens.size());
  const auto saved = released + static_cast<int64_t>(meta.tokens.size());
  const int64_t earliest = released == 0 ? 0 : released + options.window;
  if (upto > saved || (upto > 0 && upto < earliest)) {
    throw InvalidArgumentError(str("upto: ", upto, ", expected ", earliest == 0 ? "" : "0 or ",
                                   earliest, " to ", saved, ", the positions that ", reader->path(),
                                   " can serve, or -1 for all"));
  }
  // From here on chunks and positions are the file's own.
  const int64_t length = (upto < 0 ? saved : upto) - released;
  const int64_t c = layout.chunk_tokens;
  const int64_t sealed = length / c;
  const bool partial = length % c != 0;  // of a chunk that is the file's tail, or sealed there

  const ChunkNamer namer(options.namespace_key, salt);
  const auto named_by = [c](const ChunkNamer& by) {
    return [&by, c](const ChunkName& name, const TokenId* ids, Provenance worth) {
      return by.next(name, ids, c, worth);
    };
  };
  if (meta.legacy_names) {
    const auto next = [c](const Hash128& hash, const TokenId* ids, Provenance worth) {
      return legacy_next(hash, ids, c, worth);
    };
    const Hash128 root = legacy_root(file_namespace, salt);
    verify_hashes(*reader, sealed, chain_over(root, before.tokens, before.provenance, c, next));
  } else {
    const ChunkNamer theirs(file_namespace, salt);
    const ChunkName base =
        chain_over(ChunkName(), before.tokens, before.provenance, c, named_by(theirs));
    verify_names(*reader, sealed, base, theirs);
  }

  // Chunks the ledger already has are shared; the others become records that live in the file.
  struct Planned {
    RecordId existing;  // -1: none
    Provenance provenance;
  };
  std::vector<Planned> plan;
  // Under the file's own namespace and worth a name is the one just verified; from chunk `own` on
  // they are others, as are all of a file of an earlier version.
  const ProvenanceCounts released_worth = at_best(before.provenance, provenance);
  const ChunkName base = chain_over(ChunkName(), before.tokens, released_worth, c, named_by(namer));
  std::vector<ChunkName> others;
  int64_t own = file_namespace == options.namespace_key && !meta.legacy_names ? sealed : 0;
  const auto name_of = [&](int64_t i) -> const ChunkName& {
    if (i < 0) return base;
    return i < own ? meta.chunks[static_cast<size_t>(i)].chain_hash
                   : others[static_cast<size_t>(i - own)];
  };
  Provenance worst = provenance;
  for (size_t i = 0; i < released_worth.size(); ++i) {
    if (released_worth[i] > 0) worst = std::max(worst, static_cast<Provenance>(i));
  }
  // What follows a chunk that is new here is another's, unless nobody has the one before and the bytes
  // are the file's. One name, other bytes: a damaged chunk is healed by none but its own.
  const auto may_share = [&](RecordId found, int64_t i) {
    mutex.held();
    const RecordId previous = i > 0 ? plan.back().existing : RecordId();
    const bool known = i == 0 || previous.value() >= 0;
    const bool follows = known && continues(found, released / c + i, previous);
    if (!follows && !(i > 0 && ledger.orphaned(found))) return false;
    if (follows && !ledger[found].damaged) return true;
    return checksums(found) == meta.chunks[static_cast<size_t>(i)].slice_checksum;
  };
  int64_t fresh = 0;
  int64_t new_homes = 0;
  plan.reserve(static_cast<size_t>(sealed));
  for (int64_t i = 0; i < sealed; ++i) {
    const SnapshotChunk& chunk = meta.chunks[static_cast<size_t>(i)];
    const TokenId* ids = meta.tokens.data() + i * c;
    worst = std::max(worst, chunk.provenance);
    if (chunk.provenance != worst) own = std::min(own, i);
    if (i >= own) others.push_back(namer.next(name_of(i - 1), ids, c, worst));
    Planned planned{RecordId(), worst};
    if (worst == Provenance::kExact) {
      const auto found = ledger.find(name_of(i), ids, c);
      if (found && may_share(*found, i)) planned.existing = *found;
    }
    if (planned.existing.value() >= 0) {
      const ChunkRecord& record = ledger[planned.existing];
      new_homes += record.references == 0 && record.needs_home() ? 1 : 0;
    } else {
      ++fresh;
    }
    plan.push_back(planned);
  }
  if (new_homes > 0) require_homes(new_homes, "restore");
  const int64_t summaries_taken = referenced_homes + reserved_homes + restored_records;
  if (summaries_taken + new_homes + fresh > summary_slots.slots()) {
    throw CapacityError(str("restore: summaries of ", fresh, " more chunks need ",
                            fresh * config.summary_slot_bytes, " bytes beside the ",
                            summaries_taken, " in use; raise summary_bytes, which is ",
                            summary_slots.slots() * config.summary_slot_bytes));
  }

  SharedArray<TokenId> tokens = meta.tokens.first(static_cast<size_t>(length));
  if (released > 0) {
    std::vector<TokenId> all = before.tokens;
    all.insert(all.end(), tokens.begin(), tokens.end());
    tokens = SharedArray(std::move(all));
  }

  Sequence made(namer);
  made.salt = salt;
  made.sealed.reserve(static_cast<size_t>(sealed));
  made.frontier.reserve(partial ? 1 : 0);
  // References first, so that taking a block or a summary slot cannot forget what the plan shares.
  std::optional<BlockLease> tail_block;
  std::optional<SummaryLease> summaries;
  Sequence* kept = nullptr;
  for (const Planned& planned : plan) {
    if (planned.existing.value() >= 0) add_reference(planned.existing);
  }
  try {
    tail_block.emplace(*this, partial ? 1 : 0, "restore");
    if (partial) {
      const auto read = [&](std::byte* out) {
        try {
          reader->read_chunk(sealed, out);
        } catch (const CorruptSnapshotError& error) {
          throw damage_of_chunk(error, sealed, released / c + sealed);
        }
      };
      backend->load(read, (*tail_block)[0]);
    }
    ledger.expect(fresh + 1);
    summaries.emplace(*this, fresh, "restore");
    kept = &keep(std::move(made));
  } catch (...) {
    for (size_t i = plan.size(); i-- > 0;) {  // a chain's end first, as whoever closes it does
      if (plan[i].existing.value() >= 0) release(plan[i].existing);
    }
    throw;
  }
  // Nothing below fails.
  Sequence& sequence = *kept;
  sequence.tokens = TokenLog(std::move(tokens));
  sequence.length = released + length;
  sequence.released = released / c;
  sequence.released_worth = released_worth;
  sequence.base = base;
  sequence.provenance =
      partial ? std::max(worst, meta.chunks[static_cast<size_t>(sealed)].provenance) : worst;
  for (int64_t i = 0; i < sealed; ++i) {
    const Planned& planned = plan[static_cast<size_t>(i)];
    const double score =
        meta.hints.qk_score.empty() ? 0 : meta.hints.qk_score[static_cast<size_t>(i)];
    const RecordId previous = sequence.last_sealed();
    RecordId record_id = planned.existing;
    if (record_id.value() >= 0) {
      ChunkRecord& record = ledger[record_id];
      if (record.damaged) {  // the same bytes, sound for all we know
        if (record.on_disk()) {
          disk_slots.give_back(record.disk);
          record.disk = SlotId();
          --referenced_homes;
          ++restored_records;
        }
        name_source(&record, reader, i);
        record.damaged = false;
      }
      if (i > 0) ledger.adopt_orphan(record_id, previous);
    } else {
      record_id = ledger.create(ChunkState::kSealed);
      ChunkRecord& record = ledger[record_id];
      record.provenance = planned.provenance;
      record.references = 1;
      record.index = sequence.released + i;
      name_source(&record, reader, i);
      record.summary = summaries->release();
      record.summary_pending = true;
      record.name = name_of(i);
      if (i > 0) record.previous = ledger.ref(previous);
      record.score = score;
      ++restored_records;
      if (planned.provenance == Provenance::kExact) publish(record_id, previous);
    }
    const ChunkRecord& record = ledger[record_id];
    if (record.summary_pending) sequence.summaries_loaded = false;
    sequence.sealed.push_back({record_id, score, 0, 0, 0});
  }
  if (partial) {
    const RecordId tail = ledger.create(ChunkState::kOpen);
    ledger[tail].references = 1;
    ledger[tail].index = sequence.released + sealed;
    ledger[tail].block = tail_block->release();
    sequence.frontier.push_back({tail, 0, 0, 0, 0});
  }
  forget_orders();
  return sequence.id;
}

}  // namespace kvpager
