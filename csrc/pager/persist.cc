// Save and restore. A snapshot holds chunks, summaries and token ids; nothing of the pager's
// history.
#include <algorithm>
#include <cstring>
#include <map>

#include "core/chain_hash.h"
#include "kvpager/error.h"
#include "pager/impl.h"

namespace kvpager {

int64_t Pager::Impl::save(SequenceId id, const std::string& path, const std::string& fingerprint,
                          const std::string& session) {
  Sequence& sequence = find(id);
  require_idle(sequence, "save");
  if (sequence.length == 0)
    throw InvalidArgumentError("save: the sequence is empty, there is nothing to save");
  load_summaries(sequence);
  SnapshotMeta meta;
  meta.layout = layout;
  meta.scorer = options.scorer;
  meta.summary_page_bytes = summary_page_bytes;
  meta.fingerprint = fingerprint;
  meta.session = session;
  meta.tokens = sequence.tokens;

  SnapshotWriter writer(path, layout);
  std::vector<std::byte> buffer(static_cast<size_t>(layout.chunk_bytes()));
  for (int64_t c = 0; c < sequence.sealed_chunks(); ++c) {
    const ChunkUse& use = sequence.use(c);
    const ChunkRecord& record = ledger[use.record];
    const std::byte* bytes = address(record);
    if (bytes == nullptr) {
      read_chunk(record, buffer.data());
      bytes = buffer.data();
    }
    writer.add_chunk(bytes);
    meta.chunks.push_back({layout.chunk_tokens, record.provenance, record.hash, record.checksums});
    meta.hints.qk_score.push_back(use.qk_score);
    meta.hints.last_use.push_back(clock -
                                  std::min(clock, use.last_use));  // age: the clock is not saved
  }
  if (!sequence.frontier.empty()) {
    const int32_t valid = static_cast<int32_t>(sequence.length % layout.chunk_tokens);
    std::memcpy(buffer.data(), pool.slot(ledger[sequence.frontier[0].record].block.value()),
                buffer.size());
    zero_rows_after(layout, buffer.data(), valid);
    SnapshotChunk tail{valid, sequence.provenance, {}, {}};
    for (int layer = 0; layer < layout.layers; ++layer) {
      tail.slice_checksum.push_back(
          slice_checksum(buffer.data() + layout.slice_offset(layer), layout.slice_bytes()));
    }
    writer.add_chunk(buffer.data());
    meta.chunks.push_back(std::move(tail));
    meta.hints.qk_score.push_back(0);
    meta.hints.last_use.push_back(0);
  }
  for (const ChunkUse& use : sequence.sealed) {
    writer.add_summary(summaries.slot(ledger[use.record].summary.value()), summaries.slot_bytes());
  }
  return writer.finish(meta);
}

// Brings the summaries a restore left in the file, one read per snapshot. Invariant 9: after this
// no sealed chunk of the sequence is without one.
void Pager::Impl::load_summaries(Sequence& sequence) {
  if (sequence.summaries_loaded) return;
  std::map<SnapshotReader*, std::vector<std::byte>> files;
  for (const ChunkUse& use : sequence.sealed) {
    const ChunkRecord& record = ledger[use.record];
    if (record.summary_pending) files[record.source.get()];
  }
  for (auto& [reader, bytes] : files) {
    bytes.resize(static_cast<size_t>(reader->meta().sealed_chunks() * summaries.slot_bytes()));
    reader->read_summaries(bytes.data());
  }
  for (const ChunkUse& use : sequence.sealed) {
    ChunkRecord& record = ledger[use.record];
    if (!record.summary_pending) continue;
    const std::vector<std::byte>& bytes = files[record.source.get()];
    std::memcpy(summaries.slot(record.summary.value()),
                bytes.data() + record.source_chunk * summaries.slot_bytes(),
                static_cast<size_t>(summaries.slot_bytes()));
    record.summary_pending = false;
  }
  sequence.summaries_loaded = true;
}

SequenceId Pager::Impl::restore(std::shared_ptr<SnapshotReader> reader, const std::string& salt,
                                Provenance provenance, const std::string& file_namespace) {
  const SnapshotMeta& meta = reader->meta();
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
  const int64_t c = layout.chunk_tokens;
  const int64_t sealed = meta.sealed_chunks();
  const bool partial = static_cast<int64_t>(meta.chunks.size()) > sealed;

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
                            fresh * summaries.slot_bytes(), " bytes beside the ", summaries_taken,
                            " in use; raise summary_bytes, which is ",
                            summaries.slots() * summaries.slot_bytes()));
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
      reader->read_chunk(sealed, pool.slot(tail_block->value()));
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
  sequence.tokens = meta.tokens;
  sequence.length = static_cast<int64_t>(meta.tokens.size());
  sequence.provenance = partial ? std::max(worst, meta.chunks.back().provenance) : worst;
  for (int64_t i = 0; i < sealed; ++i) {
    const Planned& planned = plan[static_cast<size_t>(i)];
    const double score =
        meta.hints.qk_score.empty() ? 0 : meta.hints.qk_score[static_cast<size_t>(i)];
    RecordId record_id;
    if (planned.existing) {
      record_id = *planned.existing;
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
      record.tokens.assign(meta.tokens.begin() + i * c, meta.tokens.begin() + (i + 1) * c);
      record.checksums = meta.chunks[static_cast<size_t>(i)].slice_checksum;
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
