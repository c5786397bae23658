#include <algorithm>
#include <atomic>
#include <cstring>
#include <memory>

#include "kvpager/error.h"
#include "pager/residency.h"

namespace kvpager {
namespace {

// Neighbours in one snapshot, whose summaries are one read.
struct SummaryRun {
  SnapshotReader* reader;
  int64_t first;  // in the snapshot
  std::vector<ChunkRecord*> records;
  size_t first_room = 0;  // of the places that the backend has for all of them
};

// What is read and verified at a time: it is still in the cache when it is hashed.
constexpr int64_t kSummaryReadBytes = int64_t{1} << 20;

// Of the records whose summary is still in its snapshot.
std::vector<SummaryRun> pending_runs(Ledger& ledger, const std::vector<RecordId>& ids,
                                     int64_t summary_bytes) {
  const size_t longest =
      static_cast<size_t>(std::max<int64_t>(1, kSummaryReadBytes / summary_bytes));
  std::vector<SummaryRun> runs;
  size_t room = 0;
  for (const RecordId id : ids) {
    ChunkRecord& record = ledger[id];
    if (!record.summary_pending) continue;
    const bool next = !runs.empty() && runs.back().reader == record.source.get() &&
                      runs.back().records.size() < longest &&
                      runs.back().records.back()->source_chunk + 1 == record.source_chunk;
    if (!next) runs.push_back({record.source.get(), record.source_chunk, {}, room});
    runs.back().records.push_back(&record);
    ++room;
  }
  return runs;
}

// Whether the places of summaries [first, first + count) lie behind each other.
bool contiguous(const std::vector<std::byte*>& room, size_t first, size_t count, int64_t each) {
  for (size_t i = 1; i < count; ++i) {
    if (room[first + i] != room[first] + static_cast<int64_t>(i) * each) return false;
  }
  return true;
}

}  // namespace

void Residency::load_summaries(const std::vector<RecordId>& ids) {
  const int64_t each = config_.summary_slot_bytes;
  const std::vector<SummaryRun> runs = pending_runs(ledger_, ids, each);
  std::vector<SlotId> slots;
  for (const SummaryRun& run : runs) {
    for (const ChunkRecord* record : run.records) slots.push_back(record->summary);
  }
  const std::vector<std::byte*> room = backend_.summary_room(slots);
  std::atomic<int64_t> rebuilt{0};
  threads_.run(static_cast<int64_t>(runs.size()), [&](int64_t i, int) {
    const SummaryRun& run = runs[static_cast<size_t>(i)];
    const auto count = static_cast<int64_t>(run.records.size());
    const bool straight = contiguous(room, run.first_room, run.records.size(), each);
    std::unique_ptr<std::byte[]> scratch;
    if (!straight) scratch.reset(new std::byte[static_cast<size_t>(count * each)]);
    std::byte* bytes = straight ? room[run.first_room] : scratch.get();
    try {
      run.reader->read_summaries(run.first, count, bytes);
    } catch (const CorruptSnapshotError&) {
      rebuilt += read_or_rebuild(run.reader, run.first, run.records, bytes);
    }
    if (straight) return;
    for (int64_t c = 0; c < count; ++c) {
      std::memcpy(room[run.first_room + static_cast<size_t>(c)], bytes + c * each,
                  static_cast<size_t>(each));
    }
  });
  backend_.summaries_written(slots);
  counters_.summaries_rebuilt += rebuilt;
  for (const SummaryRun& run : runs) {
    for (ChunkRecord* record : run.records) record->summary_pending = false;
  }
}

// Summaries one by one; those that are damaged are made again from the chunk's payload. The checksum
// in the ledger section proves that they are what was saved.
int64_t Residency::read_or_rebuild(SnapshotReader* reader, int64_t first,
                                   const std::vector<ChunkRecord*>& records, std::byte* out) const {
  const int64_t each = config_.summary_slot_bytes;
  std::vector<std::byte> chunk(static_cast<size_t>(layout_.chunk_bytes()));
  int64_t rebuilt = 0;
  for (size_t i = 0; i < records.size(); ++i) {
    const int64_t index = first + static_cast<int64_t>(i);
    std::byte* summary = out + static_cast<int64_t>(i) * each;
    try {
      reader->read_summaries(index, 1, summary);
    } catch (const CorruptSnapshotError& error) {
      files_.read_chunk(*records[i], chunk.data());
      // One by one: this runs on a thread of the pool already.
      for (int64_t page = 0; page < int64_t{layout_.layers} * layout_.kv_heads; ++page) {
        config_.summarize_page(chunk.data(), page, summary);
      }
      const auto& saved = reader->meta().chunks[static_cast<size_t>(index)];
      if (slice_checksum(summary, each) != saved.summary_checksum) {
        throw damage_of_chunk(error, index, records[i]->index, layout_.chunk_tokens);
      }
      ++rebuilt;
    }
  }
  return rebuilt;
}

}  // namespace kvpager
