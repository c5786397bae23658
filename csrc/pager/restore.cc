// Restore: a sequence whose chunks are still in a snapshot. Nothing of the history of the pager that
// saved it is needed.
#include <algorithm>
#include <atomic>
#include <cstring>

#include "core/chain_hash.h"
#include "kvpager/error.h"
#include "pager/impl.h"

namespace kvpager {

namespace {

// Neighbours in one snapshot, whose summaries are one read.
struct SummaryRun {
  SnapshotReader* reader;
  int64_t first;
  std::vector<ChunkRecord*> records;
};

// What is read and verified at a time: it is still in the cache when it is hashed.
constexpr int64_t kSummaryReadBytes = int64_t{1} << 20;

// Elements of the snapshot's metadata, which stays as long as they do.
template <class T>
SharedArray<T> part_of(const std::shared_ptr<const SnapshotMeta>& meta, const T* from,
                       size_t count) {
  return SharedArray<T>(std::shared_ptr<const T>(meta, from), count);
}

template <class T>
SharedArray<T> part_of(const std::shared_ptr<const SnapshotMeta>& meta, const std::vector<T>& all) {
  return part_of(meta, all.data(), all.size());
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
  const int64_t each = summary_slot_bytes;
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

void Pager::Impl::summarize_page(const std::byte* chunk, int64_t page, std::byte* summary) const {
  const int layer = static_cast<int>(page / layout.kv_heads);
  const int head = static_cast<int>(page % layout.kv_heads);
  scorer.summarize(layout, chunk + layout.page_offset(layer, head),
                   summary + page * summary_page_bytes);
}

// Summaries one by one; those that are damaged are made again from the chunk's payload. The checksum
// in the ledger section proves that they are what was saved.
int64_t Pager::Impl::read_or_rebuild(SnapshotReader* reader, int64_t first,
                                     const std::vector<ChunkRecord*>& records,
                                     std::byte* out) const {
  const int64_t each = summary_slot_bytes;
  std::vector<std::byte> chunk(static_cast<size_t>(layout.chunk_bytes()));
  int64_t rebuilt = 0;
  for (size_t i = 0; i < records.size(); ++i) {
    const int64_t index = first + static_cast<int64_t>(i);
    std::byte* summary = out + static_cast<int64_t>(i) * each;
    try {
      reader->read_summaries(index, 1, summary);
    } catch (const CorruptSnapshotError&) {
      read_chunk(*records[i], chunk.data());
      // One by one: this runs on a thread of the pool already.
      for (int64_t page = 0; page < int64_t{layout.layers} * layout.kv_heads; ++page) {
        summarize_page(chunk.data(), page, summary);
      }
      const auto& saved = reader->meta().chunks[static_cast<size_t>(index)];
      if (slice_checksum(summary, each) != saved.summary_checksum) throw;
      ++rebuilt;
    }
  }
  return rebuilt;
}

SequenceId Pager::Impl::restore(std::shared_ptr<SnapshotReader> reader, const std::string& salt,
                                Provenance provenance, const std::string& file_namespace,
                                int64_t upto) {
  const std::shared_ptr<const SnapshotMeta> shared = reader->shared_meta();
  const SnapshotMeta& meta = *shared;
  if (!(meta.layout == layout)) {
    throw FingerprintMismatchError(
        str("layout: ", reader->path(), " holds chunks of another shape or dtype"));
  }
  if (meta.scorer != options.scorer || meta.summary_page_bytes != summary_page_bytes) {
    throw FingerprintMismatchError(str("scorer: ", reader->path(), " has summaries of '",
                                       meta.scorer, "' (", meta.summary_page_bytes,
                                       " bytes), this pager uses '", options.scorer, "' (",
                                       summary_page_bytes, " bytes)"));
  }
  const auto saved = static_cast<int64_t>(meta.tokens.size());
  const int64_t length = upto < 0 ? saved : upto;
  if (length > saved) {
    throw InvalidArgumentError(str("upto: ", upto, ", expected 0 to ", saved, ", the positions in ",
                                   reader->path(), ", or -1 for all"));
  }
  const int64_t c = layout.chunk_tokens;
  const int64_t sealed = length / c;
  const bool partial = length % c != 0;  // of a chunk that is the file's tail, or sealed there

  // The chain proves that tokens, order, fingerprint and salt are those the chunks were computed
  // under.
  Hash128 file_parent = chain_root(file_namespace, salt);
  for (int64_t i = 0; i < sealed; ++i) {
    const SnapshotChunk& chunk = meta.chunks[static_cast<size_t>(i)];
    file_parent = chain_next(file_parent, meta.tokens.data() + i * c, c, chunk.provenance);
    if (!(file_parent == chunk.chain_hash)) {
      throw FingerprintMismatchError(
          str("salt: chunk ", i, " of ", reader->path(),
              " has a chain hash that this fingerprint, salt and its token ids do not give"));
    }
  }

  // Chunks the ledger already has are shared; the others become records that live in the file.
  struct Planned {
    std::optional<RecordId> existing;
    Hash128 parent;
    Hash128 hash;
    Provenance provenance;
  };
  std::vector<Planned> plan;
  Hash128 parent = chain_root(options.namespace_key, salt);
  Provenance worst = provenance;
  int64_t fresh = 0;
  int64_t new_homes = 0;
  bool own = file_namespace == options.namespace_key;
  plan.reserve(static_cast<size_t>(sealed));
  for (int64_t i = 0; i < sealed; ++i) {
    worst = std::max(worst, meta.chunks[static_cast<size_t>(i)].provenance);
    Planned planned;
    planned.parent = parent;
    planned.provenance = worst;
    // Under the file's own namespace and worth the hash is the one just verified.
    const SnapshotChunk& chunk = meta.chunks[static_cast<size_t>(i)];
    planned.hash = own && chunk.provenance == worst
                       ? chunk.chain_hash
                       : chain_next(parent, meta.tokens.data() + i * c, c, worst);
    own = own && chunk.provenance == worst;
    if (worst == Provenance::kExact) {
      planned.existing = ledger.find(planned.hash, parent, meta.tokens.data() + i * c, c);
    }
    if (planned.existing) {
      const ChunkRecord& record = ledger[*planned.existing];
      new_homes += record.references == 0 && record.needs_home() ? 1 : 0;
    } else {
      ++fresh;
    }
    parent = planned.hash;
    plan.push_back(planned);
  }
  if (new_homes > 0) require_homes(new_homes, "restore");
  const int64_t summaries_taken = referenced_homes + reserved_homes + restored_records;
  if (summaries_taken + new_homes + fresh > summary_slots.slots()) {
    throw CapacityError(str("restore: summaries of ", fresh, " more chunks need ",
                            fresh * summary_slot_bytes, " bytes beside the ", summaries_taken,
                            " in use; raise summary_bytes, which is ",
                            summary_slots.slots() * summary_slot_bytes));
  }
  if (partial) require_blocks(1, "restore");

  // References first, so that taking a block or a summary slot cannot forget what the plan shares.
  Sequence& sequence = create_sequence(salt);
  const SequenceId id = sequence.id;
  std::optional<BlockId> tail_block;
  try {
    for (const Planned& planned : plan) {
      if (planned.existing) add_reference(*planned.existing);
    }
    if (partial) {
      tail_block = acquire_block();
      backend->load([&](std::byte* out) { reader->read_chunk(sealed, out); }, *tail_block);
    }
  } catch (...) {
    if (tail_block) free_block(*tail_block);
    for (const Planned& planned : plan) {
      if (planned.existing) release(*planned.existing);
    }
    sequences.erase(id.value());
    throw;
  }
  ledger.expect(fresh + 1);
  sequence.sealed.reserve(static_cast<size_t>(sealed));
  sequence.tokens = TokenLog(part_of(shared, meta.tokens).first(static_cast<size_t>(length)));
  sequence.length = length;
  sequence.provenance =
      partial ? std::max(worst, meta.chunks[static_cast<size_t>(sealed)].provenance) : worst;
  for (int64_t i = 0; i < sealed; ++i) {
    const Planned& planned = plan[static_cast<size_t>(i)];
    const double score =
        meta.hints.qk_score.empty() ? 0 : meta.hints.qk_score[static_cast<size_t>(i)];
    RecordId record_id;
    if (planned.existing) {
      record_id = *planned.existing;
      ChunkRecord& record = ledger[record_id];
      if (record.damaged) {  // a sound copy of the same file, for all we know
        record.source = reader;
        record.source_chunk = i;
        record.damaged = false;
      }
    } else {
      const SlotId summary = take_summary_slot();
      record_id = ledger.create(ChunkState::kSealed);
      ChunkRecord& record = ledger[record_id];
      record.provenance = planned.provenance;
      record.references = 1;
      record.index = i;
      record.source = reader;
      record.source_chunk = i;
      record.summary = summary;
      record.summary_pending = true;
      record.hash = planned.hash;
      record.parent = planned.parent;
      record.tokens = part_of(shared, meta.tokens.data() + i * c, static_cast<size_t>(c));
      record.checksums = part_of(shared, meta.chunks[static_cast<size_t>(i)].slice_checksum);
      record.score = score;
      ++restored_records;
      if (planned.provenance == Provenance::kExact) ledger.publish(record_id);
    }
    const ChunkRecord& record = ledger[record_id];
    if (record.summary_pending) sequence.summaries_loaded = false;
    sequence.sealed.push_back({record_id, score, 0, 0, 0});
  }
  if (partial) {
    const RecordId tail = ledger.create(ChunkState::kOpen);
    ledger[tail].references = 1;
    ledger[tail].index = sealed;
    ledger[tail].block = *tail_block;
    sequence.frontier.push_back({tail, 0, 0, 0, 0});
  }
  return id;
}

}  // namespace kvpager
