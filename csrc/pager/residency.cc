#include "pager/residency.h"

#include <cstring>
#include <set>
#include <string>
#include <utility>

#include "kvpager/error.h"
#include "kvpager/require.h"

namespace kvpager {

Residency::Residency(const PagerParts& parts, Eviction::Sheltered sheltered)
    : PagerParts(parts),
      budget_(config_),
      blocks_(config_.slots.pool, config_.options.shuffle_seed),
      host_slots_(config_.slots.host, config_.options.shuffle_seed),
      disk_slots_(config_.slots.disk, config_.options.shuffle_seed),
      summary_slots_(config_.slots.summaries, config_.options.shuffle_seed),
      eviction_(config_, ledger_, backend_, std::move(sheltered)) {}

RecordId Residency::create_open(int64_t index, BlockId block) {
  const RecordId id = ledger_.create(ChunkState::kOpen);
  ChunkRecord& record = ledger_[id];
  record.references = 1;
  record.index = index;
  record.block = block;
  return id;
}

RecordId Residency::create_restored(const std::shared_ptr<SnapshotReader>& reader, int64_t in_file,
                                    SlotId summary) {
  const RecordId id = ledger_.create(ChunkState::kSealed);
  ChunkRecord& record = ledger_[id];
  record.references = 1;
  set_source(&record, reader, in_file);
  record.summary = summary;
  record.summary_pending = true;
  ++budget_.restored;
  return id;
}

// Token ids and checksums are views that the reader keeps, without a count for each: there are thousands
// of records.
void Residency::set_source(ChunkRecord* record, const std::shared_ptr<SnapshotReader>& reader,
                           int64_t in_file) {
  const SnapshotMeta& meta = reader->meta();
  const auto c = static_cast<size_t>(meta.layout.chunk_tokens);
  record->source = reader;
  record->source_chunk = in_file;
  record->tokens = meta.tokens.borrow(static_cast<size_t>(in_file) * c, c);
  record->checksums = meta.chunks[static_cast<size_t>(in_file)].slice_checksum.borrow();
}

void Residency::add_reference(RecordId id) {
  ChunkRecord& record = ledger_[id];
  if (record.references++ > 0) return;
  if (record.needs_home()) ++budget_.referenced;
  if (record.cached) ledger_.uncache(id);
}

void Residency::release(RecordId id) {
  ChunkRecord& record = ledger_[id];
  if (--record.references > 0) return;
  if (record.needs_home()) --budget_.referenced;
  // Kept for prefix reuse: exact, findable, and with a home of its own.
  if (record.needs_home() && ledger_.published(id)) {
    record.score = 0;  // a closed sequence has no say in later evictions
    record.last_use = clock_;
    eviction_.invalidate();
    // A chain is released from its end on, and what was released first is forgotten first: a child never
    // stays behind without its parent, where it could not be found. Behind a window the first chunks go
    // first: the others are found without them.
    ledger_.cache(id);
    return;
  }
  drop(id);
}

void Residency::release_and_forget(RecordId id) {
  ChunkRecord& record = ledger_[id];
  if (--record.references > 0) return;
  if (record.needs_home()) --budget_.referenced;
  forget(id);
}

void Residency::forget(RecordId id) {
  if (ledger_[id].on_host()) backend_.discard(ledger_[id].host);
  drop(id);
}

void Residency::drop(RecordId id) {
  ChunkRecord& record = ledger_[id];
  if (record.resident()) free_block(std::exchange(record.block, BlockId()));
  if (record.on_host()) free_host_slot(std::exchange(record.host, SlotId()));
  if (record.on_disk()) disk_slots_.give_back(std::exchange(record.disk, SlotId()));
  if (record.summary.value() >= 0) free_summary(std::exchange(record.summary, SlotId()));
  if (record.source != nullptr) --budget_.restored;
  if (record.paged_out) --budget_.paged_out;
  ledger_.drop(id);
}

const SharedArray<uint64_t>& Residency::checksums(RecordId id) {
  ChunkRecord& record = ledger_[id];
  if (record.checksums.empty()) {
    record.checksums =
        slice_checksums(layout_, backend_.view(record, 0, layout_.chunk_bytes()), threads_);
  }
  return record.checksums;
}

// A save must never make a forward wait for room: only homes are lent, which no other chunk can be
// given; blocks, which may be evicted, and host copies, which give way to homes, are copied.
const std::byte* Residency::lend(RecordId id, std::byte* scratch) {
  ChunkRecord& record = ledger_[id];
  if (const std::byte* home = backend_.home(record)) {
    ++record.borrows;
    return home;
  }
  const std::byte* bytes = backend_.view(record, 0, layout_.chunk_bytes());
  if (bytes == nullptr) return nullptr;
  std::memcpy(scratch, bytes, static_cast<size_t>(layout_.chunk_bytes()));
  return scratch;
}

Home Residency::allocate_home() {
  if (config_.blocks_are_homes()) return {};
  for (;;) {
    if (const auto slot = host_slots_.take()) return {*slot, SlotId()};
    if (drop_host_copy(HostReaders::kAll)) continue;
    if (disk_slots_.free() > 0 && spill_one(HostReaders::kAll)) continue;
    if (const auto slot = disk_slots_.take()) return {SlotId(), *slot};
    if (!reclaim_cached()) {
      throw CapacityError("no home is free for a sealed chunk, though one was reserved");
    }
  }
}

void Residency::free_home(const Home& home) {
  if (home.host.value() >= 0) free_host_slot(home.host);
  if (home.disk.value() >= 0) disk_slots_.give_back(home.disk);
}

void Residency::set_home(RecordId id, const Home& home) {
  ChunkRecord& record = ledger_[id];
  KVPAGER_REQUIRE(record.needs_home() && record.references > 0 && !record.has_lower_copy());
  record.host = home.host;
  record.disk = home.disk;
  ++budget_.referenced;
  if (record.has_lower_copy()) counters_.bytes_written_through += layout_.chunk_bytes();
}

void Residency::heal_by_home(RecordId id, const Home& home, SharedArray<TokenId> tokens,
                             SharedArray<uint64_t> checksums) {
  ChunkRecord& record = ledger_[id];
  if (record.source == nullptr) {
    free_home(home);  // another sequence of this forward has healed it
    return;
  }
  record.source.reset();
  record.source_chunk = -1;
  record.tokens = std::move(tokens);  // no longer the snapshot's
  record.checksums = std::move(checksums);
  record.damaged = false;
  record.summary_pending = false;
  if (record.on_host()) {
    free_home(home);
  } else {
    record.host = home.host;
    record.disk = home.disk;
  }
  --budget_.restored;
  ++budget_.referenced;
  ++counters_.chunks_healed;
  if (record.has_lower_copy()) counters_.bytes_written_through += layout_.chunk_bytes();
}

void Residency::heal_by_source(RecordId id, const std::shared_ptr<SnapshotReader>& reader,
                               int64_t in_file) {
  ChunkRecord& record = ledger_[id];
  if (record.on_disk()) {
    disk_slots_.give_back(std::exchange(record.disk, SlotId()));
    --budget_.referenced;
    ++budget_.restored;
  }
  set_source(&record, reader, in_file);
  record.damaged = false;
}

// Forgets the chunk that no sequence has used for longest.
bool Residency::reclaim_cached() {
  const auto oldest = ledger_.oldest_cached();
  if (!oldest) return false;
  drop(*oldest);
  ++counters_.chunks_forgotten;
  return true;
}

SlotId Residency::allocate_summary() {
  do {
    if (const auto slot = summary_slots_.take()) return *slot;
  } while (reclaim_cached());
  throw CapacityError(str("no summary slot is free: summary_bytes=",
                          config_.slots.summaries * config_.summary_slot_bytes, " is full"));
}

void Residency::add_to(PagerStats* stats) const {
  stats->pool_blocks = blocks_.slots();
  stats->free_blocks = blocks_.free();
  stats->resident_bytes = blocks_.used() * layout_.chunk_bytes();
  stats->host_bytes_used = host_slots_.used() * layout_.chunk_bytes();
  stats->disk_bytes = disk_slots_.slots() * layout_.chunk_bytes();
  stats->disk_bytes_used = disk_slots_.used() * layout_.chunk_bytes();
  stats->summary_bytes_used = summary_slots_.used() * config_.summary_slot_bytes;
  stats->chunk_bytes = layout_.chunk_bytes();
  stats->summary_bytes_per_chunk = config_.summary_slot_bytes;
  stats->records = ledger_.live();
  stats->cached_records = ledger_.cached();
  stats->reserved_chunks = budget_.reserved;
  stats->eviction_orders_made = eviction_.orders_made();
  stats->home_chunks = config_.home_capacity();
  stats->home_chunks_used = budget_.referenced + budget_.paged_out;
  std::set<SnapshotReader*> readers;
  ledger_.each([&](RecordId, const ChunkRecord& record) {
    stats->open_blocks += record.state == ChunkState::kOpen && record.resident() ? 1 : 0;
    stats->pinned_blocks += record.pins > 0 && record.resident() ? 1 : 0;
    if (record.source != nullptr) readers.insert(record.source.get());
  });
  for (const SnapshotReader* reader : readers) {
    stats->snapshot_bytes_read += reader->payload_bytes_read();
  }
}

}  // namespace kvpager
