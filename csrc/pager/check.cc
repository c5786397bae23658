// The numbered invariants (DESIGN.md), each restated by the class whose state it is about.
#include <map>
#include <ostream>
#include <set>

#include "kvpager/error.h"
#include "pager/residency.h"
#include "pager/running_forward.h"
#include "pager/sequences.h"

namespace kvpager {

namespace {

// The parts of a message are put together only where an invariant does not hold: checking builds come
// here with every chunk after every change.
template <typename... Parts>
void require(bool holds, int number, const Parts&... what) {
  if (!holds) throw InvariantError(str("invariant ", number, ": ", what...));
}

struct RecordLabel {
  RecordId id;
  int64_t chunk;
};

std::ostream& operator<<(std::ostream& out, const RecordLabel& of) {
  return out << "record " << of.id.value() << " (chunk " << of.chunk << ")";
}

struct ChunkLabel {
  int64_t sequence;
  int64_t chunk;
};

std::ostream& operator<<(std::ostream& out, const ChunkLabel& of) {
  return out << "sequence " << of.sequence << " chunk " << of.chunk;
}

struct SequenceLabel {
  int64_t sequence;
};

std::ostream& operator<<(std::ostream& out, const SequenceLabel& of) {
  return out << "sequence " << of.sequence;
}

}  // namespace

void Residency::check_invariants() const {
  check_slots();
  check_cached();
  eviction_.check_invariants();
  int64_t homes = 0;
  int64_t restored = 0;
  int64_t paged_out = 0;
  int64_t held = 0;
  ledger_.each([&](RecordId id, const ChunkRecord& record) {
    check_record(id, record);
    if (record.held()) ++held;
    if (record.needs_home() && record.references > 0) ++homes;
    if (record.source != nullptr) ++restored;
    if (record.paged_out) ++paged_out;
  });
  require(held == ledger_.held(), 3, "the records that stay in their blocks are miscounted");
  require(blocks_.slots() == config_.slots.pool, 2, "the pool is not the size it was given");
  require(
      homes == budget_.referenced && restored == budget_.restored && paged_out == budget_.paged_out,
      2, "home counts do not add up");
  const int64_t taken = budget_.referenced + budget_.reserved;
  require(budget_.homes_left() >= 0, 2, "more homes promised than there are");
  require(taken + budget_.restored <= summary_slots_.slots(), 2,
          "more summaries promised than there are");
}

// 1. Every block is in exactly one place. 2. Every budget is a sum over records.
void Residency::check_slots() const {
  std::vector<int> owners(static_cast<size_t>(blocks_.slots()), 0);
  std::set<int32_t> host;
  std::set<int32_t> disk;
  std::set<int32_t> summaries;
  int64_t resident = 0;
  ledger_.each([&](RecordId id, const ChunkRecord& record) {
    const RecordLabel name{id, record.index};
    if (record.resident()) {
      require(blocks_.taken(record.block), 1, name, " owns a block that is free");
      require(++owners[static_cast<size_t>(record.block.value())] == 1, 1, "block ",
              record.block.value(), " has two owners");
      ++resident;
    }
    if (record.on_host()) {
      require(host.insert(record.host.value()).second, 2, name, " shares a host slot");
    }
    if (record.on_disk()) {
      require(disk.insert(record.disk.value()).second, 2, name, " shares a disk slot");
    }
    if (record.state == ChunkState::kSealed) {
      require(record.summary.value() >= 0, 9, name, " is sealed without a summary");
      require(summaries.insert(record.summary.value()).second, 9, name, " shares a summary");
    }
  });
  require(resident == blocks_.used(), 1, "a block is taken but no record owns it");
  require(static_cast<int64_t>(host.size()) == host_slots_.used(), 2, "a host slot leaked");
  require(static_cast<int64_t>(disk.size()) == disk_slots_.used(), 2, "a disk slot leaked");
  require(static_cast<int64_t>(summaries.size()) == summary_slots_.used(), 2,
          "a summary slot leaked");
}

void Residency::check_cached() const {
  int64_t cached = 0;
  ledger_.each([&](RecordId, const ChunkRecord& record) { cached += record.cached ? 1 : 0; });
  int64_t listed = 0;
  for (auto id = ledger_.oldest_cached(); id && listed <= cached; ++listed) {
    const RecordId newer = ledger_[*id].newer;
    require(ledger_[*id].cached, 1, "a record in use is listed as cached");
    id = newer.value() >= 0 ? std::optional(newer) : std::nullopt;
  }
  require(listed == cached && cached == ledger_.cached(), 1,
          "the list of cached records is broken");
}

void Residency::check_record(RecordId id, const ChunkRecord& record) const {
  const RecordLabel name{id, record.index};
  if (record.state == ChunkState::kOpen) {
    require(record.references == 1 && record.source == nullptr, 1, name,
            " is open but not private");
    require(record.paged_out ? !record.resident() && record.on_host() != record.on_disk()
                             : record.resident() && !record.has_lower_copy(),
            1, name, " is open but neither in a block nor paged out");
    require(record.summary.value() < 0, 9, name, " is open but has a summary");
  } else {
    require(record.resident() || record.has_lower_copy(), 1, name, " has no copy anywhere");
    require(!record.summary_pending || record.source != nullptr, 9, name,
            " waits for a summary no file has");
    const bool put_off = record.checksums.empty() && record.in_memory();
    require((put_off || static_cast<int64_t>(record.checksums.size()) == layout_.layers) &&
                static_cast<int64_t>(record.tokens.size()) == layout_.chunk_tokens,
            9, name, " is sealed without checksums or token ids");
    require(!ledger_.published(id) || record.provenance == Provenance::kExact, 10, name,
            " is not exact but can be found as if it were");
  }
  require(record.pins == 0 || record.resident(), 3, name, " is pinned but not resident");
  require(record.borrows == 0 || record.home_on_host() ||
              (record.resident() && !record.has_lower_copy()),
          5, name, " was lent to a save and has moved");
  require(!record.damaged || record.on_disk() || record.source != nullptr, 9, name,
          " is damaged but neither on disk nor in a snapshot");
  if (record.source != nullptr) {
    const TokenId* theirs = record.source->meta().tokens.data();
    require(record.tokens.data() == theirs + record.source_chunk * layout_.chunk_tokens, 9, name,
            " has token ids that its snapshot does not keep");
  } else if (record.state == ChunkState::kSealed) {
    require(!record.tokens.watch().expired(), 9, name, " has token ids that nobody keeps");
  }
  require(record.cached == (record.references == 0), 1, name,
          " is used by nobody and not cached, or the other way around");
}

void Sequences::check_invariants() const {
  std::map<int32_t, int32_t> references;
  std::map<int32_t, int32_t> pins;
  int64_t reserved = 0;
  for (const auto& [key, sequence] : sequences_) {
    check(sequence);
    for (int64_t i = sequence.released; i < sequence.chunks(); ++i) {
      const ChunkUse& use = sequence.use(i);
      ++references[use.record.value()];
      pins[use.record.value()] += use.pins;
    }
    reserved += sequence.reserved;
  }
  require(reserved == residency_.budget().reserved, 2, "reserved homes do not add up");
  ledger_.each([&](RecordId id, const ChunkRecord& record) {
    require(references[id.value()] == record.references, 1, "record ", id.value(), " counts ",
            record.references, " references, has ", references[id.value()]);
    require(pins[id.value()] == record.pins, 3, "record ", id.value(),
            " has the wrong number of pins");
  });
}

void Sequences::check(const Sequence& sequence) const {
  const SequenceLabel name{sequence.id.value()};
  const int64_t c = layout_.chunk_tokens;
  require(sequence.sealed_chunks() == sequence.length / c, 6, name,
          " has the wrong number of sealed chunks");
  require(static_cast<int64_t>(sequence.tokens.size()) == sequence.length, 6, name,
          " has the wrong number of token ids");
  require(sequence.part >= 0 ||
              static_cast<int64_t>(sequence.frontier.size()) == (sequence.length % c == 0 ? 0 : 1),
          14, name, " keeps frontier chunks outside a forward");
  int64_t released = 0;
  for (const int64_t of_one : sequence.released_worth) released += of_one;
  require(sequence.released == 0 || sequence.frozen ||  // to which no row comes
              (options_.window > 0 && earliest_trim(sequence) <= sequence.length),
          16, name, " has let go of what its window shows");
  require(released == sequence.released && sequence.released_provenance() <= sequence.provenance,
          10, name, " does not know what its released chunks were worth");
  require(sequence.released > 0 || sequence.base.empty(), 10, name,
          " begins after a chunk that it never had");
  check_chunks(sequence);
}

void Sequences::check_chunks(const Sequence& sequence) const {
  const int64_t c = layout_.chunk_tokens;
  ChunkName previous = sequence.base;
  for (int64_t i = sequence.released; i < sequence.chunks(); ++i) {
    const ChunkUse& use = sequence.use(i);
    const ChunkRecord& record = ledger_[use.record];
    const bool sealed = i < sequence.sealed_chunks();
    const ChunkLabel name{sequence.id.value(), i};
    require(record.state == (sealed ? ChunkState::kSealed : ChunkState::kOpen), 6, name,
            " is in the wrong state");
    require(!record.summary_pending || !sequence.summaries_loaded, 9, name,
            " takes its summary for loaded, but it is still in the snapshot");
    require(record.index == i, 9, name, " is another chunk's record");
    if (!sealed) continue;
    require(sequence.tokens.equals(static_cast<size_t>(i * c), record.tokens.data(),
                                   record.tokens.size()),
            10, name, " holds other tokens");
    require(record.provenance <= sequence.provenance, 10, name,
            " is worth less than its sequence says");
    if (!record.name_checked) {  // once: it is made again from the one before, for each chunk
      require(
          record.name == sequence.namer.next(previous, record.tokens.data(), c, record.provenance),
          10, name, " has another name than its tokens and the chunks before give");
      record.name_checked = true;
    }
    require(record.previous == previous, 10, name, " was computed after another text");
    previous = record.name;
  }
}

void RunningForward::check_invariants() const {
  for (const auto& [key, sequence] : sequences_.all()) {
    const auto part = static_cast<size_t>(sequence.part);
    require(sequence.part < 0 || (forward_ && forward_->parts[part].sequence == &sequence), 14,
            "sequence ", key, " takes part in a forward that does not run");
  }
  ledger_.each([&](RecordId id, const ChunkRecord& record) {
    require(record.readers == 0 || forward_ != nullptr, 5, RecordLabel{id, record.index},
            " is being read outside a forward");
  });
}

}  // namespace kvpager
